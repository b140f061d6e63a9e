"""Pages lead somewhere: links between them, their anchors, and the code paths that they name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "compat/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# `kernels/gemm/gemv.py`, `tests/gpu/all.py`, `core/kv`: from one of these folders.
ROOTS = (ROOT, ROOT / "src" / "penstock", ROOT / "src" / "penstock" / "kernels")
FOLDERS = {path.name for root in ROOTS for path in root.iterdir() if path.is_dir()} - {"triton"}
EXTENSIONS = (".py", ".md", ".c", ".h", ".sh", ".json", ".toml", ".svg")
SOURCES = (".py", ".c", ".h")
FILES = {path.name for top in ("src", "tests", "benchmarks") for path in (ROOT / top).rglob("*.*")}
MEDIA_TYPES = ("text/html", "text/plain")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!`)\[[^\]\[]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", title.replace("`", "").lower())
        found.add(words.replace(" ", "-"))
    return found


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def code_paths(page: Path) -> list[str]:
    """What looks like a path or a source file of this repository in backticks."""
    found = []
    for part in (part for span in SPAN.findall(prose(page)) for part in span.split()):
        top, slash, _ = part.partition("/")
        is_path = top in FOLDERS if slash else part.endswith(SOURCES)
        is_path &= part not in MEDIA_TYPES
        if is_path and re.fullmatch(r"[\w./-]+", part) and "NAME" not in part:
            found.append(part.rstrip("."))
    return found


def is_there(path: str) -> bool:
    """`types/step.StepPlan` and `core/loop` name a module, or something in it."""
    folder, slash, last = path.rstrip("/").rpartition("/")
    if "/" not in path:
        return last in FILES
    names = [path] if last.endswith(EXTENSIONS) else [path, folder + slash + last.partition(".")[0]]
    found = [root / f"{name}{end}" for root in ROOTS for name in names for end in ("", ".py")]
    return any(one.exists() for one in found)


def test_pages_are_found():
    assert len(PAGES) > 20 and all(page.exists() for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_that_a_page_names_exists(page):
    assert [path for path in code_paths(page) if not is_there(path)] == []


def test_every_note_is_in_the_index():
    notes = ROOT / "docs" / "notes"
    index = (notes / "README.md").read_text(encoding="utf-8")
    for note in notes.glob("2*.md"):
        assert f"]({note.name})" in index


def test_a_broken_link_and_a_wrong_path_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` title, twice\n[x](no.md) [y](#a-b-title-twice) [z](#no) [w](https://x.y)\n"
        "`kernels/nothing.py` `kernels/op.Op.impl` `core/kv` `src/penstock/kernels/op.py --x`\n"
        "`nowhere.py` `pool.c` `text/nothing`, `text/plain`, `v1/models` and `a/b.py`\n"
        "```\n[in](code.md)\n```\n"
    )
    assert broken_links(page) == ["no.md", "#no"]
    assert [path for path in code_paths(page) if not is_there(path)] == [
        "kernels/nothing.py",
        "nowhere.py",
        "text/nothing",
    ]
    assert len(code_paths(page)) == 7  # a media type is no path
