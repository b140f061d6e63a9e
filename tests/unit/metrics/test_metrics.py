"""Events in, Prometheus families and iteration records out."""

import math

from prometheus_client.parser import text_string_to_metric_families

from penstock.metrics.collect import NUM_CELLS, Metrics
from penstock.metrics.events import FirstToken, MoreTokens, RequestRefused, SampleFinished
from penstock.metrics.iteration import MAX_KEPT, IterationLog, as_trtllm
from penstock.metrics.prometheus import ALIASES, exposition
from penstock.types.stats import EngineCounters, IterationStats


def make_iteration(number: int, **changes: int | str) -> IterationStats:
    values = {
        name: 0
        for name in IterationStats.__dataclass_fields__
        if name not in ("iter", "timestamp", "latency_ms")
    }
    return IterationStats(iter=number, timestamp=0.0, latency_ms=2.0, **(values | changes))


def samples_of(metrics: Metrics) -> dict[tuple[str, ...], float]:
    text, _ = exposition(metrics.registry, "text/plain")
    return {
        (
            sample.name,
            *(v for k, v in sorted(sample.labels.items()) if k != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.labels["model_name"] == "m"
    }


def make_metrics(counters: EngineCounters | None = None) -> Metrics:
    counters = counters or EngineCounters()
    return Metrics("m", lambda: counters, lambda: [])


def test_a_request_fills_the_histograms_under_all_names():
    metrics = make_metrics()
    metrics.observe(FirstToken(0.03))
    metrics.observe(MoreTokens(0.4, 4))
    metrics.observe(
        SampleFinished(
            finish="stop",
            prompt_tokens=10,
            cached_tokens=6,
            generated_tokens=5,
            e2e_s=0.5,
            decode_s=0.4,
        )
    )
    samples = samples_of(metrics)
    for name in ("penstock_", "trtllm_", "vllm:"):
        assert samples[(f"{name}time_to_first_token_seconds_bucket", "0.04")] == 1
        assert samples[(f"{name}time_to_first_token_seconds_bucket", "0.02")] == 0
        assert samples[(f"{name}e2e_request_latency_seconds_sum",)] == 0.5
        assert samples[(f"{name}request_success_total", "stop")] == 1
    assert samples[("vllm:inter_token_latency_seconds_count",)] == 4
    assert math.isclose(samples[("vllm:inter_token_latency_seconds_sum",)], 0.4)
    assert math.isclose(samples[("trtllm_time_per_output_token_seconds_sum",)], 0.1)
    # As with both peers, what was reused is among the prompt's tokens.
    for name in ("vllm:prompt_tokens", "trtllm_prompt_tokens"):
        assert samples[(f"{name}_total",)] == 10
    for name in ("vllm:prompt_tokens_cached", "trtllm_prompt_cached_tokens"):
        assert samples[(f"{name}_total",)] == 6


def test_a_single_token_has_no_time_per_output_token():
    metrics = make_metrics()
    metrics.observe(
        SampleFinished(
            finish="length",
            prompt_tokens=1,
            cached_tokens=0,
            generated_tokens=1,
            e2e_s=0.1,
            decode_s=0.0,
        )
    )
    assert samples_of(metrics)[("trtllm_time_per_output_token_seconds_count",)] == 0


def test_refusals_are_counted_by_status():
    metrics = make_metrics()
    metrics.observe(RequestRefused(400))
    metrics.observe(RequestRefused(400))
    metrics.observe(RequestRefused(429))
    samples = samples_of(metrics)
    assert samples[("penstock_requests_refused_total", "400")] == 2
    assert samples[("penstock_requests_refused_total", "429")] == 1


def test_front_ends_that_share_their_rows_show_the_sums():
    rows = [[0.0] * NUM_CELLS for _ in range(3)]
    waiting = [[make_iteration(number) for number in range(4)] for _ in rows]
    each = [
        Metrics("m", EngineCounters, lambda own=own: waiting[own], rows=rows, own=own)
        for own in range(3)
    ]
    for metrics in each:
        metrics.observe(FirstToken(0.03))
        metrics.observe(MoreTokens(0.3, 3))
        metrics.observe(RequestRefused(418))
        metrics.iterations.refresh()
    for metrics in each:
        samples = samples_of(metrics)
        assert samples[("penstock_time_to_first_token_seconds_count",)] == 3
        assert samples[("penstock_inter_token_latency_seconds_count",)] == 9
        assert math.isclose(samples[("penstock_inter_token_latency_seconds_sum",)], 0.9)
        assert samples[("penstock_requests_refused_total", "other")] == 3
        assert samples[("penstock_iteration_tokens_count",)] == 4  # told to all, counted by one
    waiting[:] = [[], [], []]
    assert [len(metrics.iterations.take()) for metrics in (each[1], each[0], each[2])] == [4, 0, 0]


def test_engine_counters_are_read_at_every_scrape():
    counters = EngineCounters()
    metrics = make_metrics(counters)
    assert samples_of(metrics)[("vllm:num_preemptions_total",)] == 0
    counters.preemptions = 3
    counters.prefix_query_tokens, counters.prefix_hit_tokens = 8, 2
    samples = samples_of(metrics)
    assert samples[("vllm:num_preemptions_total",)] == samples[("penstock_preemptions_total",)] == 3
    assert samples[("trtllm_kv_cache_hit_rate",)] == 0.25


def test_every_alias_names_a_metric_that_exists():
    text, _ = exposition(make_metrics().registry, "text/plain")
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    for name, aliases in ALIASES.items():
        assert {name, *aliases} <= families


def test_openmetrics_is_well_formed():
    text, content_type = exposition(make_metrics().registry, "application/openmetrics-text")
    assert content_type.startswith("application/openmetrics-text") and text.endswith(b"# EOF\n")


def test_iterations_are_observed_once_and_kept_up_to_a_bound():
    waiting = [make_iteration(number) for number in range(MAX_KEPT + 5)]
    seen: list[int] = []

    def drain() -> list[IterationStats]:
        drained = waiting.copy()
        waiting.clear()
        return drained

    log = IterationLog(drain, lambda stats: seen.append(stats.iter))
    log.refresh()
    taken = log.take()
    assert len(seen) == MAX_KEPT + 5
    assert [entry["iter"] for entry in taken] == list(range(5, MAX_KEPT + 5))
    assert log.take() == []


def test_iteration_fields_have_their_names():
    stats = make_iteration(3, reused_blocks=1, missed_blocks=3, new_blocks=4, num_context_tokens=9)
    log = IterationLog(lambda: [stats], lambda _: None)
    [entry] = log.take()
    assert entry["iterLatencyMS"] == 2.0
    assert entry["kvCacheStats"]["cacheHitRate"] == 0.25
    assert entry["inflightBatchingStats"]["numCtxTokens"] == 9


def test_help_says_what_is_counted_and_does_not_repeat_the_name():
    for family in make_metrics().registry.collect():
        words = family.name.partition("_")[2].replace("_", " ")
        assert family.documentation not in (words, words.partition(" ")[2]), family.name
        assert len(family.documentation.split()) >= 4, (family.name, family.documentation)
        assert family.documentation[0].isupper() and family.documentation[-1] != "."


def test_every_counter_of_the_engine_has_a_help_text_of_its_own():
    texts = {
        family.name: family.documentation
        for family in make_metrics().registry.collect()
        if family.name.startswith("penstock_")
    }
    assert len(set(texts.values())) == len(texts)


def test_a_step_with_drafts_says_what_they_brought():
    plain, drafted = (
        as_trtllm(make_iteration(1, num_generation=3, **drafts))
        for drafts in ({}, {"num_drafting": 2, "num_drafted": 8, "num_accepted": 5})
    )
    assert "specDecodingStats" not in plain
    assert drafted["specDecodingStats"] == {
        "numDraftTokens": 8,
        "numAcceptedTokens": 5,
        "numRequestsWithDraftTokens": 2,
        "acceptanceLength": 3.5,
    }


def test_steps_are_counted_by_kind_and_how_they_ran():
    counters = EngineCounters(mixed_graph_steps=7, mixed_eager_steps=1, decode_cpu_graph_steps=3)
    samples = samples_of(make_metrics(counters))
    by_kind = {key[1:]: n for key, n in samples.items() if key[0] == "penstock_steps_by_kind_total"}
    assert by_kind[("mixed", "graph")] == 7 and by_kind[("mixed", "eager")] == 1
    assert by_kind[("decode", "cpu_graph")] == 3 and by_kind[("prefill", "graph")] == 0
    assert sum(by_kind.values()) == 11
    [entry] = IterationLog(
        lambda: [make_iteration(1, kind="mixed", ran_as="graph")], lambda _: None
    ).take()
    assert entry["stepKind"] == "mixed" and entry["ranAs"] == "graph"
