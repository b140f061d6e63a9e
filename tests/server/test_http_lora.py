"""Adapters over HTTP: a server of two ranks and two API servers, asked by the `openai` package. The
truth is transformers with the adapter merged by hand."""

import shutil
import threading

import httpx
import msgspec
import openai
import pytest
import torch
from http_fakes import INFO, FakePipeline, running_server
from lora_models import make_adapter, merge
from server_process import Server
from tiny_models import make_checkpoint, reference_model

from penstock.errors import CapacityError
from penstock.types.pooling import Task

PROMPT = [(7 * i) % 50 + 3 for i in range(20)]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    folder = make_checkpoint(root / "model", "qwen3")
    reference = reference_model(folder)
    paths = {name: make_adapter(root / name, reference, seed=i) for i, name in enumerate("abcd")}
    truth = {"model": greedy(reference)}
    for name, path in paths.items():
        merge(reference, path)
        truth[name] = greedy(reference)
        merge(reference, path, -1.0)
    assert len({tuple(tokens) for tokens in truth.values()}) == 5
    return folder, paths, truth


@torch.no_grad()
def greedy(model):
    ids = list(PROMPT)
    for _ in range(NUM_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def server(made):
    folder, paths, _ = made
    flags = ["--lora-modules", f"a={paths['a']}", f"b={paths['b']}", "--max-loras", "2"]
    with Server(
        folder,
        *flags,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=2,
        num_postprocess_workers=2,
        num_threads=1,
        lora_config={"allow_runtime_updating": True, "max_lora_rank": 8, "max_runtime_loras": 2},
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def tokens(client, model, **further):
    reply = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"detokenize": False, "ignore_eos": True, **further},
    )
    expected = further.get("lora_request", {}).get("lora_name", model)
    assert reply.model == expected
    return reply.choices[0].token_ids


def test_a_server_that_may_not_load_says_how_it_may():
    with running_server(FakePipeline()) as running:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            reply = httpx.post(running.url + path, json={"lora_name": "a", "lora_path": "/a"})
            assert reply.status_code == 403, reply.text
            assert "lora_config.allow_runtime_updating: true" in reply.json()["message"]


def test_embeddings_choose_by_the_model_name_too():
    """As far as the engine, which a stand-in is here."""
    pipeline, asked = FakePipeline(), []
    pipeline.client.info = msgspec.structs.replace(INFO, task=Task.EMBED)

    async def generate(ask, *args):
        asked.append(ask.adapter and ask.adapter.name)
        raise CapacityError("enough seen")

    pipeline.generate = generate
    with running_server(pipeline, lora_config={"lora_modules": ["a=/a"]}) as running:
        status = {
            model: httpx.post(
                f"{running.url}/v1/embeddings", json={"model": model, "input": "x"}
            ).status_code
            for model in ("org/model", "a", "b")
        }
    assert status == {"org/model": 429, "a": 429, "b": 404} and asked == [None, "a"]


def test_models_are_the_base_and_its_adapters(client):
    cards = {card.id: card for card in client.models.list().data}
    assert list(cards) == ["model", "a", "b"]
    assert cards["a"].parent == "model" and not hasattr(cards["model"], "parent")
    assert client.models.retrieve("b").id == "b"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("x")


def test_the_model_name_chooses_the_adapter(client, made):
    for name in ("model", "a", "b", "a"):
        assert tokens(client, name) == made[2][name]


def test_the_chat_endpoints_choose_by_it_too(server, client, made):
    said = {}
    for name in ("model", "a"):
        messages = [{"role": "user", "content": "What is 12 + 30?"}]
        reply = client.chat.completions.create(
            model=name, messages=messages, temperature=0, max_tokens=8
        )
        assert reply.model == name
        said[name] = reply.choices[0].message.content
        answer = client.responses.create(
            model=name, input="What is 12 + 30?", temperature=0, max_output_tokens=8
        )
        assert answer.model == name and answer.output_text == said[name]
        message = server.post(
            "/v1/messages", model=name, messages=messages, max_tokens=8, temperature=0
        )
        assert message["model"] == name and message["content"][0]["text"] == said[name]
    assert said["a"] != said["model"]


def test_lora_request_chooses_it(client, made):
    asked = {"lora_name": "b", "lora_int_id": 7}
    assert tokens(client, "model", lora_request=asked) == made[2]["b"]
    asked = {"lora_name": "other", "lora_int_id": 1, "lora_path": str(made[1]["d"])}
    assert tokens(client, "model", lora_request=asked) == made[2]["d"]  # not listed, only used
    with pytest.raises(openai.BadRequestError, match="'x' is no adapter of this server"):
        tokens(client, "model", lora_request={"lora_name": "x"})
    with pytest.raises(openai.BadRequestError, match=r"'a' is no adapter .* with that lora_path"):
        tokens(client, "model", lora_request={"lora_name": "a", "lora_path": str(made[1]["c"])})
    with pytest.raises(openai.BadRequestError, match=r"has no adapter_config\.json"):
        tokens(client, "model", lora_request={"lora_name": "x", "lora_path": "/proc"})


def test_an_unknown_model_is_not_answered_by_the_base(client):
    with pytest.raises(openai.NotFoundError, match="there is no model 'modle'; did you mean"):
        tokens(client, "modle")


def load(server, name, path, **further):
    body = {"lora_name": name, "lora_path": str(path), **further}
    return server.http.post("/v1/load_lora_adapter", json=body)


def unload(server, name):
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_adapters_come_and_go_under_traffic(server, client, made, tmp_path):
    """Every API server knows of them at once; requests that run with one that goes end well."""
    _, paths, truth = made
    wrong, stop = [], threading.Event()

    def ask(name):
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        while not stop.is_set():
            if (found := tokens(own, name)) != truth[name]:
                wrong.append((name, found))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("model", "a", "b")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            reply = load(server, "late", paths["c"])
            assert reply.status_code == 200 and "'late' added" in reply.text, reply.text
            for _ in range(4):  # each on a new connection, to either API server
                assert tokens_at(server, "late") == truth["c"]
            changed = tmp_path / "changed"
            shutil.copytree(paths["d"], changed, dirs_exist_ok=True)
            assert load(server, "late", changed).status_code == 400
            assert load(server, "late", changed, load_inplace=True).status_code == 200
            assert tokens_at(server, "late") == truth["d"]
            assert unload(server, "late").status_code == 200
            assert unload(server, "late").status_code == 404
            for _ in range(4):
                reply = server.http.post("/v1/completions", json={"model": "late", "prompt": "x"})
                assert reply.status_code == 404
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


def tokens_at(server, model):
    reply = server.post(
        "/v1/completions", model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0,
        detokenize=False, ignore_eos=True,
    )  # fmt: skip
    return reply["choices"][0]["token_ids"]


def test_what_cannot_be_loaded_is_refused_in_words(server, made, tmp_path):
    _, paths, _ = made
    for name, path, said in (
        ("x", tmp_path, "has no adapter_config.json"),
        ("a", paths["c"], "'a' is a name of the server's own settings"),
        ("model", paths["c"], "'model' is a name of the server's own settings"),
        (" x", paths["c"], "cannot be called ' x'"),
    ):
        reply = load(server, name, path)
        assert reply.status_code == 400 and said in reply.json()["message"], reply.text
    other = reference_model(make_checkpoint(tmp_path / "other", "qwen3", hidden_size=32))
    foreign = make_adapter(tmp_path / "foreign", other)
    reply = load(server, "x", foreign)
    assert reply.status_code == 400 and "made for another model" in reply.text
    assert unload(server, "a").status_code == 400
    assert load(server, "one", paths["c"]).status_code == 200
    assert load(server, "two", paths["c"]).status_code == 200
    reply = load(server, "three", paths["c"])
    assert reply.status_code == 400 and "2 adapters are loaded" in reply.text
    assert unload(server, "one").status_code == unload(server, "two").status_code == 200
