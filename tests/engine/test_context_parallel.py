"""Ranks that share the tokens of each sequence give one rank's tokens. CPU, gloo."""

import pytest
import torch.distributed as dist
from local_engine import LocalEngine
from rank_engines import BLOCK, NUM_OUTPUT, SETTINGS, SIBLINGS, RankEngines

from penstock.parallel import collectives

FEW_TOKENS = 192
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
CASES = {  # folder, further settings
    "tiny, 2 ranks, drafts": ("tiny", {"context_parallel_size": 2, "speculative_config": NGRAM}),
    "tiny, 2 ranks, NVFP4": ("tiny", {"context_parallel_size": 2, "cache_dtype": "nvfp4"}),
    "deepseek_v3, 2 ranks": (  # latents
        "deepseek_v3",
        {"context_parallel_size": 2, "cp_config": {"cp_type": "ring"}},
    ),
    "gpt_oss, 2 x 2 ranks": (  # windows, sinks
        "gpt_oss",
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "moe_expert_parallel_size": 4},
    ),
}


def test_a_head_drafts_over_its_ranks():
    """DeepSeek with MTP: as many drafts are right as one rank's. First, since the engines of the
    other tests stay until the last of these."""
    asked = {"decoding_type": "MTP", "max_draft_len": 2, "adaptive_draft_len": False}
    engines = RankEngines(
        "deepseek_v3", block=BLOCK // 2, few_tokens=4096, context_parallel_size=2,
        speculative_config=asked,
    )  # fmt: skip
    alone = LocalEngine(
        SIBLINGS / "deepseek_v3", **SETTINGS, max_batch_size=8, speculative_config=asked
    )
    try:
        engines.check_tokens()
        alone.generate(engines.texts, NUM_OUTPUT)
        shares = [
            counters.accepted_tokens / counters.drafted_tokens
            for counters in (engines.several.counters, alone.counters)
        ]
        assert shares[0] == pytest.approx(shares[1], abs=0.1) and shares[1] > 0.2
    finally:
        engines.close()


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def engines(request):
    name, settings = request.param
    made = RankEngines(name, block=BLOCK // 2, few_tokens=FEW_TOKENS, **settings)
    yield made
    made.close()


def test_greedy_tokens_are_those_of_one_rank(engines, monkeypatch):
    """Chunks, preemptions and reused prefixes included; what is sent follows from the plans."""
    gathered, scattered, reduced, plans = [], [], [], []
    num_ranks, runner = engines.mesh.cp, engines.several.runner
    gather, scatter = collectives._gather, collectives._reduce_scatter
    all_reduce, forward = dist.all_reduce, runner.forward
    monkeypatch.setattr(
        collectives,
        "_gather",
        lambda out, x, group: (gathered.append(x.nbytes), gather(out, x, group=group)),
    )
    monkeypatch.setattr(
        collectives,
        "_reduce_scatter",
        lambda out, x, group: (scattered.append(out.nbytes), scatter(out, x, group=group)),
    )
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda x, group: (reduced.append(x.nbytes), all_reduce(x, group=group)),
    )
    monkeypatch.setattr(runner, "forward", lambda plan: (plans.append(plan), forward(plan)))
    most_running, counters = engines.check_tokens(), engines.several.counters
    has_drafts = engines.several.engine.config.max_drafts > 0
    assert most_running > 1 and (counters.preemptions > 0 or has_drafts)
    assert (counters.drafted_tokens > 0) == has_drafts
    assert any(0 < plan.num_decodes < plan.num_entries for plan in plans)
    assert any(plan.starts.max() > BLOCK for plan in plans)  # a chunk behind a cached prefix
    if engines.mesh.tp > 1:
        return
    sent = [_sent(engines, plan) for plan in plans]
    assert [sum(gathered), sum(scattered), sum(reduced)] == [
        sum(of) for of in zip(*sent, strict=True)
    ]
    assert num_ranks == 2  # each of these bytes goes to one other rank


def _sent(engines, plan):
    """Bytes that a rank sends to each other one in a step: to gather, to scatter, to reduce."""
    spec, single, num_ranks = engines.spec, engines.single.info.memory, engines.mesh.cp
    row = 4 * spec.hidden_size  # float32
    cached = single["kv_block_bytes"] // BLOCK  # of a token, all layers
    num_decoded = int(plan.num_tokens[: plan.num_decodes].sum())
    chunks = slice(plan.num_decodes, None)
    num_prompt = int(plan.num_tokens[chunks].sum())
    most = -(-num_prompt // num_ranks)
    starts = plan.starts[chunks]
    value_size = spec.head_size if spec.latent is None else spec.latent.value_size
    # Of a decode: the result and its sum of exponentials. Of a prompt: keys and values, of the
    # step and of the blocks before it; the stream in front of each MLP, and in the end.
    to_gather = num_decoded * spec.num_layers * spec.num_heads * 4 * (value_size + 1)
    to_gather += most * (cached + (spec.num_layers + 1) * row)
    to_gather += int((-(-starts // BLOCK)).sum()) * cached * BLOCK // num_ranks
    to_scatter = spec.num_layers * most * row
    to_reduce = (spec.num_layers + 1) * num_decoded * row + num_prompt * row  # and the embedding
    return to_gather, to_scatter, to_reduce


def test_random_traffic_with_aborts_leaves_all_pools_empty(engines):
    engines.check_traffic()


def test_weights_and_cache_of_a_rank_follow_the_formula(engines):
    """Attention is shared by heads alone; MLPs, experts and the vocabulary by all ranks; the
    cache of layers that see all tokens by all ranks as far as there are KV heads."""
    single, several, mesh = engines.single.info, engines.several.info, engines.mesh
    spec, block = engines.spec, several.tokens_per_block
    assert block == mesh.cp * BLOCK // 2
    heads = 1 if spec.latent is not None else mesh.tp
    assert several.memory["kv_block_bytes"] * BLOCK * mesh.cp * heads == (
        single.memory["kv_block_bytes"] * block
    )
    assert several.total_blocks == -(-FEW_TOKENS // block) + 1
    if mesh.tp > 1:
        return
    shared = 0  # numbers that all ranks share
    for layer in range(spec.num_layers):
        if (moe := spec.moe) is None or not moe.layers[layer]:
            shared += 3 * spec.hidden_size * spec.intermediate_size
        else:
            widths = moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size
            shared += 3 * spec.hidden_size * widths
    rows = {num: -(-spec.vocab_size // (64 * num)) * 64 for num in (1, mesh.cp)}
    tables = (1 if spec.tie_embeddings else 2) * spec.hidden_size
    less = shared * (mesh.cp - 1) // mesh.cp + tables * (rows[1] - rows[mesh.cp])
    [whole] = single.rank_weight_bytes
    assert several.rank_weight_bytes == (whole - 4 * less,) * mesh.size
    assert 4 * less > 0.3 * whole
