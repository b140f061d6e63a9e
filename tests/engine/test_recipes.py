"""The published recipes, run as printed: `trtllm-serve` with their flags and files, their requests.

Only the model (a tiny checkpoint), the port and the number of GPUs are replaced.
"""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from printed_recipes import RECIPES, Recipe, RecipeServer, recipes
from server_process import Server

from penstock.hub.folder import local_folder

ONE_GPU = {"--tp_size": "1", "--ep_size": "1", "--pp_size": "1"}
DEEPSEEK = Path(__file__).parents[1] / "siblings" / "deepseek_v3"  # has the MTP head it asks for

pytestmark = pytest.mark.skipif(not RECIPES, reason="the recipes are not beside us")


def samples() -> dict[str, dict[str, Any]]:
    """The answers printed in the recipes, by their kind."""
    printed = [
        json.loads(line)
        for path in RECIPES
        for line in re.findall(r"(?m)^\{\"id\":.*\}$", path.read_text(encoding="utf-8"))
    ]
    return {answer["object"]: answer for answer in printed}


def check_shape(ours: Any, printed: Any, where: str = "answer") -> None:
    """The printed keys in their order, newer ones behind them; values of the printed types."""
    assert type(ours) is type(printed), where
    if isinstance(printed, dict):
        assert list(ours)[: len(printed)] == list(printed), where
        for key, value in printed.items():
            check_shape(ours[key], value, f"{where}.{key}")
    elif isinstance(printed, list):
        for mine, theirs in zip(ours, printed, strict=True):
            check_shape(mine, theirs, where)


def send(arguments: tuple[str, ...], server: Server) -> tuple[str, httpx.Response]:
    """What curl would send; returns the path too."""
    url = next(word for word in arguments if word.startswith("http"))
    path = "/" + url.split("/", 3)[3]
    given = dict(itertools.pairwise(arguments))
    name, _, value = given.get("-H", "Accept: */*").partition(": ")
    method = "POST" if "-d" in given else "GET"
    return path, httpx.request(
        method, server.url + path, headers={name: value}, content=given.get("-d"), timeout=120
    )


def test_every_recipe_is_found():
    found = list(recipes())
    assert {one.name.rpartition("-")[0] for one in found} == {path.stem for path in RECIPES}
    assert len(RECIPES) == 5
    assert all(one.requests for one in found)
    assert samples().keys() == {"text_completion", "chat.completion"}


def asked_in_vain(recipe: Recipe) -> set[str]:
    """Settings that need a warning, because they ask for something that is not here."""
    return {"trust_remote_code"} & {word.strip("-") for word in recipe.argv}


# The cheat sheet also prints shorter forms of its own commands.
SERVED = [one for one in recipes() if one.file or {"--port", "--pp_size"} & set(one.argv)]


@pytest.mark.parametrize("recipe", SERVED, ids=lambda one: one.name)
def test_a_recipe_serves_and_answers_its_own_requests(recipe):
    model = DEEPSEEK if recipe.name.startswith("deepseek") else local_folder("tiny")
    one_rank = re.sub(r"(?m)^(tensor_parallel_size): \d+", r"\1: 1", recipe.file)
    with RecipeServer(replace(recipe, file=one_rank), model, ONE_GPU) as server:
        answered = set()
        for request in recipe.requests:
            path, reply = send(request, server)
            assert reply.status_code == 200, reply.text
            answered.add(path)
            if not path.endswith("completions"):
                continue
            body = json.loads(dict(itertools.pairwise(request))["-d"])
            answer = reply.json()
            check_shape(answer, samples()[answer["object"]])
            assert answer["model"] == server.version()["model"], "of what answers"
            usage = answer["usage"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            [choice] = answer["choices"]
            is_full = usage["completion_tokens"] == body["max_tokens"]
            assert choice["finish_reason"] == ("length" if is_full else "stop")
        assert "/health" in answered and len(answered) >= 2
        said = server.log.read_text()
        assert "Application startup complete." in said
        assert "Traceback" not in said
        warned = set(re.findall(r"(?m) W \[http\] (\S+?)(?:: \S+)? is ignored: ", said))
        assert warned == asked_in_vain(recipe)
