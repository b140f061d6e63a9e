"""`penstock quantize`: a plain checkpoint -> a quantized one in a public layout, with a report."""

import argparse

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock import log
from penstock.errors import ConfigError

_MAX_SHOWN = 10


def run(args: argparse.Namespace) -> int:
    log.setup("quantize", "WARNING")
    from penstock.ptq.run import REPORT, Task, default_device, quantize

    for name in ("num_samples", "length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}, it must be at least 1")
    task = Task(
        model=args.model,
        format=args.format,
        calib=args.calib,
        output=args.output,
        eval=args.eval,
        exclude=tuple(args.exclude),
        inputs=args.inputs,
        num_samples=args.num_samples,
        length=args.length,
        device=args.device or default_device(),
    )
    console = Console(stderr=True)
    columns = (TextColumn("quantizing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    visible = console.is_terminal
    with Progress(*columns, console=console, disable=not visible, transient=True) as bar:
        shown = bar.add_task("", total=None)
        report = quantize(task, lambda done, total: bar.update(shown, completed=done, total=total))
    table = Table(
        title=f"{task.model} in {task.format}: the largest errors of {len(report.errors)}"
    )
    table.add_column("matrix")
    table.add_column("error of its output", justify="right")
    largest = sorted(report.errors.items(), key=lambda pair: -pair[1])[:_MAX_SHOWN]
    for name, error in largest:
        table.add_row(name, f"{error:.2%}")
    Console().print(table)
    print(
        f"perplexity {report.perplexity_before:.3f} before, {report.perplexity_after:.3f} after "
        f"({report.change:+.2%}); all errors are in {task.output / REPORT}"
    )
    if task.format == "fp8" and task.inputs is None and report.input_bits == 16:
        print(
            "only weights are of 8 bits: rounding the inputs, too, costs a model this small more "
            "than it gains; --inputs 8 does it"
        )
    return 0
