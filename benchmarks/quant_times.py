"""Times GEMMs with weights of each number format on this GPU: format x tokens x shape.

    PYTHONPATH=src python benchmarks/quant_times.py [FORMAT ...] [--json FILE]

Each cell has the time of a GEMM inside a CUDA graph, with weights from device memory; its share
of the ceiling (the longer of reading the format's own bytes and of multiplying, on an H200); and
how many times as fast as bf16 it is. Inputs of 8 bits are rounded before, as norms do it. Whether
GEMMs are right is shown by ops_check.py and fp8_check.py.

Kernels are compiled by several processes first, which takes the time.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_times import L2_BYTES, time_graph_us
from torch import Tensor

from penstock.bench.roofline import H200
from penstock.kernels.gemm import linear
from penstock.kernels.gemm.fp8 import fp8_linear
from penstock.kernels.gemm.int8 import int8_linear
from penstock.kernels.gemm.w4a8 import pack_w4a8, w4a8_linear
from penstock.kernels.gemm.wna16 import weight_only_linear
from penstock.kernels.gemm.wna16_packing import pack_gpu
from penstock.kernels.quantize import quantize_fp8
from penstock.kernels.quantize.reference import quantize_int8
from penstock.kernels.quantized_weight import QuantizedWeight, random_quantized

DEVICE = torch.device("cuda")
SHAPES = ((4096, 14336), (8192, 28672))  # outputs, inputs
TOKENS = (1, 16, 64, 256)
NUM_WORKERS = 12
Gemm = Callable[[], Tensor]


def plain(x: Tensor, out_features: int) -> tuple[Gemm, int]:
    weight = torch.randn(out_features, x.shape[1], device=DEVICE, dtype=torch.bfloat16)
    return lambda: linear(x, weight, None), weight.nbytes


def fp8(x: Tensor, out_features: int) -> tuple[Gemm, int]:
    scale = torch.tensor([0.02], device=DEVICE)
    values, scale = quantize_fp8(x, scale, 0)
    weight = torch.randn(out_features, x.shape[1], device=DEVICE).to(torch.float8_e4m3fn)
    return lambda: fp8_linear(values, scale, weight, scale, None, x.dtype), weight.nbytes


def int8(x: Tensor, out_features: int) -> tuple[Gemm, int]:
    values, scale = quantize_int8(x, None)
    shape = (out_features, x.shape[1])
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    weight_scale = torch.full((out_features,), 0.001, device=DEVICE)
    return lambda: int8_linear(values, scale, weight, weight_scale, None, x.dtype), weight.nbytes


def weight_only(kind: Any, group: int, zeros: bool = False) -> Callable[[Tensor, int], Any]:
    def make(x: Tensor, out_features: int) -> tuple[Gemm, int]:
        in_features = x.shape[1]
        drawn = random_quantized(
            kind, out_features, in_features, group or in_features, zeros, DEVICE
        )
        weight = pack_gpu([drawn], keeps_zeros=zeros)
        assert weight is not None, (kind, group)
        return lambda: weight_only_linear(x, weight, None), weight.num_bytes

    return make


def w4a8(x: Tensor, out_features: int) -> tuple[Gemm, int]:
    scale = torch.tensor([0.02], device=DEVICE)
    values, scale = quantize_fp8(x, scale, 0)
    drawn = random_quantized("int4", out_features, x.shape[1], 128, False, DEVICE)
    weight = pack_w4a8([replace(drawn, input_scale=scale[0])])
    assert weight is not None
    return lambda: w4a8_linear(values, scale, weight, None, x.dtype), weight.num_bytes


def mxfp4(x: Tensor, out_features: int) -> tuple[Gemm, int]:
    """Powers of two for 32 inputs."""
    in_features = x.shape[1]
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((out_features, in_features // 32), 2.0**-9, device=DEVICE)
    weight = pack_gpu([QuantizedWeight("fp4", codes, scales)])
    assert weight is not None
    return lambda: weight_only_linear(x, weight, None), weight.num_bytes


# (GEMM, peak of the tensor cores: INT8's is taken to be FP8's)
FORMATS: dict[str, tuple[Callable[[Tensor, int], tuple[Gemm, int]], str]] = {
    "bf16": (plain, "bf16"),
    "fp8": (fp8, "fp8"),
    "int8 w8a8": (int8, "fp8"),
    "AWQ g128": (weight_only("int4", 128, zeros=True), "bf16"),
    "GPTQ g128": (weight_only("int4", 128), "bf16"),
    "W4A8 g128": (w4a8, "fp8"),
    "NVFP4": (weight_only("fp4", 16), "bf16"),
    "MXFP4": (mxfp4, "bf16"),
    "nf4": (weight_only("nf4", 64), "bf16"),
    "int8 w8a16": (weight_only("int8", 0), "bf16"),
    "fp8 w8a16": (weight_only("e4m3", 0), "bf16"),
}


def inputs(num_tokens: int, in_features: int) -> Tensor:
    return torch.randn(num_tokens, in_features, device=DEVICE, dtype=torch.bfloat16)


def warm(job: tuple[str, int]) -> None:
    """Compile what will be timed into Triton's cache on disk."""
    name, num_tokens = job
    for out_features, in_features in SHAPES:
        gemm, _ = FORMATS[name][0](inputs(num_tokens, in_features), out_features)
        gemm()
    torch.cuda.synchronize()


def timed_us(name: str, num_tokens: int, out_features: int, in_features: int) -> tuple[float, int]:
    """(us, bytes); as many matrices in turn that none stays in the L2."""
    x = inputs(num_tokens, in_features)
    gemm, num_bytes = FORMATS[name][0](x, out_features)
    num_others = -(-3 * L2_BYTES // num_bytes) - 1
    others = [FORMATS[name][0](x, out_features)[0] for _ in range(num_others)]
    return time_graph_us([gemm, *others]), num_bytes


def cells(names: list[str]) -> list[dict[str, Any]]:
    found = []
    for out_features, in_features in SHAPES:
        print(f"\n{out_features} x {in_features}: us (share of the ceiling; bf16 = 1)")
        print(" " * 12 + "".join(f"{f'm = {m}':>24}" for m in TOKENS), flush=True)
        bf16_us: dict[int, float] = {}
        for name in names:
            line = f"{name:12}"
            for num_tokens in TOKENS:
                us, num_bytes = timed_us(name, num_tokens, out_features, in_features)
                torch.cuda.empty_cache()
                flops = 2 * num_tokens * out_features * in_features
                read_s, gemm_s = (
                    num_bytes / H200.read_bytes_s,
                    flops / H200.flops[FORMATS[name][1]],
                )
                share = max(read_s, gemm_s) * 1e6 / us
                faster = bf16_us.setdefault(num_tokens, us) / us
                line += f"{us:9.1f} ({share:4.0%}; {faster:4.2f})".rjust(24)
                found.append(
                    {
                        "format": name,
                        "m": num_tokens,
                        "shape": [out_features, in_features],
                        "us": round(us, 2),
                        "gb_s": round(num_bytes / us / 1e3),
                        "tflop_s": round(flops / us / 1e6, 1),
                        "of_ceiling": round(share, 3),
                        "times_bf16": round(faster, 3),
                    }
                )
            print(line, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = ["bf16", *(name for name in args.formats or FORMATS if name != "bf16")]
    with multiprocessing.get_context("spawn").Pool(NUM_WORKERS) as pool:
        pool.map(warm, [(name, m) for name in names for m in TOKENS], chunksize=1)
    found = cells(names)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
