"""Every message between processes, and its bytes: tagged msgpack, typed on arrival, never pickle.

numpy arrays travel as an extension (dtype, shape, raw bytes) restricted to the dtypes of
`StepPlan`.
"""

import struct
from typing import Any

import msgspec
import numpy as np

from penstock.types.cache_spec import CacheSize
from penstock.types.outputs import TokenDelta
from penstock.types.pooling import Task
from penstock.types.request import Request
from penstock.types.setting_choice import SettingChoice
from penstock.types.stats import EngineCounters, IterationStats
from penstock.types.step import LateInputs, StepPlan, StepResult

PROTOCOL_VERSION = 8


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, array_like=True):
    """Base of all messages; the tag is the class name."""


# client (API server or `LLM`) -> engine


class Hello(Message, frozen=True):
    """A client introduces itself; the engine connects to `address` and answers `Ready`."""

    version: int
    client_id: int
    address: str


class Submit(Message, frozen=True):
    requests: tuple[Request, ...]


class Abort(Message, frozen=True):
    request_ids: tuple[int, ...]


class ClientLeft(Message, frozen=True):
    """A client has ended without a word; whoever started it says so for it."""

    client_id: int


# engine -> client


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The running engine: limits that requests are checked against, and what `/version` shows."""

    max_seq_len: int
    max_num_tokens: int
    max_batch_size: int
    max_queued: int  # requests waiting or running, over which new ones are refused
    max_queued_tokens: int = 1 << 40  # of their prompts
    chunked_prefill: bool
    vocab_size: int
    total_blocks: int
    tokens_per_block: int
    eos_token_ids: tuple[int, ...]
    device: str
    config: dict[str, Any]  # resolved configuration
    choices: tuple[SettingChoice, ...]
    memory: dict[str, int]  # byte plan of rank 0
    rank_weight_bytes: tuple[int, ...]
    timeline: tuple[tuple[str, float], ...]  # (phase, seconds)
    # fields of `SamplingParams` that a request leaves out; integers stay integers on the way
    default_sampling: dict[str, int | float] = {}
    logits_processors: tuple[str, ...] = ()  # that requests may name
    task: Task = Task.GENERATE
    hidden_size: int = 0
    normalizes: bool = True  # embeddings have length 1
    has_adapters: bool = False  # requests may name one


class Ready(Message, frozen=True):
    info: EngineInfo


class Deltas(Message, frozen=True):
    deltas: tuple[TokenDelta, ...]


class Stats(Message, frozen=True):
    """Sent a few times a second; its arrival is the engine's heartbeat."""

    counters: EngineCounters
    iterations: tuple[IterationStats, ...]


class Fatal(Message, frozen=True):
    """The engine cannot go on; every open request has failed."""

    message: str


# rank 0 -> further ranks


class Forward(Message, frozen=True):
    plan: StepPlan


class SampleTokens(Message, frozen=True):
    step_id: int
    late: LateInputs


class Stop(Message, frozen=True):
    pass


class RankTask(Message, frozen=True):
    """What a rank that a launcher has started is to do: a `WorkerTask` as JSON."""

    task: bytes


class RankRefused(Message, frozen=True):
    """It does not belong here."""

    message: str


# first API server -> whoever keeps an engine on another node (`frontend.replica_keeper`)


class EngineTask(Message, frozen=True):
    """Start the engine, the first time or again: the task of its process as JSON."""

    task: bytes


class KillEngine(Message, frozen=True):
    """It hangs."""


# whoever keeps an engine on another node -> first API server


class ForClient(Message, frozen=True):
    """What the engine has sent to a client, as it is."""

    client_id: int
    payload: bytes


class EngineEnded(Message, frozen=True):
    how: str


# further rank -> rank 0


class RankJoined(Message, frozen=True):
    """The first message of a rank that a launcher has started."""

    version: int
    rank: int
    size: int  # ranks there are, as its launcher says
    node: str


class RankReady(Message, frozen=True):
    """Its weights are loaded, and such a cache would fit beside them."""

    rank: int
    cache: CacheSize
    weight_bytes: int


class RankCache(Message, frozen=True):
    """rank 0 -> rank: the cache that all ranks agreed on."""

    cache: CacheSize


class RankResult(Message, frozen=True):
    """What a rank that has sequences of its own found for its part of a step."""

    rank: int
    result: StepResult


class RankFailed(Message, frozen=True):
    rank: int
    message: str


ToEngine = Hello | Submit | Abort | ClientLeft
ToClient = Ready | Deltas | Stats | Fatal
ToRank = RankCache | Forward | SampleTokens | Stop | RankTask | RankRefused
FromRank = RankReady | RankResult | RankFailed | RankJoined
# To and from what a launcher has started beside rank 0: ranks, or keepers of engines.
ToLaunched = ToRank | ToEngine | EngineTask | KillEngine
FromLaunched = FromRank | ForClient | EngineEnded

_ARRAY = (
    1  # extension code; its bytes are: dtype letter, number of dimensions, int64 sizes, raw values
)
_DTYPES = {b"i": np.dtype(np.int32), b"f": np.dtype(np.float32)}
_LETTERS = {dtype: letter for letter, dtype in _DTYPES.items()}


def _encode_array(value: object) -> object:
    if not isinstance(value, np.ndarray) or value.dtype not in _LETTERS:
        raise NotImplementedError(f"{type(value)} does not travel between processes")
    head = _LETTERS[value.dtype] + struct.pack(f"<B{value.ndim}q", value.ndim, *value.shape)
    return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())


def _decode_array(code: int, buffer: memoryview) -> object:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    num_dims = buffer[1]
    shape = struct.unpack_from(f"<{num_dims}q", buffer, 2)
    values = np.frombuffer(buffer[2 + 8 * num_dims :], _DTYPES[bytes(buffer[:1])])
    return values.reshape(shape).copy()  # the buffer lives only as long as this call


def _accept_array(kind: type, value: object) -> object:
    if isinstance(value, np.ndarray):
        return value
    raise NotImplementedError(f"{kind} does not travel between processes")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decoder(union: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(union, dec_hook=_accept_array, ext_hook=_decode_array)
