"""The engine process: builds executor, scheduler, loop and channel, runs, reports failure.

The only file that knows both `core` and `runtime`. Started as `python -m penstock.engine_process`
with a task on stdin; leaves when its parent closes that pipe.
"""

import gc
import os
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any

from penstock import log
from penstock.config.resolve import resolve
from penstock.config.run import Choice, RunConfig
from penstock.config.schema import EngineConfig
from penstock.core.gates import LeaderGate
from penstock.core.kv.manager import KVManager
from penstock.core.loop import EngineLoop
from penstock.core.scheduler import Scheduler
from penstock.errors import PenstockError
from penstock.hub.folder import local_folder
from penstock.ipc import channel
from penstock.ipc.address import folder_of
from penstock.ipc.messages import (
    PROTOCOL_VERSION,
    ClientLeft,
    Deltas,
    EngineInfo,
    Fatal,
    Hello,
    Message,
    Ready,
    Submit,
    ToEngine,
)
from penstock.ipc.process import Copies, on_parent_exit, read_task
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.build import LoadedRank, Timeline, finish_rank, load_rank, rank_device
from penstock.runtime.builders import KernelBuilders, stand_by
from penstock.runtime.executor import RankExecutor
from penstock.runtime.memory import fitted, longest_sequence
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.ranks import RankGroup
from penstock.types.cache_spec import CacheSize
from penstock.types.request import client_of
from penstock.types.stats import EngineCounters, IterationStats
from penstock.types.step import StepPlan

_log = log.get(__name__)
_EXIT_GRACE_S = 15.0


class Mailbox:
    """The engine's mail: greets front ends, hands requests to the loop, sends each its own."""

    def __init__(self, address: str) -> None:
        self._receiver = channel.Receiver(address, ToEngine)
        self._clients: dict[int, channel.Sender] = {}
        self._gone: set[int] = set()
        self._unsaid: deque[ClientLeft] = deque()  # what we found out ourselves
        self._info: EngineInfo | None = None

    def open(self, info: EngineInfo) -> None:
        """The engine is built: tell whoever has asked, and whoever will."""
        self._info = info
        self.broadcast(Ready(info=info))

    def receive(self, timeout_ms: int) -> Message | None:
        while True:
            if self._unsaid:
                return self._unsaid.popleft()
            message: Message | None = self._receiver.receive(timeout_ms)
            match message:
                case Hello():
                    self._greet(message)
                case Submit(requests=requests) if client_of(requests[0].id) not in self._clients:
                    pass  # on its way when its client left
                case ClientLeft(client_id=client_id):
                    self._drop(client_id)
                case _:
                    return message
            timeout_ms = 0

    def _greet(self, hello: Hello) -> None:
        if hello.client_id in self._gone:
            return
        if hello.version != PROTOCOL_VERSION:
            _log.error("front end speaks protocol %d, not %d", hello.version, PROTOCOL_VERSION)
            return
        self._clients[hello.client_id] = channel.Sender(hello.address)
        if self._info is not None:
            self.send(hello.client_id, Ready(info=self._info))

    def send(self, client_id: int, message: Message) -> None:
        client = self._clients.get(client_id)
        if client is None:
            return
        try:
            client.send(message)
        except channel.ChannelFull:
            _log.error("front end %d has stopped reading and is dropped", client_id)
            self._drop(client_id)

    def _drop(self, client_id: int) -> None:
        """Nobody reads what its requests make, so the loop must end them."""
        if client_id in self._clients:
            self._clients.pop(client_id).close()
        self._gone.add(client_id)
        self._unsaid.append(ClientLeft(client_id=client_id))

    def broadcast(self, message: Message) -> None:
        for client_id in list(self._clients):
            self.send(client_id, message)


class Engine:
    """Everything of one engine process, built in order; `run` returns when the parent says so."""

    def __init__(
        self,
        config: EngineConfig,
        mailbox: Mailbox,
        socket_folder: str,
        timeline: Timeline,
        copies: Copies | None = None,
    ) -> None:
        self._mailbox = mailbox
        with timeline.phase("find model"):
            folder = local_folder(config.model, config.revision, weights=False)
            self.spec = parse_model_spec(folder, config.model_kwargs)
            self.config = resolve(config, self.spec, probe(), str(folder))
        if self.config.load_format != "dummy":
            with timeline.phase("fetch weights"):
                local_folder(config.model, config.revision)
        builders = KernelBuilders(self.config, self.spec, copies)
        with timeline.phase("build kernels"):
            builders.run(config.model_kwargs, config.log_level)
        self._ranks = RankGroup(self.config, config.model_kwargs, socket_folder, config.log_level)
        with timeline.phase("meet ranks"):
            mesh = RankMesh.create(
                0, self.config.tp_size, self._ranks.meeting_point, rank_device(self.config, 0)
            )
        loaded = load_rank(self.config, self.spec, mesh, timeline)
        if config.kv_cache_config.host_cache_size and len(loaded.groups) > 1:
            _log.warning(
                "kv_cache_config.host_cache_size is not used: this model has windows or states, "
                "whose blocks are not moved to host memory"
            )
        cache, weights = self._ranks.agree(loaded.memory.size)
        self.config = _limited(self.config, cache)
        runner = finish_rank(loaded, self.config, self.spec, cache, timeline)
        builders.done()
        self._wire(loaded, runner, cache)
        timeline.add_rest()
        mailbox.open(self._info(loaded, cache, [loaded.memory.weights, *weights], timeline))

    def _wire(self, loaded: LoadedRank, runner: ModelRunner, cache: CacheSize) -> None:
        config, counters = self.config, EngineCounters()
        sizes = zip(loaded.groups, cache.num_blocks, strict=True)
        groups = [group.cache_group(num, config) for group, num in sizes]
        num_places = config.host_cache_bytes // loaded.groups[0].block_bytes(
            config.tokens_per_block
        )
        self.scheduler = Scheduler(config, [KVManager(groups, num_places)], counters)
        self.scheduler.add_gate(LeaderGate(self.scheduler.has_prefilled))

        def describe(plan: StepPlan, started: float) -> IterationStats:
            counters.graph_replays = runner.num_graph_replays
            seconds = time.monotonic() - started
            return describe_step(plan, counters, config, seconds, runner.device_bytes)

        self.loop = EngineLoop(
            self.scheduler,
            RankExecutor(runner, self._ranks.senders),
            self._mailbox,
            self._mailbox,
            counters,
            config.depth,
            time.monotonic,
            describe,
        )

    def _info(
        self, loaded: LoadedRank, cache: CacheSize, weights: list[int], timeline: Timeline
    ) -> EngineInfo:
        config = self.config
        max_seq_len = longest_sequence(config, cache)
        choices = [(c.name, c.value, c.reason) for c in config.choices]
        if max_seq_len < config.max_seq_len:
            reason = f"the cache holds {max_seq_len} tokens, fewer than {config.max_seq_len} asked"
            choices.append(("max_seq_len", str(max_seq_len), reason))
            _log.warning("max_seq_len is %d: %s", max_seq_len, reason)
        if loaded.memory.states is not None:
            choices.append(("state_slots", *loaded.memory.states_in_words(cache)))
        settings = {k: v for k, v in asdict(config).items() if k != "choices"}
        return EngineInfo(
            max_seq_len=max_seq_len,
            max_num_tokens=config.max_num_tokens,
            max_batch_size=config.max_batch_size,
            max_queued=config.max_queued,
            chunked_prefill=config.chunked_prefill,
            vocab_size=self.spec.vocab_size,
            total_blocks=cache.num_blocks[0],
            tokens_per_block=config.tokens_per_block,
            eos_token_ids=self.spec.eos_token_ids,
            device=probe().name,
            config=settings | {"max_seq_len": max_seq_len},
            choices=tuple(choices),
            memory=loaded.memory.as_dict(cache),
            rank_weight_bytes=tuple(weights),
            timeline=tuple(timeline.phases),
        )

    def run(self) -> None:
        """Serve until stopped. Whatever ends the loop, every open request gets its last event."""
        try:
            self.loop.run()
        except Exception as error:
            _log.exception("the engine loop failed")
            self._say_goodbye(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._say_goodbye("the engine is shutting down")
        self._ranks.stop()

    def _say_goodbye(self, message: str) -> None:
        for delta in self.scheduler.fail_all(message):
            self._mailbox.send(client_of(delta.request_id), Deltas(deltas=(delta,)))
        self._mailbox.broadcast(Fatal(message=message))


def _limited(config: RunConfig, cache: CacheSize) -> RunConfig:
    """`fitted`, and where that makes a difference it is said, here and to the front end."""
    limited = fitted(config, cache)
    if limited is config:
        return config
    asked, most = config.max_batch_size, limited.max_batch_size
    reason = f"the memory holds the states of {most} sequences at once, {asked} were asked for"
    _log.warning("max_batch_size is %d: %s", most, reason)
    choice = Choice(name="max_batch_size", value=str(most), reason=reason)
    others = tuple(c for c in config.choices if c.name != choice.name)
    return replace(limited, choices=(*others, choice))


def describe_step(
    plan: StepPlan,
    counters: EngineCounters,
    config: RunConfig,
    seconds: float,
    device_bytes: int,
) -> IterationStats:
    num_context = plan.num_entries - plan.num_decodes
    num_reused = sum(join.num_cached // config.tokens_per_block for join in plan.joins)
    return IterationStats(
        iter=plan.step_id,
        timestamp=time.time(),
        latency_ms=seconds * 1e3,
        num_active=counters.running,
        num_queued=counters.waiting,
        num_scheduled=plan.num_entries,
        num_context=num_context,
        num_generation=plan.num_decodes,
        num_context_tokens=int(plan.num_tokens[plan.num_decodes :].sum()),
        used_blocks=counters.used_blocks,
        free_blocks=counters.total_blocks - counters.used_blocks,
        max_blocks=counters.total_blocks,
        tokens_per_block=config.tokens_per_block,
        new_blocks=len(plan.growth.rows) - num_reused,
        reused_blocks=num_reused,
        missed_blocks=len(plan.growth.rows) - num_reused,
        gpu_mem_bytes=device_bytes,
    )


def main() -> None:
    task: dict[str, Any] = read_task()
    config = EngineConfig.model_validate(task["config"])
    log.setup("engine", config.log_level)
    copies = stand_by(config)
    timeline = Timeline(task["begun_at"])
    timeline.phases.append(("read settings", task["spawned_at"] - task["begun_at"]))
    timeline.phases.append(("start process and import torch", time.time() - task["spawned_at"]))
    mailbox = Mailbox(task["address"])
    stopping = threading.Event()
    engine: Engine | None = None

    def leave() -> None:
        stopping.set()
        if engine is not None:
            engine.loop.stop()
        time.sleep(_EXIT_GRACE_S)
        os._exit(1)  # stuck in a step: the parent is gone or has lost its patience

    on_parent_exit(leave)
    try:
        engine = Engine(config, mailbox, folder_of(task["address"]), timeline, copies)
    except Exception as error:
        if not isinstance(error, PenstockError):
            _log.exception("the engine did not start")
        mailbox.receive(timeout_ms=2000)
        mailbox.broadcast(Fatal(message=str(error) or type(error).__name__))
        sys.exit(1)
    _log.info("ready: %s", timeline)
    gc.collect()
    gc.freeze()
    if not stopping.is_set():
        engine.run()


if __name__ == "__main__":
    main()
