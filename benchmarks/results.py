"""Result files: one run of one engine each, in benchmarks/results/*.json. Read, checked, written.

A figure is a number and, where one is known, the roofline bound for the same work. What a page
shows of them is report.py; what is measured is table.py.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

FOLDER = Path(__file__).parent / "results"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Figure(_Record):
    value: float = Field(gt=0.0)
    roofline: float | None = Field(default=None, gt=0.0)


class RowResult(_Record):
    """What was found for one row of the table (benchmarks/shapes.py) or one load."""

    model: str
    figures: Mapping[str, Figure] = Field(default_factory=dict)
    details: Mapping[str, Any] = Field(default_factory=dict)  # what is no single number
    notes: str = ""


class Run(_Record):
    """One command of one engine on one machine. `date` and `commit` are None where not recorded."""

    benchmark: str  # a mode of table.py, "table" for its plain one, or "traffic"
    engine: str
    version: str | None
    date: str | None = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    hardware: str
    software: Mapping[str, str]
    command: str
    commit: str | None
    workload: str
    notes: Sequence[str] = ()
    rows: Mapping[str, RowResult]

    @model_validator(mode="after")
    def _has_something(self) -> "Run":
        if not self.rows:
            raise ValueError("a result file without rows")
        return self


def read_runs(folder: Path = FOLDER) -> dict[str, Run]:
    """Every file by its name, the oldest run first; of one date by name."""
    runs = {path.name: Run.model_validate_json(path.read_text()) for path in folder.glob("*.json")}
    return dict(sorted(runs.items(), key=lambda one: (one[1].date or "", one[0])))


def newest(
    runs: Iterable[Run], benchmark: str, engine: str, row: str, figure: str
) -> Figure | None:
    """The figure of the last run that has it."""
    found = None
    for run in runs:
        if run.benchmark == benchmark and run.engine == engine and row in run.rows:
            found = run.rows[row].figures.get(figure, found)
    return found


def row_result(model: str, found: Mapping[str, Any]) -> RowResult:
    """Numbers become figures, also those compared with a roofline; the rest are details."""
    figures: dict[str, Figure] = {}
    details: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, Mapping) and "ours" in value:
            figures[str(name)] = Figure(value=value["ours"], roofline=value["roofline"])
        elif isinstance(value, int | float) and isinstance(name, str):
            figures[name] = Figure(value=value)
        else:
            details[str(name)] = value
    return RowResult(model=model, figures=figures, details=details)


def this_run(benchmark: str, workload: str, rows: Mapping[str, RowResult]) -> Run:
    """A run of this code, on this machine, today."""
    return Run(
        benchmark=benchmark,
        engine="penstock",
        version=metadata.version("penstock"),
        date=time.strftime("%Y-%m-%d"),
        hardware=hardware(),
        software=_software(),
        command=shlex.join(["python", *sys.argv]),
        commit=_commit(),
        workload=workload,
        rows=rows,
    )


def write_run(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = run.model_dump(mode="json", exclude_defaults=True)
    path.write_text(json.dumps(shown, indent=1) + "\n")


def hardware() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"1 x {torch.cuda.get_device_name(0)}, {gib:.0f} GiB"


def _software() -> dict[str, str]:
    import torch

    found = {name: metadata.version(name) for name in ("torch", "triton")}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _commit() -> str | None:
    """None outside of a clone, and with changes that no commit has."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return (
            None
            if git("status", "--porcelain", "--untracked-files=no")
            else git("rev-parse", "HEAD")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
