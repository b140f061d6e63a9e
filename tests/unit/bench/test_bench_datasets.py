"""What each dataset asks: lengths, what is shared, what is sent as ids, and mistakes in files."""

import base64
import json
import struct
import sys
import types
import zlib
from pathlib import Path

import pytest

from penstock.bench.datasets import DATASETS, DatasetOptions
from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.text.tokenizer import Tokenizer

SONNETS = Path(__file__).parents[4] / "shared" / "data" / "sonnet.txt"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(local_folder("tiny"))


def make(name: str, tokenizer: Tokenizer, **options):
    return DATASETS[name](DatasetOptions(**options), tokenizer)


def test_random_ids_are_runs_of_ids_that_begin_differently(tokenizer):
    asks = make(
        "random", tokenizer, num_prompts=50, random_ids=True, tokenize_on_client=True,
        random_input_len=20, random_output_len=7,
    )  # fmt: skip
    assert all(len(ask.prompt) == ask.num_input == 20 and ask.max_tokens == 7 for ask in asks)
    assert len({ask.prompt[:2] for ask in asks}) > 45
    plain = [one for one in range(tokenizer.vocab_size) if one not in tokenizer.special_ids]
    for ask in asks:
        at = plain.index(ask.prompt[0])
        assert list(ask.prompt) == [plain[(at + i) % len(plain)] for i in range(20)]
    assert asks == make(
        "random-ids", tokenizer, num_prompts=50, tokenize_on_client=True,
        random_input_len=20, random_output_len=7,
    )  # fmt: skip


def test_another_seed_asks_something_else(tokenizer):
    first, other = (make("random-ids", tokenizer, num_prompts=5, seed=seed) for seed in (0, 1))
    assert first != other


def test_lengths_vary_within_the_ratio_and_the_prefix_is_shared(tokenizer):
    asks = make(
        "random-ids", tokenizer, num_prompts=300, tokenize_on_client=True, random_input_len=100,
        random_output_len=50, random_range_ratio=0.5, random_prefix_len=8,
    )  # fmt: skip
    inputs, outputs = [ask.num_input for ask in asks], [ask.max_tokens for ask in asks]
    assert (min(inputs) >= 58, max(inputs) <= 158) == (True, True)
    assert max(inputs) - min(inputs) > 90
    assert (min(outputs) >= 25, max(outputs) <= 75) == (True, True)
    assert len({ask.prompt[:8] for ask in asks}) == 1
    assert len({ask.prompt[8:12] for ask in asks}) > 250


def test_text_is_sent_unless_ids_are_wanted(tokenizer):
    [ask] = make("random-ids", tokenizer, num_prompts=1, random_input_len=5)
    assert isinstance(ask.prompt, str)
    assert ask.num_input == 5


@pytest.fixture
def conversations(tmp_path):
    def talk(question: str, response: str) -> dict:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": response}]
        return {"conversations": turns}

    rows = [
        talk(f"{i} What is the capital of France?", "Paris, I think. " * i) for i in range(1, 5)
    ]
    rows += [talk("Hi", "x"), talk("word " * 3000, "fine, fine"), {"conversations": []}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(rows))
    return str(path)


def test_sharegpt_asks_for_as_many_tokens_as_the_answer_has(tokenizer, conversations):
    asks = make("sharegpt", tokenizer, num_prompts=6, dataset_path=conversations)
    by_text = {ask.prompt: ask for ask in asks}
    assert len(by_text) == 4  # the others are too short, too long or no conversation
    assert len(asks) == 6  # two are asked twice
    ask = by_text["3 What is the capital of France?"]
    assert ask.num_input == len(tokenizer.encode(ask.prompt, False))
    assert ask.max_tokens == len(tokenizer.encode("Paris, I think. " * 3, False))
    fixed = make(
        "sharegpt", tokenizer, num_prompts=2, dataset_path=conversations, sharegpt_output_len=11,
        tokenize_on_client=True,
    )  # fmt: skip
    assert [ask.max_tokens for ask in fixed] == [11, 11]
    assert all(isinstance(ask.prompt, tuple) for ask in fixed)


def test_random_text_repeats_conversations_to_length(tokenizer, conversations):
    [ask] = make(
        "random", tokenizer, num_prompts=1, dataset_path=conversations, random_input_len=40,
        tokenize_on_client=True,
    )  # fmt: skip
    assert len(ask.prompt) == 40
    period = next(n for n in range(1, 40) if ask.prompt[n:] == ask.prompt[: 40 - n])
    assert period < 20


def test_burstgpt_takes_lengths_of_answered_gpt4_requests(tokenizer, tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,1,2,3,API\n6,GPT-4,9,0,9,API\n7,GPT-4,12,34,46,API\n"
    )
    options = {"num_prompts": 2, "dataset_path": str(path), "tokenize_on_client": True}
    asks = make("burstgpt", tokenizer, **options)
    assert [(len(ask.prompt), ask.max_tokens) for ask in asks] == [(12, 34)] * 2


@pytest.mark.skipif(not SONNETS.is_file(), reason="the sonnets are not at hand")
def test_sonnets_share_their_first_lines_and_have_about_the_length(tokenizer):
    asks = make("sonnet", tokenizer, num_prompts=20, dataset_path=str(SONNETS))
    assert all(ask.max_tokens == 150 for ask in asks)
    assert all(abs(ask.num_input - 550) < 80 for ask in asks)
    assert all(ask.num_input == len(tokenizer.encode(ask.prompt, False)) for ask in asks)
    lines = [ask.prompt.splitlines() for ask in asks]
    num_shared = next(i for i in range(99) if len({one[i] for one in lines}) > 1)
    shared = len(tokenizer.encode("\n".join(lines[0][1:num_shared]), False))
    assert abs(shared - 200) < 40


def test_custom_lines_have_one_of_three_shapes(tokenizer, tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello there"}]
    path = tmp_path / "custom.jsonl"
    lines = [
        {"input": {"messages": messages, "max_tokens": 3}},
        {"prompt": "Hello", "output_tokens": 4},
        {"task_id": -1, "input_ids": [5, 6, 7], "output_tokens": 5},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    asks = make("custom", tokenizer, num_prompts=4, dataset_path=str(path))
    assert [ask.prompt for ask in asks] == ["Hello there", "Hello", (5, 6, 7), "Hello there"]
    assert [ask.max_tokens for ask in asks] == [3, 4, 5, 3]
    assert asks == make("trtllm_custom", tokenizer, num_prompts=4, dataset_path=str(path))
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    with pytest.raises(ConfigError, match=r"custom.jsonl:2 is no request: KeyError"):
        make("custom", tokenizer, dataset_path=str(path))


def test_pictures_are_png_files_of_the_size_asked_for(tokenizer):
    [ask] = make(
        "random_image", tokenizer, num_prompts=1, random_input_len=4, random_image_width=3,
        random_image_height=2, random_num_images=2,
    )  # fmt: skip
    assert len(ask.image_urls) == 2
    data = base64.b64decode(ask.image_urls[0].removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(kind + content)
        chunks[kind] = content
        at += 12 + length
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (3, 2)
    assert len(zlib.decompress(chunks[b"IDAT"])) == 2 * (1 + 3 * 3)


def test_a_hub_dataset_gives_questions_and_lengths_of_answers(tokenizer, monkeypatch):
    rows = [
        {"question": "Why?", "answer": "Because of that."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]},
        {"prompt": "Go on"},
    ]
    asked = []

    def load_dataset(path, subset, split, streaming):
        asked.append((path, subset, split, streaming))
        return iter(rows)

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    asks = make("hf", tokenizer, num_prompts=3, dataset_path="org/set", hf_split="test")
    assert asked == [("org/set", None, "test", True)]
    assert [ask.prompt for ask in asks] == ["Why?", "Hi", "Go on"]
    assert asks[0].max_tokens == len(tokenizer.encode("Because of that.", False))
    assert asks[2].max_tokens == 256


def test_the_conversations_are_fetched_into_the_folder_named(tokenizer, conversations, monkeypatch):
    asked = []

    def fetch(repository, name, **options):
        asked.append((repository, name, options["repo_type"], options["local_dir"]))
        return conversations

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    asks = make("sharegpt", tokenizer, num_prompts=3, download_path=Path("/some/where"))
    assert len(asks) == 3
    assert asked[0][2:] == ("dataset", Path("/some/where"))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("sharegpt", {}, "--dataset-path, or a folder to fetch it into with --download-path"),
        ("sonnet", {}, "sonnet needs a file"),
        ("custom", {"dataset_path": "/no/where"}, "'/no/where': no such file"),
        ("hf", {}, "needs the name of a dataset"),
    ],
)
def test_a_missing_file_is_told_with_the_flag_that_names_it(tokenizer, name, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make(name, tokenizer, **options)
