"""The `openai` package against a real socket: what users' programs see."""

from collections.abc import Iterator

import openai
import pytest
from http_fakes import OUTPUT, FakePipeline, running_server

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with running_server(FakePipeline(), api_key="secret") as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="secret", max_retries=0)


def test_models(client):
    [card] = client.models.list().data
    assert card.id == "org/model" and card.owned_by == "penstock" and card.object == "model"


def test_chat(client):
    reply = client.chat.completions.create(
        model="m", messages=MESSAGES, logprobs=True, top_logprobs=1, extra_body={"top_k": 3}
    )
    assert reply.choices[0].message.content == OUTPUT
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].logprobs.content[0].token == OUTPUT[0]
    assert reply.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream(client):
    text, usage, reasons = "", None, []
    with client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == OUTPUT and reasons == ["stop"]
    assert usage.completion_tokens == len(OUTPUT.encode())


def test_completion(client):
    reply = client.completions.create(
        model="m", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True
    )
    assert [choice.text for choice in reply.choices] == ["a" + OUTPUT[:3], "b" + OUTPUT[:3]]
    assert reply.choices[1].logprobs.token_logprobs[0] is None


def test_completion_stream(client):
    chunks = client.completions.create(model="m", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == OUTPUT


def test_a_bad_request_names_the_field(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.code == "invalid_value"
    assert caught.value.type == "invalid_request_error"
    assert "-1" in caught.value.message and "between 0.0 and 100.0" in caught.value.message


def test_a_full_server_is_a_rate_limit(client):
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="m", prompt="REFUSE")
    assert caught.value.response.headers["retry-after"] == "3"


def test_an_engine_failure_is_a_server_error(client):
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="m", prompt="FAIL")
    assert caught.value.status_code == 503


def test_an_engine_failure_in_a_stream_is_raised(client):
    with pytest.raises(openai.APIError, match="the engine failed"):
        for _ in client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "FAIL"}], stream=True
        ):
            pass


def test_a_wrong_key_is_refused(client):
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
