"""Every attention backend against the reference backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_cases import (
    AttentionCase,
    decodes,
    drafted,
    drafted_cases,
    make_attention,
    small_attention_cases,
    spoil_unseen,
)
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssAttention,
    GptOssConfig,
    eager_attention_forward,
)

from penstock.errors import ConfigError
from penstock.kernels.attention import native, triton_decode
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.attention.reference import attend, gather
from penstock.kernels.quantize import quantize_fp8
from penstock.kernels.tolerances import tolerance

pytest.importorskip("triton")

CASES = list(small_attention_cases())
HALF_CASES = [
    case
    for number, case in enumerate(CASES)
    if number in (1, 2)
    or case.fp8
    or case.int8
    or case.nvfp4
    or 0 < case.num_decodes < len(case.entries)
]


def _check(name: str, case: AttentionCase, dtype: torch.dtype, device: torch.device) -> None:
    """What no query sees is NaN: it may be another sequence's by now, before a window, behind the
    end, in unused blocks."""
    args = make_attention(case, dtype, device)
    expected = get_backend("reference").attend(*args.unpack())
    spoil_unseen(args)
    actual = get_backend(name).attend(*args.unpack())
    close = tolerance(dtype)
    torch.testing.assert_close(actual, expected, atol=close.atol, rtol=close.rtol)
    assert actual.is_contiguous()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_backend_gives_what_the_reference_gives(
    name: str, case: AttentionCase, device: torch.device
) -> None:
    if name == "sdpa" and device.type != "cpu":
        pytest.skip("sdpa is the CPU backend")
    _check(name, case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["reference", "without C"])
def test_what_no_query_sees_may_be_nan(
    name: str, case: AttentionCase, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the others `_check` shows it."""
    if name == "without C":
        if device.type != "cpu":
            pytest.skip("sdpa is the CPU backend")
        monkeypatch.setattr(native, "can_attend", lambda q, k: False)
        name = "sdpa"
    args = make_attention(case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    expected = get_backend(name).attend(*args.unpack())
    spoil_unseen(args)
    assert torch.equal(get_backend(name).attend(*args.unpack()), expected)


@pytest.mark.parametrize("load", triton_decode.Load)
@pytest.mark.parametrize("case", [c for c in CASES if c.num_decodes and c.window], ids=str)
def test_decodes_with_windows_in_programs_of_any_size(
    case: AttentionCase,
    load: triton_decode.Load,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_decode, "load_of", lambda *args: load)
    _check("triton", case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_backend_in_half_precision(
    name: str, case: AttentionCase, dtype: torch.dtype, device: torch.device
) -> None:
    if name == "sdpa" and device.type != "cpu":
        pytest.skip("sdpa is the CPU backend")
    if name == "triton" and dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices as integers")
    _check(name, case, dtype, device)


@pytest.mark.parametrize("name", ["reference", "sdpa", "triton"])
def test_an_nvfp4_cache_is_as_near_as_4_bits_allow(name: str, device: torch.device) -> None:
    """E2M1's widest gap is 2 of a group's scale, a sixth of its largest; E4M3 rounds that by a
    sixteenth at most. What each key is off moves its weight, what each value is off the result."""
    if name == "sdpa" and device.type != "cpu":
        pytest.skip("sdpa is the CPU backend")
    case = AttentionCase(((1, 170), (1, 20), (40, 90)), 2)
    plain, packed = (
        make_attention(c, torch.float32, device) for c in (case, replace(case, nvfp4=True))
    )
    for args in (plain, packed):
        args.q_THD.mul_(0.02)  # else the bound says nothing
    expected = get_backend("reference").attend(*plain.unpack())
    found = get_backend(name).attend(*packed.unpack())
    batch, group = plain.batch, case.num_heads // case.num_kv_heads
    for entry, row in enumerate(batch.rows_N.tolist()):
        here = slice(*batch.query_starts_N1[entry : entry + 2].tolist())
        k_LHD, v_LHD = (
            gather(cache, batch.block_table_RM[row], case.entries[entry][1]).repeat_interleave(
                group, dim=1
            )
            for cache in (plain.k_cache_BKSD, plain.v_cache_BKSD)
        )
        moved_QHL = torch.einsum("qhd,lhd->qhl", plain.q_THD[here].abs(), _most_off(k_LHD))
        moved_QH1 = moved_QHL.amax(-1, keepdim=True) * plain.params.scale
        sizes_QHD, off_QHD = (
            attend(plain.q_THD[here], k_LHD, x_LHD, plain.params.scale, None)
            for x_LHD in (v_LHD.abs(), _most_off(v_LHD))
        )
        bound_QHD = torch.exp(2 * moved_QH1) * off_QHD + torch.expm1(2 * moved_QH1) * sizes_QHD
        errors_QHD = (found[here] - expected[here]).abs()
        assert (errors_QHD <= bound_QHD + 1e-5).all()
        assert errors_QHD.mean() > 0.002  # it is rounded
        assert bound_QHD.mean() < 0.6  # of values that are one in the mean


def _most_off(x: torch.Tensor) -> torch.Tensor:
    largest = x.unflatten(-1, (-1, 16)).abs().amax(-1)
    return (largest / 6 * 17 / 16).repeat_interleave(16, dim=-1)


@pytest.mark.parametrize("load", triton_decode.Load)
@pytest.mark.parametrize(
    "case",
    [
        *(c for c in CASES if c.num_decodes == len(c.entries) <= 6 and c.window != 16),
        *(c for c in drafted_cases() if c.window != 16),
    ],
    ids=str,
)
def test_decodes_with_keys_split_and_in_programs_of_any_size(
    case: AttentionCase,
    load: triton_decode.Load,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_decode, "load_of", lambda num_programs, longest: load)
    _check("triton", case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)


@pytest.mark.parametrize("load", triton_decode.Load)
@pytest.mark.parametrize("name", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize(
    "case",
    [
        decodes(1, 40, 300, num_heads=4, num_kv_heads=2),
        decodes(1, 40, 300, num_heads=4, num_kv_heads=2, sinks=True, fp8=True),
        AttentionCase(((1, 33), (1, 100), (20, 20)), 2, num_heads=4, num_kv_heads=2),
    ],
    ids=str,
)
def test_a_result_of_8_bit_floats_is_the_usual_one_rounded(
    name: str,
    case: AttentionCase,
    load: triton_decode.Load,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "sdpa" and device.type != "cpu":
        pytest.skip("sdpa is the CPU backend")
    monkeypatch.setattr(triton_decode, "load_of", lambda num_programs, longest: load)
    args = make_attention(case, torch.float16, device)
    scale_1 = torch.full((1,), 1e-3, device=device)  # the largest values are beyond 448 times it
    usual = get_backend(name).attend(*args.unpack())
    found = get_backend(name).attend(*args.unpack(), scale_1)
    assert found.dtype == torch.float8_e4m3fn and found.is_contiguous()
    assert usual.abs().max() > 0.448
    # Triton's interpreter rounds to 8-bit floats in its own way.
    in_kernel = case.num_decodes if name == "triton" else 0
    ways = (quantize_fp8.implementations()["triton"].run, quantize_fp8)
    parts = zip(ways, usual.flatten(1).tensor_split([in_kernel]), strict=True)
    expected = torch.cat([way(part, scale_1, 0)[0].float() for way, part in parts if len(part)])
    assert torch.equal(found.flatten(1).float(), expected)


def test_decodes_beside_prompts_take_the_kernel_that_those_in_graphs_do(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be compiled when the first prompt comes beside an answer."""
    from penstock.kernels.attention import triton

    given: list[torch.dtype] = []

    def decode(*args: Any, **kwargs: Any) -> None:
        given.append(args[6].dtype)
        triton_decode.decode(*args, **kwargs)

    monkeypatch.setattr(triton, "decode", decode)
    for scale_1 in (None, torch.ones(1, device=device)):
        for case in (decodes(33, 100), AttentionCase(((1, 33), (1, 100), (20, 20)), 2)):
            args = make_attention(case, torch.float16, device)
            get_backend("triton").attend(*args.unpack(), scale_1)
    assert given == [torch.float16] * 2 + [torch.float8_e4m3fn] * 2


@pytest.mark.parametrize("load", triton_decode.Load)
@pytest.mark.parametrize("window", [None, 50])
def test_tokens_of_a_sequence_share_its_keys(
    load: triton_decode.Load,
    window: int | None,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows of those behind the first of a tile are not even looked at."""
    monkeypatch.setattr(triton_decode, "load_of", lambda num_programs, longest: load)
    case = drafted((33, 4), (140, 3), num_heads=4, num_kv_heads=1, window=window)
    args = make_attention(case, torch.float32, device)
    expected = get_backend("reference").attend(*args.unpack())
    args.batch.rows_N[[1, 2, 3, 5, 6]] = int(args.batch.rows_N.max()) + 1
    actual = get_backend("triton").attend(*args.unpack())
    close = tolerance(torch.float32 if device.type == "cpu" else torch.bfloat16)
    torch.testing.assert_close(actual, expected, atol=close.atol, rtol=close.rtol)


def test_a_long_sequence_has_more_splits_than_are_added_up_at_once(device: torch.device) -> None:
    case = decodes(70, 5000, num_heads=2, num_kv_heads=1)
    _check("triton", case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)


@pytest.mark.parametrize("load", triton_decode.Load)
@pytest.mark.parametrize("sinks", [False, True])
def test_among_many_sequences_a_long_one_is_split(
    load: triton_decode.Load, sinks: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is short beside it is not: its only program writes the result."""
    monkeypatch.setattr(triton_decode, "load_of", lambda num_programs, longest: load)
    monkeypatch.setattr(triton_decode, "_LONG", 128)
    triton_decode.decode_config.cache_clear()
    case = decodes(1, 128, 129, 700, 60, num_heads=2, num_kv_heads=1, sinks=sinks)
    try:
        _check("triton", case, torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    finally:
        triton_decode.decode_config.cache_clear()


@pytest.mark.parametrize(("num_queries", "kv_len"), [(7, 7), (3, 11), (1, 5)])
def test_reference_is_torch_attention_with_the_queries_last(num_queries: int, kv_len: int) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(num_queries, 6, 16),
        torch.randn(kv_len, 2, 16),
        torch.randn(kv_len, 2, 16),
    )
    mask = torch.ones(num_queries, kv_len, dtype=torch.bool).tril(kv_len - num_queries)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attend(q, k, v, 0.3, None), expected[0].transpose(0, 1))


@pytest.mark.parametrize("window", [None, 5])
def test_reference_takes_sinks_as_transformers_does(window: int | None) -> None:
    torch.manual_seed(0)
    module = GptOssAttention(
        GptOssConfig(hidden_size=8, num_attention_heads=8, num_key_value_heads=1, head_dim=64), 0
    )
    sinks = torch.randn(8) * 3
    module.sinks.data.copy_(sinks)
    q, k, v = torch.randn(6, 8, 64), torch.randn(11, 1, 64), torch.randn(11, 1, 64)
    seen = torch.ones(6, 11, dtype=torch.bool).tril(5)
    if window is not None:
        seen &= ~torch.ones(6, 11, dtype=torch.bool).tril(5 - window)
    mask = torch.zeros(1, 1, 6, 11).masked_fill(~seen, torch.finfo(torch.float32).min)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected, _ = eager_attention_forward(module, *heads_first, mask, 0.3)
    torch.testing.assert_close(attend(q, k, v, 0.3, window, sinks), expected[0])
    assert not torch.allclose(attend(q, k, v, 0.3, window), expected[0], atol=1e-2)


def test_decode_results_do_not_depend_on_the_neighbours(device: torch.device) -> None:
    """The same sequence alone and among others; 2 * 64 entries are far from a full device."""
    together = make_attention(AttentionCase(((1, 150), (1, 9), (1, 290)), 3), torch.float32, device)
    batch = together.batch
    alone_batch = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__}
        | {"rows_N": batch.rows_N[:1], "kv_lens_N": batch.kv_lens_N[:1]}
        | {"slots_T": batch.slots_T[:1], "query_starts_N1": batch.query_starts_N1[:2]}
        | {"num_decodes": 1, "input_ids_T": batch.input_ids_T[:1]}
    )
    alone = replace(together, q_THD=together.q_THD[:1], batch=alone_batch)
    backend = get_backend("triton")
    assert torch.equal(backend.attend(*together.unpack())[:1], backend.attend(*alone.unpack()))


def test_unknown_backend_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"flash9.*reference, sdpa, triton"):
        get_backend("flash9")
