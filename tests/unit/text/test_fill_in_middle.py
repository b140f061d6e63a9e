"""A prompt that asks for a middle has the tokens of the model's family in the family's order."""

import pytest
import tiny_tokenizers
from tokenizers import AddedToken

from penstock.text.fill_in_middle import find_fim_tokens
from penstock.text.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")


def tokenizer_with(tmp_path, backend, tokens) -> Tokenizer:
    backend.add_special_tokens([AddedToken(one, normalized=False) for one in tokens])
    return Tokenizer.from_folder(tiny_tokenizers.write_folder(tmp_path, backend))


@pytest.mark.parametrize("tokens", [QWEN, STARCODER, DEEPSEEK])
def test_prefix_suffix_and_the_middle_to_write(tmp_path, tokens):
    tokenizer = tokenizer_with(tmp_path, tiny_tokenizers.byte_level(), tokens)
    fim = find_fim_tokens(tokenizer)
    before, behind = "hello(", ") well"
    ids = fim.prompt(tokenizer, before, behind, add_special_tokens=True)
    text = f"{tokens[0]}{before}{tokens[1]}{behind}{tokens[2]}"
    assert list(ids) == tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    bare = fim.prompt(tokenizer, before, behind, add_special_tokens=False)
    assert bare == ids[1:]
    given_ids = tokenizer.encode(before, add_special_tokens=False)
    assert fim.prompt(tokenizer, given_ids, behind, add_special_tokens=False) == bare
    assert fim.stop_ids == tuple(map(tokenizer.id_of, tokens))


def test_a_suffix_of_code_llama_begins_without_the_blank_of_sentencepiece(tmp_path):
    tokenizer = tokenizer_with(tmp_path, tiny_tokenizers.sentencepiece_style(), CODE_LLAMA)
    fim = find_fim_tokens(tokenizer)
    ids = fim.prompt(tokenizer, "the", "the", add_special_tokens=True)
    the, bare_the = map(tokenizer.id_of, ("▁the", "he"))
    names = dict(zip(CODE_LLAMA, map(tokenizer.id_of, CODE_LLAMA), strict=True))
    assert list(ids) == [
        *(tokenizer.bos_id, names["▁<PRE>"], the, names["▁<SUF>"]),
        *(tokenizer.id_of("t"), bare_the, names["▁<MID>"]),
    ]
    assert fim.stop_ids[-1] == names["▁<EOT>"]


def test_a_vocabulary_without_such_tokens_has_no_middle(tmp_path):
    assert find_fim_tokens(tokenizer_with(tmp_path, tiny_tokenizers.byte_level(), QWEN[:2])) is None


@pytest.mark.parametrize(("name", "tokens"), [("qwen2.5", QWEN), ("deepseek-v3", DEEPSEEK)])
def test_real_vocabularies(load_tokenizer, name, tokens):
    tokenizer = load_tokenizer(name)
    before, behind = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
    ids = find_fim_tokens(tokenizer).prompt(tokenizer, before, behind, add_special_tokens=True)
    assert list(ids) == tokenizer.encode(f"{tokens[0]}{before}{tokens[1]}{behind}{tokens[2]}")
