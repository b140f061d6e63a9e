"""Writes the training corpus as rows of tokens: packing.py FOLDER --format ... --docs N.

A row is one chat, padded at its end to the next of a few widths, so that a batch of one width needs
no mask but the causal one. FOLDER gets the tokenizer and one file per worker with an array
[rows, width] of uint16 for every width: the token, with `LEARNED` set where the model is to say it.
Does not know torch.
"""

import argparse
import json
import multiprocessing
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from chat_format import TEMPLATES, segments
from corpus import Example, train_examples
from tokenizer import MARK_TOKENS, PAD, TURN_TOKENS, token_id, train_tokenizer, write_tokenizer
from tokenizers import Tokenizer

WIDTHS = (48, 64, 80, 96, 112, 128, 160, 192, 256, 320)
LEARNED = 1 << 15

Doc = tuple[list[int], list[bool]]

_ADDED = re.compile("(" + "|".join(map(re.escape, (*TURN_TOKENS, *MARK_TOKENS))) + ")")
# the tokenizer's own pieces, for ASCII
_PIECES = re.compile(
    r"'(?:s|t|m|d|re|ve|ll)|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)


class Encoder:
    """The tokenizer with a memory of every piece: the corpus has few, so it is five times as fast.

    Exact, because no token crosses the border of a piece.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        assert text.isascii(), text
        ids: list[int] = []
        known = self._known
        for i, chunk in enumerate(_ADDED.split(text)):
            for piece in (chunk,) if i % 2 else _PIECES.findall(chunk):
                found = known.get(piece)
                if found is None:
                    found = known[piece] = self._tokenizer.encode(piece).ids
                ids += found
        return ids


def encode(encoder: Encoder, format: str, examples: Iterable[Example]) -> Iterator[Doc]:
    """Token ids of each chat, and whether each is learned: exact, as the text is cut there."""
    for example in examples:
        ids: list[int] = []
        learned: list[bool] = []
        for part in segments(format, example):
            piece = encoder.ids(part.text)
            ids += piece
            learned += [part.is_learned] * len(piece)
        yield ids, learned


def rows_by_width(docs: Iterable[Doc], pad_id: int) -> dict[int, np.ndarray]:
    """The chats as rows of their width; what is longer than the last width is left out."""
    rows: dict[int, list[np.ndarray]] = {width: [] for width in WIDTHS}
    for ids, learned in docs:
        width = next((w for w in WIDTHS if w >= len(ids)), None)
        if width is not None:
            row = np.full(width, pad_id, np.uint16)
            row[: len(ids)] = np.array(ids, np.uint16) | np.array(learned, np.uint16) * LEARNED
            rows[width].append(row)
    return {width: np.stack(found) for width, found in rows.items() if found}


def _write_shard(folder: Path, format: str, shard: int, seed: int, num_docs: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    examples = train_examples(seed * 1000 + shard, num_docs)
    rows = rows_by_width(encode(Encoder(tokenizer), format, examples), token_id(tokenizer, PAD))
    arrays = {str(width): array for width, array in rows.items()}
    np.savez(folder / f"rows-{shard:02d}.npz", allow_pickle=False, **arrays)


def pack(folder: Path, format: str, seed: int, num_docs: int, num_workers: int) -> None:
    write_tokenizer(train_tokenizer(seed), folder, format)
    share = -(-num_docs // num_workers)
    tasks = [(folder, format, shard, seed, share) for shard in range(num_workers)]
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        pool.starmap(_write_shard, tasks, chunksize=1)
    about = {"format": format, "seed": seed, "docs": num_docs, "workers": num_workers}
    (folder / "packed.json").write_text(json.dumps(about) + "\n")


def load_rows(folder: Path) -> dict[int, np.ndarray]:
    """Every chat, by width."""
    shards = [np.load(path) for path in sorted(folder.glob("rows-*.npz"))]
    widths = sorted({int(width) for shard in shards for width in shard.files})
    return {
        width: np.concatenate([shard[str(width)] for shard in shards if str(width) in shard.files])
        for width in widths
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=tuple(TEMPLATES), default="chatml")
    parser.add_argument("--docs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    start = time.monotonic()
    pack(args.folder, args.format, args.seed, args.docs, args.workers)
    rows = load_rows(args.folder)
    num_tokens = sum(array.size for array in rows.values())
    num_learned = sum(int((array >= LEARNED).sum()) for array in rows.values())
    print(
        f"{sum(map(len, rows.values()))} of {args.docs} chats, {num_tokens / 1e6:.0f} M tokens "
        f"({num_learned / num_tokens:.1%} learned) in {time.monotonic() - start:.1f} s; "
        + ", ".join(f"{len(array)} of {width}" for width, array in rows.items())
    )


if __name__ == "__main__":
    main()
