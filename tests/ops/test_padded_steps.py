"""Attention and recurrent ops on a step of any mix as graphs hold it, and on the step as it is.

Padding is poisoned: queries, inputs and block 0 are NaN there, and nothing of it may be seen.
"""

# T tokens, N entries, H query heads, K kv heads, D head size, C channels, X columns

import numpy as np
import pytest
import torch
from graph_steps import plan_of
from torch import Tensor

from penstock.kernels.attention import triton_decode
from penstock.kernels.attention.backend import AttentionParams, get_backend
from penstock.kernels.forward_batch import ForwardBatch
from penstock.kernels.recurrent import causal_conv, gated_delta
from penstock.layers.delta_net import _states
from penstock.runtime.input_batch import Rows
from penstock.runtime.step_layout import StepShape

BLOCK, NUM_ROWS, HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 2, 1, 32
# Row: tokens before the step, tokens of its prompt, tokens of the step. Two rows decode.
ROWS = {0: (40, 40, 1), 1: (17, 17, 1), 2: (0, 9, 5), 3: (16, 60, 40), 4: (0, 10, 10)}
SHAPES = [StepShape(2, 55), StepShape(12, 64)]


def step(shape: StepShape) -> tuple[ForwardBatch, ForwardBatch, Tensor]:
    """(the step as it is, the step padded, which of its tokens are those of the first)."""
    torch.manual_seed(0)
    texts = {row: np.arange(num, dtype=np.int32) + row for row, (_, num, _) in ROWS.items()}
    parts = [(row, before, before + num) for row, (before, _, num) in ROWS.items()]
    plan = plan_of(0, texts, parts, [])
    blocks = 1 + torch.randperm(NUM_ROWS * 4).view(NUM_ROWS, 4).int()
    both = []
    for _ in range(2):
        rows = Rows(NUM_ROWS, 4, BLOCK, torch.device("cpu"), (True, False))
        rows.apply(plan)
        rows._prefill_ids = dict(texts)
        rows.block_tables[0][:NUM_ROWS] = blocks
        rows.block_tables[1][:NUM_ROWS] = blocks[:, :1]
        rows.lengths_R[:2] = torch.tensor([40, 17])
        both.append(rows)
    plain, packed = both[0].build(plan).batch, shape.pack(plan, NUM_ROWS, texts.__getitem__)
    padded, _ = both[1].padded_batch(torch.from_numpy(packed), shape, 64)
    assert torch.equal(both[0].lengths_R, both[1].lengths_R)
    real = torch.tensor([0, 1, *(shape.num_decodes + i for i in range(plain.num_tokens - 2))])
    for name in ("input_ids_T", "positions_T", "slots_T"):
        assert torch.equal(getattr(padded, name)[real], getattr(plain, name)), name
    return plain, padded, real


def poisoned(x: Tensor, num_tokens: int, real: Tensor) -> Tensor:
    """`x` where tokens are real, NaN elsewhere."""
    padded = torch.full((num_tokens, *x.shape[1:]), torch.nan, dtype=x.dtype)
    padded[real] = x
    return padded


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", [*SHAPES, StepShape(2, 160)], ids=str)
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_attention_of_a_padded_step(
    name: str, shape: StepShape, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, padded, real = step(shape)
    # What nobody writes is NaN.
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: torch.full(*size, torch.nan, **options)
    )
    k, v = (torch.randn(4 * NUM_ROWS + 1, KV_HEADS, BLOCK, HEAD_SIZE) for _ in range(2))
    k[0], v[0] = torch.nan, torch.nan
    q_THD = torch.randn(plain.num_tokens, HEADS, HEAD_SIZE)
    params = AttentionParams(HEAD_SIZE**-0.5, window)
    want = get_backend("reference").attend(q_THD, k, v, plain, params)
    got = get_backend(name).attend(poisoned(q_THD, padded.num_tokens, real), k, v, padded, params)
    torch.testing.assert_close(got[real], want, atol=1e-5, rtol=1e-5)
    assert (got[real[-1] + 1 :] == 0).all()


@pytest.mark.parametrize("load", [triton_decode.Load.PARTIAL_WAVE, triton_decode.Load.MANY_WAVES])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fp8_epilogue_of_a_padded_step(
    shape: StepShape, load: triton_decode.Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk's token must not come from the decode kernel, nor be left out of the others'."""
    monkeypatch.setattr(triton_decode, "load_of", lambda num_programs, longest: load)
    plain, padded, real = step(shape)
    k, v = (torch.randn(4 * NUM_ROWS + 1, KV_HEADS, BLOCK, HEAD_SIZE).half() for _ in range(2))
    k[0], v[0] = torch.nan, torch.nan
    q_THD = torch.randn(plain.num_tokens, HEADS, HEAD_SIZE).half()
    params, scale_1 = AttentionParams(HEAD_SIZE**-0.5), torch.full((1,), 0.01)
    backend = get_backend("triton")
    want = backend.attend(q_THD, k, v, plain, params, out_scale_1=scale_1)
    q_THD = poisoned(q_THD, padded.num_tokens, real)
    got = backend.attend(q_THD, k, v, padded, params, out_scale_1=scale_1)
    assert torch.equal(got.view(torch.uint8)[real], want.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_recurrent_ops_of_a_padded_step(impl: str, shape: StepShape) -> None:
    """Every chunk has its tiles, however many of the decodes before it are padding."""
    plain, padded, real = step(shape)
    convs, deltas = causal_conv.implementations(), gated_delta.implementations()
    conv = causal_conv.reference if impl == "reference" else convs[impl].run
    delta = gated_delta.reference if impl == "reference" else deltas[impl].run
    x_TX, columns_C = torch.randn(plain.num_tokens, 24), torch.randperm(24)[:20].int()
    weight_CW, past = torch.randn(20, 4), torch.randn(4 * NUM_ROWS + 1, 3, 20)
    memory = torch.randn(4 * NUM_ROWS + 1, 2, 16, 16)
    past[0], memory[0] = torch.nan, torch.nan
    qkv = torch.randn(3, plain.num_tokens, 2, 16)
    gates = torch.rand(2, plain.num_tokens, 2) * torch.tensor([-0.2, 1.0])[:, None, None]

    def run(batch: ForwardBatch, conv, delta, place):
        places = (*_states(batch.of_group(1)), batch.query_starts_N1, batch.num_decodes)
        kept = past.clone(), memory.clone()
        y_TC = conv(place(x_TX), columns_C, 1, weight_CW, kept[0], *places)
        tensors = [place(part).contiguous() for part in (*qkv, *gates)]
        return y_TC, delta(*tensors, kept[1], *places), *kept

    want = run(plain, causal_conv.reference, gated_delta.reference, lambda x: x)
    got = run(padded, conv, delta, lambda x: poisoned(x, padded.num_tokens, real))
    for found, expected in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(found[real], expected, atol=1e-4, rtol=1e-4)
    for found, expected in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(found[1:], expected[1:], atol=1e-4, rtol=1e-4)
