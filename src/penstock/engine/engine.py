"""`Engine`: rank 0's executor, the scheduler and their loop, built in order and run.

This package is the only one that knows both `core` and `runtime`.
"""

import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from penstock import log
from penstock.config.launch import Place, rank_secret
from penstock.config.resolve import resolve
from penstock.config.run import RunConfig
from penstock.config.schema import EngineConfig
from penstock.core.chunk_limit import ChunkLimit
from penstock.core.drafts import DraftsPerDecode
from penstock.core.gates import LeaderGate
from penstock.core.kv.manager import KVManager
from penstock.core.loop import EngineLoop, Executor
from penstock.core.micro_batches import MicroBatches
from penstock.core.scheduler import Scheduler
from penstock.engine.adapters import Adapters, EquippedExecutor
from penstock.engine.cache_groups import cache_group
from penstock.engine.grammars import Grammars
from penstock.engine.iteration import count_step, describe_step
from penstock.engine.mailbox import Mailbox
from penstock.hub.folder import local_folder
from penstock.hub.generation_config import sampling_defaults
from penstock.hub.task import served_task
from penstock.ipc.messages import EngineInfo, Fatal
from penstock.ipc.process import ForkedWorkers
from penstock.kernels.device import probe
from penstock.models.eagle3 import parse_eagle3_spec
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.adapters import find_adapters
from penstock.runtime.compile_workers import CompileWorkers
from penstock.runtime.executor import RankExecutor
from penstock.runtime.memory import fitted, longest_sequence
from penstock.runtime.model_loader import rank_device
from penstock.runtime.model_runner import ModelRunner
from penstock.runtime.rank import LoadedRank, finish_rank, load_rank
from penstock.runtime.ranks import RankGroup
from penstock.runtime.timeline import Timeline
from penstock.types.cache_spec import CacheSize
from penstock.types.model_spec import DraftModel
from penstock.types.pooling import Task
from penstock.types.setting_choice import SettingChoice
from penstock.types.stats import EngineCounters, IterationStats
from penstock.types.step import StepPlan, StepResult

_log = log.get(__name__)


def _draft_folder(config: EngineConfig, *, weights: bool = True) -> Path | None:
    asked = config.speculative_config
    if asked is None or asked.speculative_model is None:
        return None
    return local_folder(asked.speculative_model, weights=weights)


def _draft_model(config: EngineConfig) -> DraftModel | None:
    """The checkpoint that drafts, where it is not the model's own."""
    folder, asked = _draft_folder(config, weights=False), config.speculative_config
    if folder is None or asked is None:
        return None
    is_head = asked.decoding_type == "Eagle3"
    spec = parse_eagle3_spec(folder).model if is_head else parse_model_spec(folder)
    return DraftModel(path=str(folder), spec=spec)


class Engine:
    """Everything of one engine process, built in order; `run` returns when the parent says so."""

    def __init__(
        self,
        config: EngineConfig,
        mailbox: Mailbox,
        socket_folder: str,
        timeline: Timeline,
        forked: ForkedWorkers | None = None,
        place: Place | None = None,
    ) -> None:
        """`place`: of this process, where a launcher has started the other ranks."""
        self._mailbox = mailbox
        with timeline.phase("find model"):
            folder = local_folder(config.model, config.revision, weights=False)
            self._task = served_task(config.task, folder)
            model_kwargs = config.model_kwargs
            if self._task.task is Task.EMBED:  # nobody reads its logits: it may have no head
                model_kwargs = {**(model_kwargs or {}), "tie_word_embeddings": True}
            self.spec = parse_model_spec(folder, model_kwargs)
            draft = _draft_model(config)
            self.config = resolve(config, self.spec, probe(), str(folder), draft, place)
            self._sampling = sampling_defaults(
                config.generation_config,
                config.override_generation_config.model_dump(),
                config.model,
                folder,
            )
        if self.config.load_format != "dummy":
            with timeline.phase("fetch weights"):
                local_folder(config.model, config.revision)
                _draft_folder(config)
        workers = CompileWorkers(self.config, self.spec, forked)
        with timeline.phase("build kernels"):
            workers.run(model_kwargs, config.log_level)
        with timeline.phase("meet ranks"):
            self._ranks = RankGroup(
                self.config,
                model_kwargs,
                config.revision,
                socket_folder,
                config.log_level,
                place,
                config.launcher == "ray",
                b"" if place is None else rank_secret(),
                config.rank_interface,
                self._rank_died,
            )
            self.config = replace(self.config, gpu=self._ranks.own_gpu)
            mesh = RankMesh.create(
                0,
                self.config.mesh,
                self._ranks.meeting_point,
                rank_device(self.config, 0),
                listener=self._ranks.listener,
                with_one_shot=self.config.one_shot_sums,
            )
        loaded = load_rank(self.config, self.spec, mesh, timeline)
        cache, weights = self._ranks.agree(loaded.memory.size)
        if config.kv_cache_config.host_cache_size and not cache.num_host_blocks:
            _log.warning(
                "kv_cache_config.host_cache_size is %d bytes, which hold no sequence: raise it",
                config.kv_cache_config.host_cache_size,
            )
        self.config = _limited(self.config, cache)
        runner = finish_rank(loaded, self.config, self.spec, cache, timeline)
        workers.done()
        self._wire(loaded, runner, cache, config)
        timeline.add_rest()
        mailbox.open(self._info(loaded, cache, [loaded.memory.weights, *weights], timeline))

    def _wire(
        self, loaded: LoadedRank, runner: ModelRunner, cache: CacheSize, asked: EngineConfig
    ) -> None:
        """The scheduler with its gates and followers, the executor, and the loop around them."""
        config, counters = self.config, EngineCounters(engines=1)
        kvs = [
            KVManager(
                [
                    cache_group(group, num, config)
                    for group, num in zip(loaded.groups, cache.num_blocks, strict=True)
                ],
                cache.num_host_blocks,
                dp_rank,
            )
            for dp_rank in range(config.mesh.dp)
        ]
        chunk_limit = ChunkLimit(
            config.tokens_beside_decodes, config.max_num_tokens, config.tokens_in_bursts
        )
        self.drafts = DraftsPerDecode(
            config.max_drafts,
            config.max_drafting_decodes,
            runner.costs,
            config.max_batch_size,
            config.mesh.dp,
        )
        self.scheduler = Scheduler(
            config,
            kvs,
            counters,
            # What a decode feeds comes back from the last stage by way of the host.
            max_in_flight_per_sequence=1 if config.mesh.pp > 1 else None,
            micro_batch=MicroBatches(config.mesh.pp, config.mesh.dp).of
            if config.mesh.pp > 1
            else None,
            chunk_limit=chunk_limit.of_step,
            drafts_per_decode=self.drafts.of,
        )
        self.scheduler.add_gate(LeaderGate(self.scheduler.has_prefilled))
        self.grammars = Grammars(asked, self.spec)
        self.scheduler.add_gate(self.grammars)
        self.scheduler.add_follower(self.grammars)
        executor: Executor = RankExecutor(
            runner, self._ranks.peers, config.mesh, self._ranks.results
        )
        self.adapters = Adapters(None)
        if config.lora is not None:
            field = find_adapters(loaded.fields)
            assert field is not None
            self.adapters = Adapters(field.host, config.lora.num_slots, config.mesh.dp)
            self.scheduler.add_gate(self.adapters)
            self.scheduler.add_follower(self.adapters)
            executor = EquippedExecutor(executor, self.adapters.equip)

        num_described = 0

        def describe(plan: StepPlan, result: StepResult, started: float) -> IterationStats:
            nonlocal num_described
            count_step(counters, plan, result)
            seconds = time.monotonic() - started
            chunk_limit.observe(plan, seconds)
            self.drafts.observe(plan, result)
            num_accepted = counters.accepted_tokens - num_described
            num_described += num_accepted
            return describe_step(
                plan, result, counters, config, seconds, runner.device_bytes, num_accepted
            )

        self.loop = EngineLoop(
            self.scheduler,
            executor,
            self._mailbox,
            self._mailbox,
            counters,
            config.depth,
            time.monotonic,
            describe,
            self.grammars.late_inputs,
            when_idle=runner.when_idle,
        )

    def _info(
        self, loaded: LoadedRank, cache: CacheSize, weights: list[int], timeline: Timeline
    ) -> EngineInfo:
        config = self.config
        max_seq_len = longest_sequence(config, cache)
        choices = list(config.choices)

        def add(name: str, value: str, reason: str) -> None:
            choices.append(SettingChoice(name=name, value=value, reason=reason))

        add("task", self._task.task.value, self._task.reason)
        add("generation_config", str(self._sampling), self._sampling.reason)
        if max_seq_len < config.max_seq_len:
            reason = f"the cache holds {max_seq_len} tokens, fewer than {config.max_seq_len} asked"
            add("max_seq_len", str(max_seq_len), reason)
            _log.warning("max_seq_len is %d: %s", max_seq_len, reason)
        if loaded.memory.states is not None:
            add("state_slots", *loaded.memory.states_in_words(cache))
        settings = {k: v for k, v in asdict(config).items() if k != "choices"}
        mesh = config.mesh  # with the sizes as flags call them: attention DP is within the tp_size
        settings |= {"tp_size": mesh.dp * mesh.tp, "pp_size": mesh.pp, "cp_size": mesh.cp}
        settings["ep_size"] = mesh.ep
        settings["dp_size"] = settings.pop("num_replicas")
        return EngineInfo(
            max_seq_len=max_seq_len,
            max_num_tokens=config.max_num_tokens,
            max_batch_size=config.mesh.dp * config.max_batch_size,
            max_queued=config.max_queued,
            max_queued_tokens=config.max_queued_tokens,
            chunked_prefill=config.chunked_prefill,
            vocab_size=self.spec.vocab_size,
            total_blocks=config.mesh.dp * cache.num_blocks[0],
            tokens_per_block=config.tokens_per_block,
            eos_token_ids=self.spec.eos_token_ids,
            device=probe().name,
            config=settings | {"max_seq_len": max_seq_len},
            choices=tuple(choices),
            memory=loaded.memory.as_dict(cache),
            rank_weight_bytes=tuple(weights),
            timeline=tuple(timeline.phases),
            default_sampling=dict(self._sampling.values),
            logits_processors=config.logits_processors,
            task=self._task.task,
            hidden_size=self.spec.hidden_size,
            normalizes=self._task.normalizes,
            has_adapters=config.lora is not None,
        )

    def run(self) -> None:
        """Serve until stopped. Whatever ends the loop, clients are told."""
        try:
            self.loop.run()
        except Exception as error:
            _log.exception("the engine loop failed")
            self._ranks.wait_for_news()
            self._say_goodbye(f"the engine failed: {type(error).__name__}: {error}")
            raise
        self._say_goodbye("the engine is shutting down")
        self._ranks.stop()

    def _rank_died(self, what: str) -> NoReturn:
        """The loop may hang in a collective: this thread speaks for it."""
        _log.critical("%s", what)
        self._mailbox.last_words(Fatal(message=what))
        os._exit(1)

    def _say_goodbye(self, message: str) -> None:
        """Clients end their requests with it, or send those without a token to another engine."""
        self.grammars.close()
        self.adapters.close()
        self._mailbox.broadcast(Fatal(message=message))


def _limited(config: RunConfig, cache: CacheSize) -> RunConfig:
    """`fitted`, and where that makes a difference it is said, here and to the clients."""
    limited = fitted(config, cache)
    if limited is config:
        return config
    asked, most = config.max_batch_size, limited.max_batch_size
    reason = f"the memory holds the states of {most} sequences at once, {asked} were asked for"
    _log.warning("max_batch_size is %d: %s", most, reason)
    choice = SettingChoice(name="max_batch_size", value=str(most), reason=reason)
    others = tuple(c for c in config.choices if c.name != choice.name)
    return replace(limited, choices=(*others, choice))
