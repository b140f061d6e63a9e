"""An offline run as the report that trtllm-bench prints, and as its JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import __version__
from penstock.bench.figures import Figures
from penstock.bench.offline import OfflineOptions, OfflineRun
from penstock.bench.records import Ask

_RULE = "=" * 59
_PERCENTS = (50, 90, 95, 99)
_LABEL_WIDTH = 50
Section = Mapping[str, Any]


def sections(
    model: str, asks: Sequence[Ask], run: OfflineRun, figures: Figures, options: OfflineOptions
) -> dict[str, Section]:
    """Title -> label -> value; both renderings are made of these."""
    info, config = run.info, run.info.config
    num_gpus = max(1, int(config.get("tensor_parallel_size", 1)))
    found: dict[str, Section] = {
        "PENSTOCK BACKEND": {
            "Model": model,
            "Penstock Version": __version__,
            "Dtype": config.get("dtype", ""),
            "Max Sequence Length": info.max_seq_len,
        },
        "MACHINE DETAILS": {"Device": info.device},
        "WORLD + RUNTIME INFORMATION": {
            "TP Size": num_gpus,
            "Max Runtime Batch Size": info.max_batch_size,
            "Max Runtime Tokens": info.max_num_tokens,
            "KV Cache Tokens": info.total_blocks * info.tokens_per_block,
            "Concurrency": options.concurrency or "unlimited",
        },
        "REQUEST DETAILS": {
            "Number of requests": figures.completed,
            "Number of failed requests": figures.num_failed,
            "Average Input Length (tokens)": figures.total_input / max(1, figures.completed),
            "Average Output Length (tokens)": figures.total_output / max(1, figures.completed),
        },
        "PERFORMANCE OVERVIEW": _overview(figures, num_gpus, options.streaming),
    }
    latencies = {"Latency": ("REQUEST LATENCY (ms)", figures.spreads["e2el"].values_ms)}
    if options.streaming:
        tpot_ms = figures.spreads["tpot"].values_ms
        latencies["TPOT"] = ("TIME PER OUTPUT TOKEN (ms)", tpot_ms)
        latencies["TTFT"] = ("TIME TO FIRST TOKEN (ms)", figures.spreads["ttft"].values_ms)
        latencies["GTPS"] = ("OUTPUT SPEED OF A USER (tokens/sec)", 1e3 / tpot_ms[tpot_ms > 0])
    for tag, (title, values) in latencies.items():
        found[title] = {f"[{tag}] {name}": value for name, value in _breakdown(values)}
    lengths = {"Input": [ask.num_input for ask in asks], "Output": [ask.max_tokens for ask in asks]}
    found["DATASET DETAILS"] = {"Number of Sequences": len(asks)} | {
        f"[{kind}] {name}": value
        for kind, some in lengths.items()
        for name, value in _breakdown(np.array(some, dtype=np.float64))
    }
    return found


def as_text(found: Mapping[str, Section]) -> str:
    return "\n".join(_lines(found))


def as_json(
    found: Mapping[str, Section], asks: Sequence[Ask], run: OfflineRun
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Report, outputs, requests: the files of --report_json, --output_json, --request_json."""
    responses = run.outcome.responses
    outputs = [
        {"id": i, "output": response.text, "output_tokens": list(ids), "error": response.error}
        for i, (response, ids) in enumerate(zip(responses, run.token_ids, strict=True))
    ]
    requests = [
        {
            "id": i,
            "start_s": response.started_at - run.outcome.begun_at,
            "first_token_s": response.first_at - run.outcome.begun_at,
            "end_s": response.last_at - run.outcome.begun_at,
            "num_input_tokens": ask.num_input,
            "num_output_tokens": response.num_output,
        }
        for i, (ask, response) in enumerate(zip(asks, responses, strict=True))
    ]
    return {title: dict(section) for title, section in found.items()}, outputs, requests


def _overview(figures: Figures, num_gpus: int, streaming: bool) -> dict[str, float]:
    spreads = figures.spreads
    overview = {
        "Request Throughput (req/sec)": figures.request_throughput,
        "Total Output Throughput (tokens/sec)": figures.output_throughput,
        "Total Token Throughput (tokens/sec)": figures.total_token_throughput,
        "Total Latency (ms)": figures.duration_s * 1e3,
        "Average request latency (ms)": spreads["e2el"].mean,
        "Per User Output Throughput [w/ ctx] (tps/user)": figures.user_throughput,
        "Per GPU Output Throughput (tps/gpu)": figures.output_throughput / num_gpus,
    }
    if streaming:
        overview |= {
            "Average time-to-first-token [TTFT] (ms)": spreads["ttft"].mean,
            "Average time-per-output-token [TPOT] (ms)": spreads["tpot"].mean,
        }
        if tpot := spreads["tpot"].mean:
            overview["Per User Output Speed (tps/user)"] = 1e3 / tpot
    return overview


def _breakdown(values: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    """A percentile is the element at that share of the sorted list."""
    if not values.size:
        return
    ordered = np.sort(values)
    yield "MINIMUM", float(ordered[0])
    yield "MAXIMUM", float(ordered[-1])
    yield "AVERAGE", float(np.mean(ordered))
    for percent in _PERCENTS:
        yield f"P{percent}", float(ordered[ordered.size * percent // 100])


def _lines(found: Mapping[str, Section]) -> Iterator[str]:
    for title, section in found.items():
        yield from (_RULE, f"= {title}", _RULE)
        for label, value in section.items():
            text = f"{value:.4f}" if isinstance(value, float) else str(value)
            yield f"{label + ':':<{_LABEL_WIDTH}} {text}"
        yield ""
