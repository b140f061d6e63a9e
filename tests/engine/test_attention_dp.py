"""Attention DP: ranks with requests and caches of their own give one rank's tokens. CPU, gloo."""

import pytest
from rank_engines import BLOCK, FEW_TOKENS, MAX_ROWS, SIBLINGS, RankEngines
from server_process import Server

from penstock.parallel import collectives

NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
CASES = [  # folder, ranks, sets of experts, further settings
    ("tiny", 2, None, {"speculative_config": NGRAM}),
    ("qwen2_moe", 2, 2, {}),
    ("gpt_oss", 4, 2, {}),  # windows
    ("deepseek_v3", 2, 1, {}),  # latents
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]} ranks")
def engines(request):
    name, num_ranks, ep_size, further = request.param
    made = RankEngines(
        name, tensor_parallel_size=num_ranks, enable_attention_dp=True,
        moe_expert_parallel_size=ep_size, **further,
    )  # fmt: skip
    yield made
    made.close()


def test_greedy_tokens_are_those_of_one_rank(engines, monkeypatch):
    """Chunks, preemptions and reused prefixes included; what is sent follows from the plans."""
    sent, plans, loads, num_ranks = [], [], [], engines.mesh.dp
    for name in ("_gather", "_reduce_scatter"):
        real = getattr(collectives, name)

        def counted(out, x, group, real=real, is_gather=name == "_gather"):
            own = x if is_gather else out  # goes to, or comes from, every other rank
            sent.append((num_ranks - 1) * own.numel() * own.element_size())
            return real(out, x, group=group)

        monkeypatch.setattr(collectives, name, counted)
    executor = engines.several.loop._executor
    forward, own_forward = executor.forward, executor._runner.forward
    monkeypatch.setattr(executor, "forward", lambda plan: (plans.append(plan), forward(plan)))
    monkeypatch.setattr(
        executor._runner,
        "forward",
        lambda part: (loads.append(part.peers.num_tokens), own_forward(part)),
    )
    most_running, counters = engines.check_tokens(), engines.several.counters
    assert most_running > MAX_ROWS  # which are a rank's
    assert counters.preemptions > 0 or num_ranks > 2
    assert (counters.drafted_tokens > 0) == (engines.several.engine.config.max_drafts > 0)
    spec = engines.spec
    row = spec.hidden_size * 4  # float32
    assert len(sent) == 2 * spec.num_layers * len(plans)
    assert sum(sent) == sum(
        2 * spec.num_layers * (num_ranks - 1) * max(load) * row for load in loads
    )
    assert any(len(set(load)) > 1 for load in loads)
    assert any(len(set(plan.dp_ranks.tolist())) < num_ranks for plan in plans)  # one is idle


def test_random_traffic_with_aborts_leaves_all_pools_empty(engines):
    engines.check_traffic()


def test_weights_and_cache_of_a_rank_follow_the_formula(engines):
    """Attention is on every rank, MLPs and experts are shared; a rank caches whole tokens."""
    single, several, size = engines.single.info, engines.several.info, engines.mesh.dp
    spec, ep_size = engines.spec, engines.mesh.ep
    by_rank = by_set = 0  # numbers that all ranks share, and that sets of ranks do
    for layer in range(spec.num_layers):
        if (moe := spec.moe) is None or not moe.layers[layer]:
            by_rank += 3 * spec.hidden_size * spec.intermediate_size
            continue
        widths = moe.num_experts * moe.intermediate_size
        by_rank += 3 * spec.hidden_size * (widths + moe.shared_intermediate_size)
        if spec.architecture.startswith("GptOss"):  # biases; of the last matrix with each shard
            by_rank += 2 * widths
            by_set += moe.num_experts * spec.hidden_size
    [whole] = single.rank_weight_bytes
    shared = by_rank * (size - 1) // size + by_set * (ep_size - 1) // ep_size
    assert several.rank_weight_bytes == (whole - 4 * shared,) * size
    assert 4 * shared > 0.1 * whole
    assert several.memory["kv_block_bytes"] == single.memory["kv_block_bytes"]
    assert several.total_blocks == size * (-(-FEW_TOKENS // BLOCK) + 1)
    assert several.max_batch_size == size * MAX_ROWS


def test_a_recipe_with_attention_dp_serves_over_its_ranks():
    """gpt-oss-120b's throughput file, two ranks for its eight and the sibling for the model."""
    flags = ("--recipe", "gpt-oss-120b-throughput-b200", "--tp_size", "2", "--ep_size", "2")
    with Server(SIBLINGS / "gpt_oss", *flags, "--num_threads", "1", device="cpu") as server:
        version = server.version()
        said = server.log.read_text()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"messages": messages, "max_tokens": 48, "temperature": 0, "n": 3}
        reply = server.post("/v1/chat/completions", **body)
    assert all("Paris" in str(choice["message"]) for choice in reply["choices"])
    config = version["config"]
    assert config["mesh"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 1, "ep": 2}
    assert config["balance"] == {"batching_wait": 50, "timeout": 1}
    assert config["max_batch_size"] == 720
    assert "is ignored" not in said
