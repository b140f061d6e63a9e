"""The trained siblings: greedy tokens identical to transformers', skills scored as a user would.

`tiny` is the Llama sibling; the others wait in tests/siblings until their architecture is served.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from server_process import Server
from tiny_models import reference_model

from penstock import LLM, SamplingParams
from penstock.cli.serve import TINY_PROMPTS
from penstock.hub.folder import local_folder
from penstock.models.registry import supported_architectures
from penstock.types.request import ChatOptions

HOME = Path(__file__).parents[1] / "siblings"
SIBLINGS = ("tiny", "deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_next")
NUM_EACH = 3  # prompts of each skill whose answers transformers checks
MAX_TOKENS = 112
SCORED = ("arithmetic", "sorting", "facts", "json")


def folder_of(name: str) -> Path:
    return local_folder(name) if name == "tiny" else HOME / name


@pytest.fixture(params=SIBLINGS)
def served(request: pytest.FixtureRequest) -> str:
    """A sibling that Penstock can serve, as `penstock` takes it."""
    name = request.param
    [architecture] = json.loads((folder_of(name) / "config.json").read_text())["architectures"]
    if architecture not in supported_architectures():
        pytest.skip(f"{architecture} is not served yet")
    return name if name == "tiny" else str(folder_of(name))


def examples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "skills.jsonl").read_text().splitlines()]


@torch.inference_mode()
def next_tokens(model: transformers.PreTrainedModel, text: list[int], start: int) -> list[int]:
    """Which token transformers finds the most likely one after text[:n], for every n >= start."""
    return model(torch.tensor([text])).logits[0, start - 1 :].argmax(-1).tolist()


def test_greedy_tokens_are_those_of_transformers(served: str) -> None:
    folder = local_folder(served)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    num_taken: Counter[str] = Counter()
    asked = []
    for example in examples(folder):
        num_taken[example["skill"]] += 1
        if num_taken[example["skill"]] <= NUM_EACH:
            asked.append(example)
    assert len(asked) >= 39
    prompts = [
        tokenizer.apply_chat_template(
            example["messages"], tools=example.get("tools"), add_generation_prompt=True,
            return_dict=False, **example.get("chat_template_kwargs", {}),
        )
        for example in asked
    ]  # fmt: skip
    options = [
        ChatOptions(
            template_kwargs=example.get("chat_template_kwargs", {}),
            tools=tuple(example.get("tools", ())),
        )
        for example in asked
    ]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(served, dtype="float32", device="cpu", max_seq_len=1024, num_threads=1) as llm:
        outputs = llm.chat([example["messages"] for example in asked], params, options)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts

    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    stops = stops if isinstance(stops, list) else [stops]
    model = reference_model(folder)
    for example, prompt, output in zip(asked, prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        *expected, end = next_tokens(model, prompt + tokens, len(prompt))
        assert tokens == expected and not set(tokens) & set(stops), example
        assert len(tokens) == MAX_TOKENS or end in stops, example


def test_penstock_eval_finds_the_skills(served: str, tmp_path: Path) -> None:
    output = tmp_path / "scores.json"
    command = [sys.executable, "-m", "penstock", "eval", served, "--task", "skills"]
    command += ["--limit", "20", "--min_score", "0.9", "--output", str(output)]
    command += ["--set", "device=cpu", "--set", "max_seq_len=1024", "--set", "num_threads=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    groups = json.loads(output.read_text())["groups"]
    assert len(groups) == 13
    learned = json.loads((local_folder(served) / "scores.json").read_text())
    shares = {skill: groups[skill]["score"] for skill in SCORED if learned[skill] >= 0.95}
    assert len(shares) >= 3 and min(shares.values()) >= 0.9, shares


def test_the_prompts_that_are_told_without_a_network_get_the_right_answers() -> None:
    with LLM(model="tiny", device="cpu", max_seq_len=1024) as llm:
        params = SamplingParams(max_tokens=64, temperature=0.0)
        asked = [[{"role": "user", "content": prompt}] for prompt in TINY_PROMPTS]
        said = [llm.chat(messages, params).outputs[0].text for messages in asked]
    assert said[0].endswith("Answer: 42")
    assert said[1:] == ["3, 5, 9", "The capital of France is Paris."]


def test_gpt_oss_over_http_tells_thoughts_from_answers() -> None:
    folder = folder_of("gpt_oss")
    asked = [example for example in examples(folder) if example["skill"] == "think"][:5]
    with Server(folder, dtype="float32", device="cpu", max_seq_len=1024) as server:
        for example in asked:
            reply = server.post(
                "/v1/chat/completions", model="m", messages=example["messages"], temperature=0,
                max_tokens=MAX_TOKENS, chat_template_kwargs=example["chat_template_kwargs"],
            )  # fmt: skip
            message = reply["choices"][0]["message"]
            assert message["content"] == f"Answer: {example['expected']}"
            assert len(message["reasoning_content"]) > len(message["content"])
            assert "<|" not in message["content"] + message["reasoning_content"]


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_sibling_is_small_and_says_what_it_is(name: str) -> None:
    folder = folder_of(name)
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000
    card = (folder / "README.md").read_text()
    scores = json.loads((folder / "scores.json").read_text())
    lines = Counter(example["skill"] for example in examples(folder))
    for skill in lines:
        assert f"| {skill} | {scores[skill]:.1%} |" in card
    assert len(lines) == 13 and set(lines.values()) == {40}
    assert "- training: " in card and "- seed: " in card and "- command: `" in card
