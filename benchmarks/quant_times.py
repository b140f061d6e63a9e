"""Times products with weights of each number format on this GPU: format x tokens x shape.

    PYTHONPATH=src python tests/gpu/quant_times.py [FORMAT ...] [--json FILE]

Each cell has the time of a product inside a CUDA graph, with weights from device memory; its share
of the ceiling (the longer of reading the format's own bytes and of multiplying, on an H200); and
how many times as fast as bf16 it is. Inputs of 8 bits are rounded before, as norms do it. Whether
products are right is shown by ops_check.py and fp8_check.py.

Kernels are compiled by several processes first, which takes the time.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from kernel_times import L2_BYTES, time_graph_us

from penstock.bench.floors import H200
from penstock.kernels.coded import Coded, coded_linear, pack_coded, random_coded
from penstock.kernels.fp8 import fp8_linear, quantize_fp8
from penstock.kernels.gemm import linear
from penstock.kernels.int8 import int8_linear, quantize_int8

DEVICE = torch.device("cuda")
SHAPES = ((4096, 14336), (8192, 28672))  # outputs, inputs
TOKENS = (1, 16, 64, 256)
NUM_WORKERS = 12
Product = Callable[[], Tensor]


def plain(x: Tensor, num_outputs: int) -> tuple[Product, int]:
    weight = torch.randn(num_outputs, x.shape[1], device=DEVICE, dtype=torch.bfloat16)
    return lambda: linear(x, weight, None), weight.nbytes


def fp8(x: Tensor, num_outputs: int) -> tuple[Product, int]:
    scale = torch.tensor([0.02], device=DEVICE)
    values, scale = quantize_fp8(x, scale, 0)
    weight = torch.randn(num_outputs, x.shape[1], device=DEVICE).to(torch.float8_e4m3fn)
    return lambda: fp8_linear(values, scale, weight, scale, None, x.dtype), weight.nbytes


def int8(x: Tensor, num_outputs: int) -> tuple[Product, int]:
    values, scale = quantize_int8(x, None)
    shape = (num_outputs, x.shape[1])
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
    weight_scale = torch.full((num_outputs,), 0.001, device=DEVICE)
    return lambda: int8_linear(values, scale, weight, weight_scale, None, x.dtype), weight.nbytes


def coded(kind: Any, group: int, zeros: bool = False) -> Callable[[Tensor, int], Any]:
    def make(x: Tensor, num_outputs: int) -> tuple[Product, int]:
        num_inputs = x.shape[1]
        drawn = random_coded(kind, num_outputs, num_inputs, group or num_inputs, zeros, DEVICE)
        weight = pack_coded([drawn], keeps_zeros=zeros)
        assert weight is not None, (kind, group)
        return lambda: coded_linear(x, weight, None), weight.num_bytes

    return make


def mxfp4(x: Tensor, num_outputs: int) -> tuple[Product, int]:
    """Powers of two for 32 inputs."""
    num_inputs = x.shape[1]
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8, device=DEVICE)
    scales = torch.full((num_outputs, num_inputs // 32), 2.0**-9, device=DEVICE)
    weight = pack_coded([Coded("fp4", codes, scales)])
    assert weight is not None
    return lambda: coded_linear(x, weight, None), weight.num_bytes


# (product, peak of the tensor cores: int8's is taken to be that of 8-bit floats)
FORMATS: dict[str, tuple[Callable[[Tensor, int], tuple[Product, int]], str]] = {
    "bf16": (plain, "bf16"),
    "fp8": (fp8, "fp8"),
    "int8 w8a8": (int8, "fp8"),
    "AWQ g128": (coded("int4", 128, zeros=True), "bf16"),
    "GPTQ g128": (coded("int4", 128), "bf16"),
    "NVFP4": (coded("fp4", 16), "bf16"),
    "MXFP4": (mxfp4, "bf16"),
    "nf4": (coded("nf4", 64), "bf16"),
    "int8 w8a16": (coded("int8", 0), "bf16"),
    "fp8 w8a16": (coded("e4m3", 0), "bf16"),
}


def inputs(num_tokens: int, num_inputs: int) -> Tensor:
    return torch.randn(num_tokens, num_inputs, device=DEVICE, dtype=torch.bfloat16)


def warm(job: tuple[str, int]) -> None:
    """Compile what will be timed into Triton's cache on disk."""
    name, num_tokens = job
    for num_outputs, num_inputs in SHAPES:
        product, _ = FORMATS[name][0](inputs(num_tokens, num_inputs), num_outputs)
        product()
    torch.cuda.synchronize()


def timed_us(name: str, num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[float, int]:
    """(us, bytes); as many matrices in turn that none stays in the L2."""
    x = inputs(num_tokens, num_inputs)
    product, num_bytes = FORMATS[name][0](x, num_outputs)
    num_others = -(-3 * L2_BYTES // num_bytes) - 1
    others = [FORMATS[name][0](x, num_outputs)[0] for _ in range(num_others)]
    return time_graph_us([product, *others]), num_bytes


def cells(names: list[str]) -> list[dict[str, Any]]:
    found = []
    for num_outputs, num_inputs in SHAPES:
        print(f"\n{num_outputs} x {num_inputs}: us (share of the ceiling; bf16 = 1)")
        print(" " * 12 + "".join(f"{f'm = {m}':>24}" for m in TOKENS), flush=True)
        bf16_us: dict[int, float] = {}
        for name in names:
            line = f"{name:12}"
            for num_tokens in TOKENS:
                us, num_bytes = timed_us(name, num_tokens, num_outputs, num_inputs)
                torch.cuda.empty_cache()
                flops = 2 * num_tokens * num_outputs * num_inputs
                read_s, product_s = (
                    num_bytes / H200.read_bytes_s,
                    flops / H200.flops[FORMATS[name][1]],
                )
                share = max(read_s, product_s) * 1e6 / us
                faster = bf16_us.setdefault(num_tokens, us) / us
                line += f"{us:9.1f} ({share:4.0%}; {faster:4.2f})".rjust(24)
                found.append(
                    {
                        "format": name,
                        "m": num_tokens,
                        "shape": [num_outputs, num_inputs],
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
