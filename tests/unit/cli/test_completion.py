"""Completion of the command, asked in the shells themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import Screen

import penstock
from penstock.cli.completion import FILES, candidates
from penstock.cli.main import _parser


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache with one pulled model and one of the hub."""
    (tmp_path / "home" / "models" / "my-model").mkdir(parents=True)
    (tmp_path / "home" / "models" / ".unfinished").mkdir()
    (tmp_path / "hub" / "models--org--some-7b").mkdir(parents=True)
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def names(*words: str) -> list[str]:
    return [line.partition("\t")[0] for line in candidates(_parser(), words)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ser"], ["serve"]),
        (["bench", "comp"], ["compare"]),
        (["bench", "ch"], ["chat"]),
        (["bench", "chat", "--lengths", ""], [FILES]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["serve", "--max_b"], ["--max_batch_size"]),
        (["serve", "--max-b"], ["--max-batch-size"]),
        (["serve", "m", "--max_seq_len", "8", "--por"], ["--port"]),
        (["serve", "--gr"], []),  # it would be refused
        (["bench", "serve", "--backend", ""], ["openai", "openai-chat"]),
        (["bench", "serve", "--backend", "=", "openai-"], ["openai-chat"]),
        (["bench", "serve", "--backend", "="], ["openai", "openai-chat"]),
        (["bench", "serve", "--backend=openai-"], ["--backend=openai-chat"]),
        (["bench", "serve", "--model", ""], ["my-model", "smollm2", "tiny", "org/some-7b"]),
        (["serve", ""], ["my-model", "smollm2", "tiny", "org/some-7b", FILES]),
        (["serve", "--port", "1", "ti"], ["tiny", FILES]),
        (["serve", "tiny", ""], []),
        (["serve", "--config", ""], [FILES]),
        (["serve", "--port", ""], []),
        (["quantize", "m", "--calib", ""], [FILES]),
        (["models", "--delete", "o"], ["org/some-7b"]),
        (["nonsense", ""], []),
    ],
)
def test_what_can_stand_there(words, found):
    assert names(*words) == found


def test_every_command_and_every_shown_flag_is_offered():
    import argparse

    def walk(parser, words):
        flags = [name for name in names(*words, "-") if name.startswith("-")]
        assert set(flags) == {
            name
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        }
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                assert names(*words, "") == list(action.choices)
                for name, child in action.choices.items():
                    walk(child, [*words, name])

    walk(_parser(), [])


@pytest.fixture
def shell_path(tmp_path) -> str:
    """A PATH with `penstock` in it."""
    command = tmp_path / "bin" / "penstock"
    command.parent.mkdir()
    source = Path(penstock.__file__).parents[1]
    command.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={source} HF_HUB_CACHE={tmp_path / 'hub'}\n"
        f'exec {sys.executable} -m penstock "$@"\n'
    )
    command.chmod(0o755)
    return f"{command.parent}:{os.environ['PATH']}"


def ask(shell: str, script: str, path: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    environment = os.environ | {"PATH": path}
    done = subprocess.run(
        [shell, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("penstock ser", ["serve"]),
        ("penstock serve sm", ["smollm2"]),
        ("penstock serve --max-b", ["--max-batch-size"]),
        ("penstock bench serve --backend openai-", ["openai-chat"]),
        ("penstock pull org/", ["org/some-7b"]),
    ],
)
def test_bash(words, found, shell_path):
    script = (
        f'eval "$(penstock completion bash)"; COMP_WORDS=({words}); '
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); complete -p penstock >&2; "
        '_penstock penstock; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert ask("bash", script, shell_path) == found


def test_bash_offers_files_where_a_file_may_stand(shell_path, tmp_path):
    (tmp_path / "my config.yml").touch()
    script = (
        f'cd {tmp_path}; eval "$(penstock completion bash)"; '
        "COMP_WORDS=(penstock serve --config my); COMP_CWORD=3; "
        '_penstock penstock; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert ask("bash", script, shell_path) == ["my config.yml"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("penstock ser", "serve\tserve a model over HTTP"),
        ("penstock serve sm", "smollm2\tmodel"),
        ("penstock bench serve --backend openai-", "openai-chat"),
    ],
)
def test_fish(line, found, shell_path):
    script = f'penstock completion fish | source; complete -C "{line}"'
    assert found in ask("fish", script, shell_path)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.parametrize(
    ("command", "begin"),
    [
        (("bash", "--norc"), 'eval "$(penstock completion bash)"; PS1="ready$ "'),
        (
            ("zsh", "-f"),
            "autoload -U compinit; compinit -u -D; source <(penstock completion zsh); "
            "PS1='ready$ '",
        ),
    ],
    ids=["bash", "zsh"],
)
def test_tab_in_a_terminal(command, begin, shell_path, tmp_path):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    screen = Screen(tmp_path / "home")
    try:
        screen.open("env", f"PATH={shell_path}", *command)
        screen.keys(begin, "Enter")
        screen.wait_for("\nready$")
        screen.keys("penstock ser", "Tab")
        screen.wait_for("ready$ penstock serve")
        screen.keys("smol", "Tab")
        screen.wait_for("ready$ penstock serve smollm2")
        screen.keys("--max_b", "Tab")
        screen.wait_for("ready$ penstock serve smollm2 --max_batch_size")
    finally:
        screen.close()
