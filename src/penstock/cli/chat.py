"""`penstock chat`: talk to a running server from a terminal, over HTTP alone.

Input that is not a terminal is read one turn per line, so a conversation can be piped in.
"""

import argparse
import sys
from pathlib import Path

from penstock.cli import chat_files
from penstock.cli.api_key import api_key_of
from penstock.cli.chat_client import ChatError, Conversation, Server
from penstock.cli.wrap import writer
from penstock.errors import ConfigError, did_you_mean

_COMMANDS = {
    "/help": ("", "this text"),
    "/reset": ("", "forget the conversation"),
    "/system": ("TEXT", "set the system message (or none) and forget the conversation"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "go on with the conversation of a file"),
    "/bye": ("", "leave (so do /quit, exit, quit and Ctrl+D)"),
}
_KEYS = {
    "Enter": "send; a pasted block is one turn",
    "Alt+Enter": 'new line, as Enter between """ and """',
    "Up, Ctrl+R": "what you typed before, also on other days",
    "Ctrl+C": "stop the response that is being written",
}
_LEAVE = ("/bye", "/quit", "/exit")
_LEAVE_WORDS = ("exit", "quit")  # as other programs take them
_OF_FILES = ("/save", "/load")


def run(args: argparse.Namespace) -> int:
    server = Server(args.url, api_key_of(args.api_key))
    options = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    model = args.model or server.first_model()
    conversation = Conversation(server, model, args.system, **options)
    if sys.stdin.isatty():
        return _interactive(conversation, f"{model} at {server.url}; /help lists the commands")
    return _piped(conversation)


def _interactive(conversation: Conversation, greeting: str) -> int:
    from penstock.cli.chat_input import TurnReader

    reader = TurnReader(tuple(_COMMANDS), _OF_FILES)
    welcome = writer(sys.stdout)
    welcome.write(f"{greeting}\n")
    while True:
        print(flush=True)
        try:
            turn = reader.read()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print("(/bye leaves)")
            continue
        if turn in _LEAVE_WORDS:
            print("(/bye and Ctrl+D leave, too)")
            return 0
        if turn.startswith("/") and "\n" not in turn:
            if not _command(conversation, turn):
                return 0
        elif turn:
            try:
                with reader.held():
                    print(f"\n[{conversation.turn(turn, sys.stdout)}]", flush=True)
            except ChatError as error:
                print(f"\nerror: {error}", file=sys.stderr)


def _piped(conversation: Conversation) -> int:
    """Responses go to stdout, everything about them to stderr; the first failure ends it."""
    for line in sys.stdin:
        line = line.strip()
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
        elif line:
            summary = conversation.turn(line, sys.stdout)
            print(flush=True)
            print(f"[{summary}]", file=sys.stderr)
    return 0


def _command(conversation: Conversation, line: str) -> bool:
    """Whether the chat goes on."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/bye" | "/quit" | "/exit":
            return False
        case "/reset":
            conversation.reset()
            kept = "; the system message stays" if conversation.system else ""
            print(f"the conversation is forgotten{kept}", file=sys.stderr)
        case "/system":
            conversation.system = rest or None
            conversation.reset()
            now = f"the system message is now '{rest}'" if rest else "no system message"
            print(f"{now}; the conversation is forgotten", file=sys.stderr)
        case "/save" | "/load":
            _with_file(conversation, name, rest)
        case "/help":
            print(_help(), file=sys.stderr)
        case _:
            hint = did_you_mean(name, (*_COMMANDS, *_LEAVE))
            print(f"unknown command '{name}'{hint}; /help lists them", file=sys.stderr)
    return True


def _with_file(conversation: Conversation, name: str, file: str) -> None:
    if not file:
        print(f"{name} FILE: which file?", file=sys.stderr)
        return
    path = Path(file).expanduser()
    try:
        if name == "/save":
            chat_files.save(path, conversation.model, conversation.messages)
        else:
            conversation.take_over(chat_files.load(path))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    done = "saved to" if name == "/save" else "loaded from"
    print(f"{len(conversation.messages)} messages {done} {path}", file=sys.stderr)


def _help() -> str:
    rows = [(f"{name} {takes}".strip(), text) for name, (takes, text) in _COMMANDS.items()]
    return "\n".join(f"{what:<14} {text}" for what, text in (*rows, *_KEYS.items()))
