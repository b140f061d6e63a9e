"""`penstock plan`: shards add up to the model, measured figures are near, commands are real."""

import json

import pytest

from penstock.bench.roofline import roofline_of
from penstock.bench.scaling import GPUS, Load, Strategy, best, outlook, strategies
from penstock.cli import flags
from penstock.cli.main import main
from penstock.cli.parser import Parser
from penstock.errors import ConfigError

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
QWEN_30B = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
LOAD = Load(256, 1024, 1024)


def plan(config, strategy, gpu="h200", load=LOAD):
    return outlook(config, strategy, GPUS[gpu], load)


@pytest.mark.parametrize("config", [LLAMA_8B, QWEN_30B])
def test_the_weights_of_all_ranks_are_those_of_the_model(config):
    whole = plan(config, Strategy(1, 1)).weight_bytes
    for strategy in strategies(config, 8):
        rank = plan(config, strategy).weight_bytes
        assert rank * strategy.tp_size == pytest.approx(whole, rel=0.01), strategy


def test_kv_heads_are_split_as_far_as_there_are_any():
    sequence = {
        tp_size: one.cache_bytes * 1 / one.max_running
        for tp_size in (1, 4, 8)
        for one in [plan(QWEN_30B, Strategy(1, tp_size))]
    }
    assert sequence[4] == pytest.approx(sequence[1] / 4, rel=0.01)
    assert sequence[8] == pytest.approx(sequence[4], rel=0.01)  # four heads on eight ranks


@pytest.mark.parametrize(
    "config, tpot_ms, c256_tok_s", [(LLAMA_8B, 3.87, 10133), (QWEN_30B, 2.22, 8536)]
)
def test_what_was_measured_on_an_h200_is_near(config, tpot_ms, c256_tok_s):
    one = plan(config, Strategy(1, 1))
    assert one.tpot_s * 1e3 == pytest.approx(tpot_ms, rel=0.12)
    assert one.tok_s == pytest.approx(c256_tok_s, rel=0.12)


def test_more_gpus_of_one_server_are_quicker_per_token_and_not_for_nothing():
    times = [plan(LLAMA_8B, Strategy(1, tp_size)).tpot_s for tp_size in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[3] < 8  # all-reduces are paid for
    alone, pair = (plan(LLAMA_8B, Strategy(n, 1), load=Load(64 * n, 1024, 1024)) for n in (1, 2))
    assert pair.tok_s == pytest.approx(2 * alone.tok_s)


def test_experts_are_read_as_evenly_as_matrices_where_all_have_tokens():
    sharded, spread = (plan(QWEN_30B, Strategy(1, 4, ep_size)) for ep_size in (1, 4))
    assert spread.weight_bytes == pytest.approx(sharded.weight_bytes)
    assert spread.tok_s == pytest.approx(sharded.tok_s, rel=0.02)


def test_strategies_divide_heads_and_experts():
    assert [str(one) for one in strategies(LLAMA_8B, 4)] == [
        "4 replicas x TP 1",
        "2 replicas x TP 2",
        "TP 4",
    ]
    assert str(strategies(QWEN_30B, 2)[-1]) == "TP 2 x EP 2"
    assert [one.tp_size for one in strategies({**LLAMA_8B, "num_attention_heads": 6}, 4)] == [1, 2]


def test_what_does_not_fit_is_refused_with_the_way_out():
    small = [plan(LLAMA_8B, one, "rtx4090") for one in strategies(LLAMA_8B, 1)]
    assert best(small, "latency").fits
    large = {**LLAMA_8B, "num_hidden_layers": 320}
    outlooks = [plan(large, one, "rtx4090") for one in strategies(large, 2)]
    with pytest.raises(ConfigError, match=r"GiB of weights per GPU with TP 2.*--gpus"):
        best(outlooks, "throughput")


@pytest.mark.parametrize("goal", ["throughput", "latency"])
def test_the_recommended_command_is_one_that_serve_understands(tmp_path, capsys, goal):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_30B))
    with pytest.raises(SystemExit, match="0"):
        arguments = ["--gpus", "8", "--gpu", "b200", "--goal", goal, "--kv_cache_dtype", "nvfp4"]
        main(["plan", str(tmp_path), *arguments, "--json"])
    rows = json.loads(capsys.readouterr().out)
    (chosen,) = (row for row in rows if row["recommended"])
    key = "tpot_ms" if goal == "latency" else "output_tok_s"
    assert chosen[key] == (min if goal == "latency" else max)(row[key] for row in rows)
    parser = Parser()
    flags.add_serve_flags(parser)
    parsed = parser.parse_args(chosen["command"].split()[2:])
    sizes = (getattr(parsed, f"{kind}_parallel_size", 1) for kind in ("tensor", "data"))
    assert tuple(sizes) == (chosen["tp_size"], chosen["replicas"])
    assert getattr(parsed, "kv_cache_config.dtype") == "nvfp4"


def test_a_quantized_folder_is_read_with_its_quantization(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "FP8"}})
    )
    with pytest.raises(SystemExit, match="0"):
        main(["plan", str(tmp_path), "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    plain = roofline_of(LLAMA_8B).weight_bytes
    assert row["weight_bytes_per_gpu"] < 0.65 * plain


def test_a_4_bit_cache_holds_as_many_more_sequences_as_it_is_smaller():
    (one,) = strategies(LLAMA_8B, 1)
    load = Load(256, 1024, 1024)
    plain, half, quarter = (
        outlook(LLAMA_8B, one, GPUS["h200"], load, cache=cache)
        for cache in ("auto", "fp8", "nvfp4")
    )
    assert half.max_running == pytest.approx(2 * plain.max_running, abs=2)
    assert quarter.max_running == pytest.approx(plain.max_running * 16 / 4.5, abs=4)
    assert quarter.loaded_tpot_s < half.loaded_tpot_s < plain.loaded_tpot_s


def test_a_4_bit_cache_of_latents_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "kv_lora_rank": 512}))
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(tmp_path), "--kv_cache_dtype", "nvfp4"])
    assert "the latents of this model cannot have; use fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--gpu", "h20"], "did you mean"),
        (["--gpus", "0"], "at least 1"),
    ],
)
def test_mistakes_are_told(tmp_path, capsys, arguments, words):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(tmp_path), *arguments])
    assert words in capsys.readouterr().err
