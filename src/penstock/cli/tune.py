"""`penstock tune`: time the launch configs of kernels on this GPU and write the best to a file.

The server reads the file at its next start. Nothing is tuned while it runs.
"""

import argparse
from typing import TYPE_CHECKING

from penstock import log
from penstock.errors import PenstockError
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe

if TYPE_CHECKING:
    from penstock.kernels.moe.tuning import Layer
    from penstock.kernels.tuning import Found, Shape
    from penstock.types.model_spec import ModelSpec


def run(args: argparse.Namespace) -> int:
    log.setup("tune")
    if probe().kind != "cuda":
        raise PenstockError("tuning needs a GPU; torch finds none on this machine")
    from penstock.kernels import triton_cache, tuned

    triton_cache.use_cache_folder()
    import torch

    from penstock.kernels import tuning

    shapes = [_shape(name) for name in args.model or tuning.SHAPES]
    chosen = dict.fromkeys(s for shape in shapes for s in tuning.subjects(shape, args.ops))
    jobs = [(subject, config) for subject in chosen for config in tuning.candidates(subject)]
    print(f"compiling {len(jobs)} candidates", flush=True)
    usable = tuning.compile_all(jobs)
    print(f"{len(usable)} of them compile", flush=True)
    found = []
    for subject in chosen:
        tried = [config for of, config in usable if of == subject]
        found.append(tuning.search(subject, tried, torch.device("cuda")))
        _show(found[-1])
    file = args.output or tuned.own_file(probe().name)
    tuning.write(file, found)
    print(f"written to {file}")
    return 0


def _shape(name: str) -> "Shape":
    """Of a known shape by its name, else of a model as `penstock serve` takes it."""
    from penstock.kernels.tuning import SHAPES, Shape
    from penstock.models.spec import parse_model_spec

    if name in SHAPES:
        return SHAPES[name]
    spec = parse_model_spec(local_folder(name, weights=False))
    experts = _experts(spec)
    all_sparse = spec.moe is not None and all(spec.moe.layers)
    return Shape(
        hidden=spec.hidden_size,
        features=0 if all_sparse else spec.intermediate_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        vocabulary=spec.vocab_size,
        experts=experts,
    )


def _experts(spec: "ModelSpec") -> "Layer | None":
    """None: there are none, or weight-only ones, whose kernels have no entries, or some of them."""
    from penstock.kernels.moe.tuning import Format, Layer
    from penstock.types.model_spec import W8A8Spec

    format: Format
    found = spec.quantization
    if spec.moe is None or (found is not None and (found.weight_only or found.mixed)):
        return None
    match spec.quantization and spec.quantization.format:
        case "mxfp4":
            format = "mxfp4"
        case W8A8Spec(numbers="e4m3", weights=weights):
            format = "fp8 blocks" if weights == "block" else "fp8 outputs"
        case None:
            format = "plain"
        case _:
            return None
    return Layer(
        hidden=spec.hidden_size,
        features=spec.moe.intermediate_size,
        num_experts=spec.moe.num_experts,
        num_active=spec.moe.num_active,
        format=format,
    )


def _show(found: "Found") -> None:
    print(f"{found.subject.op} {found.subject.key}")
    for name, roofline_us, best_us, now_us in found.cases:
        bound = (
            ""
            if roofline_us is None
            else f", roofline {roofline_us:.1f} = {roofline_us / best_us:.0%}"
        )
        print(f"  {name:18} {best_us:9.1f} us, now {now_us:9.1f}{bound}")
    kept = " (as now)" if found.best == found.now else ""
    print(f"  {found.best}{kept}", flush=True)
