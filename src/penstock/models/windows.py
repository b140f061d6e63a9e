"""Sliding windows of a model's layers, as `config.json` says: one reader for each way to say it.

A reader gives one window per layer, None for full attention.
"""

from collections.abc import Callable, Sequence

from penstock.models.fields import Fields

Windows = tuple[int | None, ...]
WindowReader = Callable[[Fields, int], Windows]
"""(config, number of layers) -> the window of each"""

_DEFAULT_WINDOW = 4096


def full_attention(config: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def in_every_layer(default: int | None) -> WindowReader:
    """`default`: where `sliding_window` is absent."""

    def read(config: Fields, num_layers: int) -> Windows:
        # Absent and null differ: null is what later versions of these models write for "none".
        absent = None if config.has("sliding_window") else default
        window = config.get("sliding_window", absent)
        return (None if window is None else config.count("sliding_window", absent),) * num_layers

    return read


def in_every_layer_if_used(config: Fields, num_layers: int) -> Windows:
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    return (config.count("sliding_window", _DEFAULT_WINDOW),) * num_layers


def in_upper_layers_if_used(config: Fields, num_layers: int) -> Windows:
    """From layer `max_window_layers` on, where `layer_types` says nothing."""
    return _by_layer_if_used(config, num_layers, lambda layer, first: layer >= first)


def in_alternate_lower_layers_if_used(config: Fields, num_layers: int) -> Windows:
    """Every second one below `max_window_layers`, where `layer_types` says nothing."""
    return _by_layer_if_used(
        config, num_layers, lambda layer, first: layer < first and layer % 2 == 0
    )


def in_every_second_layer(default: int) -> WindowReader:
    """From the first layer on, where `layer_types` says nothing."""

    def read(config: Fields, num_layers: int) -> Windows:
        window = config.count("sliding_window", default)
        if (kinds := config.texts("layer_types")) is None:
            return tuple(None if layer % 2 else window for layer in range(num_layers))
        return _by_kind(config, kinds, window, num_layers)

    return read


def in_all_but_every_nth_layer(name: str, n: int, default: int) -> WindowReader:
    """`name`: of the field with another n. Where `layer_types` says nothing."""

    def read(config: Fields, num_layers: int) -> Windows:
        window, every = config.count("sliding_window", default), config.count(name, n)
        if (kinds := config.texts("layer_types")) is None:
            return tuple(window if (layer + 1) % every else None for layer in range(num_layers))
        return _by_kind(config, kinds, window, num_layers)

    return read


def _by_layer_if_used(
    config: Fields, num_layers: int, has_window: Callable[[int, int], bool]
) -> Windows:
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = config.count("sliding_window", _DEFAULT_WINDOW)
    if (kinds := config.texts("layer_types")) is not None:
        return _by_kind(config, kinds, window, num_layers)
    first = config.count("max_window_layers", 28, least=0)
    return tuple(window if has_window(layer, first) else None for layer in range(num_layers))


def _by_kind(config: Fields, kinds: Sequence[str], window: int, num_layers: int) -> Windows:
    if len(kinds) != num_layers or not {"sliding_attention", "full_attention"}.issuperset(kinds):
        config.refuse(
            "layer_types",
            f"is {kinds}, it must say sliding_attention or full_attention for {num_layers} layers",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
