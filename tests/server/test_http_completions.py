"""`/v1/completions`: shapes, many prompts, echo with log-probabilities, best_of, streams."""

import json
from collections.abc import Iterator

import httpx
import pytest
from http_fakes import OUTPUT, FakePipeline, running_server

COMPLETION_KEYS = ["id", "object", "created", "model", "choices", "usage", "prompt_token_ids"]
CHOICE_KEYS = [
    *("index", "text", "token_ids", "logprobs", "context_logits", "finish_reason", "stop_reason"),
    *("disaggregated_params", "avg_decoded_tokens_per_iter"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with (
        running_server(FakePipeline(), access_config={"allow_priority": True}) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        client.pipeline = running.pipeline  # type: ignore[attr-defined]
        yield client


def complete(server: httpx.Client, **body: object) -> dict:
    response = server.post("/v1/completions", json={"model": "any/name", "prompt": "Hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: httpx.Client, **body: object) -> list[dict]:
    body = {"model": "any/name", "prompt": "Hi", "stream": True, **body}
    response = server.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def test_keys_their_order_and_nulls_are_those_of_the_recipes(server):
    reply = complete(server, max_tokens=4)
    assert list(reply) == COMPLETION_KEYS
    assert list(reply["choices"][0]) == CHOICE_KEYS
    assert list(reply["usage"])[:3] == ["prompt_tokens", "total_tokens", "completion_tokens"]
    assert reply["id"].startswith("cmpl-") and len(reply["id"]) == len("cmpl-") + 32
    assert reply["object"] == "text_completion" and reply["model"] == "org/model"
    choice = reply["choices"][0]
    assert choice["text"] == OUTPUT[:4] and choice["finish_reason"] == "length"
    assert choice["token_ids"] is choice["logprobs"] is choice["stop_reason"] is None
    assert reply["prompt_token_ids"] is None
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 6,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_prompt_and_what_was_cached_of_it_count_once_for_all_samples(server):
    usage = complete(server, max_tokens=4, n=3, temperature=1.0)["usage"]
    assert usage["prompt_tokens"] == 2 and usage["completion_tokens"] == 12
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_body_without_content_type_is_read_as_json(server):
    response = server.post(
        "/v1/completions",
        content=b'{"prompt": "Hi", "max_tokens": 1}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert response.status_code == 200
    assert response.json()["model"] == "org/model"


@pytest.mark.parametrize(
    ("prompt", "num"),
    [("a", 1), (["a", "b", "c"], 3), ([1, 2], 1), ([[1, 2], [3]], 2), (["a", [1, 2]], 2)],
)
def test_index_is_prompt_times_n_plus_sample(server, prompt, num):
    reply = complete(server, prompt=prompt, n=2, max_tokens=2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * num))
    assert reply["usage"]["completion_tokens"] == 2 * 2 * num


def test_many_prompts_answer_in_order_of_their_index(server):
    prompts = [f"{'x' * number}" for number in range(1, 200)]
    reply = complete(server, prompt=prompts, max_tokens=1)
    assert len(reply["choices"]) == 199
    assert reply["usage"]["prompt_tokens"] == sum(range(1, 200))


def test_add_special_tokens_and_sampling_reach_the_pipeline(server):
    complete(
        server,
        add_special_tokens=False,
        temperature=0.0,
        top_k=5,
        min_p=0.1,
        stop="\n",
        seed=3,
        logit_bias={"7": -100},
        cache_salt="s",
        priority=2,
        truncate_prompt_tokens=5,
        ignore_eos=True,
        min_tokens=1,
    )
    asked = server.pipeline.asked[-1]
    assert not asked.add_special_tokens and asked.cache_salt == "s" and asked.priority == 2
    assert asked.truncate_prompt_tokens == 5
    sampling = asked.sampling
    assert sampling.is_greedy and sampling.top_k == 5 and sampling.min_p == 0.1
    assert sampling.stop == ("\n",) and sampling.seed == 3 and sampling.logit_bias == {7: -100}
    assert sampling.ignore_eos and sampling.min_tokens == 1


def test_null_means_not_given(server):
    names = ("n", "best_of", "stream", "stop", "logprobs", "echo", "seed", "top_k", "temperature")
    reply = complete(server, **dict.fromkeys(names))
    assert len(reply["choices"]) == 1


def test_logprobs_have_one_entry_per_token_and_hold_the_chosen_one(server):
    logprobs = complete(server, logprobs=2, max_tokens=5)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(OUTPUT[:5])
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])  # two best and the chosen one
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob


def test_a_piece_of_a_character_is_named_by_its_bytes(server):
    logprobs = complete(server, logprobs=0)["choices"][0]["logprobs"]
    at = OUTPUT.index("é")
    assert logprobs["tokens"][at : at + 2] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_scores_the_prompt(server, max_tokens):
    reply = complete(
        server, prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    [choice] = reply["choices"]
    prompt = server.pipeline.tokenizer.decode([5, 6, 7])
    assert choice["text"] == prompt + OUTPUT[:max_tokens]
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {3 + max_tokens}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:3] == [-0.5, -0.5]
    # What a log-likelihood harness reads: is the token the most likely one?
    assert max(logprobs["top_logprobs"][1].values()) == -0.25
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert server.pipeline.asked[-1].sampling.prompt_logprobs == 1


def test_echo_without_logprobs_repeats_the_prompt_for_each_sample(server):
    reply = complete(server, prompt="Say", echo=True, n=2, max_tokens=3)
    assert [choice["text"] for choice in reply["choices"]] == ["Say" + OUTPUT[:3]] * 2


def test_prompt_logprobs_come_in_the_form_of_the_peers(server):
    [choice] = complete(server, prompt=[5, 6], prompt_logprobs=1, max_tokens=1)["choices"]
    tokenizer = server.pipeline.tokenizer
    assert choice["prompt_logprobs"] == [
        None,
        {
            "0": {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([0])},
            "6": {"logprob": -0.5, "rank": 3, "decoded_token": tokenizer.decode([6])},
        },
    ]


def test_best_of_reaches_the_pipeline_which_ranks(server):
    reply = complete(server, n=2, best_of=3, max_tokens=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert server.pipeline.asked[-1].sampling.best_of == 3


def test_more_sequences_than_may_ever_be_open_are_refused_at_once(server):
    response = server.post("/v1/completions", json={"prompt": ["a"] * 100, "n": 3})
    assert response.status_code == 400
    assert "300 sequences, at most 256" in response.json()["error"]["message"]


def test_without_detokenizing_ids_are_returned(server):
    [choice] = complete(server, detokenize=False, max_tokens=3)["choices"]
    tokenizer = server.pipeline.tokenizer
    assert tokenizer.decode(choice["token_ids"]) == OUTPUT[:3]


def test_a_stream_adds_up_to_the_whole_answer(server):
    whole = complete(server, n=2)
    chunks = stream(server, n=2)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(list(chunk) == COMPLETION_KEYS for chunk in chunks)
    assert all(list(chunk["choices"][0]) == CHOICE_KEYS for chunk in chunks)
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert (
            "".join(choice["text"] for choice in mine) == whole["choices"][index]["text"] == OUTPUT
        )
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_streamed_prompts_are_told_apart_by_index(server):
    chunks = stream(server, prompt=["a", "b", "c"], max_tokens=3, logprobs=0, echo=True)
    for index, prompt in enumerate("abc"):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == prompt + OUTPUT[:3]
        offsets = [offset for choice in mine for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3]


def test_include_usage_sends_one_last_chunk_without_choices(server):
    chunks = stream(server, max_tokens=3, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == [] and chunks[-1]["object"] == "text_completion"
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_continuous_usage_grows_with_every_chunk(server):
    chunks = stream(server, max_tokens=3, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 3]


def test_an_error_in_a_stream_becomes_an_event(server):
    chunks = stream(server, prompt="FAIL")
    assert chunks[0]["choices"][0]["text"] == OUTPUT[0]
    assert "engine failed" in chunks[-1]["error"]["message"]


def test_one_failing_prompt_of_many_ends_them_all(server):
    response = server.post("/v1/completions", json={"prompt": ["SLOW", "FAIL", "SLOW"]})
    assert response.status_code == 503
    assert server.pipeline.num_open == 0
    assert server.pipeline.aborted[-2:] == ["SLOW", "SLOW"]


def test_a_refused_prompt_aborts_the_ones_before_it(server):
    response = server.post("/v1/completions", json={"prompt": ["SLOW", "REFUSE"]})
    assert response.status_code == 429 and response.headers["retry-after"] == "3"
    assert server.pipeline.num_open == 0
