"""The rotary embedding as `config.json` says: `rope_parameters`, or `rope_theta` and
`rope_scaling`."""

from collections.abc import Mapping
from typing import Any

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.types.model_spec import RopeSpec

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FULL, _WINDOWED = "full_attention", "sliding_attention"  # whose rotary embeddings may differ


def read_rope(
    config: Fields, family: Family, head_size: int, max_position: int, original: int
) -> tuple[RopeSpec, int]:
    """The rotary embedding, and the longest position the model is meant for with it.

    `original` is max_position_embeddings as the file has it, before overrides: dynamic scaling
    starts there. Linear and yarn scaling reach `factor` times as far as the model was trained.
    """
    rope = Fields(config.folder, _given(config, family, _FULL))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("su", "yarn") and rope.has("short_factor"):
        kind = "longrope"  # as it was called at first
    kind = config.one_of("rope type", kind, _KINDS)
    partial = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", family.rotated or 1.0)
    )
    if family.rotated is None and partial != 1.0:
        config.refuse("partial_rotary_factor", f"is {partial}, only 1.0 is supported")
    if not 0.0 < partial <= 1.0:
        config.refuse("partial_rotary_factor", f"is {partial}, it must be a share of the head")
    if (num_channels := int(head_size * partial)) % 2 or num_channels < 2 + 2 * (kind == "dynamic"):
        config.refuse("head size", f"{num_channels} channels of a head cannot be rotated in pairs")
    usual = family.rope.get("rope_theta", 10000.0)
    theta = rope.number("rope_theta", config.number("rope_theta", usual), above=1.0)
    if kind == "default":
        return RopeSpec(theta=theta, partial_factor=partial), max_position

    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        original = (config if config.get(name) else rope).count(name, max_position)
    if kind == "longrope" and original < 2:
        config.refuse(name, f"is {original}, it must be more than 1")
    default = max_position / original if kind in ("yarn", "longrope") else None
    factor = rope.number("factor", default, above=0.0)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        config.refuse("high_freq_factor", f"is {high}, not more than low_freq_factor, {low}")
    spec = RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=_beta(rope, "beta_fast", 32.0),
        beta_slow=_beta(rope, "beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        partial_factor=partial,
        short_factors=_per_pair(rope, "short_factor", num_channels) if kind == "longrope" else (),
        long_factors=_per_pair(rope, "long_factor", num_channels) if kind == "longrope" else (),
    )
    if kind == "linear" and family.window_theta is None:  # else it is counted already
        max_position = int(max_position * factor)
    elif kind == "yarn":
        max_position = max(max_position, int(original * factor))
    if max_position >= 2**31:
        config.refuse("rope scaling", f"its factor {factor} reaches {max_position} positions")
    return spec, max_position


def read_window_rope(config: Fields, family: Family) -> RopeSpec | None:
    """That of layers with a window, where the family has one of its own."""
    if family.window_theta is None:
        return None
    rope = Fields(config.folder, _given(config, family, _WINDOWED))
    if (kind := rope.get("rope_type", "default")) != "default":
        config.refuse("rope_parameters", f"{kind!r} in layers with a window is not supported")
    usual = config.number("rope_local_base_freq", family.window_theta)
    return RopeSpec(theta=rope.number("rope_theta", usual, above=1.0))


def _given(config: Fields, family: Family, layers: str) -> dict[str, Any]:
    """What the file says of the rotary embedding of such layers."""
    given = config.mapping("rope_parameters") or config.mapping("rope_scaling") or family.rope
    if not any(isinstance(value, Mapping) for value in given.values()):
        return dict(given) if layers == _FULL else {}
    if family.window_theta is None:
        config.refuse("rope_parameters", "different rotary embeddings per layer are not supported")
    return dict(Fields(config.folder, given).mapping(layers))


def _per_pair(rope: Fields, name: str, num_channels: int) -> tuple[float, ...]:
    found = rope.numbers(name)
    if len(found) != num_channels // 2 or min(found, default=0.0) <= 0:
        rope.refuse(name, f"has {len(found)} numbers, it must have {num_channels // 2} above 0")
    return found


def _beta(rope: Fields, name: str, usual: float) -> float:
    """Zero is as good as absent."""
    return rope.number(name, above=0.0) if rope.get(name) else usual
