"""The C functions: on other vector widths and numbers of threads, and where they cannot be had."""

import ctypes
import shutil
import threading

import pytest
import torch
from op_cases import CPU_OP_CASES, OP_CASES, decodes, make_attention, random_weight

from penstock.kernels import native
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.codes import FORMS, packed_linear
from penstock.kernels.native import compiler
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
        for module in ("gemm.codes", "norm.reference", "activation.reference", "rope.reference"):
            monkeypatch.setattr(f"penstock.kernels.{module}.library", lambda: loaded)
        for module in ("gather.reference", "sampling.reference", "attention.native", "op"):
            monkeypatch.setattr(f"penstock.kernels.{module}.library", lambda: loaded)

    return use


@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ()], ids=["8 lanes", "4 lanes"])
def test_every_op_is_right_on_narrower_vectors(flags, tmp_path, monkeypatch, use_library):
    if flags and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
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
    assert argmax(torch.full((1, size), -torch.inf)).item() == 0


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
    assert first.read_bytes() == b"library" and len(ran) == 2
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
