"""A feed-forward block of many experts: a router sends each token to a few, a shared one sees all.

Every rank of the role "experts" holds a shard of every expert, an equal one where the number format
allows it (axis etp). With expert parallelism each group of ranks (axis ep) has other experts, which
its ranks shard. A block gives this rank's part of the sum; `TokenExchange` sums. Where tokens are
sent to the ranks of their experts (`ExpertDispatch`) it is the sum itself, of this rank's tokens.
"""

# T tokens of all ranks that share it, D hidden size, E experts, S slots, K experts of a token,
# R ranks

from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.kernels.formats import PLAIN, Activation, InputFormat
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.moe import SILU, Gate, Routing, add_shared, route, router_logits
from penstock.layers.context import LayerContext
from penstock.layers.expert_dispatch import ExpertDispatch
from penstock.layers.expert_slots import SlotTable
from penstock.layers.fused_quant import converted
from penstock.layers.mlp import GatedMLP
from penstock.parallel.mesh import RankMesh
from penstock.parallel.parameter import new_parameter
from penstock.parallel.shard import Span, split, split_groups
from penstock.quantization.scheme import ExpertsScheme, ExpertsShape
from penstock.types.expert_slots import first_slots
from penstock.types.model_spec import ModelSpec


def in_dtype_without_loss(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in `dtype`, or as they are where it does not have them."""
    converted_weight = weight.to(dtype)
    return converted_weight if torch.equal(converted_weight.to(weight.dtype), weight) else weight


class Router(nn.Module):
    """Scores of all experts, in fp32: a small difference may choose another expert.

    The weight is loaded in fp32; `finish` makes it smaller where that loses nothing.
    `correction`: the checkpoint has a number per expert that counts for the choice alone.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool,
        correction: bool,
        build: LayerContext,
    ) -> None:
        super().__init__()
        self.bias: Tensor | None = None
        self.correction_bias: Tensor | None = None
        self.dtype = build.dtype
        self.weight: nn.Parameter = new_parameter(
            (num_experts, hidden_size), torch.float32, build.device
        )
        if bias:
            self.bias = new_parameter((num_experts,), torch.float32, build.device)
        if correction:
            self.correction_bias = new_parameter((num_experts,), torch.float32, build.device)

    def finish(self) -> None:
        """After loading: a GPU multiplies numbers of the model's dtype as such, a CPU in fp32."""
        if self.weight.is_cuda:
            weight_ED = in_dtype_without_loss(self.weight, self.dtype)
            self.weight = nn.Parameter(weight_ED.detach(), requires_grad=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return router_logits(x_TD, self.weight, self.bias)


class Experts(nn.Module):
    """Routing gives `slot_of_E[e]` for expert e: its slot on this rank, or `num_slots` for one of
    another rank. With a `SlotTable`, and where tokens are sent to ranks, that is the expert's own
    number, and `slots_of` gives a slot in the numbering of all ranks, of which this one's are
    `span` and hold `experts_S[span]`.

    `load_S` counts the tokens that came to each of these numbers, also those that only fill up a
    CUDA graph.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        gate: Gate,
        build: LayerContext,
    ) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.num_experts, self.slots = num_experts, build.experts.slots
        total, size = self.slots.num_slots if self.slots else num_experts, self.mesh.shape.ep
        spans = [
            split_groups("the number of experts", total, 1, size, rank) for rank in range(size)
        ]
        self.span = spans[self.mesh.coordinate("ep")]
        self.num_slots = self.span.size
        self.has_all = self.num_slots == num_experts
        self.experts_S = tuple(range(num_experts))
        self.may_move = self.slots is not None and self.slots.layer_updates > 0
        self.hidden_size, self.intermediate_size, self.has_bias = (
            hidden_size,
            intermediate_size,
            bias,
        )
        self.dtype, self.device = build.dtype, build.device
        self.gate = gate
        self.by_reference, self.max_tokens = build.experts.by_reference, build.experts.max_tokens
        self.scheme: ExpertsScheme
        self.layer: int  # its number in the model
        self.gate_up, self.down = nn.Module(), nn.Module()  # hold the scheme's parameters
        self.is_global = self.slots is not None or (
            build.experts.all_to_all or build.experts.counts_by_expert
        )
        slots_E = torch.arange(num_experts, dtype=torch.int32)
        if not self.is_global:
            is_own_E = (slots_E >= self.span.start) & (slots_E < self.span.stop)
            slots_E = torch.where(is_own_E, slots_E - self.span.start, self.num_slots)
        load_S = torch.zeros(num_experts, dtype=torch.int64, device=build.device)
        ranks_S = torch.arange(size).repeat_interleave(torch.tensor([s.size for s in spans]))
        self.register_buffer("slot_of_E", slots_E.to(build.device), persistent=False)
        self.register_buffer("load_S", load_S, persistent=False)
        self.register_buffer("ranks_S", ranks_S.to(build.device), persistent=False)
        self.slot_of_E: Tensor
        self.load_S: Tensor
        self.ranks_S: Tensor
        self.table: SlotTable | None = None
        if self.slots is not None:
            self.table = SlotTable(num_experts, min(size, total - num_experts + 1), build.device)

    def use(self, scheme: ExpertsScheme, layer: int) -> None:
        """How the weights are stored; set once the layer's place in the model is known."""
        self.scheme, self.layer = scheme, layer
        if self.slots is not None:
            default = first_slots(self.num_experts, self.slots.num_slots, self.mesh.shape.ep)
            self.place(dict(self.slots.initial).get(layer, default))
        shape = ExpertsShape(
            num_experts=self.num_experts,
            experts=self.experts_S[self.span.slice],
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            features=self._features(scheme.group),
            has_bias=self.has_bias,
        )
        scheme.create(self, shape, self.dtype, self.device)

    def place(self, experts_S: tuple[int, ...]) -> None:
        """From now on the slots hold these; the weights are the caller's business."""
        self.experts_S = experts_S
        if self.table is not None:
            self.table.set(experts_S)

    def slots_of(self, experts_TK: Tensor, first: int = 0) -> Tensor:
        """`first`: number of the first token, by which the slots of an expert take turns."""
        return experts_TK if self.table is None else self.table.chosen(experts_TK, first)

    def _features(self, group: int) -> Span:
        """Of this rank: an equal shard, or as equal a one as groups allow."""
        what, size = "an expert's width", self.mesh.shape.etp
        rank = self.mesh.coordinate("etp")
        if group == 1:
            return split(what, self.intermediate_size, size, rank)
        return split_groups(what, self.intermediate_size, group, size, rank)

    def finish(self) -> None:
        """After loading: the parameters are now the scheme's own and no checkpoint fits them."""
        self.scheme.finish(self)

    def forward(self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """This rank's part of the sum."""
        if self.is_global:
            own_TK = slots_TK - self.span.start
            is_own_TK = (own_TK >= 0) & (own_TK < self.num_slots)
            slots_TK = torch.where(is_own_TK, own_TK, self.num_slots).int()
        size = self.max_tokens or max(x_TD.shape[0], 1)
        # The bias of an expert enters the sum once.
        parts = [
            self.scheme.apply(self, *tensors, add_bias=self.mesh.coordinate("etp") == 0)
            for tensors in zip(
                x_TD.split(size), slots_TK.split(size), weights_TK.split(size), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class MoE(nn.Module):
    """`shared_intermediate_size`: of the expert that every token goes through; 0: there is none.
    `shared_gate`: its output is multiplied by a sigmoid of the input.
    `scales_inputs`: a token has one expert, and its weight multiplies what that is given."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        *,
        routing: Routing,
        build: LayerContext,
        gate: Gate = SILU,
        bias: bool = False,
        router_bias: bool = False,
        correction: bool = False,
        shared_intermediate_size: int = 0,
        shared_gate: bool = False,
        scales_inputs: bool = False,
    ) -> None:
        super().__init__()
        assert not scales_inputs or routing.num_active == 1, routing
        self.routing, self.scales_inputs = routing, scales_inputs
        self.router = Router(
            hidden_size, num_experts, bias=router_bias, correction=correction, build=build
        )
        self.experts = Experts(
            num_experts, hidden_size, intermediate_size, bias=bias, gate=gate, build=build
        )
        self.dispatch: ExpertDispatch | None = None
        if build.experts.all_to_all:
            self.dispatch = ExpertDispatch(build.mesh, self.experts.ranks_S)
        self.shared = None
        if shared_intermediate_size:
            # Of tokens that are nowhere else.
            own = replace(build, mesh=RankMesh.single()) if self.dispatch is not None else build
            self.shared = GatedMLP(hidden_size, shared_intermediate_size, bias=False, build=own)
        self.shared_gate: Tensor | None = None
        if shared_gate:
            self.shared_gate = new_parameter((1, hidden_size), build.dtype, build.device)

    def input_format(self, num_tokens: int) -> InputFormat:
        return PLAIN  # the router reads it, and the experts

    def forward(self, x_TD: Activation, batch: ForwardBatch) -> Tensor:
        assert isinstance(x_TD, Tensor)
        experts_TK, weights_TK = route(
            self.router(x_TD),
            self.routing,
            self.router.correction_bias,
            self.experts.slot_of_E,
            self.experts.load_S,
        )
        routed_TD = x_TD
        if self.scales_inputs:
            routed_TD = x_TD * weights_TK.to(x_TD.dtype)
            weights_TK = torch.ones_like(weights_TK)
        if self.dispatch is None:
            y_TD = self.experts(routed_TD, self.experts.slots_of(experts_TK), weights_TK)
        else:
            slots_TK = self.experts.slots_of(experts_TK, self.dispatch.rank)
            y_TD = self.dispatch(self.experts, routed_TD, slots_TK, weights_TK, batch)
        if self.shared is not None:
            wanted = self.shared.input_format(x_TD.shape[0])
            shared_TD = self.shared(converted(x_TD, wanted), batch)
            y_TD = add_shared(y_TD, shared_TD, x_TD, self.shared_gate)
        return y_TD


def experts_or_mlp(spec: ModelSpec, layer: int, build: LayerContext) -> GatedMLP | MoE:
    """A gated MLP, or experts where the spec has them."""
    moe = spec.moe
    if moe is None or not moe.layers[layer]:
        return GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            build=build,
            activation=spec.hidden_act,
        )
    return MoE(
        spec.hidden_size,
        moe.num_experts,
        moe.intermediate_size,
        routing=Routing(
            num_active=moe.num_active,
            score=moe.score,
            renormalize=moe.renormalize,
            scale=moe.scale,
            num_groups=moe.num_groups,
            num_active_groups=moe.num_active_groups,
            num_best=moe.num_best,
        ),
        build=build,
        correction=moe.has_correction,
        shared_intermediate_size=moe.shared_intermediate_size,
        shared_gate=moe.has_shared_gate,
        scales_inputs=moe.scales_inputs,
    )
