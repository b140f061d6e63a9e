"""The gated delta net against transformers' own; its memory in slots; its shares on ranks."""

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from penstock.errors import ConfigError
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.formats import PLAIN
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.recurrent import causal_conv, gated_delta, rms_norm_gated
from penstock.layers import linear
from penstock.layers.context import ExpertsContext, LayerContext
from penstock.layers.delta_net import GatedDeltaNet
from penstock.layers.linear import Linear
from penstock.parallel.mesh import RankMesh
from penstock.quantization.unquantized import Unquantized
from penstock.quantization.w8a8 import W8A8Scheme
from penstock.types.cache_spec import block_bytes
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import DeltaSpec, W8A8Spec
from penstock.weights.load import dummy_weights, load_weights
from penstock.weights.mapping import rename, rules

CPU = torch.device("cpu")
CONFIG = Qwen3NextConfig(
    hidden_size=48,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_conv_kernel_dim=4,
    num_hidden_layers=1,
    layer_types=["linear_attention"],
    rms_norm_eps=1e-6,
)


@pytest.fixture(scope="module")
def their_layer() -> theirs.Qwen3NextGatedDeltaNet:
    torch.manual_seed(0)
    layer = theirs.Qwen3NextGatedDeltaNet(CONFIG, 0).eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("proj.weight") or "in_proj" in name:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
            elif name == "dt_bias":
                parameter.normal_(-2, 1)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


@pytest.fixture(scope="module")
def folder(their_layer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("layer")
    tensors = {f"mixer.{name}": tensor for name, tensor in their_layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


class OneLayer(nn.Module):
    """A model of this layer alone; its names are the checkpoint's."""

    weight_rules = rules(rename("mixer.norm", "mixer.out_norm"))

    def __init__(self, build: LayerContext, config: Qwen3NextConfig = CONFIG) -> None:
        super().__init__()
        self.mixer = GatedDeltaNet(
            config.hidden_size,
            DeltaSpec(
                layers=(True,),
                num_key_heads=config.linear_num_key_heads,
                num_value_heads=config.linear_num_value_heads,
                key_size=config.linear_key_head_dim,
                value_size=config.linear_value_head_dim,
                conv_width=config.linear_conv_kernel_dim,
            ),
            norm_eps=config.rms_norm_eps,
            build=build,
        )


def a_build(mesh: RankMesh | None = None, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext(
        mesh=mesh or RankMesh.single(),
        dtype=dtype,
        device=CPU,
        cache_dtype=dtype,
        tables=Unquantized(),
        attention=get_backend("reference"),
        experts=ExpertsContext(),
    )


def ready(model: OneLayer) -> GatedDeltaNet:
    for module in model.modules():
        if isinstance(module, Linear | GatedDeltaNet):
            module.finish()
    return model.mixer


@torch.inference_mode()
def load(
    folder: Path, mesh: RankMesh | None = None, dtype: torch.dtype = torch.float32
) -> GatedDeltaNet:
    model = OneLayer(a_build(mesh, dtype))
    for module in model.modules():
        if isinstance(module, Linear):
            module.use(Unquantized())
    plain = SimpleNamespace(quantization=None)
    load_weights(model, folder, plain, mesh or RankMesh.single(), progress=False)
    return ready(model)


@dataclass
class Driver:
    """Sequence s lives in slot `slots[s]`; what a slot holds before its sequence is NaN."""

    layer: GatedDeltaNet
    slots: list[int]

    def __post_init__(self) -> None:
        num_slots = max(self.slots) + 1
        self.layer.bind_cache(
            *(
                torch.full((num_slots, *plane.shape), torch.nan, dtype=getattr(torch, plane.dtype))
                for plane in self.layer.cache_spec().planes(1)
            )
        )
        self.lengths = [0] * len(self.slots)

    @torch.inference_mode()
    def step(self, entries: list[tuple[int, Tensor]]) -> list[Tensor]:
        """(sequence, its next inputs) in one batch, one-token entries first; outputs as given."""
        sizes = [len(x) for _, x in entries]
        num_decodes = next((i for i, size in enumerate(sizes) if size > 1), len(sizes))
        positions, slots = [], []
        for (sequence, _), size in zip(entries, sizes, strict=True):
            positions += range(self.lengths[sequence], self.lengths[sequence] + size)
            slots += [self.slots[sequence]] * size
        for (sequence, _), size in zip(entries, sizes, strict=True):
            self.lengths[sequence] += size
        x_TC = torch.cat([x for _, x in entries])
        nothing = torch.zeros(len(x_TC), dtype=torch.int64)
        kv_lens = [self.lengths[sequence] for sequence, _ in entries]
        batch = ForwardBatch(
            input_ids_T=nothing,
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            rows_N=torch.zeros(len(entries), dtype=torch.int32),
            query_starts_N1=torch.tensor([0, *sizes]).cumsum(0).int(),
            kv_lens_N=torch.tensor(kv_lens).int(),
            block_table_RM=torch.zeros(1, 1, dtype=torch.int32),
            num_decodes=num_decodes,
            max_kv_len=max(kv_lens),
        )
        return list(self.layer(x_TC, batch).split(sizes))


def inputs(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(length, CONFIG.hidden_size, generator=generator) for length in lengths]


@torch.inference_mode()
def expected(their_layer: nn.Module, x_TC: Tensor) -> Tensor:
    return their_layer(x_TC[None])[0]


def check(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 200])
def test_a_prompt_gives_what_transformers_gives(their_layer, folder, length):
    (x_TC,) = inputs(length)
    (found,) = Driver(load(folder), [1]).step([(0, x_TC)])
    check(found, expected(their_layer, x_TC))


def test_prompts_of_mixed_lengths_share_a_batch(their_layer, folder):
    prompts = inputs(1, 1, 70, 2, 1, 130, 3)
    found = Driver(load(folder), [4, 2, 7, 1, 3, 6, 5]).step(list(enumerate(prompts)))
    for ours, x_TC in zip(found, prompts, strict=True):
        check(ours, expected(their_layer, x_TC))


def test_decodes_follow_a_prompt_and_leave_the_state_that_transformers_has(their_layer, folder):
    x_TC, y_TC = inputs(77, 76)
    driver = Driver(load(folder), [2, 1])
    driver.step([(0, x_TC[:70]), (1, y_TC[:67])])
    for token in range(7):  # both, in turns of order
        x, y = (0, x_TC[70 + token :][:1]), (1, y_TC[67 + token :][:1])
        found = driver.step([x, y] if token % 2 else [y, x])
        check(found[not token % 2], expected(their_layer, x_TC[: 71 + token])[-1:])
        check(found[token % 2], expected(their_layer, y_TC[: 68 + token])[-1:])
    cache = DynamicCache(config=CONFIG)
    with torch.inference_mode():
        their_layer(x_TC[None, :70], cache_params=cache)
        for token in range(70, 77):
            their_layer(x_TC[None, token : token + 1], cache_params=cache)
    num_past = driver.layer.cache_spec().num_past
    check(driver.layer.state_SVKD[2], cache.layers[0].recurrent_states[0][0])
    check(driver.layer.conv_SPF[2], cache.layers[0].conv_states[0][0, :, -num_past:].T)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_however_sequences_are_cut_into_steps_they_come_out_the_same(their_layer, folder, seed):
    rng = random.Random(seed)
    sequences = inputs(30, 9, 100)
    driver = Driver(load(folder), rng.sample(range(1, 6), 3))
    found: list[list[Tensor]] = [[], [], []]
    while left := [s for s in range(3) if driver.lengths[s] < len(sequences[s])]:
        entries = []
        for s in rng.sample(left, rng.randint(1, len(left))):
            size = rng.choice([1, 1, 2, 3, 20, 70])
            entries.append((s, sequences[s][driver.lengths[s] :][:size]))
        entries.sort(key=lambda entry: len(entry[1]) > 1)
        for (s, _), out in zip(entries, driver.step(entries), strict=True):
            found[s].append(out)
    for outs, x_TC in zip(found, sequences, strict=True):
        check(torch.cat(outs), expected(their_layer, x_TC))


def test_a_slot_is_used_again_without_being_cleared(their_layer, folder):
    first, second, third = inputs(40, 50, 1)
    driver = Driver(load(folder), [1, 1, 1])
    driver.step([(0, first)])
    check(driver.step([(1, second)])[0], expected(their_layer, second))
    check(driver.step([(2, third)])[0], expected(their_layer, third))


def test_a_copied_slot_continues_as_the_sequence_it_was_copied_from(their_layer, folder):
    (x_TC,) = inputs(90)
    driver = Driver(load(folder), [1, 3])
    driver.step([(0, x_TC[:66])])
    for pool in (driver.layer.conv_SPF, driver.layer.state_SVKD):
        pool[3] = pool[1]
    driver.lengths[1] = 66
    driver.step([(0, inputs(20)[0])])  # the first goes elsewhere
    check(driver.step([(1, x_TC[66:])])[0], expected(their_layer, x_TC)[66:])


def test_a_step_leaves_the_slots_of_others_alone(folder):
    x_TC, y_TC = inputs(20, 30)
    driver = Driver(load(folder), [1, 2])
    driver.step([(0, x_TC)])
    before = [pool[1].clone() for pool in (driver.layer.conv_SPF, driver.layer.state_SVKD)]
    driver.step([(1, y_TC)])
    assert torch.equal(driver.layer.conv_SPF[1], before[0])
    assert torch.equal(driver.layer.state_SVKD[1], before[1])


def test_the_shares_of_two_ranks_sum_up_to_the_whole(their_layer, folder, monkeypatch):
    monkeypatch.setattr(linear, "all_reduce", lambda x, ranks: x)
    prompts = inputs(1, 70, 5)
    parts = []
    for rank in range(2):
        mesh = RankMesh.place(rank, MeshShape(tp=2))
        driver = Driver(load(folder, mesh), [2, 3, 1])
        spec = driver.layer.cache_spec()
        assert (spec.num_value_heads, spec.num_channels) == (3, 16 + 16 + 3 * 24)
        assert driver.layer.conv1d.weight.shape == (spec.num_channels, 4)
        first = driver.step([(s, x[: len(x) // 2 + 1]) for s, x in enumerate(prompts)])
        rest = driver.step([(s, x[len(x) // 2 + 1 :]) for s, x in enumerate(prompts) if len(x) > 1])
        parts.append([first[0], *(torch.cat(both) for both in zip(first[1:], rest, strict=True))])
    for ours, more, x_TC in zip(*parts, prompts, strict=True):
        check(ours + more, expected(their_layer, x_TC))


def test_more_ranks_than_key_heads_are_refused():
    mesh = RankMesh.place(0, MeshShape(tp=4))
    with pytest.raises(ConfigError, match="number of key heads is 2, which 4 ranks"):
        OneLayer(a_build(mesh))


def test_bfloat16_is_as_close_to_the_truth_as_transformers_is(their_layer, folder):
    (x_TC,) = inputs(300)
    driver = Driver(load(folder, dtype=torch.bfloat16), [1])
    parts = (x_TC[:150], x_TC[150:299], x_TC[299:])
    ours = torch.cat([driver.step([(0, part.bfloat16())])[0] for part in parts])
    rounded = theirs.Qwen3NextGatedDeltaNet(CONFIG, 0).eval()
    rounded.load_state_dict(their_layer.state_dict())
    truth, rounded = expected(their_layer, x_TC), rounded.bfloat16()
    their_error = (expected(rounded, x_TC.bfloat16()).float() - truth).norm()
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - truth).norm() < 1.1 * their_error


def test_quantized_and_plain_projections_take_one_plain_input():
    """Checkpoints of 8-bit floats leave `in_proj_ba` as it was."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(**CONFIG.to_dict() | {"hidden_size": 128})
    outs = {}
    schemes = {
        "fp8": W8A8Scheme(W8A8Spec(weights="channel", inputs="row")),
        "plain": Unquantized(),
    }
    for kind, scheme in schemes.items():
        model = OneLayer(a_build(), config)
        layer = model.mixer
        layer.in_proj_qkvz.use(scheme)
        for other in (layer.in_proj_ba, layer.out_proj):
            other.use(Unquantized())
        if kind == "fp8":
            dummy_weights(model, seed=1)
            weights = {name: p.clone() for name, p in model.named_parameters()}
        else:
            scale = weights.pop("mixer.in_proj_qkvz.weight_scale")
            name = "mixer.in_proj_qkvz.weight"
            weights[name] = weights[name].float() * scale.view(-1, 1)
            model.load_state_dict(weights)
        with torch.inference_mode():
            ready(model)
        assert layer.input_format(5) == PLAIN
        x_TC = torch.randn(70, 128, generator=torch.Generator().manual_seed(3))
        (outs[kind],) = Driver(layer, [1]).step([(0, x_TC)])
    error = (outs["fp8"] - outs["plain"]).norm() / outs["plain"].norm()
    assert 1e-4 < error < 0.1


def test_the_published_model_keeps_77_megabytes_of_a_sequence():
    spec = DeltaSpec(
        layers=(True, True, True, False) * 12, num_key_heads=16, num_value_heads=32, key_size=128,
        value_size=128, conv_width=4,
    )  # fmt: skip
    assert sum(spec.layers) * block_bytes(spec.state(1, "bfloat16"), 32) == 77_266_944
    assert 36 * block_bytes(spec.state(4, "bfloat16"), 32) == 77_266_944 // 4


def _delta_args(num_tokens: int, heads: int, value_heads: int, keys: int, values: int):
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    q, k = randn(num_tokens, heads, keys), randn(num_tokens, heads, keys)
    v = randn(num_tokens, value_heads, values)
    g, beta = -randn(num_tokens, value_heads).exp(), randn(num_tokens, value_heads).sigmoid()
    return q, k, v, g, beta, randn(1, value_heads, keys, values)


@pytest.mark.parametrize(
    "rule", [theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule]
)
@pytest.mark.parametrize("num_tokens", [1, 50, 64, 150])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_reference_is_transformers_delta_rule(rule, num_tokens, has_state):
    q, k, v, g, beta, state = _delta_args(num_tokens, 2, 4, 16, 24)
    q_rep, k_rep = (x.repeat_interleave(2, dim=1) for x in (q, k))
    wanted, state_after = rule(
        *(x[None] for x in (q_rep, k_rep, v, g, beta)),
        initial_state=state if has_state else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    starts, slots = torch.tensor([0, num_tokens]).int(), torch.tensor([0]).int()
    is_decode = int(num_tokens == 1)
    found = gated_delta.reference(
        q, k, v, g, beta, state, slots, torch.tensor([has_state]), starts, is_decode
    )
    torch.testing.assert_close(found, wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, state_after, atol=1e-5, rtol=1e-5)


def test_the_reference_is_transformers_convolution():
    torch.manual_seed(0)
    x_TC, weight_CW, state = torch.randn(20, 12), torch.randn(12, 4), torch.randn(1, 3, 12)
    args = (torch.arange(12).int(), 12, weight_CW, state, torch.tensor([0]).int())
    past = state[0].T[None].clone()
    for first, end in ((0, 1), (1, 2)):  # decodes: the state goes on
        x = x_TC[first:end]
        wanted = theirs.causal_conv1d_update(x.T[None], past, weight_CW, None, "silu")
        starts = torch.tensor([0, end - first]).int()
        found = causal_conv.reference(x, *args, torch.tensor([True]), starts, 1)
        torch.testing.assert_close(found, wanted[0].T)
        torch.testing.assert_close(state[0].T, past[0])
    wanted = theirs.causal_conv1d_fn(x_TC.T[None], weight_CW, None, "silu")
    starts = torch.tensor([0, 20]).int()
    found = causal_conv.reference(x_TC, *args, torch.tensor([False]), starts, 0)
    torch.testing.assert_close(found, wanted[0].T)
    assert torch.equal(state[0], x_TC[-3:])


def test_the_reference_is_transformers_gated_norm():
    torch.manual_seed(0)
    norm = theirs.Qwen3NextRMSNormGated(24, eps=1e-5)
    norm.weight.data.normal_()
    x, z = torch.randn(7, 6, 24), torch.randn(7, 2, 3 * 24)
    wanted = norm(x, z.view(7, 6, 24))
    torch.testing.assert_close(rms_norm_gated.reference(x, z, norm.weight, 1e-5), wanted)
