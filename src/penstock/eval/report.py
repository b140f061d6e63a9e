"""Answers -> verdicts -> scores by group, as a table and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from penstock.eval.task import Example, Response, Task


@dataclass(frozen=True, slots=True)
class Verdict:
    example: Example
    response: Response
    is_right: bool


@dataclass(frozen=True, slots=True)
class Score:
    num_examples: int
    num_right: int

    @property
    def share(self) -> float:
        return self.num_right / self.num_examples


def judge(task: Task, examples: Sequence[Example], responses: Sequence[Response]) -> list[Verdict]:
    return [
        Verdict(example, response, task.is_right(example, response))
        for example, response in zip(examples, responses, strict=True)
    ]


def score(verdicts: Sequence[Verdict]) -> Score:
    return Score(len(verdicts), sum(verdict.is_right for verdict in verdicts))


def by_group(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.example.group, []).append(verdict)
    return groups


def as_table(title: str, verdicts: Sequence[Verdict]) -> Table:
    table = Table("skill", title=title, title_justify="left")
    table.add_column("examples", justify="right")
    table.add_column("score", justify="right")
    for group, of_group in by_group(verdicts).items():
        _add_row(table, group, score(of_group))
    table.add_section()
    _add_row(table, "total", score(verdicts))
    return table


def as_json(task: str, model: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "task": task,
        "model": model,
        "total": _numbers(score(verdicts)),
        "groups": {group: _numbers(score(some)) for group, some in by_group(verdicts).items()},
        "examples": [
            {
                "group": verdict.example.group,
                "messages": verdict.example.messages,
                "expected": verdict.example.expected,
                "rule": verdict.example.rule,
                "answer": asdict(verdict.response),
                "is_right": verdict.is_right,
            }
            for verdict in verdicts
        ],
    }


def failures(verdicts: Sequence[Verdict], num_per_group: int) -> str:
    """The first wrong answers of every group, with what was asked and expected."""
    lines = []
    for group, of_group in by_group(verdicts).items():
        wrong = [verdict for verdict in of_group if not verdict.is_right]
        for verdict in wrong[:num_per_group]:
            asked = verdict.example.messages[-1].get("content")
            lines += [
                f"{group} ({verdict.example.rule}): {asked!r}",
                f"  expected {verdict.example.expected!r}",
                f"  said     {_shown(verdict.response)}",
            ]
    return "\n".join(lines)


def _shown(response: Response) -> str:
    parts = [repr(response.content)]
    parts += [f"thought {response.reasoning!r}"] if response.reasoning else []
    parts += [f"called {json.dumps(call)}" for call in response.calls]
    return ", ".join(parts)


def _add_row(table: Table, name: str, counted: Score) -> None:
    table.add_row(name, str(counted.num_examples), f"{counted.share:.1%}")


def _numbers(counted: Score) -> dict[str, float]:
    return {
        "num_examples": counted.num_examples,
        "num_right": counted.num_right,
        "score": counted.share,
    }
