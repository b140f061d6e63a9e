"""Pure wheel -> platform wheel: the same files, and the native CPU ops compiled in.

    python tools/platform_wheel.py dist/penstock-VERSION-py3-none-any.whl

Writes `penstock-VERSION-py3-none-manylinux_X_Y_MACHINE.whl` beside it: one library per set of
vector instructions (`kernels/native/prebuilt.py`), of which a run takes the best that its processor
has.
The tag says the oldest glibc that has every symbol the libraries use.
"""

import argparse
import base64
import hashlib
import platform
import re
import sys
import tempfile
import zipfile
from pathlib import Path

from penstock.kernels.native.compiler import BuildError, compile_for
from penstock.kernels.native.prebuilt import FOLDER, VARIANTS

_PURE = "-py3-none-any.whl"
_INSIDE = f"penstock/kernels/native/{FOLDER.name}"
_TIME = (1980, 1, 1, 0, 0, 0)  # the same libraries make the same wheel
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    pure: Path = parser.parse_args().wheel
    machine = platform.machine()
    if not pure.name.endswith(_PURE):
        parser.error(f"{pure.name} is not a pure wheel (*{_PURE})")
    if sys.platform != "linux" or machine not in VARIANTS:
        parser.error(f"there are no variants for {sys.platform} on {machine}")
    try:
        libraries = _libraries(machine)
    except BuildError as error:
        parser.error(str(error))
    tag = f"manylinux_{_oldest_glibc(libraries)}_{machine}"
    path = pure.with_name(pure.name.replace("none-any", f"none-{tag}"))
    _write(pure, path, libraries, tag)
    print(f"{path}: {path.stat().st_size:,} bytes, {', '.join(sorted(libraries))}")
    return 0


def _libraries(machine: str) -> dict[str, bytes]:
    """Path inside the wheel -> content."""
    made = {}
    for variant in VARIANTS[machine]:
        with tempfile.TemporaryDirectory() as folder:
            library = compile_for(variant.compiler_flags, Path(folder))
            made[f"{_INSIDE}/{variant.file_name}"] = library.read_bytes()
    return made


def _oldest_glibc(libraries: dict[str, bytes]) -> str:
    used = {(int(a), int(b)) for one in libraries.values() for a, b in _GLIBC.findall(one)}
    major, minor = max(used)
    return f"{major}_{minor}"


def _write(pure: Path, path: Path, libraries: dict[str, bytes], tag: str) -> None:
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        rows = []
        for name, content in [
            *((i.filename, old.read(i)) for i in old.infolist()),
            *libraries.items(),
        ]:
            if name.endswith(".dist-info/RECORD"):
                record = name
                continue
            if name.endswith(".dist-info/WHEEL"):
                content = _about(content, tag)
            rows.append(_row(name, content))
            _add(new, name, content)
        _add(new, record, "\n".join([*rows, f"{record},,", ""]).encode())


def _about(content: bytes, tag: str) -> bytes:
    text = content.decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    return text.replace("Tag: py3-none-any", f"Tag: py3-none-{tag}").encode()


def _row(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def _add(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _TIME)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
    wheel.writestr(info, content)


if __name__ == "__main__":
    sys.exit(main())
