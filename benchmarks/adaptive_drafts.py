"""Whether drafting with `adaptive_draft_len` is slower than without, on a CPU and one thread.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/adaptive_drafts.py [--batch 1] [--rounds 7]

The default small model with what drafts for it in `tests/drafters`, two held-out prompts of each
skill, `--batch` of them at once, prefix reuse off. Engines answer in turns; the time is that of the
thread, so others on the machine count only by what they do to its caches. Tokens must be the same.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

from local_engine import LocalEngine
from test_drafted_texts import EAGLE3, SMALL, TINY, answers, prompts

KINDS = {"plain": None, "ngram": {"decoding_type": "NGram"}, "eagle3": EAGLE3, "small": SMALL}
NUM_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    engines = {
        kind: LocalEngine(
            TINY, speculative_config=drafting, device="cpu", dtype="float32", num_threads=1,
            max_seq_len=1024, max_batch_size=8,
            kv_cache_config={"max_tokens": 16384, "enable_block_reuse": False},
        )
        for kind, drafting in KINDS.items()
    }  # fmt: skip
    texts = prompts(TINY, 2)
    groups = [texts[at : at + asked.batch] for at in range(0, len(texts), asked.batch)]
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(asked.rounds + 1):  # the first one warms up
        said = {}
        for kind, engine in engines.items():
            started = time.thread_time()
            said[kind] = [one for group in groups for one in answers(engine, group, NUM_TOKENS)]
            seconds[kind].append(time.thread_time() - started)
        assert all(one == said["plain"] for one in said.values())
    for kind, engine in engines.items():
        rest = seconds[kind][1:]
        ratios = [own / plain for own, plain in zip(rest, seconds["plain"][1:], strict=True)]
        counters = engine.counters
        print(
            f"{kind:7} median {median(rest):.2f} s, of plain: {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {counters.drafted_tokens} drafted, "
            f"{counters.accepted_tokens} kept in {counters.decodes} decodes"
        )


if __name__ == "__main__":
    main()
