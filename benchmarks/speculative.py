"""What drafting gains when drafts are right as often as told: time alone, on random weights.

    PYTHONPATH=src python benchmarks/speculative.py [--rows 8b-bf16] [--right 0.7] [--output FILE]
    PYTHONPATH=src python benchmarks/speculative.py --rows tiny --concurrency 1 4 --tokens 16

An Eagle3 head of the model's own sizes drafts `--drafts` tokens; whether one is right is drawn, not
compared, so nothing depends on what random weights say. `plain`: no speculative_config. `forced`:
every step drafts. `adaptive`: as many as the server thinks worth it.

The last column is tokens/s over plain's. Greedy, prefix reuse off; first tokens are not counted.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fixtures"))

from local_engine import LocalEngine
from shapes import ROWS, Row, model_folder, prompts
from torch import Tensor

from penstock.runtime import model_runner
from penstock.sampling import verification
from penstock.sampling.verification import Accepted, DraftedRows

DRAFT_VOCABULARY = 32000


def eagle3_config(config: dict[str, Any]) -> dict[str, Any]:
    """A head as they are published for the model: one layer, a part of the vocabulary."""
    return config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCABULARY, config["vocab_size"]),
        "quantization_config": None,
    }


class Verdicts:
    """In place of `verify`: each draft is right with the given chance."""

    def __init__(self, right: float) -> None:
        self._right = right

    def __call__(self, token_ids_L: Tensor, drafted: DraftedRows) -> Accepted:
        real = verification.verify(token_ids_L, drafted)
        num_rows, width = real.token_ids_NW.shape
        device = token_ids_L.device
        is_right_NK = torch.rand((num_rows, width - 1), device=device) < self._right
        num_fed_N = torch.as_tensor(drafted.counts - 1, dtype=torch.int64).to(device)
        is_right_NK &= torch.arange(width - 1, device=device) < num_fed_N[:, None]
        return Accepted(real.token_ids_NW, 1 + is_right_NK.cumprod(1).sum(1))


def settings_of(row: Row, asked: argparse.Namespace, head: str, mode: str) -> dict[str, Any]:
    settings = row.engine_settings(asked.prompt + asked.tokens + 64, max(asked.concurrency))
    if mode != "plain":
        settings["speculative_config"] = {
            "decoding_type": "Eagle3",
            "speculative_model": head,
            "max_draft_len": asked.drafts,
            "adaptive_draft_len": mode == "adaptive",
        }
    if not torch.cuda.is_available():
        settings["device"] = "cpu"
    return settings


def measure(engine: LocalEngine, row: Row, count: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Decode tokens per second and per step of `count` sequences, behind their first tokens."""
    texts = prompts(count, asked.prompt, row.config["vocab_size"], count)
    ids = [engine.submit(text, asked.tokens, ignore_eos=True) for text in texts]
    while not all(engine.deltas[one] for one in ids):
        engine.turn()

    def num_tokens() -> int:
        return sum(len(delta.token_ids) for one in ids for delta in engine.deltas[one])

    before, steps, started = num_tokens(), engine.counters.steps, time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - started
    steps = engine.counters.steps - steps
    gained = num_tokens() - before
    return {"tok_s": gained / seconds, "tokens_per_step": gained / steps / count}


def run_mode(row: Row, asked: argparse.Namespace, head: str, mode: str) -> dict[int, dict]:
    with model_folder(row) as folder:
        engine = LocalEngine(folder, **settings_of(row, asked, head, mode))
    found = {}
    for count in asked.concurrency:
        measure(engine, row, count, asked)  # warms up
        found[count] = measure(engine, row, count, asked)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["8b-bf16"])
    parser.add_argument("--right", type=float, default=0.7, help="chance of each draft")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--modes", nargs="+", default=["plain", "forced", "adaptive"])
    parser.add_argument("--output", type=Path, help="a JSON file")
    asked = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    model_runner.verify = Verdicts(asked.right)  # type: ignore[assignment]
    ideal = sum(asked.right**k for k in range(asked.drafts + 1))
    print(f"{asked.drafts} drafts, each right with {asked.right}: {ideal:.2f} tokens/step at most")
    for name in asked.rows:
        row = ROWS[name]
        with tempfile.TemporaryDirectory() as head:
            Path(head, "config.json").write_text(json.dumps(eagle3_config(row.config)))
            found = {mode: run_mode(row, asked, head, mode) for mode in asked.modes}
        results[name] = found
        for count in asked.concurrency:
            for mode, by_count in found.items():
                one = by_count[count]
                share = one["tok_s"] / found[asked.modes[0]][count]["tok_s"]
                print(
                    f"{name:>12} {count:4} at once, {mode:>8}: {one['tok_s']:8.0f} tok/s, "
                    f"{one['tokens_per_step']:.2f} tokens/step, x {share:.2f}",
                    flush=True,
                )
    if asked.output:
        asked.output.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
