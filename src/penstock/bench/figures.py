"""Answers -> figures: throughput, latencies and their spread, goodput, what looks wrong.

Every figure of the JSON file is computed here, under its name there. Times become milliseconds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.load import Outcome
from penstock.bench.records import Answer, Ask

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_NUM_BINS = 100  # at most, of the time line
# From here on the client may be what is measured: share of a core, seconds behind.
_BUSY, _LATE_S = 0.9, 0.02
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """One latency over requests (ITL: over chunks), in milliseconds. Zeros when there were none."""

    values_ms: _Floats

    @property
    def mean(self) -> float:
        return float(np.mean(self.values_ms)) if self.values_ms.size else 0.0

    @property
    def median(self) -> float:
        return self.percentile(50)

    @property
    def std(self) -> float:
        return float(np.std(self.values_ms)) if self.values_ms.size else 0.0

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.values_ms, percent)) if self.values_ms.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    duration_s: float
    num_failed: int
    completed: int
    total_input: int
    total_output: int
    num_good: int | None  # None: no limits were given
    user_throughput: float  # mean over requests of tokens per second
    tokens_per_step: Sequence[float]
    spreads: Mapping[str, Spread]
    first_to_last_s: float  # from the first token of all to the last
    itl_per_token_ms: float
    quantiles: Mapping[str, list[float]]
    timeline: Mapping[str, Any]
    client_cpu_share: float
    client_lag_ms: float
    warnings: Sequence[str]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.total_output / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input + self.total_output) / self.duration_s


def figures_of(
    asks: Sequence[Ask],
    outcome: Outcome,
    count: Callable[[str], int],
    goodput_ms: Mapping[str, float],
    ignore_eos: bool,
) -> Figures:
    """`count` counts the tokens of a text whose server does not say how many it wrote."""
    warnings: list[str] = []
    done = [
        (ask, answer)
        for ask, answer in zip(asks, outcome.answers, strict=True)
        if answer.error is None
    ]
    answers = [answer for _, answer in done]
    num_output = [
        count(answer.text) if answer.num_output is None else answer.num_output for answer in answers
    ]
    latency = np.array([answer.latency_s for answer in answers])
    ttft = np.array([answer.ttft_s for answer in answers])
    out = np.array(num_output, dtype=np.float64)
    many = out > 1
    tpot = np.zeros_like(latency)
    tpot[many] = (latency - ttft)[many] / (out[many] - 1)
    gaps = np.concatenate([np.zeros(0), *(np.asarray(answer.gaps_s) for answer in answers)])
    values = {"ttft": ttft, "tpot": tpot[many], "itl": gaps, "e2el": latency}
    spreads = {name: Spread(value * 1e3) for name, value in values.items()}
    num_good = None
    if goodput_ms:
        by_request = {"ttft": ttft, "tpot": tpot, "e2el": latency}
        good = np.ones(len(answers), dtype=bool)
        for name, limit in goodput_ms.items():
            good &= by_request[name] * 1e3 <= limit
        num_good = int(good.sum())
    if outcome.client_cpu_share > _BUSY or outcome.client_lag_s > _LATE_S:
        warnings.append(
            f"this client was busy {outcome.client_cpu_share:.0%} of the time and up to "
            f"{outcome.client_lag_s * 1e3:.0f} ms late: it may be what was measured; give it a "
            "core of its own, or run several"
        )
    warnings += _oddities(done, num_output, ignore_eos)
    return Figures(
        duration_s=outcome.duration_s,
        num_failed=len(asks) - len(done),
        completed=len(done),
        total_input=sum(ask.num_input for ask, _ in done),
        total_output=sum(num_output),
        num_good=num_good,
        user_throughput=float(np.mean(out[latency > 0] / latency[latency > 0])) if done else 0.0,
        tokens_per_step=[a.tokens_per_step for a in answers if a.tokens_per_step is not None],
        spreads=spreads,
        first_to_last_s=_first_to_last(answers),
        itl_per_token_ms=float(gaps.sum() / max(1, out.sum())) * 1e3,
        quantiles={name: _quantiles(spread) for name, spread in spreads.items()},
        timeline=_timeline(answers, num_output, outcome),
        client_cpu_share=outcome.client_cpu_share,
        client_lag_ms=outcome.client_lag_s * 1e3,
        warnings=warnings,
    )


def as_json(
    figures: Figures, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The names that scripts read; what only Penstock has is under "extra"."""
    record: dict[str, Any] = {
        "duration": figures.duration_s,
        "completed": figures.completed,
        "total_input_tokens": figures.total_input,
        "total_output_tokens": figures.total_output,
        "request_throughput": figures.request_throughput,
        "request_goodput:": figures.request_goodput,  # the colon is part of the name
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "user_throughput": figures.user_throughput,
    }
    if figures.tokens_per_step:
        steps = Spread(np.array(figures.tokens_per_step))
        record["avg_decoded_tokens_per_iter"] = {
            "mean": steps.mean,
            "min": min(figures.tokens_per_step),
            "max": max(figures.tokens_per_step),
            "median": steps.median,
            "std": steps.std,
            "percentiles": {f"p{shown(one)}": steps.percentile(one) for one in percentiles},
        }
    for name in metrics:
        spread = figures.spreads[name]
        record |= {
            f"mean_{name}_ms": spread.mean,
            f"median_{name}_ms": spread.median,
            f"std_{name}_ms": spread.std,
        }
        record |= {f"p{shown(one)}_{name}_ms": spread.percentile(one) for one in percentiles}
    span_s = figures.first_to_last_s
    return record | {
        "extra": {
            "failed": figures.num_failed,
            "mean_itl_per_token_ms": figures.itl_per_token_ms,
            "output_throughput_first_to_last": figures.total_output / span_s if span_s else 0.0,
            "total_token_throughput_first_to_last": (
                (figures.total_input + figures.total_output) / span_s if span_s else 0.0
            ),
            "client_cpu_share": figures.client_cpu_share,
            "client_lag_ms": figures.client_lag_ms,
            "warnings": list(figures.warnings),
            "quantiles_ms": dict(figures.quantiles),
            "timeline": dict(figures.timeline),
        }
    }


def details_as_json(asks: Sequence[Ask], answers: Sequence[Answer]) -> dict[str, Any]:
    """What `--save-detailed` adds, request by request; times in seconds."""
    return {
        "input_lens": [ask.num_input for ask in asks],
        "output_lens": [answer.num_output or 0 for answer in answers],
        "ttfts": [max(0.0, answer.ttft_s) for answer in answers],
        "itls": [answer.gaps_s.tolist() for answer in answers],
        "e2els": [max(0.0, answer.latency_s) for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def shown(percent: float) -> str:
    """99.0 -> "99", 99.9 -> "99.9"."""
    return str(int(percent)) if percent == int(percent) else str(percent)


def _oddities(
    done: Sequence[tuple[Ask, Answer]], num_output: Sequence[int], ignore_eos: bool
) -> list[str]:
    """A line for each kind of thing that a sane server does not do."""
    empty = sum(not answer.text for _, answer in done)
    uncounted = sum(answer.num_output is None for _, answer in done)
    long = sum(num > ask.max_tokens for (ask, _), num in zip(done, num_output, strict=True))
    short = sum(num < ask.max_tokens for (ask, _), num in zip(done, num_output, strict=True))
    drift = [
        (answer.num_prompt - ask.num_input) / ask.num_input
        for ask, answer in done
        if answer.num_prompt is not None and ask.num_input and not ask.image_urls
    ]
    lines = []
    if empty:
        lines.append(f"{empty} answers have no text at all")
    if uncounted:
        lines.append(f"the server did not count {uncounted} answers; their text was tokenised here")
    if long:
        lines.append(f"{long} answers are longer than was asked for")
    if short and ignore_eos:
        lines.append(f"{short} answers are shorter than was asked for, in spite of --ignore-eos")
    if drift and abs(mean := sum(drift) / len(drift)) > 0.02:
        lines.append(
            f"the server counts {mean:+.1%} input tokens against the lengths asked for "
            "(--tokenize-on-client sends exact ones)"
        )
    return lines


def _first_to_last(answers: Sequence[Answer]) -> float:
    if not answers:
        return 0.0
    return max(one.last_at for one in answers) - min(one.first_at for one in answers)


def _quantiles(spread: Spread) -> list[float]:
    """0, 1, ... 100 %: enough to draw the distribution again."""
    if not spread.values_ms.size:
        return []
    values = np.percentile(spread.values_ms, np.arange(101))
    return [round(float(value), 4) for value in values]


def _timeline(
    answers: Sequence[Answer], num_output: Sequence[int], outcome: Outcome
) -> dict[str, Any]:
    """Tokens that arrived and requests that ran, by equal pieces of the whole time."""
    num_bins = max(1, min(_NUM_BINS, math.ceil(outcome.duration_s * 10)))
    width = outcome.duration_s / num_bins
    tokens, running = np.zeros(num_bins), np.zeros(num_bins)
    for answer, num in zip(answers, num_output, strict=True):
        gaps = np.concatenate([[answer.first_at - outcome.begun_at], np.asarray(answer.gaps_s)])
        bins = np.minimum((np.cumsum(gaps) / width).astype(int), num_bins - 1)
        tokens += np.bincount(bins, minlength=num_bins) * (num / gaps.size)
        first = (answer.started_at - outcome.begun_at) / width
        last = (answer.last_at - outcome.begun_at) / width
        running += np.clip(last - np.arange(num_bins), 0, 1)
        running -= np.clip(first - np.arange(num_bins), 0, 1)
    return {
        "bin_s": width,
        "tokens_per_s": [round(float(one / width), 2) for one in tokens],
        "running": [round(float(one), 2) for one in running],
    }
