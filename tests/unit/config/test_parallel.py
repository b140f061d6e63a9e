"""Every field of parallelism: what is made of it, or why it is refused and what to do instead."""

import re
from dataclasses import replace

import pytest
from made_up import CPU, DELTA, EIGHT_GPUS, EXPERTS, GPU, make_device, make_spec, reason, run

from penstock.config.launch import Place
from penstock.config.resolve import resolve
from penstock.config.run import PromptBalance
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.expert_slots import ExpertSlots
from penstock.types.mesh import MeshShape

DENSE = make_spec()
MOE = make_spec(moe=EXPERTS)
FEW = make_spec(moe=replace(EXPERTS, num_experts=4))
SIX = make_spec(num_heads=6, num_kv_heads=3)
ODD = make_spec(num_heads=12, num_kv_heads=6)
MIXED = make_spec(layer_windows=(16, None, 16, None), num_nextn_predict_layers=1)
WINDOWS = make_spec(layer_windows=(16,) * 4)
RECURRENT = make_spec(delta=DELTA)
ALTERNATING = make_spec(delta=replace(DELTA, layers=(True, False, True, False)))
ADP = {"tp_size": 8, "enable_attention_dp": True}


def slots(**asked):
    return {"tp_size": 8, "ep_size": 8, "moe_config": {"load_balancer": asked}}


def first_slots(layer, slots_of):
    return slots(initial_global_assignments={layer: slots_of})


REFUSED = [  # model, settings, why; the machine has 8 GPUs where none is named
    # How many ranks there are
    (DENSE, {"tp_size": 8}, "is 8, but there are 1 GPUs; lower it to 1", GPU),
    (DENSE, {"tp_size": 2}, "there are 0 GPUs; lower it to 1, or set device to cpu to run", CPU),
    (DENSE, {"tp_size": 8, "pp_size": 2},
     "tensor_parallel_size 8 x pipeline_parallel_size 2 = 16 ranks, but there are 8 GPUs"),
    (DENSE, {"cp_size": 4, "tp_size": 4},
     "tensor_parallel_size 4 x context_parallel_size 4 = 16 ranks, but there are 8 GPUs"),
    (DENSE, {"tp_size": 2, "pp_size": 2, "cp_size": 4},
     "tensor_parallel_size 2 x pipeline_parallel_size 2 x context_parallel_size 4 = 16 ranks"),
    (MOE, {"moe_expert_parallel_size": 8, "pp_size": 2},
     "tensor_parallel_size 8 x pipeline_parallel_size 2 = 16 ranks, but there are 8 GPUs"),
    (DENSE, {"dp_size": 2, "tp_size": 4},
     "tensor_parallel_size is 4, but there are 1 GPUs", GPU),
    (DENSE, {"dp_size": 4}, "data_parallel_size is 4, which takes 4 GPUs, 1 for each engine", CPU),
    (MOE, {"ep_size": 4, "moe_cluster_parallel_size": 2},
     "moe_cluster_parallel_size is 2, and tensor_parallel_size 4 x 2 = 8 ranks:"),
    (DENSE, {"orchestrator_type": "RAY", "dp_size": 2},
     "data_parallel_size is 2, and Ray starts the ranks of one engine"),
    # Heads and layers
    (DENSE, {"tp_size": 3}, "is 3, which does not divide the 8 attention heads"),
    (ODD, {"tp_size": 4}, "is 4, which is neither a divisor nor a multiple of the 6 KV"),
    (SIX, {"tp_size": 2}, "is 2, which is neither a divisor nor a multiple of the 3 KV"),
    (RECURRENT, {"tp_size": 4}, "is 4, which does not divide the 2 key heads of the model's rec"),
    (DENSE, {"pp_size": 5}, "pipeline_parallel_size is 5, but the model has 4 layers"),
    (MIXED, {"pp_size": 4},
     "of 4 layers stage 0 has 1, which do not have all kinds of cache"),
    (RECURRENT, {"pp_size": 2}, "stage 0 has 2, which do not have all kinds of cache"),
    (MIXED, {"pp_size": 2, "speculative_config":
             {"decoding_type": "SaveState", "output_directory": "states"},
             "kv_cache_config": {"enable_block_reuse": False}},
     "SaveState: rank 0 writes the files, of all prompts and layers; leave enable_attention_dp"),
    (ALTERNATING, {"pp_size": 2, "speculative_config": {"decoding_type": "NGram"}},
     "pipeline_parallel_size 2 and speculative_config (NGram) cannot be combined yet: recurrent"),
    # Tokens of a sequence
    (DENSE, {"cp_size": 3}, "context_parallel_size is 3; use a power of two"),
    (DENSE, {"cp_size": 2, "tp_size": 2, "enable_attention_dp": True},
     "context_parallel_size 2 and enable_attention_dp cannot be combined"),
    (WINDOWS, {"cp_size": 2}, "all layers of the model see a window"),
    (RECURRENT, {"cp_size": 2}, "recurrent layers, whose states cannot be split"),
    (DENSE, {"cp_config": {"cp_type": "RING", "tokens_per_block": 64}},
     "cp_config.tokens_per_block is 64, but kv_cache_config.tokens_per_block is 32"),
    (DENSE, {"cp_config": {"cp_type": "STAR"}},
     "cp_config.cp_type is 'STAR', which is not there; there are HELIX and RING"),
    (DENSE, {"cp_config": {"cp_type": "RING", "cp_anchor_size": 64}},
     "cp_config.cp_anchor_size cannot be used: it belongs to STAR"),
    (DENSE, {"cp_config": {"cp_type": "RING"}},
     "cp_config is given, but context_parallel_size is 1"),
    # Sequences
    (DENSE, {"tp_size": 8, "attention_dp_config": {"enable_balance": True}},
     "enable_balance is true, but enable_attention_dp is false"),
    (DENSE, {"attention_dp_config": {"enable_kv_cache_aware_routing": True}},
     "attention_dp_config.enable_kv_cache_aware_routing cannot be used: a request goes to"),
    (DENSE, ADP | {"attention_dp_config": {"timeout_iters": -1}},
     "attention_dp_config.timeout_iters is -1, it must be at least 0"),
    (DENSE, ADP | {"enable_attention_dp": "yes"}, "is 'yes', it must be true or false"),
    (DENSE, {"enable_lm_head_tp_in_adp": True},
     "enable_lm_head_tp_in_adp cannot be used: with att"),
    # Experts
    (FEW, {"tp_size": 8, "ep_size": 3},
     "3 x moe_tensor_parallel_size 2 = 6 ranks, but tensor_parallel_size is 8"),
    (FEW, {"tp_size": 8, "ep_size": 16},
     "16 x moe_tensor_parallel_size 1 = 16 ranks, but"),
    (FEW, {"tp_size": 8, "ep_size": 2, "moe_tensor_parallel_size": 2},
     "2 x moe_tensor_parallel_size 2 = 4 ranks"),
    (FEW, {"tp_size": 8, "ep_size": 8}, "is 8, but there are 4 experts; use a smaller"),
    (MOE, {"moe_tensor_parallel_size": 2},
     "1 x moe_tensor_parallel_size 2 = 2 ranks, but tensor_parallel_size is 1"),
    (MOE, {"cp_size": 2, "tp_size": 2, "ep_size": 2, "moe_tensor_parallel_size": 1},
     "= 2 ranks, but tensor_parallel_size x context_parallel_size = 4; give one of the two"),
    (DENSE, {"moe_expert_parallel_size": 8},
     "moe_expert_parallel_size is 8, but LlamaForCausalLM has no experts"),
    (DENSE, {"tp_size": 8, "moe_tensor_parallel_size": 4},
     "moe_tensor_parallel_size is 4, but LlamaForCausalLM has no experts"),
    (DENSE, slots() | {"ep_size": None}, "load_balancer is set, but LlamaForCausalLM"),
    (MOE, slots() | {"ep_size": 1}, "no rank has other experts than another"),
    (MOE, slots() | {"ep_size": 4},
     "is not one set of whole experts per rank; set moe_expert_parallel"),
    (MOE, slots() | {"tp_size": 4, "cp_size": 2},
     "cp 2 x tp 4 = 8 ranks, experts etp 1 x ep 8 is not one set of whole experts per rank"),
    (MOE, slots(num_slots=18), "8 expert-parallel ranks cannot share equally; use 24"),
    (MOE, first_slots(99, [0]), "layer 99 is given, but that is no layer"),
    (MOE, first_slots(1, [0]), "layer 1 has 1 slots, but num_slots is 8"),
    (MOE, first_slots(1, [0] * 8), "has no slot for expert 1"),
    # What sums and the like cannot have
    (DENSE, {"device": "cpu", "tp_size": 2, "allreduce_strategy": "oneshot"},
     "allreduce_strategy is ONESHOT, which needs GPUs", CPU),
    (DENSE, {"allreduce_strategy": "TWOSHOT"}, "it must be 'AUTO', 'NCCL' or 'ONESHOT'"),
    (DENSE, {"tp_size": "8"}, "tensor_parallel_size is '8', it must be an integer"),
    (DENSE, {"pp_size": 0}, "pipeline_parallel_size is 0, it must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: str(row[1]))
def test_what_cannot_be_is_refused(row):
    spec, asked, message, *machine = row
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(*(machine or [EIGHT_GPUS]), spec, **asked)


PLACE = Place(
    launcher="torchrun", rank=0, size=8, local_rank=0, local_size=8, host="a", port=1, node="a"
)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_size": 4}, "torchrun has started 8 ranks, but tensor_parallel_size 4 x "
                         "pipeline_parallel_size 1 = 4; make them equal"),
        ({"tp_size": 2, "pp_size": 2, "cp_size": 4},
         "tensor_parallel_size 2 x pipeline_parallel_size 2 x context_parallel_size 4 = 16"),
    ],
)  # fmt: skip
def test_ranks_that_a_launcher_has_not_started_are_refused(asked, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(EngineConfig(model="m", **asked), DENSE, EIGHT_GPUS, "/m", place=PLACE)


@pytest.mark.parametrize(
    ("asked", "mesh"),
    [
        ({"moe_expert_parallel_size": 8}, MeshShape(tp=8, ep=8)),
        ({"ep_size": 2, "moe_tensor_parallel_size": 4}, MeshShape(tp=8, ep=2)),
        ({"ep_size": 2, "moe_tensor_parallel_size": -1}, MeshShape(tp=2, ep=2)),
        ({"ep_size": 8, "cp_size": 2}, MeshShape(cp=2, tp=4, ep=8)),
        ({"tp_size": 2, "enable_attention_dp": "True"}, MeshShape(dp=2)),
        ({"tp_size": 2, "enable_attention_dp": "false"}, MeshShape(tp=2)),
        ({"enable_attention_dp": True, "cp_size": 2}, MeshShape(cp=2)),
        ({"cp_size": 2, "cp_config": {"cp_type": "helix"}}, MeshShape(cp=2)),
        ({"tp_size": 4, "pp_size": 2, "moe_cluster_parallel_size": -1}, MeshShape(pp=2, tp=4)),
        ({"tp_size": 2, "allreduce_strategy": "nccl"}, MeshShape(tp=2)),
        ({"tp_size": 2, "orchestrator_type": "RPC", "launcher": "Local"}, MeshShape(tp=2)),
        ({"tp_size": 2, "dp_size": 4}, MeshShape(tp=2)),
    ],
)
def test_names_in_any_case_and_sizes_that_follow_from_others(asked, mesh):
    config = run(EIGHT_GPUS, MOE, **asked)
    assert config.mesh == mesh and config.num_replicas == asked.get("dp_size", 1)


def test_ranks_on_a_cpu_run_when_asked_for_and_share_the_cores():
    config = run(CPU, tensor_parallel_size=2, device="cpu")
    assert (config.mesh.tp, config.num_threads) == (2, 8)


def test_kv_heads_may_be_fewer_than_ranks():
    spec = make_spec(num_heads=8, num_kv_heads=2)
    assert run(make_device(num_devices=8), spec, tensor_parallel_size=8).mesh.tp == 8


@pytest.mark.parametrize(
    ("asked", "expected", "why"),
    [
        ({}, 1, "all ranks share every expert"),
        ({"ep_size": 4}, 4, "set by moe_expert_parallel_size; 2 rank(s) share an expert"),
        ({"ep_size": 8, "moe_tensor_parallel_size": -1}, 8, "set by moe_expert_parallel_size; 1"),
        ({"moe_tensor_parallel_size": 4}, 2, "set by moe_tensor_parallel_size; 4 rank(s)"),
        ({"ep_size": 2, "moe_tensor_parallel_size": 4}, 2, "set by moe_expert_parallel_size; 4"),
    ],
)
def test_ranks_fall_into_sets_of_experts(asked, expected, why):
    config = run(EIGHT_GPUS, make_spec(moe=EXPERTS), tensor_parallel_size=8, **asked)
    assert config.mesh.ep == expected
    assert reason(config, "mesh").startswith(f"set by tensor_parallel_size; {why}")


def test_attention_dp_gives_every_rank_its_own_requests():
    asked = {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1}
    spec = make_spec(moe=EXPERTS, num_heads=6, num_kv_heads=3)  # which 8 ranks could not share
    config = run(
        EIGHT_GPUS, spec, tensor_parallel_size=8, ep_size=8, enable_attention_dp=True,
        attention_dp_config=asked,
    )  # fmt: skip
    assert config.mesh == MeshShape(dp=8, ep=8)
    assert reason(config, "mesh").startswith("enable_attention_dp gives each of tensor_parallel")
    assert config.balance == PromptBalance(batching_wait=50, timeout=1)


def test_a_rank_with_its_own_requests_caches_all_heads():
    whole, shared, own = (
        run(CPU, device="cpu", **settings)
        for settings in ({}, {"tensor_parallel_size": 2},
                         {"tensor_parallel_size": 2, "enable_attention_dp": True})
    )  # fmt: skip
    assert own.kv_cpu_bytes == whole.kv_cpu_bytes and own.max_seq_len == whole.max_seq_len
    assert shared.mesh == MeshShape(tp=2) and own.mesh == MeshShape(dp=2)


def test_slots_for_experts_and_tokens_that_go_to_the_ranks_of_theirs():
    asked = {"num_slots": 16, "layer_updates_per_iter": 1}
    wide = {"tensor_parallel_size": 8, "ep_size": 8, "enable_attention_dp": True}
    spec = make_spec(moe=EXPERTS)
    config = run(EIGHT_GPUS, spec, moe_config={"backend": "WIDEEP", "load_balancer": asked}, **wide)
    assert config.expert_slots == ExpertSlots(num_slots=16, layer_updates=1)
    assert config.moe_all_to_all
    for moe_config, further in (
        ({"backend": "CUTLASS"}, wide),
        ({"backend": "WIDEEP"}, wide | {"enable_attention_dp": False}),
        ({"backend": "WIDEEP"}, wide | {"ep_size": 4}),
    ):
        config = run(EIGHT_GPUS, spec, moe_config=moe_config, **further)
        assert not config.moe_all_to_all and config.expert_slots is None


def test_stages_have_a_step_each_and_ranks_of_their_own():
    config = run(EIGHT_GPUS, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert config.mesh == MeshShape(pp=2, tp=4) and config.depth == 3
    assert config.graph_batch_sizes and config.graph_mixes and config.graph_token_sizes
    assert run(CPU, device="cpu", pp_size=2).depth == 2


def test_context_parallel_ranks_have_a_part_of_each_block():
    spec = make_spec(moe=EXPERTS)
    config = run(EIGHT_GPUS, spec, cp_size=4, tp_size=2, ep_size=8, cp_config={"cp_type": "helix"})
    assert config.mesh == MeshShape(cp=4, tp=2, ep=8) and config.tokens_per_block == 4 * 32
    assert config.graph_batch_sizes and not config.graph_mixes + config.graph_token_sizes
    alone, shared = (run(CPU, device="cpu", max_seq_len=10**6, cp_size=size) for size in (1, 2))
    assert shared.kv_cpu_bytes == alone.kv_cpu_bytes  # of a rank
    implied = run(EIGHT_GPUS, spec, cp_size=2, ep_size=8)
    assert implied.mesh == MeshShape(cp=2, tp=4, ep=8)
