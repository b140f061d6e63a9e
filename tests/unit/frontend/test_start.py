"""The engine as a real child process: started, reported dead, stopped, nothing left behind."""

import asyncio
import os
from pathlib import Path

import pytest
import tiny_tokenizers

from penstock.config.schema import EngineConfig
from penstock.errors import BackendError, ConfigError
from penstock.frontend import engine_handle as engine_module
from penstock.frontend.start import (
    load_text_side,
    start_pipeline,
    stop_pipeline,
)
from penstock.frontend.tokenizer_folder import tokenizer_folder
from penstock.text.chat import ChatTemplate
from penstock.types.request import FinishReason, GenerateInput
from penstock.types.sampling import SamplingParams


@pytest.fixture(autouse=True)
def fake_process(monkeypatch):
    monkeypatch.setattr(engine_module, "ENGINE_MODULE", "fake_engine")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tiny_tokenizers.write_folder(tmp_path, tiny_tokenizers.byte_level())


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_prompt_goes_through_a_process_and_back(folder, run):
    async def scenario():
        config = EngineConfig(model=str(folder), stream_interval=3, chat_template="simple")
        pipeline, handle = await start_pipeline(config)
        try:
            assert pipeline.client.info.config["model"] == str(folder)
            messages = ({"role": "user", "content": "hi"},)
            ask = GenerateInput(messages=messages, sampling=SamplingParams(max_tokens=7))
            deltas = [delta async for delta in await pipeline.generate(ask)]
            assert [len(delta.token_ids) for delta in deltas] == [1, 2, 3, 1]
            assert handle.is_alive
        finally:
            await stop_pipeline(pipeline, handle)
        assert not is_running(handle.pid)
        assert not Path(handle.socket_folder).exists()

    run(scenario())


def test_a_process_that_dies_in_the_middle_ends_its_requests(folder, run):
    async def scenario():
        pipeline, handle = await start_pipeline(EngineConfig(model=str(folder)))
        try:
            deadly = GenerateInput(token_ids=(13,))
            [end] = [delta async for delta in await pipeline.generate(deadly)]
            assert end.finish is FinishReason.ERROR
            assert "ended with code 7" in end.error
            assert not pipeline.client.is_healthy()
        finally:
            await stop_pipeline(pipeline, handle)

    run(scenario())


def test_an_engine_that_cannot_be_built_says_why(folder, run):
    with pytest.raises(BackendError, match="not enough memory for this model"):
        run(start_pipeline(EngineConfig(model=str(folder), load_format="dummy")))


def test_a_wrong_tokenizer_stops_the_engine_again(folder, run, monkeypatch):
    started = []
    start = engine_module.EngineHandle.start

    def remember(handle, *args):
        start(handle, *args)
        started.append(handle)

    monkeypatch.setattr(engine_module.EngineHandle, "start", remember)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer.json"):
        run(start_pipeline(EngineConfig(model=str(folder))))
    assert not is_running(started[0].pid)


def test_cancelling_the_start_leaves_no_process(folder, monkeypatch):
    started = []
    start = engine_module.EngineHandle.start

    def remember(handle, *args):
        start(handle, *args)
        started.append(handle)

    monkeypatch.setattr(engine_module.EngineHandle, "start", remember)

    async def scenario():
        starting = asyncio.create_task(start_pipeline(EngineConfig(model=str(folder))))
        while not started:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(scenario())
    assert not is_running(started[0].pid)


def test_skip_tokenizer_init_needs_no_tokenizer_files(tmp_path, run):
    async def scenario():
        config = EngineConfig(model=str(tmp_path), skip_tokenizer_init=True)
        pipeline, handle = await start_pipeline(config)
        await stop_pipeline(pipeline, handle)
        assert pipeline.tokenizer is None

    run(scenario())


def test_random_weights_need_no_tokenizer_but_use_the_one_there_is(folder, caplog):
    config = EngineConfig(model=str(folder), load_format="dummy")
    assert tokenizer_folder(config) == folder
    (folder / "tokenizer.json").unlink()
    assert tokenizer_folder(config) is None
    assert "has no tokenizer: prompts must be token ids" in caplog.text
    assert tokenizer_folder(EngineConfig(model=str(folder))) == folder  # refused when it is read


def test_a_given_template_beats_the_folders_own(tmp_path):
    folder = tiny_tokenizers.write_folder(
        tmp_path, tiny_tokenizers.byte_level(), chat_template="own"
    )
    messages = [{"role": "user", "content": "x"}]
    options = GenerateInput(text="").chat
    for given, expected in ((None, "own"), ("{{ 1 + 1 }}", "2")):
        config = EngineConfig(model=str(folder), chat_template=given)
        _, template, _ = load_text_side(folder, config)
        rendered = ChatTemplate(template.templates, template.special_tokens)
        assert rendered.render(messages, options, 100) == expected


def test_a_reranker_whose_verdicts_are_no_single_tokens_is_refused_at_start(folder):
    with pytest.raises(ConfigError, match=r"'yes' is 3 tokens of this model.*embed"):
        load_text_side(folder, EngineConfig(model=str(folder), task="score"))
    load_text_side(folder, EngineConfig(model=str(folder), task="embed"))
