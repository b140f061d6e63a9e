"""What the server says of itself when it is ready: a few lines with its address and a command.

`full_report` has everything, as `GET /version` does: times, settings with reasons, memory.
"""

import json
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.frontend.pipeline import GenerationPipeline
from penstock.ipc.messages import EngineInfo
from penstock.types.pooling import Task

_QUESTION = "What is the capital of France?"
_LESS = "lowered from"  # how `config.resolve` begins to say why a setting is less than asked
_CHAT_URLS = (
    "http://localhost:8000",
    "http://127.0.0.1:8000",
)  # where `penstock chat` looks by itself
_ANY_ADDRESS = {"0.0.0.0": "localhost", "::": "localhost"}


def base_url(host: str, port: int) -> str:
    """For a client on this machine."""
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ready_report(
    pipeline: GenerationPipeline, waited_s: float, model: str, url: str, has_key: bool
) -> str:
    """`waited_s` is what a user waited; the engine's own phases do not cover all of it."""
    info = pipeline.client.info
    chosen = {one.name: (one.value, one.reason) for one in info.choices}
    rows = [("device", _device(info)), ("memory", _memory(info)), ("limits", _limits(info))]
    if "generation_config" in chosen:
        rows.append(("sampling", "{} ({})".format(*chosen["generation_config"])))
    # What somebody asked for and does not get is said aloud.
    rows += [(name, f"{value}, {why}") for name, (value, why) in chosen.items() if _LESS in why]
    rows.append(("more", f"{url}/version, or start with --log_level verbose"))
    lines = [_aligned(rows), f"\n{model} is ready on {url} after {waited_s:.1f} s; try"]
    if pipeline.renderer is not None and info.task is Task.GENERATE:
        lines.append(f"  {chat_command(url)}")
    curl = curl_command(pipeline, model, url, has_key).replace("\n", "\n  ")
    return "\n".join(("", *lines, f"  {curl}\n"))


def full_report(info: EngineInfo, waited_s: float) -> str:
    reasons = {one.name: one.reason for one in info.choices}
    chosen = {one.name: one.value for one in info.choices}
    settings = {name: _shown(value) for name, value in info.config.items()} | chosen
    times = (*info.timeline, ("total, as waited for", waited_s))
    sections = (
        ("start-up", [(phase, f"{seconds:8.2f} s") for phase, seconds in times]),
        ("settings", [(name, value, reasons.get(name, "")) for name, value in settings.items()]),
        ("memory", [(name, f"{_size(size):>12}") for name, size in info.memory.items()]),
    )
    return "\n".join(f"\n{title}\n{_aligned(rows)}" for title, rows in sections)


def curl_command(pipeline: GenerationPipeline, model: str, url: str, has_key: bool) -> str:
    """One question to this model, in the form it takes; several lines, none of them long."""
    body: dict[str, Any] = {"model": model}
    task = pipeline.client.info.task
    if task is Task.EMBED:
        path = "/v1/embeddings"
        body["input"] = _QUESTION if pipeline.tokenizer else [1, 2, 3]
    elif task is Task.SCORE:
        path = "/v1/rerank"
        body |= {"query": _QUESTION, "documents": ["Paris is.", "A river runs."]}
    elif pipeline.renderer is not None:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": _QUESTION}]
    else:
        path = "/v1/completions"
        body |= {"prompt": _QUESTION if pipeline.tokenizer else [1, 2, 3], "max_tokens": 16}
    options = ["-H 'Content-Type: application/json'"]
    if has_key:
        options.append('-H "Authorization: Bearer $API_KEY"')
    options.append(f"-d {shlex.quote(json.dumps(body))}")
    return " \\\n  ".join((f"curl {url}{path}", *options))


def chat_command(url: str) -> str:
    """As it can be typed in the shell this process was started from."""
    program, here, command = Path(sys.prefix, "bin", "penstock"), Path.cwd(), "penstock"
    if program.exists() and shutil.which(command) != str(program):
        command = str(program.relative_to(here) if program.is_relative_to(here) else program)
    return f"{shlex.quote(command)} chat" + ("" if url in _CHAT_URLS else f" --url {url}")


def _device(info: EngineInfo) -> str:
    is_cpu = info.config.get("device") == "cpu"
    threads = info.config.get("num_threads") if is_cpu else None
    parts = (
        f"CPU ({info.device})" if is_cpu else info.device,
        info.config.get("dtype"),
        f"{num_ranks} ranks" if (num_ranks := len(info.rank_weight_bytes)) > 1 else None,
        f"{threads} thread{'s' if threads > 1 else ''}" if threads else None,
    )
    return ", ".join(part for part in parts if part)


def _memory(info: EngineInfo) -> str:
    parts = [
        f"{name} {_size(info.memory[field])}"
        for name, field in (("weights", "weights_bytes"), ("cache", "kv_cache_bytes"))
        if field in info.memory
    ]
    return ", ".join([*parts, f"room for {info.total_blocks * info.tokens_per_block} tokens"])


def _limits(info: EngineInfo) -> str:
    return (
        f"{info.max_seq_len} tokens a request, {info.max_batch_size} sequences in a step, "
        f"{info.max_queued} requests open"
    )


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
    return f"{num_bytes / unit:.2f} {name}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
