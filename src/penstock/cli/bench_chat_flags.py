"""The flags of `penstock bench chat`; where `bench serve` has the same one, with its name."""

import argparse
import math
from pathlib import Path

from penstock.cli.bench_flags import add_address_flags, count, natural, rate


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    _add_server(parser.add_argument_group("server"))
    _add_conversations(parser.add_argument_group("conversations"))
    _add_load(parser.add_argument_group("load"))
    group = parser.add_argument_group("results")
    group.add_argument("--result_json", type=Path, metavar="FILE", help="write the figures there")
    group.add_argument(
        "--no_reuse_check",
        action="store_true",
        help="do not warn of later turns without cached tokens",
    )


def _add_server(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        default="openai-chat",
        help="openai: /v1/completions, for a server without a chat template",
    )
    add_address_flags(group)
    group.add_argument("--model", help="name in requests; default: the first the server lists")


def _add_conversations(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="CSV or JSON lines with prompt_tokens and output_tokens of a turn, and its "
        "conversation if several belong together; default: log-normal fits of ShareGPT",
    )
    group.add_argument(
        "--turns", type=_turns, default="1-4", metavar="N-N", help="fewest and most, or one number"
    )
    group.add_argument(
        "--system_tokens", type=natural, default=256, help="of the system prompt that all share"
    )
    group.add_argument(
        "--max_user_tokens", type=count, default=1024, help="a longer user turn is cut"
    )
    group.add_argument(
        "--max_answer_tokens", type=count, default=1024, help="no longer answer is asked for"
    )
    group.add_argument(
        "--random_ids",
        action="store_true",
        help="token ids instead of words, exact in length, for dummy weights; needs "
        "--backend openai",
    )
    group.add_argument("--vocab_size", type=count, default=10_000, help="such ids are below it")
    group.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    group.add_argument(
        "--no_ignore_eos", action="store_true", help="let the model end its answers before"
    )


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--rate",
        type=rate,
        default=math.inf,
        help="conversations that begin per second, as a Poisson process; inf: all at once",
    )
    group.add_argument(
        "--num_conversations", type=count, metavar="N", help="default: 100, or --seconds"
    )
    group.add_argument("--seconds", type=_duration, help="begin no conversation after these")
    group.add_argument(
        "--max_concurrency", type=count, help="most conversations at once (default: all)"
    )
    group.add_argument(
        "--think_s", type=_seconds, default=0.0, help="seconds between an answer and the next turn"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, words and arrivals")
    group.add_argument("--disable_tqdm", action="store_true", help="show no progress")


def _seconds(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError
    return value


def _duration(text: str) -> float:
    if not (value := _seconds(text)):
        raise ValueError
    return value


def _turns(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    found = count(low), count(high if dash else low)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"'{text}': the fewest come first")
    return found
