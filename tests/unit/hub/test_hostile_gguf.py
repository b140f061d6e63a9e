"""Heads of GGUF files that no program writes: refused in words that name the file, and soon."""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.hub.gguf_file import GgufFile
from penstock.models.gguf_config import config_of
from penstock.models.spec import parse_model_spec
from penstock.text.tokenizer import Tokenizer

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def array(kind: int, *items: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def number(value: int) -> bytes:
    return struct.pack("<I", value)


LLAMA: dict[str, tuple[int, bytes]] = {
    "general.architecture": (STRING, text("llama")),
    "general.alignment": (UINT32, number(32)),
    "llama.block_count": (UINT32, number(2)),
    "llama.embedding_length": (UINT32, number(64)),
    "llama.feed_forward_length": (UINT32, number(128)),
    "llama.attention.head_count": (UINT32, number(4)),
    "llama.attention.head_count_kv": (UINT32, number(2)),
    "llama.context_length": (UINT32, number(128)),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, struct.pack("<f", 1e-5)),
    "llama.rope.freq_base": (FLOAT32, struct.pack("<f", 1e4)),
    "llama.rope.scaling.type": (STRING, text("linear")),
    "llama.rope.scaling.factor": (FLOAT32, struct.pack("<f", 2.0)),
    "llama.expert_count": (UINT32, number(0)),
    "tokenizer.ggml.model": (STRING, text("gpt2")),
    "tokenizer.ggml.pre": (STRING, text("smollm")),
    "tokenizer.ggml.tokens": (ARRAY, array(STRING, text("a"), text("b"), text("ab"))),
    "tokenizer.ggml.merges": (ARRAY, array(STRING, text("a b"))),
    "tokenizer.ggml.eos_token_id": (UINT32, number(1)),
    "tokenizer.ggml.bos_token_id": (UINT32, number(0)),
}
OTHERS = [
    (UINT32, number(0)),
    (UINT32, number(3)),
    (UINT32, number(2**32 - 1)),
    (UINT64, struct.pack("<Q", 2**64 - 1)),
    (INT32, struct.pack("<i", -1)),
    (FLOAT32, struct.pack("<f", float("nan"))),
    (FLOAT32, struct.pack("<f", 1e38)),
    (BOOL, b"\1"),
    (STRING, text("")),
    (STRING, text("words")),
    (ARRAY, array(UINT32)),
    (ARRAY, array(UINT32, number(1), number(2))),
    (ARRAY, array(STRING, text("a"))),
    (ARRAY, array(ARRAY, array(UINT32, number(1)))),
]


def write(path: Path, fields: dict[str, tuple[int, bytes]], tensors: bytes = b"") -> Path:
    entries = [text(name) + number(kind) + value for name, (kind, value) in fields.items()]
    head = b"GGUF" + struct.pack("<IQQ", 3, 1 if tensors else 0, len(entries))
    path.write_bytes(head + b"".join(entries) + tensors + b"\0" * 64)
    return path


def read(path: Path) -> None:
    """As a start does, up to the first tensor; what is wrong is said in words."""
    for act in (parse_model_spec, Tokenizer.from_folder):
        try:
            act(path)
        except ConfigError as refused:
            assert str(path) in str(refused) or "tensor" in str(refused)


def test_the_file_itself_is_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", LLAMA)
    assert parse_model_spec(path).num_layers == 2
    assert Tokenizer.from_folder(path).vocab_size == 3


@pytest.mark.parametrize("name", LLAMA)
def test_any_field_of_another_kind_is_read_or_refused_in_words(tmp_path: Path, name: str) -> None:
    for other in OTHERS:
        read(write(tmp_path / "m.gguf", LLAMA | {name: other}))
    read(write(tmp_path / "m.gguf", {key: LLAMA[key] for key in LLAMA if key != name}))


@pytest.mark.parametrize("alignment", [(UINT32, number(n)) for n in (0, 1, 3, 12)] + OTHERS[-3:])
def test_an_odd_alignment_is_refused(tmp_path: Path, alignment: tuple[int, bytes]) -> None:
    path = write(tmp_path / "m.gguf", LLAMA | {"general.alignment": alignment})
    with pytest.raises(ConfigError, match=r"m\.gguf' .*general\.alignment is .* no multiple of 8"):
        GgufFile(path)


def test_arrays_in_arrays_end_somewhere(tmp_path: Path) -> None:
    deep = array(UINT32, number(1))
    for _ in range(8):
        deep = array(ARRAY, deep)
    deeper = struct.pack("<IQ", ARRAY, 1) * 100_000 + array(UINT32)
    for value in (deep, deeper):
        with pytest.raises(ConfigError, match="arrays in arrays, more than 8 deep"):
            GgufFile(write(tmp_path / "m.gguf", LLAMA | {"x": (ARRAY, value)}))


def test_an_array_is_no_longer_than_any_vocabulary(tmp_path: Path) -> None:
    endless = struct.pack("<IQ", 0, 2**40)
    with pytest.raises(ConfigError, match="an array of 1099511627776 entries"):
        GgufFile(write(tmp_path / "m.gguf", {"x": (ARRAY, endless)}))


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    for act in (lambda: GgufFile(path), lambda: local_folder(str(path))):
        with pytest.raises(ConfigError, match=r"m\.gguf' is a pipe"):
            act()
    with pytest.raises(ConfigError, match=r"m\.gguf' is a pipe"):
        local_folder(str(tmp_path))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_file_with_bytes_changed_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", LLAMA)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    read(path)
    try:
        config_of(GgufFile(path))
    except ConfigError:
        pass
