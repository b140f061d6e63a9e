"""`@op`: one meaning (the decorated reference function) and any number of faster implementations.

An implementation says what device it `needs` and which shapes it `fits`. The pick is made once per
signature and can be explained. Does not know any op by name.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch

from penstock.kernels.device import probe
from penstock.kernels.native import library

P = ParamSpec("P")
R = TypeVar("R")

_MAX_PICKS = 16384  # signatures remembered per op; the number of tokens is part of one


@dataclass(frozen=True, slots=True)
class Needs:
    """The device an implementation runs on."""

    kind: str  # "cuda" or "cpu"
    min_arch: int = 0
    max_arch: int = 0  # 0: any
    native: bool = False

    def missing(self) -> str | None:
        """What this machine lacks, for good; None when it has everything."""
        if self.min_arch and (found := probe().arch) < self.min_arch:
            return f"needs sm_{self.min_arch}, this is sm_{found}"
        if self.max_arch and (found := probe().arch) > self.max_arch:
            return f"is for sm_{self.max_arch} at most, this is sm_{found}"
        if self.native and library() is None:
            return "needs the native library"
        return None


def arch(minimum: int) -> Needs:
    """A CUDA device of at least this compute capability: 80 is sm_80."""
    return Needs("cuda", minimum)


def hopper() -> Needs:
    """A CUDA device of that generation and no other."""
    return Needs("cuda", 90, 99)


def cpu() -> Needs:
    return Needs("cpu")


def native() -> Needs:
    """A CPU, and the library of C functions: `kernels/native`."""
    return Needs("cpu", native=True)


@dataclass(frozen=True, slots=True)
class Impl(Generic[P, R]):
    name: str
    run: Callable[P, R]
    needs: Needs
    fits: Callable[P, bool] | None  # None: every shape

    def refusal(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """Why this implementation cannot take the call; None when it can."""
        if (missing := self.needs.missing()) is not None:
            return missing
        if self.fits is not None and not self.fits(*args, **kwargs):
            return "does not fit these shapes"
        return None


def _kind_of(argument: Any) -> Any:
    """What of an argument an implementation may be chosen by; never holds a tensor."""
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.dtype
    return getattr(argument, "signature", argument)


class Op(Generic[P, R]):
    """Callable like its reference. The first registered implementation that can takes the call.

    `gpu_module` holds the GPU implementations. It is imported when the first CUDA tensor arrives,
    so a CPU process never loads Triton.
    """

    __name__: str

    def __init__(self, reference: Callable[P, R], gpu_module: str | None = None) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._gpu_module = gpu_module
        self._impls: dict[str, Impl[P, R]] = {}
        self._picks: dict[tuple[Any, ...], Callable[P, R]] = {}
        # Of those that can run here; None: not known.
        self._first_on_cpu: Impl[P, R] | None = None
        self._first_on_gpu: Impl[P, R] | None = None

    def impl(
        self, name: str, *, needs: Needs, fits: Callable[P, bool] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register one; `fits` may look at shapes, dtypes and plain arguments only."""

        def register(run: Callable[P, R]) -> Callable[P, R]:
            assert name not in self._impls and name != "reference", (self.__name__, name)
            self._impls[name] = Impl(name, run, needs, fits)
            self._picks.clear()
            self._first_on_cpu = self._first_on_gpu = None
            return run

        return register

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs:
            return self(*self._positional(*args, **kwargs))  # type: ignore[call-arg]
        on_gpu: bool = args[0].is_cuda  # type: ignore[attr-defined]
        # Asking the first one costs less than a key, which is 1 us for each tensor.
        first = self._first_on_gpu if on_gpu else self._first_on_cpu
        first = first or self._find_first(on_gpu)
        if first.fits is None or first.fits(*args):  # type: ignore[call-arg]
            return first.run(*args)  # type: ignore[call-arg]
        key = tuple([_kind_of(a) for a in args])
        run = self._picks.get((on_gpu, key))
        if run is None:
            run = self._pick("cuda" if on_gpu else "cpu", *args)[0].run  # type: ignore[call-arg]
            if len(self._picks) >= _MAX_PICKS:
                self._picks.clear()
            self._picks[on_gpu, key] = run
        return run(*args)  # type: ignore[call-arg]

    def implementations(self) -> dict[str, Impl[P, R]]:
        """Every registered implementation by name, the GPU ones loaded; without the reference."""
        if self._gpu_module is not None:
            importlib.import_module(self._gpu_module)
        return self._impls

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Which implementation these arguments get, and why not the ones before it."""
        kind = self._positional(*args, **kwargs)[0].device.type
        chosen, refusals = self._pick(kind, *args, **kwargs)
        return "; ".join([f"{self.__name__}: {chosen.name}", *refusals])

    def _pick(self, kind: str, *args: P.args, **kwargs: P.kwargs) -> tuple[Impl[P, R], list[str]]:
        impls = self.implementations() if kind == "cuda" else self._impls
        refusals: list[str] = []
        for candidate in impls.values():
            if candidate.needs.kind != kind:
                continue
            if (why := candidate.refusal(*args, **kwargs)) is None:
                return candidate, refusals
            refusals.append(f"{candidate.name} {why}")
        return Impl("reference", self.reference, Needs(kind), None), refusals

    def _find_first(self, on_gpu: bool) -> Impl[P, R]:
        """The one that `_pick` would ask first."""
        kind = "cuda" if on_gpu else "cpu"
        impls = self.implementations() if on_gpu else self._impls
        able = (i for i in impls.values() if i.needs.kind == kind and not i.needs.missing())
        first = next(able, Impl("reference", self.reference, Needs(kind), None))
        if on_gpu:
            self._first_on_gpu = first
        else:
            self._first_on_cpu = first
        return first

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.reference)

    def _positional(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args


@overload
def op(reference: Callable[P, R], /) -> Op[P, R]: ...
@overload
def op(*, gpu_module: str) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(reference: Any = None, /, *, gpu_module: str | None = None) -> Any:
    """Turn a reference into an `Op`; its first argument is a tensor and decides the device."""
    if reference is None:
        return functools.partial(Op, gpu_module=gpu_module)
    return Op(reference)
