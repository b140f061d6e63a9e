"""Published tasks, which read local files: gsm8k, aime, gpqa, mmlu, hellaswag, perplexity.

A task is written (the model writes an answer, filters find it) or chosen (endings are weighed).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.eval.likelihood import Choices
from penstock.eval.task import Example

Reader = Callable[[Path, Path | None, int], list[Example]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """`filters` find the answer in what was said; right is what `is_equal` to the expected one."""

    file_names: tuple[str, ...]
    shot_names: tuple[str, ...] = ()
    version: int
    num_fewshot: int = 0
    max_tokens: int
    read: Reader
    filters: Mapping[str, Callable[[str], str | None]]
    is_equal: Callable[[str, str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    file_names: tuple[str, ...]
    shot_names: tuple[str, ...] = ()
    version: int
    num_fewshot: int = 0
    read: Callable[[Path, Path | None, int], list[Choices]]
    by_length: bool = False  # also weigh each ending by its length
    by_group: bool = False  # one line of the report for each group


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A running text: how well is each of its tokens foreseen?"""

    file_names: tuple[str, ...]
    version: int
    read: Callable[[Path], str]


Published = Written | Chosen | Continued


def pick(folder_or_file: Path, names: Sequence[str]) -> Path | None:
    """The file itself, or the one of these names in the folder, packed or not."""
    if not folder_or_file.is_dir():
        return folder_or_file
    for name in names:
        for path in (folder_or_file / name, folder_or_file / f"{name}.gz"):
            if path.is_file():
                return path
    return None
