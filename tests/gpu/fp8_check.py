"""FP8 (E4M3) on this GPU: every implementation against its reference, models, and times.

    PYTHONPATH=src python tests/gpu/fp8_check.py [ops] [models] [times]

ops: each op, implementation and layout of scales, small cases and Llama's shapes.
models: tiny checkpoints of each dialect with an FP8 cache, through the engine with CUDA
graphs, against transformers that rounds at the same places: how far the logits of the tokens lie
below the best ones (on a CPU, with references, 0.03 to 0.07 deviations in bf16).
times: `fp8_linear` on Llama's shapes inside a CUDA graph, weights from device memory, beside its
roofline (an H200 reads 4.52 TB/s and multiplies 1254 TFLOP/s in FP8).
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/ops", "tests/fixtures", "benchmarks")]

from kernel_times import time_graph_us  # noqa: E402
from op_cases import OP_CASES, OpCase  # noqa: E402

from penstock.kernels.gemm.fp8 import fp8_linear  # noqa: E402
from penstock.kernels.op import Impl  # noqa: E402
from penstock.kernels.quantize import quantize_fp8, rms_norm_fp8, silu_mul_fp8  # noqa: E402

DEVICE = torch.device("cuda")
READ_TBPS, FP8_TFLOPS = 4.52, 1254.0
L2_BYTES = 60 << 20
MATRICES = {  # outputs, inputs
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B qkv": (10240, 8192),
    "70B o": (8192, 8192),
    "70B gate_up": (57344, 8192),
    "70B down": (8192, 28672),
}
TOKENS = (1, 8, 32, 256, 2048)
WAYS = {"tensor": ("whole", "whole"), "row": ("rows", "outputs"), "block": ("groups", "blocks")}
FAILED: list[str] = []


def expect(ok: bool, what: str) -> None:
    if not ok:
        FAILED.append(what)
        print(f"FAIL {what}", flush=True)


# Arguments


def activations(num_tokens: int, in_features: int, scaling: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(num_tokens, in_features, device=DEVICE).bfloat16()
    scale = torch.tensor([0.02], device=DEVICE) if scaling == "whole" else None
    return quantize_fp8.reference(x, scale, 128 if scaling == "groups" else 0)


def weights(out_features: int, in_features: int, scaling: str) -> tuple[Tensor, Tensor]:
    drawn = torch.empty(out_features, in_features, device=DEVICE, dtype=torch.bfloat16)
    weight = drawn.normal_(0.0, 30.0).to(torch.float8_e4m3fn)
    blocks = (-(-out_features // 128), -(-in_features // 128))
    shape = {"whole": (1,), "outputs": (out_features,), "blocks": blocks}[scaling]
    return weight, (torch.rand(shape, device=DEVICE) + 0.5) / (30 * in_features**0.5)


# Ops against references


def check_case(case: OpCase, impl: Impl, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = case.make(dtype, DEVICE)
    if impl.fits is not None and not impl.fits(*args):
        return
    name = f"{case} {impl.name} {dtype}"
    try:
        found, expected = impl.run(*args), case.op.reference(*args)
        torch.cuda.synchronize()
    except Exception as error:  # a layout that is refused is a finding like any other
        expect(False, f"{name}: {type(error).__name__} {str(error)[:300]}")
        return
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        expect(ours.shape == theirs.shape, f"{name}, output {i}: shape {tuple(ours.shape)}")
        off, allowed = error_of(ours, theirs)
        expect(off <= allowed, f"{name}, output {i}: error {off:.3g}, allowed {allowed:.3g}")


def error_of(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """FP8: the share that is off by more than a unit, which none may be. Others: the
    largest error over the root mean square."""
    ours32, theirs32 = ours.float(), theirs.float()
    if theirs.dtype == torch.float8_e4m3fn:
        off = (ours32 - theirs32).abs() > 0.13 * theirs32.abs() + 2e-3
        return off.float().mean().item(), 0.0
    error = (ours32 - theirs32).abs().max() / theirs32.square().mean().sqrt()
    return error.nan_to_num(torch.inf).item(), 1e-3 if theirs.dtype == torch.float32 else 0.05


def check_matrices() -> None:
    """Llama's shapes: the error over the root mean square of the result, largest and mean."""
    print("fp8_linear, error over rms of the result (largest, mean):")
    for way, (inputs, scales) in WAYS.items():
        for num_tokens in (1, 3, 8, 100, 1024):
            x, scale = activations(num_tokens, 4096, inputs)
            weight, weight_scale = weights(6144, 4096, scales)
            args = (x, scale, weight, weight_scale, None, torch.bfloat16)
            expected = fp8_linear.reference(*args).float()
            line = [f"  {way:6s} {num_tokens:4d} tokens"]
            for name, impl in fp8_linear.implementations().items():
                if impl.fits is not None and not impl.fits(*args):
                    continue
                try:
                    error = (impl.run(*args).float() - expected).abs()
                except RuntimeError as refused:
                    expect(False, f"{way} {num_tokens} {name}: {str(refused)[:300]}")
                    continue
                rms = expected.square().mean().sqrt()
                line.append(f"{name} {error.max() / rms:.4f} {error.mean() / rms:.5f}")
                expect((error.max() / rms).item() < 0.05, f"{way} {num_tokens} {name}")
            print("; ".join(line))


def given(args: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    return args


def check_ops() -> None:
    cases = [case for case in OP_CASES if "fp8" in case.op.__name__]
    for case in cases:
        for impl in case.op.implementations().values():
            for dtype in (torch.bfloat16, torch.float16):
                check_case(case, impl, dtype)
    big = torch.randn(2048, 28672, device=DEVICE).bfloat16()
    stream = big[:, :8192].contiguous()
    for op, args in (
        (silu_mul_fp8, (big, None, 0)),
        (silu_mul_fp8, (big, None, 128)),
        (quantize_fp8, (big, None, 0)),
        (rms_norm_fp8, (stream, stream.roll(1), stream[0], 1e-5, None, 128)),
    ):
        case = OpCase(op, f"{tuple(args[0].shape)}", partial(given, args))
        check_case(case, op.implementations()["triton"], torch.bfloat16)
    check_matrices()
    print(f"ops checked: {len(cases)} cases", flush=True)


# Models


def check_models() -> None:
    from fp8_models import DIALECTS, K_SCALE, V_SCALE, RoundingCache, make_fp8_checkpoint, truth
    from local_engine import LocalEngine

    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(10, 500, (n,), generator=generator).tolist() for n in (50, 7, 33)]
    settings = {
        "dtype": "bfloat16",
        "max_batch_size": 8,
        "max_num_tokens": 256,
        "cuda_graph_config": {"batch_sizes": [1, 4]},
        "kv_cache_config": {"dtype": "fp8", "max_tokens": 2048},
    }
    for dialect in DIALECTS:
        with tempfile.TemporaryDirectory() as root:
            folder = make_fp8_checkpoint(Path(root) / "model", dialect)
            model = truth(folder, dialect).to(DEVICE)
            engine = LocalEngine(folder, **settings)
            scales = (K_SCALE, V_SCALE) if dialect == "modelopt" else (1.0, 1.0)
            short = []
            for prompt, tokens in zip(prompts, engine.generate(prompts, 40), strict=True):
                with torch.inference_mode():
                    ids = torch.tensor([prompt + tokens], device=DEVICE)
                    logits = model(ids, past_key_values=RoundingCache(*scales)).logits[0]
                logits = logits[len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
                short.append((logits.amax(-1) - chosen) / logits.std())
            mean = torch.cat(short).mean().item()
            print(f"  {dialect}: {mean:.4f} deviations below the best on average", flush=True)
            expect(mean < 0.15, f"{dialect}: tokens are not the best")


# Times


def time_matrices() -> None:
    impls = fp8_linear.implementations()
    print(f"\nfp8_linear, us; roofline, then {', '.join(impls)} by scales")
    for name, (out_features, in_features) in MATRICES.items():
        copies = max(1, min(8, -(-3 * L2_BYTES // (out_features * in_features))))
        for way, (inputs, scales) in WAYS.items():
            if way != "tensor" and name not in ("8B gate_up", "8B down", "70B qkv"):
                continue
            matrices = [weights(out_features, in_features, scales) for _ in range(copies)]
            cells = []
            for num_tokens in TOKENS:
                x, scale = activations(num_tokens, in_features, inputs)
                moved = out_features * in_features + num_tokens * (in_features + 2 * out_features)
                flops = 2 * num_tokens * out_features * in_features
                bound = max(moved / READ_TBPS, flops / FP8_TFLOPS) / 1e6
                times = []
                for impl in impls.values():
                    args = [(x, scale, *matrix, None, torch.bfloat16) for matrix in matrices]
                    if impl.fits is not None and not impl.fits(*args[0]):
                        times.append("-")
                        continue
                    launches = [lambda a=a, run=impl.run: run(*a) for a in args]
                    try:
                        times.append(f"{time_graph_us(launches):.1f}")
                    except RuntimeError as refused:
                        expect(False, f"{name} {way} {num_tokens}: {str(refused)[:200]}")
                cells.append(f"m={num_tokens} {bound:.1f}: {' '.join(times)}")
            print(f"  {name:11s} {way:6s} {' | '.join(cells)}", flush=True)
            del matrices
            torch.cuda.empty_cache()


def time_small_ops() -> None:
    print("\nops that make 8-bit floats, Llama-8B, us (tensor, row, block):")
    static = torch.tensor([0.02], device=DEVICE)
    scalings = ((static, 0), (None, 0), (None, 128))
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, 4096, device=DEVICE).bfloat16()
        gate_up = torch.randn(num_tokens, 28672, device=DEVICE).bfloat16()
        ops = {
            "rms_norm_fp8": lambda *s, x=x: rms_norm_fp8(x, x, x[0], 1e-5, *s),
            "quantize_fp8": lambda *s, x=x: quantize_fp8(x, *s),
            "silu_mul_fp8": lambda *s, x=gate_up: silu_mul_fp8(x, *s),
        }
        cells = []
        for name, run in ops.items():
            times = [time_graph_us([lambda s=s, run=run: run(*s)] * 10, 4.0) for s in scalings]
            cells.append(f"{name} " + " ".join(f"{us:.2f}" for us in times))
        print(f"  {num_tokens:4d} tokens: {'; '.join(cells)}", flush=True)


def main() -> None:
    began = time.monotonic()
    asked = sys.argv[1:] or ["ops", "models", "times"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    parts = {
        "ops": [check_ops],
        "models": [check_models],
        "times": [time_matrices, time_small_ops],
    }
    for part in asked:
        for run in parts[part]:
            run()
        print(f"{part}: done after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(FAILED)} failed" if FAILED else "all passed")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
