"""The tests are a map of the package: a folder of `tests/unit` is a folder of `src/penstock`."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
UNIT, PACKAGE = TESTS / "unit", ROOT / "src" / "penstock"
BESIDE = {
    "benchmarks": ROOT / "benchmarks",
    "tools": ROOT / "tools",
    "siblings": ROOT / "tools" / "siblings",
}


def test_every_folder_of_unit_tests_is_one_of_the_package():
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    strangers = [f for f in folders if str(f) not in BESIDE and not (PACKAGE / f).is_dir()]
    assert len(folders) > 15 and strangers == []
    assert all(folder.is_dir() for folder in BESIDE.values())


@pytest.mark.parametrize("module", sorted((PACKAGE / "core" / "kv").glob("[a-z]*.py")))
def test_every_module_of_the_kv_cache_has_its_tests(module):
    name = "kv_manager" if module.stem == "manager" else module.stem
    users = (UNIT / "core" / "kv").glob("test_*.py")
    if name == "invariants":  # the tests' own
        assert any("invariants import check" in user.read_text() for user in users)
    else:
        assert (UNIT / "core" / "kv" / f"test_{name}.py").is_file()


def test_no_two_test_files_have_one_name():
    """Pytest imports them by their names alone."""
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
