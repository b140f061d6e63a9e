"""Speed of models on a GPU with random weights, beside the roofline, a goal and a peer.

    python benchmarks/table.py [--rows dense | moe | weight-only | 8b-bf16 ...] [--output FILE]
    python benchmarks/table.py --profile --rows 30b-a3b --batch 1 32 256 --context 1024
    python benchmarks/table.py --activated | --start | --steady | --long
    python benchmarks/table.py --plan

The work: prompts of 1024 random ids, 1024 tokens out, EOS ignored, prefix reuse off, one GPU;
greedy, in rows with experts drawn at temperature 1 from fixed seeds. TPOT(1) = (time for 257 tokens
- time for 1 token) / 256 of one request. What the roofline counts is said in
penstock/bench/roofline.py; for MoE models the activated experts are counted first
(activated_experts.py; --expected: not counted, as many as uniform routing would give).

--profile: where the time of a decode step goes, by kernel (decode_profile.py).
--activated: that count alone, beside what uniform routing would give.
--start: from spawning the server to the first token over HTTP, without and with cached kernels, and
whether it is at full speed from then on (table_server.py).
--steady: requests that arrive evenly at a full server: gaps between tokens, throughput.
--long: 64 prompts of 8192 ids, 1024 tokens out, on the 70B.
--plan: what the rows would take, at half the roofline or the peer's speed where that is more.

--output writes what was found as a result file (results.py); those in benchmarks/results/ are what
docs/performance.md is generated from (report.py).

`--rows tiny tiny-moe --prompt 32 --tokens 16 --concurrency 4` tries a mode on a small machine.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import row_result, this_run, write_run
from roofline import Roofline, roofline_of
from shapes import DENSE, MOE, ROWS, WEIGHT_ONLY, Row, model_folder, prompts

from penstock import LLM, SamplingParams

TPOT_TOKENS, TPOT_RUNS = 257, 3
GROUPS = {
    "dense": DENSE,
    "moe": MOE,
    "weight-only": WEIGHT_ONLY,
    "all": DENSE + MOE + WEIGHT_ONLY,
}
OLD_GROUPS = {"coded": WEIGHT_ONLY}  # still accepted
DEFAULT_ROWS = {  # by mode
    None: DENSE + MOE,
    "plan": DENSE + MOE,
    "activated": MOE,
    "profile": ("8b-bf16",),
    "start": ("8b-bf16",),
    "steady": ("8b-bf16",),
    "long": ("70b-fp8-kv8",),
}
OLD_MODES = {"activated": ("--touched",)}
DEFAULT_CONCURRENCY = {"steady": [256], "long": [64]}
START_S, COUNT_S = 15.0, 15.0  # assumed by --plan
ASSUMED_SHARE = 0.5  # of the roofline, where the peer is not faster: we reached 0.47 to 0.91


def timed(llm: LLM, row: Row, batch: list[list[int]], num_tokens: int) -> float:
    params = [
        SamplingParams(
            max_tokens=num_tokens, temperature=row.temperature, seed=seed, ignore_eos=True,
            detokenize=False,
        )
        for seed in range(len(batch))
    ]  # fmt: skip
    started = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert isinstance(outputs, list)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


def measure_row(
    row: Row, args: argparse.Namespace, tell: Callable[[str, float], None]
) -> dict[str, float]:
    """All figures of one row of the table; each is told as soon as it is known."""
    vocab = row.config["vocab_size"]
    max_seq_len = args.prompt + max(args.tokens, TPOT_TOKENS)
    concurrency = concurrency_of(row, args)
    settings = row.engine_settings(max_seq_len, max(concurrency))
    figures: dict[str, float] = {}

    def drawn(count: int, seed: int) -> list[list[int]]:
        return prompts(count, args.prompt, vocab, seed)

    def found(name: str, value: float) -> None:
        figures[name] = value
        tell(name, value)

    with model_folder(row) as folder:
        started = time.perf_counter()
        with LLM(model=folder, **settings) as llm:
            timed(llm, row, drawn(1, 0), 1)
            found("start_s", time.perf_counter() - started)
            timed(llm, row, drawn(2, 1), 8)
            one = drawn(1, 2)
            firsts = [timed(llm, row, one, 1) for _ in range(TPOT_RUNS)]
            longs = [timed(llm, row, one, TPOT_TOKENS) for _ in range(TPOT_RUNS)]
            found("ttft1_ms", min(firsts) * 1e3)
            found("tpot1_ms", (min(longs) - min(firsts)) / (TPOT_TOKENS - 1) * 1e3)
            for count in concurrency:
                seconds = timed(llm, row, drawn(count, 3), args.tokens)
                found(f"c{count}_tok_s", count * args.tokens / seconds)
    return figures


def measure_long(
    row: Row, args: argparse.Namespace, tell: Callable[[str, float], None]
) -> dict[str, float]:
    """Throughput alone."""
    vocab, figures = row.config["vocab_size"], {}
    settings = row.engine_settings(args.prompt + args.tokens, max(args.concurrency))
    with model_folder(row) as folder, LLM(model=folder, **settings) as llm:
        timed(llm, row, prompts(1, args.prompt, vocab, 0), 8)
        for count in args.concurrency:
            seconds = timed(llm, row, prompts(count, args.prompt, vocab, 1), args.tokens)
            figures[f"c{count}_tok_s"] = count * args.tokens / seconds
            tell(f"c{count}_tok_s", figures[f"c{count}_tok_s"])
    return figures


def compare(row: Row, figures: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, Any]:
    """Each figure with its roofline, the goal and the peer; ratios above 1 are in our favor."""
    compared = {}
    for name, ours in figures.items():

        def ratio(other: float | None, name: str = name, ours: float = ours) -> float | None:
            if other is None:
                return None
            return ours / other if name.endswith("tok_s") else other / ours

        bound, goal, peer = (of.get(name) for of in (bounds, row.goal, row.peer))
        compared[name] = {
            "ours": ours,
            "roofline": bound,
            "of_roofline": ratio(bound),
            "goal": goal,
            "of_goal": ratio(goal),
            "peer": peer,
            "of_peer": ratio(peer),
        }
    return compared


def show(title: str, compared: Mapping[str, Mapping[str, float | None]]) -> None:
    names = ("ours", "roofline", "of it", "goal", "of goal", "peer", "of peer")
    print(f"\n{title}\n{'':12}" + "".join(f"{name:>10}" for name in names))
    for figure, values in compared.items():
        cells = [
            _percent(v) if name.startswith("of_") else _number(v) for name, v in values.items()
        ]
        print(f"{figure:12}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


# Experts


def counted(name: str, batches: Sequence[int]) -> dict[int, float]:
    """Activated experts of a layer, by batch; told beside uniform routing."""
    from activated_experts import count_activated

    found = count_activated(ROWS[name], batches)
    experts = roofline_of(ROWS[name]).experts
    assert experts is not None
    told = [f"{n} tokens {k:.1f} (uniform {experts.expected(n):.1f})" for n, k in found.items()]
    print(
        f"{name}: activated of {experts.num_all} experts of a layer, with {', '.join(told)}",
        flush=True,
    )
    return found


def row_roofline(name: str, args: argparse.Namespace, batches: Sequence[int]) -> Roofline:
    row = ROWS[name]
    is_counted = row.has_experts and not args.expected
    return roofline_of(row, counted(name, batches) if is_counted else None)


# Modes


def run_rows(
    args: argparse.Namespace,
    measure: Callable[[Row, argparse.Namespace, Callable[[str, float], None]], dict[str, float]],
) -> None:
    """The rows one after the other; the result file has those that are done."""
    results: dict[str, Any] = {}
    plan(args)
    for name in args.rows:
        row, started = ROWS[name], time.perf_counter()
        concurrency = concurrency_of(row, args)
        roofline = row_roofline(name, args, [1, *concurrency])

        def tell(figure: str, value: float, name: str = name, started: float = started) -> None:
            after = time.perf_counter() - started
            print(f"{name} {figure} {_number(value)} (after {after:.0f} s)", flush=True)

        figures = measure(row, args, tell)
        bounds = roofline.figures(concurrency, args.prompt, args.tokens)
        results[name] = compare(row, figures, bounds)
        title = f"{name}, {args.prompt} in / {args.tokens} out; roofline of an H200"
        if roofline.activated:
            results[name]["activated_experts"] = dict(roofline.activated)
            title += " with the experts counted"
        show(title, {key: results[name][key] for key in figures})
        save(args, results)


def plan(args: argparse.Namespace) -> None:
    """About how long the rows take."""
    total = 0.0
    for name in args.rows:
        seconds = expected_s(ROWS[name], args)
        total += seconds
        print(f"{name}: about {seconds:.0f} s")
    print(f"together: about {total / 60:.1f} min", flush=True)


def expected_s(row: Row, args: argparse.Namespace) -> float:
    bounds = roofline_of(row).figures(concurrency_of(row, args), args.prompt, args.tokens)

    def speed(name: str) -> float:
        return max(row.peer.get(name, 0.0), ASSUMED_SHARE * bounds[name])

    assumed_ms = bounds["tpot1_ms"] / ASSUMED_SHARE
    tpot_ms = min(row.peer.get("tpot1_ms", assumed_ms), assumed_ms)
    bursts = sum(n * args.tokens / speed(f"c{n}_tok_s") for n in concurrency_of(row, args))
    counting = COUNT_S if row.has_experts and not args.expected else 0.0
    return START_S + counting + TPOT_RUNS * TPOT_TOKENS * tpot_ms / 1e3 + bursts


def concurrency_of(row: Row, args: argparse.Namespace) -> list[int]:
    return args.concurrency or list(row.concurrency)


def save(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    if args.output is None:
        return
    rows = {name: row_result(ROWS[name].shape, found) for name, found in results.items()}
    workload = f"{args.prompt} in / {args.tokens} out"
    write_run(args.output, this_run(args.mode or "table", workload, rows))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    for name in DEFAULT_ROWS:
        if name is not None:
            flags = [f"--{name}", *OLD_MODES.get(name, ())]
            mode.add_argument(*flags, action="store_const", dest="mode", const=name)
    parser.add_argument(
        "--rows", nargs="+", choices=(*GROUPS, *OLD_GROUPS, *ROWS), metavar="ROW",
        help=f"groups: {', '.join(GROUPS)}; rows: {', '.join(ROWS)}; default: those of the mode",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=int, nargs="+", help="default: the row's; steady 256; long 64"
    )
    parser.add_argument("--prompt", type=int, help="ids of a prompt; default: 1024, long: 8192")
    parser.add_argument("--tokens", type=int, default=1024, help="of a completion")
    parser.add_argument("--expected", action="store_true", help="do not count experts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="of --profile")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="of --profile")
    parser.add_argument("--seconds", type=float, default=60.0, help="watched after a start; 0: not")
    parser.add_argument(
        "--output",
        "--json",
        type=Path,
        metavar="FILE",
        help="result file: benchmarks/results/*.json",
    )
    args = parser.parse_args(argv)
    named = args.rows or DEFAULT_ROWS[args.mode]
    args.rows = [row for name in named for row in (GROUPS | OLD_GROUPS).get(name, (name,))]
    args.concurrency = args.concurrency or DEFAULT_CONCURRENCY.get(args.mode)
    args.prompt = args.prompt or (8192 if args.mode == "long" else 1024)
    return args


def main() -> None:
    args = parse()
    match args.mode:
        case "plan":
            plan(args)
        case "profile":
            from decode_profile import profile_rows

            profiles = profile_rows(args.rows, args.batch, args.context)
            save(args, {name: {"profiles": found} for name, found in profiles.items()})
        case "activated":
            counts = {
                name: counted(name, [1, *concurrency_of(ROWS[name], args)]) for name in args.rows
            }
            save(args, {name: {"activated_experts": found} for name, found in counts.items()})
        case "start" | "steady":
            import table_server

            measure = table_server.start if args.mode == "start" else table_server.steady
            save(args, {name: measure(ROWS[name], args) for name in args.rows})
        case "long":
            run_rows(args, measure_long)
        case _:
            run_rows(args, measure_row)


if __name__ == "__main__":
    main()
