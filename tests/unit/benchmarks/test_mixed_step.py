"""The program that compares and times mixed steps, where there is no GPU: graphs are stand-ins."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import mixed_step

from penstock.runtime.step_layout import StepShape


def test_it_finds_padded_steps_right_and_times_them(tmp_path, capsys):
    output = tmp_path / "found.json"
    sizes = ["--decodes", "1", "2", "--tokens", "0", "5", "--repeats", "1", "--context", "32"]
    assert mixed_step.main(["--rows", "tiny", *sizes, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    [check] = found["checks"]
    assert check["num_in_graphs"] == check["num_steps"] > 10 and check["num_far"] == 0
    kinds = {(one["decodes"], one["tokens"]): one["ran_as"] for one in found["times"]}
    assert kinds == {(1, 0): "eager", (1, 5): "graph", (2, 0): "eager", (2, 5): "graph"}
    assert "right: Found(row='tiny'" in capsys.readouterr().out


def test_a_step_that_is_packed_wrongly_is_found(monkeypatch):
    pack = StepShape.pack

    def shifted(self, plan, padding_row, prefill_ids):
        return pack(self, plan, padding_row, lambda row: prefill_ids(row)[::-1])

    monkeypatch.setattr(StepShape, "pack", shifted)
    assert not mixed_step.check("tiny", "float32", False).is_right


def test_kernels_that_count_are_those_of_gemms_experts_and_attention():
    counted = ("nvjet_tst_128x64", "_grouped_gemm", "_decode", "_prefill", "_mla_attend", "_step")
    assert all(map(mixed_step.is_counted, counted))
    assert not any(map(mixed_step.is_counted, ("_decode_inputs", "_add_rms_norm", "_silu_mul")))
