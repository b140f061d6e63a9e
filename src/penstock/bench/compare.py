"""Two results side by side: each figure, the second in parts of the first."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.bench.results import FIGURES, Run, Series
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Difference:
    """`worse` is how much worse the second is, as a share of the first; below 0 it is better."""

    name: str
    first: float
    second: float
    worse: float


def matches(first: Series, second: Series) -> list[tuple[Run, Run]]:
    """Runs with the same load; two single runs match whatever theirs is."""
    if len(first.runs) == len(second.runs) == 1:
        return [(first.runs[0], second.runs[0])]
    by_load = {run.load: run for run in second.runs}
    found = [(run, by_load[run.load]) for run in first.runs if run.load in by_load]
    if not found:
        raise ConfigError(f"{first.name} and {second.name} have no run with the same load")
    return found


def differences(first: Run, second: Run) -> Iterator[Difference]:
    for name, title, more_is_better in FIGURES:
        one, other = first.value(name), second.value(name)
        if one is None or other is None or one <= 0:
            continue
        change = other / one - 1
        yield Difference(title, one, other, -change if more_is_better else change)


def table(names: tuple[str, str], first: Run, second: Run) -> str:
    heads = f"{names[0]:>14.14} {names[1]:>14.14} {'change':>9}"
    lines = [f"{'load ' + first.load:<20} {heads}"]
    for one in differences(first, second):
        change = one.second / one.first - 1
        said = "better" if one.worse < 0 else "worse" if one.worse > 0 else ""
        values = f"{one.first:>14.2f} {one.second:>14.2f} {change:>+9.1%}"
        lines.append(f"{one.name:<20} {values} {said}".rstrip())
    return "\n".join(lines)
