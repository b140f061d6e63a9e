"""MMLU: questions from 57 subjects with four answers, of which the likeliest letter counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.eval.likelihood import Choices
from penstock.eval.published import Chosen
from penstock.eval.tasks.files import read_rows

_LETTERS = "ABCD"
_FIELDS = ("subject", "question", "choices", "answer")


def _read(data: Path, shots: Path | None, num_fewshot: int) -> list[Choices]:
    shown = _shown_by_subject(shots, num_fewshot)
    found = []
    for row in read_rows(data, *_FIELDS):
        subject = row["subject"]
        if num_fewshot and len(shown.get(subject, ())) < num_fewshot:
            raise ConfigError(f"{shots} has less than {num_fewshot} examples of {subject}")
        intro = "The following are multiple choice questions (with answers) about "
        parts = [f"{intro}{subject.replace('_', ' ')}.", *shown.get(subject, ())[:num_fewshot]]
        context = "\n\n".join([*parts, _question(row)])
        endings = tuple(f" {letter}" for letter in _LETTERS)
        found.append(Choices(subject, context, endings, int(row["answer"])))
    return found


def _shown_by_subject(shots: Path | None, num_fewshot: int) -> dict[str, list[str]]:
    if num_fewshot == 0:
        return {}
    if shots is None:
        raise ConfigError(f"{num_fewshot} examples to show are missing: name a file with --shots")
    shown: dict[str, list[str]] = {}
    for row in read_rows(shots, *_FIELDS):
        text = f"{_question(row)} {_LETTERS[int(row['answer'])]}"
        shown.setdefault(row["subject"], []).append(text)
    return shown


def _question(row: Mapping[str, Any]) -> str:
    choices = [f"{a}. {b}" for a, b in zip(_LETTERS, row["choices"], strict=True)]
    return "\n".join([str(row["question"]).strip(), *choices, "Answer:"])


MMLU = Chosen(
    file_names=("mmlu_test.jsonl", "mmlu_validation.jsonl"),
    shot_names=("mmlu_dev.jsonl",),
    version=1,
    num_fewshot=5,
    read=_read,
    by_group=True,
)
