"""What the server says of itself when it is ready: times, settings with reasons, memory, a try."""

import json
from collections.abc import Iterable

from penstock.ipc.messages import EngineInfo


def startup_report(
    info: EngineInfo, total_s: float, model: str, host: str, port: int, has_key: bool
) -> str:
    """`total_s` is what a user waited; the engine's own phases do not cover all of it."""
    reasons = {name: reason for name, _, reason in info.choices}
    chosen = {name: value for name, value, _ in info.choices}
    settings = {name: _shown(value) for name, value in info.config.items()} | chosen
    times = (*info.timeline, ("total, as waited for", total_s))
    sections = (
        (
            "start-up",
            [(phase, f"{seconds:8.2f} s") for phase, seconds in times],
        ),
        ("settings", [(name, value, reasons.get(name, "")) for name, value in settings.items()]),
        ("memory", [(name, _size(size)) for name, size in info.memory.items()]),
    )
    parts = [f"\n{title}\n{_aligned(rows)}" for title, rows in sections]
    return "\n".join([*parts, "\ntry", "  " + _curl(model, host, port, has_key), ""])


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    width = max((len(row[0]) for row in rows), default=0)
    value_width = min(max((len(row[1]) for row in rows), default=0), 40)
    lines = (
        f"  {row[0]:<{width}}  {row[1]:<{value_width}}  {'  '.join(row[2:])}".rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
    return f"{num_bytes / unit:8.2f} {name}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _curl(model: str, host: str, port: int, has_key: bool) -> str:
    shown_host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    if ":" in shown_host:
        shown_host = f"[{shown_host}]"
    body = json.dumps({"model": model, "prompt": "Where is New York?", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $API_KEY"' if has_key else ""
    quoted = body.replace("'", "'\\''")
    return (
        f"curl http://{shown_host}:{port}/v1/completions -H 'Content-Type: application/json'"
        f"{key} -d '{quoted}'"
    )
