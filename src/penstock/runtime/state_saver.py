"""`StateSaver`: a drafter that drafts nothing and saves hidden states of prompts, to train with.

A file holds of each prompt, by its number: `7.input_ids` [T]; `7.hidden_state` [T, D] behind the
final norm; `7.aux_hidden_states` [T, n D], those behind the captured layers one beside the other,
where there are any. While one is written nothing else runs.
"""

# T tokens of a prompt, C of them in a chunk, D hidden size, E of all layers that are read

import atexit
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.config.run import StateSaving
from penstock.errors import ConfigError
from penstock.kernels.transfer import start_copy_to_host
from penstock.runtime.drafter_inputs import DrafterInputs
from penstock.runtime.graphs import GraphPool
from penstock.types.step import RowJoin


@dataclass(slots=True)
class _Prompt:
    input_ids_T: Tensor
    num_left: int
    states_TE: Tensor | None = None

    def put(self, start: int, states_CE: Tensor) -> None:
        if self.states_TE is None:
            self.states_TE = states_CE.new_empty(len(self.input_ids_T), states_CE.shape[1])
        self.states_TE[start : start + len(states_CE)] = states_CE
        self.num_left -= len(states_CE)


@dataclass(frozen=True, slots=True)
class _Copy:
    """On its way to the host: some chunks, one behind the other."""

    states_CE: Tensor
    parts: list[tuple[_Prompt | None, int, int]]  # the prompt, its first token there, how many
    event: torch.cuda.Event | None


class StateSaver:
    reads_steps = reads_hidden = True
    max_drafts = 0

    def __init__(self, saving: StateSaving, *, writes: bool) -> None:
        """`writes`: one rank of those that compute the same."""
        self._saving, self._writes = saving, writes
        self._prompts: dict[int, _Prompt] = {}  # by row
        self._copies: deque[_Copy] = deque()
        self._unwritten: dict[str, Tensor] = {}  # of the next file, by name
        self._num_whole = self._num_written = 0
        if writes:
            try:
                Path(saving.directory).mkdir(0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"speculative_config.output_directory: {error}") from error
            atexit.register(self.finish)

    def capture(
        self, pool: GraphPool, sizes: tuple[int, ...], may_pad: bool, max_kv_len: int
    ) -> None:
        """Nothing: it runs nothing."""

    def use_cpu_graphs(self, max_kv_len: int) -> None:
        """Nothing either."""

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            self._prompts.pop(join.row, None)
            # Steps at start have no request. With an output the prompt was saved before.
            if join.request_id and len(join.token_ids) == join.num_prompt:
                ids_T = torch.from_numpy(join.token_ids.astype("int64"))
                self._prompts[join.row] = _Prompt(ids_T, len(ids_T))

    def draft(self, step: DrafterInputs) -> Tensor:
        fed = step.fed
        assert fed is not None and fed.hidden_TE is not None
        if self._writes and len(fed.chunk_rows):
            batch = fed.batch
            assert batch.cached_lens is not None and batch.chunk_lens is not None
            rows = fed.chunk_rows.tolist()
            event = torch.cuda.Event() if fed.hidden_TE.is_cuda else None
            end = batch.num_decodes + sum(batch.chunk_lens)
            states_CE = start_copy_to_host(fed.hidden_TE[batch.num_decodes : end])
            if event is not None:
                event.record()
            prompts = [self._prompts.get(row) for row in rows]
            parts = [*zip(prompts, batch.cached_lens, batch.chunk_lens, strict=True)]
            self._copies.append(_Copy(states_CE, parts, event))
        while self._copies and ((event := self._copies[0].event) is None or event.query()):
            self._take(self._copies.popleft())
        return step.rows_N.new_empty(len(step.rows_N), 0)

    def finish(self) -> None:
        """At the end: what has not filled a file."""
        for copy in self._copies:
            if copy.event is not None:
                copy.event.synchronize()
            self._take(copy)
        self._copies.clear()
        if self._unwritten:
            self._write()

    def _take(self, copy: _Copy) -> None:
        states = copy.states_CE.split([count for _, _, count in copy.parts])
        for (prompt, start, _), states_CE in zip(copy.parts, states, strict=True):
            if prompt is None:
                continue
            prompt.put(start, states_CE)
            if prompt.num_left == 0:
                self._add(prompt)

    def _add(self, prompt: _Prompt) -> None:
        assert prompt.states_TE is not None
        self._num_whole += 1
        size = prompt.states_TE.shape[1] // (len(self._saving.layers) + 1)
        tensors = {"input_ids": prompt.input_ids_T, "hidden_state": prompt.states_TE[:, -size:]}
        if self._saving.layers:
            tensors["aux_hidden_states"] = prompt.states_TE[:, :-size]
        for name, tensor in tensors.items():
            self._unwritten[f"{self._num_whole}.{name}"] = tensor.contiguous()
        if self._num_whole - self._num_written == self._saving.interval:
            self._write()

    def _write(self) -> None:
        folder, prefix = Path(self._saving.directory), self._saving.prefix
        path = folder / f"{prefix}_{self._num_whole}.safetensors"
        unfinished = path.with_suffix(".tmp")
        save_file(self._unwritten, unfinished)
        unfinished.replace(path)
        self._unwritten, self._num_written = {}, self._num_whole
