"""The chat in a real terminal: keys and pastes come from tmux, and the screen is read back."""

import shutil
import stat
import sys

import pytest
from terminal import Screen

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

PASTED = "def add(a, b):\n    return a + b\n\nWhat does this do?"


@pytest.fixture
def screen(tmp_path):
    made = Screen(tmp_path / "home")
    yield made
    made.close()


def start(screen: Screen, url: str) -> None:
    screen.open(sys.executable, "-m", "penstock", "chat", "--url", url)
    screen.wait_for("first-model at http://", "\n>")


def turns(server) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies]


def leave(screen: Screen) -> None:
    screen.keys("/bye", "Enter")
    screen.wait_for("ended with status 0")
    screen.close()


def test_a_pasted_block_is_one_turn_and_waits_for_enter(server, screen):
    start(screen, server.url)
    screen.paste(PASTED)
    screen.wait_for("return a + b", "What does this do?")
    assert server.bodies == []
    screen.keys("Enter")
    screen.wait_for("echo: def add", "tokens")
    assert turns(server) == [PASTED]
    assert "temperature" not in server.bodies[0]


def test_quotes_and_alt_enter_make_several_lines(server, screen):
    start(screen, server.url)
    for line in ('"""first', "", "third", '"""'):
        screen.keys(*filter(None, [line]), "Enter")
    screen.wait_for("echo: first third")
    screen.keys("above", "M-Enter", "middle", "Escape", "Enter", "below", "Enter")
    screen.wait_for("echo: above middle below")
    assert turns(server) == ["first\n\nthird", "above\nmiddle\nbelow"]


@pytest.mark.parametrize("word", ["exit", "quit"])
def test_words_that_leave_other_programs_leave_this_one_too(server, screen, word):
    start(screen, server.url)
    screen.keys(f"how do I {word}?", "Enter")
    screen.wait_for(f"echo: how do I {word}?")
    screen.keys(word, "Enter")
    screen.wait_for("(/bye and Ctrl+D leave, too)", "ended with status 0")
    assert len(server.bodies) == 1


def test_what_was_typed_is_there_after_a_restart_and_private(server, screen, tmp_path):
    start(screen, server.url)
    screen.paste("an older\nquestion")
    screen.keys("Enter")
    screen.wait_for("echo: an older question")
    leave(screen)
    start(screen, server.url)
    screen.keys("Up", "Up")
    screen.wait_for("> an older")
    screen.keys("Enter")
    screen.wait_for("echo: an older question")
    assert turns(server) == ["an older\nquestion"] * 2
    path = tmp_path / "home" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(server, screen):
    server.endless = True
    start(screen, server.url)
    screen.keys("talk", "Enter")
    screen.wait_for("echo: talk")
    screen.keys("C-c")
    assert server.hung_up.wait(240)
    screen.wait_for("stopped]")
    server.endless = False
    screen.keys("C-c")
    screen.wait_for("(/bye leaves)")
    screen.keys("again", "Enter")
    screen.wait_for("echo: again")
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["user", "assistant", "user"]
    leave(screen)


def test_what_is_typed_during_an_answer_is_the_next_turn(server, screen):
    server.endless = True
    start(screen, server.url)
    screen.keys("talk", "Enter")
    assert server.streaming.wait(240)
    screen.keys("meanwhile", "Enter")
    screen.paste("pasted\nmeanwhile")
    server.endless = False
    screen.wait_for("echo: meanwhile")
    screen.keys("Enter")
    screen.wait_for("echo: pasted meanwhile")
    assert turns(server) == ["talk", "meanwhile", "pasted\nmeanwhile"]


def test_words_are_not_broken_at_the_edge(server, screen):
    start(screen, server.url)
    words = [f"word{number:03}" for number in range(60)]
    screen.paste(" ".join(words))
    screen.keys("Enter")
    seen = screen.wait_for("tokens").partition("echo:")[2]
    assert [word for word in seen.split() if word.startswith("word")] == words


def test_commands_save_and_load_and_help(server, screen, tmp_path):
    start(screen, server.url)
    screen.keys("/system be brief", "Enter", "one", "Enter")
    screen.wait_for("echo: one")
    path = tmp_path / "talk.json"
    screen.keys(f"/save {path}", "Enter")
    screen.wait_for("3 messages saved to")
    screen.keys("/reset", "Enter", f"/load {path}", "Enter", "two", "Enter")
    screen.wait_for("3 messages loaded from", "echo: two")
    sent = [message["content"] for message in server.bodies[1]["messages"]]
    assert sent == ["be brief", "one", "echo: one", "two"]
    screen.keys("/hlep", "Enter", "/help", "Enter")
    screen.wait_for("did you mean '/help'?", "/load FILE", "Ctrl+C")
    leave(screen)
