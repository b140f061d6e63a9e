"""The rotary embedding as `config.json` says: `rope_parameters`, or `rope_theta` and
`rope_scaling`."""

from collections.abc import Mapping

from penstock.models.family import Family
from penstock.models.fields import Fields
from penstock.types.model_spec import RopeSpec

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def read_rope(
    config: Fields, family: Family, head_size: int, max_position: int, original: int
) -> tuple[RopeSpec, int]:
    """The rotary embedding, and the longest position the model is meant for with it.

    `original` is max_position_embeddings as the file has it, before overrides: dynamic scaling
    starts there. Linear and yarn scaling reach `factor` times as far as the model was trained.
    """
    given = config.mapping("rope_parameters") or config.mapping("rope_scaling") or family.rope
    if any(isinstance(value, Mapping) for value in given.values()):
        config.refuse("rope_parameters", "different rotary embeddings per layer are not supported")
    rope = Fields(config.folder, dict(given))
    kind = rope.get("rope_type") or rope.get("type") or "default"
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

    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        original = (config if config.get(name) else rope).count(name, max_position)
    default = max_position / original if kind == "yarn" else None
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
    )
    if kind == "linear":
        max_position = int(max_position * factor)
    elif kind == "yarn":
        max_position = max(max_position, int(original * factor))
    if max_position >= 2**31:
        config.refuse("rope scaling", f"its factor {factor} reaches {max_position} positions")
    return spec, max_position


def _beta(rope: Fields, name: str, usual: float) -> float:
    """Zero is as good as absent."""
    return rope.number(name, above=0.0) if rope.get(name) else usual
