"""What a setting does to a running server, and how a server that cannot start says so."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file, save_file
from server_process import Server
from waiting import until

from penstock.hub.folder import local_folder

COMPLETIONS = "/v1/completions"
KEY = "a-secret-key"
TIGHT_POOL = 256


@pytest.fixture(scope="module")
def tight() -> Iterator[Server]:
    """A small cache without reuse, nothing evicted, five tokens in a chunk."""
    with Server(
        "tiny",
        max_seq_len=4096,
        stream_interval=5,
        scheduler_config={"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        kv_cache_config={
            "max_tokens": TIGHT_POOL,
            "tokens_per_block": 16,
            "enable_block_reuse": False,
        },
    ) as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with Server("tiny", "--api_key", KEY, max_queued_requests=2) as server:
        yield server


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Random weights from a folder that holds only config.json, and no tokenizer."""
    folder = tmp_path_factory.mktemp("only_config")
    shutil.copy(local_folder("tiny") / "config.json", folder)
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_stats_len": 3}
    with Server(folder, **settings) as server:
        yield server


def failed_start(*arguments: str | Path, **environment: str) -> str:
    """What `penstock serve` prints before it gives up."""
    command = [sys.executable, "-m", "penstock", "serve", *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=240, check=False
    )
    assert done.returncode not in (0, None), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


# A tight server


@pytest.mark.parametrize(("num_tokens", "sizes"), [(1, [1]), (5, [1, 4]), (12, [1, 4, 5, 2])])
def test_a_chunk_comes_every_stream_interval_tokens(tight, num_tokens, sizes):
    body = {"prompt": "The river", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    reply = tight.http.post(COMPLETIONS, json={**body, "detokenize": False})
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    counts = [len(json.loads(event)["choices"][0]["token_ids"]) for event in events[:-1]]
    assert [count for count in counts if count] == sizes


def test_a_longer_context_than_the_cache_holds_is_lowered_aloud(tight):
    version = tight.version()
    assert version["limits"]["max_seq_len"] == version["config"]["max_seq_len"] == TIGHT_POOL
    reasons = {choice["setting"]: choice["reason"] for choice in version["choices"]}
    assert reasons["max_seq_len"].startswith("lowered from 4096 to what the cache holds")
    assert reasons["max_seq_len"] in tight.log.read_text()
    reply = tight.post(COMPLETIONS, prompt="The river", ignore_eos=True)
    assert reply["usage"]["total_tokens"] == TIGHT_POOL
    too_long = tight.http.post(COMPLETIONS, json={"prompt": [5] * TIGHT_POOL})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


def test_nothing_is_reused_without_block_reuse(tight):
    for _ in range(2):
        usage = tight.post(COMPLETIONS, prompt=[5] * 100, max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert tight.counters()["prefix_hit_tokens"] == 0


def test_guaranteed_requests_wait_for_room_and_are_never_recomputed(tight):
    before = tight.counters()

    asked = {"prompt": [[5] * 40] * 6, "max_tokens": 80, "ignore_eos": True, "detokenize": False}
    choices = tight.post(COMPLETIONS, **asked)["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [80] * 6
    after = tight.counters()
    assert after["preemptions"] == 0
    assert after["prompt_tokens"] - before["prompt_tokens"] == 6 * 40
    # 120 tokens each, and room for two at a time: three rounds
    assert 3 * 80 <= after["steps"] - before["steps"] < 6 * 80
    assert after["used_blocks"] == 0


# A guarded server


def test_every_route_but_health_asks_for_the_key(guarded):
    routes = Path(__file__).parents[1] / "architecture" / "snapshots" / "http_api.txt"
    asked = [
        line.split() for line in routes.read_text().splitlines() if line[:4] in ("GET ", "POST")
    ]
    assert ["GET", "/version"] in asked
    for method, path in asked:
        for headers in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": KEY}):
            reply = guarded.http.request(method, path, headers=headers)
            assert reply.status_code == (200 if path == "/health" else 401), (path, headers)
            assert path == "/health" or reply.headers["www-authenticate"] == "Bearer"
    headers = {"Authorization": f"Bearer {KEY}"}
    assert guarded.http.get("/version", headers=headers).status_code == 200
    assert KEY not in guarded.http.get("/version", headers=headers).text
    assert KEY not in guarded.log.read_text()


def test_the_openai_client_passes_with_the_key_and_only_then(guarded):
    for key, passes in ((KEY, True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            if passes:
                assert client.completions.create(model="m", prompt="Hi", max_tokens=1).choices
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.completions.create(model="m", prompt="Hi", max_tokens=1)


def test_one_request_more_than_may_wait_is_told_to_come_back(guarded):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:

        def stream() -> openai.Stream[Any]:
            return client.completions.create(
                model="m", prompt="The river", max_tokens=7000, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

        def is_admitted() -> bool:
            try:
                return bool(client.completions.create(model="m", prompt="Hi", max_tokens=1, n=2))
            except openai.RateLimitError:
                return False

        until(is_admitted)  # also when a try before this one has left requests
        with stream() as first, stream() as second:
            next(first), next(second)
            with pytest.raises(openai.RateLimitError) as refused:
                client.completions.create(model="m", prompt="Hi", max_tokens=1)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert "max_queued_requests" in refused.value.message
            with pytest.raises(openai.BadRequestError, match="at most 2"):
                client.completions.create(model="m", prompt="Hi", max_tokens=1, n=3)
        until(is_admitted, what=lambda: "the requests that were left still count")


# A server without tokenizer and weights


def test_ids_go_in_and_come_out_without_a_tokenizer(blind):
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    [choice] = blind.post(COMPLETIONS, **body)["choices"]
    assert len(choice["token_ids"]) == 4 and choice["text"] == ""
    assert blind.post(COMPLETIONS, **body)["choices"][0]["token_ids"] == choice["token_ids"]
    reply = blind.http.post(COMPLETIONS, json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    parts = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert [one for part in parts for one in part["token_ids"]] == choice["token_ids"]
    chat = {"messages": [{"role": "user", "content": "-"}], "prompt_token_ids": body.pop("prompt")}
    [answer] = blind.post("/v1/chat/completions", **chat, **body)["choices"]
    assert answer["token_ids"] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Hi"}),
        (COMPLETIONS, {"prompt": [5], "stop": "x"}),
        (COMPLETIONS, {"prompt": [5], "echo": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
    ids=str,
)
def test_text_is_refused_without_a_tokenizer(blind, path, body):
    reply = blind.http.post(path, json=body)
    assert reply.status_code == 400
    assert "tokenizer" in reply.json()["error"]["message"]


def test_no_more_steps_are_kept_than_max_stats_len(blind):
    for _ in range(2):
        steps = blind.counters()["steps"]
        blind.post(COMPLETIONS, prompt=[5], max_tokens=20, ignore_eos=True)
        assert blind.counters()["steps"] == steps + 20
    kept = [step["iter"] for step in blind.http.get("/metrics").json()]
    assert kept == [steps + 17, steps + 18, steps + 19]
    assert blind.http.get("/metrics").json() == []


# Servers that do not start


def test_weights_of_another_model_are_named(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(local_folder("tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.bonus_proj.weight"] = tensors.pop(
        "model.layers.0.mlp.down_proj.weight"
    )
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = failed_start(folder, "--port", "0")
    missing, unexpected = said.split("missing: ")[1].split("unexpected: ")
    assert "model.layers.0.mlp.down_proj.weight" in missing
    assert "model.layers.1.self_attn.k_proj.weight" in missing
    assert "model.layers.0.mlp.bonus_proj.weight" in unexpected


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = failed_start("tiny", "--host", "127.0.0.1", "--port", str(port))
    assert f"port {port}: Address already in use" in said


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("/no/such/folder", "no such folder"),
        ("nobody/nothing", "not in the hub cache"),
        (Path(__file__).parent, "no config.json"),
    ],
    ids=str,
)
def test_a_model_that_is_not_there_is_named(model, reason, tmp_path):
    said = failed_start(model, "--port", "0", HF_HOME=str(tmp_path))
    assert str(model) in said and reason in said
