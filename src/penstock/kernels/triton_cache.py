"""Where Triton keeps compiled kernels: in the cache folder, apart by GPU and by versions.

Triton itself finds a binary by the source of its kernel, and writes each with one rename, so ranks
may share the folder and start at the same time.
"""

import os
import time
from pathlib import Path
from typing import Any

import penstock
from penstock import log
from penstock.hub.folder import cache_home
from penstock.kernels.device import probe
from penstock.kernels.tuned import slug
from penstock.types.device import DeviceInfo

_VARIABLE = "TRITON_CACHE_DIR"
_SLOW_S = 0.1  # a kernel found in the folder takes less
_log = log.get(__name__)


def use_cache_folder() -> None:
    """For this process and its children, unless the user has set Triton's variable."""
    if os.environ.get(_VARIABLE):
        return
    folder = cache_folder(probe())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _log.warning("kernels are cached where Triton likes: %s", error)
        os.environ.pop(_VARIABLE, None)
        return
    os.environ[_VARIABLE] = str(folder)


def folder() -> Path | None:
    """The one in use; None: Triton's own."""
    found = os.environ.get(_VARIABLE)
    return None if found is None else Path(found)


def cache_folder(device: DeviceInfo) -> Path:
    versions = f"torch-{device.torch_version}-triton-{device.triton_version}"
    name = f"{slug(device.name)}-{versions}-penstock-{penstock.__version__}"
    return cache_home() / "triton" / name


def report_compilations() -> None:
    """From now on say which kernels are compiled: while an engine serves, all requests wait."""
    if probe().triton_version is None:
        return
    import triton

    began: dict[str, float] = {}

    def before(*, key: str, **_: Any) -> None:
        began[key] = time.monotonic()

    def after(*, key: str, fn: Any, **_: Any) -> None:
        seconds = time.monotonic() - began.pop(key, time.monotonic())
        if seconds > _SLOW_S:
            _log.warning("kernel %s was compiled while serving, in %.1f s", fn.name, seconds)

    triton.knobs.runtime.jit_cache_hook = before
    triton.knobs.runtime.jit_post_compile_hook = after
