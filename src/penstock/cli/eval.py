"""`penstock eval`: score a model on a task, through an engine of its own or over HTTP."""

import argparse
import json
from pathlib import Path

from rich.console import Console

from penstock import log
from penstock.config.load import load_config
from penstock.errors import ConfigError
from penstock.eval import report
from penstock.eval.ask import Endpoint, ask_engine
from penstock.eval.task import Example, Task
from penstock.eval.tasks import TASKS
from penstock.hub.folder import local_folder


def run(args: argparse.Namespace) -> int:
    log.setup("eval", "WARNING")  # a line per HTTP request would bury the result
    if args.model is None and args.url is None:
        raise ConfigError("name a MODEL to start, or a running server with --url")
    task = TASKS[args.task]
    examples = choose_examples(task, args.model, args.data, args.limit)
    max_tokens = args.max_tokens or task.max_tokens
    if args.url is None:
        name = args.model
        config = load_config({"model": args.model}, args.config, args.set)
        answers = ask_engine(config, examples, max_tokens)
    else:
        endpoint = Endpoint(args.url, args.served_model, args.api_key, args.concurrency)
        name = endpoint.model
        answers = endpoint.ask(examples, max_tokens)
    verdicts = report.judge(task, examples, answers)

    console = Console()
    console.print(report.as_table(f"{args.task}: {name}", verdicts))
    if shown := report.failures(verdicts, args.show):
        console.print(shown, markup=False, highlight=False, soft_wrap=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report.as_json(args.task, name, verdicts), indent=1))
    return 0 if report.score(verdicts).share >= args.min_score else 1


def choose_examples(
    task: Task, model: str | None, data: Path | None, limit: int | None
) -> list[Example]:
    """Those of `data`, else those in the model's folder; at most `limit` of each group."""
    path = data or _beside_model(task, model)
    taken: dict[str, int] = {}
    chosen = []
    for example in task.read(path):
        taken[example.group] = taken.get(example.group, 0) + 1
        if limit is None or taken[example.group] <= limit:
            chosen.append(example)
    return chosen


def _beside_model(task: Task, model: str | None) -> Path:
    if model is None:
        raise ConfigError("--data FILE is missing: with --url alone there is no folder to look in")
    found = local_folder(model, weights=False)
    path = (found if found.is_dir() else found.parent) / task.file_name
    if not path.is_file():
        raise ConfigError(f"'{model}' has no {task.file_name} beside it; name one with --data FILE")
    return path
