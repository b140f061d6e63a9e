"""Layers that remember alike share a group; only the first one's size depends on the memory."""

from dataclasses import dataclass, replace

import pytest

from penstock.config.run import CapacityPolicy, RunConfig
from penstock.core.kv.groups import FullGroup, WindowGroup
from penstock.errors import ConfigError
from penstock.runtime.cache_groups import group_layers
from penstock.runtime.memory import make_plan
from penstock.types.cache_spec import FullKV

CONFIG = RunConfig(
    model="m", model_path="m", load_format="dummy", dtype="float32", device="cpu", num_threads=1,
    tp_size=1, max_batch_size=4, max_num_tokens=64, max_seq_len=256, max_queued=100,
    chunked_prefill=True, capacity_policy=CapacityPolicy.MAX_UTILIZATION, depth=2,
    tokens_per_block=16, block_reuse=False, partial_reuse=True, kv_dtype="float32",
    kv_max_tokens=None, kv_memory_fraction=0.9, kv_cpu_bytes=1 << 22, attention_backend="sdpa",
    graph_batch_sizes=(), graph_padding=True, seed=0,
)  # fmt: skip
WHOLE = FullKV(num_kv_heads=2, head_size=16, dtype="float32")


@dataclass(frozen=True)
class Layer:
    """All that grouping asks of one."""

    spec: FullKV

    def cache_spec(self) -> FullKV:
        return self.spec


def layers(*windows: int | None):
    return [Layer(replace(WHOLE, window=window)) for window in windows]


def test_layers_with_a_window_are_a_group_behind_those_without():
    own = layers(32, None, 32, None, None)
    whole, windowed = group_layers(own, CONFIG)
    assert whole.layers == (own[1], own[3], own[4]) and whole.window is None
    assert windowed.layers == (own[0], own[2]) and windowed.window == 32
    assert type(whole.cache_group(9, CONFIG)) is FullGroup
    assert type(windowed.cache_group(99, CONFIG)) is WindowGroup


@pytest.mark.parametrize("windows", [(256, None, 300), (32, 32), (None, None)])
def test_a_window_that_gives_nothing_back_is_none(windows):
    (group,) = group_layers(layers(*windows), CONFIG)
    assert group.window is None and len(group.layers) == len(windows)


def test_the_first_group_gets_the_memory_that_the_others_leave():
    groups = group_layers(layers(None, 32), CONFIG)
    plan = make_plan(CONFIG, weights=0, activations=0, free=0, groups=groups)
    assert plan.further_blocks == (WindowGroup.blocks_needed(32, 16, 4, 64, 2),)
    assert plan.block == groups[0].block_bytes(16) == 2 * 2 * 16 * 4 * 16
    assert plan.further == plan.further_blocks[0] * groups[1].block_bytes(16)
    assert 0 <= CONFIG.kv_cpu_bytes - plan.cache < plan.block
    with_reuse = replace(CONFIG, block_reuse=True)
    assert groups[1].fixed_blocks(with_reuse) == int(1.5 * plan.further_blocks[0])


def test_too_little_memory_for_the_further_groups_is_said():
    config = replace(CONFIG, kv_cpu_bytes=1 << 16)
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        make_plan(
            config, weights=0, activations=0, free=0, groups=group_layers(layers(None, 32), config)
        )
