"""Recipe files: each loads, says what the recipe prints, and gives way to what the user says."""

import argparse
import logging
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from penstock.cli.flags import add_serve_flags, normalize, settings
from penstock.cli.main import main
from penstock.cli.serve import build_config
from penstock.config.load import given_settings
from penstock.config.recipe import FOLDER, recipe_named, recipe_names
from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import canonical
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[3]
PRINTED = ROOT.parent / "shared" / "recipes"
# Of a printed command, but no setting of a recipe: the address is the user's, the rest has no
# effect here.
_NOT_KEPT = {"host", "port", "trust_remote_code"}
# (file of the recipe, which of its YAML blocks; None: the command alone, how its model begins)
SOURCES = {
    "llama-3.3-70b": ("llama-3.3-70b.md", 0, "nvidia/Llama"),
    "deepseek-r1-fp4": ("deepseek-r1.md", 0, "deepseek-ai/"),
    "deepseek-r1-fp8": ("deepseek-r1.md", 1, "deepseek-ai/"),
    "gpt-oss-120b-latency": ("gpt-oss.md", 0, "openai/"),
    "gpt-oss-120b-throughput": ("gpt-oss.md", 1, "openai/"),
    "qwen3-next-80b": ("qwen3-next.md", 0, "Qwen/Qwen3-Next"),
    "qwen2.5-7b": ("serving-cheat-sheet.rst", None, "Qwen/Qwen2.5-7B-Instruct"),
    "qwen2.5-14b-tp8": ("serving-cheat-sheet.rst", None, "Qwen/Qwen2.5-14B-Instruct --tp_size 8"),
    "qwen2.5-14b-tp4": ("serving-cheat-sheet.rst", None, "Qwen/Qwen2.5-14B-Instruct --tp_size 4"),
    "qwen2.5-72b-tp8-pp2": ("serving-cheat-sheet.rst", None, "Qwen/Qwen2.5-72B-Instruct"),
    "qwen3-8b-fp8": ("serving-cheat-sheet.rst", None, "nvidia/Qwen3-8B-FP8"),
    "qwen1.5-moe-tp8-ep4": ("serving-cheat-sheet.rst", None, "Qwen/Qwen1.5-MoE"),
}
# What a file has other than printed, beside the name of the model; its first line says why.
DIFFERS = {
    "llama-3.3-70b-fp8-h100": {"tensor_parallel_size"},
    "deepseek-r1-fp8-h100": {"tensor_parallel_size", "moe_expert_parallel_size", "moe_config"},
    "deepseek-r1-fp8-h200": {"moe_config"},
    "deepseek-r1-fp4-gb200-wide-ep": {
        *("tensor_parallel_size", "moe_expert_parallel_size", "moe_config"),
    },
    "gpt-oss-120b-latency-gb200": {"tensor_parallel_size", "moe_expert_parallel_size"},
    "gpt-oss-120b-throughput-gb200": {"tensor_parallel_size", "moe_expert_parallel_size"},
}


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    parser.set_defaults(needs_model=False)
    return parser.parse_args(normalize(argv))


def printed(name: str, block: int | None, begins: str) -> dict[str, object]:
    text = (PRINTED / name).read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(rf"(?m)^ *trtllm-serve ({begins}.*)$", joined)
    values, _ = settings(parse(*shlex.split(min(lines, key=len))))
    given = given_settings(values)
    if block is not None:
        found = re.findall(r"cat << EOF > \$\{EXTRA_LLM_API_FILE\}\n(.*?)\nEOF", text, re.DOTALL)
        for field, value in canonical(yaml.safe_load(found[block])).items():
            both = isinstance(value, dict) and field in given
            given[field] = given[field] | value if both else value
    return {field: value for field, value in given.items() if field not in _NOT_KEPT}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_loads(name):
    recipe = recipe_named(name)
    config = EngineConfig.model_validate(recipe.settings)
    assert config.model == recipe.model
    for size in ("tensor_parallel_size", "pipeline_parallel_size"):
        assert getattr(config, size) == recipe.settings.get(size, 1)
    assert recipe.about and recipe.gpus[0].isdigit()


def test_there_is_a_file_for_every_recipe_and_every_gpu_it_lists():
    names = set(recipe_names())
    assert len(names) == 26
    for gpu in ("h100", "h200", "b200", "gb200"):
        assert {f"llama-3.3-70b-fp8-{gpu}", f"deepseek-r1-fp8-{gpu}"} <= names
    for gpu in ("b200", "gb200"):
        assert {f"llama-3.3-70b-fp4-{gpu}", f"deepseek-r1-fp4-{gpu}"} <= names
        assert {f"gpt-oss-120b-latency-{gpu}", f"gpt-oss-120b-throughput-{gpu}"} <= names
        assert f"qwen3-next-80b-{gpu}" in names
    assert DIFFERS.keys() <= names
    assert (ROOT / "deploy" / "configs").resolve() == FOLDER.resolve()


@pytest.mark.skipif(not PRINTED.is_dir(), reason="the recipes are not beside us")
@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "qwen2.5-72b-tp8"])
def test_a_file_is_what_its_recipe_prints(name):
    ours = dict(recipe_named(name).settings)
    [source] = [SOURCES[one] for one in SOURCES if name == one or name.startswith(f"{one}-")][-1:]
    theirs = printed(*source)
    ours.pop("model"), theirs.pop("model")
    differs = {field for field in ours | theirs if ours.get(field) != theirs.get(field)}
    assert differs == DIFFERS.get(name, set())


def test_flags_file_and_set_win_over_the_recipe_and_the_log_says_what_is_whose(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="penstock")
    file = tmp_path / "mine.yaml"
    file.write_text("kv_cache_config: {dtype: auto}\nmax_seq_len: 4096\n")
    config = build_config(
        parse(
            *("tiny", "--recipe", "llama-3.3-70b-fp8-h200", "--max_batch_size", "8"),
            *("--config", str(file), "--set", "cuda_graph_config.max_batch_size=8"),
        )
    )
    assert (config.model, config.max_batch_size, config.max_seq_len) == ("tiny", 8, 4096)
    assert config.max_num_tokens == 2048  # the recipe's
    assert config.kv_cache_config.dtype == "auto"
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.9
    graphs = config.cuda_graph_config
    assert (graphs.max_batch_size, graphs.enable_padding) == (8, True)
    [kept] = [line for line in caplog.messages if line.startswith("recipe llama-3.3-70b-fp8-h200 ")]
    [lost] = [line for line in caplog.messages if "replaced by yours" in line]
    assert "max_num_tokens=2048" in kept and "kv_cache_config.free_gpu_memory_fraction=0.9" in kept
    assert "max_batch_size=1024" not in kept.replace("_config.max_batch_size", "")
    for field in ("model", "max_batch_size", "max_seq_len", "cuda_graph_config.max_batch_size"):
        assert f" {field}=" in lost
    assert "kv_cache_config.dtype='fp8'" in lost
    assert not [line for line in caplog.messages if "is not used" in line]


def test_a_section_that_the_user_switches_off_is_off():
    config = build_config(
        parse("--recipe", "llama-3.3-70b-fp8-h200", "--set", "cuda_graph_config=null")
    )
    assert config.cuda_graph_config is None
    assert config.model == "nvidia/Llama-3.3-70B-Instruct-FP8"


def test_a_name_that_is_not_there_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3.3-70b-fp8-h100'"):
        recipe_named("llama-3.3-70b-fp8-h10")
    with pytest.raises(ConfigError, match="'penstock recipes' lists"):
        recipe_named(os.path.join("..", "zzz"))


def test_recipes_lists_them_and_prints_one(capsys):
    for argv in (["recipes"], ["recipes", "gpt-oss-120b-latency-b200"]):
        with pytest.raises(SystemExit) as ended:
            main(argv)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    header, *rows = out.splitlines()[: 1 + len(recipe_names())]
    assert re.split(r"\s{2,}", header) == ["NAME", "MODEL", "GPUS", "WHAT DIFFERS"]
    assert [row.split()[0] for row in rows] == recipe_names()
    [row] = [row for row in rows if row.startswith("deepseek-r1-fp8-h100 ")]
    assert re.split(r"\s{2,}", row)[1:3] == ["deepseek-ai/DeepSeek-R1-0528", "16 H100"]
    assert out.endswith((FOLDER / "gpt-oss-120b-latency-b200.yaml").read_text())
