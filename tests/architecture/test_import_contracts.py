"""The layers of the map, and torch only where tensors are computed."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
from server_process import Server

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "transformers")
LIGHT_USES = {
    "the command line": """
from penstock.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit as end:
    assert end.code == 0
""",
    "settings": """
from penstock.config.load import load_config
assert load_config({"model": "tiny"}, sets=["max_batch_size=4"]).max_batch_size == 4
""",
    "the scheduler and its loop": """
import penstock.core.loop
from penstock.core.kv.groups import FullGroup
from penstock.core.kv.manager import KVManager
assert KVManager([FullGroup(8, 4, True, True)])
""",
    "the API server": """
from penstock.config.schema import EngineConfig
from penstock.frontend.start import load_text_side
from penstock.hub.folder import local_folder
tokenizer, template, _ = load_text_side(local_folder("tiny"), EngineConfig(model="tiny"))
assert tokenizer.decode(tokenizer.encode("The river", False)) == "The river" and template
""",
    "the Python API": """
import penstock
assert penstock.LLM.generate and penstock.SamplingParams(temperature=0).is_greedy
""",
    "the benchmark's client": """
import penstock.cli.bench
from penstock.bench.datasets import DATASETS, DatasetOptions
from penstock.cli.bench import load_tokenizer
assert len(DATASETS["random-ids"](DatasetOptions(num_prompts=3), load_tokenizer("tiny"))) == 3
""",
    "the server": """
from penstock.server import lifespan
from penstock.server.launch import bind
bind("127.0.0.1", 0).close()
assert lifespan.FirstApiServer
""",
}


def test_the_import_contracts_hold():
    command = Path(sysconfig.get_path("scripts"), "lint-imports")
    done = subprocess.run([command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("name", LIGHT_USES)
def test_light_parts_import_nothing_heavy(name):
    show = (
        f"\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", LIGHT_USES[name] + show]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="no /proc to look into")
def test_only_the_engine_process_of_a_server_has_torch_in_memory():
    with Server("tiny", num_postprocess_workers=2) as server:
        server.post("/v1/completions", prompt="Hi", max_tokens=2)
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        first = psutil.Process(server.process.pid)
        family = {" ".join(one.cmdline()): one for one in (first, *first.children())}
        with_torch = [
            command
            for command, one in family.items()
            if "libtorch" in Path(f"/proc/{one.pid}/maps").read_text()
        ]
        assert len(family) == 4  # two API servers, the engine, a chat template
        assert len(with_torch) == 1 and "penstock.engine_process" in with_torch[0]
