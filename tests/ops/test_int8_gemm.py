"""INT8 GEMMs are exact, whatever the launch config and however inputs are split."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from penstock.kernels.gemm import int8_tiled as triton_tiles
from penstock.kernels.gemm.int8 import int8_linear, scaled
from penstock.kernels.gemm.int8_epilogue import reduce_split_k
from penstock.kernels.gemm.int8_gemv import GemvConfig, gemv
from penstock.kernels.gemm.int8_tiled import CONFIGS, Int8GemmConfig, int8_gemm, int8_gemm_config

SMALL = Int8GemmConfig(64, 16, 64, num_warps=4, num_stages=2, programs=1)


def operands(
    num_tokens: int, out_features: int, in_features: int, device: torch.device, *,
    by_token: bool = True, by_output: bool = True, bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]:  # fmt: skip
    torch.manual_seed(num_tokens)
    x, weight = (
        torch.randint(-127, 128, (rows, in_features), dtype=torch.int8)
        for rows in (num_tokens, out_features)
    )
    scale = torch.rand(num_tokens, 1) if by_token else torch.rand(1)
    weight_scale = torch.rand(out_features if by_output else 1) / 1000
    bias_O = torch.randn(out_features) if bias else None
    placed = [None if a is None else a.to(device) for a in (x, scale, weight, weight_scale, bias_O)]
    return *placed, torch.float32  # type: ignore[return-value]


def exact(args: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, torch.dtype]) -> Tensor:
    x, scale, weight, *others = args
    sums = (x.cpu().int() @ weight.cpu().int().t()).to(x.device)
    return scaled(sums, scale, *others)


def check(actual: Tensor, expected: Tensor) -> None:
    if actual.is_cuda:  # a product and a sum may be one there, rounded once
        atol = 1e-7 * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=atol)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17, 40, 64, 65, 100, 129, 256, 300])
def test_sums_are_exact_for_any_number_of_tokens(num_tokens: int, device: torch.device) -> None:
    args = operands(num_tokens, 64, 512, device)
    check(int8_gemm(*args), exact(args))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", [(5, 200, 336), (37, 128, 512)], ids=str)
def test_each_launch_shape_gives_the_same(
    config: Int8GemmConfig, shape: tuple[int, int, int], device: torch.device
) -> None:
    args = operands(*shape, device, bias=True)
    check(int8_gemm(*args, config=config), exact(args))


@pytest.mark.parametrize("in_features", [1024, 1000, 336, 77])
def test_a_result_does_not_depend_on_the_split(in_features: int, device: torch.device) -> None:
    args = operands(19, 72, in_features, device, bias=True)
    whole = int8_gemm(*args, config=SMALL, splits=1)
    check(whole, exact(args))
    for splits in (2, 3, 5, 16):
        check(int8_gemm(*args, config=SMALL, splits=splits), whole)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("by_output", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_scales_of_all_and_of_rows_and_a_bias(
    by_token: bool, by_output: bool, bias: bool, device: torch.device
) -> None:
    for num_tokens in (1, 7):
        args = operands(
            num_tokens, 34, 256, device, by_token=by_token, by_output=by_output, bias=bias
        )
        expected = exact(args)
        check(int8_gemm(*args, config=SMALL, splits=1), expected)
        check(int8_gemm(*args, config=SMALL, splits=2), expected)
        check(gemv(*args), expected)


@pytest.mark.parametrize("in_group", [1, 2, 5, 128])
def test_programs_of_many_blocks_of_tokens_are_grouped_without_gaps(
    in_group: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_tiles, "_GROUP_TOKENS", in_group * SMALL.tokens)
    args = operands(110, 130, 128, device)  # seven blocks
    check(int8_gemm(*args, config=SMALL), exact(args))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("config", [None, GemvConfig(2, 32, 4), GemvConfig(4, 64, 4)], ids=str)
def test_without_tensor_cores_sums_are_exact(
    config: GemvConfig | None, num_tokens: int, device: torch.device
) -> None:
    args = operands(num_tokens, 37, 272, device, bias=True)
    check(gemv(*args, config=config), exact(args))


def test_rows_of_a_wider_tensor_are_multiplied(device: torch.device) -> None:
    x, *others = operands(9, 72, 128, device)
    wide = torch.cat([x, x], dim=1)[:, :128]
    assert not wide.is_contiguous()
    args = (wide, *others)
    check(int8_gemm(*args), exact(args))
    check(gemv(*args, config=GemvConfig(1, 32, 4)), exact(args))


def test_the_largest_sums_fit(device: torch.device) -> None:
    x = torch.full((3, 28672), -127, dtype=torch.int8, device=device)
    weight = torch.full((8, 28672), 127, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    for product in (int8_gemm, gemv):
        y = product(x, one, weight, one, None, torch.float32)
        assert (y == -127 * 127 * 28672).all()


def test_no_tokens_give_no_rows(device: torch.device) -> None:
    args = operands(0, 64, 64, device)
    assert int8_gemm(*args).shape == (0, 64)


def test_parts_are_added_as_whole_numbers(device: torch.device) -> None:
    """In fp32 the sum of these would be zero or two."""
    parts = torch.tensor([[[2**24]], [[1]], [[-(2**24)]]], dtype=torch.int32, device=device)
    one = torch.ones(1, device=device)
    assert reduce_split_k(parts, one, one, None, torch.float32).item() == 1.0


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 64, 64), "gemv"),
        ((1, 64, 72), "triton"),
        ((16, 64, 64), "triton"),
        ((512, 64, 64), "triton"),
        ((512, 64, 72), "int_mm"),
        ((512, 64, 70), "triton"),
        ((4096, 64, 64), "triton"),
        ((4096, 65, 72), "triton"),
    ],
)
def test_a_gemm_fits_where_it_is_quick(shape: tuple[int, int, int], name: str) -> None:
    args = operands(*shape, torch.device("cpu"))
    found = (
        impl.name
        for impl in int8_linear.implementations().values()
        if impl.needs.kind == "cuda" and (impl.fits is None or impl.fits(*args))
    )
    assert next(found) == name


def test_rows_at_any_byte_have_a_small_launch_shape() -> None:
    assert int8_gemm_config(16, 1000) not in CONFIGS
    assert [int8_gemm_config(n, 1024).tokens for n in (1, 17, 64, 65, 129)] == [
        16, 32, 64, 128, 128,
    ]  # fmt: skip
