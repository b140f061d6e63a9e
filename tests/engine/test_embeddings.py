"""Embeddings and scores of a tiny model through a real server, against transformers."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers
from lora_models import make_adapter, merge
from safetensors.torch import load_file, save_file
from server_process import Server
from tiny_models import make_checkpoint, reference_model

from penstock import LLM
from penstock.errors import RequestError

TEXTS = ["The river runs.", "A small engine", "Water runs down the hill. " * 6]
NUM_DIMENSIONS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """As Qwen3-Embedding is published: names without their first word, no head, a pooling file."""
    folder = make_checkpoint(tmp_path_factory.mktemp("embedding"), "qwen3")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file({name.removeprefix("model."): one for name, one in weights.items()}, file)
    kinds = ["models.Transformer", "models.Pooling", "models.Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": NUM_DIMENSIONS, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("lora") / "a", reference_model(folder))


@pytest.fixture(scope="module")
def server(folder, adapter) -> Iterator[Server]:
    # The longest text takes several chunks; a block of 8 tokens is what prefixes are found by.
    cache = {"tokens_per_block": 8}
    flags = ("--lora-modules", f"a={adapter}", "--served_model_name", "any")
    with Server(folder, *flags, max_num_tokens=16, kv_cache_config=cache) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def states(folder) -> list[np.ndarray]:
    """Of the last token of each text, as transformers has it."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1].numpy()
            for text in TEXTS
        ]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_embeddings_are_the_last_hidden_states_of_transformers(client, states, server):
    reply = client.embeddings.create(model="any", input=TEXTS)
    for one, state in zip(reply.data, states, strict=True):
        np.testing.assert_allclose(one.embedding, unit(state), atol=1e-5)
    tokens = server.post("/tokenize", prompt=TEXTS[2])["count"]
    assert tokens > 16  # it took several chunks
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > tokens
    again = server.post("/v1/embeddings", input=TEXTS[2])
    np.testing.assert_allclose(again["data"][0]["embedding"], unit(states[2]), atol=1e-5)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens - 8


def test_the_command_that_the_server_shows_works(server):
    found = re.search(r"curl \S+(/v1/\S+) .*?-d '(.*?)'\n", server.log.read_text(), re.DOTALL)
    assert found is not None
    reply = server.post(found[1], **json.loads(found[2]))
    assert len(reply["data"][0]["embedding"]) == NUM_DIMENSIONS


def test_an_adapter_embeds_under_its_name(client, folder, adapter, states):
    model, tokenizer = reference_model(folder), transformers.AutoTokenizer.from_pretrained(folder)
    merge(model, adapter)
    ids = tokenizer(TEXTS[0], return_tensors="pt").input_ids
    with torch.no_grad():
        state = model.model(ids).last_hidden_state[0, -1].numpy()
    reply = client.embeddings.create(model="a", input=TEXTS[0])
    np.testing.assert_allclose(reply.data[0].embedding, unit(state), atol=1e-5)
    assert reply.model == "a" and np.abs(unit(state) - unit(states[0])).max() > 0.01
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="b", input=TEXTS[0])


def test_ids_dimensions_base64_and_lengths(client, states, server):
    ids = server.post("/tokenize", prompt=TEXTS[0])["tokens"]
    [one] = client.embeddings.create(model="any", input=ids, dimensions=8).data
    np.testing.assert_allclose(one.embedding, unit(states[0][:8]), atol=1e-5)
    [raw] = server.post("/v1/embeddings", input=[ids], encoding_format="base64", normalize=False)[
        "data"
    ]
    found = np.frombuffer(base64.b64decode(raw["embedding"]), "<f4")
    np.testing.assert_allclose(found, states[0], rtol=1e-4, atol=1e-4)


def test_scores_of_an_embedding_model_are_cosines(server, states):
    first, *others = map(unit, states)
    expected = [float(first @ other) for other in others]
    reply = server.post("/score", text_1=TEXTS[0], text_2=TEXTS[1:])
    assert [one["score"] for one in reply["data"]] == pytest.approx(expected, abs=1e-5)
    ranked = server.post("/v1/rerank", query=TEXTS[0], documents=TEXTS[1:], top_n=1)
    best = int(np.argmax(expected))
    [result] = ranked["results"]
    assert (result["index"], result["document"]["text"]) == (best, TEXTS[1 + best])
    assert result["relevance_score"] == pytest.approx(expected[best], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/embeddings", {"input": "A", "dimensions": 65}, "1 to 64"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "A", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/completions", {"prompt": "A"}, "served to embed"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}]}, "embed"),
        ("/v1/score", {"text_1": ["A", "B"], "text_2": ["A"]}, "text_1"),
    ],
)
def test_what_cannot_be_is_refused(server, path, body, what):
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400 and what in reply.json()["error"]["message"]
    assert server.http.get("/health_generate").status_code == 200


def test_scores_of_a_reranker_are_how_likely_yes_is(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3", vocab_size=545, max_position_embeddings=512)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    prompts = [
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: Find rivers\n<Query>: {TEXTS[0]}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        for document in TEXTS[1:]
    ]
    model = reference_model(folder)
    with torch.no_grad():
        expected = []
        for prompt in prompts:
            ids = tokenizer.encode(prompt, add_special_tokens=False).ids
            logits = model(torch.tensor([ids])).logits[0, -1]
            pair = logits[[tokenizer.token_to_id("no"), tokenizer.token_to_id("yes")]]
            expected.append(pair.softmax(0)[1].item())
    with Server(folder, "--task", "score") as server:
        body = {"text_1": TEXTS[0], "text_2": TEXTS[1:], "instruction": "Find rivers"}
        scores = [one["score"] for one in server.post("/v1/score", **body)["data"]]
        assert scores == pytest.approx(expected, abs=1e-5)
        refused = server.http.post("/v1/embeddings", json={"input": "A"})
        assert refused.status_code == 400 and "--task embed" in refused.text


def test_the_python_api_embeds_any_decoder():
    with LLM("tiny", task="embed", num_threads=1, max_seq_len=64) as llm:
        one = llm.embed("The river", dimensions=4)
        assert one.embedding.shape == (4,) and one.usage.completion_tokens == 0
        many = llm.encode(["The river", list(one.prompt_token_ids)], dimensions=4)
        for other in many:
            np.testing.assert_allclose(other.embedding, one.embedding, atol=1e-5)
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0)
        with pytest.raises(RequestError, match="embed"):
            llm.generate("The river")
