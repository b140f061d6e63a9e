"""HellaSwag: how does the scene go on? Of four endings the likeliest counts."""

import re
from pathlib import Path

from penstock.eval.likelihood import Choices
from penstock.eval.published import Chosen
from penstock.eval.tasks.files import read_rows


def _read(data: Path, _shots: Path | None, _num_fewshot: int) -> list[Choices]:
    found = []
    for row in read_rows(data, "activity_label", "ctx", "endings", "label"):
        first, _, rest = row["ctx"].rpartition(". ")
        context = f"{first}. {rest[:1].upper()}{rest[1:]}" if first else row["ctx"]
        endings = tuple(f" {_clean(ending)}" for ending in row["endings"])
        text = _clean(f"{row['activity_label']}: {context}")
        found.append(Choices("hellaswag", text, endings, int(row["label"])))
    return found


def _clean(text: str) -> str:
    """Without the marks that the texts' source left in them, such as [header]."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


HELLASWAG = Chosen(
    file_names=("hellaswag_validation.jsonl", "hellaswag_test.jsonl"),
    version=1,
    read=_read,
    by_length=True,
)
