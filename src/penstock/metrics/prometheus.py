"""Prometheus exposition: the names, and the text. One measurement may carry several names.

`penstock_*` is ours and complete; `trtllm_*` and `vllm:*` are the names that existing dashboards
and autoscalers read, for what we can fill.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from penstock.types.stats import GAUGES, EngineCounters

# penstock metric -> its other names (families, so without _total, _bucket, ...)
ALIASES: Mapping[str, tuple[str, ...]] = {
    "penstock_time_to_first_token_seconds": (
        "trtllm_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    "penstock_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "penstock_time_per_output_token_seconds": (
        "trtllm_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    "penstock_e2e_request_latency_seconds": (
        "trtllm_e2e_request_latency_seconds",
        "vllm:e2e_request_latency_seconds",
    ),
    "penstock_request_decode_time_seconds": (
        "trtllm_request_decode_time_seconds",
        "vllm:request_decode_time_seconds",
    ),
    "penstock_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "penstock_request_generation_tokens": ("vllm:request_generation_tokens",),
    "penstock_iteration_latency_seconds": ("trtllm_iteration_latency_seconds",),
    "penstock_iteration_tokens": ("vllm:iteration_tokens_total",),
    "penstock_request_success": ("trtllm_request_success", "vllm:request_success"),
    "penstock_prompt_tokens_served": ("trtllm_prompt_tokens", "vllm:prompt_tokens"),
    "penstock_prompt_tokens_cached": ("trtllm_prompt_cached_tokens", "vllm:prompt_tokens_cached"),
}

_HELP: Mapping[str, str] = {  # fields of `EngineCounters`
    "steps": "Engine steps: batches that went through the model",
    "prompt_tokens": "Prompt tokens computed; those reused from the prefix cache do not count",
    "generated_tokens": "Output tokens sampled by the engine",
    "decodes": "Decodes: of one sequence in one engine step, one output token or more each",
    "drafted_tokens": "Tokens that were drafted and fed to the model beside a sequence's last one",
    "accepted_tokens": "Drafted tokens that became output",
    "known_tokens": "Output tokens that were not drawn, since a grammar left no choice",
    "prefill_chunks": "Pieces in which prompts were computed; a prompt in one piece counts once",
    "prefix_query_tokens": "Prompt tokens looked up in the prefix cache",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache",
    "preemptions": "Running sequences that gave their KV blocks back and returned to the queue",
    "swapped_out_blocks": "KV blocks swapped out to host memory when their sequence was preempted",
    "swapped_in_blocks": "KV blocks swapped in from host memory when their sequence resumed",
    "max_steps_in_flight": "Most engine steps under way at once since start",
    "graph_replays": "Engine steps that replayed a CUDA graph",
    "finished": "Sequences that ended by themselves: stop token or length",
    "aborted": "Sequences that were ended early: a client left, or a stop string was found",
    "failed": "Sequences that ended with an error of the engine",
    "running": "Sequences that take part in engine steps now",
    "waiting": "Sequences that wait to be admitted now",
    "used_blocks": "KV blocks that sequences hold now",
    "cached_blocks": "KV blocks that are free and still hold a reusable prefix now",
    "total_blocks": "KV blocks of the cache, used or free",
    "engines": "Engines that are up; fewer than data_parallel_size while one is started again",
}
_STEPS_HELP = "Engine steps by what they held and how they ran; those that failed do not count"
_STEPS: Mapping[str, tuple[str, str]] = {  # fields that are one metric: kind, ran_as
    "decode_graph_steps": ("decode", "graph"),
    "decode_cpu_graph_steps": ("decode", "cpu_graph"),
    "decode_eager_steps": ("decode", "eager"),
    "prefill_graph_steps": ("prefill", "graph"),
    "prefill_eager_steps": ("prefill", "eager"),
    "mixed_graph_steps": ("mixed", "graph"),
    "mixed_eager_steps": ("mixed", "eager"),
}
_EXPOSED_AS: Mapping[str, str] = {  # fields whose metric has another name, which users have
    "swapped_out_blocks": "kept_blocks",
    "swapped_in_blocks": "fetched_blocks",
}
_GAUGES = frozenset(("max_steps_in_flight", *GAUGES))
_COUNTER_ALIASES: Mapping[str, tuple[str, ...]] = {
    "generated_tokens": ("trtllm_generation_tokens", "vllm:generation_tokens"),
    "drafted_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "prefix_query_tokens": ("vllm:prefix_cache_queries",),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits",),
    "preemptions": ("vllm:num_preemptions",),
    "finished": ("trtllm_num_requests_completed",),
    "running": ("trtllm_num_requests_running", "vllm:num_requests_running"),
    "waiting": ("trtllm_num_requests_waiting", "vllm:num_requests_waiting"),
}


class Aliased(Collector):
    """Every metric of `source` under its own name and its aliases."""

    def __init__(self, source: CollectorRegistry, aliases: Mapping[str, tuple[str, ...]]) -> None:
        self._source = source
        self._aliases = aliases

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            yield metric
            for alias in self._aliases.get(metric.name, ()):
                yield _renamed(metric, alias)


def _renamed(metric: Metric, name: str) -> Metric:
    copy = Metric(name, metric.documentation, metric.type)
    copy.samples = [
        Sample(name + sample.name.removeprefix(metric.name), *sample[1:])
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return copy


class EngineCollector(Collector):
    """Every field of `EngineCounters`, read when somebody asks."""

    def __init__(self, model_name: str, counters: Callable[[], EngineCounters]) -> None:
        self._model_name = model_name
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters()
        for field in fields(EngineCounters):
            if field.name in _STEPS:
                continue
            value = getattr(counters, field.name)
            own_name = f"penstock_{_EXPOSED_AS.get(field.name, field.name)}"
            for name in (own_name, *_COUNTER_ALIASES.get(field.name, ())):
                yield self._family(name, _HELP[field.name], value, is_gauge=field.name in _GAUGES)
        yield self._steps(counters)
        usage = counters.used_blocks / counters.total_blocks if counters.total_blocks else 0.0
        queried = counters.prefix_query_tokens
        for name in ("trtllm_kv_cache_utilization", "vllm:kv_cache_usage_perc"):
            help = "Share of the KV blocks that sequences hold now, 0 to 1"
            yield self._family(name, help, usage, is_gauge=True)
        hit_rate = counters.prefix_hit_tokens / queried if queried else 0.0
        help = "Share of the prompt tokens looked up since start that the prefix cache had, 0 to 1"
        yield self._family("trtllm_kv_cache_hit_rate", help, hit_rate, is_gauge=True)

    def _steps(self, counters: EngineCounters) -> Metric:
        labels = ["model_name", "kind", "ran_as"]
        family = CounterMetricFamily("penstock_steps_by_kind", _STEPS_HELP, labels=labels)
        for field, (kind, ran_as) in _STEPS.items():
            family.add_metric([self._model_name, kind, ran_as], getattr(counters, field))
        return family

    def _family(self, name: str, help: str, value: float, *, is_gauge: bool) -> Metric:
        kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
        family = kind(name, help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The text and its content type: OpenMetrics where `accept` asks for it, else the classic."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
