"""A table of numbers that several processes see at once, one row per process.

Each process writes its own row and reads all of them; there is no lock. A number is eight aligned
bytes, so a reader sees it before or after a change, never half of it.
"""

import mmap
import os
from collections.abc import MutableSequence

Row = MutableSequence[float]


def create_table(path: str, num_rows: int, num_columns: int) -> None:
    """A file of zeros; `open_table` shows it. Whoever has it open keeps it after its removal."""
    with open(path, "xb") as file:
        file.truncate(8 * num_rows * num_columns)


def open_table(path: str, num_rows: int) -> list[Row]:
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        numbers = memoryview(mmap.mmap(file.fileno(), size)).cast("d")
    width = len(numbers) // num_rows
    return [numbers[width * i : width * (i + 1)] for i in range(num_rows)]  # type: ignore[misc]
