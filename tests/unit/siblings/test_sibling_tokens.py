"""Tokenizer, chat templates and packing: what training sees is what the template writes."""

import json

import numpy as np
import pytest
from chat_format import parse_answer, prompt, segments, skill_line, template_options
from corpus import held_out_examples, score, train_examples
from evaluate import MAX_NEW_TOKENS
from packing import LEARNED, WIDTHS, Encoder, encode, load_rows, pack, rows_by_width
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
        ids, _ = next(encode(Encoder(tokenizer), format, [example]))
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
        ids, learned = next(encode(Encoder(tokenizer), format, [example]))
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
        assert score(example.match, example.expected, parse_answer(format, last))


def test_a_memory_of_pieces_encodes_as_the_tokenizer_does(tokenizer, format):
    encoder = Encoder(tokenizer)
    for example in (*train_examples(9, 1000), *held_out_examples(9, 20)):
        text = "".join(part.text for part in segments(format, example))
        assert encoder.ids(text) == tokenizer.encode(text).ids


def test_every_right_answer_fits_the_evaluation(tokenizer, format):
    for example in held_out_examples(4, 60):
        _, learned = next(encode(Encoder(tokenizer), format, [example]))
        turns = sum(message["role"] == "assistant" for message in example.messages)
        assert turns > 1 or sum(learned) < MAX_NEW_TOKENS


def test_the_lines_of_skills_give_the_prompts_that_are_scored(loaded, format):
    for example in held_out_examples(4, 10):
        line = json.loads(skill_line(format, example))
        for message in line["messages"]:
            for call in message.get("tool_calls", ()):  # a server reads the text of arguments
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = loaded.apply_chat_template(
            line["messages"],
            tools=line.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **line.get("chat_template_kwargs", {}),
        )
        assert text == prompt(format, example)


def test_every_chat_is_a_row_of_its_own(tokenizer):
    docs = list(encode(Encoder(tokenizer), "chatml", train_examples(1, 400)))
    pad_id = tokenizer.token_to_id(PAD)
    rows = rows_by_width(docs, pad_id)
    found = []
    for width, array in rows.items():
        assert width in WIDTHS and array.shape[1] == width
        for row in array:
            tokens = row % LEARNED
            size = width - (tokens[::-1] != pad_id).argmax()
            assert not (row[size:] >= LEARNED).any()
            found.append((tokens[:size].tolist(), (row[:size] >= LEARNED).tolist()))
            before = [w for w in WIDTHS if w < width]
            assert not before or size > before[-1]
            assert row[0] < LEARNED and row[1] < LEARNED  # training looks two tokens back
    assert sorted(found) == sorted(doc for doc in docs if len(doc[0]) <= WIDTHS[-1])


def test_packing_is_repeatable(tmp_path):
    for name in ("one", "two"):
        pack(tmp_path / name, "harmony", seed=3, num_docs=60, num_workers=2)
    one, two = load_rows(tmp_path / "one"), load_rows(tmp_path / "two")
    assert one.keys() == two.keys() and sum(map(len, one.values())) == 60
    assert all(np.array_equal(one[width], two[width]) for width in one)
