"""AIME: contest problems whose answers are numbers from 0 to 999, boxed or said last."""

import re
from functools import partial
from pathlib import Path

from penstock.eval.published import Written
from penstock.eval.task import Example
from penstock.eval.tasks.files import read_rows
from penstock.eval.tasks.gsm8k import last_number, same_number

_ASK = "\n\nReason step by step, and put your final answer within \\boxed{}."
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def _read(name: str, data: Path, _shots: Path | None, _num_fewshot: int) -> list[Example]:
    return [
        Example(
            group=name,
            messages=({"role": "user", "content": row["problem"] + _ASK},),
            expected=str(row["answer"]).lstrip("0") or "0",
            rule="number",
        )
        for row in read_rows(data, "problem", "answer")
    ]


def _boxed(text: str) -> str | None:
    """What the last box holds, else the last number."""
    found = _BOXED.findall(text)
    return found[-1].lstrip("0") or "0" if found else last_number(text)


def _aime(year: int) -> Written:
    return Written(
        file_names=(f"aime_{year}.jsonl",),
        version=1,
        max_tokens=16384,
        read=partial(_read, f"aime{year % 100}"),
        filters={"boxed": _boxed},
        is_equal=same_number,
    )


AIME = {f"aime{year % 100}": _aime(year) for year in (2024, 2025, 2026)}
