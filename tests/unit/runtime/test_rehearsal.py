"""What a start on a GPU runs ahead, so that no kernel is compiled while somebody waits."""

import itertools

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
