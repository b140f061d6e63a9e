"""Stages that replay graphs give one rank's tokens. CPU, gloo; graphs are stand-ins: what would be
replayed runs anew, from the padded inputs."""

import pytest
import torch.distributed as dist
from graph_ranks import use_stand_ins
from rank_engines import BLOCK, SIBLINGS, RankEngines

NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
MTP = {"decoding_type": "MTP", "max_draft_len": 2, "adaptive_draft_len": False}
HEAD = MTP | {
    "decoding_type": "Eagle3", "speculative_model": str(SIBLINGS.parent / "drafters/llama_eagle3"),
    "eagle3_layers_to_capture": [4, 1, 2],
}  # fmt: skip
SMALL_MODEL = MTP | {"decoding_type": "Draft_Target", "speculative_model": "tiny"}
CASES = {
    "llama, 2 stages, n-gram drafts": (
        "tiny",
        {"pipeline_parallel_size": 2, "speculative_config": NGRAM},
    ),
    "deepseek_v3, 2 stages, MTP": (
        "deepseek_v3",
        {"pipeline_parallel_size": 2, "speculative_config": MTP},
    ),
    "llama, 2 stages, a small model": (
        "tiny",
        {"pipeline_parallel_size": 2, "speculative_config": SMALL_MODEL},
    ),
    "llama, 2 stages of 2 context-parallel ranks, an Eagle3 head": (
        "tiny",
        {"pipeline_parallel_size": 2, "context_parallel_size": 2, "speculative_config": HEAD},
    ),
    "gpt_oss, 2 stages of 2 data-parallel ranks": (
        "gpt_oss",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "enable_attention_dp": True},
    ),
    "deepseek_v3, 2 stages of 2 context-parallel ranks": (
        "deepseek_v3",
        {"pipeline_parallel_size": 2, "context_parallel_size": 2},
    ),
}


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=list(CASES))
def test_stages_that_replay_graphs_give_one_ranks_tokens(name, settings, monkeypatch):
    """A stage is sent the hidden states of its tokens: those of padding stay where they are."""
    sent, num_fed, replayed = [], [], []
    isend = dist.isend
    monkeypatch.setattr(dist, "isend", lambda x, dst: (sent.append(len(x)), isend(x, dst))[1])
    use_stand_ins(monkeypatch.setattr, replayed)
    cp_size = settings.get("context_parallel_size", 1)
    engines = RankEngines(name, BLOCK // cp_size, 512, attn_backend="reference", **settings)
    try:
        runner, counters = engines.several.runner, engines.several.counters
        forward = runner.forward

        def counted(part):
            num_fed.append(max(1, int(part.num_tokens.sum())))
            forward(part)

        monkeypatch.setattr(runner, "forward", counted)
        replayed.clear()
        engines.check_tokens()
        if cp_size == 1:  # else each rank has some of a prompt's tokens
            assert sent == num_fed
            assert counters.mixed_graph_steps > 0 == counters.mixed_eager_steps
            assert counters.prefill_graph_steps > 0
        assert counters.graph_replays == len(replayed) > 20  # of both stages, step for step
        assert (counters.accepted_tokens > 0) == ("speculative_config" in settings)
        engines.check_traffic()
    finally:
        engines.close()
