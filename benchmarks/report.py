"""Writes docs/performance.md and its plot from the result files in benchmarks/results/.

`python benchmarks/report.py` writes them, with `--check` it only says whether they are up to date.
Of each figure the newest run counts. Tables and plot come from the files alone; the words around
them are performance_template.md.
"""

import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from results import FOLDER, Figure, Run, newest, read_runs

from penstock.bench.svg import BarGroup, bar_chart

ROOT = Path(__file__).parent.parent
TEMPLATE = Path(__file__).parent / "performance_template.md"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "img" / "percent-of-roofline.svg"

MODELS = {  # row of the table -> as it is written: in full, and under a bar
    "8b-bf16": ("Llama-3.1-8B, BF16", "8B BF16"),
    "8b-fp8": ("Llama-3.1-8B, FP8, BF16 KV cache", "8B FP8"),
    "8b-fp8-kv8": ("Llama-3.1-8B, FP8, FP8 KV cache", "8B FP8, FP8 KV"),
    "70b-fp8-kv8": ("Llama-3.3-70B, FP8, FP8 KV cache", "70B FP8, FP8 KV"),
    "30b-a3b": ("Qwen3-30B-A3B, BF16", "Qwen3-30B-A3B"),
    "oss-20b": ("gpt-oss-20b, MXFP4", "gpt-oss-20b"),
    "oss-120b": ("gpt-oss-120b, MXFP4", "gpt-oss-120b"),
}
WITHOUT_PEER = {
    "next-80b-fp8": "Qwen3-Next-80B-A3B, FP8 (128 x 128 blocks)",
    "r1-13-layers": "DeepSeek-R1, 13 of 61 layers, FP8 (128 x 128 blocks)",
    "r1-13-layers-nvfp4": "DeepSeek-R1, 13 of 61 layers, NVFP4 experts and MLPs",
    "70b-nvfp4-kv8": "Llama-3.3-70B, NVFP4 (W4A16), FP8 KV cache",
    "70b-awq-kv8": "Llama-3.3-70B, AWQ (W4A16), FP8 KV cache",
}
SPEEDS = {
    "tpot1_ms": "TPOT, 1 request, ms",
    "c32_tok_s": "32 requests, tok/s",
    "c256_tok_s": "256 requests, tok/s",
    "ttft1_ms": "TTFT, 1024 tokens, ms",
}
STARTS = {  # (benchmark, engine, figure) -> title
    ("table", "penstock", "cold_start_s"): "`LLM(...)`, cold",
    ("table", "vllm", "cold_start_s"): "vLLM, cold",
    ("start", "penstock", "cold_start_s"): "HTTP, cold",
    ("start", "penstock", "warm_start_s"): "HTTP, warm",
    ("start", "vllm", "warm_start_s"): "vLLM, warm",
}
LATENCIES = {
    "ttft_p50_ms": "TTFT of first turns, p50 ms",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "TPOT p99, ms",
    "itl_p99_ms": "ITL p99, ms",
    "output_tok_s": "output tok/s",
}


def render(runs: Mapping[str, Run]) -> str:
    every = list(runs.values())
    burst = (newest(every, "steady", one, "8b-bf16", "burst_tok_s") for one in ("penstock", "vllm"))
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        speeds=_speeds(every),
        starts=_starts(every),
        traffic=_traffic(every),
        burst=" / ".join(map(_number, burst)),
        others=_without_peer(every),
        sources=_sources(runs),
    )


def plot(runs: Mapping[str, Run]) -> str:
    every = list(runs.values())
    panels = {
        SPEEDS[name]: [BarGroup(bar, _shares(every, row, name)) for row, (_, bar) in MODELS.items()]
        for name in ("tpot1_ms", "c32_tok_s", "c256_tok_s")
    }
    title = "Percent of the roofline, one H200 (higher is better)"
    return bar_chart(title, panels, ("Penstock", "vLLM 0.22.0"), high=100.0)


def percent(value: float, roofline: float) -> float:
    """Times are above their roofline, rates below."""
    return 100 * min(roofline / value, value / roofline)


def _shares(runs: Sequence[Run], row: str, name: str) -> list[float | None]:
    ours, bound = _bounded(runs, row, name)
    theirs = newest(runs, "table", "vllm", row, name)
    return [percent(ours.value, bound), None if theirs is None else percent(theirs.value, bound)]


def _bounded(runs: Sequence[Run], row: str, name: str) -> tuple[Figure, float]:
    ours = newest(runs, "table", "penstock", row, name)
    if ours is None or ours.roofline is None:
        raise SystemExit(f"no result file has {name} of {row} with its roofline")
    return ours, ours.roofline


def _speeds(runs: Sequence[Run]) -> str:
    rows = []
    for row, (title, _) in MODELS.items():
        cells = []
        for name in SPEEDS:
            ours, bound = _bounded(runs, row, name)
            theirs = newest(runs, "table", "vllm", row, name)
            share = percent(ours.value, bound)
            cells.append(
                f"**{_number(ours)}** / {_number(theirs)} / {_plain(bound)} ({share:.0f} %)"
            )
        published = newest(runs, "table", "tensorrt-llm", row, "c256_tok_s")
        rows.append([title, *cells, _number(published)])
    return _table(["model", *SPEEDS.values(), "TensorRT-LLM, published tok/s"], rows)


def _without_peer(runs: Sequence[Run]) -> str:
    asked = {name: title for name, title in SPEEDS.items() if name != "c256_tok_s"}
    rows = []
    for row, title in WITHOUT_PEER.items():
        cells = []
        for name in asked:
            ours, bound = _bounded(runs, row, name)
            share = percent(ours.value, bound)
            cells.append(f"**{_number(ours)}** / {_plain(bound)} ({share:.0f} %)")
        rows.append([title, *cells])
    return _table(["model", *asked.values()], rows)


def _starts(runs: Sequence[Run]) -> str:
    rows = []
    for row, (title, _) in MODELS.items():
        found = [newest(runs, mode, engine, row, name) for mode, engine, name in STARTS]
        if any(found):
            rows.append([title, *map(_number, found)])
    return _table(["start, s", *STARTS.values()], rows)


def _traffic(runs: Sequence[Run]) -> str:
    loads = [row for run in runs if run.benchmark == "traffic" for row in run.rows]
    rows = []
    for load in dict.fromkeys(loads):
        cells = []
        for name in LATENCIES:
            both = [newest(runs, "traffic", one, load, name) for one in ("penstock", "vllm")]
            cells.append(" / ".join(map(_number, both)) if any(both) else "the load's")
        rows.append([load, *cells])
    return _table(["load", *LATENCIES.values()], rows)


def _sources(runs: Mapping[str, Run]) -> str:
    rows = []
    for name, run in runs.items():
        engine = " ".join(filter(None, (run.engine, run.version)))
        link = f"[{name}](../benchmarks/results/{name})"
        rows.append([link, engine, run.date or "not recorded", run.command])
    return _table(["file", "engine", "date", "command"], rows, aligned="---")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], aligned: str = "---:") -> str:
    lines = [titles, ["---"] + [aligned] * (len(titles) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(figure: Figure | None) -> str:
    return "–" if figure is None else _plain(figure.value)


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def main() -> int:
    runs = read_runs(FOLDER)
    wanted = {PAGE: render(runs), PLOT: plot(runs)}
    if "--check" in sys.argv[1:]:
        stale = [
            path.name
            for path, text in wanted.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        print(f"out of date, run benchmarks/report.py: {stale}" if stale else "up to date")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
