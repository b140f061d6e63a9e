"""The flags of `penstock batch`. Light: what the command needs is imported when it runs."""

import argparse
from pathlib import Path

from penstock.cli.api_key import HELP as API_KEY_HELP


def add_batch_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help="model to start and ask")
    command.add_argument(
        "-i",
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSON lines with custom_id, method, url and body, as OpenAI's batches have them",
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="results, a line each as they come; requests that it has already are not sent again",
    )
    command.add_argument(
        "--errors",
        type=Path,
        metavar="FILE",
        help="requests that failed, tried again next time; default: OUTPUT with .errors before "
        "its ending",
    )
    command.add_argument(
        "--concurrency",
        type=_positive,
        metavar="N",
        help="requests at once; default: twice the engine's max_batch_size, 32 over HTTP",
    )
    engine = command.add_argument_group("MODEL")
    engine.add_argument("--config", metavar="FILE", help="YAML file with fields of docs/config.md")
    engine.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set any field"
    )
    server = command.add_argument_group("a running server instead")
    server.add_argument("--base_url", "--url", help="its address, such as http://localhost:8000")
    server.add_argument("--api_key", help=API_KEY_HELP)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value
