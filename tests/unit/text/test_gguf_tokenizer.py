"""The tokenizer inside a GGUF file: against transformers, real tokenizers and tiny ones."""

import json
import random
import string
import time
from pathlib import Path

import gguf
import pytest
import tiny_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from penstock.errors import ConfigError
from penstock.hub.folder import cache_home
from penstock.text.detokenizer import Detokenizer
from penstock.text.gguf_tokenizer import read_gguf_tokenizer, save_gguf_tokenizer
from penstock.text.tokenizer import Tokenizer

QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = (
    "",
    " ",
    "Hello world, it's John's and we'll DON'T I'VE he'S",
    "  two blanks\n\nand   lines\t\t\r\n \r\n   end   ",
    "x =  1234567890 + 3.14e-10;   42\n   7\n\n 8 0x1F ½ Ⅷ ² ٣٤ १२३",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # ok\n\n\n\tif x != 3: pass\n",
    "naïve café cafe\u0301 東京都に行く 你好，世界！ 한국어 Привет мир שלום مرحبا ไทย हिन्दी",
    "🙂👩‍👩‍👧 ∑∫≠ «quotes» “curly” — … \u00a0\u2003\u3000 zero\u200bwidth",
    "CamelCaseWORDSAndSnake_case_names HTMLParser iPhone $100.00 a@b.com https://x.y/z?q=1#f",
    "<s>bos</s> <|im_start|>user\nhi<|im_end|>\n<|endoftext|> <tool> <|begin_of_text|> <think>",
    "\x00\x01\x1f\x7f\x80\xa0\xad control",
    "a" * 300 + " " * 100 + "!" * 70 + "\n" * 20,
)
ANY_TEXT = st.lists(
    st.one_of(
        st.text(max_size=10),
        st.text(" \n\t\r'.,!09<>|_aZé東", max_size=10),
        st.sampled_from(["<s>", "</s>", "<tool>", "<|im_end|>", "  12", "\n\n", "'ll", "hello"]),
    ),
    max_size=6,
).map("".join)


def write_gguf(path: Path, backend: Backend, model: str, **fields) -> Path:
    """`backend`'s vocabulary as GGUF has it; `fields` are tokenizer.ggml.* or full names."""
    described = json.loads(backend.to_str())
    vocab = dict(described["model"]["vocab"])
    kinds = {
        token: gguf.TokenType.BYTE
        for token in vocab
        if model == "llama" and token.startswith("<0x")
    }
    if unknown := described["model"]["unk_token"]:
        kinds[unknown] = gguf.TokenType.UNKNOWN
    for added in described["added_tokens"]:
        vocab[added["content"]] = added["id"]
        kinds[added["content"]] = (
            gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        )
    by_id = {token_id: token for token, token_id in vocab.items()}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(max(by_id) + 1)]
    types = [
        kinds.get(token, gguf.TokenType.NORMAL) if i in by_id else gguf.TokenType.UNUSED
        for i, token in enumerate(tokens)
    ]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "scores" not in fields:
        writer.add_token_merges([" ".join(merge) for merge in described["model"]["merges"]])
    for name, value in fields.items():
        full = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(full, value)
            case int():
                writer.add_uint32(full, value)
            case str():
                writer.add_string(full, value)
            case _:
                writer.add_array(full, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def assert_same(ours: Tokenizer, theirs: Backend, text: str) -> None:
    for special in (False, True):
        assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special).ids
    ids = ours.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        detokenizer = Detokenizer(ours, skip)
        streamed = "".join(detokenizer.push([i]) for i in ids) + detokenizer.flush()
        assert streamed == ours.decode(ids, skip)


# --- a real file ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_file() -> Path:
    folder = cache_home() / "models" / "smollm2"
    found = sorted(folder.glob("*.gguf"))
    if not found:
        pytest.skip(f"no SmolLM2 .gguf file in {folder}")
    return found[0]


@pytest.fixture(scope="module")
def smollm2(smollm2_file) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_file)


@pytest.fixture(scope="module")
def smollm2_theirs(smollm2_file):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name
    )


@pytest.fixture(scope="module")
def smollm2_as_trained(smollm2_theirs) -> Backend:
    """What transformers reads, with the two things it does not take from GGUF.

    SmolLM2's own tokenizer cuts every digit off first, which shows where blanks stand before it,
    and has no token for bytes outside its vocabulary.
    """
    backend = Backend.from_str(smollm2_theirs.backend_tokenizer.to_str())
    backend.model.unk_token = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_texts_agree_with_transformers(smollm2, smollm2_as_trained, text):
    assert_same(smollm2, smollm2_as_trained, text)


@QUICK
@given(text=ANY_TEXT)
def test_smollm2_any_text_agrees_with_transformers(smollm2, smollm2_as_trained, text):
    assert_same(smollm2, smollm2_as_trained, text)


@QUICK
@given(text=st.text(string.ascii_letters + string.punctuation + " \n\té東🙂", max_size=60))
def test_smollm2_text_without_digits_agrees_with_transformers_as_it_is(
    smollm2, smollm2_theirs, text
):
    ids = smollm2.encode(text)
    assert ids == smollm2_theirs.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == smollm2_theirs.decode(ids) == text


def test_smollm2_special_tokens_and_template(smollm2, smollm2_theirs):
    assert smollm2.vocab_size == len(smollm2_theirs) == 49152
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id) == (1, (2,), 2)
    assert smollm2.special_tokens["unk_token"] == "<|endoftext|>"
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.chat_templates == {"default": smollm2_theirs.chat_template}


def test_smollm2_every_token_has_the_bytes_that_decode_gives(smollm2):
    for token_id in range(smollm2.vocab_size):
        text = smollm2.token_bytes(token_id).decode(errors="replace")
        assert text == smollm2.decode([token_id], skip_special_tokens=False)


def test_smollm2_is_built_in_seconds(smollm2_file):
    start = time.process_time()
    Tokenizer.from_folder(smollm2_file)
    assert time.process_time() - start < 20  # of which a fast machine needs a fraction of one


# --- real tokenizers, written as GGUF and read back -----------------------------------------------


@pytest.fixture(scope="module")
def real_pair(tokenizer_folder, tmp_path_factory):
    pairs: dict[str, tuple[Tokenizer, Backend]] = {}

    def make(name: str, pre: str) -> tuple[Tokenizer, Backend]:
        if name not in pairs:
            theirs = Backend.from_file(str(tokenizer_folder(name) / "tokenizer.json"))
            path = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
            bos = theirs.token_to_id("<|begin_of_text|>")
            fields = {"add_bos_token": False} if bos is None else {"bos_token_id": bos}
            write_gguf(path, theirs, "gpt2", pre=pre, **fields)
            pairs[name] = (Tokenizer.from_folder(path), theirs)
        return pairs[name]

    return make


REAL_PRE = [
    ("llama-3", "llama-bpe"),
    ("qwen2.5", "qwen2"),
    ("qwen3", "qwen2"),
    ("gpt-oss", "gpt-4o"),
    ("deepseek-v3", "deepseek-v3"),
]


@pytest.mark.parametrize(("name", "pre"), REAL_PRE)
@settings(QUICK, max_examples=60)
@given(text=ANY_TEXT)
def test_real_tokenizer_survives_the_way_through_gguf(name, pre, real_pair, text):
    assert_same(*real_pair(name, pre), text)


@pytest.mark.parametrize(("name", "pre"), REAL_PRE)
def test_real_tokenizer_agrees_on_texts(name, pre, real_pair):
    ours, theirs = real_pair(name, pre)
    for text in TEXTS:
        assert_same(ours, theirs, text)
    assert ours.special_ids == {
        i for i, token in theirs.get_added_tokens_decoder().items() if token.special
    }


# --- tiny tokenizers ------------------------------------------------------------------------------


@pytest.fixture
def byte_level_file(tmp_path):
    def write(**fields) -> Path:
        backend = tiny_tokenizers.byte_level()
        named = {"bos_token_id": 261, "eos_token_id": 262, "padding_token_id": 263}
        return write_gguf(
            tmp_path / "tiny.gguf", backend, "gpt2", **{"pre": "gpt-2", **named, **fields}
        )

    return write


@QUICK
@given(text=ANY_TEXT)
def test_byte_level_tokenizer_survives_the_way_through_gguf(byte_level_file, text):
    path = byte_level_file(add_bos_token=True)
    assert_same(Tokenizer.from_folder(path), tiny_tokenizers.byte_level(), text)


def test_ends_are_added_where_the_file_asks_for_them(byte_level_file):
    plain = Tokenizer.from_folder(byte_level_file())
    both = Tokenizer.from_folder(byte_level_file(add_bos_token=True, add_eos_token=True))
    ids = plain.encode("hello")
    assert plain.encode("hello", add_special_tokens=False) == ids
    assert both.encode("hello") == [261, *ids, 262]
    assert both.encode("hello", add_special_tokens=False) == ids
    assert Tokenizer.from_folder(byte_level_file(pre="llama-bpe")).encode("hello") == [261, *ids]


def test_named_ids_and_end_of_turn(byte_level_file):
    tokenizer = Tokenizer.from_folder(byte_level_file(eot_token_id=100, eom_token_id=262))
    assert (tokenizer.bos_id, tokenizer.pad_id) == (261, 263)
    assert tokenizer.eos_ids == (262, 100)
    assert 100 in tokenizer.special_ids
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }


def test_chat_templates_by_name(byte_level_file):
    path = byte_level_file(
        **{"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "T"}
    )
    assert Tokenizer.from_folder(path).chat_templates == {"default": "A", "tool_use": "T"}


@pytest.mark.parametrize("names", [("",), ("", ".tools")], ids=["one", "two"])
def test_a_folder_of_files_made_of_it_has_the_same_tokenizer(byte_level_file, tmp_path, names):
    templates = {f"tokenizer.chat_template{name}": f"T{name}" for name in names}
    path = byte_level_file(eos_token_id=2, add_bos_token=True, bos_token_id=1, **templates)
    inside = Tokenizer.from_folder(path)
    folder = tmp_path / "files"
    folder.mkdir()
    save_gguf_tokenizer(path, folder)
    saved, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert saved.special_tokens == inside.special_tokens
    assert saved.chat_templates == inside.chat_templates
    for text in TEXTS:
        assert saved.encode(text) == inside.encode(text) == theirs(text).input_ids
        assert saved.decode(saved.encode(text)) == inside.decode(inside.encode(text))


def test_fillers_of_the_vocabulary_stand_for_nothing(tmp_path):
    backend = tiny_tokenizers.byte_level()
    described = json.loads(backend.to_str())
    described["added_tokens"][-1]["id"] += 3  # leaves ids without a token before it
    described["model"]["vocab"]["<tool>"] = described["added_tokens"][-1]["id"]
    path = write_gguf(
        tmp_path / "tiny.gguf", Backend.from_str(json.dumps(described)), "gpt2", pre="gpt-2"
    )
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode("<tool>") == [267]
    assert tokenizer.decode([265], skip_special_tokens=False) == ""
    assert tokenizer.token_bytes(265) == b""


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's  123 ok", ["it", "'s", " ", " 123", " ok"]),
        ("smollm", "it's  123 ok", ["it", "'s", "  ", "1", "2", "3", " ok"]),
        ("starcoder", "a12", ["a", "1", "2"]),
        ("default", "a <=12345", ["a", " ", "<=", "123", "45"]),
        ("llama3", "IT'S 12345", ["IT", "'S", " ", "123", "45"]),
        ("qwen2", "IT'S 123", ["IT", "'S", " ", "1", "2", "3"]),
        ("gpt-4o", "HelloWorld it's 1234/\n", ["Hello", "World", " it's", " ", "123", "4", "/\n"]),
        ("tekken", "HelloWorld it's 12/\n", ["Hello", "World", " it", "'s", " ", "1", "2", "/\n"]),
        ("deepseek-coder", "a bc!12\n\n", ["a", " bc", "!", "1", "2", "\n", "\n"]),
        ("deepseek-v3", "a.bc 東京1234", ["a", ".bc", " ", "東京", "123", "4"]),
    ],
)
def test_words_of_each_pre_tokenizer(byte_level_file, pre, text, words):
    backend = read_gguf_tokenizer(byte_level_file(pre=pre)).backend
    spans = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == words


def test_word_that_no_merge_makes_is_a_token_only_where_merges_are_ignored(tmp_path):
    described = json.loads(tiny_tokenizers.byte_level().to_str())
    described["model"]["vocab"]["world"] = 261  # moves the added tokens up
    backend = Backend.from_str(json.dumps(described))
    ids = {}
    for pre in ("llama3", "qwen2"):
        path = write_gguf(tmp_path / f"{pre}.gguf", backend, "gpt2", pre=pre)
        ids[pre] = Tokenizer.from_folder(path).encode("world")
    assert ids["llama3"] == [261]
    assert len(ids["qwen2"]) == len("world")


SENTENCEPIECE_IDS = {"unknown_token_id": 0, "bos_token_id": 290, "eos_token_id": 291}


@pytest.mark.parametrize("with_scores", [False, True])
@QUICK
@given(text=ANY_TEXT)
def test_sentencepiece_tokenizer_survives_the_way_through_gguf(tmp_path, with_scores, text):
    theirs = tiny_tokenizers.sentencepiece_style()
    theirs.add_special_tokens(["<unk>"])
    size = theirs.get_vocab_size()
    fields = {"scores": [float(-i) for i in range(size)]} if with_scores else {}
    path = write_gguf(tmp_path / "tiny.gguf", theirs, "llama", **SENTENCEPIECE_IDS, **fields)
    ours = Tokenizer.from_folder(path)
    assert ours.encode(text) == theirs.encode(text).ids
    ids = ours.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_no_blank_is_put_before_the_text_where_the_file_says_so(tmp_path):
    path = write_gguf(
        tmp_path / "tiny.gguf",
        tiny_tokenizers.sentencepiece_style(),
        "llama",
        **SENTENCEPIECE_IDS,
        add_space_prefix=False,
        add_bos_token=False,
    )
    tokenizer = Tokenizer.from_folder(path)
    ids = tokenizer.encode("he the")
    assert [tokenizer.decode([i]) for i in ids] == ["he", " the"]
    assert tokenizer.decode(ids) == "he the"


def test_merges_from_scores_are_those_transformers_makes(tmp_path):
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    backend = trained_sentencepiece()
    vocab = backend.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    scores = {piece: float(-i) for i, piece in enumerate(pieces)}
    path = write_gguf(
        tmp_path / "trained.gguf",
        backend,
        "llama",
        scores=list(scores.values()),
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = json.loads(read_gguf_tokenizer(path).backend.to_str())["model"]
    expected = convert.generate_merges(vocab, scores, skip_tokens=("<unk>", "<s>", "</s>"))
    assert len(expected) > 300
    assert [tuple(merge) for merge in model["merges"]] == expected


def trained_sentencepiece() -> Backend:
    rng = random.Random(7)
    words = ["".join(rng.choices("aabcde", k=rng.randint(1, 8))) for _ in range(400)]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.train_from_iterator(
        [" ".join(rng.choices(words, k=12)) for _ in range(300)],
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    return backend


# --- what cannot be read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "jais-2"}, "pre-tokenizer 'jais-2'.*smollm.*--tokenizer"),
        ({"bos_token_id": 9999}, "bos_token_id 9999 in a vocabulary of 265 tokens"),
        ({"pre": 3}, "no text in its field tokenizer.ggml.pre"),
    ],
)
def test_unreadable_fields_name_the_way_out(byte_level_file, fields, message):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(byte_level_file(**fields))


def test_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "t5.gguf", tiny_tokenizers.byte_level(), "t5")
    with pytest.raises(ConfigError, match=r"kind 't5'; known are gpt2 and llama.*--tokenizer"):
        Tokenizer.from_folder(path)


@pytest.mark.parametrize("scores", [[0.0], ["x"]])
def test_scores_that_do_not_fit_the_vocabulary_are_refused(tmp_path, scores):
    path = write_gguf(
        tmp_path / "bad.gguf", tiny_tokenizers.sentencepiece_style(), "llama", scores=scores
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_folder(path)


def test_merge_of_a_token_that_is_not_there_is_refused(tmp_path):
    backend = tiny_tokenizers.byte_level()
    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(backend.get_vocab(), key=backend.token_to_id))
    writer.add_token_merges(["h nothere"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"unusable vocabulary.*--tokenizer"):
        Tokenizer.from_folder(path)
