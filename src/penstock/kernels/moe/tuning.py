"""Tuning of experts for `kernels.tuning`: their GEMMs, candidate launch configs, a layer to run.

A launch config is looked up by the matrix, its bits and the pairs of a block, so each GEMM has
entries of its own; the layer is run with another config for that one alone.

Legend: T tokens, S slots, K experts of a token, O outputs, I inputs, D hidden size, F features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.kernels.formats import Fp8Groups, Fp8Rows
from penstock.kernels.moe.align import rows_per_block
from penstock.kernels.moe.gate import SILU
from penstock.kernels.moe.grouped_gemm import GroupedConfig, experts_grouped, grouped_config
from penstock.kernels.moe.mxfp4_triton import Mxfp4Config, experts_mxfp4, mxfp4_config
from penstock.kernels.moe.small_m import MAX_SMALL_M, SmallMConfig, experts_small_m, small_m_config
from penstock.kernels.moe.weights import ExpertWeights, pack_mxfp4, plain_weights
from penstock.kernels.sizes import cdiv, next_power_of_2

ExpertsConfig = SmallMConfig | GroupedConfig | Mxfp4Config
Format = Literal["plain", "fp8 outputs", "fp8 blocks", "mxfp4"]

_IMPLEMENTATIONS: dict[str, Any] = {
    "experts small_m": experts_small_m,
    "experts grouped": experts_grouped,
    "experts mxfp4": experts_mxfp4,
}
_TOKENS = (1, 32, 256, 8192)  # of a step
_NUM_CHOICES = 8  # of experts, so that the same weights are not read again at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    hidden: int
    features: int
    num_experts: int
    num_active: int
    format: Format


@dataclass(frozen=True, slots=True)
class ExpertGemm:
    """The first of a layer's two, which is gated, or the second, with so many tokens."""

    layer: Layer
    num_tokens: int
    is_gated: bool

    @property
    def op(self) -> str:
        if self.layer.format == "mxfp4":
            return "experts mxfp4"
        return "experts small_m" if self.num_tokens <= MAX_SMALL_M else "experts grouped"

    @property
    def rows(self) -> int:
        """Pairs of a block; 1: they are not sorted."""
        if self.num_tokens <= MAX_SMALL_M:
            return 1
        num_pairs = self.num_tokens * self.layer.num_active
        return rows_per_block(num_pairs, self.layer.num_experts, self.layer.format)

    @property
    def dims(self) -> tuple[tuple[str, int], ...]:
        """What its entry is found by."""
        bits = {"plain": 16, "mxfp4": 4}.get(self.layer.format, 8)
        sizes = (("outputs", self.out_features), ("inputs", self.in_features))
        match self.op:
            case "experts small_m":
                return (*sizes, ("bits", bits))
            case "experts grouped":
                return (*sizes, ("bits", bits), ("rows", self.rows))
        return (*sizes, ("rows", self.rows))

    @property
    def out_features(self) -> int:
        return 2 * self.layer.features if self.is_gated else self.layer.hidden

    @property
    def in_features(self) -> int:
        return self.layer.hidden if self.is_gated else self.layer.features

    @property
    def num_bytes(self) -> float:
        """Of the weights that both GEMMs read, with uniform routing."""
        layer = self.layer
        idle = (1 - layer.num_active / layer.num_experts) ** self.num_tokens
        bits = {"plain": 16, "mxfp4": 4.25}.get(layer.format, 8)
        num_weights = 3 * layer.hidden * layer.features
        return layer.num_experts * (1 - idle) * num_weights * bits / 8


def expert_gemms(layer: Layer) -> list[ExpertGemm]:
    """One for each entry there can be."""
    found: dict[tuple[object, ...], ExpertGemm] = {}
    for num_tokens in _TOKENS:
        for is_gated in (True, False):
            one = ExpertGemm(layer, num_tokens, is_gated)
            found.setdefault((one.op, one.dims), one)
    return list(found.values())


def now_used(one: ExpertGemm) -> ExpertsConfig:
    sizes = (one.out_features, one.in_features)
    bits = dict(one.dims).get("bits", 4)
    match one.op:
        case "experts small_m":
            num_matrices = 2 if one.is_gated else next_power_of_2(one.layer.num_active)
            return small_m_config(*sizes, bits, num_matrices)
        case "experts grouped":
            return grouped_config(*sizes, bits, one.rows, one.is_gated)
    return mxfp4_config(*sizes, one.rows, one.is_gated)


def candidates(one: ExpertGemm) -> list[ExpertsConfig]:
    """Without the present one."""
    match now_used(one):
        case SmallMConfig():
            return [
                SmallMConfig(rows, tiles, num_warps)
                for rows in (1, 2, 4)
                for tiles in (1, 2, 4, 8)
                for num_warps in (2, 4, 8)
                if 8 <= rows * tiles * num_warps <= 64
            ]
        case GroupedConfig() as now:
            return [
                replace(now, outputs=outputs, num_warps=num_warps, num_stages=stages, band=band)
                for outputs, num_warps in ((64, 4), (128, 4), (128, 8))
                for stages in (3, 4, 6)
                for band in ((1,) if one.rows <= 32 else (1, 4, 8))
            ]
        case Mxfp4Config():
            splits = (1,) if one.is_gated or one.rows > 1 else (1, 2, 4)  # a gate needs all
            return [
                Mxfp4Config(num_warps, slabs, tiles, split, stages, band)
                for num_warps, slabs in ((4, 1), (4, 2), (8, 1), (8, 2))
                for tiles in (1, 2)
                for split in splits
                for stages in (3, 4)
                for band in ((1,) if one.rows <= 32 else (1, 4))
            ]
    raise AssertionError(one)


def runs(
    one: ExpertGemm, device: torch.device, num_slots: int | None = None
) -> list[Callable[[ExpertsConfig], Tensor]]:
    """The layer with a launch config for this GEMM, each time with other experts chosen."""
    layer = one.layer
    num_slots = num_slots or layer.num_experts
    gate_up, down = (
        _random(layer.format, num_slots, outputs, inputs, device)
        for outputs, inputs in (
            (2 * layer.features, layer.hidden), (layer.hidden, layer.features)
        )
    )  # fmt: skip
    other = now_used(replace(one, is_gated=not one.is_gated))
    x_TD = torch.randn(one.num_tokens, layer.hidden, device=device).bfloat16()
    num_active = min(layer.num_active, num_slots)
    weights_TK = torch.rand(one.num_tokens, num_active, device=device)

    def run(config: ExpertsConfig, slots_TK: Tensor) -> Tensor:
        configs: tuple[ExpertsConfig, ...] = (config, other) if one.is_gated else (other, config)
        arguments = (x_TD, slots_TK, weights_TK, gate_up, down, None, None, SILU)
        options = {} if one.op == "experts small_m" else {"rows": one.rows}
        y_TD: Tensor = _IMPLEMENTATIONS[one.op](*arguments, configs=configs, **options)
        return y_TD

    found: list[Callable[[ExpertsConfig], Tensor]] = []
    for _ in range(_NUM_CHOICES if one.num_tokens <= 32 else 2):
        odds_TS = torch.rand(one.num_tokens, num_slots, device=device)
        slots_TK = odds_TS.topk(num_active).indices.int().contiguous()
        found.append(partial(run, slots_TK=slots_TK))
    return found


def _random(
    format: str, num_slots: int, out_features: int, in_features: int, device: torch.device
) -> ExpertWeights:
    """Matrices that keep the size of what passes through, more or less."""
    shape, spread = (num_slots, out_features, in_features), in_features**-0.5
    if format == "plain":
        numbers = torch.randn(shape, dtype=torch.bfloat16, device=device)
        return plain_weights(numbers.mul_(spread))
    codes = partial(torch.randint, dtype=torch.uint8, device=device)
    if format == "mxfp4":
        scales = torch.full((*shape[:2], in_features // 32), 120, dtype=torch.uint8, device=device)
        return pack_mxfp4(codes(256, (*shape[:2], in_features // 2)), scales)
    values = (codes(120, shape) | codes(2, shape) << 7).view(torch.float8_e4m3fn)  # no NaN
    if format == "fp8 outputs":
        scale = torch.full(shape[:2], spread / 64, device=device)
        return ExpertWeights(values, in_features, scale, Fp8Rows())
    blocks = (num_slots, cdiv(out_features, 128), cdiv(in_features, 128))
    scale = torch.full(blocks, spread / 64, device=device)
    return ExpertWeights(values, in_features, scale, Fp8Groups(128))
