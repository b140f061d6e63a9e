"""The published recipes, run as printed: `trtllm-serve` with their flags and files, their requests.

Only the model (a tiny checkpoint), the port and the number of GPUs are replaced.
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import Server
from waiting import free_port

from penstock.hub.folder import local_folder

FOLDER = Path(__file__).parents[3] / "shared" / "recipes"
RECIPES = sorted(FOLDER.glob("*")) if FOLDER.is_dir() else []
TRTLLM_SERVE = Path(sysconfig.get_path("scripts"), "trtllm-serve")
ONE_GPU = {"--tp_size": "1", "--ep_size": "1", "--pp_size": "1"}
DEEPSEEK = Path(__file__).parents[1] / "siblings" / "deepseek_v3"  # has the MTP head it asks for

pytestmark = pytest.mark.skipif(not RECIPES, reason="the recipes are not beside us")


@dataclass(frozen=True)
class Recipe:
    name: str
    argv: tuple[str, ...]  # of trtllm-serve, model first
    file: str  # YAML, empty where the command names none
    requests: tuple[tuple[str, ...], ...]  # of curl


class RecipeServer(Server):
    def __init__(self, recipe: Recipe) -> None:
        self.port = free_port()
        self.url = f"http://localhost:{self.port}"
        self._folder = tempfile.TemporaryDirectory()
        self.log = Path(self._folder.name, "server.log")
        file = Path(self._folder.name, "config.yml")
        file.write_text(re.sub(r"(?m)^(tensor_parallel_size): \d+", r"\1: 1", recipe.file))
        model = DEEPSEEK if recipe.name.startswith("deepseek") else local_folder("tiny")
        command = [TRTLLM_SERVE, model]
        for flag, word in itertools.pairwise(recipe.argv):
            if flag == "--port":
                word = str(self.port)
            elif word.startswith("${") or word.endswith(".yaml"):
                word = str(file)
            command.append(ONE_GPU.get(flag, word))
        if "--port" not in command:
            command += ["--port", str(self.port)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)


def commands(text: str, program: str) -> list[tuple[str, ...]]:
    """Arguments of every command line of `program`, however many lines it takes."""
    joined = re.sub(r"\\\n *", " ", text)
    found = re.findall(rf"(?m)^ *{program} ((?:[^\n']|'[^']*')+)$", joined)
    return [tuple(shlex.split(line)) for line in found]


def files(text: str) -> list[str]:
    """YAML of here-documents and of YAML code blocks."""
    here = re.findall(r"cat << EOF > \$\{EXTRA_LLM_API_FILE\}\n(.*?)\nEOF", text, re.DOTALL)
    blocks = re.findall(r"\.\. code-block:: yaml\n\n((?:    .*\n|\n)+)", text)
    return here + [re.sub(r"(?m)^    ", "", block) for block in blocks]


def recipes() -> Iterator[Recipe]:
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        requests = tuple(commands(text, "curl"))
        number = itertools.count(1)
        for argv in commands(text, "trtllm-serve"):
            takes_file = any(word.startswith("${") or word.endswith(".yaml") for word in argv)
            for file in files(text) if takes_file else [""]:
                yield Recipe(f"{path.stem}-{next(number)}", argv, file, requests)


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
    with RecipeServer(recipe) as server:
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
