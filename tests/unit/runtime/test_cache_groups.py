"""Layers that remember alike share a group; only the first one's size depends on the memory."""

from dataclasses import dataclass, replace

import pytest

from penstock.config.run import CapacityPolicy, RunConfig
from penstock.core.kv.groups import FullGroup, StateGroup, WindowGroup
from penstock.engine.cache_groups import cache_group
from penstock.errors import ConfigError
from penstock.runtime.cache_groups import group_layers
from penstock.runtime.memory import fitted, longest_sequence, make_plan
from penstock.types.cache_spec import (
    CacheSize,
    CacheSpec,
    FullKV,
    RecurrentState,
    window_blocks_needed,
)

CONFIG = RunConfig(
    model="m", model_path="m", load_format="dummy", dtype="float32", device="cpu", num_threads=1,
    max_batch_size=4, max_num_tokens=64, max_seq_len=256, max_queued=100,
    chunked_prefill=True, capacity_policy=CapacityPolicy.MAX_UTILIZATION, depth=2,
    tokens_per_block=16, block_reuse=False, partial_reuse=True, kv_dtype="float32",
    kv_max_tokens=None, kv_memory_fraction=0.9, kv_cpu_bytes=1 << 22, attention_backend="sdpa",
    graph_batch_sizes=(), graph_padding=True, seed=0,
)  # fmt: skip
WHOLE = FullKV(num_kv_heads=2, head_size=16, dtype="float32")
STATE = RecurrentState(
    num_past=3, num_channels=64, conv_dtype="bfloat16", num_value_heads=4, key_size=16,
    value_size=32,
)  # fmt: skip
STATE_BYTES = 3 * 64 * 2 + 4 * 16 * 32 * 4
KV_BYTES = 2 * 2 * 16 * 4 * 16  # of a block
GPU = replace(CONFIG, device="cuda", max_batch_size=100, block_reuse=True, kv_memory_fraction=1.0)
PLENTY = 1 << 50


@dataclass(frozen=True)
class Layer:
    """All that grouping asks of one."""

    spec: CacheSpec

    def cache_spec(self) -> CacheSpec:
        return self.spec


def layers(*windows: int | None):
    return [Layer(replace(WHOLE, window=window)) for window in windows]


def test_layers_with_a_window_are_a_group_behind_those_without():
    own = layers(32, None, 32, None, None)
    whole, windowed = group_layers(own, CONFIG)
    assert whole.layers == (own[1], own[3], own[4]) and whole.window is None
    assert windowed.layers == (own[0], own[2]) and windowed.window == 32
    assert type(cache_group(whole, 9, CONFIG)) is FullGroup
    assert type(cache_group(windowed, 99, CONFIG)) is WindowGroup


@pytest.mark.parametrize("windows", [(256, None, 300), (32, 32), (None, None)])
def test_a_window_that_gives_nothing_back_is_none(windows):
    (group,) = group_layers(layers(*windows), CONFIG)
    assert group.window is None and len(group.layers) == len(windows)


def test_the_first_group_gets_the_memory_that_the_others_leave():
    groups = group_layers(layers(None, 32), CONFIG)
    plan = make_plan(CONFIG, weights=0, activations=0, free=PLENTY, groups=groups)
    needed = window_blocks_needed(32, 16, 4, 64, 2)
    assert plan.size.num_blocks[1:] == (needed,)
    assert plan.blocks == (KV_BYTES, KV_BYTES) and plan.size.max_rows == 4
    assert 0 <= CONFIG.kv_cpu_bytes - plan.cache_bytes(plan.size) < KV_BYTES
    with_reuse = replace(CONFIG, block_reuse=True)
    assert groups[1].window_blocks(with_reuse) == needed + 4 * 3  # a window each for four rows


def test_too_little_memory_for_the_further_groups_is_said():
    config = replace(CONFIG, kv_cpu_bytes=1 << 16)
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        make_plan(
            config,
            weights=0,
            activations=0,
            free=PLENTY,
            groups=group_layers(layers(None, 32), config),
        )


def with_states(*kinds: CacheSpec):
    return group_layers([Layer(kind) for kind in kinds], CONFIG)


def test_layers_with_a_state_are_a_group_whose_block_is_one_text():
    whole, states = with_states(STATE, WHOLE, STATE, STATE, WHOLE)
    assert whole.keeps_all and not whole.has_states and len(whole.layers) == 2
    assert states.has_states and not states.keeps_all and len(states.layers) == 3
    assert states.block_bytes(16) == states.block_bytes(256) == 3 * STATE_BYTES
    assert type(cache_group(states, 9, CONFIG)) is StateGroup
    windowed = replace(WHOLE, window=32)  # beside states it would have to keep all, too
    assert [group.window for group in with_states(windowed, STATE)] == [None, None]


def planned(config: RunConfig, free: int, num_state_layers: int = 1):
    groups = with_states(WHOLE, *[STATE] * num_state_layers)
    return make_plan(config, weights=0, activations=0, free=free, groups=groups)


def test_every_row_has_a_state_and_copies_have_their_share():
    plan = planned(GPU, free=1000 * STATE_BYTES)
    assert plan.size.max_rows == 100
    assert plan.size.num_blocks[1] == 1 + 100 + 100  # block 0, rows, a tenth of the memory
    assert 0 <= 1000 * STATE_BYTES - plan.cache_bytes(plan.size) < KV_BYTES
    assert fitted(GPU, plan.size) is GPU
    no_copies = planned(replace(GPU, block_reuse=False), free=1000 * STATE_BYTES)
    assert no_copies.size.num_blocks[1] == 1 + 100


def test_too_many_states_are_fewer_rows_and_smaller_graphs():
    config = replace(GPU, graph_batch_sizes=(1, 2, 4, 8, 16, 64, 100))
    plan = make_plan(
        config, weights=0, activations=0, free=100 * STATE_BYTES + (400 << 20),
        groups=with_states(WHOLE, STATE),
    )  # fmt: skip
    # Half of 100 states is for keys and values, a tenth for copies, one block for padding.
    assert plan.size.max_rows == 50 - 1 - 10 and plan.size.num_blocks[1] == 50
    assert abs(plan.size.num_blocks[0] * KV_BYTES - 50 * STATE_BYTES) < 2 * KV_BYTES
    run = fitted(config, plan.size)
    assert run.max_batch_size == 39 and run.graph_batch_sizes == (1, 2, 4, 8, 16, 39)
    group = cache_group(with_states(WHOLE, STATE)[1], plan.size.num_blocks[1], run)
    assert isinstance(group, StateGroup) and group._num_reserved == 10


def test_keys_and_values_that_ask_for_less_leave_more_to_states():
    tight = replace(GPU, kv_max_tokens=64)
    plan = planned(tight, free=100 * STATE_BYTES)
    assert plan.size.num_blocks[0] == 64 // 16 + 1
    assert plan.size.max_rows == (100 * STATE_BYTES - 5 * KV_BYTES) // STATE_BYTES - 1 - 10


def test_no_memory_for_a_single_state_is_said():
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        planned(GPU, free=3 * STATE_BYTES, num_state_layers=2)


def test_on_a_cpu_states_have_bytes_of_their_own():
    config = replace(CONFIG, block_reuse=True, state_cpu_bytes=9 * STATE_BYTES)
    plan = planned(config, free=PLENTY)
    assert plan.size.max_rows == 4 and plan.size.num_blocks[1] == 1 + 4 + 4
    assert plan.size.num_blocks[0] == config.kv_cpu_bytes // KV_BYTES
    asked = planned(replace(config, kv_max_tokens=160), free=PLENTY)
    assert asked.size.num_blocks == (11, 9)


def host_blocks(specs: list[CacheSpec], host_cache_bytes: int, **changes) -> tuple[int, ...]:
    config = replace(CONFIG, host_cache_bytes=host_cache_bytes, **changes)
    groups = group_layers([Layer(spec) for spec in specs], config)
    plan = make_plan(config, weights=0, activations=0, free=PLENTY, groups=groups)
    return plan.size.num_host_blocks


def test_the_plan_says_how_many_host_blocks_there_are():
    assert host_blocks([WHOLE], 10 * KV_BYTES + 1) == (10,)
    assert host_blocks([WHOLE], KV_BYTES - 1) == host_blocks([WHOLE], 0) == ()


def test_host_memory_is_divided_as_sequences_use_it_that_fill_the_cache():
    """4 rows and 40 blocks: a sequence has ten, and a window of three or a state."""
    window, kv_max_tokens = replace(WHOLE, window=32), 39 * 16
    size = 10 * KV_BYTES + 3 * KV_BYTES
    for num_sequences in (1, 2, 9):
        found = host_blocks([WHOLE, window], num_sequences * size, kv_max_tokens=kv_max_tokens)
        assert found == (10 * num_sequences, 3 * num_sequences)
        num_bytes = num_sequences * (10 * KV_BYTES + STATE_BYTES)
        config = {"kv_max_tokens": kv_max_tokens, "state_cpu_bytes": 99 * STATE_BYTES}
        found = host_blocks([WHOLE, STATE], num_bytes, **config)
        assert found == (10 * num_sequences, num_sequences)


def test_little_host_memory_holds_one_sequence_or_none():
    specs = [WHOLE, replace(WHOLE, window=32)]
    assert host_blocks(specs, 5 * KV_BYTES) == (2, 3)
    assert host_blocks(specs, 4 * KV_BYTES - 1) == ()


def test_on_a_cpu_the_cache_takes_what_weights_and_activations_leave():
    groups = group_layers(layers(None), CONFIG)
    most = make_plan(CONFIG, weights=0, activations=0, free=PLENTY, groups=groups)
    assert most.cache_bytes(most.size) <= CONFIG.kv_cpu_bytes
    free, activations = CONFIG.kv_cpu_bytes, CONFIG.kv_cpu_bytes // 4
    tight = make_plan(CONFIG, weights=0, activations=activations, free=free, groups=groups)
    assert 0 <= free - activations - tight.cache_bytes(tight.size) < KV_BYTES
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        make_plan(CONFIG, weights=0, activations=free, free=free, groups=groups)
    asked = replace(CONFIG, kv_max_tokens=most.size.num_blocks[0] * 16)
    with pytest.raises(ConfigError, match=r"max_tokens is .* needed for activations; lower it"):
        make_plan(asked, weights=0, activations=activations, free=free, groups=groups)


def test_ranks_agree_on_what_each_of_them_can_hold():
    sizes = [
        CacheSize(num_blocks=(90, 40), max_rows=30, num_host_blocks=(7, 3)),
        CacheSize(num_blocks=(80, 45), max_rows=34, num_host_blocks=(6, 4)),
    ]
    agreed = sizes[0].within(sizes[1])
    assert agreed == sizes[1].within(sizes[0])
    assert agreed == CacheSize(num_blocks=(80, 40), max_rows=30, num_host_blocks=(6, 3))
    assert longest_sequence(CONFIG, agreed) == 256
    assert longest_sequence(CONFIG, replace(agreed, num_blocks=(5, 40))) == 64


def test_graphs_of_mixes_are_part_of_the_plan_also_those_captured_later():
    one = replace(GPU, graph_batch_sizes=(1, 64), max_num_tokens=1024)
    mixed = replace(one, graph_mixes=((64, 512), (8, 32)), graph_mixes_when_idle=((8, 64),))

    def graphs(config: RunConfig) -> int:
        groups = group_layers(layers(None, None), config)
        plan = make_plan(config, weights=0, activations=1 << 30, free=100 << 30, groups=groups)
        return plan.graphs

    largest = (64 + 512 - 64) / 1024 * (1 << 30)  # more than before, of the activations
    assert graphs(mixed) - graphs(one) == largest + 3 * 2 * (320 << 10)


def test_mixes_follow_when_fewer_sequences_fit():
    config = replace(
        GPU, graph_batch_sizes=(1, 100), graph_mixes=((100, 64), (32, 64), (8, 32)),
        graph_mixes_when_idle=((96, 64), (16, 64)),
    )  # fmt: skip
    limited = fitted(config, CacheSize(num_blocks=(9,), max_rows=30))
    assert limited.graph_mixes == ((30, 64), (8, 32))
    assert limited.graph_mixes_when_idle == ((16, 64),)
