"""Compiles what the kernels' wrappers would launch, for a GPU this machine need not have.

The interpreter runs a kernel as Python and so accepts what the compiler refuses. Here the launch is
replaced by a compilation from the very arguments of the launch, on a machine that claims to have a
GPU of that architecture: implementations and tile configs are chosen as they are there.

    python compile_for_gpu.py [PART ...] [--arch 90] [--most N]

--most: how many variants of a kernel are compiled; which, depends on the architecture, so that all
of them together have seen many. Without it all are.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from op_cases import (
    OP_CASES,
    AttentionCase,
    decodes,
    drafted,
    experts_case,
    make_attention,
    prefills,
    sink_cases,
    weight_only_experts_case,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from penstock.kernels import device as devices
from penstock.kernels import pdl
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.launch import QuickLaunch

ARCHS = (80, 86, 89, 90, 100, 120)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
DTYPES = {
    torch.bool: "i1",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Where Triton has E4M3; before it no FP8 reaches a kernel (`config/resolve.py`).
FP8_ARCH = 89
# Kernels that Triton would also compile without the instruction they are for, in BF16.
INSTRUCTIONS = {"_scaled": "block_scale"}


@dataclass(frozen=True, slots=True)
class Variant:
    """What the compiler would be given."""

    kernel: JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def compile(self) -> None:
        make = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = make(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", devices.probe().arch, 32)
        compiled = triton.compile(source, target=target, options=self.options)
        shared, most = compiled.metadata.shared, devices.shared_bytes()
        assert shared <= most, f"{self} takes {shared} bytes of shared memory, there are {most}"
        needed = INSTRUCTIONS.get(self.kernel.__name__, "")
        assert needed in compiled.asm["ptx"], f"{self} has no {needed}"


variants: dict[str, dict[str, Variant]] = {}  # of each kernel, by what makes them different


def record_instead(kernel: JITFunction, grid: Any, /, *args: Any, **kwargs: Any) -> None:
    names = kernel.arg_names
    kwargs |= {"ON_GPU": True} if "ON_GPU" in kwargs else {}
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(names):
        value, parameter = given[name], kernel.params[i]
        signature[name] = "constexpr"
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or is_one:
            constants[(i,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + DTYPES[value.dtype]
        elif isinstance(value, TensorDescriptor):
            box = f"{DTYPES[value.base.dtype]}{value.block_shape}"
            signature[name] = f"tensordesc<{box},{value.layout!r}>"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_aligned and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    if devices.probe().arch < FP8_ARCH and any("fp8" in one for one in signature.values()):
        return
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    variant = Variant(kernel, signature, constants, attributes, options)
    variants.setdefault(kernel.__name__, {})[str(variant)] = variant


def picked(of_kernel: Sequence[Variant], most: int | None, arch: int) -> list[Variant]:
    """`most` at equal distances, which begin elsewhere for every architecture."""
    num = len(of_kernel)
    if most is None or num <= most:
        return list(of_kernel)
    begin = ARCHS.index(arch) * num // (len(ARCHS) * most)
    return [of_kernel[begin + i * num // most] for i in range(most)]


def compile_ops(part: str, device: torch.device) -> None:
    """Of a package of penstock.kernels that is a part, or of all those that are none."""
    for case in OP_CASES:
        package = case.op.reference.__module__.split(".")[2]
        if part != (package if package in PARTS else "others"):
            continue
        args = case.make(torch.bfloat16, device)
        for impl in case.op.implementations().values():
            if impl.needs.kind == "cuda" and impl.refusal(*args) is None:
                impl.run(*args)


def compile_attention(device: torch.device) -> None:
    for case in (
        decodes(1, 700, num_heads=8),
        decodes(90, head_size=80, window=40),
        decodes(*[40] * 300, head_size=128, num_heads=16),
        decodes(*[40] * 300, 17000, head_size=128, num_heads=16),  # a long one among many
        decodes(*[40] * 8, head_size=128, num_heads=16, num_kv_heads=16),
        decodes(1, 700, head_size=256, num_heads=40, block_size=64),
        prefills((50, 90), head_size=128, num_heads=8),
        prefills((50, 90), head_size=256, window=16),
        AttentionCase(((1, 300), (50, 90)), 1, head_size=128, num_heads=8, fp8=True),
        AttentionCase(((1, 300), (50, 90)), 1, head_size=128, num_heads=8, int8=True),
        decodes(*[40] * 300, head_size=128, num_heads=16, int8=True),
        AttentionCase(((1, 300), (50, 90)), 1, head_size=128, num_heads=8, nvfp4=True),
        AttentionCase(((1, 300), (50, 90)), 1, head_size=256, num_heads=8, nvfp4=True, window=64),
        decodes(*[40] * 300, head_size=64, num_heads=64, num_kv_heads=8, nvfp4=True, sinks=True),
        drafted((40, 4), (700, 3), head_size=128, num_heads=8),
        drafted(*[(40, 4)] * 300, head_size=128, num_heads=8, fp8=True),
        AttentionCase(((1, 300), (50, 90)), 1, head_size=96, num_heads=6, block_size=32),
        *sink_cases((40, 700), ((50, 90),), 128),
        AttentionCase(
            ((1, 300), (50, 90)),
            1,
            head_size=128,
            num_heads=8,
            window=64,
            chunks=True,
            soft_cap=9.0,
        ),
    ):
        args = make_attention(case, torch.bfloat16, device).unpack()
        for out_scale_1 in (None, torch.ones(1, device=device)):
            get_backend("triton").attend(*args, out_scale_1)


def compile_sampling(device: torch.device) -> None:
    from penstock.kernels.sampling import triton as kernels

    logits_LV = torch.zeros(2, 9001, dtype=torch.bfloat16, device=device)
    ones_L, ids_L = torch.ones(2, device=device), torch.arange(2, device=device)
    kernels.argmax(logits_LV)
    for thresholds_L in (None, ones_L):
        kernels.gumbel_argmax(logits_LV, ones_L, ids_L, ids_L, thresholds_L)
    kernels.filter_thresholds(logits_LV, ones_L, ids_L, ones_L, ones_L, 9001)
    seen_SV = torch.zeros(2, 9001, dtype=torch.int32, device=device)
    kernels.apply_penalties(logits_LV.float(), ids_L, seen_SV.bool(), seen_SV, *[ones_L] * 3)
    words_PW = torch.zeros(2, 282, dtype=torch.int32, device=device)
    kernels.apply_bitmask(logits_LV.float(), ids_L.int(), words_PW)


def compile_all_reduce(device: torch.device) -> None:
    from penstock.kernels.all_reduce.triton import one_shot

    x, weight = torch.zeros(3, 512, dtype=torch.bfloat16, device=device), torch.ones(512)
    tables = torch.zeros(2, 8, dtype=torch.int64, device=device)
    for num_ranks in (1, 8):
        for norm in (None, (x, weight, 1e-5)):
            one_shot(x, *tables[:, :num_ranks], 0, norm)


def compile_hopper_prefill(device: torch.device) -> None:
    from penstock.kernels.attention import hopper_prefill

    for dtype, shape in (
        (torch.bfloat16, dict(num_heads=8)),
        (torch.bfloat16, dict(num_heads=16, block_size=64, window=100, sinks=True)),
        (torch.float16, dict(num_heads=10, block_size=128)),
    ):
        case = prefills((50, 90), head_size=128, **shape)
        q, k, v, batch, params, sinks, _ = make_attention(case, dtype, device).unpack()
        assert hopper_prefill.fits(q, k), case
        hopper_prefill.prefill(
            q, k, v, batch.rows_N, batch.query_starts_N1, batch.kv_lens_N, batch.block_table_RM,
            torch.empty_like(q), params, 0, sinks,
        )  # fmt: skip


def compile_hopper_experts(device: torch.device) -> None:
    from penstock.kernels.moe import fp8_hopper as hopper_fp8
    from penstock.kernels.moe import mxfp4_hopper as hopper_mxfp4

    for bias in (False, True):
        args = experts_case(6, 4, 2, 64, 64, format="mxfp4", bias=bias).make(torch.bfloat16, device)
        for rows in hopper_mxfp4.CONFIGS:
            hopper_mxfp4.experts(*args, rows=rows)
    *args, _, _, gate = experts_case(6, 4, 2, 256, 256, format="fp8 blocks").make(
        torch.bfloat16, device
    )
    for rows in hopper_fp8.CONFIGS:
        hopper_fp8.experts(*args, gate, rows=rows)


def compile_hopper_weight_only(device: torch.device) -> None:
    from penstock.kernels.gemm import wna16_hopper as hopper
    from penstock.kernels.gemm.wna16_packing import pack_gpu
    from penstock.kernels.moe import wna16_hopper as hopper_experts
    from penstock.kernels.quantized_weight import random_quantized

    for kind, group, has_zeros in (
        ("int4", 128, False), ("int4", 128, True), ("int4", 32, True), ("int4", 256, False),
        ("fp4", 16, False), ("nf4", 64, False), ("int8", 1024, False), ("e4m3", 1024, False),
    ):  # fmt: skip
        coded = random_quantized(kind, 144, 1024, group, has_zeros, device)
        weight = pack_gpu([coded], keeps_zeros=has_zeros)
        x = torch.zeros(3, 1024, dtype=torch.bfloat16, device=device)
        assert hopper.fits(x, weight)
        for rows in hopper.CONFIGS if kind == "fp4" else (8, 128):
            hopper.linear(x, weight, None, rows=rows, splits=1 if rows == 16 else 2)
    for kind, group, shape in (
        ("int4", 128, dict(zeros=True)),
        ("fp4", 16, dict(outer=True, bias=True)),
        ("e4m3", 256, dict(bias=True)),
    ):
        case = weight_only_experts_case(kind, 6, 4, 2, 256, 256, group=group, **shape)
        args = case.make(torch.bfloat16, device)
        assert hopper_experts.fits(args[0], args[3], args[4])
        hopper_experts.experts(*args, is_sorted=False, splits=2)
        for rows in (8, 16, 64, 128) if kind == "fp4" else (8,):
            hopper_experts.experts(*args, rows=rows, is_sorted=True)


# What is compiled beside the ops; each part takes about as long.
PARTS: dict[str, tuple[Callable[[torch.device], None], ...]] = {
    "attention": (compile_attention,),
    "gemm": (),
    "moe": (),
    "recurrent": (),
    "others": (compile_sampling, compile_all_reduce),
}
HOPPER_PARTS = {
    "attention": compile_hopper_prefill,
    "gemm": compile_hopper_weight_only,
    "moe": compile_hopper_experts,
}


def pretend(arch: int) -> None:
    """This machine says from now on that it has such a GPU."""
    found = devices._probe_cpu()
    claimed = replace(found, kind="cuda", name=f"sm_{arch}", arch=arch)
    devices._probe_cpu = lambda: claimed
    devices.probe.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--arch", type=int, default=90, choices=ARCHS)
    parser.add_argument("--most", type=int)
    args = parser.parse_args()
    pretend(args.arch)
    QuickLaunch.launch = record_instead
    has_pdl = args.arch >= 90
    pdl.launch_options = lambda x: {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}
    device = torch.device("cpu")
    for part in args.parts or PARTS:
        compile_ops(part, device)
        for compile_more in PARTS[part]:
            compile_more(device)
        if args.arch == 90 and part in HOPPER_PARTS:
            HOPPER_PARTS[part](device)
    chosen: list[Variant] = []
    for found in variants.values():
        chosen += picked([*found.values()], args.most, args.arch)
    for variant in chosen:
        variant.compile()
    print(
        f"compiled {len(chosen)} variants of {len(variants)} kernels for sm_{args.arch} "
        f"with Triton {triton.__version__}"
    )


if __name__ == "__main__":
    main()
