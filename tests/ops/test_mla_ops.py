"""Latent attention against torch's own attention on keys and values that were made of the latents.

Both ways to compute it, every division of what is cached into pieces, and every place to cut a
prompt must give that one result.
"""

# Q queries and L keys of one sequence, H heads, C latent size, R rotated channels, D others of a
# key, V value size

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from op_cases import AttentionCase, decodes, make_attention, prefills
from torch import Tensor

from penstock.kernels.attention.mla import (
    cached,
    mla_attend,
    mla_decode,
    mla_write,
    plan_prefill,
    prefill,
)
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.op import Op

HEADS, LATENT, ROPE, NOPE, VALUE, BLOCK = 3, 32, 8, 12, 20, 16
SCALE = 0.3
CPU = torch.device("cpu")


def attended(q_QHK: Tensor, kv_LA: Tensor, weight_HEC: Tensor) -> Tensor:
    """out_QHV of a sequence whose queries are the last of its positions."""
    latent_LC, rope_LR = kv_LA.split((LATENT, ROPE), dim=1)
    made_HLE = torch.einsum("lc,hec->hle", latent_LC, weight_HEC)
    k_HLD, v_HLV = made_HLE.split((NOPE, VALUE), dim=2)
    k_HLK = torch.cat((k_HLD, rope_LR.expand(HEADS, -1, -1)), dim=2)
    num_queries, num_keys = len(q_QHK), len(kv_LA)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    out_HQV = F.scaled_dot_product_attention(
        q_QHK.transpose(0, 1), k_HLK, v_HLV, attn_mask=mask, scale=SCALE
    )
    return out_HQV.transpose(0, 1)


class Latents:
    """A batch over a cache of random latents, and random queries and weights."""

    def __init__(self, case: AttentionCase) -> None:
        self.batch: ForwardBatch = make_attention(case, torch.float32, CPU).batch
        num_blocks = int(self.batch.block_table_RM.max()) + 1
        self.cache_BSA = torch.randn(num_blocks, BLOCK, LATENT + ROPE)
        self.q_THK = torch.randn(self.batch.num_tokens, HEADS, NOPE + ROPE)
        self.weight_HEC = torch.randn(HEADS, NOPE + VALUE, LATENT) * LATENT**-0.5

    def expected(self) -> Tensor:
        starts, outputs = self.batch.query_starts_N1.tolist(), []
        for entry, row in enumerate(self.batch.rows_N.tolist()):
            position_L = torch.arange(int(self.batch.kv_lens_N[entry]))
            block_L = self.batch.block_table_RM[row].long()[position_L // BLOCK]
            kv_LA = self.cache_BSA[block_L, position_L % BLOCK]
            q_QHK = self.q_THK[starts[entry] : starts[entry + 1]]
            outputs.append(attended(q_QHK, kv_LA, self.weight_HEC))
        return torch.cat(outputs)


@pytest.mark.parametrize("compute", [mla_decode.reference, mla_decode], ids=["reference", "cpu"])
def test_absorbed_decodes_are_attention_over_keys_and_values(compute) -> None:
    latents = Latents(decodes(1, 15, 16, 17, 200, block_size=BLOCK))
    batch, (keys_HDC, values_HVC) = latents.batch, latents.weight_HEC.split((NOPE, VALUE), dim=1)
    q_NHD, q_NHR = latents.q_THK.split((NOPE, ROPE), dim=2)
    out_NHC = compute(
        torch.einsum("nhd,hdc->nhc", q_NHD, keys_HDC), q_NHR, latents.cache_BSA, batch.rows_N,
        batch.kv_lens_N, batch.block_table_RM, SCALE, batch.max_kv_len,
    )  # fmt: skip
    out_NHV = torch.einsum("nhc,hvc->nhv", out_NHC, values_HVC)
    torch.testing.assert_close(out_NHV, latents.expected(), atol=1e-5, rtol=1e-5)


def filled(latents: Latents, piece_tokens: int) -> Tensor:
    batch = latents.batch
    num_decodes = batch.num_decodes
    q_THD, q_THR = latents.q_THK[num_decodes:].split((NOPE, ROPE), dim=2)
    kv_TA = cached(latents.cache_BSA, batch.slots_T[num_decodes:], torch.float32)
    plan = plan_prefill(batch, BLOCK, piece_tokens)
    assert all(len(piece.slots) <= piece_tokens for piece in plan.pieces)
    assert sum(len(piece.slots) for piece in plan.pieces) == sum(batch.cached_lens)
    return prefill(q_THD, q_THR, kv_TA, latents.weight_HEC, latents.cache_BSA, plan, VALUE, SCALE)


@pytest.mark.parametrize("piece_tokens", [7, 16, 50, 4096])
@pytest.mark.parametrize(
    "entries",
    [
        ((20, 20), (3, 3)),
        ((20, 37), (9, 9), (1, 64), (300, 301), (4, 100)),
        ((1, 200),),
        ((5, 5), (6, 40)),
    ],
    ids=str,
)
def test_prefixes_in_pieces_are_attention_over_everything(entries, piece_tokens: int) -> None:
    latents = Latents(AttentionCase(((1, 30), (1, 7), *entries), 2, block_size=BLOCK))
    expected = latents.expected()[2:]
    torch.testing.assert_close(filled(latents, piece_tokens), expected, atol=1e-5, rtol=1e-5)


def test_the_reference_merges_pieces_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "__call__", lambda op, *args: op.reference(*args))
    latents = Latents(AttentionCase(((1, 9), (20, 37), (9, 9), (4, 100)), 1, block_size=BLOCK))
    torch.testing.assert_close(filled(latents, 11), latents.expected()[1:], atol=1e-5, rtol=1e-5)


def test_tokens_of_entries_without_keys_are_left_alone() -> None:
    out, lse = torch.full((5, HEADS, VALUE), 7.0), torch.full((5, HEADS), 2.0)
    q, starts = torch.randn(5, HEADS, NOPE + ROPE), torch.tensor([0, 3, 5], dtype=torch.int32)
    for compute in (mla_attend.reference, mla_attend):
        compute(
            q[:, :, :NOPE], q[:, :, NOPE:], torch.randn(4, HEADS, NOPE + VALUE),
            torch.randn(4, ROPE), starts, torch.tensor([0, 0, 4], dtype=torch.int32), out, lse,
            SCALE, False, True,
        )  # fmt: skip
        assert (out[:3] == 7.0).all() and (lse[:3] == 2.0).all()
        assert (out[3:] != 7.0).all()


def test_both_orders_of_rotated_channels_give_the_same_scores() -> None:
    """A checkpoint with pairs of channels side by side is the one with halves, reordered."""
    torch.manual_seed(0)
    q, kv, positions = torch.randn(6, HEADS, ROPE), torch.randn(6, LATENT + ROPE), torch.arange(6)
    angle = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
    table, cache = torch.cat((angle.cos(), angle.sin()), dim=1), torch.zeros(2, 8, LATENT + ROPE)
    args = (torch.ones(LATENT), 1e-6, table, positions, cache, torch.arange(6) + 3)
    halves_q, halves = mla_write(q, kv, *args, False)
    assert torch.equal(cache.flatten(0, 1)[3:9], halves)
    order = torch.arange(ROPE).view(2, -1).T.flatten()  # 0, 4, 1, 5, ...
    pairs = torch.cat((kv[:, :LATENT], kv[:, LATENT:][:, order]), dim=1)
    pairs_q, pairs = mla_write(q[:, :, order], pairs, *args, True)
    torch.testing.assert_close(pairs_q, halves_q)
    torch.testing.assert_close(pairs, halves)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_chunks_in_a_graph_attend_to_their_prefix_as_decodes_do(impl: str) -> None:
    """What the host does not know is found on the device: which tokens have a prefix."""
    case = prefills((20, 20), (5, 37), (1, 60), (3, 3), (0, 0), block_size=BLOCK)
    latents = Latents(case)
    batch = replace(latents.batch, cached_lens=None)
    attend = mla_attend.reference if impl == "reference" else mla_attend.implementations()[impl].run
    decode = mla_decode.reference if impl == "reference" else mla_decode.implementations()[impl].run
    plan = plan_prefill(batch, BLOCK)
    assert plan.absorbed is not None and plan.pieces == ()
    assert plan.absorbed.rows_T.dtype == plan.absorbed.kv_lens_T.dtype == torch.int32
    behind = [position + 1 for position in (*range(32, 37), 59)]
    assert plan.absorbed.kv_lens_T.tolist() == [0] * 20 + behind + [0] * 3
    q_THD, q_THR = latents.q_THK.split((NOPE, ROPE), dim=2)
    kv_TA = cached(latents.cache_BSA, batch.slots_T, torch.float32)
    weights = latents.weight_HEC
    own_THV = prefill(q_THD, q_THR, kv_TA, weights, latents.cache_BSA, plan, VALUE, SCALE, attend)
    keys_HDC, values_HVC = weights.split((NOPE, VALUE), dim=1)
    out_THC = decode(
        torch.einsum("thd,hdc->thc", q_THD, keys_HDC), q_THR, latents.cache_BSA,
        plan.absorbed.rows_T, plan.absorbed.kv_lens_T, batch.block_table_RM, SCALE,
        batch.max_kv_len,
    )  # fmt: skip
    absorbed_THV = torch.einsum("thc,hvc->thv", out_THC, values_HVC)
    is_behind_T11 = (plan.absorbed.kv_lens_T > 0)[:, None, None]
    found = torch.where(is_behind_T11, absorbed_THV, own_THV)
    torch.testing.assert_close(found, latents.expected(), atol=1e-5, rtol=1e-5)
