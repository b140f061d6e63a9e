"""What a start on a GPU runs ahead, so that no kernel is compiled while somebody waits.

Run here on a CPU, which has no kernels to compile: shown is that every step and every way to a
token is run. That none is missing: `tests/engine/test_kernels_before_serving.py`.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.resolve import resolve
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.model_loader import load_model, most_weight_bytes
from penstock.runtime.profile_steps import eager_decodes, eager_sizes, largest_step, short_steps
from penstock.runtime.rank import load_rank, trial_cache, wire_runner
from penstock.runtime.timeline import Timeline
from penstock.runtime.warmup import run_decodes, run_sizes, run_steps, warm_up_sampling
from penstock.sampling import logits_processors, sampler
from penstock.types.model_spec import ModelSpec
from penstock.types.step import LateInputs

SIBLINGS = Path(__file__).parents[2] / "siblings"


def resolved(folder: Path, **settings: Any) -> tuple[RunConfig, ModelSpec]:
    spec = parse_model_spec(folder)
    asked = EngineConfig(model=str(folder), device="cpu", **settings)
    return resolve(asked, spec, probe(), str(folder)), spec


def test_every_combination_of_sampling_kernels_is_warmed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, spec = resolved(local_folder("tiny"), dtype="bfloat16", max_batch_size=4)
    loaded = load_rank(config, spec, RankMesh.single(), Timeline())
    seen = set()
    for module, name in (
        (sampler, "argmax"),
        (sampler, "gumbel_argmax"),
        (logits_processors, "filter_thresholds"),
        (logits_processors, "apply_penalties"),
        (logits_processors, "apply_bitmask"),
    ):

        def noted(logits_LV, *rest, name=name, op=getattr(module, name)):
            has_threshold = name == "gumbel_argmax" and rest[-1] is not None
            seen.add((name, logits_LV.dtype, has_threshold))
            return op(logits_LV, *rest)

        monkeypatch.setattr(module, name, noted)
    warm_up_sampling(loaded.model, loaded.mesh, loaded.device, config, spec)
    dtypes = (torch.bfloat16, torch.float32)
    kinds = (("argmax", False), ("gumbel_argmax", False), ("gumbel_argmax", True))
    kinds += (("filter_thresholds", False),)
    both = {(name, dtype, has) for (name, has), dtype in itertools.product(kinds, dtypes)}
    processors = {(name, torch.float32, False) for name in ("apply_penalties", "apply_bitmask")}
    assert seen == both | processors


@pytest.mark.parametrize("limits", [(2, 2, 16), (4, 4, 64), (3, 64, 16), (8, 256, 64)], ids=str)
@pytest.mark.parametrize("name", ["tiny", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_steps_at_start_run_within_the_narrowest_limits(
    name: str, limits: tuple[int, int, int]
) -> None:
    """On a cache of two blocks, as in profiling: rows, tokens of a step, of a sequence."""
    folder = local_folder("tiny") if name == "tiny" else SIBLINGS / name
    rows, tokens, length = limits
    config, spec = resolved(
        folder, max_batch_size=rows, max_num_tokens=tokens, max_seq_len=length, load_format="dummy"
    )
    mesh = RankMesh.single()
    loaded = load_rank(config, spec, mesh, Timeline())
    cache = trial_cache(config, loaded.groups)
    runner, state = wire_runner(
        config, spec, loaded.model, loaded.groups, mesh, loaded.device, cache
    )
    for plan in (largest_step(config), *short_steps(config)):
        runner.forward(plan)
        tokens_of_step = runner.sample(plan.step_id, LateInputs()).wait().token_ids
        assert len(tokens_of_step) == plan.num_entries
    length = min(2, tokens // rows)
    assert state.lengths_R[:2].tolist() == [length, length + 1]
    sizes = eager_sizes(config)
    assert all(size <= min(tokens, rows * config.max_seq_len) for size in sizes)
    run_sizes(runner, loaded.model, config, sizes)


@pytest.mark.parametrize("most", [8, 100, 2048, 8192])
def test_sizes_have_one_in_each_range_where_kernels_stay_the_same(most: int) -> None:
    """Ranges end at powers of two times whatever a kernel's threshold is, two of which may meet."""
    config, _ = resolved(
        local_folder("tiny"), max_batch_size=64, max_num_tokens=max(64, most), max_seq_len=512
    )
    config = dataclasses.replace(config, max_num_tokens=most)
    sizes = eager_sizes(config)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] <= most
    for factor in (1.0, 1.2, 1.28, 1.6, 1.8):

        def kind(size: int, factor: float = factor) -> tuple[int, int]:
            return (size - 1).bit_length(), int(size / factor).bit_length()

        wanted = {kind(size) for size in range(1, most + 1)}
        assert wanted <= {kind(size) for size in sizes}, factor


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_next"])
def test_weights_take_no_more_than_is_said_without_a_device(name: str) -> None:
    config, spec = resolved(SIBLINGS / name, load_format="dummy")
    _, _, weights = load_model(config, spec, RankMesh.single(), Timeline())
    assert weights <= most_weight_bytes(config, spec) <= 2 * weights


@pytest.mark.parametrize(
    ("graphs", "has_padding", "eager"),
    [
        ((1, 2, 4, 8), True, ()),
        ((1, 2), True, (3, 4, 5, 6, 7, 8)),
        ((1, 2), False, (1, 2, 3, 4, 5, 6, 7, 8)),
        ((), True, (1, 2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_decodes_that_no_graph_takes(
    graphs: tuple[int, ...], has_padding: bool, eager: tuple[int, ...]
) -> None:
    config, _ = resolved(local_folder("tiny"), max_batch_size=8)
    config = dataclasses.replace(config, graph_batch_sizes=graphs, graph_padding=has_padding)
    assert eager_decodes(config) == eager


def test_a_shortened_model_has_one_layer_of_each_kind() -> None:
    config, spec = resolved(SIBLINGS / "qwen3_next", load_format="dummy")
    model = load_rank(config, spec, RankMesh.single(), Timeline()).model
    layers = list(model.layers)
    with model.shortened():
        kinds = [type(layer.attention) for layer in model.layers]
        assert len(kinds) == len(set(kinds)) == 2 and model.layers[0] is layers[0]
    assert list(model.layers) == layers


def test_layers_that_a_checkpoint_quantizes_differently_are_kinds_of_their_own() -> None:
    config, spec = resolved(local_folder("tiny"), load_format="dummy")
    model = load_rank(config, spec, RankMesh.single(), Timeline()).model
    assert spec.shortened().num_layers == 1 and len(model.layers) > 1
    with model.shortened():
        assert len(model.layers) == 1
    norm = model.layers[1].post_norm
    norm.weight = torch.nn.Parameter(norm.weight.double())
    layers = list(model.layers)
    with model.shortened():
        assert list(model.layers) == layers[:2]


def test_where_tokens_are_drafted_the_step_with_most_logits_is_run() -> None:
    drafting = {"decoding_type": "NGram", "max_draft_len": 3}
    config, spec = resolved(
        SIBLINGS / "qwen3_next", max_batch_size=4, max_num_tokens=32, speculative_config=drafting
    )
    loaded = load_rank(config, spec, RankMesh.single(), Timeline())
    cache = trial_cache(config, loaded.groups)
    parts = (loaded.model, loaded.groups, loaded.mesh, loaded.device, cache)
    runner, rows = wire_runner(config, spec, *parts)
    sizes, logits = [], runner._model.logits

    def noted(hidden_LD: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_LD))
        return logits(hidden_LD)

    runner._model.logits = noted  # type: ignore[method-assign]
    run_steps(runner, config)
    assert max(sizes) == 4 * (1 + 3)
    assert max(eager_decodes(config)) == 4 * (1 + 3)
    run_decodes(runner, loaded.model, rows, 64, [4 * (1 + 3)])
