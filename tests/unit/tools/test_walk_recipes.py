"""The walk through the recipes: every shell line is found, what can run runs, a failure shows."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT.parent / "shared" / "recipes"
RECIPES = sorted(FOLDER.glob("*")) if FOLDER.is_dir() else []
NUM_COMMANDS = {
    **{"deepseek-r1.md": 18, "gpt-oss.md": 13, "llama-3.3-70b.md": 16, "qwen3-next.md": 10},
    **{"serving-cheat-sheet.rst": 27},
}
WALK = ROOT / "tools" / "walk_recipes.py"
SMALL = """# A recipe

```shell
# comment
NAME=Where

cat << EOF > config.yml
max_seq_len: 64
EOF
```

```json
{"no": "command"}
```

```shell
trtllm-serve Qwen/Qwen2.5-7B-Instruct \\
    --port 8000 \\
    --tp_size 8 --config config.yml
```

```
| a | table |
```

```shell
curl http://localhost:8000/v1/completions -H "Content-Type: application/json" -d '{
    "prompt": "'"${NAME}"' is", "max_tokens": 2
}'
curl http://localhost:8000/v1/nothing
docker run --gpus all image
make nothing
```
"""

needs_recipes = pytest.mark.skipif(not RECIPES, reason="the recipes are not beside us")


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import recipe_lines

    return recipe_lines


def walk(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(WALK), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def shell_lines(path: Path) -> int:
    """Counted in another way: lines of shell blocks that are neither blank nor comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rst":
        bodies = re.findall(r"code-block:: bash\n\n((?:    .*\n|\n)+)", text)
        comment = "    #"
    else:
        fences = re.findall(r"(?ms)^```(\w*) *\n(.*?)^```", text)
        bodies = [body for language, body in fences if language in ("", "shell")]
        comment = "# "
    bodies = [body for body in bodies if body.lstrip()[0] not in "|={"]
    every = [line for body in bodies for line in body.splitlines() if line.strip()]
    return sum(not line.startswith(comment) for line in every)


@needs_recipes
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shell_line_belongs_to_one_command(lines, path):
    found = lines.commands(path)
    assert len(found) == NUM_COMMANDS[path.name]
    # Blank lines are inside of bench.sh only; there they belong to the command.
    num = sum(1 for one in found for line in one.text.splitlines() if line.strip())
    assert num == shell_lines(path)
    text = path.read_text(encoding="utf-8").splitlines()
    for one in found:
        assert text[one.line - 1].strip() == one.text.splitlines()[0].strip()
    ends = [one.line + one.num_lines for one in found]
    assert all(end <= after.line for end, after in zip(ends, found[1:], strict=False))


@needs_recipes
def test_a_recipe_is_walked_to_its_end():
    done = walk(*RECIPES, "--only", "qwen3-next", "--json")
    assert done.returncode == 0, done.stdout
    outcomes = json.loads(done.stdout)
    found = {one["line"]: (one["verdict"], one["command"].split()[0]) for one in outcomes}
    assert len(found) == NUM_COMMANDS["qwen3-next.md"]
    verdicts = [verdict for verdict, _ in found.values()]
    assert (verdicts.count("needs"), verdicts.count("failed")) == (1, 0)
    [serve] = [one for one in outcomes if one["command"].startswith("trtllm-serve")]
    assert serve["verdict"] == "differs"
    assert serve["note"].startswith("served qwen3_next; --tp_size 4, --ep_size 4 as 1")
    for one in outcomes:
        if one["command"].startswith("curl"):
            assert one["verdict"] == "ran", one
    assert outcomes[-1]["command"] == "./bench.sh"
    assert outcomes[-1]["verdict"] == "differs"


@needs_recipes
def test_the_page_has_a_row_for_every_line(lines):
    page = (ROOT / "docs" / "quickstart-recipes.md").read_text(encoding="utf-8")
    counts: Counter[str] = Counter()
    for path in RECIPES:
        _, heading, rest = page.partition(f"### {path.name}\n")
        assert heading, path.name
        rows = re.findall(r"(?m)^\| (\d+) \| `(.*?)` \| (\w[\w ]*) \|", rest.partition("\n###")[0])
        expected = [(str(one.line), one.summary[:60]) for one in lines.commands(path)]
        assert [(number, text.replace("...", "")[:60]) for number, text, _ in rows] == expected
        counts.update(verdict for *_, verdict in rows)
    assert set(counts) == {"ran", "differs", "needs"}
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ran", "differs", "needs"))
    assert f"{sum(counts.values())} lines: {said}." in page


def test_lines_that_run_and_lines_that_fail_are_told_apart(tmp_path):
    recipe = tmp_path / "small.md"
    recipe.write_text(SMALL)
    done = walk(recipe, "--json")
    outcomes = json.loads(done.stdout)
    assert [(one["line"], one["verdict"]) for one in outcomes] == [
        (5, "ran"),
        (7, "ran"),
        (17, "differs"),
        (27, "ran"),
        (30, "failed"),
        (31, "needs"),
        (32, "not there"),
    ]
    assert "code 22" in outcomes[4]["note"]  # of curl: an error status
    assert done.returncode == 1
    recipe.write_text(SMALL.replace("curl http://localhost:8000/v1/nothing\n", ""))
    done = walk(recipe)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "6 lines: 3 ran, 1 differs, 1 needs, 1 not there"


def test_a_server_that_refuses_to_start_is_a_failure(tmp_path):
    recipe = tmp_path / "small.md"
    recipe.write_text("```shell\ntrtllm-serve Qwen/Qwen2.5-7B-Instruct --max_batch_sise 8\n```\n")
    done = walk(recipe)
    assert done.returncode == 1
    assert "did you mean '--max_batch_size'?" in done.stdout


def test_a_list_runs_nothing(tmp_path):
    recipe = tmp_path / "small.md"
    recipe.write_text(SMALL)
    done = walk(recipe, "--list")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 7
    assert done.stdout.splitlines()[1] == "small.md:7\tcat << EOF > config.yml"
