"""Hidden states or logits at the last token of prompts, for the rows that asked (`Pooling`)."""

# L logit rows of the step, D hidden size, V vocabulary, P rows that asked, K tokens they name

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.transfer import start_copy_to_host, to_device
from penstock.types.pooling import Pooling
from penstock.types.step import Float32s, RowJoin, StepPlan


@dataclass(slots=True)
class Pooled:
    """Of one step, on its way to the host: the entries that asked, and a vector of each."""

    entries: list[int]
    vectors: list[Tensor]

    def rows(self) -> dict[int, Float32s]:
        found = zip(self.entries, self.vectors, strict=True)
        return {entry: vector.numpy() for entry, vector in found}


class Pooler:
    def __init__(self) -> None:
        self._asked: dict[int, Pooling] = {}  # by row

    def join(self, joins: Sequence[RowJoin]) -> None:
        for join in joins:
            self._asked.pop(join.row, None)
            if join.pooling is not None:
                self._asked[join.row] = join.pooling

    def is_asked(self, plan: StepPlan) -> bool:
        """Whether a prompt that ends in this step has asked."""
        return bool(self._asked) and bool(self._entries(plan))

    def pool(self, plan: StepPlan, hidden_LD: Tensor, logits_LV: Tensor) -> Pooled | None:
        """`hidden_LD` and `logits_LV`: of the rows that sample, in the order of their entries."""
        if not self._asked or not (entries := self._entries(plan)):
            return None
        places = (np.cumsum(plan.num_logit_rows) - plan.num_logit_rows)[entries]
        asked = [self._asked[int(plan.rows[entry])] for entry in entries]
        vectors = {}
        plain = [i for i, one in enumerate(asked) if not one.token_ids]
        if plain:
            at_P = _to_device(places[plain], hidden_LD)
            states_PD = start_copy_to_host(hidden_LD[at_P].float())
            vectors = dict(zip(plain, states_PD, strict=True))
        for i, one in enumerate(asked):
            if one.token_ids:
                ids_K = _to_device(np.array(one.token_ids), logits_LV)
                vectors[i] = start_copy_to_host(logits_LV[int(places[i]), ids_K].float())
        return Pooled(entries, [vectors[i] for i in range(len(entries))])

    def _entries(self, plan: StepPlan) -> list[int]:
        return [
            i
            for i in range(plan.num_decodes, plan.num_entries)
            if plan.num_logit_rows[i] and int(plan.rows[i]) in self._asked
        ]


def _to_device(numbers: NDArray[np.integer], like: Tensor) -> Tensor:
    return to_device(numbers.astype(np.int64), torch.device(like.device))
