"""The C functions: on other vector widths and numbers of threads, and where they cannot be had."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from op_cases import CPU_OP_CASES, OP_CASES, decodes, make_attention, random_weight

from penstock.kernels import native
from penstock.kernels.activation import silu_mul
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.quantized_cpu import FORMS, packed_linear, unpack_cpu
from penstock.kernels.native import compiler, prebuilt
from penstock.kernels.native import cpu_graph as tape
from penstock.kernels.norm import rms_norm
from penstock.kernels.sampling import argmax
from penstock.kernels.tolerances import tolerance

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
CASES = [case for case in OP_CASES + CPU_OP_CASES if "native" in case.op.implementations()]


@pytest.fixture
def threads():
    """Sets the number of threads; as before afterwards."""
    yield native.set_num_threads
    native.set_num_threads(torch.get_num_threads())


@pytest.fixture
def use_library(monkeypatch):
    """Puts another library, or none, in the place of the one that is loaded."""

    def use(loaded: ctypes.CDLL | None) -> None:
        ops = ("norm", "activation", "rope", "gather", "sampling")
        modules = ("gemm.quantized_cpu", "attention.native", "op")
        for module in (*(f"{op}.reference" for op in ops), *modules):
            monkeypatch.setattr(f"penstock.kernels.{module}.library", lambda: loaded)

    return use


NARROWEST = prebuilt.Variant("4 lanes", (), ())
VARIANTS = (*prebuilt.VARIANTS.get(platform.machine(), ()), NARROWEST)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_every_op_is_right_in_every_variant(variant, tmp_path, monkeypatch, use_library):
    if missing := set(variant.cpu_flags) - prebuilt.cpu_flags():
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    flags = variant.compiler_flags
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_THIS_MACHINE", (flags,))
    use_library(native.load(compiler.compiled()))
    torch.manual_seed(0)
    close = tolerance(torch.float32)
    for case in CASES:
        args = case.make(torch.float32, torch.device("cpu"))
        impl = case.op.implementations()["native"]
        if impl.fits is not None and not impl.fits(*args):
            continue
        copies = tuple(a.clone() if i in case.mutated else a for i, a in enumerate(args))
        expected, found = case.op.reference(*args), impl.run(*copies)
        expected = expected if isinstance(expected, tuple) else (expected,)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [*zip(expected, found, strict=True)]
        pairs += [(args[i], copies[i]) for i in case.mutated]
        for want, got in pairs:
            torch.testing.assert_close(got, want, atol=close.atol, rtol=close.rtol, msg=str(case))
    attention = make_attention(decodes(90, 7, 33, window=40), torch.float32, torch.device("cpu"))
    torch.testing.assert_close(
        get_backend("sdpa").attend(*attention.unpack()),
        get_backend("reference").attend(*attention.unpack()),
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_coarse_gemms_keep_16_bits_of_their_inputs(form):
    torch.manual_seed(1)
    weight = random_weight(form, 100, 320)
    x_TI = torch.randn(11, 320) * 10.0 ** torch.randint(-6, 6, (11, 1))
    fine = packed_linear(x_TI, weight)
    native.set_coarse(True)
    try:
        coarse = packed_linear(x_TI, weight)
        alone = torch.cat([packed_linear(x, weight) for x in x_TI.split(1)])
    finally:
        native.set_coarse(False)
    assert torch.equal(coarse, alone)
    errors = (coarse - fine).norm(dim=1) / fine.norm(dim=1)
    assert errors.max() < 2e-4  # bfloat16 inputs: about 2e-3
    assert torch.equal(packed_linear(x_TI, weight), fine)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 8, 40])
def test_the_number_of_threads_does_not_change_a_bit(num_threads, num_rows, threads):
    torch.manual_seed(num_rows)
    x_TI, weight = torch.randn(num_rows, 320), random_weight(FORMS[0], 1000, 320)
    logits_LV = torch.randn(num_rows, 5000)
    threads(1)
    product, tokens = packed_linear(x_TI, weight), argmax(logits_LV)
    threads(num_threads)
    for _ in range(200):
        assert torch.equal(packed_linear(x_TI, weight), product)
        assert torch.equal(argmax(logits_LV), tokens)


def test_loops_of_different_sizes_follow_each_other_at_once(threads):
    threads(6)  # more than most machines have cores: some are always late
    weight, x_TI = random_weight(FORMS[0], 320, 64), torch.randn(24, 64)
    weight_D, logits_LV = torch.randn(64), torch.randn(24, 3000)

    def both(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        product = packed_linear(rms_norm(x_TI[:num_rows], weight_D, 1e-5), weight)
        return product, argmax(logits_LV[:num_rows])

    expected = {num_rows: both(num_rows) for num_rows in (1, 2, 5, 8, 24)}
    for _ in range(2000):
        for num_rows, (product, tokens) in expected.items():
            found, found_tokens = both(num_rows)
            assert torch.equal(found, product) and torch.equal(found_tokens, tokens)


def test_callers_on_several_threads_do_not_disturb_each_other(threads):
    threads(3)
    weight = random_weight(FORMS[2], 700, 256)
    inputs = [torch.randn(rows, 256) for rows in (1, 3, 30)]
    expected = [packed_linear.reference(x, weight) for x in inputs]
    wrong: list[int] = []

    def call(which: int) -> None:
        for _ in range(300):
            found = packed_linear(inputs[which], weight)
            if not torch.allclose(found, expected[which], atol=1e-3, rtol=1e-4):
                wrong.append(which)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("size", [1, 7, 16, 100, 49152])
def test_argmax_is_the_lowest_of_equals(size):
    logits_LV = torch.randint(0, 50, (4, size)).float()
    assert torch.equal(argmax(logits_LV), argmax.reference(logits_LV))
    assert argmax(torch.full((1, size), -torch.inf)).tolist() == [[0], [0]]


@pytest.mark.parametrize("size", [1, 7, 16, 100, 49152])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_argmax_says_which_rows_have_no_largest_finite_value(size, value):
    for at in {0, size // 2, size - 1}:
        logits_LV = torch.randn(3, size)
        logits_LV[1, at] = value
        ids, is_finite = argmax(logits_LV)
        assert torch.equal(is_finite, argmax.reference(logits_LV)[1])
        has_finite = value == -torch.inf and size > 1
        assert is_finite.tolist() == [1, int(has_finite), 1]
        assert ((ids >= 0) & (ids < size)).all()


def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    (tmp_path / "native").mkdir()
    ran = []
    monkeypatch.setattr(compiler, "_run", lambda *command: ran.append(command) or "cc 1")

    def fake_compile(cc, sources, folder):
        ran.append(sources)
        made = tmp_path / "made"
        made.write_bytes(b"library")
        return made

    monkeypatch.setattr(compiler, "_compile", fake_compile)
    first = compiler.compiled()
    assert first.read_bytes() == b"library" + hashlib.sha256(b"library").digest()
    assert len(ran) == 2
    assert compiler.compiled() == first and len(ran) == 3  # it asked for the version alone
    monkeypatch.setattr(compiler, "_processor", lambda: "another processor")
    assert compiler.compiled() != first
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so", ".so"]


def test_without_a_compiler_the_ops_run_as_torch_does_them(monkeypatch, caplog, use_library):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    assert "no C compiler (cc, gcc, clang)" in caplog.text
    use_library(None)
    monkeypatch.setattr(rms_norm, "_first_on_cpu", None)
    x_TD, weight_D = torch.randn(3, 64), torch.randn(64)
    said = rms_norm.explain(x_TD, weight_D, 1e-5)
    assert said == "rms_norm: torch; native needs the native library"
    expected = rms_norm.reference(x_TD, weight_D, 1e-5)
    torch.testing.assert_close(rms_norm(x_TD, weight_D, 1e-5), expected)
    monkeypatch.setattr(rms_norm, "_first_on_cpu", None)


def test_a_compiler_that_fails_is_no_error_of_the_start(tmp_path, monkeypatch, caplog):
    cc = tmp_path / "cc"
    cc.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho no such flag >&2; exit 1\n")
    cc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    assert "failed: no such flag" in caplog.text
    assert not list((tmp_path / "home" / "native").iterdir())


def test_a_cpu_graph_runs_again_with_what_its_inputs_hold_then():
    loaded, arena = native.library(), tape.Arena(1 << 20)
    x_TD, weight_D = torch.randn(3, 64), torch.randn(64)
    weight = random_weight(FORMS[0], 128, 64)

    def step() -> torch.Tensor:
        inner_TD = silu_mul(packed_linear(rms_norm(x_TD, weight_D, 1e-5), weight))
        return rms_norm(inner_TD, weight_D, 1e-5)

    recorded, out_TD = tape.record(loaded, arena, step)
    for _ in range(3):
        x_TD.normal_()
        recorded.run()
        assert torch.equal(out_TD, step())
    _, other_TD = tape.record(loaded, arena, lambda: rms_norm(x_TD[:1], weight_D, 1e-5))
    assert abs(other_TD.data_ptr() - out_TD.data_ptr()) < 4096  # what is free again is taken


def test_an_op_of_torch_cannot_be_recorded():
    arena = tape.Arena(1 << 16)
    x_TD, weight_D = torch.randn(3, 64), torch.randn(64)
    with pytest.raises(tape.NotRecordable, match=r"aten\.add"):
        tape.record(native.library(), arena, lambda: rms_norm(x_TD, weight_D, 1e-5) + 1)
    with pytest.raises(tape.NotRecordable, match="no room"):
        tape.record(native.library(), arena, lambda: rms_norm(torch.empty(512, 64), weight_D, 1e-5))
    expected = rms_norm.reference(x_TD, weight_D, 1e-5)
    torch.testing.assert_close(rms_norm(x_TD, weight_D, 1e-5), expected)  # as before


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 20])
def test_a_packed_gemm_is_as_exact_as_sums_in_fp32(form, num_rows):
    torch.manual_seed(num_rows)
    x_TI, weight = torch.randn(num_rows, 576), random_weight(form, 200, 576)
    x_TI *= torch.exp(torch.randn(576))  # some inputs are much larger than others
    exact = x_TI.double() @ unpack_cpu(weight).double().T
    found = packed_linear(x_TI, weight)
    size = x_TI.double().abs() @ unpack_cpu(weight).double().abs().T
    assert ((found - exact).abs() / size).max() < 2**-21


def test_a_packed_gemm_with_an_input_that_is_no_number_is_none():
    weight = random_weight(FORMS[0], 64, 64)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x_TI = torch.randn(3, 64)
        x_TI[1, 5] = wrong
        assert packed_linear(x_TI, weight).isfinite().all(1).tolist() == [True, False, True]
    assert packed_linear(torch.full((1, 64), 1e-40), weight).abs().max() < 1e-38


SPOILS = {
    "empty": lambda path: os.truncate(path, 0),
    "cut short": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "the digest missing": lambda path: os.truncate(path, path.stat().st_size - 32),
    "a byte changed": lambda path: _write_at(path, 5000, b"\xff\x00\xff"),
    "no library": lambda path: path.write_text("hello"),
}


def _write_at(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize("kind", SPOILS)
def test_a_broken_library_is_told_and_replaced(tmp_path, monkeypatch, caplog, kind):
    """The compiler is a copy of what it made before."""
    good = compiler.compiled()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    (tmp_path / "native").mkdir()
    path = tmp_path / "native" / good.name
    shutil.copy(good, path)
    assert compiler.compiled() == path and not caplog.records
    SPOILS[kind](path)

    def compile_again(program, sources, folder):
        made = Path(folder) / "ops.so"
        made.write_bytes(good.read_bytes()[: -hashlib.sha256().digest_size])
        return made

    monkeypatch.setattr(compiler, "_compile", compile_again)
    for has_warning in (True, False):
        caplog.clear()
        assert compiler.compiled().read_bytes() == good.read_bytes()
        assert ("is broken" in caplog.text) == has_warning
    assert [*(tmp_path / "native").iterdir()] == [path]


def test_a_broken_library_is_compiled_again(tmp_path):
    """In another process each time: what is loaded stays so, and a broken one may kill."""
    env = os.environ | {"PENSTOCK_HOME": str(tmp_path)}
    code = (
        "import torch; from penstock.kernels import native; "
        "from penstock.kernels.sampling import argmax; assert native.library() is not None; "
        "assert argmax(torch.eye(3))[0].tolist() == [0, 1, 2]"
    )
    shutil.copytree(compiler.compiled().parent, tmp_path / "native")
    [path] = (tmp_path / "native").glob(f"{compiler.compiled().name}")
    SPOILS["a byte changed"](path)
    for has_warning in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ("is broken" in done.stderr) == has_warning
    assert not list((tmp_path / "native").glob("tmp*"))


def test_a_library_that_cannot_be_loaded_is_compiled_once_more_and_then_done_without(
    tmp_path, monkeypatch, caplog
):
    asked = []
    monkeypatch.setattr(native, "compiled", lambda anew=False: asked.append(anew) or tmp_path)
    assert native.library.__wrapped__() is None
    assert asked == [False, True]
