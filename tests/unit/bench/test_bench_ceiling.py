"""The share of the ceiling, beside floors that were computed by hand."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from shapes import LLAMA_3_1_8B
from test_bench_figures import make_figures

from penstock.bench.ceiling import ceiling_of
from penstock.errors import ConfigError


def test_one_stream_of_llama_8b_may_not_be_faster_than_its_weights_are_read():
    figures = make_figures()  # 160 tokens in, 9 out, three requests; TPOT 375 and 1000 ms
    found = ceiling_of(LLAMA_3_1_8B, "h200", figures, num_running=1, has_fp8_cache=False)
    # 7.5 G weights (all but the embedding) of 2 bytes at 4.52 TB/s; the cache adds next to nothing.
    assert found.tpot_ms == pytest.approx(7.50e9 * 2 / 4.52e12 * 1e3, rel=0.01)
    assert found.tpot_share == pytest.approx(found.tpot_ms / 687.5)
    assert found.throughput_share == pytest.approx(2.25 / found.output_throughput)
    assert 0.5 < found.output_throughput * found.tpot_ms / 1e3 <= 1  # the prompt takes its time
    more = ceiling_of(LLAMA_3_1_8B, "h200", figures, num_running=64, has_fp8_cache=False)
    assert 5 < more.output_throughput / found.output_throughput < 64  # prompts do not share


def test_a_configuration_without_sizes_is_refused():
    with pytest.raises(ConfigError, match="no 'hidden_size'"):
        ceiling_of(json.loads("{}"), "h200", make_figures(), 1, False)
