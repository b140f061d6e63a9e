"""Which prompts the attention kernel for Hopper is given. What it computes: tests/gpu/ops_check."""

import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_stand_in import StandIn, failing
from op_cases import make_attention, prefills

from penstock.kernels.attention.backend import get_backend
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton.experimental.gluon")
from penstock.kernels.attention import hopper_prefill, triton_prefill

CASE = prefills((20, 37), (9, 9))


def _cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_takes_16_bits_and_heads_of_128(dtype: torch.dtype, block_size: int) -> None:
    q = torch.zeros(3, 8, 128, dtype=dtype)
    assert hopper_prefill.fits(q, _cache(4, 2, block_size, 128, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "block_size", "head_size"),
    [
        (torch.float32, torch.float32, 32, 128),
        (torch.bfloat16, torch.float16, 32, 128),
        (torch.bfloat16, torch.float8_e4m3fn, 32, 128),
        (torch.bfloat16, torch.bfloat16, 32, 64),
        (torch.bfloat16, torch.bfloat16, 32, 256),
        (torch.bfloat16, torch.bfloat16, 8, 128),
        (torch.bfloat16, torch.bfloat16, 48, 128),
        (torch.bfloat16, torch.bfloat16, 256, 128),
    ],
)
def test_leaves_the_rest_to_the_kernel_of_all_gpus(
    dtype: torch.dtype, cache_dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    q = torch.zeros(3, 8, head_size, dtype=dtype)
    assert not hopper_prefill.fits(q, _cache(4, 2, block_size, head_size, dtype=cache_dtype))


def test_a_descriptor_covers_its_plane_of_a_pool_and_is_made_once() -> None:
    pool = _cache(5, 2, 3, 32, 128)
    k, v = pool[:, 0], pool[:, 1]
    for plane in (k, v):
        found = hopper_prefill.describe(plane)
        assert found is hopper_prefill.describe(plane)
        assert found.base.data_ptr() == plane.data_ptr()
        assert found.block_shape == [32, 64]
        last = torch.as_strided(plane, found.shape, found.strides)[-1]
        assert last.data_ptr() == plane[-1, -1, -1].data_ptr()
    assert hopper_prefill.describe(k) is not hopper_prefill.describe(v)


def test_a_descriptor_keeps_no_memory() -> None:
    cache = _cache(2, 2, 32, 128)
    storage = weakref.ref(cache.untyped_storage())
    hopper_prefill.describe(cache)
    del cache
    gc.collect()
    assert storage() is None


def test_after_one_failure_the_other_kernel_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    calls: list[Any] = []
    broken = StandIn(fits=lambda q, k: True, prefill=failing(calls))
    monkeypatch.setattr(triton_prefill, "_HOPPER", broken)
    args = make_attention(CASE, torch.float32, device)
    with caplog.at_level(logging.WARNING):
        found = [get_backend("triton").attend(*args.unpack()) for _ in range(2)]
    assert len(calls) == len(caplog.records) == 1
    assert "PassManager::run failed" in caplog.records[0].getMessage()
    close = tolerance(torch.float32)
    expected = get_backend("reference").attend(*args.unpack())
    for out in found:
        torch.testing.assert_close(out, expected, atol=close.atol, rtol=close.rtol)


def test_it_is_given_what_the_other_kernel_would_be(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    given: list[tuple[Any, ...]] = []
    fake = StandIn(fits=lambda q, k: True, prefill=lambda *args: given.append(args))
    monkeypatch.setattr(triton_prefill, "_HOPPER", fake)
    args = make_attention(replace(CASE, sinks=True), torch.float32, device)
    out = get_backend("triton").attend(*args.unpack())
    batch = args.batch
    ((*tensors, params, first_entry, sinks),) = given
    asked = [args.q_THD, args.k_cache_BKSD, args.v_cache_BKSD, batch.rows_N]
    asked += [batch.query_starts_N1, batch.kv_lens_N, batch.block_table_RM, out]
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in asked]
    assert (params, first_entry) == (args.params, 0)
    assert sinks is args.sinks_H


def test_a_given_configuration_is_one_of_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    fake = StandIn(fits=lambda q, k: pytest.fail("asked"))
    monkeypatch.setattr(triton_prefill, "_HOPPER", fake)
    args = make_attention(CASE, torch.float32, device)
    batch, out = args.batch, torch.full_like(args.q_THD, torch.nan)
    triton_prefill.prefill(
        args.q_THD, args.k_cache_BKSD, args.v_cache_BKSD, batch.rows_N, batch.query_starts_N1,
        batch.kv_lens_N, batch.block_table_RM, out, args.params, 0,
        triton_prefill.PrefillConfig(rows=32, tile=16, num_warps=4, num_stages=2),
    )  # fmt: skip
    assert out.isfinite().all()
