"""The package in compat/, built and installed: what the recipes import and run works as printed."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = """
from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor import LoRARequest
from tensorrt_llm.lora_helper import LoraConfig
from tensorrt_llm.llmapi import KvCacheConfig, NGramDecodingConfig

settings = {"kv_cache_config": {"max_tokens": 512}, "num_threads": 1}
drafting = NGramDecodingConfig(max_draft_len=3, max_matching_ngram_size=2)
with LLM(model="tiny", speculative_config=drafting, **settings) as llm:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    output = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    print(output.outputs[0].text)
print(LLM.__module__)
"""


def pip(python: Path | str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of Penstock and of compat, like an index."""
    folder = tmp_path_factory.mktemp("wheels")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    (folder / "penstock").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "penstock")
    shutil.copytree(ROOT / "src", folder / "penstock" / "src", ignore=unwanted)
    shutil.copytree(ROOT / "compat", folder / "compat", ignore=unwanted)
    for name in ("penstock", "compat"):
        flags = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder)
        done = pip(sys.executable, "wheel", *flags, folder / name)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory) -> Path:
    """A new environment with both, beside the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [site] = folder.glob("lib/python3*/site-packages")
    flags = ("--no-index", "--no-deps", "--target", site)
    done = pip(sys.executable, "install", *flags, *wheels.glob("*.whl"))
    assert done.returncode == 0, done.stderr
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries))
    return python


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments],
        cwd=cwd,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_llm_and_sampling_params_are_importable_and_generate(python, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(f'if __name__ == "__main__":\n{EXAMPLE.replace(chr(10), chr(10) + "    ")}')
    done = run(python, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text, module = done.stdout.splitlines()
    assert "Paris" in text
    assert module == "penstock.api.llm"


def test_benchmark_serving_runs_as_a_module(python, tmp_path):
    module = "tensorrt_llm.serve.scripts.benchmark_serving"
    done = run(python, "-m", module, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: benchmark_serving")
    done = run(python, "-m", module, "--model", "m", "--num-promts", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean '--num_prompts'" in done.stderr


def test_the_extra_brings_it_from_an_index(wheels):
    flags = ("--dry-run", "--no-index", "--find-links", wheels, "--no-build-isolation")
    [wheel] = wheels.glob("penstock-*.whl")
    done = pip(sys.executable, "install", *flags, f"penstock[compat] @ {wheel.as_uri()}")
    if "No matching distribution found for" in done.stderr:
        missing = done.stderr.rpartition("No matching distribution found for ")[2].strip()
        assert "penstock-tensorrt-llm" not in missing
        pytest.skip(f"pip does not see {missing} in this environment")
    assert done.returncode == 0, done.stderr
    assert "penstock-tensorrt-llm" in done.stdout
