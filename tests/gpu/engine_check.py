"""The engine on a GPU against transformers, and a trace of its decode steps.

    PYTHONPATH=src python tests/gpu/engine_check.py [parity] [stress] [trace]

parity: bf16 with Triton attention and CUDA graphs. The largest logit error against fp32 is at most
twice that of transformers' own bf16; greedy tokens are those of fp32 except where its two best are
closer than that error.
stress: fp32, shared prefixes, too small a pool, aborts: every output is transformers' own.
trace: decode steps of 32 requests on the Llama-3.1-8B shape; prints how long the GPU is idle and
where the time goes, and fails when it idles 3 % or more between steps, or when the host waits for
the device anywhere but for results.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fixtures"), str(ROOT / "benchmarks")]

from local_engine import LocalEngine  # noqa: E402
from shapes import LLAMA_3_1_8B  # noqa: E402

FAILED: list[str] = []


def expect(ok: bool, what: str) -> None:
    print(f"{'ok  ' if ok else 'FAIL'} {what}", flush=True)
    if not ok:
        FAILED.append(what)


class LogitTap:
    """Records the logits the engine samples from, in order, eager and replayed alike."""

    def __init__(self, engine: LocalEngine) -> None:
        self.rows: list[torch.Tensor] = []
        runner = engine.runner
        inner = runner._sampler.sample

        def sample(logits, *args):
            self.rows.append(logits.float().clone())
            return inner(logits, *args)

        patch.object(runner._sampler, "sample", sample).start()


def checkpoints(folder: Path):
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape = dict(
        vocab_size=2048, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096,
        initializer_range=0.05,
    )  # fmt: skip
    llama3 = dict(
        rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=1024,
    )  # fmt: skip
    kinds = {
        "llama d64": (LlamaForCausalLM, LlamaConfig(**shape, rope_parameters=llama3)),
        "llama d128": (LlamaForCausalLM, LlamaConfig(**shape, head_dim=128)),
        "mistral w100": (MistralForCausalLM, MistralConfig(**shape, sliding_window=100)),
        "qwen2 bias": (Qwen2ForCausalLM, Qwen2Config(**shape)),
        "qwen3 norm": (Qwen3ForCausalLM, Qwen3Config(**shape, head_dim=128)),
    }
    for name, (model_class, config) in kinds.items():
        torch.manual_seed(0)
        config.eos_token_id = None
        model = model_class(config).float()
        path = folder / name.replace(" ", "_")
        model.save_pretrained(path)
        yield name, path, model_class


def check_parity(folder: Path) -> None:
    for name, path, model_class in checkpoints(folder):
        exact = model_class.from_pretrained(path, dtype=torch.float32).cuda().eval()
        rough = model_class.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
        generator = torch.Generator().manual_seed(1)
        lengths = [1, 31, 32, 33, 200, 517, 64, 96]
        prompts = [torch.randint(0, 2048, (n,), generator=generator).tolist() for n in lengths]
        engine = LocalEngine(
            path, dtype="bfloat16", max_num_tokens=256, max_batch_size=8, max_seq_len=1024,
            kv_cache_config={"max_tokens": 16384},
            cuda_graph_config={"max_batch_size": 8, "enable_padding": True},
        )  # fmt: skip
        for label, batch in (("batched", prompts), ("single", prompts[4:5])):
            tap = LogitTap(engine)
            ids = [engine.submit(p, 64) for p in batch]
            engine.run()
            ours_error = rough_error = 0.0
            mismatches, worst_gap = 0, 0.0
            for rid, prompt in zip(ids, batch, strict=True):
                new = engine.tokens(rid)
                text = torch.tensor([prompt + new]).cuda()
                with torch.inference_mode():
                    at = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
                    truth = exact(text).logits[0, at].float()
                    rough_error = max(
                        rough_error, (rough(text).logits[0, at].float() - truth).abs().max().item()
                    )
                chosen = truth.gather(1, torch.tensor(new).cuda()[:, None])[:, 0]
                gaps = truth.max(1).values - chosen
                mismatches += int((gaps > 0).sum())
                worst_gap = max(worst_gap, gaps.max().item())
                if label == "single":
                    ours = torch.cat(tap.rows)
                    ours_error = (ours - truth).abs().max().item()
            if label == "single":
                expect(
                    ours_error <= 2 * rough_error,
                    f"{name}: logit error {ours_error:.4f}, transformers bf16 {rough_error:.4f}",
                )
            expect(
                worst_gap <= 2 * rough_error,
                f"{name} {label}: {mismatches} of {64 * len(batch)} tokens differ from fp32 greedy,"
                f" all within {worst_gap:.4f} of its best (bf16 error {rough_error:.4f})",
            )
        counters = engine.counters
        expect(counters.graph_replays > 0, f"{name}: graphs replayed")
        expect(counters.max_steps_in_flight == 2, f"{name}: two steps in flight")
        expect(counters.prefill_chunks > len(prompts) + 1, f"{name}: prompts were chunked")
        expect(counters.used_blocks == 0, f"{name}: pool empty afterwards")
        del engine, exact, rough
        torch.cuda.empty_cache()


def check_stress(folder: Path) -> None:
    _, path, model_class = next(checkpoints(folder / "stress"))
    exact = model_class.from_pretrained(path, dtype=torch.float32).cuda().eval()
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(0, 2048, (150,), generator=generator).tolist()
    prompts = [
        shared[: 40 + 9 * i] + torch.randint(0, 2048, (1 + 5 * i,), generator=generator).tolist()
        for i in range(12)
    ]
    with torch.inference_mode():
        expected = [
            exact.generate(torch.tensor([p]).cuda(), max_new_tokens=48, do_sample=False)[
                0, len(p) :
            ]
            for p in prompts
        ]
    # 40 blocks for 24 sequences that want 7 to 10 each.
    engine = LocalEngine(
        path, dtype="float32", max_num_tokens=96, max_batch_size=16, max_seq_len=512,
        kv_cache_config={"max_tokens": 40 * 32},
        cuda_graph_config={"max_batch_size": 16, "enable_padding": True},
    )  # fmt: skip
    ids = [engine.submit(p, 48) for p in prompts * 2]
    dropped: set[int] = set()
    for turn in range(4000):
        engine.turn()
        if turn % 60 == 59 and len(dropped) < 4:
            dropped.add(ids[len(dropped) * 5 + 3])
            engine.abort(*dropped)
    engine.run()
    wrong = [
        i for i, rid in enumerate(ids)
        if rid not in dropped and engine.tokens(rid) != expected[i % 12].tolist()
    ]  # fmt: skip
    counters = engine.counters
    expect(
        not wrong, f"stress: {len(ids) - len(dropped)} outputs are those of transformers {wrong}"
    )
    expect(counters.preemptions > 0, f"stress: {counters.preemptions} preemptions")
    expect(counters.prefix_hit_tokens > 0, f"stress: {counters.prefix_hit_tokens} tokens reused")
    expect(counters.used_blocks == 0, "stress: pool empty afterwards")


def check_trace(folder: Path) -> None:
    path = folder / "llama8b"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    engine = LocalEngine(
        path, load_format="dummy", max_seq_len=2048, max_batch_size=32,
        cuda_graph_config={"max_batch_size": 32, "enable_padding": True},
        kv_cache_config={"enable_block_reuse": False, "max_tokens": 70000},
    )  # fmt: skip
    print("timeline:", [(name, round(s, 2)) for name, s in engine.timeline.phases])
    generator = torch.Generator().manual_seed(1)
    for _ in range(32):
        engine.submit(torch.randint(0, 128256, (1024,), generator=generator).tolist(), 200)
    while engine.counters.generated_tokens < 32 * 20:
        engine.turn()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(40):
            engine.turn()
        torch.cuda.set_sync_debug_mode("default")
    syncs = {
        str(w.filename) + ":" + str(w.lineno)
        for w in caught
        if "synchronizing CUDA" in str(w.message)
    }
    expect(not syncs, f"no hidden synchronisation in 20 decode steps {sorted(syncs)}")

    # Only the device is traced: recording the host's own calls would slow the host down.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(100):
            engine.turn()
        torch.cuda.synchronize()
    spans: list[tuple[float, float, str]] = []
    by_kernel: dict[str, tuple[float, int]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end, event.name))
            total, count = by_kernel.get(event.name, (0.0, 0))
            by_kernel[event.name] = (total + event.time_range.elapsed_us(), count + 1)
    spans.sort()
    spans = spans[len(spans) // 10 : -len(spans) // 10]  # without the ramp at both ends
    whole = spans[-1][1] - spans[0][0]
    idle = between = 0.0
    reached = spans[0][1]
    for start, end, name in spans[1:]:
        idle += max(0.0, start - reached)
        if name.startswith("_decode_inputs"):  # the first kernel of a step
            between += max(0.0, start - reached)
        reached = max(reached, end)
    expect(
        between / whole < 0.03,
        f"GPU idle {100 * between / whole:.2f} % of {whole / 1e3:.1f} ms between decode steps "
        f"({100 * idle / whole:.2f} % with the gaps between a step's own kernels)",
    )
    for name, (total, count) in sorted(by_kernel.items(), key=lambda item: -item[1][0])[:14]:
        print(f"  {total / 1e3:8.2f} ms {count:6d}x {name[:110]}")
    engine.run()


def main() -> None:
    wanted = sys.argv[1:] or ["parity", "stress", "trace"]
    with tempfile.TemporaryDirectory() as folder:
        if "parity" in wanted:
            check_parity(Path(folder))
        if "stress" in wanted:
            check_stress(Path(folder))
        if "trace" in wanted:
            check_trace(Path(folder))
    print(f"{len(FAILED)} failed")
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
