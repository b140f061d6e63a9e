"""Token embedding and output head, both split over the vocabulary."""

# T tokens in the step, L rows that need logits, D hidden size, V vocabulary, W rows of this rank

from torch import Tensor, nn

from penstock.layers.context import LayerContext
from penstock.parallel.collectives import all_gather, all_reduce
from penstock.parallel.shard import split_padded, whole
from penstock.quantization.scheme import LinearShape

_ROW_MULTIPLE = 64  # rows are padded to this on every rank: matrix units like full tiles


class VocabEmbedding(nn.Module):
    """Rank r holds rows [r * W, (r + 1) * W) of the padded table."""

    def __init__(self, vocab_size: int, hidden_size: int, build: LayerContext) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.ranks = build.mesh.role("vocab")
        rows, num_rows = split_padded(vocab_size, self.ranks.size, self.ranks.rank, _ROW_MULTIPLE)
        self.first_row, self.num_rows = self.ranks.rank * num_rows, num_rows
        shape = LinearShape(
            outputs=(rows,),
            inputs=whole(hidden_size),
            has_bias=False,
            num_padding=num_rows - rows.target.size,
        )
        self.scheme = build.tables
        self.scheme.create(self, shape, build.dtype, build.device)

    def finish(self) -> None:
        self.scheme.finish_table(self)

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return self.scheme.lookup(self, ids_T)
        local_T = ids_T - self.first_row
        is_here_T = (local_T >= 0) & (local_T < self.num_rows)
        x_TD = self.scheme.lookup(self, local_T * is_here_T) * is_here_T.unsqueeze(-1)
        return all_reduce(x_TD, self.ranks)


class VocabHead(nn.Module):
    """Hidden states -> logits of the whole vocabulary on every rank, by the rows of `table`."""

    def __init__(self, table: VocabEmbedding) -> None:
        super().__init__()
        self.vocab_size = table.vocab_size
        self.ranks = table.ranks
        self.scheme = table.scheme
        self.weight = table.weight

    def finish(self) -> None:
        """After loading: a copy of its own where packing pays, the shared table elsewhere."""
        self.scheme.finish(self)

    def forward(self, x_LD: Tensor) -> Tensor:
        logits_LV = all_gather(self.scheme.apply(self, x_LD, add_bias=False), self.ranks)
        return logits_LV[:, : self.vocab_size].contiguous()
