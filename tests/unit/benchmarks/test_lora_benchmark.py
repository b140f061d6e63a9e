"""What benchmarks/lora.py asks of an engine, of which there is a stand-in here, and the adapters
that it writes."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import lora
from shapes import ROWS, model_folder

from penstock.config.run import LoraRun
from penstock.kernels.attention.backend import get_backend
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.runtime.adapters import AdapterField

CPU = torch.device("cpu")


class StandIn:
    """An engine that says what it was asked, and has all adapters that it is given."""

    asked: ClassVar[list] = []

    def __init__(self, model, lora_config=None, **settings):
        self.names = [Path(one).name for one in (lora_config or {}).get("lora_dir", ())]
        self.asked.append((len(self.names), []))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, batch, params, use_tqdm, lora_request):
        used = [one and one.lora_name for one in lora_request]
        assert set(used) - {None} <= set(self.names) and len(used) == len(batch)
        self.asked[-1][1].append(len(set(used)))
        tokens = SimpleNamespace(token_ids=range(params.max_tokens))
        return [SimpleNamespace(outputs=[tokens]) for _ in batch]


def test_it_compares_an_engine_without_adapters_with_one_that_has_them(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(lora, "LLM", StandIn)
    StandIn.asked.clear()
    output = tmp_path / "found.json"
    sizes = ["--adapters", "3", "--concurrency", "7", "--tokens", "5", "--runs", "1"]
    assert lora.main(["--rows", "tiny", *sizes, "--output", str(output)]) == 0
    # Without, then with three in one batch, then the same engine without; each warmed up.
    assert StandIn.asked == [(0, [1, 1]), (3, [3, 3, 1, 1])]
    assert "with / base" in capsys.readouterr().out and "ratio_none" in output.read_text()


def test_its_adapters_fit_the_model(tmp_path):
    row = ROWS["tiny"]
    modules = lora.ATTENTION + lora.MLP
    first, second = lora.write_adapters(tmp_path, row.config, modules, rank=4, count=2)
    with model_folder(row) as folder:
        spec = parse_model_spec(Path(folder))
        model = build_model(spec, RankMesh.single(), torch.float32, CPU, get_backend("reference"))
    field = AdapterField(LoraRun(max_rank=4, num_slots=2, num_host=2), model, 2, CPU)
    read = [field.host._reader.read(one) for one in (first, second)]
    assert set(read[0].layers) == set(field._slots)  # every linear layer has one
    assert read[0].num_bytes == read[1].num_bytes > 0
