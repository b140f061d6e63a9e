"""Strategies of parallelism together give one rank's greedy tokens. CPU, gloo.

Every row runs chunked prefills, reused prefixes and, in caches that are too small, preemptions;
then requests that come and are aborted at random, behind which all pools are empty. Rows of more
ranks than `PENSTOCK_TEST_RANKS` (2) are skipped: 8 runs all, which docs/scaling.md lists.
"""

import concurrent.futures
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gguf_models import QUANT, write_gguf
from local_engine import LocalEngine
from mxfp4_models import make_packed_checkpoint
from rank_engines import (
    BLOCK,
    FEW_TOKENS,
    LONG_OUTPUT,
    MAX_ROWS,
    NUM_OUTPUT,
    SETTINGS,
    SIBLINGS,
    RankEngines,
    crowd_of,
    prompts_of,
)
from server_process import Server
from tiny_models import make_checkpoint, reference_model
from waiting import until
from weight_only_models import make_weight_only_checkpoint

MOST_RANKS = int(os.environ.get("PENSTOCK_TEST_RANKS", "2"))
NGRAM = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive_draft_len": False}
MTP = {"decoding_type": "MTP", "max_draft_len": 1, "adaptive_draft_len": False}
HOST = {"host_cache_size": 1 << 28}
LONG = {"max_position_embeddings": 256}
EIGHT = LONG | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}


def _int4(folder: Path) -> Path:
    return make_weight_only_checkpoint(folder, "gptq", "llama", **EIGHT, intermediate_size=256)


def _mxfp4(folder: Path) -> Path:
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
    experts = {"num_local_experts": 8, "intermediate_size": 64}
    return make_packed_checkpoint(folder, **EIGHT, **windows, **experts)


def _gguf(folder: Path) -> Path:
    made = make_checkpoint(folder, "qwen3_moe", **EIGHT, num_experts=8)
    write_gguf(folder / "model.gguf", reference_model(made), QUANT.Q8_0)
    return folder / "model.gguf"


def _qwen2_moe(folder: Path) -> Path:
    return make_checkpoint(folder, "qwen2_moe", **EIGHT, num_experts=8)


# name -> a sibling, or how a random checkpoint is made
MODELS: dict[str, str | Callable[[Path], Path]] = {
    "llama": "tiny",
    "llama, INT4": _int4,
    "deepseek_v3": "deepseek_v3",  # latents, a head that drafts
    "gpt_oss, MXFP4": _mxfp4,  # windows
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe, GGUF": _gguf,
}


@dataclass(frozen=True)
class Row:
    name: str  # as docs/scaling.md lists it
    num_ranks: int
    model: str
    sizes: dict[str, Any]
    with_: dict[str, Any] = field(default_factory=dict)  # drafts, host memory, ...

    def __str__(self) -> str:
        return f"{self.name}, {self.num_ranks} ranks, {self.model}"


def _sizes(tp: int = 1, pp: int = 1, cp: int = 1, ep: int | None = None, **further: Any) -> dict:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "context_parallel_size": cp}
    return sizes | {"moe_expert_parallel_size": ep} | further


def _wide(num_slots: int) -> dict[str, Any]:
    balancer = {"num_slots": num_slots, "layer_updates_per_iter": 1}
    return {"moe_config": {"backend": "WIDEEP", "load_balancer": balancer}}


ADP = {"enable_attention_dp": True}
DRAFTS, HEAD = {"speculative_config": NGRAM}, {"speculative_config": MTP}
IN_HOST = {"kv_cache_config": HOST}
ROWS = [
    Row("PP 2 + n-gram", 2, "llama, INT4", _sizes(pp=2), DRAFTS),
    Row("CP 2 x EP 2 + host memory", 2, "qwen2_moe", _sizes(cp=2, ep=2), IN_HOST),
    Row("ADP 2 x EP 2 + host memory", 2, "gpt_oss, MXFP4", _sizes(2, ep=2, **ADP), IN_HOST),
    Row("TP 2 x EP 2 + n-gram", 2, "qwen3_moe, GGUF", _sizes(2, ep=2), DRAFTS),
    Row("TP 2 x PP 2 x EP 2", 4, "gpt_oss, MXFP4", _sizes(2, pp=2, ep=2)),
    Row("TP 4 x EP 2 (ETP 2)", 4, "qwen2_moe", _sizes(4, ep=2)),
    Row("ADP 4 x EP 2 (ETP 2) + n-gram", 4, "qwen2_moe", _sizes(4, ep=2, **ADP), DRAFTS),
    Row("PP 2 x ADP 2 + n-gram", 4, "deepseek_v3", _sizes(2, pp=2, **ADP), DRAFTS),
    Row("CP 2 x TP 2 + n-gram", 4, "llama, INT4", _sizes(2, cp=2), DRAFTS),
    Row("PP 2 x CP 2 + host memory", 4, "qwen2_moe", _sizes(pp=2, cp=2), IN_HOST),
    Row("DP 2 x TP 2", 4, "qwen2_moe", _sizes(2), {"data_parallel_size": 2}),
    Row("Wide-EP 4 x ADP 4 + MTP", 4, "deepseek_v3", _sizes(4, ep=4, **ADP, **_wide(12)), HEAD),
    Row("PP 2 x Wide-EP 2 x ADP 2", 4, "gpt_oss, MXFP4", _sizes(2, pp=2, ep=2, **ADP, **_wide(10))),
    Row("TP 2 x PP 2 x CP 2 + n-gram", 8, "llama, INT4", _sizes(2, pp=2, cp=2), DRAFTS),
    Row("CP 2 x TP 4 x EP 8", 8, "gpt_oss, MXFP4", _sizes(4, cp=2, ep=8)),
    Row("TP 8 x EP 4 (ETP 2) + host memory", 8, "qwen2_moe", _sizes(8, ep=4), IN_HOST),
    Row("PP 2 x ADP 4 x EP 4 + n-gram", 8, "gpt_oss, MXFP4", _sizes(4, pp=2, ep=4, **ADP), DRAFTS),
    Row("PP 4 x TP 2 x EP 2", 8, "deepseek_v3", _sizes(2, pp=4, ep=2)),
    Row("Wide-EP 8 x ADP 8 + MTP", 8, "deepseek_v3", _sizes(8, ep=8, **ADP, **_wide(16)), HEAD),
    Row("DP 2 x TP 2 x PP 2", 8, "llama, INT4", _sizes(2, pp=2), {"data_parallel_size": 2}),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, str | Path] = {}

    def find(model: str) -> str | Path:
        if model not in made:
            make = MODELS[model]
            made[model] = make if isinstance(make, str) else make(tmp_path_factory.mktemp("model"))
        return made[model]

    return find


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_greedy_tokens_are_those_of_one_rank_and_pools_are_empty(row, folder_of):
    if row.num_ranks > MOST_RANKS:
        pytest.skip(f"PENSTOCK_TEST_RANKS={row.num_ranks} runs it")
    folder = folder_of(row.model)
    if "data_parallel_size" in row.with_:
        return check_replicas(folder, row)
    cp_size = row.sizes["context_parallel_size"]
    engines = RankEngines(folder, block=BLOCK // cp_size, **row.sizes, **row.with_)
    try:
        assert engines.mesh.size == row.num_ranks
        counters = engines.several.counters
        engines.check_tokens()
        engines.check_preemptions()
        assert (counters.drafted_tokens > 0) == ("speculative_config" in row.with_)
        assert (counters.swapped_in_blocks > 0) == ("kv_cache_config" in row.with_)
        engines.check_traffic()
    finally:
        engines.close()


def check_replicas(folder: str | Path, row: Row) -> None:
    """Behind one port; streams that the client leaves are the aborts."""
    folder = SIBLINGS / folder
    single = LocalEngine(folder, **SETTINGS, max_batch_size=8)
    size = single.engine.spec.vocab_size
    asked = [(text, NUM_OUTPUT) for text in prompts_of(size)]
    asked += [(text, LONG_OUTPUT) for text in crowd_of(2 * MAX_ROWS, size)]
    expected = [single.generate([text], num)[0] for text, num in asked]
    body = {"model": "m", "temperature": 0, "ignore_eos": True, "detokenize": False}

    def answer(one: tuple[list[int], int]) -> list[int]:
        text, num = one
        reply = server.post("/v1/completions", prompt=text, max_tokens=num, **body)
        return reply["choices"][0]["token_ids"]

    def leave(text: list[int]) -> None:
        more = {"prompt": text, "max_tokens": 90, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body | more) as reply:
            assert reply.status_code == 200 and next(reply.iter_lines())

    with (
        Server(
            folder, **SETTINGS, **row.sizes, **row.with_, max_batch_size=MAX_ROWS,
            kv_cache_config={"tokens_per_block": BLOCK, "max_tokens": FEW_TOKENS},
            scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"},
        ) as server,
        concurrent.futures.ThreadPoolExecutor(len(asked)) as pool,
    ):  # fmt: skip
        until(lambda: server.counters()["engines"] == 2)
        assert len(server.children("penstock.engine_process")) == 2
        gone = [pool.submit(leave, text) for text, _ in asked[:4]]
        assert list(pool.map(answer, asked)) == expected
        assert list(pool.map(answer, asked)) == expected
        assert all(one.result() is None for one in gone)
        counters, mesh = server.counters(), server.version()["config"]["mesh"]
    assert counters["prefix_hit_tokens"] > 0 and counters["preemptions"] > 0
    assert counters["used_blocks"] == 0 < counters["total_blocks"]
    assert 2 * mesh["pp"] * mesh["tp"] == row.num_ranks
