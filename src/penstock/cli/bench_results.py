"""`penstock bench compare` and `report`: result files -> a table, an HTML page."""

import argparse

from penstock.bench import compare
from penstock.bench.results import read_series
from penstock.cli.bench import write_report


def run(args: argparse.Namespace) -> int:
    series = [read_series(path) for path in args.results]
    if args.output is not None:
        write_report(args.output, series)
    if args.command == "report":
        return 0
    first, second = series
    worst = 0.0
    for one, other in compare.matches(first, second):
        print(compare.table((first.name, second.name), one, other), end="\n\n")
        worst = max([worst, *(seen.worse for seen in compare.differences(one, other))])
    if args.max_worse is not None and worst > args.max_worse:
        print(f"a figure is {worst:.1%} worse, at most {args.max_worse:.1%} may be")
        return 1
    return 0
