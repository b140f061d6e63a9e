"""Finds blocks by the tokens they hold: a chain of digests, one per full block.

A block may have extra keys, for what its contents depend on beside its tokens: equal tokens under
other keys never match, nor do the blocks behind them. Tokens and keys are compared too: a digest
alone decides nothing.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Keys = tuple[str, ...]
ExtraKeys = Mapping[int, Keys]  # index of a block in its sequence -> its keys; most have none

ROOT = bytes(16)  # the digest before the first block

_MAX_CANDIDATES = 32  # newest blocks compared for a partial match; bounds the work per admission


def next_digest(parent: bytes, tokens: Tokens, keys: Keys = ()) -> bytes:
    digest = hashlib.blake2b(parent + tokens.tobytes(), digest_size=16)
    for key in keys:
        digest.update(len(key.encode()).to_bytes(8, "little") + key.encode())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: bytes
    digest: bytes
    tokens: Tokens
    keys: Keys


class PrefixIndex:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._entry_of: dict[int, _Entry] = {}
        # (parent, keys, first token) -> blocks
        self._children: dict[tuple[bytes, Keys, int], dict[int, None]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def find(self, digest: bytes, tokens: Tokens, keys: Keys = ()) -> int | None:
        block = self._block_of.get(digest)
        if block is None:
            return None
        entry = self._entry_of[block]
        return block if entry.keys == keys and np.array_equal(entry.tokens, tokens) else None

    def find_partial(self, parent: bytes, tokens: Tokens, keys: Keys = ()) -> tuple[int, int]:
        """The block after `parent` that shares most leading tokens, and how many; else (0, 0)."""
        best = (0, 0)
        candidates = self._children.get((parent, keys, int(tokens[0])), {})
        for block in islice(reversed(candidates), _MAX_CANDIDATES):
            known = self._entry_of[block].tokens[: len(tokens)]
            differs = np.flatnonzero(known != tokens[: len(known)])
            num_equal = int(differs[0]) if len(differs) else len(known)
            if num_equal > best[1]:
                best = (block, num_equal)
        return best

    def insert(
        self, block: int, parent: bytes, digest: bytes, tokens: Tokens, keys: Keys = ()
    ) -> None:
        """Index a full block; a second block with the same tokens is left out."""
        if digest in self._block_of:
            return
        self._block_of[digest] = block
        self._entry_of[block] = _Entry(parent, digest, tokens.copy(), keys)
        self._children.setdefault((parent, keys, int(tokens[0])), {})[block] = None

    def remove(self, block: int) -> None:
        entry = self._entry_of.pop(block)
        del self._block_of[entry.digest]
        key = (entry.parent, entry.keys, int(entry.tokens[0]))
        del self._children[key][block]
        if not self._children[key]:
            del self._children[key]
