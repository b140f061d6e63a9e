"""What a request may ask for, through a real server: each option has the effect its name says."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
import transformers
from server_process import Server
from tiny_models import CHAT_TEMPLATE, reference_model
from waiting import until

import penstock
from penstock.hub.folder import local_folder

MAX_SEQ_LEN = 256
TEMPLATE = CHAT_TEMPLATE + "{%- if enable_thinking -%}<think>{%- endif -%}"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "<|im_start|>assistant\nOnce there was a"  # several animals may follow
NUM_PROMPT_TOKENS = 7
# What it says greedily:
STORY = " swan. The swan lived near a swan. One day the swan walked in the swan and found"
BEGINNING = " swan. The swan lived near a swan"  # its first eight tokens
LONG_PROMPT = "Water runs down the hill. " * 12
TRIES = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    access = {"allow_priority": True}
    with Server(
        "tiny", max_seq_len=MAX_SEQ_LEN, chat_template=TEMPLATE, access_config=access
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return reference_model(local_folder("tiny"))


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(local_folder("tiny"))


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    return server.post(COMPLETIONS, **({"prompt": PROMPT, "temperature": 0} | fields))


def choice_of(server: Server, **fields: Any) -> dict[str, Any]:
    [choice] = complete(server, **fields)["choices"]
    return choice


def chunks(server: Server, path: str = COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    """The JSON of every event of a stream; it must end with [DONE]."""
    body = {"stream": True, "temperature": 0} | fields
    if path == COMPLETIONS:
        body = {"prompt": PROMPT} | body
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


# Sampling


def test_allowed_tokens_and_bad_words(server, tokenizer):
    ids = tokenizer.encode(" swan lived", add_special_tokens=False)
    only = choice_of(server, max_tokens=6, allowed_token_ids=ids, return_token_ids=True)
    assert only["token_ids"] and set(only["token_ids"]) <= set(ids)
    free = choice_of(server, max_tokens=16)["text"]
    assert "swan" in free and "lived near" in free
    without = choice_of(server, max_tokens=16, bad_words=["swan", "lived near"])["text"]
    assert "swan" not in without and "lived near" not in without
    refused = server.http.post(COMPLETIONS, json={"prompt": PROMPT, "bad_words": ["x" * 99]})
    assert refused.status_code == 400 and "a word has 1 to 8" in refused.text


def test_ids_and_names_of_what_was_made(server, tokenizer):
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    choice = choice_of(server, max_tokens=2, return_token_ids=True, logprobs=1)
    assert choice["prompt_token_ids"] == ids
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    named = choice_of(server, max_tokens=2, return_tokens_as_token_ids=True, logprobs=1)
    tokens = [f"token_id:{one}" for one in choice["token_ids"]]
    assert named["logprobs"]["tokens"] == tokens
    assert named["logprobs"]["token_logprobs"] == choice["logprobs"]["token_logprobs"]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "request_id": "my-1"}
    said = server.post(CHAT, **asked, temperature=0, return_token_ids=True)
    assert said["id"] == "chatcmpl-my-1"
    first, *others = chunks(server, CHAT, **asked, return_token_ids=True)
    assert said["prompt_token_ids"] == first["prompt_token_ids"]
    streamed = [one for chunk in others for c in chunk["choices"] for one in c["token_ids"]]
    assert streamed == said["choices"][0]["token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in others)


def test_log_probabilities_of_named_tokens(server, tokenizer):
    labels = [tokenizer.encode(word, add_special_tokens=False)[0] for word in (" cat", " swan")]
    every = choice_of(server, max_tokens=2, logprobs=20, return_tokens_as_token_ids=True)
    known = every["logprobs"]["top_logprobs"]
    asked = {"max_tokens": 2, "return_tokens_as_token_ids": True, "logprob_token_ids": labels}
    # Others of the batch, with other wishes, change nothing.
    mixed = complete(server, prompt=[PROMPT, LONG_PROMPT], logprobs=1, **asked)["choices"][0]
    for choice in (choice_of(server, logprobs=0, **asked), mixed):
        for top, all_of_it in zip(choice["logprobs"]["top_logprobs"], known, strict=True):
            names = {f"token_id:{one}" for one in labels}
            assert names <= set(top) and len(top) <= 3
            for name in names & set(all_of_it):
                assert top[name] == pytest.approx(all_of_it[name], abs=1e-4)
    assert f"token_id:{labels[1]}" in known[0]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    said = server.post(CHAT, **chat, logprobs=True, logprob_token_ids=labels)
    [one] = said["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in one["top_logprobs"]] == [" cat", " swan"]
    for wrong, why in (
        ({"logprob_token_ids": labels}, "needs logprobs"),
        ({"logprob_token_ids": [10**6], "logprobs": 0}, "the vocabulary is"),
        ({"logprob_token_ids": [1] * 129, "logprobs": 0}, "at most 128"),
        ({"logprob_token_ids": [], "logprobs": 0}, "at least 1"),
    ):
        refused = server.http.post(COMPLETIONS, json={"prompt": PROMPT} | wrong)
        assert refused.status_code == 400 and why in refused.text, refused.text
        assert "logprob_token_ids" in refused.text


def test_minus_one_keeps_all_of_a_prompt_that_fits(server):
    reply = complete(
        server, prompt=LONG_PROMPT * 4, truncate_prompt_tokens=-1, max_tokens=8, ignore_eos=True
    )
    assert reply["usage"]["total_tokens"] == MAX_SEQ_LEN


@pytest.mark.parametrize(
    "fields",
    [
        {"logits_processors": ["mine"]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [10**6]},
        {"bad_words": ["swan"], "guided_choice": ["swan", "fox"]},
        {"truncate_prompt_tokens": 0},
        {"request_id": "a b"},
        {"vllm_xargs": {"a": 1}},
        {"kv_transfer_params": {"a": 1}},
        {"suffix": "end"},
        {"logprob_token_ids": [1]},
    ],
)
def test_what_is_not_possible_is_refused_by_its_name(server, fields):
    refused = server.http.post(COMPLETIONS, json={"prompt": PROMPT, **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(fields))


def test_beam_search_returns_the_likeliest_outputs(server, model, tokenizer, client):
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        found = model.generate(
            ids, num_beams=4, num_return_sequences=2, max_new_tokens=8, do_sample=False
        )
    expected = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
    asked = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 8}
    reply = complete(server, **asked)
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert reply["usage"]["completion_tokens"] == 16
    said = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "Hi"}],
        n=2,
        max_tokens=4,
        extra_body={"use_beam_search": True, "early_stopping": 1},
    )
    assert [choice.index for choice in said.choices] == [0, 1]
    for wrong in ({"use_beam_search": True, "stream": True}, {"length_penalty": 2.0}):
        refused = server.http.post(COMPLETIONS, json={"prompt": PROMPT, **wrong})
        assert refused.status_code == 400 and "use_beam_search" in refused.text


@torch.inference_mode()
def next_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, -1]


def penalised(fields: dict[str, Any], prompt: list[int], output: list[int], logits: torch.Tensor):
    """OpenAI's penalties see the output, the repetition penalty also the prompt."""
    logits = logits.clone()
    for token_id, bias in fields.get("logit_bias", {}).items():
        logits[int(token_id)] += bias
    if "repetition_penalty" in fields:
        processor = transformers.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"])
        logits = processor(torch.tensor([prompt + output]), logits[None])[0]
    for token_id, count in Counter(output).items():
        logits[token_id] -= fields.get("presence_penalty", 0.0)
        logits[token_id] -= count * fields.get("frequency_penalty", 0.0)
    return logits


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"logit_bias": {"1030": -5, "564": -100, "1384": 4.5}},
    ],
    ids=str,
)
def test_penalties_and_bias_give_the_greedy_text_their_formulas_give(
    server, model, tokenizer, fields
):
    prompt = tokenizer.encode(PROMPT)
    expected: list[int] = []
    for _ in range(40):
        logits = penalised(fields, prompt, expected, next_logits(model, prompt + expected))
        expected.append(int(logits.argmax()))
    choice = choice_of(server, max_tokens=40, ignore_eos=True, detokenize=False, **fields)
    assert choice["token_ids"] == expected


def test_a_repetition_penalty_ends_a_loop(server):
    loop = {"prompt": "Hello", "max_tokens": 30, "ignore_eos": True}
    assert choice_of(server, **loop)["text"] == "Hello" * 30
    assert "Hello" * 2 not in choice_of(server, repetition_penalty=1.5, **loop)["text"]


def test_the_strongest_bias_forces_and_bans_a_token(server, tokenizer):
    [swan] = tokenizer.encode(" swan")
    assert choice_of(server, max_tokens=5, logit_bias={swan: 100})["text"] == " swan" * 5
    assert " swan" not in choice_of(server, max_tokens=20, logit_bias={swan: -100})["text"]


def first_tokens(server: Server, **fields: Any) -> Counter[int]:
    """How often each token comes first in 512 samples."""
    counted: Counter[int] = Counter()
    fields = {"temperature": 1, "n": 128, "max_tokens": 1, "detokenize": False} | fields
    for seed in range(0, 512, 128):
        reply = complete(server, seed=seed, ignore_eos=True, **fields)
        counted.update(choice["token_ids"][0] for choice in reply["choices"])
    return counted


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_samples_follow_the_models_distribution_at_any_temperature(
    server, model, tokenizer, temperature
):
    logits = next_logits(model, tokenizer.encode(PROMPT))
    likely = (logits / temperature).softmax(-1).topk(4)
    counted = first_tokens(server, temperature=temperature)
    shares = torch.tensor([counted[one] / counted.total() for one in likely.indices.tolist()])
    assert (shares - likely.values).abs().sum() < 0.1


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"top_k": 3}, transformers.TopKLogitsWarper(3)),
        ({"top_p": 0.8}, transformers.TopPLogitsWarper(0.8)),
        ({"min_p": 0.06}, transformers.MinPLogitsWarper(0.06)),
        ({"top_k": 1}, transformers.TopKLogitsWarper(1)),
        ({"top_p": 0.0}, transformers.TopKLogitsWarper(1)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_only_the_tokens_a_filter_keeps_are_drawn(server, model, tokenizer, fields, processor):
    prompt = tokenizer.encode(PROMPT)
    kept = processor(torch.tensor([prompt]), next_logits(model, prompt)[None])[0].isfinite()
    assert sorted(first_tokens(server, **fields)) == kept.nonzero().flatten().tolist()


def test_equal_seeds_repeat_and_other_seeds_differ(server):
    texts = [
        choice_of(server, max_tokens=16, temperature=1, seed=seed)["text"] for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


# Ends


def test_min_tokens_holds_back_the_end_and_ignore_eos_forgets_it(server, tokenizer):
    end = tokenizer.eos_token_id
    wants_end = {"logit_bias": {end: 100}, "detokenize": False, "max_tokens": 8}
    at_once = choice_of(server, **wants_end)
    assert (at_once["token_ids"], at_once["finish_reason"]) == ([], "stop")
    held_back = choice_of(server, min_tokens=5, **wants_end)
    assert len(held_back["token_ids"]) == 5 and end not in held_back["token_ids"]
    assert (held_back["finish_reason"], held_back["stop_reason"]) == ("stop", None)
    ignored = choice_of(server, ignore_eos=True, **wants_end)
    assert (ignored["token_ids"], ignored["finish_reason"]) == ([end] * 8, "length")


def test_special_tokens_are_shown_only_when_asked_for(server, tokenizer):
    fields = {"logit_bias": {tokenizer.eos_token_id: 100}, "ignore_eos": True, "max_tokens": 2}
    assert choice_of(server, **fields)["text"] == ""
    assert choice_of(server, skip_special_tokens=False, **fields)["text"] == "<|im_end|>" * 2


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ([" near a"], " swan. The swan lived", " near a"),
        ("ved ne", " swan. The swan li", "ved ne"),  # begins and ends within tokens
        (["zebra", " lantern", " near"], " swan. The swan lived", " near"),
        ([" lived near", " swan lived"], " swan. The", " swan lived"),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_text_before_it(server, stop, text, found):
    whole = choice_of(server, max_tokens=30, stop=stop)
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (text, "stop", found)
    streamed = [chunk["choices"][0] for chunk in chunks(server, max_tokens=30, stop=stop)]
    assert "".join(choice["text"] for choice in streamed) == text
    assert (streamed[-1]["finish_reason"], streamed[-1]["stop_reason"]) == ("stop", found)
    kept = choice_of(server, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert kept["text"] == text + found


def test_a_text_that_only_begins_like_a_stop_string_arrives_whole(server):
    plain = choice_of(server, max_tokens=30)["text"]
    searched = chunks(server, max_tokens=30, stop=[" near a!", " walked in the swan and sang"])
    assert "".join(chunk["choices"][0]["text"] for chunk in searched) == plain


def test_a_stop_token_ends_the_text_and_is_named(server, tokenizer):
    [near] = tokenizer.encode(" near")
    whole = choice_of(server, max_tokens=30, stop_token_ids=[near, 3])
    assert (whole["text"], whole["finish_reason"]) == (" swan. The swan lived", "stop")
    assert whole["stop_reason"] == near
    streamed = [c["choices"][0] for c in chunks(server, max_tokens=30, stop_token_ids=[near])]
    assert "".join(choice["text"] for choice in streamed) == " swan. The swan lived"
    assert streamed[-1]["stop_reason"] == near


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 10**6}])
def test_an_answer_ends_where_the_context_does(server, limit):
    reply = complete(server, ignore_eos=True, **limit)
    assert reply["usage"]["total_tokens"] == MAX_SEQ_LEN
    assert reply["choices"][0]["finish_reason"] == "length"


# Prompts and samples


def test_a_prompt_may_be_text_or_ids_alone_or_in_lists(server, tokenizer):
    ids = tokenizer.encode(PROMPT)
    for prompt in (PROMPT, [PROMPT], ids, [ids]):
        assert choice_of(server, prompt=prompt, max_tokens=8)["text"] == BEGINNING
    reply = complete(server, prompt=[ids, tokenizer.encode("A valve")], max_tokens=8)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["usage"]["prompt_tokens"] == len(ids) + len(tokenizer.encode("A valve"))


def test_the_index_counts_samples_within_prompts(server):
    prompts, n = ["The river", "Of course", "A small engine"], 3
    alone = [choice_of(server, prompt=prompt, max_tokens=12)["text"] for prompt in prompts]
    assert len(set(alone)) == 3
    expected = [text for text in alone for _ in range(n)]
    reply = complete(server, prompt=prompts, n=n, max_tokens=12)
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts) * n))
    assert [choice["text"] for choice in reply["choices"]] == expected
    texts = [""] * len(expected)
    for chunk in chunks(server, prompt=prompts, n=n, max_tokens=12):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


def test_best_of_returns_the_likeliest_samples_first(server):
    fields = {"max_tokens": 12, "seed": 4, "temperature": 1.5, "ignore_eos": True}
    samples = complete(server, n=8, logprobs=0, **fields)["choices"]
    ranked = sorted(samples, key=lambda one: -sum(one["logprobs"]["token_logprobs"]))
    reply = complete(server, n=3, best_of=8, **fields)
    assert [one["text"] for one in reply["choices"]] == [one["text"] for one in ranked[:3]]
    assert [one["index"] for one in reply["choices"]] == [0, 1, 2]
    assert all(one["logprobs"] is None for one in reply["choices"])


def test_truncation_keeps_the_end_of_the_prompt(server):
    size = NUM_PROMPT_TOKENS
    fields = {"prompt": "Well, " + PROMPT, "truncate_prompt_tokens": size, "max_tokens": 8}
    reply = complete(server, **fields)
    assert reply["usage"]["prompt_tokens"] == size
    assert reply["choices"][0]["text"] == BEGINNING
    echoed = choice_of(server, echo=True, logprobs=0, **fields)
    assert echoed["text"] == PROMPT + BEGINNING
    assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"]


def test_equal_salts_share_a_prefix_and_others_do_not(server):
    prompt = f"{next(TRIES)}: {LONG_PROMPT}"  # which no other try has left in the cache

    def cached(**fields: Any) -> int:
        reply = complete(server, prompt=prompt, max_tokens=1, **fields)
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0
    num_cached = cached(cache_salt="a")
    assert num_cached > 64
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() == num_cached


def test_a_priority_is_accepted(server):
    for priority in (-5, 0, 100):
        assert choice_of(server, max_tokens=8, priority=priority)["text"] == BEGINNING


# Log-probabilities


@torch.inference_mode()
def test_a_scored_prompt_is_what_an_evaluation_harness_needs(server, model, tokenizer):
    """lm-eval: ids in lists, echo, one more token than wanted; sums over the continuation."""
    context, continuation = tokenizer.encode("Let me think."), tokenizer.encode(" The old mill")
    ids = context + continuation
    body = {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    reply = complete(server, prompt=[ids, ids[1:]], max_tokens=1, **body)
    truth = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    scored = reply["choices"][0]["logprobs"]
    assert scored["tokens"][:-1] == [tokenizer.decode(one) for one in ids]
    assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
    ours = torch.tensor(scored["token_logprobs"][1:-1])
    torch.testing.assert_close(ours, truth[range(len(ids) - 1), ids[1:]], atol=1e-4, rtol=0)
    for row, (token, top) in enumerate(zip(scored["tokens"], scored["top_logprobs"], strict=True)):
        if row == 0:
            continue
        best = tokenizer.decode(int(truth[row - 1].argmax()))
        assert max(top, key=top.__getitem__) == best and token in top
    assert reply["choices"][1]["logprobs"]["tokens"][:-1] == scored["tokens"][1:-1]
    alone = complete(server, prompt=[ids], max_tokens=0, **body)
    assert alone["choices"][0]["text"] == tokenizer.decode(ids)
    assert alone["choices"][0]["logprobs"]["tokens"] == scored["tokens"][:-1]
    assert alone["usage"]["completion_tokens"] == 0


def test_completion_logprobs_through_the_openai_client(client):
    reply = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3
    )
    [choice] = reply.choices
    scored = choice.logprobs
    assert "".join(scored.tokens) == choice.text == STORY[: len(choice.text)]
    assert [choice.text[at:] for at in scored.text_offset] == [
        "".join(scored.tokens[i:]) for i in range(6)
    ]
    for token, logprob, top in zip(
        scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_through_the_openai_client(client, stream):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=6, temperature=0,
        logprobs=True, top_logprobs=2, stream=stream,
    )  # fmt: skip
    if stream:
        parts = [chunk.choices[0] for chunk in answer]
        text = "".join(part.delta.content or "" for part in parts)
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    else:
        text, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert len(entries) == 6
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    for entry in entries:
        assert [entry.token, entry.logprob] == [
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        ]
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


# Streams and usage


def test_a_stream_says_what_a_whole_answer_says(server):
    messages = [{"role": "user", "content": "Hi"}]
    whole = server.post(CHAT, messages=messages, temperature=0, max_tokens=20)["choices"][0]
    parts = [c["choices"][0] for c in chunks(server, CHAT, messages=messages, max_tokens=20)]
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(part["delta"].get("content", "") for part in parts)
    assert text == whole["message"]["content"]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


MIXED: dict[str, list[Any]] = {
    "prompt": [PROMPT, ["Of course. 🌊", LONG_PROMPT], [54, 259, 486], [[54, 259], [300]]],
    "max_tokens": [1, 5, 17],
    "n": [1, 3],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.3, 1.0],
    "top_k": [-1, 5],
    "min_p": [0.2],
    "repetition_penalty": [0.8, 1.3],
    "presence_penalty": [-1, 1.5],
    "frequency_penalty": [0.7],
    "logit_bias": [{"2": 3.0, "0": 2.0}, {"1030": -100}],
    "stop": [" near", [".", " the"], "ved ne"],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[1030], [936, 27]],
    "ignore_eos": [True],
    "min_tokens": [1],
    "logprobs": [0, 5, 20],
    "prompt_logprobs": [0, 3],
    "echo": [True],
    "detokenize": [False],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [1, 50],
    "cache_salt": ["s"],
}


def joined(streamed: list[dict[str, Any]], index: int) -> tuple[Any, ...]:
    parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
    return (
        "".join(part["text"] for part in parts),
        [one for part in parts for one in part["token_ids"] or ()],
        [one for part in parts if part["logprobs"] for one in part["logprobs"]["tokens"]],
        [one for part in parts if part["logprobs"] for one in part["logprobs"]["text_offset"]],
        parts[-1]["finish_reason"],
        parts[-1]["stop_reason"],
    )


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_options_streams_what_it_answers_whole(server, seed):
    rng = random.Random(seed)
    body = {name: rng.choice(values) for name, values in MIXED.items() if rng.random() < 0.35}
    body = {"max_tokens": 8, "seed": seed, "temperature": 1} | body
    whole = complete(server, **body)
    streamed = chunks(server, stream_options={"include_usage": True}, **body)
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed[-1]["usage"][count] == whole["usage"][count], body
    for choice in whole["choices"]:
        alone = joined([{"choices": [choice]}], choice["index"])
        assert joined(streamed, choice["index"]) == alone, body


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, {}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})],
)
def test_a_stream_reports_usage_at_its_end_or_all_along(server, path, fields):
    fields |= {"max_tokens": 7, "ignore_eos": True}
    plain = chunks(server, path, **fields)
    assert not any(chunk.get("usage") for chunk in plain)
    *parts, last = chunks(server, path, stream_options={"include_usage": True}, **fields)
    assert not any(chunk.get("usage") for chunk in parts)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["completion_tokens"] == 7
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = chunks(server, path, stream_options=options, **fields)
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts) and counts[-1] == 7 and len(set(counts)) == 7
    assert always[-1]["choices"] == []


def test_usage_counts_the_tokens_of_the_prompt_once(server):
    count = server.post("/tokenize", prompt=PROMPT)["count"]
    usage = complete(server, n=3, max_tokens=5, ignore_eos=True)["usage"]
    assert usage["prompt_tokens"] == count
    assert usage["completion_tokens"] == 15
    assert usage["total_tokens"] == count + 15


# Chat prompts


def test_text_survives_tokenizing_and_detokenizing(server, tokenizer):
    text = "The river fills ¿café? 🌊\n<|im_end|>"
    reply = server.post("/tokenize", prompt=text, return_token_strs=True)
    assert reply["tokens"] == tokenizer.encode(text) and reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == MAX_SEQ_LEN
    assert reply["token_strs"][0] == "The"
    assert server.post("/detokenize", tokens=reply["tokens"])["prompt"] == text


@pytest.mark.parametrize("template_kwargs", [{}, {"enable_thinking": True}])
def test_messages_become_the_prompt_transformers_makes(server, tokenizer, template_kwargs):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Is it cold?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False,
        **template_kwargs,
    )  # fmt: skip
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]}
             for m in messages]  # fmt: skip
    for form in (messages, parts):
        asked = {"messages": form, "chat_template_kwargs": template_kwargs}
        assert server.post("/tokenize", **asked)["tokens"] == expected
        usage = server.post(CHAT, max_tokens=1, **asked)["usage"]
        assert usage["prompt_tokens"] == len(expected)


def test_content_parts_are_joined_and_a_last_message_is_continued(server):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Cold water"}]
    asked = {"messages": messages, "continue_final_message": True}
    tokens = server.post("/tokenize", **asked)["tokens"]
    prompt = server.post("/detokenize", tokens=tokens)["prompt"]
    assert prompt == ("<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\nCold water")
    expected = choice_of(server, prompt=prompt, max_tokens=6)["text"]
    for echo, begin in ((False, ""), (True, "Cold water")):
        reply = server.post(CHAT, temperature=0, max_tokens=6, echo=echo, **asked)
        assert reply["choices"][0]["message"]["content"] == begin + expected


# What a server says of itself


def test_the_model_list_and_the_version(server, client):
    [card] = client.models.list().data
    assert (card.id, card.object) == ("tiny", "model")
    version = server.version()
    assert version["version"] == penstock.__version__
    assert version["limits"]["max_seq_len"] == MAX_SEQ_LEN
    reasons = {choice["setting"]: choice["reason"] for choice in version["choices"]}
    assert reasons["max_seq_len"] == "set by max_seq_len"
    assert all(reasons.values())
    assert server.http.get("/health_generate").json() == {"status": "ok"}


def test_metrics_are_iterations_in_json_and_counters_for_prometheus(server):
    complete(server, max_tokens=4)
    steps: list[dict[str, Any]] = []
    until(lambda: steps.extend(server.http.get("/metrics").json()) or steps)
    names = {"iter", "iterLatencyMS", "numActiveRequests", "gpuMemUsage", "kvCacheStats"}
    assert names <= steps[-1].keys()
    assert {
        *("allocNewBlocks", "allocTotalBlocks", "cacheHitRate", "freeNumBlocks", "maxNumBlocks"),
        *("missedBlocks", "reusedBlocks", "tokensPerBlock", "usedNumBlocks"),
    } == steps[-1]["kvCacheStats"].keys()
    assert all(a["iter"] < b["iter"] for a, b in itertools.pairwise(steps))
    for path, accept in (("/metrics", "text/plain"), ("/prometheus/metrics", "*/*")):
        reply = server.http.get(path, headers={"accept": accept})
        assert reply.headers["content-type"].startswith("text/plain")
        for name in ("trtllm_request_success_total", "vllm:num_requests_running"):
            assert re.search(rf"^{name}{{.*}} \d", reply.text, re.MULTILINE)


def test_keys_come_in_the_order_clients_know(server):
    reply = complete(server, max_tokens=2)
    assert list(reply) == [
        "id", "object", "created", "model", "choices", "usage", "prompt_token_ids",
    ]  # fmt: skip
    assert list(reply["choices"][0]) == [
        "index", "text", "token_ids", "logprobs", "context_logits", "finish_reason", "stop_reason",
        "disaggregated_params", "avg_decoded_tokens_per_iter",
    ]  # fmt: skip
    usage = ["prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"]
    assert list(reply["usage"]) == usage
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", reply["id"])
    reply = server.post(CHAT, messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert list(reply) == [
        "id", "object", "created", "model", "choices", "usage", "prompt_token_ids",
    ]  # fmt: skip
    assert list(reply["choices"][0]) == [
        "index", "message", "logprobs", "finish_reason", "stop_reason", "mm_embedding_handle",
        "disaggregated_params", "avg_decoded_tokens_per_iter",
    ]  # fmt: skip
    message = reply["choices"][0]["message"]
    assert list(message) == ["role", "content", "reasoning_content", "tool_calls"]
    assert list(reply["usage"]) == usage
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", reply["id"])


def test_the_pool_is_empty_in_the_end(server):
    assert server.counters()["used_blocks"] == 0
