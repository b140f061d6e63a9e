"""Sums over ranks on one GPU: NCCL with a lone rank, and one-shot sums, in CUDA graphs.

    PYTHONPATH=src python tests/gpu/collectives_check.py [PART ...] [--seconds 75]

What several GPUs would do is run as far as one can. Each part is a process of its own, which is
killed when its time is over, so that one that hangs stops no other:

    nccl     a process group of one rank, with NCCL, in whole engines with CUDA graphs
    ranks    the kernel of several ranks, all of them in one launch, whose programs meet by flags
    memory   a lone rank in torch's symmetric memory, and what sums take in a graph
    oneshot  allreduce_strategy ONESHOT in whole engines with CUDA graphs
    streams  the kernel of several ranks, each a graph on a stream of its own, replayed at once
    absent   a rank that never comes: the launch fails, it does not hang

Bytes between GPUs are not checked here. While one kernel waits for another, nothing may be loaded
or allocated on the GPU, since the driver may do that behind all that runs: so the parts with
several ranks load and allocate everything before.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "fixtures"), str(ROOT / "src")]

MODEL = ROOT / "src/penstock/hub/tiny"
EPS = 1e-5
MAX_POLLS = 1 << 21  # seconds
SHAPES = ((2, 1, 4096), (2, 16, 4096), (4, 8, 5120), (8, 4, 8192))  # ranks, tokens, hidden size
SECONDS = {"nccl": 40, "ranks": 20, "memory": 20, "oneshot": 25, "streams": 25, "absent": 15}
SIDE_BY_SIDE = (("nccl",), ("ranks",), ("memory",), ("oneshot", "streams"), ("absent",))
STARTED = time.monotonic()


def say(what: str) -> None:
    print(f"{what} ({time.monotonic() - STARTED:.1f} s)", flush=True)


def close(found, expected) -> bool:
    import torch

    return torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


class Ranks:
    """What several ranks have, all on this GPU."""

    def __init__(self, num_ranks: int, num_tokens: int, size: int) -> None:
        import torch

        self.shape = num_ranks, num_tokens, size
        dtype, device = torch.bfloat16, "cuda"
        self.shared = torch.zeros(num_ranks, num_tokens, size, dtype=dtype, device=device)
        flags = (num_ranks, num_tokens, num_ranks)
        self.flags = torch.zeros(flags, dtype=torch.int32, device=device)
        self.parts_R = torch.tensor([one.data_ptr() for one in self.shared], device=device)
        self.flags_R = torch.tensor([one.data_ptr() for one in self.flags], device=device)
        self.xs = torch.zeros(num_ranks, num_tokens, size, dtype=dtype, device=device)
        self.twice = torch.zeros_like(self.xs)
        self.residual = torch.randn(num_tokens, size, device=device).to(dtype)
        self.weight = torch.randn(size, device=device).to(dtype)
        self.draw()

    def draw(self) -> None:
        import torch

        self.xs.copy_(torch.randn(self.xs.shape, device="cuda"))
        self.twice.copy_(self.xs * 2)
        torch.cuda.synchronize()

    def check(self, outputs, what: str) -> None:
        """`outputs`: of each rank, the norm and the sum of its tokens, and that of twice them."""
        import torch

        from penstock.kernels.all_reduce import sum_add_rms_norm, sum_parts

        normed, total = sum_add_rms_norm.reference(self.xs, self.residual, self.weight, EPS)
        expected = (normed, total, sum_parts.reference(self.twice))
        for rank, found in enumerate(outputs):
            for one, right in zip(found, expected, strict=True):
                assert close(one, right), f"{what}, rank {rank}: {(one - right).abs().max()}"
        for others in zip(*outputs, strict=True):
            assert all(torch.equal(one, others[0]) for one in others), "ranks have other sums"
        assert not self.flags.any(), "flags are set behind the sum"


def nccl() -> None:
    import torch
    import torch.distributed as dist
    from local_engine import LocalEngine

    from penstock.parallel.mesh import RankMesh

    say("imported")
    expected, _ = engine_tokens(LocalEngine)
    say("an engine without a group")
    reduced, all_reduce, create = [], dist.all_reduce, RankMesh.create

    def counted(x, *args, **kwargs):
        reduced.append(torch.cuda.is_current_stream_capturing())
        return all_reduce(x, *args, **kwargs)

    meet = partial(create, lone_roles=("attention", "vocab"))
    with patch.object(dist, "all_reduce", counted), patch.object(RankMesh, "create", meet):
        found, ran_as = engine_tokens(LocalEngine)
    assert dist.get_backend() == "nccl"
    assert found == expected, "NCCL with one rank gives other tokens"
    assert any(reduced), "NCCL was in no graph"
    assert ran_as["graph"] > 20, ran_as
    say(
        f"ok   NCCL, a group of one rank: {sum(reduced)} sums in graphs, {ran_as['graph']} steps "
        "replayed, tokens are those without a group"
    )


def oneshot() -> None:
    import torch
    from local_engine import LocalEngine

    from penstock.parallel.one_shot import OneShot

    expected, _ = engine_tokens(LocalEngine)
    say("an engine without a group")
    run, calls = OneShot._run, []

    def counted(self, x, norm):
        calls.append((norm is not None, torch.cuda.is_current_stream_capturing()))
        return run(self, x, norm)

    with patch.object(OneShot, "_run", counted):
        found, ran_as = engine_tokens(LocalEngine, allreduce_strategy="ONESHOT")
    assert found == expected, "one-shot sums give other tokens"
    for is_fused in (True, False):
        assert (is_fused, True) in calls, "one-shot sums were in no graph"
    num_captured = sum(is_captured for _, is_captured in calls)
    say(
        f"ok   one-shot sums of one rank: {num_captured} in graphs, "
        f"{ran_as['graph']} steps replayed, tokens are those without a group"
    )


def engine_tokens(start, **settings):
    """Greedy tokens, and how many steps ran as what. Small graphs, so that it starts quickly."""
    from collections import Counter

    from penstock.core.scheduler import Scheduler

    ran_as: Counter = Counter()
    commit = Scheduler.commit

    def watched(self, result):
        ran_as[str(result.ran_as)] += 1
        return commit(self, result)

    with patch.object(Scheduler, "commit", watched):
        engine = start(
            str(MODEL), kv_cache_config={"max_tokens": 8192}, seed=1, max_batch_size=4,
            max_num_tokens=128, cuda_graph_config={"num_tokens": [128], "enable_mixed": False},
            **settings,
        )  # fmt: skip
        assert engine.engine.config.graph_batch_sizes, "without graphs this shows nothing"
        found = engine.generate([[*range(20, 20 + n)] for n in (5, 64, 300)], 48)
    engine.engine._ranks.stop()
    return found, ran_as


def ranks() -> None:
    """One launch, so that all programs are on the GPU at once if there is room for them."""
    import torch
    from ranks_kernel import all_ranks
    from triton import next_power_of_2

    for shape in SHAPES:
        num_ranks, num_tokens, size = shape
        assert num_ranks * num_tokens <= torch.cuda.get_device_properties(0).multi_processor_count
        have = Ranks(*shape)
        outputs = torch.zeros(3, *shape, dtype=torch.bfloat16, device="cuda")

        def launch(have=have, outputs=outputs):
            num_ranks, num_tokens, size = have.shape
            for x, out, total, has_norm in (
                (have.xs, outputs[0], outputs[1], True),
                (have.twice, outputs[2], outputs[2], False),
            ):
                all_ranks[(num_tokens, num_ranks)](
                    x, have.parts_R, have.flags_R, have.residual, have.weight, out, total,
                    num_tokens * size, size, MAX_POLLS, EPS, R=num_ranks, D=size,
                    BLOCK_D=next_power_of_2(size), HAS_NORM=has_norm, num_warps=8,
                )  # fmt: skip

        launch()
        have.check(list(outputs.transpose(0, 1)), f"{shape}, first launch")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        for turn in range(50):
            have.draw()
            graph.replay()
            torch.cuda.synchronize()
            have.check(list(outputs.transpose(0, 1)), f"{shape}, replay {turn}")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(200):
            graph.replay()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end) * 1000 / 400
        say(f"ok   {num_ranks} ranks in one launch, {num_tokens} x {size}: {took:.1f} us a sum")


def streams() -> None:
    import torch

    for shape in SHAPES:
        have = Ranks(*shape)
        lanes = [torch.cuda.Stream() for _ in range(shape[0])]

        def launch(rank, have=have):
            """Twice: the buffer is written again while others may still read it."""
            sum_of = partial(
                one_shot_of(), parts_R=have.parts_R, flags_R=have.flags_R, rank=rank,
                max_polls=MAX_POLLS,
            )  # fmt: skip
            first = sum_of(have.xs[rank], norm=(have.residual, have.weight, EPS))
            return [*first, sum_of(have.twice[rank], norm=None)[1]]

        with only_loaded():
            launch(0)
        graphs, outputs = [], []
        for rank, lane in enumerate(lanes):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=lane):
                outputs.append(launch(rank))
            graphs.append(graph)
        say(f"     {shape}: captured")
        for turn in range(50):
            have.draw()
            for graph, lane in zip(graphs, lanes, strict=True):
                with torch.cuda.stream(lane):
                    graph.replay()
            torch.cuda.synchronize()
            have.check(outputs, f"{shape}, turn {turn}")
        say(f"ok   {shape[0]} streams as ranks, {shape[1]} x {shape[2]}, 50 replays of each graph")


def one_shot_of():
    from penstock.kernels.all_reduce.triton import one_shot

    return one_shot


def only_loaded():
    """Within it the kernel is compiled and loaded by a grid of no programs, and not run."""
    from penstock.kernels.all_reduce import triton as module

    launch = module._one_shot.launch
    loaded = type("Loaded", (), {"__getitem__": lambda _, __: partial(launch, (0,))})()
    return patch.object(module, "_one_shot", loaded)


def absent() -> None:
    """Of two ranks one is launched. Last, since nothing runs in this process behind it."""
    import torch

    have = Ranks(2, 1, 4096)
    started = time.monotonic()
    try:
        one_shot_of()(have.xs[0], have.parts_R, have.flags_R, 0, None, max_polls=1 << 16)
        torch.cuda.synchronize()
    except RuntimeError as error:
        say(
            f"ok   a rank that never comes: {time.monotonic() - started:.2f} s, then: {error}"[:150]
        )
        os._exit(0)  # what is left of CUDA would complain
    raise AssertionError("the launch ended well without the other rank")


def memory() -> None:
    import torch
    import torch.distributed as dist

    from penstock.kernels.norm import add_rms_norm
    from penstock.parallel.mesh import RankMesh
    from penstock.types.mesh import MeshShape

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    mesh = RankMesh.create(0, MeshShape(), "127.0.0.1:29541", device, with_one_shot=True)
    way = mesh.role("attention").one_shot
    assert way is not None
    say("     symmetric memory is there")
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
    say("     sums are right")
    x, residual = (torch.randn(32, 4096, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(4096, device="cuda").bfloat16()

    def with_nccl() -> None:
        dist.all_reduce(x, group=mesh.role("attention").group)
        add_rms_norm(x, residual, weight, EPS)

    fused = partial(way.all_reduce_add_rms_norm, x, residual, weight, EPS)
    say(
        f"ok   one-shot sums of a lone rank; 32 x 4096 in a graph, us: fused "
        f"{microseconds(fused):.1f}, NCCL and norm {microseconds(with_nccl):.1f}, norm alone "
        f"{microseconds(lambda: add_rms_norm(x, residual, weight, EPS)):.1f}"
    )


def microseconds(act: Callable[[], object], num_times: int = 50) -> float:
    import torch

    act()
    torch.cuda.synchronize()
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


PARTS = {part.__name__: part for part in (nccl, ranks, memory, oneshot, streams, absent)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=140, help="for all parts together")
    parser.add_argument("--here", action="store_true", help="in this process")
    args = parser.parse_args()
    if args.here:
        PARTS[args.parts[0]]()
        # Groups and graphs that are still there may wait for each other at the end.
        sys.stdout.flush()
        os._exit(0)
    failed = []
    for together in SIDE_BY_SIDE:
        running = [start(part) for part in together if not args.parts or part in args.parts]
        for part, process in running:
            limit = min(SECONDS[part], args.seconds - (time.monotonic() - STARTED))
            try:
                code = process.wait(max(0, limit))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                failed.append(f"{part}: not done after {limit:.0f} s")
            else:
                failed += [f"{part}: code {code}"] if code else []
    for one in failed:
        print(f"FAIL {one}", flush=True)
    sys.exit(bool(failed))


def start(part: str) -> tuple[str, subprocess.Popen]:
    environment = dict(os.environ)
    if part == "streams":
        # All kernels of a library when it is loaded, and a queue for every stream.
        environment |= {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    command = [sys.executable, "-u", __file__, part, "--here"]
    return part, subprocess.Popen(command, env=environment)


if __name__ == "__main__":
    main()
