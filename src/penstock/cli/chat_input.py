"""Turns typed in a terminal: several lines, a history that is kept, names completed with Tab.

Enter ends a turn. A pasted block is part of it, with its lines; Alt+Enter (or Esc, then Enter)
begins a new line, and so does Enter between a line that begins with three quotes and one that ends
with them.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, NestedCompleter, PathCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from penstock.cli.chat_files import history_file

_QUOTES = '"""'
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_PROMPT, _NEXT_LINE = "> ", ". "


class TurnReader:
    """Asks for one turn after the other."""

    def __init__(self, commands: Sequence[str], of_files: Sequence[str]) -> None:
        """`commands` may be completed; behind those of `of_files` stands a path."""
        path = history_file()
        history: History = InMemoryHistory() if path is None else FileHistory(str(path))
        # Responses alone go to a stdout that is a file or a pipe.
        self._to = sys.stdout if sys.stdout.isatty() else sys.stderr
        self._session: PromptSession[str] = PromptSession(
            history=history,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=_NEXT_LINE,
            completer=_completer(commands, of_files),
            complete_while_typing=False,
            output=create_output(self._to),
        )

    def read(self) -> str:
        """EOFError for Ctrl+D, KeyboardInterrupt for Ctrl+C."""
        return unquoted(self._session.prompt(_PROMPT))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While a response is written: keys are kept for the next turn, and not shown in between.

        Ctrl+C is still a signal, and what is pasted meanwhile is still one turn.
        """
        import termios

        file = sys.stdin.fileno()
        before = termios.tcgetattr(file)
        quiet = termios.tcgetattr(file)
        quiet[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(file, termios.TCSANOW, quiet)
        self._tell(_PASTE_ON)
        try:
            yield
        finally:
            self._tell(_PASTE_OFF)
            termios.tcsetattr(file, termios.TCSANOW, before)

    def _tell(self, code: str) -> None:
        if self._to.isatty():
            self._to.write(code)
            self._to.flush()


def unquoted(text: str) -> str:
    """A block without its quotes; anything else without the space around it."""
    text = text.strip()
    if not text.startswith(_QUOTES):
        return text
    return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")


def is_open(text: str) -> bool:
    """Whether a block was begun and not ended."""
    text = text.strip()
    is_block = text.startswith(_QUOTES)
    return is_block and not (len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state:
            buffer.complete_state = None
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _completer(commands: Sequence[str], of_files: Sequence[str]) -> Completer:
    paths = PathCompleter(expanduser=True)
    return NestedCompleter.from_nested_dict(
        {name: paths if name in of_files else None for name in commands}
    )
