"""Tuning of decode and prefill attention for `kernels.tuning`: candidates, and caches to attend to.

Legend: T tokens, N sequences, H query heads, D head size.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from penstock.kernels import tuning_case
from penstock.kernels.attention.backend import AttentionParams
from penstock.kernels.attention.triton_decode import DecodeConfig, Load, decode, decode_config
from penstock.kernels.attention.triton_prefill import PrefillConfig, prefill, prefill_config
from penstock.kernels.carveout import DRIVER_DEFAULT
from penstock.kernels.device import num_sms
from penstock.kernels.gemm.dense import dense_linear
from penstock.kernels.tuning_case import Case

AttentionConfig = DecodeConfig | PrefillConfig

_BLOCK_SIZE = 32  # tokens of a cache block
_MAX_KV_LEN = 131072
_BEFORE_SIZE = 2048  # channels of the GEMM before
# Waves that one program per sequence and kv head makes up, and keys of each sequence.
_DECODE_CASES = {
    Load.PARTIAL_WAVE: ((0.0, 1024), (0.0, 8192), (0.5, 1024)),
    Load.ONE_WAVE: ((1.0, 1024), (1.0, 4096)),
    Load.FEW_WAVES: ((2.0, 1024), (2.0, 8192)),
    Load.MANY_WAVES: ((16.0, 1024),),
}
_PREFILL_CASES = ((1, 8192), (8, 1024))


def now_used(op: str, d: dict[str, int]) -> AttentionConfig:
    sizes = d["heads"], d["kv_heads"], d["head_size"]
    if op == "decode":
        return decode_config(*sizes, d["cache_bits"], Load(d["sequences"]))
    return prefill_config(*sizes, d["bits"] // 8, d["cache_bits"])


def candidates(now: AttentionConfig) -> list[AttentionConfig]:
    """Without the present one."""
    if isinstance(now, DecodeConfig):
        return [
            *(
                replace(now, tile=tile, num_stages=num_stages, num_warps=num_warps)
                for tile in (32, 64, 128, 256)
                for num_stages in (3, 5, 7)
                for num_warps in (1, 2, 4)
                if 16 <= tile // num_warps <= 64
            ),
            *(replace(now, min_span=min_span) for min_span in (16, 64, 128)),
            *(replace(now, max_splits=max_splits) for max_splits in (32, 128)),
            *(replace(now, carveout=carveout) for carveout in (DRIVER_DEFAULT, 30, 60, 100)),
        ]
    return [
        PrefillConfig(rows, tile, num_warps, num_stages)
        for rows in (64, 128)
        for tile in (32, 64, 128)
        for num_warps in (4, 8)
        for num_stages in (2, 3, 5)
    ]


def decode_cases(
    d: dict[str, int], device: torch.device, read_tbps: float | None
) -> Iterator[Case]:
    for num_waves, kv_len in _DECODE_CASES[Load(d["sequences"])]:
        num = max(1, int(num_waves * num_sms() / d["kv_heads"]))
        yield decode_case(d, num, kv_len, device, read_tbps)


def prefill_cases(d: dict[str, int], device: torch.device, tflops: float | None) -> Iterator[Case]:
    for num, length in _PREFILL_CASES:
        yield prefill_case(d, num, length, device, tflops)


class _Cache:
    """Keys and values of `num` sequences, `copies` times, in blocks that lie scattered."""

    def __init__(
        self, d: dict[str, int], num: int, kv_len: int, copies: int, device: torch.device
    ) -> None:
        dtype = torch.float8_e4m3fn if d["cache_bits"] == 8 else torch.bfloat16
        width = kv_len // _BLOCK_SIZE
        num_blocks = copies * num * width
        size = (num_blocks + 1, d["kv_heads"], _BLOCK_SIZE, d["head_size"])
        self.k, self.v = (torch.randn(size, device=device).to(dtype) for _ in range(2))
        blocks = torch.randperm(num_blocks, device=device).int() + 1
        self.tables = blocks.view(copies, num, width)
        self.rows = torch.arange(num, dtype=torch.int32, device=device)
        self.kv_lens = torch.full((num,), kv_len, dtype=torch.int32, device=device)


def decode_case(
    d: dict[str, int],
    num: int,
    kv_len: int,
    device: torch.device,
    read_tbps: float | None,
    copies: int | None = None,
) -> Case:
    num_bytes = 2 * num * kv_len * d["kv_heads"] * d["head_size"] * d["cache_bits"] // 8
    copies = copies or max(1, min(64, tuning_case.L2_BYTES // num_bytes + 1))
    cache = _Cache(d, num, kv_len, copies, device)
    q_NHD = torch.randn(num, d["heads"], d["head_size"], device=device).bfloat16()
    out_NHD = torch.empty_like(q_NHD)
    params = AttentionParams(d["head_size"] ** -0.5)
    x_ND, weight_DD = (
        torch.ones(n, _BEFORE_SIZE, dtype=q_NHD.dtype, device=device) for n in (num, _BEFORE_SIZE)
    )

    def run(config: DecodeConfig, table: Tensor) -> Tensor:
        # As in a layer: between GEMMs. Back to back with itself it overlaps better (PDL).
        dense_linear(x_ND, weight_DD)
        decode(
            q_NHD, cache.k, cache.v, cache.rows, cache.kv_lens, table, out_NHD, params,
            _MAX_KV_LEN, config,
        )  # fmt: skip
        return out_NHD

    return Case(
        f"{num} of {kv_len} keys, behind a GEMM",
        None if read_tbps is None else num_bytes / read_tbps / 1e6,
        lambda config: [partial(run, config, table) for table in cache.tables],
        lambda config: run(config, cache.tables[0]).clone(),
    )


def prefill_case(
    d: dict[str, int], num: int, length: int, device: torch.device, tflops: float | None
) -> Case:
    cache = _Cache(d, num, length, 1, device)
    q_THD = torch.randn(num * length, d["heads"], d["head_size"], device=device).bfloat16()
    starts = torch.arange(num + 1, dtype=torch.int32, device=device) * length
    out_THD = torch.empty_like(q_THD)
    params = AttentionParams(d["head_size"] ** -0.5)
    flops = 2 * d["heads"] * d["head_size"] * num * length * (length + 1)

    def run(config: PrefillConfig) -> Tensor:
        prefill(
            q_THD, cache.k, cache.v, cache.rows, starts, cache.kv_lens, cache.tables[0], out_THD,
            params, 0, config,
        )  # fmt: skip
        return out_THD

    return Case(
        f"{num} x {length}",
        None if tflops is None else flops / tflops / 1e6,
        lambda config: [partial(run, config)] * 2,
        lambda config: run(config).clone(),
    )
