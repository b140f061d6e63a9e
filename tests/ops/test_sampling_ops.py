"""The Triton sampling kernels against their references."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from penstock.kernels.sampling import reference  # noqa: E402
from penstock.kernels.sampling import triton as kernels  # noqa: E402

VOCABS = [7, 1000, 4096, 9001]
DTYPES = [torch.float32, torch.bfloat16]
MAX_INT64 = 2**63 - 1


@pytest.fixture(autouse=True)
def _on_device(device):
    with device:
        yield


def some_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float32):
    torch.manual_seed(vocab_size)
    return (4 * torch.randn(num_rows, vocab_size)).to(dtype)


@triton.jit
def _store_bits(seeds_ptr, indices_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr):
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    bits = kernels.hash_bits(tl.load(seeds_ptr + row), tl.load(indices_ptr + row), tokens)
    out = bits.to(tl.int32, bitcast=True)
    tl.store(out_ptr + row * vocab_size + tokens, out, mask=tokens < vocab_size)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_noise_bits_are_equal_bit_for_bit(index_dtype):
    seeds = torch.tensor([0, 1, -1, MAX_INT64, -MAX_INT64 - 1, 0x1234_5678_9ABC])
    indices = torch.tensor([0, 1, 2, 131071, 5, 2**31 - 1], dtype=index_dtype)
    expected = reference.hash_bits(seeds, indices, torch.arange(1000))
    found = torch.empty_like(expected)
    _store_bits[len(seeds),](seeds, indices, found, 1000, BLOCK=1024)
    assert torch.equal(found, expected)
    assert len(expected.unique()) > 5990  # of 6000: rows differ, and tokens within a row always do


@pytest.mark.parametrize("bit", range(0, 64, 5))
def test_each_bit_of_the_seed_flips_half_of_the_noise(bit):
    seeds = torch.tensor([99, 99 ^ (1 << bit)])
    bits = reference.hash_bits(seeds, torch.tensor([3, 3]), torch.arange(2000))
    flipped = (bits[0] ^ bits[1]).cpu().numpy().view("uint8")
    share = sum(int(byte).bit_count() for byte in flipped) / (2000 * 32)
    assert abs(share - 0.5) < 0.01


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax(vocab_size, dtype):
    logits = some_logits(5, vocab_size, dtype)
    logits[3] = 1.0  # all equal: the first wins
    logits[4, :-1] = -torch.inf
    assert torch.equal(kernels.argmax(logits), reference.argmax.reference(logits))


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_thresholds", [False, True])
def test_gumbel_argmax(vocab_size, dtype, has_thresholds):
    logits = some_logits(12, vocab_size, dtype)
    temperature = torch.linspace(0, 3, 12)
    params = torch.zeros(12, 3)
    params[:, 1] = temperature  # a column of a table, as the sampler has it
    args = (logits, params[:, 1], torch.arange(12) - 6, torch.arange(12) * 7)
    thresholds = logits.float().topk(5).values.amin(-1) if has_thresholds else None
    found = kernels.gumbel_argmax(*args, thresholds)
    assert torch.equal(found, reference.gumbel_argmax.reference(*args, thresholds))
    assert found[0, 0] == logits[0].argmax()
    assert found[1].tolist() == [1] * 12


def broken_logits(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A good row between rows that have no token to draw, and one that is good but for -inf."""
    logits = some_logits(7, vocab_size, dtype)
    logits[0] = torch.nan
    logits[1, 0] = torch.nan
    logits[2, -1] = torch.nan
    logits[3, vocab_size // 2] = torch.inf
    logits[4] = -torch.inf
    logits[6, 1:] = -torch.inf
    return logits


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["argmax", "drawn", "with a threshold", "with its own threshold"])
def test_rows_without_finite_logits_are_told_from_others(vocab_size, dtype, op):
    logits = broken_logits(vocab_size, dtype)
    wanted = [0, 0, 0, 0, 0, 1, 1]
    temperatures = torch.tensor([0.0, 0.7, 1.0])
    for temperature in temperatures.tolist() if op != "argmax" else [0.0]:
        args = (torch.full((7,), temperature), torch.arange(7), torch.arange(7))
        thresholds = None
        if op == "with a threshold":
            thresholds = torch.full((7,), -1e30)
        elif op == "with its own threshold":
            params = (args[0], torch.full((7,), 5), torch.full((7,), 0.9), torch.full((7,), 0.1))
            thresholds = kernels.filter_thresholds(logits, *params, 5)
        for module in (kernels, reference):
            if op == "argmax":
                found = module.argmax(logits)
            else:
                found = module.gumbel_argmax(logits, *args, thresholds)
            assert found[1].tolist() == wanted, (module.__name__, temperature)
            assert ((found[0] >= 0) & (found[0] < vocab_size)).all()
            assert found[0, 6] == 0


FILTERS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 7, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.5, 0, 0.3, 0.0),
    (2.0, 50, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.8, 20, 0.95, 0.02),
    (0.0, 0, 1.0, 0.0),
    (1.0, 5, 0.999999, 1.0),
]


@pytest.mark.parametrize("vocab_size", [60, 1000, 9001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_keep_the_same_tokens(vocab_size, dtype):
    logits = some_logits(len(FILTERS), vocab_size, dtype)
    logits[:, 1] = -torch.inf
    temperature, top_k, top_p, min_p = (
        torch.tensor(column) for column in zip(*FILTERS, strict=True)
    )
    args = (logits, temperature, top_k.int(), top_p, min_p, vocab_size)
    expected = logits.float() >= reference.filter_thresholds.reference(*args)[:, None]
    found = logits.float() >= kernels.filter_thresholds(*args)[:, None]
    assert torch.equal(found, expected)


def test_thresholds_of_logits_many_powers_of_two_apart():
    logits = torch.tensor([[3.0e38, 1.0, 1e-30, 0.0, -1e-30, -1e10, -3.0e38, -torch.inf]])
    for top_k in range(1, 8):
        args = (logits, torch.ones(1), torch.tensor([top_k]), torch.ones(1), torch.zeros(1), top_k)
        assert (logits >= kernels.filter_thresholds(*args)[:, None]).sum() == top_k


def test_thresholds_share_the_mass_of_exactly_k_of_many_equals():
    logits = torch.full((3, 300), 1.0)
    logits[:, 10] = 2.0
    top_k, top_p = torch.tensor([5, 5, 5], dtype=torch.int32), torch.tensor([1.0, 0.3, 0.9])
    args = (logits, torch.ones(3), top_k, top_p, torch.zeros(3), 5)
    expected = (logits >= reference.filter_thresholds.reference(*args)[:, None]).sum(-1)
    assert expected.tolist() == [300, 1, 300]
    found = (logits >= kernels.filter_thresholds(*args)[:, None]).sum(-1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("vocab_size", [7, 5000])
def test_penalties(vocab_size):
    logits = some_logits(4, vocab_size)
    args = (
        torch.tensor([2, 0, 5, 1], dtype=torch.int32),
        torch.rand(6, vocab_size) < 0.2,
        torch.randint(-3, 4, (6, vocab_size), dtype=torch.int32).clamp(min=0),
        torch.tensor([1.5, 1.0, 0.5, 1.0]),
        torch.tensor([0.0, 1.25, -1.0, 0.0]),
        torch.tensor([0.3, 0.0, -0.1, 0.0]),
    )
    expected, found = logits.clone(), logits.clone()
    reference.apply_penalties.reference(expected, *args)
    kernels.apply_penalties(found, *args)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[3], logits[3])


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])  # from a nucleus of nearly all to one of a few
def test_thresholds_keep_what_a_whole_sort_would(spread):
    torch.manual_seed(0)
    logits = spread * torch.randn(6, 5000)
    top_k = torch.tensor([0, 0, 50, 3000, 0, 1500], dtype=torch.int32)
    top_p = torch.tensor([0.9, 0.5, 1.0, 0.8, 1.0, 1.0])
    temperature, min_p = torch.tensor([1.0, 0.7, 1.0, 2.0, 1.0, 1.0]), torch.zeros(6)
    found = reference.filter_thresholds.reference(logits, temperature, top_k, top_p, min_p, 5000)
    for row in range(6):
        best = logits[row].double().sort(descending=True).values[: int(top_k[row]) or None]
        shares = torch.softmax(best / temperature[row], 0)
        num_kept = int((shares.cumsum(0) - shares < top_p[row].double()).sum())
        if not top_k[row] and top_p[row] == 1.0:
            num_kept = 5000
        assert abs(int((logits[row] >= found[row]).sum()) - num_kept) <= 1, row
