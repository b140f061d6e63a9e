"""Conversations against Penstock's own server of a row of the table, and lone prompts.

    python benchmarks/traffic.py [--rows 8b-bf16] [--loads 4/s 8/s burst lone] [--output FILE]
    python benchmarks/traffic.py --rows tiny --loads 4/s lone --seconds 4

`4/s`, `8/s`: so many conversations begin per second, for `--seconds`. `burst`: `--burst` of them at
once. Both are `penstock bench chat` with its defaults, over /v1/completions in token ids, since
weights are random. `lone`: prompts of 128 ids on an idle server, one after the other.

The server runs with its default settings; of its steps the share that replayed a CUDA graph is
counted from /prometheus/metrics.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from shapes import ROWS, Row
from table_server import serving

LONE_PROMPTS = 60
STEPS = re.compile(r'penstock_steps_by_kind_total\{.*ran_as="(\w+)".*\} (\S+)')


def run_load(name: str, row: Row, url: str, args: argparse.Namespace) -> dict[str, float]:
    """Figures by the names of docs/performance.md."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        before = steps(url)
        flags = ["--backend", "openai", "--random_ids", "--result_json", str(file)]
        flags += ["--vocab_size", str(row.config["vocab_size"]), "--disable_tqdm"]
        match name:
            case "burst":
                flags += ["--num_conversations", str(args.burst)]
            case "lone":
                lengths = Path(folder, "lengths.csv")
                lengths.write_text("prompt_tokens,output_tokens\n128,2\n")
                flags += ["--lengths", str(lengths), "--turns", "1", "--system_tokens", "0"]
                flags += ["--num_conversations", str(LONE_PROMPTS), "--max_concurrency", "1"]
            case _:
                flags += ["--rate", name.removesuffix("/s"), "--seconds", str(args.seconds)]
        command = [sys.executable, "-m", "penstock", "bench", "chat", *flags]
        command += ["--port", str(httpx.URL(url).port)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found = json.loads(file.read_text())
    ran = {way: count - before.get(way, 0.0) for way, count in steps(url).items()}
    chat = found["chat"]
    firsts = chat["first_turns"]
    ttft = {"ttft_p50_ms": firsts["median_ttft_ms"], "ttft_p99_ms": firsts["p99_ttft_ms"]}
    if name == "lone":
        return ttft
    figures = ttft | {
        "later_ttft_p50_ms": chat["later_turns"]["median_ttft_ms"],
        "tpot_p50_ms": found["median_tpot_ms"],
        "tpot_p99_ms": found["p99_tpot_ms"],
        "itl_p99_ms": found["p99_itl_ms"],
        "output_tok_s": found["output_throughput"],
        "failed_turns": chat["failed_turns"],
    }
    if total := sum(ran.values()):
        figures["graph_share"] = ran.get("graph", 0.0) / total
    return figures


def steps(url: str) -> dict[str, float]:
    """How many so far, by how they ran."""
    counts: dict[str, float] = {}
    for way, count in STEPS.findall(httpx.get(f"{url}/prometheus/metrics").text):
        counts[way] = counts.get(way, 0.0) + float(count)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=["8b-bf16"], choices=list(ROWS))
    parser.add_argument("--loads", nargs="+", default=["4/s", "8/s", "burst", "lone"])
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--burst", type=int, default=400)
    parser.add_argument("--output", type=Path, help="a JSON file, written after each load")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    for name in args.rows:
        row, found[name] = ROWS[name], {}
        settings = {"load_format": "dummy", "skip_tokenizer_init": True, "seed": 0}
        settings |= {key: row.settings[key] for key in row.settings if "max_" not in key}
        if row.has_fp8_cache:
            settings["kv_cache_config"] = {"dtype": "fp8"}
        with (
            tempfile.TemporaryDirectory() as home,
            serving(row, settings, Path(home)) as (url, start_s),
        ):
            found[name]["start_s"] = start_s
            for load in args.loads:
                figures = found[name][load] = run_load(load, row, url, args)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"{name} {load}: {shown}", flush=True)
                if args.output is not None:
                    args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
