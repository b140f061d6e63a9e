"""The stages of a pipeline hold the model's parameters between them, each under its own name, and
run a step one after the other, in graphs or not. Graphs are stand-ins: what would be replayed runs
anew."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from graph_steps import MIXES, Repeats, blocks_each, make_runner, mixed_graphs, plan_of
from paged_driver import load_model
from tiny_models import make_checkpoint

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.parallel.stages import Elsewhere
from penstock.runtime.graphs import DecodeGraphs
from penstock.types.mesh import MeshShape
from penstock.types.step import LateInputs, RanAs


def parameters(folder, number=0, num_stages=1):
    mesh = RankMesh.place(number, MeshShape(pp=num_stages))
    return {name: value.clone() for name, value in load_model(folder, mesh).named_parameters()}


@pytest.mark.parametrize(
    ("arch", "num_stages", "settings"),
    [
        ("llama", 2, {"num_hidden_layers": 3}),
        ("qwen3_moe", 3, {"num_hidden_layers": 5}),
        ("qwen2", 2, {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    ],
)
def test_stages_hold_the_model_between_them(tmp_path, arch, num_stages, settings):
    folder = make_checkpoint(tmp_path, arch, **settings)
    whole = parameters(folder)
    parts = [parameters(folder, number, num_stages) for number in range(num_stages)]
    for part in parts:
        assert all(torch.equal(value, whole[name]) for name, value in part.items())
    names = [name for part in parts for name in part]
    twice = {"embed.weight"} if "tie_word_embeddings" in settings else set()  # also the head's
    assert set(names) == set(whole) and {n for n in names if names.count(n) > 1} == twice
    assert "embed.weight" in parts[0] and "norm.weight" in parts[-1]
    assert "norm.weight" not in parts[0]


def test_a_tensor_that_no_stage_knows_is_refused_all_the_same(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    spec = parse_model_spec(folder, {"num_hidden_layers": 2})
    mesh = RankMesh.place(0, MeshShape(pp=2))
    model = build_model(spec, mesh, torch.float32, torch.device("meta"), get_backend("reference"))
    assert [isinstance(layer, Elsewhere) for layer in model.layers] == [False, True]
    (folder / "config.json").write_text(
        (folder / "config.json")
        .read_text()
        .replace('"num_hidden_layers": 3', '"num_hidden_layers": 2')
    )
    with pytest.raises(ConfigError, match=r"unexpected: model\.layers\.2\."):
        load_model(folder, mesh)


# (row, first token, end); behind a row's text they are decodes.
LENGTHS = {0: 20, 1: 5, 2: 9}
STEPS = [
    [(0, 0, 16)],
    [(1, 0, 5), (0, 16, 20)],
    [(0, 20, 21), (2, 0, 7)],  # a decode beside a chunk that does not sample
    [(0, 21, 22), (1, 5, 6), (2, 7, 9)],
    [(row, end, end + 1) for row, end in ((0, 22), (1, 6), (2, 9))],
]


def stages(folder):
    meshes = [RankMesh.place(number, MeshShape(pp=2)) for number in range(2)]
    made = [make_runner(folder, mesh, MIXES) for mesh in meshes]
    for runner in made:
        runner._cpu_graphs = None  # of one rank
    return made


def with_graphs(runner):
    runner._mixed_graphs = mixed_graphs(runner, 64)
    runner._graphs = DecodeGraphs(runner.decode_step(64), (2, 8), True, runner._rows)
    runner._graphs.capture(Repeats())
    return runner


@pytest.mark.parametrize("arch", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_step_is_the_same_whichever_stages_replay_it(tmp_path, arch, monkeypatch):
    """Hidden states of its tokens go from one to the other, never those of padding."""
    folder = make_checkpoint(tmp_path, arch)
    sent = deque()
    monkeypatch.setattr(dist, "isend", lambda x, dst: sent.append(x.clone()))
    monkeypatch.setattr(dist, "recv", lambda x, src: x.copy_(sent.pop()))
    lines = []
    for graphs in ((False, False), (True, True), (True, False), (False, True)):
        line = zip(stages(folder), graphs, strict=True)
        lines.append([with_graphs(stage) if has else stage for stage, has in line])
    whole, random = make_runner(folder), np.random.default_rng(0)
    text = {row: random.integers(3, 90, num, np.int32) for row, num in LENGTHS.items()}
    newest = np.zeros(len(text), np.int32)  # by row
    for number, parts in enumerate(STEPS):
        plan = plan_of(number, text, parts, blocks_each(whole))
        whole.forward(plan)
        want_LV, messages = whole._forwarded[number].logits_LV, []
        expected = whole.sample(number, LateInputs()).wait()
        fed = newest[plan.rows[: plan.num_decodes], None]
        for first, last in lines:
            for runner in (first, last):
                runner.forward(replace(plan, decode_tokens=fed))
                ran_as = RanAs.EAGER if runner._graphs is None else RanAs.GRAPH
                assert runner._forwarded[number].ran_as is ran_as
                if runner is first:
                    messages.append(sent[-1])
            got_LV = last._forwarded[number].logits_LV
            if len(want_LV):
                torch.testing.assert_close(got_LV, want_LV, atol=1e-5, rtol=1e-5)
            assert (last.sample(number, LateInputs()).wait().token_ids == expected.token_ids).all()
            first.sample(number, LateInputs())
        assert all(len(message) == plan.num_tokens.sum() for message in messages)
        for message in messages[1:]:
            torch.testing.assert_close(message, messages[0], atol=1e-5, rtol=1e-5)
        sampled = np.flatnonzero(expected.num_accepted)
        newest[plan.rows[sampled]] = expected.token_ids[sampled, 0]


def test_a_stage_behind_others_holds_room_for_what_its_graphs_read(tmp_path):
    """Allocated with the rows, so that the profile of memory has seen it."""
    first, last = stages(make_checkpoint(tmp_path, "llama"))
    assert first._link._held_PE.nbytes == 0
    most = max(map(sum, MIXES))
    assert last._link._held_PE.nbytes == most * last._model.hidden_states[0] * 4  # float32
