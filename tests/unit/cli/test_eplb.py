"""`penstock eplb`: what was recorded becomes a file that `moe_config.load_balancer` names."""

import json

import pytest

from penstock.cli.main import main
from penstock.config.schema import EngineConfig
from penstock.types.expert_slots import check_slots, imbalance

LOADS = {3: [900, 800, 10, 20, 30, 10, 5, 40], 5: [7] * 8}


def exit_code(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def record(folder, load):
    (folder / "load.json").write_text(json.dumps({"num_experts": 8, "load": load}))
    return str(folder / "load.json")


def test_slots_by_recorded_load_are_a_setting(tmp_path, capsys):
    output = str(tmp_path / "eplb.yaml")
    flags = ["--ep_size", "4", "--num_slots", "16", "--layer_updates_per_iter", "2", "-o", output]
    assert exit_code(["eplb", record(tmp_path, LOADS), *flags]) == 0
    assert "layer 3: 1.92 -> 1.0" in capsys.readouterr().out
    config = EngineConfig(moe_config={"load_balancer": output})
    found = config.moe_config.load_balancer
    sent = json.loads(config.model_dump_json(include={"moe_config"}))  # as the engine process is
    assert EngineConfig(**sent).moe_config.load_balancer == found
    assert (found.num_slots, found.layer_updates_per_iter) == (16, 2)
    assert list(found.initial_global_assignments) == [3, 5]
    for layer, slots in found.initial_global_assignments.items():
        check_slots("it", slots, 8, 4)
        assert imbalance(LOADS[layer], slots, 4) < 1.1


@pytest.mark.parametrize(
    ("load", "flags", "message"),
    [
        ({3: [1] * 7}, ["--ep_size", "4"], "layer 3 has no load for each of 8 experts"),
        ({3: [1] * 8}, ["--ep_size", "1"], "one rank has all experts"),
        ({3: [1] * 8}, ["--ep_size", "4", "--num_slots", "9"], "use 12"),
        ([], ["--ep_size", "4"], "is no record of experts' load"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, load, flags, message):
    assert exit_code(["eplb", record(tmp_path, load), *flags]) == 2
    assert message in capsys.readouterr().err
