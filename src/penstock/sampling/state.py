"""What each device row remembers for sampling: its parameters, its biased tokens, what it has seen.

Parameters lie in one device table, written by joins and gathered by rows. The host keeps only what
decides which processors and filters a step runs, so no step ever reads the device. The last row is
padding: neutral and greedy.

Legend: J joining rows, R device rows, C table columns, S penalty slots, V vocabulary, W bias width,
L rows of a step.
"""

from collections.abc import Mapping, Sequence
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.transfer import to_device
from penstock.sampling.verification import Accepted, DraftedRows
from penstock.types.sampling import SamplingParams
from penstock.types.step import RowJoin


class SamplingFlags(IntFlag):
    """What a row asks for beyond the argmax: its logits processors, sampling filters, logprobs."""

    RANDOM = 1
    TOP = 2  # top-k or top-p
    MIN_P = 4
    BIAS = 8
    MIN_TOKENS = 16
    PENALTIES = 32
    LOGPROBS = 64
    ALLOWED = 128
    BAD_WORDS = 256
    PLUGINS = 512


FILTERS = SamplingFlags.TOP | SamplingFlags.MIN_P

# One row of the table. The host fills records, the device sees int32 columns and reinterprets them.
_RECORD = np.dtype(
    [
        ("row", "<i8"),
        ("seed", "<i8"),
        ("slot", "<i8"),
        ("top_k", "<i4"),
        ("min_length", "<i4"),  # of prompt and output; no stop id before
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
    ]
)
_TORCH_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<f4": torch.float32}
assert _RECORD.fields is not None
_COLUMNS = {
    name: (_TORCH_DTYPES[field[0].str], field[1] // field[0].itemsize)
    for name, field in _RECORD.fields.items()
}
_MAX_INT32 = 2**31 - 1
_MIN_WIDTH = 16  # of a bias table; it doubles when a request brings more


class RowParams:
    """The table's rows of one step; `params("top_p")` is one value per row."""

    def __init__(self, table_LC: Tensor) -> None:
        self._table_LC = table_LC

    def __call__(self, name: str) -> Tensor:
        dtype, column = _COLUMNS[name]
        return self._table_LC.view(dtype)[:, column]

    def select(self, positions_P: Tensor) -> "RowParams":
        return RowParams(self._table_LC.index_select(0, positions_P))


class SparseRows:
    """Per row a few token ids with a value each. Unused places add 0 to token 0."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.ids_RW = torch.zeros(num_rows, _MIN_WIDTH, dtype=torch.int64, device=device)
        self.values_RW = torch.zeros(num_rows, _MIN_WIDTH, dtype=torch.float32, device=device)

    def write(self, entries: dict[int, dict[int, float]]) -> None:
        """Row -> {token id: value}; replaces what the rows had."""
        self._grow(max(map(len, entries.values())))
        device, width = self.ids_RW.device, self.ids_RW.shape[1]
        ids_JW = np.zeros((len(entries), width), np.int64)
        values_JW = np.zeros((len(entries), width), np.float32)
        for j, pairs in enumerate(entries.values()):
            ids_JW[j, : len(pairs)] = list(pairs)
            values_JW[j, : len(pairs)] = list(pairs.values())
        rows_J = to_device(np.array(list(entries), np.int64), device)
        self.ids_RW.index_copy_(0, rows_J, to_device(ids_JW, device))
        self.values_RW.index_copy_(0, rows_J, to_device(values_JW, device))

    def _grow(self, width: int) -> None:
        extra = (1 << (width - 1).bit_length()) - self.ids_RW.shape[1]
        if extra > 0:
            self.ids_RW = torch.nn.functional.pad(self.ids_RW, (0, extra))
            self.values_RW = torch.nn.functional.pad(self.values_RW, (0, extra))


class SeenTokens:
    """Which tokens a penalized row has seen. Only such rows take a slot; freed ones are reused.

    Slot 0 belongs to all other rows: their tokens are counted there, and nobody looks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self.in_prompt_SV = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)
        self.output_counts_SV = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)

    def assign(self, joins: Sequence[RowJoin]) -> dict[int, int]:
        """Row -> slot of the joining rows with penalties; the others give theirs back."""
        for join in joins:
            if not join.sampling.has_penalties and join.row in self._slots:
                self._free.append(self._slots.pop(join.row))
        penalized = [join for join in joins if join.sampling.has_penalties]
        for join in penalized:
            if join.row not in self._slots:
                if not self._free:
                    self._grow()
                self._slots[join.row] = self._free.pop()
        return {join.row: self._slots[join.row] for join in penalized}

    def reset(self, joins: Sequence[RowJoin], slots: dict[int, int]) -> None:
        """Fill the slots of joining rows from their prompt and what they had generated before."""
        device, penalized = self.in_prompt_SV.device, [j for j in joins if j.row in slots]
        slots_J = np.array([slots[join.row] for join in penalized], np.int64)
        prompts = [join.token_ids[: join.num_prompt] for join in penalized]
        outputs = [join.token_ids[join.num_prompt :] for join in penalized]
        num_prompt = sum(map(len, prompts))
        places = [
            slot * self._vocab_size + ids.astype(np.int64)
            for part in (prompts, outputs)
            for slot, ids in zip(slots_J, part, strict=True)
        ]
        packed = to_device(np.concatenate([slots_J, *places]), device)
        slots_gpu_J, prompt_places, output_places = packed.tensor_split(
            [len(slots_J), len(slots_J) + num_prompt]
        )
        self.in_prompt_SV.index_fill_(0, slots_gpu_J, False)
        self.output_counts_SV.index_fill_(0, slots_gpu_J, 0)
        self.in_prompt_SV.view(-1).index_fill_(0, prompt_places, True)
        self._count(output_places)

    def advance(self, slots_L: Tensor, token_ids_L: Tensor) -> None:
        """Each slot has seen one more output token."""
        self._count(slots_L * self._vocab_size + token_ids_L)

    def advance_accepted(self, slots_N: Tensor, accepted: Accepted) -> None:
        """Each slot has seen those of its tokens that count."""
        token_ids_NW = accepted.token_ids_NW
        offsets_W = torch.arange(token_ids_NW.shape[1], device=token_ids_NW.device)
        counts_NW = (offsets_W < accepted.num_accepted_N[:, None]).int()
        places_NW = slots_N[:, None] * self._vocab_size + token_ids_NW
        self.output_counts_SV.view(-1).scatter_add_(0, places_NW.view(-1), counts_NW.view(-1))

    def with_drafts(self, slots_L: Tensor, drafted: DraftedRows) -> tuple[Tensor, Tensor]:
        """(in_prompt_LV, output_counts_LV) of each row of logits, as if the drafts that it has been
        fed had been accepted."""
        drafts_LK, is_fed_LK = drafted.earlier_drafts()
        counts_LV = self.output_counts_SV[slots_L]
        return self.in_prompt_SV[slots_L], counts_LV.scatter_add_(1, drafts_LK, is_fed_LK.int())

    def _count(self, places: Tensor) -> None:
        ones = torch.ones_like(places, dtype=torch.int32)
        self.output_counts_SV.view(-1).scatter_add_(0, places, ones)

    def _grow(self) -> None:
        old = self.in_prompt_SV.shape[0]
        new = 4 if old == 1 else 2 * old
        extra = (0, 0, 0, new - old)
        self.in_prompt_SV = torch.nn.functional.pad(self.in_prompt_SV, extra)
        self.output_counts_SV = torch.nn.functional.pad(self.output_counts_SV, extra)
        self._free.extend(reversed(range(old, new)))


class SamplingState:
    """State of all device rows. `join` is the only way in; nothing here waits for the device."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, seed: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._seed = seed
        num_rows = max_rows + 1
        self.biases = SparseRows(num_rows, device)
        self.stops = SparseRows(num_rows, device)
        self.seen = SeenTokens(vocab_size, device)
        self.flags_R = np.zeros(num_rows, np.uint16)
        self.top_k_R = np.zeros(num_rows, np.int32)
        self.num_logprobs_R = np.zeros(num_rows, np.int32)
        self.logprob_ids: dict[int, NDArray[np.int64]] = {}  # by row, of those that name some
        records = np.zeros(num_rows, _RECORD)
        for row, record in enumerate(records):
            _fill(record, row, 0, SamplingParams(temperature=0.0), vocab_size)
        self._table_RC = _as_columns(records).to(device)

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Give rows to sequences: one copy of parameters, a few more for what some rows use."""
        if not joins:
            return
        slots = self.seen.assign(joins)
        records = np.zeros(len(joins), _RECORD)
        biases: dict[int, dict[int, float]] = {}
        stops: dict[int, dict[int, float]] = {}
        for record, join in zip(records, joins, strict=True):
            sampling = join.sampling
            seed = sampling.seed
            if seed is None:
                seed = mix_seed(self._seed, join.request_id)
            _fill(record, join.row, seed, sampling, self.vocab_size)
            record["min_length"] = min(join.num_prompt + sampling.min_tokens, _MAX_INT32)
            record["slot"] = slots.get(join.row, 0)
            bias = self._in_vocabulary(sampling.logit_bias)
            if bias or self.flags_R[join.row] & SamplingFlags.BIAS:
                biases[join.row] = bias
            if sampling.min_tokens and join.stop_ids:
                stops[join.row] = self._in_vocabulary(dict.fromkeys(join.stop_ids, -np.inf))
            self.top_k_R[join.row] = record["top_k"]
            self.num_logprobs_R[join.row] = sampling.logprobs or 0
            self.logprob_ids.pop(join.row, None)
            if sampling.logprob_token_ids:
                named = [i for i in sampling.logprob_token_ids if 0 <= i < self.vocab_size]
                self.logprob_ids[join.row] = np.array(named, np.int64)
                self.num_logprobs_R[join.row] = len(named)
            self.flags_R[join.row] = _flags(sampling, bool(bias), bool(stops.get(join.row)))
        values_JC = to_device(_as_columns(records).numpy(), self.device)
        self._table_RC.index_copy_(0, values_JC.view(torch.int64)[:, 0], values_JC)
        if biases:
            self.biases.write(biases)
        if stops:
            self.stops.write(stops)
        if slots:
            self.seen.reset(joins, slots)

    def params(self, rows_L: Tensor) -> RowParams:
        return RowParams(self._table_RC.index_select(0, rows_L))

    def flags(self, rows: NDArray[np.int32]) -> SamplingFlags:
        """What at least one of the rows asks."""
        return SamplingFlags(int(np.bitwise_or.reduce(self.flags_R[rows], initial=0)))

    def positions(self, rows: NDArray[np.int32], flags: SamplingFlags) -> NDArray[np.int64]:
        """Which of the step's rows ask for it."""
        return np.flatnonzero(self.flags_R[rows] & int(flags))

    def _in_vocabulary(self, values: Mapping[int, float]) -> dict[int, float]:
        """A device that is asked for a token it does not have dies, so such ids end here."""
        return {i: value for i, value in values.items() if 0 <= i < self.vocab_size}


def mix_seed(seed: int, request_id: int) -> int:
    """The seed of a request that has none: the same on every rank, and again after a preemption."""
    x = (seed ^ request_id * 0x9E3779B97F4A7C15) & (2**64 - 1)
    for _ in range(2):
        x = (x ^ x >> 32) * 0x6A09E667F3BCC909 & (2**64 - 1)
    return (x ^ x >> 32) - 2**63


def _fill(record: np.void, row: int, seed: int, sampling: SamplingParams, vocab_size: int) -> None:
    """A greedy row keeps no parameter that only shapes a draw."""
    record["row"], record["seed"] = row, seed
    record["top_p"] = 1.0
    if not sampling.is_greedy:
        record["temperature"] = sampling.temperature
        record["top_k"] = min(max(sampling.top_k, 0), vocab_size)
        record["top_p"] = sampling.top_p
        record["min_p"] = sampling.min_p
    record["repetition"] = sampling.repetition_penalty
    record["presence"] = sampling.presence_penalty
    record["frequency"] = sampling.frequency_penalty


def _flags(sampling: SamplingParams, has_bias: bool, has_stops: bool) -> SamplingFlags:
    flags = SamplingFlags(0)
    if not sampling.is_greedy:
        flags |= SamplingFlags.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1.0:
            flags |= SamplingFlags.TOP
        if sampling.min_p > 0.0:
            flags |= SamplingFlags.MIN_P
    if has_bias:
        flags |= SamplingFlags.BIAS
    if has_stops:
        flags |= SamplingFlags.MIN_TOKENS
    if sampling.has_penalties:
        flags |= SamplingFlags.PENALTIES
    if sampling.logprobs is not None:
        flags |= SamplingFlags.LOGPROBS
    if sampling.allowed_token_ids:
        flags |= SamplingFlags.ALLOWED
    if sampling.bad_words_token_ids:
        flags |= SamplingFlags.BAD_WORDS
    if sampling.logits_processors:
        flags |= SamplingFlags.PLUGINS
    return flags


def _as_columns(records: NDArray[np.void]) -> Tensor:
    return torch.from_numpy(records.view(np.int32).reshape(len(records), -1))
