"""Speed of dense models on a GPU with random weights, beside floor, goal and a peer.

    python benchmarks/dense.py [--rows 8b-bf16 8b-fp8 8b-fp8-kv8 70b-fp8-kv8] [--json FILE]
    python benchmarks/dense.py --profile --rows 8b-bf16 --batch 1 32 256 --context 1024
    python benchmarks/dense.py --start | --steady | --long

The work: prompts of 1024 random ids, 1024 tokens out, EOS ignored, greedy, prefix reuse off, one
GPU. TPOT(1) = (time for 257 tokens - time for 1 token) / 256 of one request. What the floor counts
is said in floors.py.

--profile: where the time of a decode step goes, by kernel (decode_profile.py).
--start: from spawning the server to the first token over HTTP, without and with cached kernels, and
whether it is at full speed from then on (dense_server.py).
--steady: requests that arrive evenly at a full server: gaps between tokens, throughput.
--long: 64 prompts of 8192 ids, 1024 tokens out, on the last row.

`--rows tiny --prompt 32 --tokens 16 --concurrency 4` tries a mode on a small machine.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from floors import Floors
from shapes import ROWS, TABLE, Row, model_folder, prompts

import penstock
from penstock import LLM, SamplingParams

TPOT_TOKENS = 257
DEFAULT_ROWS = {  # by mode
    None: TABLE,
    "profile": ("8b-bf16",),
    "start": ("8b-bf16",),
    "steady": ("8b-bf16",),
    "long": ("70b-fp8-kv8",),
}
DEFAULT_CONCURRENCY = {"steady": [256], "long": [64]}


def timed(llm: LLM, batch: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    started = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert isinstance(outputs, list)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


def measure_row(row: Row, args: argparse.Namespace) -> dict[str, float]:
    """All figures of one row of the table."""
    vocab = row.config["vocab_size"]
    max_seq_len = args.prompt + max(args.tokens, TPOT_TOKENS)
    settings = row.engine_settings(max_seq_len, max(args.concurrency))

    def made(count: int, seed: int) -> list[list[int]]:
        return prompts(count, args.prompt, vocab, seed)

    with model_folder(row) as folder:
        started = time.perf_counter()
        with LLM(model=folder, **settings) as llm:
            timed(llm, made(1, 0), 1)
            figures = {"start_s": time.perf_counter() - started}
            timed(llm, made(2, 1), 8)
            one = made(1, 2)
            firsts = [timed(llm, one, 1) for _ in range(3)]
            longs = [timed(llm, one, TPOT_TOKENS) for _ in range(3)]
            figures["ttft1_ms"] = min(firsts) * 1e3
            figures["tpot1_ms"] = (min(longs) - min(firsts)) / (TPOT_TOKENS - 1) * 1e3
            for count in args.concurrency:
                seconds = timed(llm, made(count, 3), args.tokens)
                figures[f"c{count}_tok_s"] = count * args.tokens / seconds
    return figures


def measure_long(row: Row, args: argparse.Namespace) -> dict[str, float]:
    """Throughput alone."""
    vocab, figures = row.config["vocab_size"], {}
    settings = row.engine_settings(args.prompt + args.tokens, max(args.concurrency))
    with model_folder(row) as folder, LLM(model=folder, **settings) as llm:
        timed(llm, prompts(1, args.prompt, vocab, 0), 8)
        for count in args.concurrency:
            seconds = timed(llm, prompts(count, args.prompt, vocab, 1), args.tokens)
            figures[f"c{count}_tok_s"] = count * args.tokens / seconds
    return figures


def compare(row: Row, figures: Mapping[str, float], floors: Mapping[str, float]) -> dict[str, Any]:
    """Each figure with its floor, the goal and the peer; ratios above 1 are in our favour."""
    compared = {}
    for name, ours in figures.items():

        def ratio(other: float | None, name: str = name, ours: float = ours) -> float | None:
            if other is None:
                return None
            return ours / other if name.endswith("tok_s") else other / ours

        floor, goal, peer = (of.get(name) for of in (floors, row.goal, row.peer))
        compared[name] = {
            "ours": ours,
            "floor": floor,
            "of_floor": ratio(floor),
            "goal": goal,
            "of_goal": ratio(goal),
            "peer": peer,
            "of_peer": ratio(peer),
        }
    return compared


def show(title: str, compared: Mapping[str, Mapping[str, float | None]]) -> None:
    names = ("ours", "floor", "of floor", "goal", "of goal", "peer", "of peer")
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


def run_rows(
    args: argparse.Namespace, measure: Callable[[Row, argparse.Namespace], dict[str, float]]
) -> None:
    """The rows one after the other; the JSON file has those that are done."""
    results: dict[str, Any] = {}
    for name in args.rows:
        row = ROWS[name]
        figures = measure(row, args)
        floors = Floors(row).figures(args.concurrency, args.prompt, args.tokens)
        results[name] = compare(row, figures, floors)
        show(f"{name}, {args.prompt} in / {args.tokens} out; floors of an H200", results[name])
        save(args, results)


def save(args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    if args.json is None:
        return
    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    versions["penstock"] = penstock.__version__
    about = {"date": time.strftime("%Y-%m-%d"), "in": args.prompt, "out": args.tokens}
    args.json.write_text(json.dumps({**about, "versions": versions, "rows": results}, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    for name in ("profile", "start", "steady", "long"):
        mode.add_argument(f"--{name}", action="store_const", dest="mode", const=name)
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: those of the mode")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", help="default: 32 256; steady 256; long 64"
    )
    parser.add_argument("--prompt", type=int, help="ids of a prompt; default: 1024, long: 8192")
    parser.add_argument("--tokens", type=int, default=1024, help="of an answer")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256], help="of --profile")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="of --profile")
    parser.add_argument("--seconds", type=float, default=60.0, help="watched after a start")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.rows = args.rows or DEFAULT_ROWS[args.mode]
    args.concurrency = args.concurrency or DEFAULT_CONCURRENCY.get(args.mode, [32, 256])
    args.prompt = args.prompt or (8192 if args.mode == "long" else 1024)
    return args


def main() -> None:
    args = parse()
    if args.mode == "profile":
        from decode_profile import profile_rows

        save(args, profile_rows(args.rows, args.batch, args.context))
    elif args.mode in ("start", "steady"):
        import dense_server

        measure = dense_server.start if args.mode == "start" else dense_server.steady
        save(args, {name: measure(ROWS[name], args) for name in args.rows})
    elif args.mode == "long":
        run_rows(args, measure_long)
    else:
        run_rows(args, measure_row)


if __name__ == "__main__":
    main()
