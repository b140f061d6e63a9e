"""Sums over ranks on one GPU: NCCL with a lone rank and one-shot sums, in CUDA graphs.

    PYTHONPATH=src python tests/gpu/collectives_check.py

What several GPUs would do is run as far as one can: a process group of one rank with NCCL and with
symmetric memory, in whole engines; the kernel of several ranks with streams as ranks, which meet
by their flags while they run side by side. Bytes between GPUs are not checked here.
"""

import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "fixtures"), str(ROOT / "src")]

from local_engine import LocalEngine  # noqa: E402

from penstock.kernels.all_reduce import sum_add_rms_norm, sum_parts  # noqa: E402
from penstock.kernels.all_reduce.triton import one_shot  # noqa: E402
from penstock.kernels.norm import add_rms_norm  # noqa: E402
from penstock.parallel.mesh import RankMesh  # noqa: E402
from penstock.parallel.one_shot import OneShot  # noqa: E402

MODELS = (ROOT / "src/penstock/hub/tiny", ROOT / "tests/siblings/qwen2_moe")
EPS = 1e-5


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


def check_streams_as_ranks(num_ranks: int, num_tokens: int, size: int, num_times: int) -> None:
    """Every stream is a rank with a graph of its own, and all are replayed at once."""
    dtype, device = torch.bfloat16, "cuda"
    shared = torch.zeros(num_ranks, num_tokens, size, dtype=dtype, device=device)
    flags = torch.zeros(num_ranks, num_tokens, num_ranks, dtype=torch.int32, device=device)
    parts_R = torch.tensor([one.data_ptr() for one in shared], device=device)
    flags_R = torch.tensor([one.data_ptr() for one in flags], device=device)
    xs = torch.randn(num_ranks, num_tokens, size, device=device).to(dtype)
    residual = torch.randn(num_tokens, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    streams = [torch.cuda.Stream() for _ in range(num_ranks)]

    def launch(rank: int) -> list[torch.Tensor]:
        """Twice: the buffer is written again while others may still read it."""
        norm = (residual, weight, EPS)
        first = one_shot(xs[rank], parts_R, flags_R, rank, norm)
        return [*first, one_shot(xs[rank] * 2, parts_R, flags_R, rank, None)[1]]

    def all_at_once(act: Callable[[int], object]) -> list[object]:
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found.append(act(rank))
        torch.cuda.synchronize()
        return found

    all_at_once(launch)
    graphs, outputs = [], []
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outputs.append(launch(rank))
        graphs.append(graph)
    for turn in range(num_times):
        xs.copy_(torch.randn(xs.shape, device=device))
        all_at_once(lambda rank: graphs[rank].replay())
        normed, total = sum_add_rms_norm.reference(xs, residual, weight, EPS)
        expected = (normed, total, sum_parts.reference(xs * 2))
        for rank, found in enumerate(outputs):
            for one, right in zip(found, expected, strict=True):
                assert close(one, right), f"turn {turn}, rank {rank}: {(one - right).abs().max()}"
        for others in zip(*outputs, strict=True):
            assert all(torch.equal(one, others[0]) for one in others), "ranks have other sums"
    assert not flags.any()
    print(f"ok   {num_ranks} streams as ranks, {num_tokens} x {size}, {num_times} replays")


def microseconds(act: Callable[[], object], num_times: int = 50) -> float:
    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(num_times):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / 20)
    return statistics.median(found)


def check_a_lone_rank() -> None:
    group = dist.group.WORLD
    way = OneShot(group, torch.device("cuda", 0))
    for dtype in (torch.bfloat16, torch.float32):
        for num_tokens, size in ((1, 4096), (32, 4096), (7, 5120), (16, 8192 // dtype.itemsize)):
            x, residual = (torch.randn(num_tokens, size, device="cuda").to(dtype) for _ in range(2))
            weight = torch.randn(size, device="cuda").to(dtype)
            if not way.fits(x):
                continue
            assert torch.equal(way.all_reduce(x), x)
            for found, right in zip(
                way.all_reduce_add_rms_norm(x, residual, weight, EPS),
                add_rms_norm.reference(x, residual, weight, EPS),
                strict=True,
            ):
                assert close(found, right)
    assert not way.fits(torch.empty(64, 4096, dtype=torch.bfloat16, device="cuda"))
    x, residual = (torch.randn(32, 4096, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(4096, device="cuda").bfloat16()

    def with_nccl() -> None:
        dist.all_reduce(x, group=group)
        add_rms_norm(x, residual, weight, EPS)

    fused = partial(way.all_reduce_add_rms_norm, x, residual, weight, EPS)
    print(
        f"ok   one-shot sums of a lone rank; 32 x 4096 in a graph, us: fused "
        f"{microseconds(fused):.1f}, NCCL and norm {microseconds(with_nccl):.1f}, norm alone "
        f"{microseconds(lambda: add_rms_norm(x, residual, weight, EPS)):.1f}"
    )


def check_engines(model: Path) -> None:
    create = RankMesh.create
    run, calls = OneShot._run, []
    prompts = [[*range(20, 20 + n)] for n in (5, 64, 300)]
    start = partial(LocalEngine, str(model), kv_cache_config={"max_tokens": 8192}, seed=1)

    def counted(self: OneShot, x: torch.Tensor, norm: object) -> object:
        calls.append((norm is not None, torch.cuda.is_current_stream_capturing()))
        return run(self, x, norm)

    reduced = []
    all_reduce = dist.all_reduce

    def counted_nccl(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        reduced.append(torch.cuda.is_current_stream_capturing())
        return all_reduce(x, *args, **kwargs)

    def tokens(**settings: object) -> list[object]:
        engine = start(**settings)
        assert engine.engine.config.graph_batch_sizes, "without graphs this shows nothing"
        found = engine.generate(prompts, 48)
        engine.engine._ranks.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        return found

    expected = tokens()
    OneShot._run = counted
    dist.all_reduce = counted_nccl
    try:
        RankMesh.create = partial(create, lone_roles=("attention", "vocab"))
        assert tokens() == expected, "NCCL with one rank gives other tokens"
        assert any(reduced), "NCCL was in no graph"
        RankMesh.create = create
        assert tokens(allreduce_strategy="ONESHOT") == expected, "one-shot gives other tokens"
    finally:
        RankMesh.create, OneShot._run, dist.all_reduce = create, run, all_reduce
    for is_fused in (True, False):
        assert (is_fused, True) in calls, "one-shot was in no graph"
    print(f"ok   {model.name}: NCCL and one-shot sums of one rank, in graphs, keep the tokens")


def main() -> None:
    failed = False

    def part(name: str, act: Callable[[], object]) -> None:
        nonlocal failed
        try:
            act()
        except Exception as error:
            failed = True
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)

    for shape in ((2, 1, 4096), (2, 16, 4096), (4, 8, 5120), (8, 4, 8192)):
        part(f"streams {shape}", partial(check_streams_as_ranks, *shape, 50))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29541")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    part("a lone rank", check_a_lone_rank)
    dist.destroy_process_group()
    for model in MODELS:
        part(model.name, partial(check_engines, model))
    sys.exit(failed)


if __name__ == "__main__":
    main()
