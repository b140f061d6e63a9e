"""Result files, written and read back: one run each, a folder of them as a series."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_NEEDED = ("duration", "completed", "output_throughput", "total_token_throughput")
# Name in the file, what it is called, whether more of it is better.
FIGURES: tuple[tuple[str, str, bool], ...] = (
    ("request_throughput", "requests/s", True),
    ("request_goodput:", "good requests/s", True),
    ("output_throughput", "output tok/s", True),
    ("total_token_throughput", "total tok/s", True),
    ("user_throughput", "tok/s per user", True),
    *(
        (f"{kind}_{metric}_ms", f"{kind} {metric.upper()} ms", False)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "p99")
    ),
    ("mean_itl_per_token_ms", "mean ITL ms by token", False),
    ("output_throughput_first_to_last", "output tok/s, first to last token", True),
    ("total_token_throughput_first_to_last", "total tok/s, first to last token", True),
)


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    record: Mapping[str, Any]

    @property
    def load(self) -> str:
        """How much was asked of the server, in a word."""
        limit, rate = self.record.get("max_concurrency"), self.record.get("request_rate", "inf")
        if rate != "inf":
            return f"{rate:g}/s"
        return "all" if limit is None else str(limit)

    def value(self, name: str) -> float | None:
        found = self.record.get(name, self.record.get("extra", {}).get(name))
        return float(found) if isinstance(found, int | float) else None

    def extra(self, name: str) -> Mapping[str, Any]:
        """What Penstock's own client adds; empty in files of other tools."""
        found: Mapping[str, Any] = self.record.get("extra", {}).get(name, {})
        return found


@dataclass(frozen=True, slots=True)
class Series:
    """Runs against one server, with more and more load."""

    name: str
    runs: Sequence[Run]


def save(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf8")


def read_series(path: Path) -> Series:
    """A folder: all result files in it. A file: that one."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    runs = [_read(file) for file in files]
    if not runs:
        raise ConfigError(f"{path} holds no result file")
    return Series(path.stem if path.is_file() else path.name, sorted(runs, key=_load_order))


def _read(path: Path) -> Run:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(record, dict) or any(name not in record for name in _NEEDED):
        raise ConfigError(f"{path} is no result of `penstock bench serve --save-result`")
    return Run(path.stem, record)


def _load_order(run: Run) -> tuple[float, float, str]:
    rate, limit = run.record.get("request_rate", "inf"), run.record.get("max_concurrency")
    return (
        float("inf") if limit is None else float(limit),
        float(rate),
        run.name,
    )
