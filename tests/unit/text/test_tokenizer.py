"""Loading a tokenizer folder; encode and decode against transformers."""

import json

import pytest
import tiny_tokenizers
from tiny_tokenizers import REAL, TINY

from penstock.errors import ConfigError, RequestError
from penstock.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer, check_length

TEXTS = (
    "Hello world",
    "  two blanks\n\nand lines\t",
    "naïve café 東京 🙂👩‍👩‍👧",
    "x = {'a': [1, 2, 3]}",
    "",
)


@pytest.mark.parametrize("name", [*REAL, "byte_level"])
def test_encode_and_decode_agree_with_transformers(name, tokenizer_folder, load_tokenizer):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(name)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(name))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert tokenizer.vocab_size == len(theirs)
    assert tokenizer.eos_ids == (theirs.eos_token_id,)
    assert tokenizer.bos_id == theirs.bos_token_id
    assert tokenizer.pad_id == theirs.pad_token_id


def test_post_processor_adds_bos_only_when_asked(load_tokenizer):
    tokenizer = load_tokenizer("llama-3")
    ids = tokenizer.encode("Hi")
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.encode("Hi", add_special_tokens=False) == ids[1:]


def test_bos_asked_for_only_in_the_config_is_added_once(load_tokenizer, tmp_path):
    tokenizer = load_tokenizer("deepseek-v3")  # add_bos_token: true, post-processor adds nothing
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_id
    assert tokenizer.bos_id not in tokenizer.encode("Hi", add_special_tokens=False)
    folder = tiny_tokenizers.write_folder(
        tmp_path, tiny_tokenizers.byte_level(), add_bos_token=True
    )
    both = Tokenizer.from_folder(folder)
    assert both.encode("Hi").count(both.bos_id) == 1


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path):
    folder = tiny_tokenizers.write_folder(tmp_path, tiny_tokenizers.byte_level(), pad_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"pad_token": {"content": "<pad>"}, "eos_token": "<s>"})
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert len(tokenizer.special_ids) == 3  # <tool> is added, but not special


@pytest.mark.parametrize("name", TINY)
def test_token_bytes_of_an_unknown_id_are_empty(name, load_tokenizer):
    tokenizer = load_tokenizer(name)
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.token_bytes(tokenizer.eos_ids[0]) == b"</s>"


def test_folder_with_only_a_sentencepiece_model_names_the_way_out(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"sentencepiece.*save_pretrained.*--tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_folder_without_a_tokenizer_names_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        Tokenizer.from_folder(tmp_path)


def test_broken_files_are_config_errors(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    tiny_tokenizers.write_folder(tmp_path, tiny_tokenizers.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("nope")
    with pytest.raises(ConfigError, match="not JSON"):
        Tokenizer.from_folder(tmp_path)


def test_unknown_decoder_is_refused_by_name(tmp_path):
    from tokenizers import decoders

    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="'WordPiece' is not supported"):
        Tokenizer.from_folder(tiny_tokenizers.write_folder(tmp_path, tokenizer))


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=20)
    loaded = Tokenizer.from_folder(tiny_tokenizers.write_folder(tmp_path, tokenizer))
    assert len(loaded.encode("abcdefg", add_special_tokens=False)) == 7


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"chat_template": "A"}}, {"default": "A"}),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T"}]}},
            {"tool_use": "T"},
        ),
        ({"chat_template.json": {"chat_template": "J"}}, {"default": "J"}),
        (
            {"tokenizer_config.json": {"chat_template": "A"}, "chat_template.jinja": "F"},
            {"default": "F"},
        ),
    ],
)
def test_chat_template_is_found_where_it_lies(files, expected, tmp_path):
    tiny_tokenizers.write_folder(tmp_path, tiny_tokenizers.byte_level())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    assert Tokenizer.from_folder(tmp_path).chat_templates == expected


def test_overlong_text_is_refused_before_tokenizing():
    check_length("x" * (10 * MAX_CHARS_PER_TOKEN), max_seq_len=10)
    with pytest.raises(RequestError) as caught:
        check_length("x" * (10 * MAX_CHARS_PER_TOKEN + 1), max_seq_len=10)
    assert caught.value.code == "context_length_exceeded"
