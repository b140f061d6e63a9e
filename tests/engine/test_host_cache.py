"""`kv_cache_config.host_cache_size`: requests that had to leave the cache go on where they were."""

import concurrent.futures

import pytest
from local_engine import LocalEngine
from paged_driver import prompts
from server_process import Server
from tiny_models import make_checkpoint

NUM_TOKENS = 64
SETTINGS = {"device": "cpu", "num_threads": 1, "dtype": "float32", "max_batch_size": 8}
# 16 blocks of 16 tokens: three sequences of 60 + 64 do not fit together.
FEW = {"tokens_per_block": 16, "max_tokens": 256}
MANY = {"tokens_per_block": 16, "max_tokens": 2048}
ANY_TIME = {"capacity_scheduler_policy": "MAX_UTILIZATION"}


def texts_of(folder) -> list[list[int]]:
    return prompts(LocalEngine(folder, **SETTINGS).engine.spec.vocab_size, (60, 58, 61, 57))


CASES = [  # model type, cache groups, dtype of the cache, steps in flight
    ("llama", 1, "auto", 1), ("llama", 1, "int8", 2), ("deepseek_v3", 1, "auto", 1),
    ("gpt_oss", 2, "auto", 2), ("gpt_oss", 2, "int8", 1),  # windows
    ("llama", 1, "nvfp4", 2), ("gpt_oss", 2, "nvfp4", 1),
    ("qwen3_next", 2, "auto", 2),  # recurrent states
]  # fmt: skip


@pytest.mark.parametrize(("arch", "num_groups", "dtype", "depth"), CASES)
def test_answers_are_those_of_a_large_cache_and_little_is_computed_again(
    arch, num_groups, dtype, depth, tmp_path
):
    folder = make_checkpoint(tmp_path / arch, arch)
    texts = texts_of(folder)
    expected = LocalEngine(
        folder, **SETTINGS, kv_cache_config=MANY | {"dtype": dtype}
    ).generate(texts, NUM_TOKENS)  # fmt: skip
    few = FEW | {"dtype": dtype, "enable_block_reuse": False}
    computed = {}
    for size in (None, 1 << 30):
        engine = LocalEngine(
            folder, **SETTINGS, scheduler_config=ANY_TIME,
            kv_cache_config=few | {"host_cache_size": size}, disable_overlap_scheduler=depth == 1,
        )  # fmt: skip
        assert len(engine.engine.scheduler._kvs[0].groups) == num_groups
        assert engine.generate(texts, NUM_TOKENS) == expected
        counters = engine.counters
        assert counters.preemptions >= 1 and counters.max_steps_in_flight == depth
        assert (
            (counters.swapped_in_blocks > 0)
            == (counters.swapped_out_blocks > 0)
            == (size is not None)
        )
        computed[size] = counters.prompt_tokens
    assert computed[1 << 30] < sum(map(len, texts)) + 20 < computed[None]


def test_host_memory_for_no_sequence_is_told(tmp_path, caplog):
    folder = make_checkpoint(tmp_path / "gpt_oss", "gpt_oss")
    engine = LocalEngine(folder, **SETTINGS, kv_cache_config=FEW | {"host_cache_size": 99})
    assert "host_cache_size is 99 bytes, which hold no sequence: raise it" in caplog.text
    assert len(engine.generate([[1, 2, 3]], 2)[0]) == 2


def test_two_ranks_keep_their_parts(tmp_path):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    texts = texts_of(folder)
    single = LocalEngine(folder, **SETTINGS, kv_cache_config=MANY | {"dtype": "nvfp4"})
    expected = single.generate(texts, NUM_TOKENS)
    with Server(
        folder, "--tp_size", "2", **SETTINGS, scheduler_config=ANY_TIME,
        kv_cache_config=FEW | {"host_cache_size": 1 << 30, "dtype": "nvfp4"},
    ) as server:  # fmt: skip

        def answer(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
            body |= {"ignore_eos": True, "detokenize": False, "model": str(folder)}
            reply = server.http.post("/v1/completions", json=body).raise_for_status().json()
            return reply["choices"][0]["token_ids"]

        with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
            found = list(pool.map(answer, texts))
        counters = server.counters()
    assert found == expected
    assert counters["kept_blocks"] >= 1 and counters["fetched_blocks"] >= 1
