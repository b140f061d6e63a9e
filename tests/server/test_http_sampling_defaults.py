"""What a request leaves out comes from the model's generation_config.json, and nothing else."""

from collections.abc import Iterator

import httpx
import pytest
from http_fakes import FakePipeline, running_server
from msgspec.structs import replace

from penstock.types.sampling import SamplingParams

MODELS_OWN = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05, "max_tokens": 5}


@pytest.fixture
def pipeline() -> FakePipeline:
    pipeline = FakePipeline()
    pipeline.client.info = replace(pipeline.client.info, default_sampling=MODELS_OWN)
    return pipeline


@pytest.fixture
def server(pipeline: FakePipeline) -> Iterator[httpx.Client]:
    with running_server(pipeline) as running, httpx.Client(base_url=running.url) as client:
        yield client


def sampled(server: httpx.Client, pipeline: FakePipeline, path: str, **body: object):
    asked = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    reply = server.post(path, json={**asked, **body})
    assert reply.status_code == 200, reply.text
    return pipeline.asked[-1].sampling


MESSAGES = [{"role": "user", "content": "Hi"}]
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_sets_nothing_gets_the_models_defaults(server, pipeline, path):
    assert sampled(server, pipeline, path) == SamplingParams(**MODELS_OWN)
    # null stands for a field that is not given
    assert sampled(server, pipeline, path, temperature=None) == SamplingParams(**MODELS_OWN)


@pytest.mark.parametrize("path", PATHS)
def test_what_a_request_sets_wins_field_by_field(server, pipeline, path):
    found = sampled(server, pipeline, path, temperature=0.5, max_tokens=9)
    assert found == SamplingParams(**MODELS_OWN | {"temperature": 0.5, "max_tokens": 9})


@pytest.mark.parametrize("path", PATHS)
def test_a_request_for_the_likeliest_tokens_gets_them_whatever_the_model_says(
    server, pipeline, path
):
    """Evaluations ask so: a model's penalty would change their scores."""
    found = sampled(server, pipeline, path, temperature=0)
    assert found == SamplingParams(temperature=0.0, max_tokens=5)
    found = sampled(server, pipeline, path, temperature=0, repetition_penalty=1.2)
    assert found == SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.2)


def test_max_completion_tokens_and_echo_alone_win_too(server, pipeline):
    found = sampled(server, pipeline, "/v1/chat/completions", max_completion_tokens=9)
    assert found.max_tokens == 9
    assert sampled(server, pipeline, PATHS[0], echo=True, max_tokens=0).max_tokens == 1


def test_a_longer_min_tokens_does_not_collide_with_the_default_max_tokens(server, pipeline):
    found = sampled(server, pipeline, "/v1/completions", min_tokens=8)
    assert (found.min_tokens, found.max_tokens) == (8, None)


def test_the_defaults_are_shown(server):
    assert server.get("/version").json()["default_sampling"] == MODELS_OWN
