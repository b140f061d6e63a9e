"""Wide-EP: experts in slots, tokens sent to the ranks of their experts, experts that move by load.
Greedy tokens are one rank's. CPU, gloo."""

import shutil

import pytest
from fp8_models import make_fp8_checkpoint
from rank_engines import SIBLINGS, RankEngines
from safetensors.torch import load_file, save_file

from penstock.layers import expert_dispatch
from penstock.layers.expert_dispatch import ExpertDispatch
from penstock.runtime.expert_balancer import ExpertBalancer
from penstock.types.expert_slots import first_slots, imbalance

RANKS = 4
MTP = {"decoding_type": "MTP", "max_draft_len": 1, "adaptive_draft_len": False}
STATIC_FP8 = "fp8 static"


def skewed(folder):
    """DeepSeek's sibling, whose router likes two experts most."""
    shutil.copytree(SIBLINGS / "deepseek_v3", folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].clone()
            tensors[name][:2] += 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engines_of(folder, num_ranks=RANKS, *, backend="WIDEEP", **further):
    balancer = {"layer_updates_per_iter": 1} | further.pop("load_balancer", {})
    settings = {"tensor_parallel_size": num_ranks, "moe_expert_parallel_size": num_ranks}
    settings |= {"moe_config": {"backend": backend, "load_balancer": balancer}}
    return RankEngines(folder, **(settings | further))


def balancer_of(engines) -> ExpertBalancer:
    runner = engines.several.runner
    [turn] = runner.before_steps
    return turn.__self__


def test_a_skewed_router_is_balanced_while_it_serves(tmp_path, monkeypatch):
    """With attention DP, MTP, chunks, prefix reuse, preemption and aborts. The experts that are
    liked most begin on one rank; what is sent follows from the tokens' experts."""
    sent, expected = [0], [0]
    real, real_sent = expert_dispatch.exchanged, ExpertDispatch._sent

    def counted(x_MD, sent_R, received_R, role):
        sent[0] += (sum(sent_R) - sent_R[role.rank]) * x_MD.shape[1] * x_MD.element_size()
        return real(x_MD, sent_R, received_R, role)

    def asked(dispatch, compute, x_TD, slots_TK, choices_TC):
        returned = [0]

        def computed(come_ND, *choices):
            returned[0] = len(come_ND)
            return compute(come_ND, *choices)

        ranks = [set(row) for row in (slots_TK // 4).tolist()]
        own = sum(dispatch.rank in row for row in ranks)
        there = sum(map(len, ranks)) - own
        y_TD = real_sent(dispatch, computed, x_TD, slots_TK, choices_TC)
        back = returned[0] - own
        width = x_TD.shape[1]
        expected[0] += 4 * (there * (width + 2 * slots_TK.shape[1]) + back * width)
        return y_TD

    monkeypatch.setattr(expert_dispatch, "exchanged", counted)
    monkeypatch.setattr(ExpertDispatch, "_sent", asked)
    first = [0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7]
    engines = engines_of(
        skewed(tmp_path), enable_attention_dp=True, speculative_config=MTP,
        load_balancer={
            "num_slots": 16,
            "initial_global_assignments": {layer: first for layer in (1, 2, 3, 4)},
        },
    )  # fmt: skip
    try:
        schedule, layers = balancer_of(engines)._schedule, balancer_of(engines)._layers
        assert {layer.layer for layer in layers} == {1, 2, 3, 4}  # the head's is the last one
        assert {layer.experts_S for layer in layers} == {tuple(first)}
        engines.check_tokens()

        def imbalances(slots_of):
            both = zip(schedule._loads_LE, layers, strict=True)
            return [imbalance(loads_E, slots_of(layer), RANKS) for loads_E, layer in both]

        while max(imbalances(lambda layer: layer.experts_S)) >= 1.2:
            engines.check_tokens()
        assert schedule._num_steps < 200
        assert min(imbalances(lambda layer: first)) > 1.5
        engines.check_traffic()
        assert 0 < sent[0] == expected[0]
    finally:
        engines.close()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (STATIC_FP8, {"enable_attention_dp": True}),
        ("gpt_oss", {"enable_attention_dp": True, "backend": "AUTO"}),  # tokens are gathered
        ("qwen2_moe", {}),  # ranks have the same tokens
    ],
)
def test_experts_of_every_kind_move_and_tokens_stay(tmp_path, kind, settings):
    folder = SIBLINGS / kind
    if kind == STATIC_FP8:
        shape = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
        shape |= {"max_position_embeddings": 256}
        folder = make_fp8_checkpoint(tmp_path, kind, "qwen3_moe", **shape)
    engines = engines_of(folder, 2, load_balancer={"num_slots": 10}, **settings)
    try:
        layers = balancer_of(engines)._layers
        first = first_slots(8, 10, 2)
        assert all(layer.experts_S == first for layer in layers)
        engines.check_tokens()
        assert all(layer.experts_S != first for layer in layers)
        assert all(len(set(layer.experts_S)) == 8 for layer in layers)
    finally:
        engines.close()
