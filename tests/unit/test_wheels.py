"""Both wheels, built and installed as a user has them, on a machine without a C compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock.config.recipe import recipe_names
from penstock.kernels.native import compiler, prebuilt

ROOT = Path(__file__).parents[2]
V3, V4 = prebuilt._V3, prebuilt._V4
SCRIPT = """
import torch
from penstock import log
from penstock.kernels import native
from penstock.kernels.norm import rms_norm

log.setup("engine")
for _ in range(2):
    loaded = native.library()
print(native.__file__)
print(loaded and loaded._name)
print(rms_norm.explain(torch.ones(1, 64), torch.ones(64), 1e-5))
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """Kind -> wheel."""
    if not any(map(shutil.which, compiler._COMPILERS)):
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=unwanted)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    [pure] = folder.glob("*-none-any.whl")
    tool = [sys.executable, str(ROOT / "tools" / "platform_wheel.py"), str(pure)]
    subprocess.run(tool, check=True, env=os.environ | {"PYTHONPATH": str(ROOT / "src")})
    [native] = folder.glob("*-manylinux_*.whl")
    return {"pure": pure, "platform": native}


def run_without_compiler(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(wheel)], check=True)
    environment = {
        "PATH": str(folder / "nothing"),
        "HOME": str(folder),
        "PENSTOCK_HOME": str(folder / "home"),
        "PYTHONPATH": str(folder / "site"),
    }
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_the_platform_wheel_has_native_ops_where_there_is_no_compiler(wheels, tmp_path):
    if not prebuilt.cpu_flags().issuperset(prebuilt.VARIANTS["x86_64"][-1].cpu_flags):
        pytest.skip("none of the variants is for this processor")
    done = run_without_compiler(wheels["platform"], tmp_path)
    module, library, chosen = done.stdout.splitlines()
    assert module.startswith(str(tmp_path))
    assert Path(library).parent == Path(module).parent / "prebuilt"
    assert "native" in chosen
    assert done.stderr == ""
    assert not (tmp_path / "home").exists()  # nothing was compiled


def test_the_pure_wheel_says_once_what_is_missing_and_goes_on(wheels, tmp_path):
    done = run_without_compiler(wheels["pure"], tmp_path)
    module, library, chosen = done.stdout.splitlines()
    assert module.startswith(str(tmp_path))
    assert library == "None"
    assert "native: needs the native library" in chosen or not chosen.startswith("native")
    [line] = done.stderr.splitlines()
    assert "no C compiler (cc, gcc, clang)" in line
    assert "3 to 10 times slower; install gcc or clang" in line
    assert "'make wheel' on a machine with gcc, then here 'pip install dist/penstock-*-man" in line


def test_the_platform_wheel_has_the_name_that_is_told(wheels):
    assert wheels["platform"].match("penstock-*-manylinux*.whl")


def test_the_wheels_have_the_recipes(wheels):
    with zipfile.ZipFile(wheels["pure"]) as pure:
        inside = {Path(name).stem for name in pure.namelist() if "/config/recipes/" in name}
    assert inside == set(recipe_names())


def test_the_platform_wheel_is_the_pure_one_and_its_libraries(wheels):
    with zipfile.ZipFile(wheels["pure"]) as pure, zipfile.ZipFile(wheels["platform"]) as native:
        added = set(native.namelist()) - set(pure.namelist())
        assert {Path(name).parent.name for name in added} == {"prebuilt"}
        assert set(pure.namelist()) < set(native.namelist())
        [about] = [name for name in native.namelist() if name.endswith("/WHEEL")]
        text = native.read(about).decode()
    tag = wheels["platform"].stem.partition("-none-")[2]
    assert f"Tag: py3-none-{tag}\n" in text
    assert "Root-Is-Purelib: false" in text


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ((*V4, "avx512_vnni", "amx_int8"), "ops-avx512vnni.so"),
        (V4, "ops-avx512.so"),
        ((*V3, "avx512f"), "ops-avx2.so"),
        (V3[1:], None),
        ((), None),
    ],
)
def test_the_best_library_that_the_processor_can_run_is_taken(flags, chosen, tmp_path, monkeypatch):
    for variant in prebuilt.VARIANTS["x86_64"]:
        (tmp_path / variant.file_name).touch()
    monkeypatch.setattr(prebuilt, "cpu_flags", lambda: set(flags))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = prebuilt.prebuilt(tmp_path)
    assert (found and found.name) == chosen


def test_flags_are_those_that_every_processor_has(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fma avx2\n\nprocessor : 1\nflags\t\t: fma sse\n")
    monkeypatch.setattr(prebuilt, "_CPU_INFO", path)
    assert prebuilt.cpu_flags() == {"fma"}
    path.unlink()
    assert prebuilt.cpu_flags() == set()


def test_a_source_tree_has_none():
    assert prebuilt.prebuilt() is None
