"""A server whose model brings sampling parameters: requests that set none get them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server

from penstock import LLM, SamplingParams
from penstock.hub.folder import local_folder

PATH = "/v1/completions"
RANDOM = {"temperature": 5.0, "top_k": 50, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with a generation_config.json that makes it talk wildly."""
    folder = tmp_path_factory.mktemp("models") / "wild"
    shutil.copytree(local_folder("tiny"), folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | RANDOM))
    return folder


@pytest.fixture(scope="module")
def wild(folder: Path) -> Iterator[Server]:
    with Server(folder) as server:
        yield server


def texts(server: Server, **body: object) -> set[str]:
    asked = {"prompt": "The capital of France", "ignore_eos": True, **body}
    return {server.post(PATH, **asked, seed=seed)["choices"][0]["text"] for seed in range(4)}


def test_what_a_request_leaves_out_is_drawn_as_the_model_says(wild):
    assert len(texts(wild)) == 4
    assert len(texts(wild, temperature=0)) == 1
    reply = wild.post(PATH, prompt="Hello", ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 6
    reply = wild.post(PATH, prompt="Hello", ignore_eos=True, max_tokens=9)
    assert reply["usage"]["completion_tokens"] == 9


def test_the_defaults_are_shown_with_their_source(wild):
    shown = wild.version()
    assert shown["default_sampling"] == {"temperature": 5.0, "top_k": 50, "max_tokens": 6}
    [choice] = [one for one in shown["choices"] if one["setting"] == "generation_config"]
    assert choice["value"] == "temperature 5, top_k 50, max_tokens 6"
    assert choice["reason"] == "generation_config.json of the model"
    assert choice["value"] in wild.log.read_text()


def test_a_flag_leaves_the_models_file_alone_and_overrides_win(folder):
    flags = ("--generation_config", "vllm", "--set", "override_generation_config.temperature=0")
    with Server(folder, *flags) as server:
        assert server.version()["default_sampling"] == {"temperature": 0.0}
        assert len(texts(server, max_tokens=8)) == 1


def test_the_built_in_model_is_greedy_from_python_too():
    with LLM("tiny", num_threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
        outputs = llm.generate(["The capital of France"] * 3)
        assert {output.outputs[0].text for output in outputs} == {" is Paris."}
