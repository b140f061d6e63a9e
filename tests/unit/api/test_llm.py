"""`LLM` over a fake engine process: shapes in and out, streaming, errors, shutdown."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_engine
import pytest
import tiny_tokenizers
from msgspec.structs import replace

from penstock import LLM, SamplingParams
from penstock.errors import BackendError, RequestError
from penstock.frontend import engine_handle as engine_module
from penstock.frontend.client import EngineClient
from penstock.types.request import ChatOptions, FinishReason

PARAMS = SamplingParams(max_tokens=5)
FAKE_FOLDER = str(Path(fake_engine.__file__).parent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    return tiny_tokenizers.write_folder(
        folder, tiny_tokenizers.byte_level(), chat_template=tiny_tokenizers.CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def llm(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "ENGINE_MODULE", "fake_engine")
        patch.setenv("PYTHONPATH", FAKE_FOLDER)
        with LLM(model=str(folder)) as llm:
            yield llm


def test_one_prompt_gives_one_output(llm):
    output = llm.generate("abc", PARAMS)
    assert output.prompt == "abc"
    assert output.prompt_token_ids[0] == tiny_tokenizers.byte_level().token_to_id("<s>")
    [sample] = output.outputs
    assert sample.text == "abc"  # echo: <s> a b c <s>, special tokens are not text
    assert sample.finish_reason is FinishReason.LENGTH
    assert output.usage.completion_tokens == 5
    assert output.usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["ab", "cd"], ["ab", "cd"]),
        ([[40, 41], [42]], [None, None]),
        ([{"prompt": "ab"}, {"prompt_token_ids": [40]}], ["ab", None]),
        ([], []),
    ],
)
def test_a_list_gives_a_list_in_order(llm, prompts, expected):
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [output.prompt for output in outputs] == expected
    assert all(len(output.outputs[0].token_ids) == 5 for output in outputs)


@pytest.mark.parametrize("prompt", [[40, 41, 42], {"prompt_token_ids": (40, 41, 42)}])
def test_one_list_of_ids_is_one_prompt(llm, prompt):
    output = llm.generate(prompt, PARAMS)
    assert output.prompt_token_ids == (40, 41, 42)
    assert output.outputs[0].token_ids == (40, 41, 42, 40, 41)


def test_more_prompts_than_the_engine_queues_wait_their_turn(llm):
    outputs = llm.generate(["ab"] * 60, SamplingParams(max_tokens=3, n=2))  # max_queued is 16
    assert len(outputs) == 60
    assert all(len(output.outputs) == 2 for output in outputs)


def test_each_prompt_may_have_its_own_params(llm):
    two = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, logprobs=0)]
    first, second = llm.generate(["ab", "ab"], two)
    assert (first.usage.completion_tokens, second.usage.completion_tokens) == (1, 3)
    assert first.outputs[0].cumulative_logprob is None
    assert second.outputs[0].cumulative_logprob == pytest.approx(-1.5)
    with pytest.raises(RequestError, match="2 prompts but 1 sampling_params"):
        llm.generate(["ab", "ab"], [PARAMS])


def test_chat_renders_the_template_without_a_second_bos(llm):
    message = {"role": "user", "content": "hi"}
    output = llm.chat([message], PARAMS)
    assert output.prompt == "<s>[user]hi[assistant]"
    bos = tiny_tokenizers.byte_level().token_to_id("<s>")
    assert output.prompt_token_ids.count(bos) == 1
    assert len(llm.chat([[message], [message]], PARAMS)) == 2


def test_each_conversation_may_have_its_own_options(llm):
    message = {"role": "user", "content": "hi"}
    options = [ChatOptions(), ChatOptions(add_generation_prompt=False)]
    outputs = llm.chat([[message], [message]], PARAMS, options)
    assert [output.prompt for output in outputs] == ["<s>[user]hi[assistant]", "<s>[user]hi"]
    with pytest.raises(RequestError, match="1 prompts but 2 chat_options"):
        llm.chat([message], PARAMS, options)


def test_wrong_prompts_are_request_errors(llm):
    with pytest.raises(RequestError, match="max_seq_len"):
        llm.generate(["ok", "ab" * 5000], PARAMS)
    with pytest.raises(RequestError, match="one of 'prompt' and 'prompt_token_ids'"):
        llm.generate({"text": "x"}, PARAMS)
    assert llm.generate("still here", PARAMS).usage.completion_tokens == 5


def test_generate_async_gives_a_result_to_threads_and_loops(llm):
    pending = llm.generate_async("ab", PARAMS)
    assert pending.result(timeout=240) is pending.result()
    assert len(pending.result().outputs[0].token_ids) == 5

    async def scenario():
        streamed = llm.generate_async("ab", PARAMS)
        texts = [delta.text async for delta in streamed]
        output = await streamed
        assert len(texts) == 5
        assert "".join(texts) == output.outputs[0].text

    asyncio.run(scenario())


def test_generate_async_may_be_read_from_two_threads(llm):
    pending = llm.generate_async("ab", PARAMS)
    found = []
    readers = [threading.Thread(target=lambda: found.append(pending.result(240))) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [pending.result()] * 4


def test_abort_finishes_a_pending_output_as_cancelled(llm):
    pending = llm.generate_async([40, 41], SamplingParams(max_tokens=4000))
    pending.abort()
    assert pending.result(240).outputs[0].finish_reason is FinishReason.ABORT


def test_a_dying_engine_is_an_error_not_a_hang(folder, monkeypatch):
    monkeypatch.setattr(engine_module, "ENGINE_MODULE", "fake_engine")
    monkeypatch.setenv("PYTHONPATH", FAKE_FOLDER)
    with LLM(model=str(folder)) as llm:
        with pytest.raises(BackendError, match="ended with code 7"):
            llm.generate([[40], [13]], SamplingParams(max_tokens=4000))
        llm.shutdown()


def test_a_script_that_forgets_shutdown_ends_cleanly(folder):
    code = (
        "from penstock import LLM, SamplingParams\n"
        "from penstock.frontend import engine_handle\n"
        "engine_handle.ENGINE_MODULE = 'fake_engine'\n"
        f"llm = LLM(model={str(folder)!r})\n"
        "print(llm.generate('ab', SamplingParams(max_tokens=2)).usage.prompt_tokens)\n"
        "import sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": FAKE_FOLDER},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr
    assert "Traceback" not in done.stderr


def test_without_sampling_params_the_models_defaults_are_used(llm, monkeypatch):
    own = {"max_tokens": 3, "temperature": 0.25}
    info = replace(llm._pipeline.client.info, default_sampling=own)
    monkeypatch.setattr(EngineClient, "info", info)
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.25)
    assert llm.generate("abc").usage.completion_tokens == 3
    assert llm.generate_async("abc").result(240).usage.completion_tokens == 3
    # those given are taken as they are
    assert llm.generate("abc", SamplingParams(max_tokens=4)).usage.completion_tokens == 4
