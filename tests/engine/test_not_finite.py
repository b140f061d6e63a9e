"""Logits that are not finite end their request with words, and no other request."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from local_engine import LocalEngine
from safetensors.torch import load_file, save_file
from server_process import Server

from penstock.hub.folder import local_folder
from penstock.types.outputs import FinishReason

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
POISON = 300  # a token whose embedding is NaN
GOOD = [10, 20, 30, 40]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 1},
    "nucleus": {"temperature": 1.0, "top_p": 0.9, "seed": 1},
    "top_k": {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "seed": 1},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 2},
    "drawn logprobs": {"temperature": 1.0, "logprobs": 1, "seed": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, but for one row of its embedding, which its head does not share."""
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(local_folder("tiny"), folder)
    weights = load_file(folder / "model.safetensors")
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[EMBEDDING][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module")
def engine(poisoned: Path) -> LocalEngine:
    return LocalEngine(str(poisoned), max_num_tokens=64, device="cpu")


@pytest.mark.parametrize("way", WAYS)
def test_one_request_fails_and_its_neighbors_go_on(engine: LocalEngine, way: str) -> None:
    [alone] = engine.generate([GOOD], max_tokens=5, **WAYS[way])
    prompts = [GOOD, [*GOOD, POISON], GOOD]
    first, poisoned, last = (engine.submit(p, 5, **WAYS[way]) for p in prompts)
    engine.run()
    assert engine.tokens(first) == engine.tokens(last) == alone
    [delta] = engine.deltas[poisoned]
    assert delta.finish is FinishReason.ERROR and not delta.token_ids
    assert "logits are not finite" in (delta.error or "")
    assert engine.engine.scheduler.num_open == 0


def test_a_long_prompt_that_asked_for_its_own_logprobs_fails_at_the_first_bad_chunk(
    engine: LocalEngine,
) -> None:
    prompt = [10 + i % 200 for i in range(100)] + [POISON] + [10 + i % 200 for i in range(100)]
    rid = engine.submit(prompt, 5, prompt_logprobs=0)
    engine.run()
    *good, last = engine.deltas[rid]
    assert good and not any(delta.finish for delta in good)
    assert last.finish is FinishReason.ERROR
    told = [entry.logprob for delta in good for entry in delta.prompt_logprobs]
    assert told and not any(math.isnan(logprob) for logprob in told)


@pytest.fixture(scope="module")
def all_nan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("nan") / "model"
    shutil.copytree(local_folder("tiny"), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors")
    with Server(folder, max_batch_size=4) as server:
        yield server


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_server_with_nan_weights_does_not_answer_200(all_nan: Server, path: str) -> None:
    server = all_nan
    ask = {"prompt": "a"} if path == "/v1/completions" else {"messages": [_hello()]}
    reply = server.http.post(path, json={**ask, "max_tokens": 4})
    assert reply.status_code == 503, reply.text
    assert "logits are not finite" in reply.json()["error"]["message"]
    streamed = server.http.post(path, json={**ask, "max_tokens": 4, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert any("error" in json.loads(event) for event in events if event != "[DONE]")
    assert server.counters()["running"] == 0


def _hello() -> dict[str, str]:
    return {"role": "user", "content": "hello"}
