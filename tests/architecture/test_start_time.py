"""`penstock --help` answers at once, the engine is started early, a first request is not late.

Nobody waits for libraries unneeded.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MAX_HELP_S = 0.5
OF_THE_API_SERVER = {
    *("numpy", "asyncio", "uvicorn", "starlette", "tokenizers", "jinja2", "rich"),
    *("huggingface_hub", "httpx"),
}
OF_NOBODY = {"transformers", "scipy", "sympy", "pandas", "torch._dynamo", "torch._inductor"}
OF_THE_ENGINE = {"torch", "triton"}


def best_of_five_s(*arguments: str) -> float:
    """Processor time, as others may use this machine, too."""
    taken = []
    for _ in range(5):
        begun = os.times().children_user
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        taken.append(os.times().children_user - begun)
    return min(taken)


def test_help_takes_little_longer_than_python_itself():
    taken_s = best_of_five_s("-m", "penstock", "--help") - best_of_five_s("-c", "pass")
    assert taken_s < MAX_HELP_S


FIRST_ANSWER = """
import sys
from local_engine import LocalEngine
engine = LocalEngine("tiny", device="cpu")
known = set(sys.modules)
engine.generate([[5, 6, 7]] * 2, 4)
engine.generate([[5, 6, 7]] * 2, 4, temperature=1.0, top_p=0.9, logprobs=2, seed=1)
new = sorted(set(sys.modules) - known)
assert len(new) < 20, new[:20]
show()
"""

AT_THE_SPAWN = """
import subprocess, sys
from penstock.cli.main import main

def spawn(*args, **kwargs):
    show()
    sys.exit("the engine would start now")

subprocess.Popen.__init__ = spawn
main(["serve", "tiny", "--host", "127.0.0.1", "--port", "0"])
"""

API_SERVER = """
import penstock.server.launch, penstock.server.lifespan, penstock.server.api_server_process
show()
"""


def modules_of(script: str) -> set[str]:
    """What has been imported where `script` says `show()`."""
    fixtures = str(Path(__file__).parents[1] / "fixtures")
    begin = (
        f"import json, sys; sys.path.insert(0, {fixtures!r})\n"
        "def show(): print(json.dumps(list(sys.modules)), flush=True)\n"
    )
    command = [sys.executable, "-c", begin + script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return set(json.loads(done.stdout))


def test_the_engine_is_spawned_before_the_server_imports_what_it_needs_itself():
    modules = modules_of(AT_THE_SPAWN)
    assert "penstock.frontend.engine_handle" in modules
    assert modules & (OF_THE_ENGINE | OF_THE_API_SERVER | OF_NOBODY) == set()


def test_a_front_end_needs_nothing_of_the_engine():
    modules = modules_of(API_SERVER)
    assert "uvicorn" in modules
    assert modules & (OF_THE_ENGINE | OF_NOBODY | {"huggingface_hub"}) == set()


def test_an_engine_and_its_first_answer_import_nothing_unneeded():
    modules = modules_of(FIRST_ANSWER)
    assert "torch" in modules
    # asyncio, numpy: of torch itself; triton: where there is a GPU
    needed = {"numpy", "asyncio"}
    assert modules & (OF_THE_API_SERVER - needed | OF_NOBODY | {"triton"}) == set()
