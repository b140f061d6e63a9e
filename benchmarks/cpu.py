"""Penstock against transformers' `generate` on this CPU: same model, batch and threads.

    python benchmarks/cpu.py [--threads N] [--json FILE]

Random weights in fp32, greedy, EOS ignored. The two take turns and the best of each counts,
because other work on the machine only ever adds time. Needs the transformers package.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from penstock import LLM, SamplingParams

# (layers, hidden, heads, kv heads, MLP): a small one where overhead shows, and the shape of a 135 M
# model.
SHAPES = {"6 M": (6, 256, 4, 2, 768), "135 M": (30, 576, 9, 3, 1536)}
VOCAB, PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS = 8192, 64, 64, 3


def best_of(run: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for function, mine in zip((run, other), times, strict=True):
            started = time.perf_counter()
            function()
            mine.append(time.perf_counter() - started)
    return min(times[0]), min(times[1])


def compare(
    shape: tuple[int, ...], threads: int, batches: list[int]
) -> dict[int, tuple[float, float]]:
    layers, hidden, heads, kv_heads, mlp = shape
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=2048,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).float().eval()
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(
            model=folder, skip_tokenizer_init=True, device="cpu", num_threads=threads,
            kv_cache_config={"enable_block_reuse": False},
        ) as llm:  # fmt: skip
            for batch in batches:
                prompts = torch.randint(0, VOCAB, (batch, PROMPT_TOKENS))
                params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

                @torch.inference_mode()
                def theirs(prompts: torch.Tensor = prompts) -> object:
                    return model.generate(prompts, max_new_tokens=OUTPUT_TOKENS, do_sample=False)

                def ours(
                    prompts: torch.Tensor = prompts, params: SamplingParams = params
                ) -> object:
                    return llm.generate(prompts.tolist(), params, use_tqdm=False)

                mine, other = best_of(ours, theirs)
                rates[batch] = (batch * OUTPUT_TOKENS / mine, batch * OUTPUT_TOKENS / other)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    print(f"{'model':>8} {'batch':>6} {'penstock tok/s':>15} {'transformers':>13} {'ratio':>6}")
    for name, shape in SHAPES.items():
        for batch, (ours, theirs) in compare(shape, args.threads, args.batch).items():
            print(
                f"{name:>8} {batch:6d} {ours:15.1f} {theirs:13.1f} {ours / theirs:6.2f}", flush=True
            )
            results.append(
                {"model": name, "batch": batch, "penstock": ours, "transformers": theirs}
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
