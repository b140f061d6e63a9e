"""What drafting gains when drafts are right as often as told: time alone, on random weights.

    PYTHONPATH=src python benchmarks/speculative.py [--rows 8b-bf16] [--right 0.7] [--output FILE]
    PYTHONPATH=src python benchmarks/speculative.py --rows tiny --concurrency 1 4 --tokens 16

The drafter is the model's MTP head where it has one, else an Eagle3 head of the model's own sizes.
Whether a draft is right is drawn, not compared, so nothing depends on what random weights say.
`plain`: no speculative_config. `forced`: every step drafts `--drafts` tokens. `adaptive`: as many
as the server thinks worth it. `ngram`: one sequence that repeats a token, beside plain decoding of
the same (`--no-ngram`: not). Each engine runs in a process of its own.

The last column is tokens/s over plain's. Greedy, prefix reuse off; first tokens are not counted.
"""

import argparse
import json
import subprocess
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

from penstock.kernels.transfer import to_device
from penstock.runtime import drafting
from penstock.sampling import verification
from penstock.sampling.verification import Accepted, DraftedRows

DRAFT_VOCABULARY = 32000
NGRAM_DRAFTS = 4
MTP_HEADS = "num_nextn_predict_layers"
ONE_TOKEN = {"logit_bias": {7: 100.0}}


def eagle3_config(config: dict[str, Any]) -> dict[str, Any]:
    """A head as they are published for the model: one dense layer, a part of the vocabulary."""
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    head_size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {key: config[key] for key in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "head_dim": head_size,
        "intermediate_size": max(config["intermediate_size"], 2 * config["hidden_size"]),
        "num_hidden_layers": 1,
        "draft_vocab_size": min(DRAFT_VOCABULARY, config["vocab_size"]),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
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
        num_fed_N = to_device(drafted.counts - 1, device)
        is_right_NK &= torch.arange(width - 1, device=device) < num_fed_N[:, None]
        return Accepted(real.token_ids_NW, 1 + is_right_NK.cumprod(1).sum(1))


def drafting_of(row: Row, asked: argparse.Namespace, head: str) -> dict[str, Any]:
    if row.config.get(MTP_HEADS):
        return {"decoding_type": "MTP", "max_draft_len": asked.drafts}
    Path(head, "config.json").write_text(json.dumps(eagle3_config(row.config)))
    return {
        "decoding_type": "Eagle3", "speculative_model": head, "max_draft_len": asked.drafts,
        "quantization": asked.head_quantization,
    }  # fmt: skip


def measure(
    engine: LocalEngine, row: Row, count: int, asked: argparse.Namespace, **sampling: Any
) -> dict[str, Any]:
    """Decode tokens per second and per decode of `count` sequences, behind their first tokens."""
    texts = prompts(count, asked.prompt, row.config["vocab_size"], count)
    ids = [engine.submit(text, asked.tokens, ignore_eos=True, **sampling) for text in texts]
    while not all(engine.deltas[one] for one in ids):
        engine.turn()

    def num_tokens() -> int:
        return sum(len(delta.token_ids) for one in ids for delta in engine.deltas[one])

    counters = engine.counters
    before, decodes, started = num_tokens(), counters.decodes, time.perf_counter()
    engine.run()
    seconds = time.perf_counter() - started
    gained, decodes = num_tokens() - before, counters.decodes - decodes
    return {"tok_s": gained / seconds, "per_decode": gained / max(1, decodes)}


def run_engine(row: Row, asked: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Each mode of an engine by the number of sequences, and what steps cost where it drafts."""
    drafting.verify = Verdicts(asked.right)  # type: ignore[assignment]
    settings = row.engine_settings(asked.prompt + asked.tokens + 64, max(asked.concurrency))
    if not torch.cuda.is_available():
        settings["device"] = "cpu"
    with model_folder(row) as folder, tempfile.TemporaryDirectory() as head:
        if kind == "drafting":
            settings["speculative_config"] = drafting_of(row, asked, head)
        elif kind == "ngram":
            settings["speculative_config"] = {
                "decoding_type": "NGram", "max_draft_len": NGRAM_DRAFTS,
                "adaptive_draft_len": False,
            }  # fmt: skip
        started = time.perf_counter()
        engine = LocalEngine(folder, **settings)
        found: dict[str, Any] = {"start_s": time.perf_counter() - started}

    def warmed(count: int, **sampling: Any) -> dict[str, Any]:
        measure(engine, row, count, asked, **sampling)
        return measure(engine, row, count, asked, **sampling)

    if kind == "plain":
        found["plain"] = {count: warmed(count) for count in asked.concurrency}
        found["plain, one token"] = {1: warmed(1, **ONE_TOKEN)} if asked.ngram else {}
    elif kind == "ngram":
        found["ngram"] = {1: warmed(1, **ONE_TOKEN)}
    else:
        drafts, costs = engine.engine.drafts, engine.engine.drafts.costs
        assert costs is not None
        found["costs"] = {
            name: getattr(costs, name)
            for name in ("decodes", "plain", "keeping_up", "drafting", "full")
        }
        for mode, used in (("forced", None), ("adaptive", costs)):
            drafts.costs = used
            found[mode] = {count: warmed(count) for count in asked.concurrency}
    return found


def in_process(name: str, kind: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Memory of an engine is all given back when its process ends."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, __file__, *arguments, "--rows", name, "--engine", kind]
        command += ["--output", str(file)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        return json.loads(file.read_text()) if ended.returncode == 0 else {}


def told(name: str, found: dict[str, Any], asked: argparse.Namespace) -> None:
    plain = found.get("plain", {})
    for mode, by_count in found.items():
        if mode in ("start_s", "costs"):
            continue
        base = found.get("plain, one token", {}) if mode == "ngram" else plain
        for count, one in by_count.items():
            share = one["tok_s"] / base[count]["tok_s"] if count in base else float("nan")
            print(
                f"{name:>12} {count:>4} at once, {mode:>16}: {one['tok_s']:8.0f} tok/s, "
                f"{one['per_decode']:.2f} tokens/decode, x {share:.2f}"
            )
    if "costs" not in found:
        return
    costs = found["costs"]
    for at, decodes in enumerate(costs["decodes"]):
        alone, drafting, full = (costs[key][at] * 1e3 for key in ("plain", "drafting", "full"))
        each = (drafting - alone) / asked.drafts / alone
        print(
            f"{name:>12} {decodes:>4} decodes: {alone:.2f} ms, {drafting:.2f} with the drafter "
            f"({each:.1%} of a step a draft), {full:.2f} with drafts fed, too; "
            f"x {asked.ideal * alone / full:.2f} by arithmetic"
        )
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=["8b-bf16"])
    parser.add_argument("--right", type=float, default=0.7, help="chance of each draft")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--head_quantization", help="of an Eagle3 head: fp8, ...")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ngram", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--engine", choices=("plain", "drafting", "ngram"), help="of one, here")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = parser.parse_args(arguments)
    asked.ideal = sum(asked.right**k for k in range(asked.drafts + 1))
    if asked.engine:
        found = run_engine(ROWS[asked.rows[0]], asked, asked.engine)
        asked.output.write_text(json.dumps(found))
        return 0
    print(f"{asked.drafts} drafts, each right with {asked.right}: {asked.ideal:.2f} tokens/decode")
    results: dict[str, Any] = {}
    for name in asked.rows:
        results[name] = {}
        for kind in ("plain", "drafting", *(("ngram",) if asked.ngram else ())):
            one = in_process(name, kind, arguments)
            print(f"{name:>12} {kind}: ready in {one.get('start_s', float('nan')):.0f} s")
            results[name] |= one
        told(name, results[name], asked)
    if asked.output:
        asked.output.write_text(json.dumps(results, indent=1))
    return 0 if all("costs" in found and "plain" in found for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
