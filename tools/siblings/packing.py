"""Writes the training corpus as packed rows of tokens: packing.py FOLDER --format ... --docs N.

A row holds whole chats one after the other, padded at its end. FOLDER gets the tokenizer and one
file per worker with three arrays [rows, row_size]: `tokens`, `positions` (0 at the start of a chat
and in the padding) and `learned` (the tokens that the model is to say). Does not know torch.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from chat_format import TEMPLATES, segments
from corpus import Example, train_examples
from tokenizer import PAD, token_id, train_tokenizer, write_tokenizer
from tokenizers import Tokenizer

ROW_SIZE = 512
_BATCH = 2000  # chats tokenised at once
_OPEN_ROWS = 32

Doc = tuple[list[int], list[bool]]


def encode(tokenizer: Tokenizer, format: str, examples: Iterable[Example]) -> list[Doc]:
    """Token ids of each chat, and whether each is learned: exact, as the text is cut there."""
    cut = [segments(format, example) for example in examples]
    encoded = iter(tokenizer.encode_batch_fast([part.text for parts in cut for part in parts]))
    docs = []
    for parts in cut:
        ids: list[int] = []
        learned: list[bool] = []
        for part in parts:
            piece = next(encoded).ids
            ids += piece
            learned += [part.is_learned] * len(piece)
        docs.append((ids, learned))
    return docs


class Packer:
    """Fills rows with whole chats: each goes into the first open row that has room."""

    def __init__(self, pad_id: int, row_size: int = ROW_SIZE) -> None:
        self._pad_id = pad_id
        self._row_size = row_size
        self._open: list[list[Doc]] = []
        self._free: list[int] = []
        self._rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.num_dropped = 0

    def add(self, doc: Doc) -> None:
        size = len(doc[0])
        if size > self._row_size:
            self.num_dropped += 1
            return
        for i, free in enumerate(self._free):
            if free >= size:
                self._open[i].append(doc)
                self._free[i] -= size
                return
        if len(self._open) == _OPEN_ROWS:
            fullest = self._free.index(min(self._free))
            self._close(self._open.pop(fullest))
            self._free.pop(fullest)
        self._open.append([doc])
        self._free.append(self._row_size - size)

    def _close(self, docs: list[Doc]) -> None:
        tokens = np.full(self._row_size, self._pad_id, np.uint16)
        positions = np.zeros(self._row_size, np.uint16)
        learned = np.zeros(self._row_size, np.bool_)
        start = 0
        for ids, marks in docs:
            end = start + len(ids)
            tokens[start:end] = ids
            positions[start:end] = np.arange(len(ids))
            learned[start:end] = marks
            start = end
        self._rows.append((tokens, positions, learned))

    def arrays(self) -> dict[str, np.ndarray]:
        for docs in self._open:
            self._close(docs)
        self._open, self._free = [], []
        columns = zip(*self._rows, strict=True)
        names = ("tokens", "positions", "learned")
        return {name: np.stack(column) for name, column in zip(names, columns, strict=True)}


def _write_shard(folder: Path, format: str, shard: int, seed: int, num_docs: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = "1"  # the workers are the parallelism
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    packer = Packer(token_id(tokenizer, PAD))
    examples = train_examples(seed * 1000 + shard, num_docs)
    while batch := [example for example, _ in zip(examples, range(_BATCH), strict=False)]:
        for doc in encode(tokenizer, format, batch):
            packer.add(doc)
    np.savez(folder / f"rows-{shard:02d}.npz", allow_pickle=False, **packer.arrays())


def pack(folder: Path, format: str, seed: int, num_docs: int, num_workers: int) -> None:
    write_tokenizer(train_tokenizer(seed), folder, format)
    share = -(-num_docs // num_workers)
    tasks = [(folder, format, shard, seed, share) for shard in range(num_workers)]
    with multiprocessing.Pool(num_workers) as pool:
        pool.starmap(_write_shard, tasks, chunksize=1)
    about = {"format": format, "seed": seed, "docs": num_docs, "workers": num_workers}
    (folder / "packed.json").write_text(json.dumps(about) + "\n")


def load_rows(folder: Path) -> dict[str, np.ndarray]:
    shards = [np.load(path) for path in sorted(folder.glob("rows-*.npz"))]
    return {
        name: np.concatenate([shard[name] for shard in shards])
        for name in ("tokens", "positions", "learned")
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
    num_rows, row_size = rows["tokens"].shape
    print(
        f"{args.docs} chats in {num_rows} rows of {row_size} "
        f"({rows['positions'].astype(bool).mean():.1%} full, "
        f"{rows['learned'].mean():.1%} learned) in {time.monotonic() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
