"""`penstock bench chat`, which is also `python benchmarks/chat.py`. Imports little: see there."""

import argparse
import sys

from penstock import log
from penstock.bench import chat, chat_report
from penstock.bench.conversations import LogNormalLengths, Workload, read_lengths
from penstock.bench.load import Arrivals
from penstock.bench.openai import bearer
from penstock.bench.results import save
from penstock.cli.api_key import api_key_of


def run(args: argparse.Namespace) -> int:
    log.setup("bench", "WARNING")
    options = options_of(args)
    talks = chat.run(options)
    report = chat_report.report_of(talks, options, check_reuse=not args.no_reuse_check)
    if report.figures.num_failed:
        print(chat_report.failures(report))
    print(chat_report.table(report), flush=True)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    if args.result_json is not None:
        save(args.result_json, chat_report.as_json(report, talks, options))
    return 0 if report.figures.completed else 1


def options_of(args: argparse.Namespace) -> chat.ChatOptions:
    return chat.ChatOptions(
        url=args.base_url or f"http://{args.host}:{args.port}",
        headers=bearer(api_key_of(args.api_key)),
        backend=args.backend,
        model=args.model,
        workload=Workload(
            seed=args.seed,
            lengths=read_lengths(args.lengths) if args.lengths else LogNormalLengths(),
            turns=args.turns,
            system_tokens=args.system_tokens,
            max_user_tokens=args.max_user_tokens,
            max_answer_tokens=args.max_answer_tokens,
            vocab_size=args.vocab_size,
        ),
        random_ids=args.random_ids,
        arrivals=Arrivals(rate=args.rate, seed=args.seed),
        num_conversations=args.num_conversations,
        seconds=args.seconds,
        max_concurrency=args.max_concurrency,
        think_s=args.think_s,
        temperature=args.temperature,
        ignore_eos=not args.no_ignore_eos,
        show_progress=not args.disable_tqdm,
    )
