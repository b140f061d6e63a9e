"""Rebalancing on a machine that only takes time: 24 layers of 256 experts in 288 slots of 32 ranks,
as DeepSeek-R1's, at the speed of FP8 experts on an H200 and of a network of 400 Gbit/s."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch

from penstock.parallel.mesh import RoleGroup
from penstock.runtime.expert_balancer import LoadRecord
from penstock.runtime.expert_schedule import BalanceSchedule, moves
from penstock.types.expert_slots import first_slots, imbalance, rank_loads

LAYERS, EXPERTS, SLOTS, RANKS = 24, 256, 288, 32
PER_RANK = SLOTS // RANKS
PAIRS = 32 * 128 * 8  # tokens and their experts of a step, in each layer
OTHER_S, PAIR_S = 0.25e-3, 0.15e-6  # of a layer: what is not experts; a pair of token and expert
EXPERT_S = 44e6 / 50e9  # an expert's weights through the network of a rank


def test_a_skewed_load_is_balanced_within_200_steps_and_no_step_takes_twice_as_long():
    rng = np.random.default_rng(1)
    share_LE = rng.permuted(np.tile(1 / np.arange(1, EXPERTS + 1) ** 0.8, (LAYERS, 1)), axis=1)
    share_LE /= share_LE.sum(1, keepdims=True)
    totals = np.zeros((LAYERS, EXPERTS), np.int64)
    measured: list[list[list[int]]] = []
    slots_LS = [first_slots(EXPERTS, SLOTS, RANKS)] * LAYERS
    schedule = BalanceSchedule(
        slots_LS, EXPERTS, RANKS, 1,
        lambda: measured.append(totals.tolist()), lambda: measured[-1],
    )  # fmt: skip
    times, ratios, num_changes = [], [], []
    for _ in range(200):
        seconds, changes = 0.0, schedule.next_step()
        for change in changes:
            busy: Counter[tuple[str, int]] = Counter()
            for source, target in moves(slots_LS[change.layer], change.experts_S):
                busy["out", source // PER_RANK] += 1
                busy["in", target // PER_RANK] += 1
            seconds += max(busy.values()) * EXPERT_S
            slots_LS[change.layer] = change.experts_S
        num_changes.append(len(changes))
        loads_LE = rng.poisson(PAIRS * share_LE)
        totals += loads_LE
        for loads, slots in zip(loads_LE.tolist(), slots_LS, strict=True):
            seconds += OTHER_S + max(rank_loads(loads, slots, RANKS)) * PAIR_S
        times.append(seconds)
        ratios.append(
            [
                imbalance(loads, slots, RANKS)
                for loads, slots in zip(loads_LE, slots_LS, strict=True)
            ]
        )
    assert min(ratios[0]) > 1.5
    assert np.mean(ratios[-16:], axis=0).max() < 1.2
    assert max(num_changes) == 1 and sum(num_changes) >= LAYERS
    while_moving = [one for one, changes in zip(times, num_changes, strict=True) if changes]
    assert max(while_moving) == max(times) < 2 * np.median(while_moving)
    assert max(times) < 2 * times[0]  # nothing has moved then
    assert np.median(times[-16:]) < 0.6 * times[0]


def test_an_expert_comes_from_slots_that_have_it_in_turns():
    assert moves((0, 1, 0, 2), (0, 1, 0, 2)) == []
    assert moves((0, 1, 0, 2, 0, 1), (0, 2, 1, 0, 2, 0)) == [
        (3, 1), (1, 2), (0, 3), (3, 4), (2, 5)
    ]  # fmt: skip


def test_the_load_is_written_now_and_then(tmp_path):
    layer = SimpleNamespace(layer=3, num_experts=4, load_S=torch.full((4,), 9))
    record = LoadRecord([layer], RoleGroup(1, 0), tmp_path / "load.json")
    for step in range(204):
        layer.load_S[1] += 1
        assert (tmp_path / "load.json").exists() == (step > 103)
        record.turn()
    written = json.loads((tmp_path / "load.json").read_text())
    assert written == {"num_experts": 4, "load": {"3": [0, 200, 0, 0]}}
