"""`CachedLayer`: a layer that remembers tokens. It says what; the memory is given to it."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from penstock.kernels.formats import InputFormat
from penstock.types.cache_spec import CacheSpec


class CachedLayer(nn.Module, ABC):
    group = 0  # of layers that remember alike; tells its blocks in a batch
    num_parts = 1  # ranks that share the tokens of each of its blocks
    # Cached tokens before a chunk that a CUDA graph holds; None: any number.
    max_captured_prefix: int | None = None

    @abstractmethod
    def cache_spec(self) -> CacheSpec: ...

    @abstractmethod
    def bind_cache(self, *planes: Tensor) -> None:
        """The planes of its spec, [blocks, *block_shape] each."""

    def accept(self, num_accepted_N: Tensor) -> None:
        """So many tokens of each sequence that decodes count, one at least; drafts behind them
        never were. Nothing to do where a token's place in the cache is its own: the next one
        overwrites it."""

    @abstractmethod
    def input_format(self, num_tokens: int) -> InputFormat:
        """The form in which it wants its input."""

    @abstractmethod
    def finish(self) -> None:
        """After loading: what was loaded is brought into the form it computes with."""
