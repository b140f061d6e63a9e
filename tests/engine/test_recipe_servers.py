"""`penstock serve --recipe NAME` on a CPU: small models of the recipes' architectures answer.

A trained sibling stands in for the model, one rank for the GPUs; all else is the recipe's.
"""

import re
from pathlib import Path

import pytest
from server_process import Server

from penstock.config.recipe import recipe_named, recipe_names

SIBLINGS = Path(__file__).parents[1] / "siblings"
ONE_RANK = ("--tp_size", "1", "--ep_size", "1", "--pp_size", "1", "--num_threads", "1")
# By how the name of the recipe begins; the other ones are dense.
STAND_IN = {
    "deepseek-r1": SIBLINGS / "deepseek_v3",
    "gpt-oss": SIBLINGS / "gpt_oss",
    "qwen3-next": SIBLINGS / "qwen3_next",
    "qwen1.5-moe": SIBLINGS / "qwen2_moe",
}


def stand_in(name: str) -> str | Path:
    return next((path for begin, path in STAND_IN.items() if name.startswith(begin)), "tiny")


def unlike() -> list[str]:
    """Recipes that are not alike but for the model and the number of GPUs, which are replaced."""
    replaced = ("model", "tensor_parallel_size", "moe_expert_parallel_size")
    kinds: dict[str, str] = {}
    for name in recipe_names():
        asked = recipe_named(name).settings.items()
        rest = {setting: value for setting, value in asked if setting not in replaced}
        kinds.setdefault(f"{stand_in(name)} {rest}", name)
    return [*kinds.values()]


@pytest.mark.parametrize("name", unlike())
def test_a_recipe_serves_a_small_model_of_its_kind(name):
    asked, own = recipe_named(name).settings, {}
    if "speculative_config" in asked:  # whatever a draft costs on a busy machine
        own["speculative_config"] = {**asked["speculative_config"], "adaptive_draft_len": False}
    if "load_balancer" in asked.get("moe_config", {}):  # with one rank nothing is to balance
        own["moe_config"] = {"load_balancer": None}
    with Server(stand_in(name), "--recipe", name, *ONE_RANK, **own) as server:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        reply = server.post("/v1/chat/completions", messages=messages, max_tokens=48, temperature=0)
        assert reply["usage"]["completion_tokens"] > 0
        message = reply["choices"][0]["message"]
        assert "Paris" in (message["content"] or "") + (message["reasoning_content"] or "")
        said = server.log.read_text()
        if "speculative_config" in asked:  # the sibling's MTP head is trained
            assert reply["choices"][0]["avg_decoded_tokens_per_iter"] > 1.5
            assert "speculative_config is ignored" not in said
        if "max_batch_size" in asked:
            assert f"recipe {name} sets max_batch_size={asked['max_batch_size']}" in said
        assert re.search(rf"recipe {re.escape(name)}, replaced by yours: model=", said)
        assert "Traceback" not in said
