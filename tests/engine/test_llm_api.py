"""`LLM` with a real engine: what a script gets, and the same tokens as over HTTP."""

import asyncio
import math
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from server_process import Server

from penstock import LLM, RequestOutput, SamplingParams
from penstock.errors import ConfigError, RequestError
from penstock.types.request import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The river", "Of course", "A small engine"]
MAX_SEQ_LEN = 256


def engines() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", max_seq_len=MAX_SEQ_LEN, num_threads=1) as llm:
        yield llm


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_one_prompt_gives_one_output(llm):
    output = llm.generate("The capital of France", SamplingParams(temperature=0))
    assert (output.prompt, len(output.prompt_token_ids)) == ("The capital of France", 4)
    [sample] = output.outputs
    assert sample.text == " is Paris."
    assert (len(sample.token_ids), sample.finish_reason) == (3, FinishReason.STOP)
    assert output.usage.total_tokens == 4 + 3 + 1  # the token that ends it counts


def test_a_list_of_prompts_gives_a_list_in_its_order(llm):
    alone = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
    together = llm.generate(PROMPTS * 20, GREEDY)
    assert ids_of(together) == ids_of(alone) * 20
    assert llm.generate([]) == []


def test_ids_and_mappings_are_prompts_too(llm):
    expected = llm.generate("The river", GREEDY)
    ids = expected.prompt_token_ids
    for prompt in (list(ids), {"prompt": "The river"}, {"prompt_token_ids": ids}):
        assert llm.generate(prompt, GREEDY).outputs == expected.outputs
    assert ids_of(llm.generate([list(ids), "The river"], GREEDY)) == ids_of([expected] * 2)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=1, seed=1, n=2, max_tokens=5, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, stop="-o", prompt_logprobs=0),
    ]
    plain, sampled, stopped = llm.generate(PROMPTS, params)
    assert len(plain.outputs[0].token_ids) == 3
    assert [sample.index for sample in sampled.outputs] == [0, 1]
    for sample in sampled.outputs:
        total = math.fsum(entry.logprob for entry in sample.logprobs)
        assert len(sample.logprobs) == 5 and sample.cumulative_logprob == total
    assert stopped.outputs[0].stop_reason == "-o"
    assert stopped.prompt_logprobs[0] is None
    assert len(stopped.prompt_logprobs) == len(stopped.prompt_token_ids)
    with pytest.raises(RequestError, match="3 prompts but 2 sampling_params"):
        llm.generate(PROMPTS, params[:2])


def test_a_conversation_gives_one_output_and_a_list_of_them_a_list(llm):
    talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = [llm.chat(talk, GREEDY) for talk in talks]
    assert alone[0].prompt == "<|im_start|>user\nThe river<|im_end|>\n<|im_start|>assistant\n"
    assert ids_of(llm.chat(talks, GREEDY)) == ids_of(alone)


def test_a_started_prompt_is_awaited_iterated_or_asked_for_its_result(llm):
    expected = llm.generate("The river", GREEDY).outputs

    async def run() -> None:
        assert (await llm.generate_async("The river", GREEDY)).outputs == expected
        pending = llm.generate_async("The river", GREEDY)
        deltas = [delta async for delta in pending]
        assert "".join(delta.text for delta in deltas) == expected[0].text
        assert len(deltas) > 6
        assert pending.result(240).outputs == expected

    asyncio.run(run())
    started = [llm.generate_async(prompt, GREEDY) for prompt in PROMPTS]
    assert ids_of([one.result(240) for one in started]) == ids_of(llm.generate(PROMPTS, GREEDY))


def test_an_aborted_prompt_ends_as_cancelled(llm):
    endless = SamplingParams(ignore_eos=True, temperature=0)
    pending = llm.generate_async([5], endless)
    pending.abort()
    [sample] = pending.result(240).outputs
    assert sample.finish_reason is FinishReason.ABORT
    assert len(sample.token_ids) < MAX_SEQ_LEN - 1


def test_a_prompt_that_is_too_long_is_refused_and_the_others_are_not_harmed(llm):
    with pytest.raises(RequestError, match="256 tokens") as refused:
        llm.generate(["The river", [5] * MAX_SEQ_LEN], GREEDY)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="vocabulary"):
        llm.generate([10**6], GREEDY)
    assert llm.generate("The river", GREEDY).outputs[0].text


def test_the_tokens_are_those_of_the_server(llm):
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=20)
    here = [llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, params)]
    fields = [
        {"temperature": 0, "max_tokens": 12, "ignore_eos": True},
        {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 20},
    ]
    with Server("tiny") as server:
        for outputs, asked in zip(here, fields, strict=True):
            reply = server.post("/v1/completions", prompt=PROMPTS, detokenize=False, **asked)
            assert [choice["token_ids"] for choice in reply["choices"]] == ids_of(outputs)


def test_leaving_the_block_ends_the_engine_and_a_second_shutdown_does_nothing():
    before = engines()
    with LLM("tiny", num_threads=1) as llm:
        started = [process for process in engines() if process not in before]
        assert len(started) == 2  # the engine, and its chat template
        assert llm.generate("Hi", GREEDY).outputs
    assert not any(process.is_running() for process in started)
    llm.shutdown()


def test_a_wrong_model_or_setting_is_an_error_and_leaves_no_process():
    before = engines()
    with pytest.raises(ConfigError, match="max_batch_size"):
        LLM("tiny", max_batchsize=4)
    with pytest.raises(ConfigError, match="no such folder"):
        LLM("/no/such/folder")
    assert not [process for process in engines() if process not in before]


SCRIPT = """
from penstock import LLM, SamplingParams
llm = LLM("tiny", num_threads=1)
params = SamplingParams(temperature=0, max_tokens=4)
outputs = llm.generate(["The opposite of", "Of course"], params)
for output in outputs:
    print(output.outputs[0].text)
"""


def test_a_plain_script_needs_no_main_guard_and_no_shutdown(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == " up is down." and second
    assert "prompts" not in done.stderr, "a progress bar belongs on a terminal"


def test_a_terminal_shows_progress_unless_told_not_to(tmp_path):
    script = tmp_path / "script.py"
    quiet = 'print("quiet from here", flush=True)\nllm.generate("Hi", params, use_tqdm=False)\n'
    script.write_text(SCRIPT + quiet)
    master, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, script], stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while part := _read(master):
            shown += part
    os.close(master)
    assert process.returncode == 0, shown
    loud, silent = shown.decode().split("quiet from here")
    assert "prompts" in loud and "2/2" in loud
    assert "prompts" not in silent


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that nobody writes any more
        return b""
