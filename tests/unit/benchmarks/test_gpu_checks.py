"""What runs on a GPU is checked as far as a machine without one can: its runner, its recipes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import all as runner
from recipes_check import EVALUATION, RECIPES, Recipe, wrong_memory
from shapes import SHAPES

from penstock.config.load import load_config

GPU = Path(__file__).parents[2] / "gpu"
SHARED = Path(__file__).parents[4] / "shared" / "recipes"
FILES = {
    "gpt-oss-120b": ("gpt-oss.md", 0),
    "gpt-oss-20b": ("gpt-oss.md", 1),
    "qwen3-next-80b": ("qwen3-next.md", 0),
    "deepseek-r1": ("deepseek-r1.md", 1),
}


def test_every_part_has_its_script_and_a_name_of_its_own():
    parts = runner.parts()
    assert len({part.name for part in parts}) == len(parts)
    scripts = [Path(part.command[0]) for part in parts if not part.command[0].startswith("-")]
    assert scripts and all(script.is_file() for script in scripts)
    assert [part.name for part in parts if part.is_alone] == ["collectives", "engine trace"]


def test_every_check_is_a_part_or_named_as_none():
    """Under pytest, too: `tests/gpu/test_checks.py` makes a test of each of these parts."""
    there = {path.name for path in GPU.glob("*_check.py")}
    run = {Path(part.command[0]).name for part in runner.parts()} & there
    assert len(run) > 8 and there - run == set(re.findall(r"\w+_check\.py", runner.__doc__))


def test_every_script_imports_and_says_its_flags():
    """Also those that nothing else here starts. `make check` has their types."""
    folders = [runner.ROOT / folder for folder in ("benchmarks", "tests/gpu", "tools")]
    scripts = [str(path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    command = [sys.executable, str(GPU.parent / "fixtures" / "help_of_scripts.py"), *scripts]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(scripts) > 60 and ran.returncode == 0, ran.stdout + ran.stderr[-2000:]


def test_a_failed_part_says_what_failed_before_anything_else(tmp_path):
    part = runner.Part("one two", ("-c", "print('FAIL a\\nok b'); raise SystemExit(1)"))
    assert runner.run(part, tmp_path)[1] == "code 1"
    assert runner.complaints(part, tmp_path) == ["FAIL a"]
    crash = runner.Part("crash", ("-c", "raise ValueError('no driver')"))
    assert runner.run(crash, tmp_path)[1] == "code 1"
    assert runner.complaints(crash, tmp_path)[-1] == "ValueError: no driver"


def test_parts_find_the_package_of_this_tree(tmp_path, monkeypatch):
    """Where nothing is installed and nobody set PYTHONPATH."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    part = runner.Part("where", ("-c", "import penstock; print(penstock.__file__)"))
    assert runner.run(part, tmp_path)[1] == ""
    assert (tmp_path / "where.log").read_text().startswith(str(runner.ROOT / "src"))


def test_tests_on_a_gpu_are_marked_and_skipped_without_one():
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider"]
    ran = subprocess.run(
        [*command, *(["--collect-only"] if torch.cuda.is_available() else []), str(GPU)],
        capture_output=True, text=True, check=False, cwd=runner.ROOT,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in ran.stdout and " passed" not in ran.stdout
    not_marked = subprocess.run(
        [*command[:-4], "-m", "not gpu", "--collect-only", str(GPU)],
        capture_output=True, text=True, check=False, cwd=runner.ROOT,
    )  # fmt: skip
    assert not_marked.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, not_marked.stdout


def test_a_part_that_fails_or_hangs_is_named_and_ends(tmp_path, capsys):
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    asked = {
        "": runner.Part("good", ("-c", "print(1)")),
        "code 3": runner.Part("bad", ("-c", "raise SystemExit(3)")),
        "not done after 1 s": runner.Part("stuck", ("-c", parent), 1.0),
    }
    for wrong, part in asked.items():
        assert runner.run(part, tmp_path)[1] == wrong
    assert (tmp_path / "good.log").read_text() == "1\n"
    assert "stuck: not done after 1 s" in capsys.readouterr().out


@pytest.mark.parametrize("name", (*RECIPES, *EVALUATION))
def test_flags_and_file_of_a_recipe_mean_something_here(name, tmp_path):
    recipe = (RECIPES | EVALUATION)[name]
    assert recipe.shape in SHAPES and recipe.tiny in SHAPES
    path = tmp_path / "recipe.yml"
    path.write_text(yaml.safe_dump(recipe.file))
    config = load_config({"model": "m"}, str(path), [])
    assert config.stream_interval == recipe.file.get("stream_interval", 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recipes are not here")
@pytest.mark.parametrize("name", FILES)
def test_flags_and_file_are_those_of_the_recipe(name):
    file, number = FILES[name]
    text = (SHARED / file).read_text()
    found = re.findall(r"cat << EOF > \$\{EXTRA_LLM_API_FILE\}\n(.*?)\nEOF", text, re.DOTALL)
    assert RECIPES[name].file == yaml.safe_load(found[number])
    [printed] = re.findall(r"(?m)^trtllm-serve \S+ \\\n((?:    --.*\n)+)", text)
    flags = dict(re.findall(r"--(\w+)(?: ([\w.]+))?", printed))
    ours = dict(re.findall(r"--(\w+)(?: ([\w.]+))?", " ".join(RECIPES[name].flags)))
    replaced = {"host", "port", "extra_llm_api_options", "tp_size", "ep_size"}
    assert {k: v for k, v in flags.items() if k not in replaced} == {
        k: v for k, v in ours.items() if k not in replaced
    }
    assert ours["tp_size"] == ours["ep_size"] == "1"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recipes are not here")
def test_the_evaluation_rows_are_those_of_the_recipe():
    text = (SHARED / "gpt-oss.md").read_text()
    rows = re.findall(r"(?m)^\| *(low/medium|high) *\| *(DEP|TP)8.*\| *(\d+) *\| *(\d+) *\|$", text)
    assert len(rows) == len(EVALUATION) == 4
    for (effort, kind, batch, tokens), (name, recipe) in zip(rows, EVALUATION.items(), strict=True):
        assert name == f"{kind.lower()}, {effort.replace('/', ' or ')}"
        flags = dict(zip(recipe.flags, recipe.flags[1:], strict=False))
        assert (flags["--max_batch_size"], flags["--max_num_tokens"]) == (batch, tokens)
        assert recipe.file["enable_attention_dp"] is (kind == "DEP")


def test_weights_that_were_unpacked_are_noticed():
    recipe: Recipe = RECIPES["gpt-oss-120b"]
    config = SHAPES[recipe.shape]
    memory = {"weights_bytes": int(60.8 * 2**30), "kv_cache_bytes": 1}
    assert wrong_memory(recipe, config, memory, is_tiny=False) == []
    memory["weights_bytes"] *= 3
    assert wrong_memory(recipe, config, memory, is_tiny=False) != []
