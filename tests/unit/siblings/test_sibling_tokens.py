"""Tokenizer, chat templates and packing: what training sees is what the template writes."""

import itertools

import numpy as np
import pytest
from chat_format import answer_text, prompt, segments, template_options
from corpus import held_out_examples, score, train_examples
from packing import Packer, encode
from tokenizer import MARK_TOKENS, PAD, STOP_TOKENS, TURN_TOKENS, VOCAB_SIZE, write_tokenizer
from transformers import AutoTokenizer, GenerationConfig

from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types.request import ChatOptions

FORMATS = ("chatml", "harmony")


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture
def loaded(tokenizer, format, tmp_path):
    """The written folder as transformers reads it."""
    write_tokenizer(tokenizer, tmp_path, format)
    return AutoTokenizer.from_pretrained(tmp_path)


def mixed_examples():
    return [*train_examples(7, 300), *held_out_examples(7, 10)]


def test_text_survives_the_tokenizer(tokenizer, format):
    texts = ["".join(p.text for p in segments(format, e)) for e in mixed_examples()]
    texts += ["Grüße, 世界! \n\n  tabs\t and 12345", ""]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert all(i < VOCAB_SIZE for i in ids)


def test_digits_and_special_tokens_are_single_tokens(tokenizer):
    assert tokenizer.encode("2047").tokens == ["2", "0", "4", "7"]
    for token in (*TURN_TOKENS, *MARK_TOKENS):
        assert tokenizer.encode(f"x{token}y").tokens == ["x", token, "y"]
    hello = tokenizer.encode("<|im_start|><think>a</think><|im_end|>").ids
    assert tokenizer.decode(hello, skip_special_tokens=True) == "<think>a</think>"


def test_training_sees_what_the_template_writes(loaded, tokenizer, format):
    for example in mixed_examples():
        options = template_options(format, example.thinking) | {
            "tools": list(example.tools) or None
        }
        parts = segments(format, example)
        asked = loaded.apply_chat_template(
            list(example.messages[:-1]), tokenize=False, add_generation_prompt=True, **options
        )
        assert prompt(format, example) == asked
        whole = loaded.apply_chat_template(list(example.messages), tokenize=False, **options)
        if example.thinking is not False:  # then the template writes the empty block only to prompt
            assert "".join(part.text for part in parts) == whole
        ids, _ = encode(tokenizer, format, [example])[0]
        assert ids == loaded("".join(part.text for part in parts))["input_ids"]


def test_penstock_writes_the_same_prompts(loaded, format, tmp_path):
    own = Tokenizer.from_folder(tmp_path)
    template = ChatTemplate(own.chat_templates, own.special_tokens)
    for example in mixed_examples():
        options = ChatOptions(
            tools=example.tools, template_kwargs=template_options(format, example.thinking)
        )
        text = template.render(example.messages[:-1], options, max_chars=10_000)
        assert text == prompt(format, example)
        assert own.encode(text) == loaded(text)["input_ids"]


def test_transformers_reads_the_folder(loaded, tokenizer, format, tmp_path):
    stops = [tokenizer.token_to_id(token) for token in STOP_TOKENS[format]]
    assert loaded.eos_token == STOP_TOKENS[format][0]
    assert loaded.pad_token == PAD
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == (stops if len(stops) > 1 else stops[0])
    assert loaded.decode([stops[0]], skip_special_tokens=True) == ""


def test_the_learned_tokens_are_exactly_what_the_assistant_says(tokenizer, format):
    for example in mixed_examples():
        ids, learned = encode(tokenizer, format, [example])[0]
        said = tokenizer.decode(
            [i for i, is_learned in zip(ids, learned, strict=True) if is_learned],
            skip_special_tokens=False,
        )
        assert said == "".join(p.text for p in segments(format, example) if p.is_learned)
        for message in example.messages:
            if message["role"] == "assistant":
                assert message["content"] in said
        heard = tokenizer.decode(
            [i for i, is_learned in zip(ids, learned, strict=True) if not is_learned],
            skip_special_tokens=False,
        )
        turns = sum(message["role"] == "assistant" for message in example.messages)
        opening = "<|im_start|>assistant" if format == "chatml" else "<|start|>assistant"
        assert heard.count(opening) == turns
        last = [p for p in segments(format, example) if p.is_learned][-1].text
        assert last.endswith(STOP_TOKENS[format])
        assert score(example.skill, example.expected, answer_text(format, last))


def test_every_chat_is_packed_whole_and_once(tokenizer):
    docs = encode(tokenizer, "chatml", train_examples(1, 400))
    pad_id = tokenizer.token_to_id(PAD)
    packer = Packer(pad_id, row_size=384)
    for doc in docs:
        packer.add(doc)
    rows = packer.arrays()
    found = []
    for tokens, positions, learned in zip(*rows.values(), strict=True):
        starts = [*np.flatnonzero(positions == 0), len(tokens)]
        for start, end in itertools.pairwise(starts):
            if end - start > 1 or tokens[start] != pad_id:
                found.append((tokens[start:end].tolist(), learned[start:end].tolist()))
                assert positions[start:end].tolist() == list(range(end - start))
    fitting = [doc for doc in docs if len(doc[0]) <= 384]
    assert packer.num_dropped == len(docs) - len(fitting)
    assert sorted(found) == sorted(fitting)
    assert not rows["learned"][rows["tokens"] == pad_id].any()
