"""Attention DP with drafts of heads and small models, whose layers need all ranks. CPU, gloo."""

from collections import defaultdict

import pytest
from draft_models import make_eagle3_checkpoint
from local_engine import LocalEngine
from rank_engines import NUM_OUTPUT, SETTINGS, SIBLINGS, RankEngines
from tiny_models import make_checkpoint


def eagle3_files(folder):
    make_checkpoint(folder, "llama", num_hidden_layers=5, max_position_embeddings=256)
    return folder, {
        "decoding_type": "Eagle3",
        "speculative_model": str(make_eagle3_checkpoint(folder / "head", 543)),
        "eagle3_layers_to_capture": [0, 2, 3],
    }


def watch(engine: LocalEngine) -> dict[tuple[bytes, int], set[int]]:
    """By prompt and where its row ends: what rank 0 drafts first behind it."""
    drafter, found = engine.runner.drafting.drafter, defaultdict(set)
    draft, prompts = drafter.draft, {}

    def joined(joins):
        prompts.update({join.row: join.token_ids[: join.num_prompt].tobytes() for join in joins})

    def watched(step):
        drafts_NK = draft(step)
        for row, end, first in zip(step.rows_N, step.newest_N, drafts_NK[:, 0], strict=True):
            if int(row) in prompts and first >= 0:  # no padding, and there was a block for it
                found[prompts[int(row)], int(end)].add(int(first))
        return drafts_NK

    drafter.join, drafter.draft = joined, watched
    return found


@pytest.mark.parametrize("kind", ["MTP, 4 ranks", "Eagle3, 2 ranks", "Draft_Target, 2 ranks"])
def test_what_drafts_has_its_layers_on_all_ranks(tmp_path, kind):
    """Greedy tokens and drafts are one rank's."""
    num_ranks, further = 2, {}
    if kind.startswith("MTP"):
        folder, num_ranks = SIBLINGS / "deepseek_v3", 4
        asked, further = {"decoding_type": "MTP"}, {"moe_expert_parallel_size": 2}
    elif kind.startswith("Eagle3"):
        folder, asked = eagle3_files(tmp_path)
    else:
        folder = make_checkpoint(tmp_path, "llama", max_position_embeddings=256)
        asked = {"decoding_type": "Draft_Target", "speculative_model": str(folder)}
    drafts = asked | {"max_draft_len": 3, "adaptive_draft_len": False}
    engines = RankEngines(
        folder, tensor_parallel_size=num_ranks, enable_attention_dp=True,
        speculative_config=drafts, **further,
    )  # fmt: skip
    drafting = LocalEngine(folder, **SETTINGS, max_batch_size=8, speculative_config=drafts)
    alone, among_others = watch(drafting), watch(engines.several)
    try:
        drafting.generate(engines.texts, NUM_OUTPUT)
        engines.check_tokens()
        same = [firsts <= alone[at] for at, firsts in among_others.items() if at in alone]
        # A reused block's last key may have been made with another token behind it.
        assert len(same) > 5 and sum(same) > 0.9 * len(same)
        assert engines.several.counters.drafted_tokens > 100
        engines.check_traffic()
    finally:
        engines.close()
