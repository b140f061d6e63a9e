"""`cuda_graph_config`: for which decode batch sizes, prompt lengths and mixes of both a graph is
captured."""

import itertools
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator

from penstock.config.base import StrictModel, setting

MAX_GRAPH_SIZE = 65536
DEFAULT_MAX_SIZE = 512
# Beyond these, work takes longer than its launches, which a graph saves.
DEFAULT_NUM_TOKENS = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)

# Of steps that mix decodes and prompt tokens: the axes of a grid. What is captured at start has a
# place for every mix up to the largest of both; what is captured later wastes less.
_MIXED_DECODES = (8, 32, 64, 128, 256, 384, 512)
_MIXED_TOKENS = (64, 128, 256, 512)
_IDLE_DECODES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
_IDLE_TOKENS = (32, 64, 128, 192, 256, 384, 512)
MIXED_TOKENS = _MIXED_TOKENS[-1]  # prompt tokens beside decodes that a graph has room for

Mix = tuple[int, int]
"""Decodes and prompt tokens of a captured step."""


class CudaGraphConfig(StrictModel):
    batch_sizes: list[Annotated[int, Field(ge=1, le=MAX_GRAPH_SIZE)]] | None = setting(
        None,
        "Batch sizes to capture, in any order. null: a list made from max_batch_size.",
        min_length=1,
        max_length=1024,
    )
    max_batch_size: int = setting(
        0,
        "Largest batch size to capture. 0: the largest of batch_sizes, and without those "
        f"{DEFAULT_MAX_SIZE} or the server's max_batch_size, whichever is smaller.",
        ge=0,
        le=MAX_GRAPH_SIZE,
    )
    enable_padding: bool = setting(
        True, "Run a batch in the next larger graph instead of without one when no size matches."
    )

    num_tokens: list[Annotated[int, Field(ge=1, le=MAX_GRAPH_SIZE)]] | None = setting(
        None,
        "Numbers of prompt tokens to capture; a step of up to three prompts runs in the next "
        "larger graph. []: none. null: "
        + ", ".join(map(str, DEFAULT_NUM_TOKENS))
        + ", as far as max_num_tokens allows.",
        max_length=1024,
    )

    enable_mixed: bool = setting(
        True,
        "Capture steps that mix decodes and prompt tokens, too: up to 512 of each, 15 prompts; "
        "about 28 graphs at start, about 63 more while the server is idle. Needs enable_padding; "
        "without that there are none.",
    )

    @model_validator(mode="after")
    def _mixes_are_padded(self) -> "CudaGraphConfig":
        is_asked = self.enable_mixed and "enable_mixed" in self.model_fields_set
        if is_asked and not self.enable_padding:
            raise ValueError(
                "enable_mixed pads steps to the next captured one, but enable_padding is false; "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _list_and_maximum_agree(self) -> "CudaGraphConfig":
        if self.batch_sizes and self.max_batch_size not in (0, max(self.batch_sizes)):
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}, but the largest of batch_sizes is "
                f"{max(self.batch_sizes)}; give only one of the two or make them equal"
            )
        return self

    def sizes(self, max_rows: int) -> tuple[int, ...]:
        """Ascending sizes to capture when a batch has at most `max_rows` sequences."""
        if self.batch_sizes:
            wanted: Iterable[int] = self.batch_sizes
        else:
            largest = self.max_batch_size or min(DEFAULT_MAX_SIZE, max_rows)
            wanted = padded_sizes(largest) if self.enable_padding else exact_sizes(largest)
        # What was asked beyond the batch limit is served by one graph of exactly that limit.
        return tuple(sorted({min(size, max_rows) for size in wanted}))

    def token_sizes(self, max_num_tokens: int) -> tuple[int, ...]:
        """Ascending sizes of prompt steps to capture."""
        wanted = DEFAULT_NUM_TOKENS if self.num_tokens is None else self.num_tokens
        return tuple(sorted({size for size in wanted if size <= max_num_tokens}))

    def mixes(self, max_rows: int, max_num_tokens: int) -> tuple[tuple[Mix, ...], tuple[Mix, ...]]:
        """What to capture at start and what later, each with the largest step first."""
        if not (self.enable_mixed and self.enable_padding):
            return (), ()
        at_start = {
            (min(decodes, max_rows), min(tokens, max_num_tokens))
            for decodes in _MIXED_DECODES
            for tokens in _MIXED_TOKENS
        }
        later = {
            (decodes, tokens)
            for decodes in _IDLE_DECODES
            for tokens in _IDLE_TOKENS
            if decodes <= max_rows and tokens <= max_num_tokens
        }
        return _largest_first(at_start), _largest_first(later - at_start)


def _largest_first(mixes: Iterable[Mix]) -> tuple[Mix, ...]:
    return tuple(sorted(mixes, key=lambda mix: (sum(mix), mix), reverse=True))


def padded_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every 8th up to 128, every 16th up to 256, every 32nd up to 512, every 64th,
    and `largest` itself: at most an eighth of a large step is padding, whose GEMMs take as long.
    """
    steps = (range(8, 129, 8), range(144, 257, 16), range(288, 513, 32), range(576, largest, 64))
    sizes = [1, 2, 4, *itertools.chain(*steps)]
    return [size for size in sizes if size < largest] + [largest]


def exact_sizes(largest: int) -> list[int]:
    """All up to 32, as without padding a size serves only itself, then powers of two."""
    powers = [2**exponent for exponent in range(6, largest.bit_length())]
    sizes = [*range(1, 33), *powers]
    return [size for size in sizes if size < largest] + [largest]
