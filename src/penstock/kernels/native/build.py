"""C sources -> a shared library in the cache folder, compiled for this very machine.

Its name follows from the sources, the processor, the compiler and the OpenMP runtime, so a change
of any of them compiles anew. Several processes may do this at once: each works in a folder of its
own and the last rename wins.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from penstock import log
from penstock.hub.folder import cache_home

_log = log.get(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-ffp-contract=fast", "-fno-math-errno")
_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that compiles is taken
_TIMEOUT_S = 180


class BuildError(Exception):
    """Why there is no library."""


def build() -> Path:
    """The path of the library; compiles it where it is not there yet."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)}); install one")
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    openmp = openmp_runtime()
    parts = [source.read_text(encoding="utf-8") for source in sources]
    parts += [_run(compiler, "--version"), _processor(), str(openmp), repr(_FLAGS)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_home() / "native" / f"ops-{digest}.so"
    if target.is_file():
        return target
    _log.info("compiling native CPU ops, once for this machine")
    started = time.perf_counter()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        made = _compile(compiler, [s for s in sources if s.suffix == ".c"], openmp, unfinished)
        os.replace(made, target)
    _log.info("compiled native CPU ops in %.1f s", time.perf_counter() - started)
    return target


def openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded. With it the ops run on torch's own threads; a
    second runtime would bring threads that spin against torch's."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    paths = [Path(line.split(maxsplit=5)[-1]) for line in lines if "omp" in line]
    return next((p for p in paths if p.name.startswith(("libgomp", "libomp", "libiomp"))), None)


def _compile(compiler: str, sources: list[Path], openmp: Path | None, folder: str) -> Path:
    made = Path(folder) / "ops.so"
    objects = [f"{folder}/{source.stem}.o" for source in sources]
    parallel = ["-fopenmp"] if openmp else []
    failure = BuildError("not tried")
    for machine in _THIS_MACHINE:
        try:
            for source, to in zip(sources, objects, strict=True):
                _run(compiler, *_FLAGS, *machine, *parallel, "-c", str(source), "-o", to)
            # Linked by its path: the loader then finds torch's copy, which is in memory already.
            runtime = [str(openmp)] if openmp else []
            _run(compiler, "-shared", *objects, *runtime, "-lm", "-o", str(made))
            return made
        except BuildError as error:
            failure = error
    raise failure


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"'{command[0]}' did not run: {error}") from error
    if done.returncode:
        told = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"'{command[0]}' failed: {told[0]}")
    return done.stdout


def _processor() -> str:
    """What the compiler's `native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
