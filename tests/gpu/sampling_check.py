"""Sampling on a GPU: kernels against references, no synchronisation, and how long a step takes.

PYTHONPATH=src python tests/gpu/sampling_check.py [checks] [times]
"""

import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from penstock.kernels.sampling import reference
from penstock.kernels.sampling import triton as kernels
from penstock.sampling.sampler import Sampler
from penstock.types.sampling import SamplingParams
from penstock.types.step import RowJoin

CUDA = torch.device("cuda")
VOCAB = 128256
BATCHES = (1, 32, 256)

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.05},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "everything": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.01,
        "repetition_penalty": 1.05,
        "presence_penalty": 0.5,
        "logit_bias": {5: 1.0},
        "min_tokens": 100,
        "logprobs": 5,
    },
}


def some_logits(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Like a model's: most tokens far below a few likely ones."""
    generator = torch.Generator(CUDA).manual_seed(num_rows)
    logits = 2.5 * torch.randn(num_rows, VOCAB, generator=generator, device=CUDA)
    logits[:, ::4001] += 9.0
    return logits.to(dtype)


def joins(num_rows: int, params: dict, num_tokens: int = 1000) -> list[RowJoin]:
    tokens = np.random.default_rng(0).integers(0, VOCAB, num_tokens).astype(np.int32)
    return [
        RowJoin(
            request_id=row,
            dp_rank=0,
            row=row,
            token_ids=tokens,
            num_computed=0,
            num_prompt=num_tokens,
            sampling=SamplingParams(seed=row, **params),
            stop_ids=(7,),
        )
        for row in range(num_rows)
    ]


def check_kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        logits = some_logits(64, dtype)
        assert torch.equal(kernels.argmax(logits), reference.argmax.reference(logits))
        seeds = torch.arange(64, device=CUDA) * 10**12
        indices = torch.arange(64, device=CUDA)
        temperature = torch.linspace(0, 2, 64, device=CUDA)
        drawn = (logits, temperature, seeds, indices)
        found, expected = kernels.gumbel_argmax(*drawn), reference.gumbel_argmax.reference(*drawn)
        assert torch.equal(found, expected), (found != expected).sum()

        top_k = torch.tensor([0, 1, 50, 20] * 16, device=CUDA, dtype=torch.int32)
        top_p = torch.tensor([0.9, 1.0, 1.0, 0.8] * 16, device=CUDA)
        min_p = torch.tensor([0.0, 0.0, 0.1, 0.0] * 16, device=CUDA)
        args = (logits, temperature, top_k, top_p, min_p, VOCAB)
        found = (logits >= kernels.filter_thresholds(*args)[:, None]).sum(-1)
        expected = (logits >= reference.filter_thresholds.reference(*args)[:, None]).sum(-1)
        # A nucleus of thousands may end one value sooner or later: sums round differently.
        difference = (found - expected).abs() / expected
        assert (difference < 2e-3).all(), (found, expected)
        exact = (found == expected).float().mean()
        print(f"thresholds {dtype}: {exact:.0%} rows exact, worst {difference.max():.1e}")

    slots = torch.tensor([1, 0, 3], device=CUDA)
    in_prompt = torch.rand(4, VOCAB, device=CUDA) < 0.1
    counts = torch.randint(-5, 4, (4, VOCAB), device=CUDA, dtype=torch.int32).clamp(min=0)
    params = [torch.tensor(x, device=CUDA) for x in ([1.3, 0.7, 1.0], [0.5] * 3, [0.1, 0, -0.2])]
    found, expected = some_logits(3, torch.float32), some_logits(3, torch.float32)
    kernels.apply_penalties(found, slots, in_prompt, counts, *params)
    reference.apply_penalties.reference(expected, slots, in_prompt, counts, *params)
    torch.testing.assert_close(found, expected)


def check_same_as_cpu() -> None:
    """The whole sampler on both devices, several steps, every mode side by side."""
    logits = some_logits(len(MODES), torch.float32)
    rows = np.arange(len(MODES), dtype=np.int32)
    batch = [joins(row + 1, mode)[row] for row, mode in enumerate(MODES.values())]
    ids = {}
    for device in (CUDA, torch.device("cpu")):
        sampler = Sampler(16, VOCAB, device, seed=0)
        sampler.join(batch)
        rows_L = torch.from_numpy(rows).long().to(device)
        ids[device.type] = [
            sampler.sample(
                logits.to(device), rows, rows_L, torch.full_like(rows_L, 1000 + step)
            ).token_ids_L.tolist()
            for step in range(4)
        ]
    assert ids["cuda"] == ids["cpu"], ids


def check_never_waits() -> None:
    logits = some_logits(32, torch.bfloat16)
    rows = np.arange(32, dtype=np.int32)
    rows_L = torch.from_numpy(rows).long().cuda()
    lengths = torch.full((32,), 1000, device=CUDA, dtype=torch.int32)
    for params in MODES.values():
        sampler = Sampler(64, VOCAB, CUDA, seed=0)
        sampler.join(joins(32, params))
        sampler.sample(logits, rows, rows_L, lengths)  # compiles kernels
        others = joins(16, {})
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.join(others)  # half of the rows want something else now
            sampled = sampler.sample(logits, rows, rows_L, lengths)
            copied = sampled.logprobs.start_copy() if sampled.logprobs else None
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert copied is None or len(copied.rows(rows, np.ones_like(rows))) == 16
    print(f"never waits: {', '.join(MODES)}")


def time_steps() -> None:
    heads = [f"{b} {d}" for d in ("bf16", "fp32") for b in BATCHES]
    print(f"{'us per sample()':<28}" + "".join(f"{head:>11}" for head in heads))
    for name, params in MODES.items():
        times = []
        for dtype in (torch.bfloat16, torch.float32):
            for num_rows in BATCHES:
                logits = some_logits(num_rows, dtype)
                rows = np.arange(num_rows, dtype=np.int32)
                rows_L = torch.from_numpy(rows).long().cuda()
                lengths = torch.full((num_rows,), 1000, device=CUDA, dtype=torch.int32)
                sampler = Sampler(num_rows, VOCAB, CUDA, seed=0)
                sampler.join(joins(num_rows, params))
                step = partial(sampler.sample, logits, rows, rows_L, lengths)
                times.append(1000 * triton.testing.do_bench(step, warmup=5, rep=20))
        print(f"{name:<28}" + "".join(f"{us:>11.0f}" for us in times))


def time_ops() -> None:
    """Without the host: graph replays."""
    print("us on the GPU, kernel / reference")
    for num_rows in BATCHES:
        for dtype in (torch.bfloat16, torch.float32):
            logits = some_logits(num_rows, dtype)
            ones = torch.ones(num_rows, device=CUDA)
            seeds = torch.arange(num_rows, device=CUDA)
            k50, p90 = torch.full_like(seeds, 50), 0.9 * ones
            cases = [
                ("argmax", "argmax", ()),
                ("temperature", "gumbel_argmax", (ones, seeds, seeds)),
                ("top_k 50", "filter_thresholds", (ones, k50, ones, 0 * ones, 50)),
                ("top_p .9", "filter_thresholds", (ones, 0 * k50, p90, 0 * ones, VOCAB)),
            ]
            for name, op, args in cases:
                fast, slow = (
                    1000 * triton.testing.do_bench_cudagraph(partial(run, logits, *args), rep=5)
                    for run in (getattr(kernels, op), getattr(reference, op).reference)
                )
                print(f"  {num_rows:>4} {dtype!s:<15} {name:<12} {fast:>8.1f} / {slow:>8.1f}")


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    runs = {
        "checks": (check_kernels, check_same_as_cpu, check_never_waits),
        "times": (time_steps, time_ops),
    }
    for name in sys.argv[1:] or runs:
        for run in runs[name]:
            run()
    print("ok")
