"""The server's side of the table: how soon it answers, and evenly arriving requests."""

import argparse
import concurrent.futures
import contextlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from cpu_servers import Server, running
from shapes import Row, model_folder, prompts
from sse_client import read_all, request_bytes
from steady_load import load

START_TIMEOUT_S = 400.0
MIN_EARLY_SHARE = 0.95  # of the speed it has in the end
MIN_STEADY_SHARE, MAX_GAP_RATIO = 0.95, 3.0
ROUND_TOKENS = range(64, 513, 64)  # answers of one round: eight lengths
ROUND_PROMPTS, ROUND_IDS = 16, 256  # of each length; ids of a prompt
LATE_S = 20.0  # watched of the time after


@contextlib.contextmanager
def serving(
    row: Row, settings: dict[str, Any], home: Path, tokenizer: Path | None = None
) -> Iterator[tuple[str, float]]:
    """(its address, seconds from the spawn to the first token). `home`: its cache folder.
    `tokenizer`: a folder whose files lie beside the model's."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log = home / "server.log"
    with model_folder(row) as folder:
        if tokenizer is not None:
            shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        config = Path(folder, "serve.yaml")
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "penstock", "serve", folder, "--port", str(port)]
        command += ["--config", str(config)]
        # Without its own variable Triton's binaries go where Penstock keeps them.
        environment = {"PENSTOCK_HOME": str(home), "TRITON_CACHE_DIR": ""}
        started = time.perf_counter()
        with running(Server("penstock", command, "m", {}, environment), log) as process:
            _ask_until_answered(url, row, process, log)
            yield url, time.perf_counter() - started
        _tell_warnings(log)


def _tell_warnings(log: Path) -> None:
    for line in log.read_text(errors="replace").splitlines():
        if " W [" in line or " E [" in line:
            print(f"the server: {line}")


def _ask_until_answered(url: str, row: Row, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.ConnectError):
            complete(url, row, [[1, 2, 3]], 1)
            return
        time.sleep(0.02)
    raise SystemExit(f"the server does not start; its log:\n{log.read_text(errors='replace')}")


def body(row: Row, prompt: list[int] | list[list[int]], num_tokens: int) -> dict[str, Any]:
    usual = {"model": "m", "temperature": row.temperature, "seed": 1, "ignore_eos": True}
    return usual | {"prompt": prompt, "max_tokens": num_tokens}


def complete(url: str, row: Row, asked: list[list[int]], num_tokens: int) -> int:
    """All of them in one request that is not streamed; the tokens that came."""
    reply = httpx.post(f"{url}/v1/completions", json=body(row, asked, num_tokens), timeout=500)
    assert reply.status_code == 200, reply.text
    total: int = reply.json()["usage"]["completion_tokens"]
    assert total == len(asked) * num_tokens
    return total


def start(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """Cold: an empty cache folder. Warm: the same folder again."""
    longest = max(args.prompt + args.tokens, ROUND_IDS + max(ROUND_TOKENS))
    settings = row.engine_settings(longest, max(args.concurrency or row.concurrency))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as home:
        for kind in ("cold", "warm"):
            with serving(row, settings, Path(home)) as (url, seconds):
                phases = httpx.get(f"{url}/version").json()["startup"]
                most = row.goal.get("cold_start_s" if kind == "cold" else "start_s")
                said = "" if most is None else f", goal {most:g}: {_verdict(seconds <= most)}"
                print(f"{kind} start: first token after {seconds:.1f} s{said}")
                print("  " + ", ".join(f"{p['phase']} {p['seconds']:.1f}" for p in phases))
                results[f"{kind}_start_s"] = seconds
                results[f"{kind}_phases"] = phases
                if kind == "cold" and args.seconds:
                    results |= _early_speed(url, row, args.seconds)
    return results


def _early_speed(url: str, row: Row, seconds: float) -> dict[str, float]:
    """What was not made ready at the start shows in the first rounds of a load that repeats."""
    early = _rounds_tok_s(url, row, seconds)
    late = _rounds_tok_s(url, row, min(seconds, LATE_S))
    share = early / late
    print(
        f"first {seconds:.0f} s: {early:.0f} tok/s, {share:.1%} of the {late:.0f} after them, "
        f"goal {MIN_EARLY_SHARE:.0%}: {_verdict(share >= MIN_EARLY_SHARE)}",
        flush=True,
    )
    return {"early_tok_s": early, "late_tok_s": late, "early_share": share}


def _rounds_tok_s(url: str, row: Row, seconds: float) -> float:
    """Whole rounds for about so long. Answers of different lengths: each batch size comes up."""
    vocab, total = row.config["vocab_size"], 0
    asked = [(prompts(ROUND_PROMPTS, ROUND_IDS, vocab, n), n) for n in ROUND_TOKENS]
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(ROUND_TOKENS)) as pool:
        while (taken := time.perf_counter() - started) < seconds:
            total += sum(pool.map(lambda one: complete(url, row, *one), asked))
    return total / taken


def steady(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """The same number of streams all at once, then arriving evenly."""
    [count] = args.concurrency
    vocab = row.config["vocab_size"]
    settings = row.engine_settings(args.prompt + args.tokens, count)

    def requests(num: int, seed: int, usage: bool) -> list[bytes]:
        made = prompts(num, args.prompt, vocab, seed)
        return [
            request_bytes("/v1/completions", body(row, one, args.tokens), usage) for one in made
        ]

    with tempfile.TemporaryDirectory() as home, serving(row, settings, Path(home)) as (url, _):
        port = httpx.URL(url).port
        assert port is not None
        complete(url, row, prompts(8, args.prompt, vocab, 2), min(16, args.tokens))
        seconds, outcomes = read_all(port, requests(count, 0, usage=True), args.tokens)
        problems = [one.problem for one in outcomes if one.problem is not None]
        assert not problems, problems[:3]
        best = count * args.tokens / seconds
        watch_s = max(20.0, seconds)
        seen = load(port, requests(4 * count, 1, usage=False), count, seconds, watch_s)
    assert not seen.problems, seen.problems[:3]
    rate = seen.num_tokens / watch_s
    gaps_ms = [gap * 1e3 for gap in seen.gaps_s]
    median, p99 = statistics.median(gaps_ms), statistics.quantiles(gaps_ms, n=100)[98]
    ratio, share = p99 / median, rate / best
    print(f"{count} streams at once: {best:.0f} tok/s")
    print(
        f"arriving evenly: {rate:.0f} tok/s, {share:.1%} of that, goal {MIN_STEADY_SHARE:.0%}: "
        f"{_verdict(share >= MIN_STEADY_SHARE)}"
    )
    print(
        f"between tokens: median {median:.1f} ms, p99 {p99:.1f} ms = {ratio:.2f}x, goal "
        f"{MAX_GAP_RATIO:g}x: {_verdict(ratio <= MAX_GAP_RATIO)}; largest {max(gaps_ms):.0f} ms; "
        f"first token p50 {statistics.median(seen.firsts_s) * 1e3:.0f} ms",
        flush=True,
    )
    return {
        "burst_tok_s": best,
        "steady_tok_s": rate,
        "steady_share": share,
        "itl_median_ms": median,
        "itl_p99_ms": p99,
        "itl_ratio": ratio,
        "ttft_median_ms": statistics.median(seen.firsts_s) * 1e3,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"
