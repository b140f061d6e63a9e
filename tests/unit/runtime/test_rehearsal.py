"""What a start on a GPU runs ahead, so that no kernel is compiled while somebody waits."""

import itertools
from pathlib import Path

import pytest
import torch

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime import build
from penstock.sampling import sampler, stages
from penstock.types.step import LateInputs

SIBLINGS = Path(__file__).parents[2] / "siblings"


def test_every_way_to_a_token_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = local_folder("tiny")
    spec = parse_model_spec(folder)
    asked = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", max_batch_size=4)
    config = resolve(asked, spec, probe(), str(folder))
    loaded = build.load_rank(config, spec, RankMesh.single(), build.Timeline())
    seen = set()
    for module, name in (
        (sampler, "argmax"),
        (sampler, "gumbel_argmax"),
        (stages, "sampling_cutoffs"),
        (stages, "apply_penalties"),
    ):

        def noted(logits_LV, *rest, name=name, op=getattr(module, name)):
            has_cutoff = name == "gumbel_argmax" and rest[-1] is not None
            seen.add((name, logits_LV.dtype, has_cutoff))
            return op(logits_LV, *rest)

        monkeypatch.setattr(module, name, noted)
    build.rehearse_sampling(loaded, config, spec)
    dtypes = (torch.bfloat16, torch.float32)
    kinds = (("argmax", False), ("gumbel_argmax", False), ("gumbel_argmax", True))
    kinds += (("sampling_cutoffs", False),)
    both = {(name, dtype, has) for (name, has), dtype in itertools.product(kinds, dtypes)}
    assert seen == both | {("apply_penalties", torch.float32, False)}


@pytest.mark.parametrize("limits", [(2, 2, 16), (4, 4, 64), (3, 64, 16), (8, 256, 64)], ids=str)
@pytest.mark.parametrize("name", ["tiny", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_steps_at_start_run_within_the_narrowest_limits(
    name: str, limits: tuple[int, int, int]
) -> None:
    """On a cache of two blocks, as where memory is planned: rows, tokens of a step, of a text."""
    folder = local_folder("tiny") if name == "tiny" else SIBLINGS / name
    spec = parse_model_spec(folder)
    rows, tokens, length = limits
    asked = EngineConfig(
        model=str(folder), device="cpu", max_batch_size=rows, max_num_tokens=tokens,
        max_seq_len=length, load_format="dummy",
    )  # fmt: skip
    config = resolve(asked, spec, probe(), str(folder))
    mesh = RankMesh.single()
    loaded = build.load_rank(config, spec, mesh, build.Timeline())
    blocks = [2] * len(loaded.groups)
    runner, state = build._wire(
        config, spec, loaded.model, loaded.groups, mesh, loaded.device, blocks
    )
    for plan in (build._largest_step(config), *build._short_steps(config)):
        runner.forward(plan)
        tokens_of_step = runner.sample(plan.step_id, LateInputs()).wait().token_ids
        assert len(tokens_of_step) == plan.num_entries
    length = min(2, tokens // rows)
    assert state.lengths_R[:2].tolist() == [length, length + 1]
