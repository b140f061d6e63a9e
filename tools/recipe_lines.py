"""The shell commands of a published recipe, as a reader would type them one after the other.

Reads Markdown fences and reStructuredText code blocks. A command is all its lines: continued with
a backslash, inside quotes, or a here-document. What a command does is not known here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = ("shell", "bash", "sh", "")
_FENCE = re.compile(r"^```(\w*)\s*$")
_DIRECTIVE = re.compile(r"^\.\. code-block:: (\w+)$")
_HERE_DOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
# A fence without a language may be output: tables, rules, JSON.
_OUTPUT = ("|", "=", "{")


@dataclass(frozen=True, slots=True)
class Block:
    language: str
    first_line: int  # of the file, counted from 1
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    recipe: str  # file name
    line: int  # its first one, counted from 1
    text: str
    num_lines: int  # without the comments before it

    @property
    def summary(self) -> str:
        """On one line; of a here-document only how it begins."""
        head = self.text.partition("\n")[0] if "<<" in self.text else self.text
        return re.sub(r"\s*\\?\n\s*", " ", head)


def blocks(text: str, is_rst: bool) -> Iterator[Block]:
    yield from _rst_blocks(text) if is_rst else _markdown_blocks(text)


def _markdown_blocks(text: str) -> Iterator[Block]:
    language, begin, inside = "", 0, False
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith("```"):
            continue
        if inside:
            yield Block(language, begin, tuple(lines[begin - 1 : number - 1]))
        elif found := _FENCE.match(line):
            language, begin = found[1], number + 1
        inside = not inside


def _rst_blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not (found := _DIRECTIVE.match(line)):
            continue
        end = number
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
            end += 1
        body = tuple(one[4:] for one in lines[number:end])
        yield Block(found[1], number + 1, body)


def commands(path: Path) -> list[Command]:
    """Those of a file in their order."""
    found = []
    for block in blocks(path.read_text(encoding="utf-8"), path.suffix == ".rst"):
        first = next((line for line in block.lines if line.strip()), "")
        if block.language in SHELL and not first.startswith(_OUTPUT):
            found += list(_commands(block, path.name))
    return found


def named_files(path: Path) -> dict[str, str]:
    """YAML blocks that begin with the name of their file, as a comment: name -> content."""
    files = {}
    for block in blocks(path.read_text(encoding="utf-8"), path.suffix == ".rst"):
        content = "\n".join(block.lines).strip()
        if block.language == "yaml" and (found := re.match(r"# (\S+\.ya?ml)\n", content)):
            files[found[1]] = content + "\n"
    return files


def _commands(block: Block, recipe: str) -> Iterator[Command]:
    pending: list[str] = []
    begin = 0
    for number, line in enumerate(block.lines, start=block.first_line):
        if not pending and (not line.strip() or line.lstrip().startswith("#")):
            continue
        if not pending:
            begin = number
        pending.append(line)
        if _is_whole(pending):
            yield Command(recipe, begin, "\n".join(pending), len(pending))
            pending = []
    if pending:
        yield Command(recipe, begin, "\n".join(pending), len(pending))


def _is_whole(lines: list[str]) -> bool:
    if here := _HERE_DOC.search(lines[0]):
        return len(lines) > 1 and lines[-1].strip() == here[2]
    if lines[-1].rstrip().endswith("\\"):
        return False
    text = "\n".join(lines)
    return text.count("'") % 2 == 0 and text.replace('\\"', "").count('"') % 2 == 0
