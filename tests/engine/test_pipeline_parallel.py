"""Pipeline stages, alone and with tensor parallelism or attention DP, give one rank's tokens. CPU,
gloo."""

import pytest
import torch.distributed as dist
from rank_engines import RankEngines

from penstock.types.mesh import stage_layers

NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
CASES = {
    "gpt_oss, 2 stages of 2 ranks": (
        "gpt_oss",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "moe_expert_parallel_size": 2},
    ),
    "deepseek_v3, 2 stages of 2 data-parallel ranks": (
        "deepseek_v3",
        {
            "pipeline_parallel_size": 2,
            "tensor_parallel_size": 2,
            "enable_attention_dp": True,
            "speculative_config": NGRAM,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def engines(request):
    name, settings = request.param
    made = RankEngines(name, **settings)
    yield made
    made.close()


def test_greedy_tokens_are_those_of_one_rank(engines, monkeypatch):
    """Each stage has a step in flight; a rank of the first sends one hidden state per token."""
    sent, num_fed = [], []
    isend, runner = dist.isend, engines.several.runner
    monkeypatch.setattr(dist, "isend", lambda x, dst: (sent.append(x.nbytes), isend(x, dst))[1])
    forward = runner.forward

    def counted(part):
        num_fed.append(max(1, int(part.num_tokens.sum())))
        forward(part)

    monkeypatch.setattr(runner, "forward", counted)
    most_running, counters = engines.check_tokens(), engines.several.counters
    assert most_running > 1
    assert counters.max_steps_in_flight == engines.mesh.pp
    assert counters.preemptions > 0 or engines.mesh.tp > 1
    assert sent == [4 * engines.spec.hidden_size * num for num in num_fed]  # float32


def test_random_traffic_with_aborts_leaves_all_pools_empty(engines):
    engines.check_traffic()


def test_a_stage_has_its_layers_and_nothing_else(engines):
    """A cache block is that of the layers of rank 0's stage. Weights: tests/models."""
    mesh, spec, several = engines.mesh, engines.spec, engines.several.info
    weights = several.rank_weight_bytes
    stages = [weights[at : at + mesh.stage_size] for at in range(0, mesh.size, mesh.stage_size)]
    assert all(len(set(stage)) == 1 for stage in stages)
    assert sum(stage[0] for stage in stages) < engines.single.info.rank_weight_bytes[0]
    keeps_all = [spec.window_of(layer) is None for layer in range(spec.num_layers)]
    num_own = sum(keeps_all[layer] for layer in stage_layers(spec.num_layers, mesh.pp)[0])
    block, of_all = several.memory["kv_block_bytes"], engines.single.info.memory["kv_block_bytes"]
    num_heads = 1 if spec.latent is not None else mesh.tp
    assert block * num_heads * sum(keeps_all) == of_all * num_own
