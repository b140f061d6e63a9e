"""The terminal chat against a small server of its own on loopback."""

import io
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace

import pytest

from penstock.cli import chat


def arguments(url: str, **changes) -> Namespace:
    values = dict.fromkeys(("model", "system", "temperature", "max_tokens", "api_key"))
    return Namespace(url=url, **(values | changes))


def pipe(monkeypatch, lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))


def test_piped_lines_are_turns_of_one_conversation(server, monkeypatch, capsys):
    pipe(monkeypatch, "hello there\n\nand you\n")
    assert chat.run(arguments(server.url)) == 0
    out, err = capsys.readouterr()
    assert out == "echo: hello there\necho: and you\n"
    assert err.count("tokens") >= 2
    assert server.bodies[0]["model"] == "first-model"
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "echo: hello there"},
        {"role": "user", "content": "and you"},
    ]


def test_options_reach_the_server_and_unset_ones_do_not(server, monkeypatch):
    pipe(monkeypatch, "hi\n")
    given = {"model": "m", "system": "be brief", "temperature": 0.0, "api_key": "secret"}
    chat.run(arguments(server.url + "/v1/", **given))
    body = server.bodies[0]
    assert body["model"] == "m"
    assert body["temperature"] == 0.0
    assert "max_tokens" not in body
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert server.keys == []  # a named model needs no look-up


def test_the_key_is_sent(server, monkeypatch):
    pipe(monkeypatch, "")
    chat.run(arguments(server.url, api_key="secret"))
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("variables", "flag", "sent"),
    [
        ({}, None, None),
        ({"OPENAI_API_KEY": "b"}, None, "Bearer b"),
        ({"OPENAI_API_KEY": "b", "PENSTOCK_API_KEY": "a"}, None, "Bearer a"),
        ({"OPENAI_API_KEY": "b", "PENSTOCK_API_KEY": "a"}, "c", "Bearer c"),
    ],
)
def test_without_a_flag_the_key_is_that_of_the_environment(
    server, monkeypatch, variables, flag, sent
):
    for name in ("OPENAI_API_KEY", "PENSTOCK_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pipe(monkeypatch, "")
    chat.run(arguments(server.url, api_key=flag))
    assert server.keys == [sent]


def test_a_saved_conversation_goes_on_after_a_pipe(server, monkeypatch, tmp_path, capsys):
    path = tmp_path / "talk.json"
    pipe(monkeypatch, f"/system be brief\none\n/save {path}\n/bye\nnever\n")
    assert chat.run(arguments(server.url)) == 0
    pipe(monkeypatch, f"/load {path}\ntwo\n/reset\nthree\n/load\n/load {tmp_path / 'none'}\n")
    assert chat.run(arguments(server.url)) == 0
    sent = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert sent[1:] == [["be brief", "one", "echo: one", "two"], ["be brief", "three"]]
    err = capsys.readouterr().err
    assert "/load FILE: which file?" in err
    assert "error: cannot read" in err


def test_commands(server, monkeypatch, capsys):
    pipe(monkeypatch, "one\n/reset\ntwo\n/system talk\nthree\n/nonsense\n/help\n/quit\nfour\n")
    assert chat.run(arguments(server.url)) == 0
    sent = [[m["content"] for m in body["messages"]] for body in server.bodies]
    assert sent == [["one"], ["two"], ["talk", "three"]]
    err = capsys.readouterr().err
    assert "unknown command '/nonsense'" in err
    assert "/reset" in err


def test_reset_and_system_say_what_they_did(server, monkeypatch, capsys):
    pipe(monkeypatch, "/reset\n/system be brief\n/reset\n/system\n")
    assert chat.run(arguments(server.url)) == 0
    assert capsys.readouterr().err.splitlines() == [
        "the conversation is forgotten",
        "the system message is now 'be brief'; the conversation is forgotten",
        "the conversation is forgotten; the system message stays",
        "no system message; the conversation is forgotten",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "expected"),
    [(Terminal(), "\x1b[2mso I\x1b[22m\n\nYes, no"), (io.StringIO(), "so I\n\nYes, no")],
)
def test_thoughts_are_dim_on_a_terminal_and_not_kept(server, out, expected):
    deltas = [
        *({"role": "assistant", "content": ""}, {"reasoning_content": "so "}),
        *({"reasoning_content": "I"}, {"content": "Yes"}, {"content": ", no"}),
    ]
    server.events = [f"data: {json.dumps({'choices': [{'delta': one}]})}\n\n" for one in deltas]
    conversation = chat.Conversation(chat.Server(server.url, None), "m", None)
    conversation.turn("hi", out)
    assert out.getvalue() == expected
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes, no"}


def test_the_terminal_is_normal_again_when_only_thoughts_came(server):
    delta = {"reasoning_content": "so"}
    server.events = [f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n"]
    out = Terminal()
    chat.Conversation(chat.Server(server.url, None), "m", None).turn("hi", out)
    assert out.getvalue() == "\x1b[2mso\x1b[22m"


def test_no_server_is_said_plainly():
    with pytest.raises(chat.ChatError, match=r"no server at http://127.0.0.1:9; start one with"):
        chat.run(arguments("127.0.0.1:9"))


def test_a_refusal_shows_what_the_server_said(server, monkeypatch):
    server.refusal = 429, {"error": {"message": "too many requests", "code": "x"}}
    pipe(monkeypatch, "hi\n")
    with pytest.raises(chat.ChatError, match=r"429.*too many requests"):
        chat.run(arguments(server.url))


def test_an_error_inside_the_stream_ends_the_turn(server, monkeypatch):
    server.events = ['data: {"choices": []}\n\n', 'data: {"error": {"message": "boom"}}\n\n']
    pipe(monkeypatch, "hi\n")
    with pytest.raises(chat.ChatError, match="boom"):
        chat.run(arguments(server.url))


def test_a_stream_of_rubbish_is_an_error_and_comments_are_not(server, monkeypatch):
    server.events = [": keep-alive\n\n", "data: [1]\n\n"]
    pipe(monkeypatch, "hi\n")
    with pytest.raises(chat.ChatError, match="no chunk"):
        chat.run(arguments(server.url))


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(server):
    server.endless = True

    class Out(io.StringIO):
        def flush(self) -> None:
            if len(self.getvalue()) > 100:
                raise KeyboardInterrupt

    conversation = chat.Conversation(chat.Server(server.url, None), "m", None)
    assert "stopped" in conversation.turn("go", Out())
    assert server.hung_up.wait(240), "the server must notice that nobody listens"
    server.endless = False
    out = io.StringIO()
    conversation.turn("again", out)
    assert out.getvalue() == "echo: again"
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo terminal")
def test_in_a_terminal_ctrl_c_stops_the_answer_and_eof_leaves(server):
    """The real program in a pseudo terminal, its keys pressed by us."""
    server.endless = True
    parent, child = os.openpty()
    code = (
        "import sys, argparse, signal; from penstock.cli import chat;"
        # A test run in the background of a shell inherits a Ctrl+C that is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        f"args = argparse.Namespace(url={server.url!r}, model=None, system=None,"
        " temperature=None, max_tokens=None, api_key=None);"
        "status = chat.run(args); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(child)
    try:
        os.write(parent, b"talk\n")
        assert server.streaming.wait(240)
        process.send_signal(signal.SIGINT)
        assert server.hung_up.wait(240)
        server.endless = False
        os.write(parent, b"bye\n\x04")
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        os.close(parent)
    assert process.returncode == 0, err.decode()
    assert b"stopped" in out
    assert b"echo: bye" in out
