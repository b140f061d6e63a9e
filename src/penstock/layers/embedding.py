"""Token embedding and output head, both split over the vocabulary."""

# T tokens in the step, L rows that need logits, D hidden size, V vocabulary, W rows of this rank

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.kernels.gemm import linear, packed
from penstock.layers.build import Build
from penstock.parallel.collectives import all_gather, all_reduce
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Piece, split_padded, whole

_ROW_MULTIPLE = 64  # rows are padded to this on every rank: matrix units like full tiles


class VocabEmbedding(nn.Module):
    """Rank r holds rows [r * W, (r + 1) * W) of the padded table."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.ranks = build.mesh.role("vocab")
        rows, num_rows = split_padded(vocab_size, self.ranks.size, self.ranks.rank, _ROW_MULTIPLE)
        self.first_row = self.ranks.rank * num_rows
        self.weight = new_parameter(
            (num_rows, hidden_size),
            build.dtype,
            build.device,
            (Piece((rows, whole(hidden_size))),),
        )
        self.weight.data[rows.target.stop :].zero_()

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self.first_row
        is_here_T = (local_T >= 0) & (local_T < self.weight.shape[0])
        x_TD = F.embedding(local_T * is_here_T, self.weight) * is_here_T.unsqueeze(-1)
        return all_reduce(x_TD, self.ranks)


class VocabHead(nn.Module):
    """Hidden states -> logits of the whole vocabulary on every rank, by the rows of `table`."""

    def __init__(self, table: VocabEmbedding) -> None:
        super().__init__()
        self.vocab_size = table.vocab_size
        self.ranks = table.ranks
        self.weight: Tensor = table.weight

    def finish(self) -> None:
        """After loading: a copy of its own where packing pays, the shared table elsewhere."""
        table = self.weight
        del self.weight
        self.weight = packed(table)

    def forward(self, x_LD: Tensor) -> Tensor:
        logits_LV = all_gather(linear(x_LD, self.weight), self.ranks)
        return logits_LV[:, : self.vocab_size].contiguous()
