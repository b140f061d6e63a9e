"""A flag, setting, name, metric or route does not change without somebody deciding so."""

import pytest
from public_surface import FOLDER, SNAPSHOTS


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_the_public_surface_is_as_written_down(name):
    known = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    now = list(SNAPSHOTS[name]())
    gone = [line for line in known if line not in now]
    new = [line for line in now if line not in known]
    assert not gone and not new, (
        f"users depend on what snapshots/{name} lists. Gone: {gone}. New: {new}. If this is meant, "
        "run `python tests/architecture/public_surface.py` and commit the file with the change"
    )


def test_every_snapshot_has_a_source():
    assert {path.name for path in FOLDER.iterdir()} == set(SNAPSHOTS)
