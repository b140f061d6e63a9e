"""Which requests start when the cache is short: policies of the scheduler compared, on no GPU.

    python benchmarks/admission.py [--row 70b-fp8-kv8] [--share 0.93] [--loads burst chat ...]
                                   [--host-gib 16]
    python benchmarks/admission.py --conversations 400 [--in-bursts 512 2048 8192] [--beside 512]
                                   [--rate 8] [--tokens 1024 1024] [--padding captured none total]

The real scheduler plans; a step takes the roofline time of the row, divided by the share of the
roofline that is reached, and decodes are padded to the size of a graph. Loads: `burst` is the
table's 256 requests at once; `chat` 1500 at once whose completions have 400 tokens in the mean and
no limit; `arriving` 1200 over 2.4 minutes, 600 and 4096; `mixed` 600 whose completions have 200 or
3500 tokens; `long` 400 of 4000 tokens, limited to 8192.

--conversations: instead so many of `penstock bench chat`, at once or --rate a second, the 8B
(`simulated_chat.py`), by the tokens that a step has in a burst and by what mixed steps are padded
to. --tokens: each is one request of so many tokens in and out.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

import numpy as np
from roofline import roofline_of
from shapes import ROWS
from simulated_chat import Device, Padding, simulate_chat

from penstock.bench.conversations import FileLengths, Turn, Workload
from penstock.config.graphs import CudaGraphConfig, padded_sizes
from penstock.config.run import CapacityPolicy, RunConfig
from penstock.core.chunk_limit import ChunkLimit
from penstock.core.kv.groups import FullGroup
from penstock.core.kv.manager import KVManager
from penstock.core.scheduler import Scheduler
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters
from penstock.types.step import FROM_DEVICE, StepResult, SwapIn, SwapOut

BLOCK_SIZE = 32
END, OTHER = 7, 5  # token ids: a completion ends with the first
HOST_S = 0.0025  # of a step, what is neither GEMMs nor cache
HOST_BYTES_S = {
    SwapOut: 36e9,
    SwapIn: 15e9,
}  # between an H200 and host memory, measured


@dataclass(frozen=True, slots=True, order=True)
class Job:
    arrives_s: float
    num_in: int
    max_tokens: int
    num_out: int


@dataclass(frozen=True, slots=True)
class Figures:
    tok_s: float
    num_preempted: int
    most_running: int
    ttft_s: list[float]


def burst(rng: random.Random) -> list[Job]:
    return [Job(0.0, 1024, 1024, 1024) for _ in range(256)]


def chat(rng: random.Random) -> list[Job]:
    return [Job(0.0, rng.randint(100, 2000), 16384, drawn(rng, 400, 16384)) for _ in range(1500)]


def arriving(rng: random.Random) -> list[Job]:
    return [Job(0.12 * i, rng.randint(100, 2000), 4096, drawn(rng, 600, 4096)) for i in range(1200)]


def mixed(rng: random.Random) -> list[Job]:
    return [Job(0.0, 1024, 4096, rng.choice([200, 3500])) for _ in range(600)]


def long(rng: random.Random) -> list[Job]:
    return [Job(0.0, 500, 8192, 4000) for _ in range(400)]


LOADS: dict[str, Callable[[random.Random], list[Job]]] = {
    load.__name__: load for load in (burst, chat, arriving, mixed, long)
}


def drawn(rng: random.Random, mean: float, most: int) -> int:
    return min(most, 1 + int(rng.expovariate(1 / mean)))


def run_config(policy: CapacityPolicy, max_batch_size: int, max_num_tokens: int) -> RunConfig:
    """Of the engine's settings the scheduler looks at these; the others stand for nothing."""
    return RunConfig(
        max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_seq_len=1 << 20,
        chunked_prefill=True, capacity_policy=policy, depth=1, tokens_per_block=BLOCK_SIZE,
        block_reuse=False, partial_reuse=False, model="", model_path="", load_format="dummy",
        dtype="bfloat16", device="cuda", num_threads=1, max_queued=1 << 20,
        kv_dtype="fp8", kv_max_tokens=None, kv_memory_fraction=0.9, kv_cpu_bytes=0,
        attention_backend="triton", graph_batch_sizes=(), graph_padding=True, seed=0,
    )  # fmt: skip


def simulate(
    row_name: str, share: float, policy: CapacityPolicy, jobs: Sequence[Job], host_bytes: float = 0
) -> Figures:
    row = ROWS[row_name]
    roofline = roofline_of(row)
    assert row.max_running is not None, f"{row_name}: its cache holds everything"
    num_blocks = row.max_running * 2048 // BLOCK_SIZE
    counters = EngineCounters()
    config = run_config(policy, row.settings["max_batch_size"], row.settings["max_num_tokens"])
    block_bytes = BLOCK_SIZE * sum(layer.cached_bytes for layer in roofline.layers)
    group = FullGroup(num_blocks + 1, BLOCK_SIZE, reuse=False, partial_reuse=False)
    kv = KVManager([group], [int(host_bytes / block_bytes)])
    scheduler = Scheduler(config, [kv], counters)
    graph_sizes = padded_sizes(config.max_batch_size)
    waiting = sorted(enumerate(jobs), key=lambda one: one[1].arrives_s)[::-1]
    now, most_running = 0.0, 0
    first_s: dict[int, float] = {}
    while waiting or scheduler.has_work:
        while waiting and waiting[-1][1].arrives_s <= now:
            number, job = waiting.pop()
            scheduler.add(
                Request(
                    id=number, prompt_ids=np.ones(job.num_in, np.int32), sampling=SamplingParams(),
                    max_tokens=job.max_tokens, stop_ids=(END,),
                )
            )  # fmt: skip
        plan = scheduler.plan()
        if plan is None:
            now = waiting[-1][1].arrives_s
            continue
        _, entries = scheduler._in_flight[-1]
        num_tokens = sum(entry.num_tokens for entry in entries)
        decodes = [entry for entry in entries if entry.start == FROM_DEVICE]
        keys = sum(entry.seq.num_tokens for entry in decodes)
        if len(decodes) == len(entries):  # a graph
            num_tokens = next(size for size in graph_sizes if size >= num_tokens)
        now += roofline.decode_step_s(num_tokens, keys / num_tokens) / share + HOST_S
        now += sum(block_bytes / HOST_BYTES_S[type(op)] for op in plan.cache_ops)
        ids = np.full((len(entries), 1), OTHER, np.int32)
        numbers = np.array([bool(entry.num_logit_rows) for entry in entries], np.int32)
        for i, entry in enumerate(entries):
            if entry.seq.num_output + 1 >= jobs[entry.seq.id].num_out:
                ids[i] = END
        for delta in scheduler.commit(
            StepResult(
                step_id=plan.step_id, token_ids=ids, num_accepted=numbers,
                logprobs={}, prompt_logprobs={},
            )
        ):  # fmt: skip
            first_s.setdefault(delta.request_id, now - jobs[delta.request_id].arrives_s)
        most_running = max(most_running, counters.running)
    num_out = sum(job.num_out for job in jobs)
    return Figures(num_out / now, counters.preemptions, most_running, list(first_s.values()))


def compare_bursts(args: argparse.Namespace) -> None:
    policy = CapacityPolicy.EXPECTED_OUTPUT
    config = replace(run_config(policy, 2048, 8192), depth=2, block_reuse=True, partial_reuse=True)
    at_start, when_idle = CudaGraphConfig().mixes(config.max_batch_size, config.max_num_tokens)
    workload = Workload()
    if args.tokens is not None:
        lengths = FileLengths([[Turn(*args.tokens)]], is_grouped=True)
        workload = Workload(
            lengths=lengths,
            system_tokens=0,
            max_user_tokens=args.tokens[0],
            max_answer_tokens=args.tokens[1],
        )
    print("TTFT, of first turns and of later ones, TPOT: p50 and p99, ms; ITL: p99, ms")
    print("in bursts padding   tok/s   first turns   later turns          TPOT    ITL  eager steps")
    for tokens, padding in itertools.product(args.in_bursts, args.padding):
        limit = ChunkLimit(args.beside, config.max_num_tokens, tokens)
        device = Device(at_start + when_idle, padding)
        found = simulate_chat(
            config, limit.of_step, workload, args.conversations, device, args.rate
        )
        columns = (found.first_ttft_ms, found.later_ttft_ms, found.tpot_ms, found.itl_ms)
        first, later, tpot, itl = (quantiles(times or [0.0] * 2, n=100) for times in columns)
        print(
            f"{tokens:9} {padding:8} {found.tok_s:6.0f} {first[49]:6.0f} {first[98]:6.0f} "
            f"{later[49]:6.1f} {later[98]:6.0f} {tpot[49]:7.2f} {tpot[98]:6.1f} {itl[98]:6.1f} "
            f"{found.num_eager:12}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default="70b-fp8-kv8")
    parser.add_argument("--share", type=float, default=0.93, help="of the roofline")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", type=CapacityPolicy, default=list(CapacityPolicy))
    parser.add_argument("--host-gib", type=float, default=0, help="host_cache_size")
    parser.add_argument("--conversations", type=int, help="at once, in place of the loads")
    parser.add_argument("--in-bursts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--beside", type=int, default=512, help="prompt tokens beside decodes")
    parser.add_argument("--rate", type=float, help="of conversations, a second; else all at once")
    parser.add_argument(
        "--tokens", type=int, nargs=2, metavar=("IN", "OUT"), help="one request each"
    )
    parser.add_argument(
        "--padding", type=Padding, choices=list(Padding), nargs="+", default=[Padding.CAPTURED]
    )
    args = parser.parse_args()
    if args.conversations is not None:
        compare_bursts(args)
        return
    print(f"{'load':9} {'policy':20} {'tok/s':>6} {'preempted':>9} {'running':>8}  TTFT p50, p99 s")
    for name in args.loads:
        jobs = LOADS[name](random.Random(1))
        for policy in args.policies:
            found = simulate(args.row, args.share, policy, jobs, args.host_gib * 2**30)
            cuts = quantiles(found.ttft_s, n=100)
            print(
                f"{name:9} {policy:20} {found.tok_s:6.0f} {found.num_preempted:9} "
                f"{found.most_running:8}  {cuts[49]:8.1f} {cuts[98]:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
