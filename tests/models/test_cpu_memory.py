"""On a CPU the planned activations are those of the largest step: neither less nor far more."""

import ctypes
import dataclasses
import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.hub.folder import local_folder
from penstock.kernels.device import probe
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.profile_steps import largest_step, prompt_step
from penstock.runtime.rank import load_rank, wire_runner
from penstock.runtime.timeline import Timeline
from penstock.types.cache_spec import CacheSize
from penstock.types.sampling import SamplingParams
from penstock.types.step import LateInputs

MIB = 2**20
SHAPES = {
    "logits": ({"vocab_size": 100_000, "num_hidden_layers": 1}, {"max_batch_size": 128}),
    "mlp": ({"intermediate_size": 16384, "num_hidden_layers": 2}, {"max_num_tokens": 2048}),
    "mask": ({"num_hidden_layers": 2}, {"max_num_tokens": 4096, "max_seq_len": 8192}),
    "narrow": ({}, {"max_num_tokens": 64, "max_batch_size": 8}),
}


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measure(folder: Path, **settings: int) -> tuple[int, int]:
    """(bytes planned, bytes found) of the largest steps, each with all that a request can ask."""
    spec = parse_model_spec(folder)
    asked = EngineConfig(model=str(folder), device="cpu", load_format="dummy", **settings)
    config = resolve(asked, spec, probe(), str(folder))
    mesh = RankMesh.single()
    loaded = load_rank(config, spec, mesh, Timeline())
    blocks = (config.max_seq_len // config.tokens_per_block + 2,) * len(loaded.groups)
    cache = CacheSize(num_blocks=blocks, max_rows=config.max_batch_size)
    runner, _ = wire_runner(config, spec, loaded.model, loaded.groups, mesh, loaded.device, cache)
    everything = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=5)
    length = min(config.max_num_tokens, config.max_seq_len // 2)
    plans = [
        (prompt_step(1, 1, config), everything),
        (prompt_step(length, 1, config), SamplingParams(prompt_logprobs=5)),
        (largest_step(config), everything),
    ]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    for step_id, (plan, sampling) in enumerate(plans):
        joins = tuple(dataclasses.replace(join, sampling=sampling) for join in plan.joins)
        runner.forward(dataclasses.replace(plan, step_id=step_id, joins=joins))
        runner.sample(step_id, LateInputs()).wait()
    return loaded.memory.activations, _status("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the peak")
@pytest.mark.parametrize("name", SHAPES)
def test_planned_activations_are_those_of_the_largest_step(tmp_path: Path, name: str) -> None:
    """In a process of its own, whose peak nobody else moves."""
    fields, settings = SHAPES[name]
    folder = tmp_path / "model"
    shutil.copytree(local_folder("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    done = subprocess.run(
        [sys.executable, __file__, str(folder), json.dumps(settings)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    planned, found = json.loads(done.stdout.splitlines()[-1])
    assert found <= planned <= 1.5 * found + 48 * MIB, (planned / MIB, found / MIB)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
