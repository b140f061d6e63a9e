"""Responses -> figures: throughput, latencies and their spread, goodput, what looks wrong.

Every figure of the JSON file is computed here, under its name there. Times become milliseconds.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.load import Outcome
from penstock.bench.records import Ask, Response

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

    @property
    def output_throughput_first_to_last(self) -> float:
        return self.total_output / self.first_to_last_s if self.first_to_last_s else 0.0

    @property
    def total_token_throughput_first_to_last(self) -> float:
        num = self.total_input + self.total_output
        return num / self.first_to_last_s if self.first_to_last_s else 0.0


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
        (ask, response)
        for ask, response in zip(asks, outcome.responses, strict=True)
        if response.error is None
    ]
    responses = [response for _, response in done]
    num_output = [
        count(response.text) if response.num_output is None else response.num_output
        for response in responses
    ]
    latency = np.array([response.latency_s for response in responses])
    ttft = np.array([response.ttft_s for response in responses])
    out = np.array(num_output, dtype=np.float64)
    many = out > 1
    tpot = np.zeros_like(latency)
    tpot[many] = (latency - ttft)[many] / (out[many] - 1)
    gaps = np.concatenate([np.zeros(0), *(np.asarray(response.gaps_s) for response in responses)])
    values = {"ttft": ttft, "tpot": tpot[many], "itl": gaps, "e2el": latency}
    spreads = {name: Spread(value * 1e3) for name, value in values.items()}
    num_good = None
    if goodput_ms:
        by_request = {"ttft": ttft, "tpot": tpot, "e2el": latency}
        good = np.ones(len(responses), dtype=bool)
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
        tokens_per_step=[a.tokens_per_step for a in responses if a.tokens_per_step is not None],
        spreads=spreads,
        first_to_last_s=_first_to_last(responses),
        itl_per_token_ms=float(gaps.sum() / max(1, out.sum())) * 1e3,
        quantiles={name: _quantiles(spread) for name, spread in spreads.items()},
        timeline=_timeline(responses, num_output, outcome),
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
        record |= spread_as_json(name, figures.spreads[name], percentiles)
    return record | {
        "extra": {
            "failed": figures.num_failed,
            "mean_itl_per_token_ms": figures.itl_per_token_ms,
            "output_throughput_first_to_last": figures.output_throughput_first_to_last,
            "total_token_throughput_first_to_last": figures.total_token_throughput_first_to_last,
            "client_cpu_share": figures.client_cpu_share,
            "client_lag_ms": figures.client_lag_ms,
            "warnings": list(figures.warnings),
            "quantiles_ms": dict(figures.quantiles),
            "timeline": dict(figures.timeline),
        }
    }


def spread_as_json(name: str, spread: Spread, percentiles: Sequence[float]) -> dict[str, float]:
    return {
        f"mean_{name}_ms": spread.mean,
        f"median_{name}_ms": spread.median,
        f"std_{name}_ms": spread.std,
        **{f"p{shown(one)}_{name}_ms": spread.percentile(one) for one in percentiles},
    }


def details_as_json(asks: Sequence[Ask], responses: Sequence[Response]) -> dict[str, Any]:
    """What `--save-detailed` adds, request by request; times in seconds."""
    return {
        "input_lens": [ask.num_input for ask in asks],
        "output_lens": [response.num_output or 0 for response in responses],
        "ttfts": [max(0.0, response.ttft_s) for response in responses],
        "itls": [response.gaps_s.tolist() for response in responses],
        "e2els": [max(0.0, response.latency_s) for response in responses],
        "generated_texts": [response.text for response in responses],
        "errors": [response.error or "" for response in responses],
    }


def shown(percent: float) -> str:
    """99.0 -> "99", 99.9 -> "99.9"."""
    return str(int(percent)) if percent == int(percent) else str(percent)


def _oddities(
    done: Sequence[tuple[Ask, Response]], num_output: Sequence[int], ignore_eos: bool
) -> list[str]:
    """A line for each kind of thing that a sane server does not do."""
    empty = sum(not (response.text or response.token_ids) for _, response in done)
    uncounted = sum(response.num_output is None for _, response in done)
    long = sum(num > ask.max_tokens for (ask, _), num in zip(done, num_output, strict=True))
    short = sum(num < ask.max_tokens for (ask, _), num in zip(done, num_output, strict=True))
    drift = [
        (response.num_prompt - ask.num_input) / ask.num_input
        for ask, response in done
        if response.num_prompt is not None and ask.num_input and not ask.image_urls
    ]
    lines = []
    if empty:
        lines.append(f"{empty} responses have no text at all")
    if uncounted:
        lines.append(
            f"the server did not count {uncounted} responses; their text was tokenized here"
        )
    if long:
        lines.append(f"{long} responses are longer than was asked for")
    if short and ignore_eos:
        lines.append(f"{short} responses are shorter than was asked for, in spite of --ignore-eos")
    if drift and abs(mean := sum(drift) / len(drift)) > 0.02:
        lines.append(
            f"the server counts {mean:+.1%} input tokens against the lengths asked for "
            "(--tokenize-on-client sends exact ones)"
        )
    return lines


def _first_to_last(responses: Sequence[Response]) -> float:
    if not responses:
        return 0.0
    return max(one.last_at for one in responses) - min(one.first_at for one in responses)


def _quantiles(spread: Spread) -> list[float]:
    """0, 1, ... 100 %: enough to draw the distribution again."""
    if not spread.values_ms.size:
        return []
    values = np.percentile(spread.values_ms, np.arange(101))
    return [round(float(value), 4) for value in values]


def _timeline(
    responses: Sequence[Response], num_output: Sequence[int], outcome: Outcome
) -> dict[str, Any]:
    """Tokens that arrived and requests that ran, by equal pieces of the whole time."""
    num_bins = max(1, min(_NUM_BINS, math.ceil(outcome.duration_s * 10)))
    width = outcome.duration_s / num_bins
    tokens, running = np.zeros(num_bins), np.zeros(num_bins)
    for response, num in zip(responses, num_output, strict=True):
        gaps = np.concatenate([[response.first_at - outcome.begun_at], np.asarray(response.gaps_s)])
        bins = np.minimum((np.cumsum(gaps) / width).astype(int), num_bins - 1)
        tokens += np.bincount(bins, minlength=num_bins) * (num / gaps.size)
        first = (response.started_at - outcome.begun_at) / width
        last = (response.last_at - outcome.begun_at) / width
        running += np.clip(last - np.arange(num_bins), 0, 1)
        running -= np.clip(first - np.arange(num_bins), 0, 1)
    return {
        "bin_s": width,
        "tokens_per_s": [round(float(one / width), 2) for one in tokens],
        "running": [round(float(one), 2) for one in running],
    }
