"""`penstock eval`: score a model on a task, through an engine of its own or over HTTP."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from penstock import log
from penstock.cli.api_key import api_key_of
from penstock.cli.eval_flags import LM_EVAL
from penstock.cli.tokenizer import load_tokenizer
from penstock.config.load import load_config
from penstock.errors import ConfigError
from penstock.eval import report, table
from penstock.eval.ask import Endpoint, Engine
from penstock.eval.published import Published
from penstock.eval.published_run import Results, RunOptions, prepare
from penstock.eval.task import Task, first_of_each_group
from penstock.eval.tasks import TASKS
from penstock.hub.folder import local_folder


def run(args: argparse.Namespace) -> int:
    log.setup("eval", "WARNING")  # a line per HTTP request would bury the result
    if args.model is None and args.url is None:
        raise ConfigError("name a MODEL to start, or a running server with --url")
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: its folder is not there; make it first")
    if args.task.startswith(LM_EVAL):
        return _run_lm_eval(args)
    task = TASKS[args.task]
    return _run_own(args, task) if isinstance(task, Task) else _run_published(args, task)


def _run_own(args: argparse.Namespace, task: Task) -> int:
    path = args.data or _beside_model(task, args.model)
    examples = first_of_each_group(task.read(path), args.limit)
    with _asker(args) as (name, asker):
        responses = asker.ask(examples, args.max_tokens or task.max_tokens)
    return _show_verdicts(args, name, report.judge(task, examples, responses))


def _run_published(args: argparse.Namespace, task: Published) -> int:
    if args.data is None:
        raise ConfigError(f"--data is missing: a file, or a folder with {task.file_names[0]}")
    options = RunOptions(
        data=args.data,
        shots=args.shots,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        max_tokens=args.max_tokens,
        max_input_len=args.max_input_len,
        apply_chat_template=args.apply_chat_template,
        system_prompt=args.system_prompt,
    )
    ask = prepare(args.task, task, options)
    with _asker(args) as (name, asker):
        given = args.tokenizer or args.model or name
        results = ask(asker, lambda: load_tokenizer(given).encode)
    return show_results(args.task, name, results, args.output, args.min_score)


def _run_lm_eval(args: argparse.Namespace) -> int:
    try:
        from penstock.eval.lm_eval_tasks import LmEvalOptions, run_lm_eval
    except ImportError as error:
        raise ConfigError(f"{args.task} needs lm-eval ({error}): pip install lm_eval") from None
    if args.data is not None and not args.data.is_dir():
        raise ConfigError(f"--data {args.data}: no such folder")
    options = LmEvalOptions(
        include_path=args.data,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        max_tokens=args.max_tokens,
        max_input_len=args.max_input_len,
        apply_chat_template=args.apply_chat_template,
        system_prompt=args.system_prompt,
    )
    tasks = args.task.removeprefix(LM_EVAL).split(",")
    with _asker(args) as (name, asker):
        given = args.tokenizer or args.model or name
        results = run_lm_eval(tasks, options, asker, lambda: load_tokenizer(given))
    return show_results(args.task, name, results, args.output, args.min_score)


def show_results(
    task: str, model: str, results: Results, output: Path | None, min_score: float
) -> int:
    print(table.as_text(results.scores))
    if output is not None:
        record = {
            "task": task,
            "model": model,
            "results": [dataclasses.asdict(score) for score in results.scores],
            "examples": list(results.examples),
        }
        output.write_text(json.dumps(record, indent=1, default=str))
    return 0 if results.scores[0].value >= min_score else 1


@contextlib.contextmanager
def _asker(args: argparse.Namespace) -> Iterator[tuple[str, Engine | Endpoint]]:
    """A running server where one is named, else an engine of our own; and the model's name."""
    if args.url is not None:
        endpoint = Endpoint(args.url, args.served_model, api_key_of(args.api_key), args.concurrency)
        yield endpoint.model, endpoint
        return
    with Engine(load_config({"model": args.model}, args.config, args.set)) as engine:
        yield args.model, engine


def _show_verdicts(args: argparse.Namespace, name: str, verdicts: list[report.Verdict]) -> int:
    console = Console()
    console.print(report.as_table(f"{args.task}: {name}", verdicts))
    if shown := report.failures(verdicts, args.show):
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report.as_json(args.task, name, verdicts), indent=1))
    return 0 if report.score(verdicts).share >= args.min_score else 1


def _beside_model(task: Task, model: str | None) -> Path:
    if model is None:
        raise ConfigError("--data FILE is missing: with --url alone there is no folder to look in")
    found = local_folder(model, weights=False)
    path = (found if found.is_dir() else found.parent) / task.file_name
    if not path.is_file():
        raise ConfigError(f"'{model}' has no {task.file_name} beside it; name one with --data FILE")
    return path
