"""Files of requests for the offline benchmark: lengths drawn from a distribution, or real texts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.datasets.files import question_and_answer
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Normal:
    """Lengths around `mean`, at least 1."""

    mean: float
    stdev: float

    def draw(self, random: np.random.Generator, num: int) -> list[int]:
        drawn = random.normal(self.mean, self.stdev, num)
        return [max(1, round(float(one))) for one in drawn]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random: np.random.Generator, num: int) -> list[int]:
        if not 1 <= self.low <= self.high:
            raise ConfigError(
                f"lengths from {self.low} to {self.high}: the range must be from 1 up"
            )
        return [int(one) for one in random.integers(self.low, self.high + 1, num)]


Lengths = Normal | Uniform


def synthetic_lines(
    num_requests: int, inputs: Lengths, outputs: Lengths, vocabulary: Sequence[int], seed: int
) -> Iterator[dict[str, Any]]:
    """Random ids of `vocabulary`."""
    random = np.random.default_rng(seed)
    ids = np.asarray(vocabulary)
    input_lens, output_lens = inputs.draw(random, num_requests), outputs.draw(random, num_requests)
    for task, (num_input, num_output) in enumerate(zip(input_lens, output_lens, strict=True)):
        prompt = ids[random.integers(0, len(ids), num_input)]
        yield {"task_id": task, "input_ids": prompt.tolist(), "output_tokens": num_output}


def real_lines(
    path: Path,
    tokenizer: Tokenizer,
    num_requests: int,
    max_input_len: int | None,
    outputs: Lengths | None,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Questions of a JSON-lines file; where `outputs` is None, as long as their answers."""
    random = np.random.default_rng(seed)
    task = 0
    for row in _rows(path):
        if task == num_requests:
            break
        if (turns := question_and_answer(row)) is None:
            continue
        question, answer = (tokenizer.encode(text, False) for text in turns)
        if max_input_len is not None and len(question) > max_input_len:
            continue
        num_output = len(answer) or 1
        if outputs is not None:
            [num_output] = outputs.draw(random, 1)
        yield {"task_id": task, "input_ids": question, "output_tokens": num_output}
        task += 1


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} as JSON lines: {error}") from None
