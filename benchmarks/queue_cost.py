"""What `plan` and `commit` cost with many waiting, on no GPU: the scheduler alone, a step for free.

    python benchmarks/queue_cost.py [--running 256] [--waiting 8000] [--tenants 1 2 64]

Prints microseconds of a plan and of a commit with all rows taken, and of adding and aborting a
waiting request; of `--steps` steps the time that one in ten stays below, as others use the machine.
"""

import argparse
import time
from statistics import quantiles
from typing import Any

import numpy as np

from penstock.config.run import CapacityPolicy, RunConfig
from penstock.core.kv.groups import FullGroup
from penstock.core.kv.manager import KVManager
from penstock.core.scheduler import Scheduler
from penstock.types.request import Request
from penstock.types.sampling import SamplingParams
from penstock.types.stats import EngineCounters
from penstock.types.step import StepResult


def scheduler_of(num_rows: int) -> Scheduler:
    config = RunConfig(
        max_batch_size=num_rows, max_num_tokens=8192, max_seq_len=1 << 20, chunked_prefill=True,
        capacity_policy=CapacityPolicy.MAX_UTILIZATION, depth=1, tokens_per_block=32,
        block_reuse=True, partial_reuse=True, model="", model_path="", load_format="dummy",
        dtype="bfloat16", device="cuda", num_threads=1, max_queued=1 << 20,
        kv_dtype="bfloat16", kv_max_tokens=None, kv_memory_fraction=0.9, kv_cpu_bytes=0,
        attention_backend="triton", graph_batch_sizes=(), graph_padding=True, seed=0,
    )  # fmt: skip
    group = FullGroup(1 << 16, 32, reuse=True, partial_reuse=True)
    return Scheduler(config, [KVManager([group])], EngineCounters())


def request(number: int, num_tenants: int) -> Request:
    more: dict[str, Any] = {} if num_tenants == 1 else {"tenant": number % num_tenants}
    return Request(
        id=number, prompt_ids=np.arange(number, number + 64, dtype=np.int32),
        sampling=SamplingParams(), max_tokens=1 << 18, **more,
    )  # fmt: skip


def step(scheduler: Scheduler) -> tuple[float, float]:
    begun = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    assert plan is not None
    result = StepResult(
        step_id=plan.step_id,
        token_ids=np.full((plan.num_entries, 1), 5, np.int32),
        num_accepted=(plan.num_logit_rows > 0).astype(np.int32),
        logprobs={},
        prompt_logprobs={},
    )
    given = time.perf_counter()
    scheduler.commit(result)
    return planned - begun, time.perf_counter() - given


def measure(num_running: int, num_waiting: int, num_tenants: int, num_steps: int) -> list[float]:
    scheduler = scheduler_of(num_running)
    numbers = range(num_running + num_waiting)
    added = []
    for number in numbers:
        one = request(number, num_tenants)
        begun = time.perf_counter()
        scheduler.add(one)
        added.append(time.perf_counter() - begun)
    while sum(seq.has_prefilled for seq in scheduler.running) < num_running:
        step(scheduler)
    times = [step(scheduler) for _ in range(num_steps)]
    running = {seq.id for seq in scheduler.running}
    aborted = []
    for number in [one for one in numbers if one not in running][::2]:
        begun = time.perf_counter()
        scheduler.abort(number)
        aborted.append(time.perf_counter() - begun)
    columns = [*zip(*times, strict=True), added[num_running:], aborted]
    return [quantiles(column, n=10)[0] * 1e6 for column in columns]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=8000)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2, 64])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"{'tenants':>7} {'plan us':>8} {'commit us':>9} {'add us':>7} {'abort us':>8}")
    for num_tenants in args.tenants:
        found = measure(args.running, args.waiting, num_tenants, args.steps)
        print(
            f"{num_tenants:7} {found[0]:8.0f} {found[1]:9.0f} {found[2]:7.1f} {found[3]:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
