"""Health, version, models, metrics, tokenizing, keys, unknown routes."""

from collections.abc import Iterator
from dataclasses import fields

import httpx
import pytest
from http_fakes import FakePipeline, running_server
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.types.stats import EngineCounters


@pytest.fixture
def pipeline() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def server(pipeline: FakePipeline) -> Iterator[httpx.Client]:
    with running_server(pipeline) as running, httpx.Client(base_url=running.url) as client:
        yield client


def test_health_follows_the_engine(server, pipeline):
    assert server.get("/health").json() == {"status": "ok"}
    pipeline.client.healthy = False
    response = server.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_unavailable"


def test_health_generate_runs_one_token(server, pipeline):
    assert server.get("/health_generate").status_code == 200
    assert pipeline.asked[-1].sampling.max_tokens == 1


def test_version_shows_configuration_choices_memory_and_times(server):
    shown = server.get("/version").json()
    assert shown["version"] == penstock.__version__
    assert shown["config"]["max_batch_size"] == 64
    assert shown["choices"] == [
        {"setting": "dtype", "value": "float32", "reason": "default on a CPU"},
        {
            "setting": "stream_interval",
            "value": "1",
            "reason": "tokens between two chunks of a stream",
        },
    ]
    assert shown["memory"] == {"weights": 2**30, "cache": 2**31}
    assert shown["startup"][0] == {"phase": "load weights", "seconds": 1.5}


def test_models_lists_the_served_name(server):
    reply = server.get("/v1/models").json()
    assert reply["object"] == "list"
    [card] = reply["data"]
    assert card["id"] == "org/model" and card["owned_by"] == "penstock"


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"served_model_name": "x"}, "x"), ({}, "org/model")],
)
def test_the_model_name(pipeline, settings, name):
    with running_server(pipeline, **settings) as running:
        assert httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"] == name


def test_a_local_folder_is_named_by_its_last_part(tmp_path):
    from penstock.config.schema import EngineConfig
    from penstock.server.state import model_name

    folder = tmp_path / "my-model"
    folder.mkdir()
    assert model_name(EngineConfig(model=str(folder))) == "my-model"
    assert model_name(EngineConfig(model=f"{folder}/")) == "my-model"


def test_a_gguf_file_is_named_by_its_stem_and_a_catalogue_model_by_its_name(tmp_path, monkeypatch):
    from penstock.config.schema import EngineConfig
    from penstock.server.state import model_name

    (tmp_path / "Some-1B.Q4_1.gguf").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "Some-1B.Q4_1.gguf", "~/Some-1B.Q4_1.gguf"):
        assert model_name(EngineConfig(model=str(path))) == "Some-1B.Q4_1"
    assert model_name(EngineConfig()) == "smollm2"


def test_metrics_lists_each_iteration_once(server):
    first = server.get("/metrics")
    assert first.headers["content-type"] == "application/json"
    assert [entry["iter"] for entry in first.json()] == [1, 2]
    cache = first.json()[0]["kvCacheStats"]
    assert cache["cacheHitRate"] == 0.25 and cache["usedNumBlocks"] == 4
    assert server.get("/metrics").json() == []


def test_a_prometheus_scrape_does_not_take_iterations_away(server):
    assert server.get("/prometheus/metrics").status_code == 200
    assert len(server.get("/metrics").json()) == 2


def scrape(server: httpx.Client, path: str = "/prometheus/metrics") -> dict[str, float]:
    response = server.get(path, headers={"accept": "text/plain"})
    assert response.headers["content-type"].startswith("text/plain")
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_speaks_prometheus_to_whoever_accepts_text(server):
    assert "vllm:num_requests_running" in scrape(server, "/metrics")
    response = server.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


NAMES = {"swapped_out_blocks": "kept_blocks", "swapped_in_blocks": "fetched_blocks"}


def test_prometheus_has_every_engine_counter_and_the_names_of_the_peers(server):
    server.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "stream": True})
    samples = scrape(server)
    for field in fields(EngineCounters):
        name = f"penstock_{NAMES.get(field.name, field.name)}"
        if field.name.endswith("_steps"):  # one metric, by labels
            name = "penstock_steps_by_kind"
        assert name in samples or f"{name}_total" in samples
    assert samples["penstock_steps_total"] == 7 and samples["trtllm_num_requests_running"] == 2
    assert samples["vllm:kv_cache_usage_perc"] == 0.25
    assert samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["trtllm_time_to_first_token_seconds_count"] == 1
    assert samples["vllm:inter_token_latency_seconds_count"] == 3
    assert samples["trtllm_request_success_total"] == 1
    assert samples["vllm:request_generation_tokens_sum"] == 4
    assert samples["trtllm_iteration_latency_seconds_count"] == 2


def test_a_whole_answer_has_a_time_to_first_token_and_no_times_between_tokens(server):
    server.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4})
    samples = scrape(server)
    assert samples["vllm:e2e_request_latency_seconds_count"] == 1
    assert samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:inter_token_latency_seconds_count"] == 0
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 0


def test_refused_requests_are_counted(server):
    server.post("/v1/completions", content=b"{")
    assert scrape(server)["penstock_requests_refused_total"] == 1


def test_tokenize_and_detokenize_are_inverse(server):
    reply = server.post("/tokenize", json={"prompt": "Grüß"}).json()
    assert reply["count"] == len(reply["tokens"]) == 6 and reply["max_model_len"] == 4096
    assert server.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "Grüß"}


def test_tokenize_renders_messages_as_chat_does(server):
    messages = [{"role": "user", "content": "Hi"}]
    reply = server.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    assert "".join(reply["token_strs"]) == "user: Hi\nassistant:"
    used = server.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert used["usage"]["prompt_tokens"] == reply["count"]


def test_a_key_guards_everything_but_health(pipeline):
    with running_server(pipeline, api_key="secret") as running:
        client = httpx.Client(base_url=running.url)
        assert client.get("/health").status_code == 200
        for path in ("/version", "/metrics", "/v1/models", "/nowhere"):
            response = client.get(path)
            assert response.status_code == 401 and response.json()["error"]["code"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=good).status_code == 200
        assert client.get("/v1/models", headers={"authorization": "secret"}).status_code == 401


def test_a_bug_is_a_500_that_tells_nothing(server):
    response = server.post("/v1/completions", json={"prompt": "BUG"})
    assert response.status_code == 500
    assert "secret" not in response.text and "Traceback" not in response.text
    assert server.get("/health").status_code == 200
