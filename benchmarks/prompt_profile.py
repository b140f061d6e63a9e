"""Where the time of a lone prompt goes, kernel by kernel.

    PYTHONPATH=src python benchmarks/prompt_profile.py --rows next-80b-fp8 oss-120b [--prompt 1024]
                                                       [--output FILE]

Random weights; one prompt after the other on an idle engine, each with one token out. wall: from
the first turn of the loop to the token, without the profiler. traced: from the first kernel of a
prompt to the end of its last. A kernel's exclusive time is the part in which none that began
earlier still runs (decode_profile.py); with the time in which nothing runs they are what is traced.
The roofline is that of the whole step: weights that its tokens touch, and FLOPs.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode_profile import NUM_SHOWN, Line, Span, exclusive, short
from roofline import roofline_of
from shapes import ROWS, Row, model_folder, prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

NUM_WARM, NUM_TIMED, NUM_TRACED = 4, 10, 5
PAUSE_US = 1000.0  # between two prompts nothing runs for longer, within one never


def by_prompt(spans: Iterable[Span], pause_us: float = PAUSE_US) -> list[list[Span]]:
    """Kernels by start, apart where nothing ran for so long."""
    found: list[list[Span]] = []
    last_end = float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        if span.start - last_end > pause_us:
            found.append([])
        found[-1].append(span)
        last_end = max(last_end, span.end)
    return found


def lines_of(traced: Sequence[Sequence[Span]]) -> list[Line]:
    """Means of a prompt, by exclusive time."""
    lines: dict[str, Line] = defaultdict(lambda: Line(""))
    for spans in traced:
        for span, alone in zip(spans, exclusive(spans), strict=True):
            line = lines[short(span.name)]
            line.name = short(span.name)
            line.count += 1 / len(traced)
            line.us += (span.end - span.start) / len(traced)
            line.exclusive_us += alone / len(traced)
    return sorted(lines.values(), key=lambda line: -line.exclusive_us)


def profile(row: Row, num_tokens: int) -> dict[str, Any]:
    import torch
    from local_engine import LocalEngine

    texts = iter(
        prompts(NUM_WARM + NUM_TIMED + NUM_TRACED, num_tokens, row.config["vocab_size"], 0)
    )
    with model_folder(row) as folder:
        engine = LocalEngine(folder, **row.engine_settings(num_tokens + 8, 8))

    def run() -> float:
        """Seconds of one prompt, and a pause behind it."""
        engine.submit(next(texts), 1, ignore_eos=True)
        started = time.perf_counter()
        engine.run()
        torch.cuda.synchronize()
        took = time.perf_counter() - started
        time.sleep(0.01)
        return took

    for _ in range(NUM_WARM):
        run()
    wall_us = statistics.median(run() for _ in range(NUM_TIMED)) * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(NUM_TRACED):
            run()
    traced = by_prompt(
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    lines = lines_of(traced)
    traced_us = statistics.mean(max(s.end for s in spans) - spans[0].start for spans in traced)
    return {
        "tokens": num_tokens,
        "num_traced": len(traced),
        "wall_us": wall_us,
        "roofline_us": roofline_of(row).prompt_s(num_tokens) * 1e6,
        "traced_us": traced_us,
        "idle_us": traced_us - sum(line.exclusive_us for line in lines),
        "kernels": [asdict(line) for line in lines],
    }


def show(name: str, found: dict[str, Any]) -> None:
    wall, bound, traced = (found[key] for key in ("wall_us", "roofline_us", "traced_us"))
    print(
        f"\n{name}, a prompt of {found['tokens']}: {wall:.0f} us, roofline {bound:.0f} us = "
        f"{bound / wall:.1%}; in the trace {traced:.0f} us, idle {found['idle_us']:.0f} us "
        f"({found['num_traced']} prompts)"
    )
    print(f"{'exclusive':>10} {'share':>6} {'duration':>9} {'runs':>6} {'each':>7}")
    for line in found["kernels"][:NUM_SHOWN]:
        print(
            f"{line['exclusive_us']:10.1f} {line['exclusive_us'] / traced:6.1%} "
            f"{line['us']:9.1f} {line['count']:6.1f} {line['us'] / line['count']:7.1f}"
            f"  {line['name']}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["8b-bf16"])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("a profile needs a GPU; there is none")
    found = {}
    for name in args.rows:
        found[name] = profile(ROWS[name], args.prompt)
        show(name, found[name])
        torch.cuda.empty_cache()
        if args.output is not None:
            args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
