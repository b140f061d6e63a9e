"""`TokenExchange`: around an MLP whose shards lie on more ranks than attention's.

In front of it the tokens of all ranks come together, behind it each rank gets the sums of its own.
Where all ranks have the same tokens, only the sum is left.
"""

# T tokens of this rank, S tokens of all ranks that share the MLP, D hidden size

from dataclasses import replace

from torch import Tensor

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.forward_batch import AdapterTokens, ForwardBatch
from penstock.layers.context import LayerContext
from penstock.layers.context_parallel import ContextRanks
from penstock.layers.fused_quant import converted
from penstock.parallel.collectives import all_reduce, gather_tokens, scatter_sums


class NoExchange:
    """Around a block that brings tokens together itself."""

    def of_attention(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def of_mlp(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def num_tokens(self, batch: ForwardBatch) -> int:
        return batch.num_tokens

    def sent_as(self, wanted: InputFormat, batch: ForwardBatch) -> InputFormat:
        return wanted

    def gather(self, x_TD: Activation, wanted: InputFormat, batch: ForwardBatch) -> Activation:
        return x_TD

    def scatter(self, y_TD: Tensor, batch: ForwardBatch) -> Tensor:
        return y_TD


class TokenExchange:
    def __init__(self, build: LayerContext) -> None:
        self._tokens = build.mesh.role("tokens")
        self._copies = build.mesh.role("copies")
        self._context = ContextRanks(build)

    def of_attention(self, batch: ForwardBatch) -> ForwardBatch:
        """The step with the adapters of the tokens in front of the exchange."""
        if batch.adapters is None or not self._context.splits(batch):
            return batch
        if (key := TokenExchange.of_attention) not in batch.plans:
            batch.plans[key] = batch.adapters.of(self._context.own_tokens(batch))
        adapters = batch.plans[key]
        others = tuple(replace(other, adapters=adapters) for other in batch.others)
        return replace(batch, adapters=adapters, others=others)

    def of_mlp(self, batch: ForwardBatch) -> ForwardBatch:
        """The step with the adapters of the tokens that the MLP sees."""
        if batch.adapters is None:
            return batch
        if (key := TokenExchange.of_mlp) not in batch.plans:
            batch.plans[key] = self._gathered_adapters(batch.adapters, batch)
        adapters = batch.plans[key]
        return batch if adapters is batch.adapters else replace(batch, adapters=adapters)

    def _gathered_adapters(self, own: AdapterTokens, batch: ForwardBatch) -> AdapterTokens:
        if self._context.splits(batch):
            return own.of(self._context.gathered_tokens(batch))
        if self._tokens.group is None:
            return own
        slots_S1 = gather_tokens(own.slots_T[:, None], self._tokens, batch.rank_tokens)
        return AdapterTokens(slots_S1[:, 0], None)

    def num_tokens(self, batch: ForwardBatch) -> int:
        """That the MLP sees."""
        if batch.rank_tokens is not None:
            return sum(batch.rank_tokens)
        return self._tokens.size * batch.num_tokens

    def sent_as(self, wanted: InputFormat, batch: ForwardBatch) -> InputFormat:
        """The form in front of the exchange, for an MLP that wants another one behind it."""
        is_sent = self._tokens.group is not None or self._context.splits(batch)
        return PLAIN if is_sent else wanted

    def gather(self, x_TD: Activation, wanted: InputFormat, batch: ForwardBatch) -> Activation:
        if self._context.splits(batch):
            assert isinstance(x_TD, Tensor)
            return converted(self._context.gather(x_TD, batch), wanted)
        if self._tokens.group is None:
            return x_TD
        assert isinstance(x_TD, Tensor)
        return converted(gather_tokens(x_TD, self._tokens, batch.rank_tokens), wanted)

    def scatter(self, y_SD: Tensor, batch: ForwardBatch) -> Tensor:
        """`y_SD`: this rank's part of the sums."""
        if self._context.splits(batch):
            return self._context.scatter(y_SD, batch)
        y_TD = scatter_sums(y_SD, self._tokens, batch.rank_tokens)
        return all_reduce(y_TD, self._copies)
