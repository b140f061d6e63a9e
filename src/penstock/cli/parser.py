"""argparse as this command wants it: mistakes are errors of ours, help is short and has defaults.

Flags that are there for compatibility alone, and do nothing, are hidden: `--help_all` lists them.
"""

import argparse
import re
from typing import Any, NoReturn

from penstock.errors import ConfigError, did_you_mean

_MAX_IN_USAGE = 8  # flags; of more the usage line would be a page
_CHOICE = re.compile(r"argument (.*): invalid choice: '(.*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        ours: dict[str, Any] = {"formatter_class": _Formatter, "allow_abbrev": False}
        super().__init__(**(ours | options))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{_with_nearest(message)} (see {self.prog} --help)")

    @property
    def flag_names(self) -> set[str]:
        return set(self._option_string_actions)

    def format_help(self) -> str:
        flags = [action for action in self._actions if action.option_strings]
        if self.usage is None and len(flags) > _MAX_IN_USAGE:
            self.usage = " ".join(["%(prog)s [flags]", *filter(None, map(_needed, self._actions))])
        return super().format_help()


def add_help_all(parser: argparse.ArgumentParser) -> None:
    """For a parser that has hidden flags."""
    text = "also list the flags that do nothing here and are taken or refused for compatibility"
    parser.add_argument("--help_all", action=_HelpAll, nargs=0, help=text)


def hide(action: argparse.Action, text: str) -> None:
    """Leave a flag out of `--help`; `--help_all` says `text` of it."""
    action.help = argparse.SUPPRESS
    action.hidden_help = text  # type: ignore[attr-defined]


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            action.help = getattr(action, "hidden_help", action.help)
        parser.print_help()
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        """With the default, unless there is none or the text names it."""
        text = action.help or ""
        is_told = "default" in text or action.nargs == 0 or not action.option_strings
        if is_told or action.default in (None, argparse.SUPPRESS, "", []):
            return text
        return f"{text} (default: %(default)s)"


def _needed(action: argparse.Action) -> str:
    """How the usage line shows it, if it must be given or has no dashes."""
    name = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return f"[{name}]" if action.nargs == "?" else name
    return f"{action.option_strings[-1]} {name}" if action.required else ""


def _with_nearest(message: str) -> str:
    """`invalid choice` with the nearest one where one is near, else with all."""
    if (found := _CHOICE.fullmatch(message)) is None:
        return message
    where, given, choices = found.groups()
    known = re.findall(r"[\w:./-]+", choices)
    hint = did_you_mean(given, known) or f"; there are {', '.join(known)}"
    return f"argument {where}: invalid choice: '{given}'{hint}"
