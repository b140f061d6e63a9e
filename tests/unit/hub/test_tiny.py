"""The built-in model is the same every time, speaks whole words and ends its answers."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import reference_model
from transformers import AutoTokenizer

from penstock.hub.tiny import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def digests(folder) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_same_seed_gives_the_same_bytes_in_another_process_without_torch(tiny, tmp_path):
    code = (
        "import sys; from pathlib import Path; from penstock.hub.tiny import write_tiny_model\n"
        f"write_tiny_model(Path({str(tmp_path)!r}))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    threads = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | threads)
    assert digests(tmp_path) == digests(tiny)


def test_another_seed_gives_another_model(tiny, tmp_path):
    write_tiny_model(tmp_path, seed=1)
    assert digests(tmp_path)["model.safetensors"] != digests(tiny)["model.safetensors"]


def test_transformers_loads_it_and_it_ends_its_answers(tiny):
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), reference_model(tiny)
    assert 1e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "How are you?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    text = tokenizer.decode(prompt["input_ids"][0])
    assert text == ("<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n")
    torch.manual_seed(0)
    answers = model.generate(**prompt, do_sample=True, max_new_tokens=200, num_return_sequences=4)
    for answer in answers[:, prompt["input_ids"].shape[1] :]:
        assert tokenizer.eos_token_id in answer
        words = tokenizer.decode(answer, skip_special_tokens=True)
        assert words.isascii() and words.endswith(".") and len(words) > 20


def test_any_text_survives_the_tokenizer(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for text in ("plain", "naïve 🚰 水\n\ttabs  and   spaces", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
