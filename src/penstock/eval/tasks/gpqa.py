"""GPQA: hard questions with four answers, of which the model names a letter."""

import random
import re
from pathlib import Path

from penstock.eval.published import Written
from penstock.eval.task import Example
from penstock.eval.tasks.files import read_rows

_COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
_LETTERS = "ABCD"
_ASK = "Answer the following multiple choice question. The last line of your response should be "
_ASK += "'Answer: LETTER', where LETTER is one of ABCD. Think step by step before answering.\n\n"
_SAID = re.compile(r"answer\s*(?:is)?\s*:?\s*\**\(?([A-D])\b", re.IGNORECASE)


def _read(data: Path, _shots: Path | None, _num_fewshot: int) -> list[Example]:
    examples = []
    for number, row in enumerate(read_rows(data, *_COLUMNS)):
        order = list(range(4))
        random.Random(number).shuffle(order)
        answers = [str(row[_COLUMNS[1 + i]]).strip() for i in order]
        listed = "\n".join(f"{a}) {b}" for a, b in zip(_LETTERS, answers, strict=True))
        text = f"{_ASK}{str(row['Question']).strip()}\n\n{listed}"
        examples.append(
            Example(
                group="gpqa",
                messages=({"role": "user", "content": text},),
                expected=_LETTERS[order.index(0)],
                rule="letter",
            )
        )
    return examples


def _letter(text: str) -> str | None:
    found = _SAID.findall(text)
    return found[-1].upper() if found else None


GPQA = Written(
    file_names=("gpqa_diamond.csv", "gpqa_main.csv", "gpqa_extended.csv", "gpqa.jsonl"),
    version=1,
    max_tokens=16384,
    read=_read,
    filters={"letter": _letter},
    is_equal=str.__eq__,
)
