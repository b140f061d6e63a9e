"""GSM8K: sums in words. The answer's number follows `####`, or is the last number said."""

import re
from pathlib import Path

from penstock.eval.published import Written
from penstock.eval.task import Example
from penstock.eval.tasks.files import first_rows, read_rows

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_STOP = ("Question:", "</s>", "<|im_end|>")


def _read(data: Path, shots: Path | None, num_fewshot: int) -> list[Example]:
    shown = "".join(
        f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
        for row in first_rows(shots, num_fewshot, "question", "answer")
    )
    return [
        Example(
            group="gsm8k",
            prompt=f"{shown}Question: {row['question']}\nAnswer:",
            stop=_STOP,
            expected=row["answer"].rpartition("####")[2].strip(),
            rule="number",
        )
        for row in read_rows(data, "question", "answer")
    ]


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def _after_hashes(text: str) -> str | None:
    found = _STRICT.search(text)
    return found[1] if found else None


def same_number(said: str, expected: str) -> bool:
    return _plain(said) == _plain(expected)


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").strip().rstrip(".")


GSM8K = Written(
    file_names=("gsm8k_test.jsonl", "test.jsonl"),
    shot_names=("gsm8k_train.jsonl", "train.jsonl"),
    version=3,
    num_fewshot=5,
    max_tokens=256,
    read=_read,
    filters={"flexible-extract": last_number, "strict-match": _after_hashes},
    is_equal=same_number,
)
