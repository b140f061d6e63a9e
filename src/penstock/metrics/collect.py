"""Events -> counters and histograms, in a registry of their own. Counts, never decides.

The numbers lie in a row of cells that other processes may see (`ipc.shared`): each API server of a
server counts in its own row, and whichever is asked shows the sums.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.metrics.events import Event, FirstToken, MoreTokens, RequestRefused, SampleFinished
from penstock.metrics.iteration import MAX_KEPT, IterationLog
from penstock.metrics.prometheus import ALIASES, Aliased, EngineCollector
from penstock.types.request import FinishReason
from penstock.types.stats import EngineCounters, IterationStats

_FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_PER_TOKEN_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)
_TOKENS = tuple(float(1 << power) for power in range(0, 21, 1))


# name -> bounds of its buckets, and what is counted
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "time_to_first_token_seconds": (
        _FIRST_TOKEN_S,
        "Seconds from a request's arrival to the first output token of each of its samples, "
        "streamed or not",
    ),
    "inter_token_latency_seconds": (
        _PER_TOKEN_S,
        "Seconds between two output tokens of a streamed sample, once per token; tokens that "
        "arrive together share their interval",
    ),
    "time_per_output_token_seconds": (
        _PER_TOKEN_S,
        "Seconds per output token after the first, averaged over a streamed sample, once per "
        "sample",
    ),
    "e2e_request_latency_seconds": (
        _REQUEST_S,
        "Seconds from a request's arrival to the end of each of its samples",
    ),
    "request_decode_time_seconds": (
        _REQUEST_S,
        "Seconds from the first to the last output token of a streamed sample",
    ),
    "request_prompt_tokens": (_TOKENS, "Prompt tokens of each finished sample"),
    "request_generation_tokens": (_TOKENS, "Output tokens of each finished sample"),
    "iteration_latency_seconds": (
        _PER_TOKEN_S,
        "Seconds from the planning of an engine step to its commit",
    ),
    "iteration_tokens": (_TOKENS, "Prompt and decode tokens computed in an engine step"),
}
_OTHER = "other"


class _Counted(NamedTuple):
    label: str  # without one there is one value
    values: tuple[str, ...]
    help: str


_COUNTERS: dict[str, _Counted] = {
    "request_success": _Counted(
        "finished_reason",
        (*FinishReason, _OTHER),
        "Samples that ended, by the reason they ended for",
    ),
    "requests_refused": _Counted(
        "status",
        ("400", "401", "404", "405", "413", "429", "500", "503", _OTHER),
        "Requests answered with an error before they reached the engine, by HTTP status",
    ),
    "prompt_tokens_served": _Counted(
        "", ("",), "Prompt tokens of finished samples, computed or reused"
    ),
    "prompt_tokens_cached": _Counted(
        "", ("",), "Prompt tokens of finished samples whose KV cache was reused, in whole blocks"
    ),
}

Row = MutableSequence[float]


class Histogram:
    """Counts by bucket and the sum of what was observed, in the cells of `row` from `at` on."""

    def __init__(self, bounds: tuple[float, ...], row: Row, at: int) -> None:
        self._bounds = bounds
        self._row = row
        self._at = at
        self._sum_at = at + len(bounds) + 1

    def observe(self, value: float, count: int = 1) -> None:
        self._row[self._at + bisect_left(self._bounds, value)] += count
        self._row[self._sum_at] += value * count


class Counter:
    def __init__(self, labels: tuple[str, ...], row: Row, at: int) -> None:
        self._at = {label: at + i for i, label in enumerate(labels)}
        self._row = row

    def add(self, amount: float, label: str = "") -> None:
        self._row[self._at[label if label in self._at else _OTHER]] += amount


def _layout() -> Iterator[tuple[str, int]]:
    """Every metric and its first cell; the last name is that of the end."""
    at = 1  # the first cell says which iterations have been shown
    for name, (bounds, _) in _HISTOGRAMS.items():
        yield name, at
        at += len(bounds) + 2
    for name, counted in _COUNTERS.items():
        yield name, at
        at += len(counted.values)
    yield "", at


_FIRST_CELL = dict(_layout())
NUM_CELLS = _FIRST_CELL[""]


class Metrics:
    """Everything `/prometheus/metrics` and `/metrics` show.

    `rows` are those of all API servers, `own` is the index of ours. All are told of every
    iteration; the first counts them.
    """

    def __init__(
        self,
        model_name: str,
        counters: Callable[[], EngineCounters],
        drain_iterations: Callable[[], Iterable[IterationStats]],
        max_iterations: int = MAX_KEPT,
        rows: Sequence[Row] | None = None,
        own: int = 0,
    ) -> None:
        rows = [array("d", bytes(8 * NUM_CELLS))] if rows is None else rows
        row = rows[own]
        histograms = {
            name: Histogram(bounds, row, _FIRST_CELL[name])
            for name, (bounds, _) in _HISTOGRAMS.items()
        }
        self._ttft = histograms["time_to_first_token_seconds"]
        self._itl = histograms["inter_token_latency_seconds"]
        self._tpot = histograms["time_per_output_token_seconds"]
        self._e2e = histograms["e2e_request_latency_seconds"]
        self._decode = histograms["request_decode_time_seconds"]
        self._prompt = histograms["request_prompt_tokens"]
        self._generated = histograms["request_generation_tokens"]
        self._iteration_s = histograms["iteration_latency_seconds"]
        self._iteration_tokens = histograms["iteration_tokens"]
        totals = {
            name: Counter(counted.values, row, _FIRST_CELL[name])
            for name, counted in _COUNTERS.items()
        }
        self._success = totals["request_success"]
        self._refused = totals["requests_refused"]
        self._served = totals["prompt_tokens_served"]
        self._cached = totals["prompt_tokens_cached"]
        self.iterations = IterationLog(
            drain_iterations,
            self._observe_iteration if own == 0 else lambda stats: None,
            max_iterations,
            shown=lambda: int(max(row[0] for row in rows)),
            show=lambda until: row.__setitem__(0, until),
        )
        inner = CollectorRegistry()  # measured once here, exposed under several names
        inner.register(RowCollector(model_name, rows))
        self.registry = CollectorRegistry()
        self.registry.register(Aliased(inner, ALIASES))
        self.registry.register(EngineCollector(model_name, counters))

    def observe(self, event: Event) -> None:
        match event:
            case MoreTokens():
                # One observation per token: tokens that came together share their interval.
                self._itl.observe(event.since_previous_s / event.num_tokens, event.num_tokens)
            case FirstToken():
                self._ttft.observe(event.since_arrival_s)
            case SampleFinished():
                self._observe_finish(event)
            case RequestRefused():
                self._refused.add(1, str(event.status))

    def _observe_finish(self, event: SampleFinished) -> None:
        self._success.add(1, event.finish)
        self._e2e.observe(event.e2e_s)
        self._prompt.observe(event.prompt_tokens)
        self._generated.observe(event.generated_tokens)
        self._served.add(event.prompt_tokens)
        self._cached.add(event.cached_tokens)
        if event.decode_s is not None and event.generated_tokens > 1:
            self._decode.observe(event.decode_s)
            self._tpot.observe(event.decode_s / (event.generated_tokens - 1))

    def _observe_iteration(self, stats: IterationStats) -> None:
        self._iteration_s.observe(stats.latency_ms / 1e3)
        num_decoded = stats.num_generation + stats.num_drafted
        self._iteration_tokens.observe(stats.num_context_tokens + num_decoded)


class RowCollector(Collector):
    """The sums over all rows, read when somebody asks."""

    def __init__(self, model_name: str, rows: Sequence[Row]) -> None:
        self._model_name = model_name
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        cells = [sum(column) for column in zip(*self._rows, strict=True)]
        for name, (bounds, help) in _HISTOGRAMS.items():
            at = _FIRST_CELL[name]
            yield self._histogram(name, help, bounds, cells[at : at + len(bounds) + 2])
        for name, counted in _COUNTERS.items():
            at = _FIRST_CELL[name]
            yield self._counter(name, counted, cells[at:])

    def _histogram(
        self, name: str, help: str, bounds: tuple[float, ...], cells: Sequence[float]
    ) -> Metric:
        family = HistogramMetricFamily(f"penstock_{name}", help, labels=["model_name"])
        buckets, num_so_far = [], 0.0
        for bound, count in zip((*bounds, float("inf")), cells, strict=False):
            num_so_far += count
            buckets.append((floatToGoString(bound), num_so_far))
        family.add_metric([self._model_name], buckets, sum_value=cells[-1])
        return family

    def _counter(self, name: str, counted: _Counted, cells: Sequence[float]) -> Metric:
        label = counted.label
        labels = ["model_name", label] if label else ["model_name"]
        family = CounterMetricFamily(f"penstock_{name}", counted.help, labels=labels)
        for value, total in zip(counted.values, cells, strict=False):
            if total or not label:
                family.add_metric([self._model_name, value] if label else [self._model_name], total)
        return family
