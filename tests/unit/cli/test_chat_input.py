"""Turns of the chat: blocks in quotes, words at the terminal's edge, files that are kept."""

import io
import json
import os
import stat

import pytest
from prompt_toolkit.history import FileHistory

from penstock.cli import chat_files, wrap
from penstock.cli.chat_input import is_open, unquoted
from penstock.errors import ConfigError


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("typed", "is_waiting", "turn"),
    [
        ("hello", False, "hello"),
        ("two\nlines\n", False, "two\nlines"),
        ('"""', True, None),
        ('"""one', True, None),
        ('"""\none\n\n  two\n"""', False, "one\n\n  two"),
        ('"""one"""', False, "one"),
        ('say """x""" twice', False, 'say """x""" twice'),
        ('"""' * 2, False, ""),
    ],
)
def test_a_block_lasts_from_quotes_to_quotes(typed, is_waiting, turn):
    assert is_open(typed) is is_waiting
    if not is_waiting:
        assert unquoted(typed) == turn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return -1


def shown(text: str, width: int, monkeypatch, piece: int = 3) -> str:
    monkeypatch.setattr("os.get_terminal_size", lambda file: os.terminal_size((width, 24)))
    out = Terminal()
    writer = wrap.writer(out)
    for start in range(0, len(text), piece):
        writer.write(text[start : start + piece])
    writer.end()
    return out.getvalue()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100])
def test_lines_end_between_words_however_the_text_arrives(piece, monkeypatch):
    text = "The quick brown fox jumps over the lazy dog.\n\n  indented line of many words here"
    lines = shown(text, 16, monkeypatch, piece).split("\n")
    assert lines == [
        *("The quick brown", "fox jumps over", "the lazy dog.", ""),
        *("  indented line", "of many words", "here"),
    ]


def test_a_line_may_fill_the_terminal_and_a_longer_word_goes_on_in_the_next_line(monkeypatch):
    assert shown("abcd efgh ij", 9, monkeypatch) == "abcd efgh\nij"
    assert shown("ab " + "x" * 12 + " yz", 9, monkeypatch) == "ab\n" + "x" * 12 + " yz"


def test_wide_characters_count_two_and_need_no_space_between(monkeypatch):
    assert shown("你好世界你好", 8, monkeypatch) == "你好世界\n你好"


def test_an_answer_cannot_steer_the_terminal(monkeypatch):
    assert shown("a\x1b[2Jb\x07\r\x9bc", 20, monkeypatch) == "a[2Jbc"


def test_a_file_gets_the_text_as_it_is():
    out = io.StringIO()
    writer = wrap.writer(out)
    writer.escape("\x1b[2m")
    writer.write("x " * 200)
    writer.end()
    assert out.getvalue() == "x " * 200


def test_the_history_is_private_even_where_it_was_not(tmp_path):
    path = chat_files.history_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert stat.S_IMODE(chat_files.history_file().stat().st_mode) == 0o600


def test_a_long_history_loses_its_oldest_entries(tmp_path):
    path = chat_files.history_file()
    history = FileHistory(str(path))
    for number in range(1500):
        history.store_string(f"{number} " + "x" * 1000)
    assert path.stat().st_size > 2**20
    entries = list(FileHistory(str(chat_files.history_file())).load_history_strings())
    assert entries[0].startswith("1499 ")  # the newest first
    assert 400 < len(entries) < 600
    assert all(entry.endswith("x" * 1000) for entry in entries)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_where_no_history_can_be_kept_the_chat_goes_on_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    assert chat_files.history_file() is None


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "grüß dich"}]


def test_a_saved_conversation_is_loaded_again_and_private(tmp_path):
    path = tmp_path / "talk.json"
    chat_files.save(path, "m", MESSAGES)
    chat_files.save(path, "m", MESSAGES)  # over itself
    assert chat_files.load(path) == MESSAGES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["model"] == "m"


def test_nothing_but_a_conversation_is_written_over(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(ConfigError, match="no saved conversation; it is left"):
        chat_files.save(path, "m", MESSAGES)
    assert path.read_text() == "years of work"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON; /save writes"),
        ("[1]", "holds no conversation"),
        ('[{"role": "tool", "content": "x"}]', "holds no conversation"),
        ('{"messages": [{"role": "user"}]}', "holds no conversation"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_conversation_is_not_loaded(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        chat_files.load(path)
