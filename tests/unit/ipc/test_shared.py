"""Numbers written by one process are read by the others, also by one that comes later."""

import subprocess
import sys

import pytest

from penstock.ipc.shared import create_table, open_table

ADD = """
import sys
from penstock.ipc.shared import open_table
rows = open_table(sys.argv[1], 3)
for _ in range(1000):
    rows[int(sys.argv[2])][1] += 0.5
"""


def test_rows_of_several_processes_add_up(tmp_path):
    path = str(tmp_path / "table")
    create_table(path, num_rows=3, num_columns=4)
    mine = open_table(path, 3)
    writers = [subprocess.Popen([sys.executable, "-c", ADD, path, str(i)]) for i in (0, 2)]
    assert [writer.wait(240) for writer in writers] == [0, 0]
    assert [list(row) for row in mine] == [[0, 500, 0, 0], [0] * 4, [0, 500, 0, 0]]
    mine[1][3] = 7
    assert open_table(path, 3)[1][3] == 7


def test_a_table_is_made_once(tmp_path):
    path = str(tmp_path / "table")
    create_table(path, 1, 1)
    with pytest.raises(FileExistsError):
        create_table(path, 1, 1)
