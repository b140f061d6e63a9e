"""Throughput with many adapters in one batch, beside the same model without any.

    PYTHONPATH=src python benchmarks/lora.py [--rows 8b-bf16] [--output FILE]
    PYTHONPATH=src python benchmarks/lora.py --modules attention
    PYTHONPATH=src python benchmarks/lora.py --kernels
    PYTHONPATH=src python benchmarks/lora.py --rows tiny --adapters 4 --concurrency 8 --tokens 8

Random weights, random adapters of `--rank` for all linear layers (`--modules attention`: those of
attention alone) in as many slots as there are adapters; request i takes adapter i mod `--adapters`.
Prompts of `--prompt` random ids, `--tokens` tokens out, EOS ignored, prefix reuse off, greedy.

base: an engine without adapters. with: the engine with slots, every request has an adapter. none:
the same engine, no request has one. The best of `--runs`; the goal is with / base >= 0.85.

--kernels: the op alone on a GPU, by graph replays, for the layers of the row and 1, `--concurrency`
and 1024 tokens: time, bandwidth of the matrices it reads, time where no token has an adapter.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import ROWS, Row, model_folder, prompts

from penstock import LLM, LoRARequest, SamplingParams

GOAL = 0.85
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a Llama."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config["num_key_value_heads"] * head
    inner = config["intermediate_size"]
    return {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, queries), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }  # fmt: skip


def write_adapters(
    root: Path, config: dict[str, Any], modules: Sequence[str], rank: int, count: int
) -> list[Path]:
    """One adapter, and links to it: each has a slot of its own, whatever it holds."""
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        for module in modules:
            num_out, num_in = shapes_of(config)[module]
            group = "self_attn" if module in ATTENTION else "mlp"
            name = f"base_model.model.model.layers.{layer}.{group}.{module}"
            a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            b = torch.randn(num_out, rank, generator=generator) * 0.01
            tensors[f"{name}.lora_A.weight"] = a.bfloat16()
            tensors[f"{name}.lora_B.weight"] = b.bfloat16()
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(modules)}
    folders = [root / f"adapter-{number}" for number in range(count)]
    for folder in folders:
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        weights = folder / "adapter_model.safetensors"
        if folder is folders[0]:
            save_file(tensors, weights)
        else:
            weights.symlink_to(folders[0] / weights.name)
    return folders


def timed(
    llm: LLM, batch: list[list[int]], num_tokens: int, adapters: Sequence[LoRARequest | None]
) -> float:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    started = time.perf_counter()
    outputs = llm.generate(batch, params, use_tqdm=False, lora_request=adapters)
    seconds = time.perf_counter() - started
    assert isinstance(outputs, list)
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


def measure(row: Row, args: argparse.Namespace, tell: Any) -> dict[str, float]:
    config, count = row.config, args.concurrency
    settings = row.engine_settings(args.prompt + args.tokens, count)
    modules = ATTENTION if args.modules == "attention" else ATTENTION + MLP
    figures: dict[str, float] = {}

    def run(name: str, llm: LLM, adapters: Sequence[LoRARequest | None]) -> None:
        timed(llm, drawn(0), 4, adapters)
        best = min(timed(llm, drawn(1 + i), args.tokens, adapters) for i in range(args.runs))
        figures[name] = count * args.tokens / best
        tell(f"{name} {figures[name]:.0f} tok/s")

    def drawn(seed: int) -> list[list[int]]:
        return prompts(count, args.prompt, config["vocab_size"], seed)

    nobody = [None] * count
    with model_folder(row) as folder, tempfile.TemporaryDirectory() as root:
        with LLM(model=folder, **settings) as llm:
            run("base_tok_s", llm, nobody)
        folders = write_adapters(Path(root), config, modules, args.rank, args.adapters)
        slots = {"max_loras": args.adapters, "max_lora_rank": args.rank}
        slots["lora_dir"] = [str(one) for one in folders]
        with LLM(model=folder, **settings, lora_config=slots) as llm:
            asked = [LoRARequest(folders[i % args.adapters].name) for i in range(count)]
            run("with_tok_s", llm, asked)
            run("none_tok_s", llm, nobody)
    figures["ratio"] = figures["with_tok_s"] / figures["base_tok_s"]
    figures["ratio_none"] = figures["none_tok_s"] / figures["base_tok_s"]
    return figures


def time_kernels(row: Row, args: argparse.Namespace, tell: Any) -> dict[str, float]:
    import triton

    from penstock.kernels.lora import lora, lora_groups

    sizes, figures = shapes_of(row.config), {}
    device, size = torch.device("cuda"), max(16, args.rank)
    layers = {"qkv": ATTENTION[:3], "o": ATTENTION[3:], "gate_up": MLP[:2], "down": MLP[2:]}
    for name, parts in layers.items():
        num_in, widths = sizes[parts[0]][1], tuple(sizes[part][0] for part in parts)
        shape: Any = {"dtype": torch.bfloat16, "device": device}
        a = torch.randn(args.adapters, len(parts), size, num_in, **shape)
        b = torch.randn(args.adapters, size, sum(widths), **shape)
        ranks = torch.full((args.adapters, len(parts)), args.rank, device=device).int()
        for num_tokens in (1, args.concurrency, 1024):
            is_prompt = num_tokens == 1024
            slots = torch.arange(num_tokens, device=device).int()
            slots = slots * 0 if is_prompt else slots % args.adapters
            x = torch.randn(num_tokens, num_in, **shape)
            y = torch.randn(num_tokens, sum(widths), **shape)
            nobody = torch.full_like(slots, -1)

            def call(slots=slots, x=x, y=y, a=a, b=b, ranks=ranks, widths=widths, p=is_prompt):
                groups = None if p else lora_groups(slots, 4)  # which a step does once
                return lambda: lora(x, y, a, b, ranks, slots, widths, groups)

            ms = triton.testing.do_bench_cudagraph(call())
            idle_ms = triton.testing.do_bench_cudagraph(call(nobody))
            num_read = (
                len(set(slots.tolist())) * args.rank * 2 * (len(parts) * num_in + sum(widths))
            )
            figures[f"{name}_{num_tokens}_us"] = ms * 1e3
            tell(
                f"{name:8} {num_tokens:5} tokens {ms * 1e3:7.1f} us, {num_read / ms / 1e9:5.2f} "
                f"TB/s of matrices; nobody has one: {idle_ms * 1e3:.1f} us"
            )
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", default=["8b-bf16"], choices=list(ROWS))
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--modules", choices=("all", "attention"), default="all")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for name in args.rows:
        print(f"{name}: {args.adapters} adapters of rank {args.rank}, {args.modules}", flush=True)
        work = time_kernels if args.kernels else measure
        found[name] = work(ROWS[name], args, lambda line: print(f"  {line}", flush=True))
        if not args.kernels:
            figures = found[name]
            print(
                f"  with / base {figures['ratio']:.3f} (goal {GOAL}), none / base "
                f"{figures['ratio_none']:.3f}",
                flush=True,
            )
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
