"""Kernels on a real device: what the interpreter cannot show (bfloat16 tiles, sizes, graphs)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
from op_cases import AttentionCase, decodes, gpu_attention_cases, make_attention

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.attention.triton_decode import Load, load_of
from penstock.kernels.norm import rms_norm
from penstock.kernels.tolerances import tolerance

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("case", list(gpu_attention_cases()), ids=str)
def test_triton_attention_gives_what_the_reference_gives(case: AttentionCase) -> None:
    args = make_attention(case, torch.bfloat16, DEVICE)
    expected = get_backend("reference").attend(*args.unpack())
    close = tolerance(torch.bfloat16)
    actual = get_backend("triton").attend(*args.unpack())
    torch.testing.assert_close(actual, expected, atol=close.atol, rtol=close.rtol)


def test_captured_decode_follows_sequences_as_they_grow() -> None:
    args = make_attention(decodes(600, 90, 1500, num_heads=8), torch.bfloat16, DEVICE)
    backend, kv_lens_N = get_backend("triton"), args.batch.kv_lens_N
    full_lens_N = kv_lens_N.clone()
    kv_lens_N.fill_(3)
    backend.attend(*args.unpack())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(*args.unpack())
    for lens_N in (full_lens_N, full_lens_N // 2, torch.ones_like(full_lens_N)):
        kv_lens_N.copy_(lens_N)
        graph.replay()
        expected = get_backend("reference").attend(*args.unpack())
        close = tolerance(torch.bfloat16)
        torch.testing.assert_close(out, expected, atol=close.atol, rtol=close.rtol)


def test_decode_of_a_sequence_is_the_same_in_any_batch_that_leaves_the_device_unfilled() -> None:
    results = []
    for neighbours in (0, 1, 20):
        kv_lens = [1111, *range(40, 40 + 50 * neighbours, 50)]
        args = make_attention(decodes(*kv_lens, num_heads=8), torch.bfloat16, DEVICE)
        longest = args.batch.block_table_RM.shape[1] * args.k_cache_BKSD.shape[2]
        num_programs = len(kv_lens) * args.k_cache_BKSD.shape[1]
        assert load_of(num_programs, longest) is Load.PARTIAL_WAVE
        torch.manual_seed(7)
        row = args.batch.block_table_RM[args.batch.rows_N[0], : -(-1111 // 16)]
        for cache in (args.k_cache_BKSD, args.v_cache_BKSD):
            shape = (len(row), *cache.shape[1:])
            cache[row.long()] = torch.randn(shape, device=DEVICE).bfloat16()
        args.q_THD[0] = torch.randn(args.q_THD.shape[1:], device=DEVICE).bfloat16()
        results.append(get_backend("triton").attend(*args.unpack())[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_cuda_tensor_gets_the_triton_implementation() -> None:
    x, w = torch.ones(2, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert rms_norm.explain(x, w, 1e-5) == "rms_norm: triton"
