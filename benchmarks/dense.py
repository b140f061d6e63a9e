"""Engine speed on a GPU with random weights: start-up, TPOT of one request, 32 and 256 at once.

    python benchmarks/dense.py [--shape llama-3.1-8b] [--json FILE]

The work: prompts of 1024 random ids, 1024 tokens out, EOS ignored, greedy, prefix reuse off, one
GPU. TPOT(1) = (time for 257 tokens - time for 1 token) / 256 of one request.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import KNOWN, SHAPES

from penstock import LLM, SamplingParams

PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 1024


def prompts(count: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def timed(llm: LLM, batch: list[list[int]], num_tokens: int) -> float:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    started = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


def measure(shape: str, concurrencies: list[int]) -> dict[str, float]:
    config = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        started = time.perf_counter()
        most = max(concurrencies)
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_seq_len": PROMPT_TOKENS + OUTPUT_TOKENS,
            "max_batch_size": most,
            "cuda_graph_config": {"max_batch_size": most, "enable_padding": True},
            "kv_cache_config": {"enable_block_reuse": False},
        }
        with LLM(model=folder, **settings) as llm:
            vocab = config["vocab_size"]
            timed(llm, prompts(1, vocab, 0), 1)
            figures = {"start_s": time.perf_counter() - started}
            timed(llm, prompts(2, vocab, 1), 8)
            one = prompts(1, vocab, 2)
            firsts = [timed(llm, one, 1) for _ in range(3)]
            longs = [timed(llm, one, 257) for _ in range(3)]
            figures["ttft1_ms"] = min(firsts) * 1e3
            figures["tpot1_ms"] = (min(longs) - min(firsts)) / 256 * 1e3
            for count in concurrencies:
                seconds = timed(llm, prompts(count, vocab, 3), OUTPUT_TOKENS)
                figures[f"c{count}_tok_s"] = count * OUTPUT_TOKENS / seconds
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = measure(args.shape, args.concurrency)
    known = KNOWN.get(args.shape, {})
    print(f"{args.shape}, {PROMPT_TOKENS} in / {OUTPUT_TOKENS} out")
    print(f"{'':12} {'penstock':>10} {'floor':>10} {'of floor':>9} {'vllm':>10} {'vs vllm':>8}")
    for name, value in figures.items():
        floor, vllm = (known.get(name, {}).get(k) for k in ("floor", "vllm"))
        is_rate = name.endswith("tok_s")
        of_floor = (value / floor if is_rate else floor / value) if floor else None
        against = (value / vllm if is_rate else vllm / value) if vllm else None
        print(
            f"{name:12} {value:10.2f} {floor or '-':>10} {_percent(of_floor):>9} "
            f"{vllm or '-':>10} {_times(against):>8}"
        )
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, **figures}, indent=1))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


if __name__ == "__main__":
    main()
