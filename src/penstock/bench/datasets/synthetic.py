"""Prompts made up of lengths alone: runs of token ids, pieces of real text, random pictures."""

import base64
import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.bench.datasets.files import plain_ids, read_turns, sharegpt_file
from penstock.bench.datasets.options import DatasetOptions
from penstock.bench.records import Ask
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer


def random(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """Of ShareGPT's texts where there are any to be had, else runs of ids."""
    if options.random_ids or sharegpt_file(options) is None:
        return random_ids(options, tokenizer)
    turns = (ids for ids, _ in read_turns(options, tokenizer) if ids)
    texts = list(itertools.islice(turns, options.num_prompts))
    if not texts:
        raise ConfigError(f"{options.dataset_path} holds no conversation")

    def repeated(index: int, length: int) -> list[int]:
        text = texts[index % len(texts)]
        return (text * -(-length // len(text)))[:length]

    return _asks(options, tokenizer, repeated)


def random_ids(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """Request i has consecutive ids from a random place on, so no two begin alike."""
    ids = plain_ids(tokenizer)
    offsets = np.random.default_rng(options.seed).integers(0, len(ids), options.num_prompts)

    def run(index: int, length: int) -> list[int]:
        begin = int(offsets[index]) + index
        return [ids[(begin + i) % len(ids)] for i in range(length)]

    return _asks(options, tokenizer, run)


def random_image(options: DatasetOptions, tokenizer: Tokenizer) -> list[Ask]:
    """Text as in `random_ids`, each prompt with pictures of noise."""
    if options.tokenize_on_client:
        raise ConfigError("pictures go with text; leave out --tokenize-on-client")
    width = options.random_image_size or options.random_image_width
    height = options.random_image_size or options.random_image_height
    noise = np.random.default_rng(options.seed)

    def urls() -> tuple[str, ...]:
        return tuple(
            "data:image/png;base64," + base64.b64encode(png(noise, width, height)).decode()
            for _ in range(options.random_num_images)
        )

    return [replace(ask, image_urls=urls()) for ask in random_ids(options, tokenizer)]


def png(noise: np.random.Generator, width: int, height: int) -> bytes:
    """A picture of random pixels, which does not compress."""
    rows = noise.integers(0, 256, (height, 1 + 3 * width), dtype=np.uint8)
    rows[:, 0] = 0  # every row says how it is filtered: not at all

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(rows.tobytes(), 1)
    end = chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + end


def _asks(
    options: DatasetOptions, tokenizer: Tokenizer, ids_of: Callable[[int, int], Sequence[int]]
) -> list[Ask]:
    lengths = np.random.default_rng([options.seed, 1])
    input_lens = _lengths(lengths, options.random_input_len, options)
    output_lens = _lengths(lengths, options.random_output_len, options)
    ids = plain_ids(tokenizer)
    prefix = [ids[i] for i in lengths.integers(0, len(ids), options.random_prefix_len)]
    asks = []
    for index, (num_input, num_output) in enumerate(zip(input_lens, output_lens, strict=True)):
        prompt = [*prefix, *ids_of(index, num_input)]
        asks.append(
            Ask(
                prompt=tuple(prompt) if options.tokenize_on_client else tokenizer.decode(prompt),
                num_input=len(prompt),
                max_tokens=num_output,
            )
        )
    return asks


def _lengths(lengths: np.random.Generator, mean: int, options: DatasetOptions) -> list[int]:
    ratio = options.random_range_ratio
    low, high = max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio)))
    return [int(one) for one in lengths.integers(low, high + 1, options.num_prompts)]
