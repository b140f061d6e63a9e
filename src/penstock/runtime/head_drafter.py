"""`HeadDrafter`: drafts of the model's own MTP head, which runs behind every step.

The head has a layer of cache among the model's own: its keys of token t follow from the model's
hidden state there and from token t + 1, so they are written when that one is known. Keys of tokens
that were only drafted lie behind the sequence's end, and later ones take their place.

A block that is reused holds at its last token a key made with the token that followed it then, not
the one that follows now: a draft may be a little worse for it.
"""

# T tokens of a step, N rows that have new ones, K most drafts, D hidden size

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.transfer import to_device
from penstock.layers.decoder import Decoder
from penstock.runtime.drafter_inputs import DraftStep
from penstock.runtime.input_batch import Rows
from penstock.types.step import RowJoin


class HeadDrafter:
    reads_hidden = True

    def __init__(self, model: Decoder, rows: Rows, max_drafts: int) -> None:
        assert model.mtp is not None
        self._model, self._head, self._rows = model, model.mtp, rows
        self.max_drafts = max_drafts

    def join(self, joins: Sequence[RowJoin]) -> None:
        """Nothing is kept by row: a prompt passes through the head as through the model."""

    def draft(self, step: DraftStep) -> Tensor:
        fed = step.fed
        assert fed is not None
        ids_T = fed.next_ids_T
        hidden_TD = self._head(self._model.embedded(ids_T), fed.hidden_TD, fed.batch)
        if not len(step.rows_N):
            return ids_T.new_empty(0, self.max_drafts)
        hidden_ND = hidden_TD[fed.last_N]
        drafts = [self._best(hidden_ND)]
        # The token that each further draft follows, and the first one without a block.
        positions_N = step.indices_N.long() + step.num_accepted_N - 1
        size = self._rows.block_size
        ends_N = to_device(-(-step.max_kv_lens // size) * size, ids_T.device).long()
        for index in range(self.max_drafts - 1):
            at_N = positions_N + index
            batch = self._rows.batch_at(
                step.rows_N, at_N, ends_N, step.max_kv_len + self.max_drafts
            )
            hidden_ND = self._head(self._model.embedded(drafts[-1].clamp(min=0)), hidden_ND, batch)
            is_known_N = (at_N < ends_N) & (drafts[-1] >= 0)
            drafts.append(torch.where(is_known_N, self._best(hidden_ND), -1))
        return torch.stack(drafts, dim=1)

    def _best(self, hidden_ND: Tensor) -> Tensor:
        return self._model.logits(hidden_ND).argmax(-1)
