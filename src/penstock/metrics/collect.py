"""Events -> counters and histograms, in a registry of their own. Counts, never decides."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.metrics.events import Event, FirstToken, MoreTokens, RequestRefused, SampleFinished
from penstock.metrics.iteration import MAX_KEPT, IterationLog
from penstock.metrics.prometheus import ALIASES, Aliased, EngineCollector
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


class Metrics:
    """Everything `/prometheus/metrics` and `/metrics` show."""

    def __init__(
        self,
        model_name: str,
        counters: Callable[[], EngineCounters],
        drain_iterations: Callable[[], Iterable[IterationStats]],
        max_iterations: int = MAX_KEPT,
    ) -> None:
        self.registry = CollectorRegistry()
        self.iterations = IterationLog(drain_iterations, self._observe_iteration, max_iterations)
        self._inner = CollectorRegistry()  # measured once here, exposed under several names
        self._model_name = model_name
        self._ttft = self._histogram("time_to_first_token_seconds", _FIRST_TOKEN_S)
        self._itl = self._histogram("inter_token_latency_seconds", _PER_TOKEN_S)
        self._tpot = self._histogram("time_per_output_token_seconds", _PER_TOKEN_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", _REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", _REQUEST_S)
        self._prompt = self._histogram("request_prompt_tokens", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", _TOKENS)
        self._iteration_s = self._histogram("iteration_latency_seconds", _PER_TOKEN_S)
        self._iteration_tokens = self._histogram("iteration_tokens", _TOKENS)
        self._success = self._counter("request_success", "finished_reason")
        self._refused = self._counter("requests_refused", "status")
        self._cached = Counter(
            "penstock_prompt_tokens_cached",
            "Prompt tokens whose cache was reused",
            ["model_name"],
            registry=self._inner,
        ).labels(model_name)
        self.registry.register(Aliased(self._inner, ALIASES))
        self.registry.register(EngineCollector(model_name, counters))

    def observe(self, event: Event) -> None:
        match event:
            case MoreTokens():
                # One observation per token: tokens that came together share their interval.
                for _ in range(event.num_tokens):
                    self._itl.observe(event.since_previous_s / event.num_tokens)
            case FirstToken():
                self._ttft.observe(event.since_arrival_s)
            case SampleFinished():
                self._observe_finish(event)
            case RequestRefused():
                self._refused.labels(self._model_name, str(event.status)).inc()

    def _observe_finish(self, event: SampleFinished) -> None:
        self._success.labels(self._model_name, event.finish).inc()
        self._e2e.observe(event.e2e_s)
        self._prompt.observe(event.prompt_tokens)
        self._generated.observe(event.generated_tokens)
        self._cached.inc(event.cached_tokens)
        if event.decode_s is not None and event.generated_tokens > 1:
            self._decode.observe(event.decode_s)
            self._tpot.observe(event.decode_s / (event.generated_tokens - 1))

    def _observe_iteration(self, stats: IterationStats) -> None:
        self._iteration_s.observe(stats.latency_ms / 1e3)
        self._iteration_tokens.observe(stats.num_context_tokens + stats.num_generation)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ")
        return Histogram(
            f"penstock_{name}", text, ["model_name"], buckets=buckets, registry=self._inner
        ).labels(self._model_name)

    def _counter(self, name: str, label: str) -> Counter:
        return Counter(
            f"penstock_{name}", name.replace("_", " "), ["model_name", label], registry=self._inner
        )
