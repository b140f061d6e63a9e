"""Scores as the table that lm-eval prints, which recipes show as what one should see."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HEADS = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
_RIGHT = ("Version", "n-shot", "Value", "Stderr")  # numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One line. `task` is empty where it goes on about the one above; `stderr` may be unknown."""

    task: str
    version: int | str
    num_fewshot: int
    metric: str
    value: float
    stderr: float | None = None
    filter: str = "none"
    more_is_better: bool = True


def share(
    task: str, version: int, num_fewshot: int, metric: str, right: Sequence[bool], filter: str = ""
) -> Score:
    """How many are right, with the standard error of a sample."""
    value = sum(right) / len(right)
    spread = math.sqrt(value * (1 - value) / (len(right) - 1)) if len(right) > 1 else None
    return Score(
        task=task,
        version=version,
        num_fewshot=num_fewshot,
        metric=metric,
        value=value,
        stderr=spread,
        filter=filter or "none",
    )


def as_text(scores: Sequence[Score]) -> str:
    rows, last = [], None
    for one in scores:
        is_new = one.task != last
        last = one.task
        rows.append(
            (
                one.task if is_new else "",
                str(one.version) if is_new else "",
                one.filter,
                str(one.num_fewshot),
                one.metric,
                "↑" if one.more_is_better else "↓",
                f"{one.value:.4f}",
                "±",
                "N/A" if one.stderr is None else f"{one.stderr:.4f}",
            )
        )
    columns = list(zip(_HEADS, *rows, strict=True))
    # One and two signs wide columns are drawn as wide as three.
    widths = [max(3 if not column[0] else 0, *map(len, column)) for column in columns]
    lines = [
        _line(f"{head:^{width}}" for head, width in zip(_HEADS, widths, strict=True)),
        _line(
            "-" * (width - 1) + ":" if head in _RIGHT else "-" * width
            for head, width in zip(_HEADS, widths, strict=True)
        ),
    ]
    for row in rows:
        cells = zip(_HEADS, row, widths, strict=True)
        lines.append(
            _line(cell.rjust(w) if head in _RIGHT else cell.ljust(w) for head, cell, w in cells)
        )
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "|" + "|".join(cells) + "|"
