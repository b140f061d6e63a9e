"""Text that arrives in pieces -> lines that end between words at the edge of a terminal.

A word is held back until it is known to be complete, so none is ever broken or written twice.
"""

import os
import unicodedata
from typing import TextIO

_TAB = 8
_DEFAULT_WIDTH = 80


class Plain:
    """Everything as it comes: for files and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        self._out.write(text)

    def escape(self, code: str) -> None:
        """A terminal has uses for colors, a file has not."""

    def flush(self) -> None:
        self._out.flush()

    def end(self) -> None:
        """Nothing is held back."""


class Wrapped:
    """Lines of at most the terminal's width, which may change while it writes.

    Control characters are left out: what a model says must not steer the terminal.
    """

    def __init__(self, out: TextIO) -> None:
        from prompt_toolkit.utils import get_cwidth

        self._cells = get_cwidth
        self._out = out
        self._column = 0
        self._gap = ""  # spaces since the last word: written before the next one, if it fits
        self._word = ""
        self._is_long = False  # the word is wider than the terminal and partly written

    def write(self, text: str) -> None:
        width = self._width()
        for char in text:
            if char == "\n":
                self._end_word(width)
                self._out.write("\n")
                self._column, self._gap = 0, ""
            elif char in " \t":
                self._end_word(width)
                self._gap += " " * (_TAB if char == "\t" else 1)
            elif unicodedata.category(char) == "Cc":
                continue
            elif self._cells(char) > 1:  # Chinese and the like: a line may end after any of them
                self._end_word(width)
                self._word = char
                self._put_word(width)
            else:
                self._word += char
                if self._is_long or self._cells(self._word) >= width:
                    self._put_word(width)
                    self._is_long = True

    def escape(self, code: str) -> None:
        """Written between words; takes no room."""
        self._put_word(self._width())
        self._out.write(self._gap + code)
        self._column, self._gap = self._column + len(self._gap), ""

    def flush(self) -> None:
        """Shows what can be shown: the last word may go on."""
        self._out.flush()

    def end(self) -> None:
        self._put_word(self._width())

    def _width(self) -> int:
        """Of the terminal as it is now; COLUMNS may be that of another one."""
        try:
            return os.get_terminal_size(self._out.fileno()).columns or _DEFAULT_WIDTH
        except OSError:
            return _DEFAULT_WIDTH

    def _end_word(self, width: int) -> None:
        self._put_word(width)
        self._is_long = False

    def _put_word(self, width: int) -> None:
        if not self._word:
            return
        cells = self._cells(self._word)
        is_over = self._column + len(self._gap) + cells > width
        # The terminal itself breaks what is wider than it, so that an address can still be copied.
        if self._column and is_over and not self._is_long:
            self._out.write("\n")
            self._column, self._gap = 0, ""
        self._out.write(self._gap + self._word)
        self._column = (self._column + len(self._gap) + cells - 1) % width + 1
        self._gap = self._word = ""


def writer(out: TextIO) -> Plain | Wrapped:
    return (Wrapped if out.isatty() else Plain)(out)
