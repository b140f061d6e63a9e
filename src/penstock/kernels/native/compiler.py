"""C sources -> a shared library in the cache folder, compiled for this very machine.

Its name follows from the sources, the processor and the compiler, so a change of any of them
compiles anew. Several processes may do this at once: each works in a folder of its
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
from penstock.kernels.native.functions import calls_source

_log = log.get(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that compiles is taken
_TIMEOUT_S = 180


class BuildError(Exception):
    """Why there is no library."""


def compiled() -> Path:
    """The path of the library; compiles it where it is not there yet."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)}); install one")
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    parts = [calls_source(), *(source.read_text(encoding="utf-8") for source in sources)]
    parts += [_run(compiler, "--version"), _processor(), repr((_FLAGS, _THIS_MACHINE))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_home() / "native" / f"ops-{digest}.so"
    if target.is_file():
        return target
    _log.info("compiling native CPU ops, once for this machine")
    started = time.perf_counter()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        calls = Path(unfinished) / "calls.c"
        calls.write_text(calls_source(), encoding="utf-8")
        made = _compile(compiler, [calls, *(s for s in sources if s.suffix == ".c")], unfinished)
        os.replace(made, target)
    _log.info("compiled native CPU ops in %.1f s", time.perf_counter() - started)
    return target


def _compile(compiler: str, sources: list[Path], folder: str) -> Path:
    made = Path(folder) / "ops.so"
    failure = BuildError("not tried")
    for machine in _THIS_MACHINE:
        try:
            _run(compiler, *_FLAGS, *machine, "-shared", *map(str, sources), "-o", str(made), "-lm")
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
