"""What is to be reached on a GPU, measured part by part: met or missed.

    python benchmarks/goals.py [PART ...] [--seconds 560] [--folder goals] [--tokenizer FOLDER]
    python benchmarks/goals.py --list

Each part is a command of this folder or of tests/gpu, in a process of its own, ended when its time
is over; one that fails stops no other. What it prints is in FOLDER/PART.log, what it found in
FOLDER/PART.json. None begins that might not end within `--seconds`; called again with the same
folder, those that have ended are left out, so that a machine that is lent for minutes at a time is
enough. The table at the end, of all parts that are in the folder, is also FOLDER/goals.md.

`--tokenizer`: a folder with Llama 3's tokenizer.json, for structured output. `--tiny`: all parts
with tiny models, to try this on a small machine; figures are then compared with nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    value: Callable[[Found], float]
    bound: float
    is_least: bool = False  # else the most

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_least else value <= self.bound


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]  # of python; `--output FILE` is added
    seconds: float  # about; it is ended after twice as many
    goals: tuple[Goal, ...] = ()
    tiny: tuple[str, ...] | None = None  # the same on a small machine; None: not there
    needs_tokenizer: bool = False
    has_output: bool = True


def at(*keys: str) -> Callable[[Found], float]:
    def find(found: Found) -> float:
        value: Any = found
        for key in keys:
            value = value[key]
        return float(value)

    return find


def ratio(numerator: Sequence[str], denominator: Sequence[str]) -> Callable[[Found], float]:
    return lambda found: at(*numerator)(found) / at(*denominator)(found)


def of_table(row: str, figure: str) -> Callable[[Found], float]:
    return at("rows", row, "figures", figure, "value")


def traffic_goals(load: str, bounds: Mapping[str, float]) -> Iterator[Goal]:
    for figure, bound in bounds.items():
        is_least = figure in ("output_tok_s", "graph_share")
        yield Goal(f"{load}, {figure}", at("8b-bf16", load, figure), bound, is_least)


def drafting_share(mode: str, count: int) -> Callable[[Found], float]:
    path = (str(count), "tok_s")
    return ratio(("8b-bf16", mode, *path), ("8b-bf16", "plain", *path))


def draft_cost(found: Found) -> float:
    """A drafted token's share of a step of one sequence, three drafts a step."""
    costs = found["8b-bf16"]["costs"]
    plain, drafting = costs["plain"][0], costs["drafting"][0]
    return (drafting - plain) / 3 / plain


def mixed_ratio(row: str) -> Callable[[Found], float]:
    def find(found: Found) -> float:
        return max(float(one["ratio"]) for one in found["times"] if one["row"] == row)

    return find


TTFT_ROWS = {"oss-120b": 22.0, "next-80b-fp8": 28.0, "r1-13-layers": 40.0}
MIXED_ROWS = ("8b-bf16", "oss-120b", "30b-a3b")
ONE_TOKEN = ("--concurrency", "1", "--tokens", "64", "--expected")
TINY_TABLE = ("table.py", "--rows", "tiny", "--prompt", "32", "--tokens", "16")

PARTS = (
    Part("checks", ("../tests/gpu/all.py",), 300.0, has_output=False),
    Part(
        "table-8b",
        ("table.py", "--rows", "8b-bf16"),
        120.0,
        (
            Goal("8B, TPOT, ms", of_table("8b-bf16", "tpot1_ms"), 3.8),
            Goal("8B, 32 at once, tok/s", of_table("8b-bf16", "c32_tok_s"), 5300, is_least=True),
            Goal("8B, 256 at once, tok/s", of_table("8b-bf16", "c256_tok_s"), 10800, is_least=True),
            Goal("8B, TTFT, ms", of_table("8b-bf16", "ttft1_ms"), 24.0),
        ),
        (*TINY_TABLE, "--concurrency", "2"),
    ),
    Part(
        "traffic-8b",
        ("traffic.py", "--rows", "8b-bf16"),
        200.0,
        (
            *traffic_goals(
                "4/s",
                {
                    "ttft_p50_ms": 18,
                    "ttft_p99_ms": 60,
                    "tpot_p50_ms": 5.2,
                    "tpot_p99_ms": 7,
                    "itl_p99_ms": 18,
                },
            ),
            *traffic_goals(
                "8/s",
                {
                    "ttft_p50_ms": 22,
                    "ttft_p99_ms": 70,
                    "tpot_p50_ms": 6.3,
                    "tpot_p99_ms": 8.5,
                    "itl_p99_ms": 20,
                    "graph_share": 0.99,
                },
            ),
            *traffic_goals(
                "burst",
                {"output_tok_s": 8500, "tpot_p99_ms": 60, "itl_p99_ms": 60, "failed_turns": 0},
            ),
            *traffic_goals("lone", {"ttft_p50_ms": 8}),
        ),
        ("traffic.py", "--rows", "tiny", "--seconds", "2", "--burst", "4"),
    ),
    Part(
        "structured",
        ("structured.py",),
        150.0,
        (
            *(
                Goal(
                    f"schema of 40 fields, {count} at once, of plain",
                    ratio(
                        ("8b-bf16", f"c{count}_schema_tok_s"), ("8b-bf16", f"c{count}_plain_tok_s")
                    ),
                    0.97,
                    is_least=True,
                )
                for count in (32, 256)
            ),
            Goal(
                "schema, TTFT of plain's and, ms",
                lambda found: (
                    at("8b-bf16", "ttft_schema_ms")(found) - at("8b-bf16", "ttft_plain_ms")(found)
                ),
                15.0,
            ),
            Goal(
                "100 new schemas, ITL p99 of other streams, times",
                ratio(
                    ("8b-bf16", "itl_p99_beside_schemas_ms"), ("8b-bf16", "itl_p99_beside_plain_ms")
                ),
                1.3,
            ),
        ),
        needs_tokenizer=True,
    ),
    Part(
        "lora",
        ("lora.py",),
        130.0,
        (
            Goal("32 adapters, 64 at once, of base", at("8b-bf16", "ratio"), 0.85, is_least=True),
            Goal(
                "slots that nobody uses, of base", at("8b-bf16", "ratio_none"), 0.99, is_least=True
            ),
        ),
        (
            "lora.py",
            "--rows",
            "tiny",
            "--adapters",
            "2",
            "--concurrency",
            "4",
            "--prompt",
            "16",
            "--tokens",
            "8",
        ),
    ),
    Part(
        "drafting",
        ("speculative.py",),
        240.0,
        (
            Goal(
                "Eagle3, 1 sequence, times plain", drafting_share("forced", 1), 1.9, is_least=True
            ),
            Goal("Eagle3, 32, times plain", drafting_share("forced", 32), 1.7, is_least=True),
            Goal(
                "Eagle3, 256, forced, times plain",
                drafting_share("forced", 256),
                1.1,
                is_least=True,
            ),
            Goal(
                "Eagle3, 256, automatic, times plain",
                drafting_share("adaptive", 256),
                1.0,
                is_least=True,
            ),
            Goal("a draft's share of a step", draft_cost, 0.05),
        ),
        (
            "speculative.py",
            "--rows",
            "tiny",
            "--concurrency",
            "1",
            "--tokens",
            "16",
            "--prompt",
            "16",
            "--no-ngram",
        ),
    ),
    Part(
        "mixed",
        (
            "mixed_step.py",
            "--only",
            "times",
            "--rows",
            *MIXED_ROWS,
            "--decodes",
            "32",
            "--tokens",
            "256",
        ),
        150.0,
        tuple(
            Goal(f"{row}, mixed step over its kernels", mixed_ratio(row), 1.2) for row in MIXED_ROWS
        ),
        ("mixed_step.py", "--only", "times", "--rows", "tiny", "--decodes", "2", "--tokens", "8"),
    ),
    *(
        Part(
            f"ttft-{row}",
            ("table.py", "--rows", row, *ONE_TOKEN),
            80.0,
            (Goal(f"{row}, TTFT of 1024 tokens, ms", of_table(row, "ttft1_ms"), bound),),
            (*TINY_TABLE, "--concurrency", "1"),
        )
        for row, bound in TTFT_ROWS.items()
    ),
    *(
        Part(
            f"traffic-{row}",
            ("traffic.py", "--rows", row, "--loads", "4/s", "8/s"),
            140.0,
            tiny=("traffic.py", "--rows", "tiny-moe", "--loads", "2/s", "--seconds", "2"),
        )
        for row in ("oss-120b", "30b-a3b")
    ),
    Part(
        "drafting-experts",
        ("speculative.py", "--rows", "oss-120b", "r1-13-layers", "--no-ngram"),
        280.0,
    ),
)


def run(part: Part, args: argparse.Namespace) -> None:
    """Leaves PART.json where it ended well."""
    script, *rest = part.tiny if args.tiny and part.tiny is not None else part.command
    command = [sys.executable, str(HERE / script), *rest]
    result = args.folder / f"{part.name}.json"
    unfinished = result.with_suffix(".part")
    if part.has_output:
        command += ["--output", str(unfinished)]
    if part.needs_tokenizer:
        command += ["--tokenizer", str(args.tokenizer)]
    started = time.monotonic()
    with result.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(2 * part.seconds)
        except subprocess.TimeoutExpired:
            code = "too slow"
        finally:  # its servers and engines, too
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    took = time.monotonic() - started
    if code == 0 and not part.has_output:
        unfinished.write_text("{}\n")
    is_done = unfinished.exists() and code in (0, 1)  # 1: a bound of the script's own is missed
    if is_done:
        unfinished.rename(result)
    print(f"{part.name}: {took:.0f} s" + ("" if code == 0 else f", ended with {code}"), flush=True)
    if code != 0:
        print(_tail(result.with_suffix(".log")), flush=True)


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-12:]
    return "\n".join(f"    {line}" for line in lines)


def table(folder: Path) -> str:
    lines = ["| | found | goal | |", "| --- | ---: | ---: | --- |"]
    for part in PARTS:
        file = folder / f"{part.name}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text())
        for goal in part.goals:
            sign = ">=" if goal.is_least else "<="
            try:
                value = goal.value(found)
            except (KeyError, ValueError, TypeError) as error:  # of a part that ended early
                lines.append(f"| {goal.name} | - | {sign} {goal.bound:g} | no figure: {error} |")
                continue
            verdict = "met" if goal.is_met(value) else "MISSED"
            lines.append(f"| {goal.name} | {value:.4g} | {sign} {goal.bound:g} | {verdict} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}"
    )
    parser.add_argument(
        "--list", action="store_true", help="the parts and about how long they take"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all that begin")
    parser.add_argument("--folder", type=Path, default=Path("goals"))
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if args.list:
        for part in PARTS:
            print(f"{part.name}: about {part.seconds:.0f} s, {len(part.goals)} goals")
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for part in PARTS:
        if args.parts and part.name not in args.parts:
            continue
        if (args.folder / f"{part.name}.json").exists():
            continue
        if part.needs_tokenizer and args.tokenizer is None:
            print(f"{part.name}: left out, it needs --tokenizer")
        elif args.tiny and part.tiny is None:
            print(f"{part.name}: left out, there is nothing tiny of it")
        elif time.monotonic() - started + part.seconds > args.seconds:
            print(f"{part.name}: left for the next time")
        else:
            run(part, args)
    shown = table(args.folder)
    (args.folder / "goals.md").write_text(shown + "\n")
    if not args.tiny:
        print(shown)
    return int("MISSED" in shown and not args.tiny)


if __name__ == "__main__":
    sys.exit(main())
