"""C sources -> a shared library in the cache folder, compiled for this very machine.

A library that came with the package (`prebuilt.py`) needs no compiler and goes first. The name of
a compiled one follows from the sources, the processor and the compiler, so a change of any of them
compiles anew. Several processes may do this at once: each works in a folder of its
own and the last rename wins. Behind the library the file has its digest, which a loader does not
look at: to load one that a full disk or a crash cut short can kill the process.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from penstock import log
from penstock.hub.folder import cache_home
from penstock.kernels.native.functions import calls_source
from penstock.kernels.native.prebuilt import prebuilt

_log = log.get(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
_THIS_MACHINE = (("-march=native",), ("-mcpu=native",), ())  # the first that compiles is taken
_TIMEOUT_S = 180


class BuildError(Exception):
    """Why there is no library."""


def compiled(anew: bool = False) -> Path:
    """The path of the library; compiles it where it is not there, broken or wanted `anew`."""
    if not anew and (found := prebuilt()) is not None:
        return found
    compiler = _compiler()
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    parts = [calls_source(), *(source.read_text(encoding="utf-8") for source in sources)]
    parts += [_run(compiler, "--version"), _processor(), repr((_FLAGS, _THIS_MACHINE))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_home() / "native" / f"ops-{digest}.so"
    if not anew and target.is_file():
        if _is_whole(target):
            return target
        _log.warning("'%s' is broken and is compiled again", target)
    _log.info("compiling native CPU ops, once for this machine")
    started = time.perf_counter()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
        calls = Path(unfinished) / "calls.c"
        calls.write_text(calls_source(), encoding="utf-8")
        made = _compile(compiler, [calls, *(s for s in sources if s.suffix == ".c")], unfinished)
        with made.open("r+b") as library:
            library.write(hashlib.sha256(library.read()).digest())  # at the end, where reading left
            library.flush()
            os.fsync(library.fileno())
        os.replace(made, target)
    _log.info("compiled native CPU ops in %.1f s", time.perf_counter() - started)
    return target


def _is_whole(library: Path) -> bool:
    content = library.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def compile_for(flags: tuple[str, ...], folder: Path) -> Path:
    """A library in `folder` for the machines that `flags` name."""
    calls = folder / "calls.c"
    calls.write_text(calls_source(), encoding="utf-8")
    sources = [calls, *sorted(Path(__file__).parent.glob("*.c"))]
    return _compile(_compiler(), sources, str(folder), (flags,))


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler ({', '.join(_COMPILERS)}) was found")
    return compiler


def _compile(
    compiler: str,
    sources: list[Path],
    folder: str,
    machines: Sequence[tuple[str, ...]] | None = None,
) -> Path:
    made = Path(folder) / "ops.so"
    failure = BuildError("not tried")
    for machine in machines or _THIS_MACHINE:
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
