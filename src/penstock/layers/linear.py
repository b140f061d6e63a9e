"""Linear layers: a shard of a matrix on each rank of a role, stored and applied by a scheme.

Column layers split the outputs and exchange nothing; row layers split the inputs and sum.
"""

# T tokens in the step, I inputs, O outputs of this rank

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.forward_batch import ForwardBatch
from penstock.layers.context import LayerContext
from penstock.layers.fused_quant import converted, gated
from penstock.parallel.collectives import all_reduce
from penstock.parallel.shard import Shard, Span, split, split_heads, stack_shards, whole
from penstock.quantization.scheme import LinearScheme, LinearShape

PostOp = Callable[[Tensor, Tensor, ForwardBatch], Tensor]


class Linear(nn.Module):
    """`post_op(x_TI, y_TO, batch)` may replace the output: the one place where adapters attach. It
    sees the input plain. `has_post_op` tells in which steps it has something to do."""

    def __init__(
        self, outputs: tuple[Shard, ...], inputs: Shard, *, bias: bool, build: LayerContext
    ) -> None:
        super().__init__()
        self.shape = LinearShape(outputs=outputs, inputs=inputs, has_bias=bias)
        self.dtype, self.device = build.dtype, build.device
        self.scheme: LinearScheme
        self.post_op: PostOp | None = None
        self.has_post_op: Callable[[ForwardBatch], bool] = lambda batch: True

    def use(self, scheme: LinearScheme) -> None:
        """How the weights are stored; set once the layer's place in the model is known."""
        self.scheme = scheme
        scheme.create(self, self.shape, self.dtype, self.device)

    def finish(self) -> None:
        """After loading: the parameters are now the scheme's own and no checkpoint fits them."""
        self.scheme.finish(self)

    def values(self) -> Tensor:
        """Of a finished layer: its matrix [O, I] as plain numbers."""
        return self.scheme.values(self)

    def input_format(self, num_tokens: int) -> InputFormat:
        """The form in which this layer wants its input."""
        return PLAIN if self.post_op is not None else self.scheme.input_format(self, num_tokens)

    def forward(self, x_TI: Activation, batch: ForwardBatch) -> Tensor:
        return self._multiply(x_TI, batch, add_bias=True)

    def gated(
        self, x_TI: Activation, wanted: InputFormat, batch: ForwardBatch, activation: str = "silu"
    ) -> Activation:
        """act(first half of the outputs) * second half, in the form the next layer wants."""
        is_plain = self.post_op is None or not self.has_post_op(batch)
        is_fused = is_plain and activation == "silu"
        short = self.scheme.apply_gated(self, self._input(x_TI), wanted) if is_fused else None
        return gated(self(x_TI, batch), wanted, activation) if short is None else short

    def _multiply(self, x_TI: Activation, batch: ForwardBatch, add_bias: bool) -> Tensor:
        y_TO = self.scheme.apply(self, self._input(x_TI), add_bias)
        if self.post_op is None or not self.has_post_op(batch):
            return y_TO
        assert isinstance(x_TI, Tensor), "its format was not asked for"
        return self.post_op(x_TI, y_TO, batch)

    def _input(self, x_TI: Activation) -> Activation:
        """In the form that the scheme wants, where it came plain for the post-op's sake."""
        if self.post_op is None or not isinstance(x_TI, Tensor):
            return x_TI
        return converted(x_TI, self.scheme.input_format(self, x_TI.shape[0]))


class ColumnLinear(Linear):
    """Several matrices with the same input, one after the other, each split over the role."""

    def __init__(
        self, in_size: int, out_sizes: Sequence[int], *, role: str, bias: bool, build: LayerContext
    ) -> None:
        ranks = build.mesh.role(role)
        parts = [
            (size, split(f"a layer's width ({role})", size, ranks.size, ranks.rank))
            for size in out_sizes
        ]
        super().__init__(stack_shards(parts), whole(in_size), bias=bias, build=build)


class QKVLinear(Linear):
    """Query, key and value of attention. KV heads are repeated when there are fewer than ranks.

    `gated`: behind each head of the query lies one more, its gate.
    """

    def __init__(
        self,
        in_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        *,
        bias: bool,
        build: LayerContext,
        gated: bool = False,
    ) -> None:
        ranks = build.mesh.role("attention")
        heads = split_heads(num_heads, num_kv_heads, ranks.size, ranks.rank)

        def columns(num_all: int, span: Span, size: int) -> tuple[int, Span]:
            return num_all * size, Span(span.start * size, span.size * size)

        parts = [
            columns(num_heads, heads.query, head_size * (2 if gated else 1)),
            columns(num_kv_heads, heads.kv, head_size),
            columns(num_kv_heads, heads.kv, head_size),
        ]
        super().__init__(stack_shards(parts), whole(in_size), bias=bias, build=build)
        self.num_heads = heads.query.size  # on this rank
        self.num_kv_heads = heads.kv.size


class RowLinear(Linear):
    """Inputs split over the role; the outputs are summed, so that every rank has all of them.

    `is_summed` False: this rank's part of them, for a caller that sums more at once.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        role: str,
        bias: bool,
        build: LayerContext,
        is_summed: bool = True,
    ) -> None:
        ranks = build.mesh.role(role)
        span = split(f"a layer's width ({role})", in_size, ranks.size, ranks.rank)
        inputs = Shard(full_size=in_size, source=span, target=Span(0, span.size))
        super().__init__((whole(out_size),), inputs, bias=bias, build=build)
        self.ranks, self.is_summed = ranks, is_summed

    def forward(self, x_TI: Activation, batch: ForwardBatch) -> Tensor:
        # The bias enters the sum once.
        y_TO = self._multiply(x_TI, batch, add_bias=self.ranks.rank == 0)
        return all_reduce(y_TO, self.ranks) if self.is_summed else y_TO
