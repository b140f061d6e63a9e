"""The command lines and YAML files of the published recipes work as printed."""

import argparse
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from penstock.cli.flags import add_serve_flags, normalize
from penstock.cli.serve import build_config

FOLDER = Path(__file__).parents[4] / "shared" / "recipes"
RECIPES = sorted(FOLDER.glob("*")) if FOLDER.is_dir() else []
pytestmark = pytest.mark.skipif(not RECIPES, reason="the recipes are not here")


def commands(text: str) -> list[list[str]]:
    """Arguments of every `trtllm-serve MODEL ...` that stands alone on its lines."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"trtllm-serve [\w-]+/\S+", line)]


def files(text: str) -> list[str]:
    """YAML of here-documents and of YAML code blocks."""
    here = re.findall(r"cat << EOF > \$\{EXTRA_LLM_API_FILE\}\n(.*?)\nEOF", text, re.DOTALL)
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    rst = re.findall(r"\.\. code-block:: yaml\n\n((?:    .*\n|\n)+)", text)
    return here + blocks + [re.sub(r"(?m)^    ", "", block) for block in rst]


CASES = [
    (recipe.name, argv, text)
    for recipe in RECIPES
    for argv, text in itertools.product(
        commands(recipe.read_text(encoding="utf-8")), files(recipe.read_text(encoding="utf-8"))
    )
]


def build(argv: list[str]):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    parser.set_defaults(needs_model=True)
    return build_config(parser.parse_args(normalize(argv)))


def test_all_five_recipes_have_a_command_and_a_file():
    assert len(RECIPES) == 5
    assert {name for name, _, _ in CASES} == {recipe.name for recipe in RECIPES}


@pytest.mark.parametrize(("name", "argv", "text"), CASES, ids=lambda v: str(v)[:40])
def test_a_recipe_parses_and_means_what_it_says(name, argv, text, tmp_path, caplog):
    path = tmp_path / "config.yml"
    path.write_text(text)
    takes_file = [word if not word.startswith("${") else str(path) for word in argv]
    takes_file = [str(path) if word.endswith(".yaml") else word for word in takes_file]
    has_file = str(path) in takes_file
    config = build(takes_file)
    asked = yaml.safe_load(text) if has_file else {}

    flags = dict(itertools.pairwise(argv))
    assert config.model == argv[0]
    if "--max_batch_size" in flags:
        assert config.max_batch_size == int(flags["--max_batch_size"])
        assert config.max_num_tokens == int(flags["--max_num_tokens"])
        fraction = float(flags["--kv_cache_free_gpu_memory_fraction"])
        assert config.kv_cache_config.free_gpu_memory_fraction == fraction
    if "cuda_graph_config" in asked:
        graphs = asked["cuda_graph_config"]
        assert config.cuda_graph_config.enable_padding is graphs["enable_padding"]
        assert config.cuda_graph_config.max_batch_size == graphs["max_batch_size"]
    assert config.stream_interval == asked.get("stream_interval", 1)
    assert config.pipeline_parallel_size == int(flags.get("--pp_size", 1))
    assert config.enable_attention_dp is asked.get("enable_attention_dp", False)
    balance = asked.get("attention_dp_config", {})
    assert balance.items() <= config.attention_dp_config.model_dump().items()
    if "tensor_parallel_size" in asked:
        assert config.tensor_parallel_size == asked["tensor_parallel_size"]

    warned = [line.split(" is ignored: ")[0].partition(":")[0] for line in caplog.messages]
    assert len(warned) == len(set(warned))
    moe = asked.get("moe_config", {})
    assert config.moe_config.backend == moe.get("backend", "AUTO")
    assert config.moe_config.max_num_tokens == moe.get("max_num_tokens")
    if asked.get("kv_cache_config") == {"dtype": "fp8"}:
        assert config.kv_cache_config.dtype == "fp8"


def test_arguments_appended_by_a_launcher_win():
    config = build(["m", "--port", "9000", "--host", "a", "--host", "0.0.0.0", "--port", "8000"])
    assert (config.host, config.port) == ("0.0.0.0", 8000)
