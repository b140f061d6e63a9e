"""`RunConfig`: what the engine will run. Every `auto` about the engine is gone, nothing decides
later. By `resolve`."""

import math
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from penstock.types.adapter import Adapter
from penstock.types.expert_slots import ExpertSlots
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import ActivationFormat
from penstock.types.setting_choice import SettingChoice


class CapacityPolicy(StrEnum):
    """How much cache a sequence must find before it starts."""

    EXPECTED_OUTPUT = "EXPECTED_OUTPUT"  # room for what it and the others will probably write
    MAX_UTILIZATION = "MAX_UTILIZATION"  # room for its prompt; recompute when blocks run out
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"  # room for its prompt and all of its output


class QueuePolicy(StrEnum):
    """Who waits in front."""

    PRIORITY = "priority"  # larger request priority first, equal ones first come first served
    FCFS = "fcfs"  # first come first served, priorities are not looked at


class ThinkingDrafts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """While a sequence thinks, a draft counts if it is one of the `top_k` likeliest tokens and at
    most `delta` less probable than the likeliest."""

    top_k: int
    delta: float
    begin: int  # tokens that begin and end the thinking
    end: int


class TypicalDrafts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A draft counts if it is more probable than the smaller of `threshold` and its root times
    exp(-entropy): typical acceptance."""

    threshold: float


RelaxedDrafts = ThinkingDrafts | TypicalDrafts


class _Drafting(msgspec.Struct, frozen=True, kw_only=True, tag=True):  # crosses to other ranks
    max_drafts: int
    is_adaptive: bool = False  # fewer are drafted where that is quicker
    max_decodes: int | None = None  # of a step; with more nothing is drafted
    relaxed: RelaxedDrafts | None = None  # None: only the token that would have been drawn counts


class NGramDrafting(_Drafting, frozen=True):
    """Drafts are what followed the last tokens when the sequence held them before."""

    max_size: int  # tokens that are compared
    use_oldest: bool  # of equally long matches


class MTPDrafting(_Drafting, frozen=True):
    """Drafts come from the model's own MTP head, run as often as there are drafts."""


class ModelDrafting(_Drafting, frozen=True):
    """Drafts come from a small model of the same vocabulary, with layers of cache of its own."""

    model_path: str
    quantization: str | None  # online, of plain weights


class EagleDrafting(_Drafting, frozen=True):
    """Drafts come from an Eagle3 head, which reads hidden states behind some of the layers."""

    model_path: str
    quantization: str | None  # online, of plain weights
    layers: tuple[int, ...]


class UserDrafting(_Drafting, frozen=True):
    """Drafts come from a `Drafter` of another package."""

    entry_point: str


class StateSaving(_Drafting, frozen=True):
    """Nothing is drafted; hidden states of prompts go to files, to train what drafts."""

    layers: tuple[int, ...]  # behind which they are read, beside those behind the final norm
    directory: str
    interval: int  # prompts of a file
    prefix: str


Drafting = NGramDrafting | MTPDrafting | ModelDrafting | EagleDrafting | UserDrafting | StateSaving


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRun:
    """Low-rank adapters that requests may choose."""

    max_rank: int
    num_slots: int  # adapters on the device at a time
    num_host: int  # in host memory
    target_modules: tuple[str, ...] = ()  # as checkpoints call them; empty: by `adapters`, or all
    adapters: tuple[Adapter, ...] = ()  # those that are known from the start
    may_load: bool = False  # others may come while serving


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBalance:
    """Steps for which prompts wait, so that all data-parallel ranks begin some together."""

    batching_wait: int  # for more of them, once each rank could begin one
    timeout: int  # until each rank could begin one


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    model: str  # as the user named it
    model_path: str  # local folder
    load_format: str  # "auto" or "dummy"
    dtype: str  # "bfloat16", "float16", "float32"
    device: str  # "cuda" or "cpu"
    num_threads: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_queued: int
    chunked_prefill: bool
    capacity_policy: CapacityPolicy
    depth: int  # steps in flight: 1 synchronous, 2 overlapped
    tokens_per_block: int  # of all context-parallel ranks, each of which has a part
    block_reuse: bool
    partial_reuse: bool
    kv_dtype: str
    kv_max_tokens: int | None
    kv_memory_fraction: float  # of the memory left after weights and activations, on a GPU
    kv_cpu_bytes: int  # pool size on a CPU
    attention_backend: str  # name of an implementation
    graph_batch_sizes: tuple[int, ...]  # of decodes, ascending; empty: no CUDA graphs
    graph_padding: bool
    seed: int  # of dummy weights and unseeded requests
    mesh: MeshShape = MeshShape()  # the ranks of this engine
    one_shot_sums: bool = False
    gpu: int | None = None  # of this rank, where it is not the one of its number
    balance: PromptBalance | None = None  # between data-parallel ranks; None: prompts never wait
    num_replicas: int = 1  # engines like this one on the machine
    quantization: str | None = None  # what the plain weights of a checkpoint become while loading
    quantized_activations: tuple[ActivationFormat, ...] = ()  # beside weights of 4 bits
    reduced_precision_matmul: bool = (
        False  # of packed weights on a CPU: with 16 bits of their inputs
    )
    graph_token_sizes: tuple[int, ...] = ()  # of steps of prompts, ascending; empty: none
    # (decodes, prompt tokens) of steps that mix both, largest first; empty: none
    graph_mixes: tuple[tuple[int, int], ...] = ()
    graph_mixes_when_idle: tuple[tuple[int, int], ...] = ()  # captured while nothing runs
    tokens_beside_decodes: int | None = None  # prompt tokens of a step; None: as time allows
    # Of a step while many wait for a first token, decodes included; None: as without them.
    tokens_in_bursts: int | None = None
    state_interval: int = 2048  # tokens between snapshots of a recurrent state
    state_snapshot_share: float = 0.1  # of the cache's memory, for such snapshots
    state_cpu_bytes: int = 0  # of states and snapshots on a CPU, beside kv_cpu_bytes
    host_cache_bytes: int = 0  # for the cache of preempted sequences
    moe_backend: str = "none"  # "triton", "torch", "reference", or "none": there are no experts
    moe_max_tokens: int | None = None  # that go through the experts at once
    moe_all_to_all: bool = False  # data-parallel ranks send tokens to those of their experts alone
    expert_slots: ExpertSlots | None = None  # None: every expert has one, where it was loaded
    expert_load_path: str | None = None  # file for the load of experts
    drafting: Drafting | None = None  # None: one token a step and sequence
    lora: LoraRun | None = None  # None: no adapters
    queue_policy: QueuePolicy = QueuePolicy.PRIORITY
    max_queued_tokens: int = 1 << 40  # of prompts, waiting or running
    logits_processors: tuple[str, ...] = ()  # names of entry points
    choices: tuple[SettingChoice, ...] = ()

    @property
    def max_drafts(self) -> int:
        """Tokens that a decode may feed beside its last one."""
        return self.drafting.max_drafts if self.drafting is not None else 0

    @property
    def max_drafting_decodes(self) -> float:
        """Of a step; with more of them nothing is drafted."""
        most = self.drafting.max_decodes if self.drafting is not None else None
        return math.inf if most is None else most
