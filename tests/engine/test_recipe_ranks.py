"""The published recipes for several GPUs, as printed, on as many CPU ranks: `/version` shows every
setting in force, and the openai package gets what one rank answers. gloo.

Replaced are the model, by a trained sibling or a random checkpoint with heads for all ranks, and
with it the number of experts' slots. Recipes of more ranks than `PENSTOCK_TEST_RANKS` (2) are
skipped: 16 runs all.
"""

import argparse
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from printed_recipes import RECIPES, Recipe, RecipeServer, recipes
from tiny_models import make_checkpoint

from penstock.cli.flags import add_serve_flags, normalize, settings
from penstock.config.load import given_settings
from penstock.config.trtllm_fields import canonical

MOST_RANKS = int(os.environ.get("PENSTOCK_TEST_RANKS", "2"))
SIBLINGS = Path(__file__).parents[1] / "siblings"
HEADS = {"num_attention_heads": 8, "num_hidden_layers": 4, "max_position_embeddings": 512}
NUM_SLOTS = 16  # for the eight experts of the sibling, on eight ranks
OUTPUT = 16
CPU = ("--device", "cpu", "--num_threads", "1")

pytestmark = pytest.mark.skipif(not RECIPES, reason="the recipes are not beside us")


@dataclass(frozen=True)
class Printed:
    recipe: Recipe
    model: str

    @functools.cached_property
    def asked(self) -> dict[str, Any]:
        """By the schema's names, those of sections with a dot."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_serve_flags(parser)
        parser.set_defaults(needs_model=False)
        words = [word for word in self.recipe.argv if not word.startswith("${")]
        words = [word for word in words if not word.endswith((".yaml", "_options", "--config"))]
        values, _ = settings(parser.parse_args(normalize(words)))
        flags, file = given_settings(values), canonical(yaml.safe_load(self.recipe.file) or {})
        return dict(_flat(flags)) | dict(_flat(file))

    @property
    def num_ranks(self) -> int:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        tp_size, pp_size = (self.asked.get(name, 1) for name in sizes)
        return tp_size * pp_size


def _flat(settings: dict[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{section}{name}.")
        else:
            yield section + name, value


def _variants(file: str) -> list[tuple[str, str]]:
    """Of a file whose groups of settings are commented out but for one: (title, that group)."""
    groups = re.findall(r"(?m)^# (\w.*?: .*)\n((?:(?:# )?\w+: \w+\n?)+)", file)
    return [(title, re.sub(r"(?m)^# ", "", group)) for title, group in groups]


def printed() -> Iterator[Printed]:
    for recipe in recipes():
        if recipe.name.startswith("deepseek"):
            yield Printed(recipe, "deepseek_v3")
            if "moe_config" not in recipe.file:
                yield Printed(_wide(recipe), "deepseek_v3")
        elif recipe.name.startswith("gpt-oss"):
            has_ranks_for_heads = "enable_attention_dp: true" in recipe.file
            yield Printed(recipe, "gpt_oss" if has_ranks_for_heads else "gpt_oss, 8 heads")
        elif recipe.name.startswith("qwen3-next"):
            yield Printed(recipe, "qwen3_next, 8 heads")
        elif "parallel_config.yaml" in recipe.argv:
            for title, file in _variants(recipe.file):
                model = "qwen2_moe, 8 heads" if title.startswith("MoE") else "qwen2, 8 heads"
                name = f"{recipe.name}, {title}"
                yield Printed(replace(recipe, name=name, file=file), model)
        else:
            has_experts = "--ep_size" in recipe.argv
            yield Printed(recipe, "qwen2_moe, 8 heads" if has_experts else "qwen2, 8 heads")


def _wide(recipe: Recipe) -> Recipe:
    """With the block that the recipe prints for wide expert parallelism."""
    [text] = [path.read_text() for path in RECIPES if path.stem == "deepseek-r1"]
    [block] = re.findall(r"```yaml\n(moe_config:\n.*?)```", text, re.DOTALL)
    block = re.sub(r"num_slots: \d+", f"num_slots: {NUM_SLOTS}", block)
    return replace(recipe, name=f"{recipe.name}, wide", file=f"{recipe.file}\n{block}")


MULTI = [one for one in printed() if one.num_ranks > 1]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @functools.cache
    def find(model: str) -> Path:
        arch, _, has_heads = model.partition(", ")
        if not has_heads:
            return SIBLINGS / model
        experts = {"qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 32},
                   "gpt_oss": {"num_local_experts": 8},
                   "qwen3_next": {"num_experts": 8, "linear_num_key_heads": 4,
                                  "linear_num_value_heads": 8}}.get(arch, {})  # fmt: skip
        folder = tmp_path_factory.mktemp(arch)
        return make_checkpoint(folder, arch, **HEADS, **experts, intermediate_size=128)

    return find


@pytest.fixture(scope="module")
def one_rank(folder_of):
    """The answer of one rank with the recipe's number formats and drafts."""

    @functools.cache
    def ask_one(model: str, kv_dtype: str, decoding_type: str | None) -> str:
        own: dict[str, Any] = {"kv_cache_config": {"dtype": kv_dtype}}
        if decoding_type is not None:
            own["speculative_config"] = {"decoding_type": decoding_type}
        bare = Recipe("one rank", ("MODEL", "--config", "${FILE}"), yaml.safe_dump(own), ())
        with RecipeServer(bare, folder_of(model), further=CPU) as server:
            return answer(server)

    return ask_one


def answer(server: RecipeServer) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=240)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"temperature": 0, "max_tokens": OUTPUT}
    reply = client.chat.completions.create(model="m", messages=messages, **options)
    chunks = client.chat.completions.create(model="m", messages=messages, stream=True, **options)
    parts = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    said = _text(reply.choices[0].message)
    assert "".join(map(_text, parts)) == said
    return said


def _text(part: Any) -> str:
    return (getattr(part, "reasoning_content", None) or "") + (part.content or "")


@dataclass(frozen=True)
class Shown:
    """What `/version` says."""

    config: dict[str, Any]
    choices: dict[str, tuple[str, str]]  # value and reason, by setting

    @property
    def mesh(self) -> dict[str, int]:
        return self.config["mesh"]

    def stands_in(self, name: str, asked: str) -> bool:
        """For what a CPU has not, by its name."""
        value, reason = self.choices[name]
        return value.upper() == asked or reason.endswith(f"stands in for {asked}")


KV_DTYPES = {"fp8": "float8_e4m3fn"}


def _is(name: str) -> Callable[[Shown, Any], bool]:
    return lambda shown, value: shown.config[name] == value


# What of `/version` shows that a setting is in force.
IN_FORCE: dict[str, Callable[[Shown, Any], bool]] = {
    "max_batch_size": _is("max_batch_size"),
    "max_num_tokens": _is("max_num_tokens"),
    "max_seq_len": _is("max_seq_len"),
    "tensor_parallel_size": _is("tp_size"),
    "pipeline_parallel_size": lambda shown, value: shown.mesh["pp"] == value,
    "moe_expert_parallel_size": lambda shown, value: shown.mesh["ep"] == value,
    "moe_tensor_parallel_size": lambda shown, value: (
        shown.config["tp_size"] // shown.mesh["ep"] == value
    ),
    "enable_attention_dp": lambda shown, value: (
        (shown.mesh["dp"], shown.mesh["tp"])
        == ((shown.config["tp_size"], 1) if value else (1, shown.config["tp_size"]))
    ),
    "attention_dp_config.enable_balance": lambda shown, value: (
        (shown.config["balance"] is not None) == value
    ),
    "attention_dp_config.batching_wait_iters": lambda shown, value: (
        shown.config["balance"]["batching_wait"] == value
    ),
    "attention_dp_config.timeout_iters": lambda shown, value: (
        shown.config["balance"]["timeout"] == value
    ),
    "cuda_graph_config.enable_padding": _is("graph_padding"),
    "cuda_graph_config.max_batch_size": lambda shown, _: (
        shown.choices["graph_batch_sizes"] == ("none", "graphs exist on GPUs only")
    ),
    "kv_cache_config.dtype": lambda shown, value: shown.config["kv_dtype"] == KV_DTYPES[value],
    "kv_cache_config.free_gpu_memory_fraction": _is("kv_memory_fraction"),
    "stream_interval": lambda shown, value: shown.choices["stream_interval"][0] == str(value),
    "num_postprocess_workers": lambda shown, value: (
        shown.choices["num_postprocess_workers"] == (str(value), "set by num_postprocess_workers")
    ),
    "speculative_config.decoding_type": lambda shown, value: (
        shown.config["drafting"]["type"] == f"{value}Drafting"
    ),
    "speculative_config.max_draft_len": lambda shown, value: (
        shown.config["drafting"]["max_drafts"] == value
    ),
    "moe_config.backend": lambda shown, value: (
        shown.stands_in("moe_backend", value) or shown.config["moe_all_to_all"]
    ),
    "moe_config.max_num_tokens": _is("moe_max_tokens"),
    "moe_config.load_balancer.num_slots": lambda shown, value: (
        shown.config["expert_slots"]["num_slots"] == value
    ),
    "moe_config.load_balancer.layer_updates_per_iter": lambda shown, value: (
        shown.config["expert_slots"]["layer_updates"] == value
    ),
}
# Of a command: the address is the client's to find; the rest asks for nothing that could be shown.
ELSEWHERE = {"model", "host", "port", "backend", "trust_remote_code", "log_level"}


def test_every_recipe_for_several_gpus_is_found_and_every_setting_has_a_place():
    assert len(MULTI) == 14
    assert {one.num_ranks for one in MULTI} == {4, 8, 16}
    for one in MULTI:
        assert set(one.asked) <= IN_FORCE.keys() | ELSEWHERE, one.recipe.name


@pytest.mark.parametrize("one", MULTI, ids=lambda one: f"{one.recipe.name}, {one.num_ranks} ranks")
def test_a_recipe_serves_over_its_ranks_with_every_setting_in_force(one, folder_of, one_rank):
    if one.num_ranks > MOST_RANKS:
        pytest.skip(f"PENSTOCK_TEST_RANKS={one.num_ranks} runs it")
    kv_dtype = one.asked.get("kv_cache_config.dtype", "auto")
    expected = one_rank(one.model, kv_dtype, one.asked.get("speculative_config.decoding_type"))
    with RecipeServer(one.recipe, folder_of(one.model), further=CPU) as server:
        said = server.version()
        shown = Shown(
            said["config"],
            {choice["setting"]: (choice["value"], choice["reason"]) for choice in said["choices"]},
        )
        wrong = {
            name: value
            for name, value in one.asked.items()
            if name not in ELSEWHERE and not IN_FORCE[name](shown, value)
        }
        assert not wrong, (wrong, shown)
        assert len(said["rank_weight_bytes"]) == one.num_ranks
        assert answer(server) == expected
        log = server.log.read_text()
        ignored = set(re.findall(r"(?m) W \[\S+?\] (\S+?)(?:: \S+)? is ignored", log))
        assert ignored <= {"trust_remote_code"} and "Traceback" not in log
