"""The table's own parts: floors, what is read from a trace, experts counted, the even load."""

import json
import re
import socketserver
import sys
import threading
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from activated_experts import count_activated
from decode_profile import (
    EXPERT_KERNELS,
    FIRST_KERNEL,
    GEMM,
    MEMORY_KERNELS,
    Span,
    bytes_of,
    decoding_engine,
    exclusive,
    lines_of,
    short,
    whole_steps,
)
from results import Figure, read_runs, row_result, this_run, write_run
from roofline import Matrix, roofline_of
from shapes import DENSE, MOE, ROWS, SHAPES, model_folder
from sse_client import request_bytes
from steady_load import load
from table import compare, expected_s, parse, run_rows, show

import penstock
from penstock.config.schema import EngineConfig
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.gemm.wna16_packing import pack_gpu
from penstock.kernels.quantized_weight import random_quantized
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh

# design figures: TPOT(1) in ms, then tok/s of 32 and of 256 requests at once
KNOWN_ROOFLINES = {
    "8b-bf16": (3.36, 5940, 11790),
    "8b-fp8": (1.82, 8930, 14600),
    "8b-fp8-kv8": (1.80, 11140, 21640),
    "70b-fp8-kv8": (15.7, 1530, 3190),
    "30b-a3b": (1.38, 2450, 10670),
    "oss-20b": (0.83, 9600, 34600),
    "oss-120b": (1.12, 3160, 12260),
}
CONFIGS = Path(__file__).parents[4] / "shared" / "configs"
REAL = {
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen1.5-moe-a2.7b": "Qwen1.5-MoE-A2.7B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-next-80b": "Qwen3-Next-80B-A3B-Thinking",
    "deepseek-r1": "DeepSeek-R1-0528",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="real configs are not here")
@pytest.mark.parametrize("shape", REAL)
def test_a_shape_is_that_of_the_model(shape):
    real = json.loads((CONFIGS / REAL[shape] / "config.json").read_text())
    added = {"quantization_config"} if shape == "qwen3-next-80b" else {"torch_dtype"}
    ours = {name: value for name, value in SHAPES[shape].items() if name in real}
    assert ours == {name: real[name] for name in ours}
    assert SHAPES[shape].keys() - real.keys() <= added


@pytest.mark.parametrize("name", KNOWN_ROOFLINES)
def test_rooflines_computed_from_the_shape_are_the_known_ones(name):
    rooflines = roofline_of(ROWS[name]).figures([32, 256], 1024, 1024)
    tpot, c32, c256 = KNOWN_ROOFLINES[name]
    known = {"tpot1_ms": tpot, "c32_tok_s": c32, "c256_tok_s": c256}
    assert {key: rooflines[key] for key in known} == pytest.approx(known, rel=0.025)


@pytest.mark.parametrize("name", (*DENSE, *MOE))
def test_the_weights_of_a_roofline_are_those_that_the_engine_holds(name):
    row = ROWS[name]
    with model_folder(row) as folder:
        spec = parse_model_spec(Path(folder))
    nowhere = torch.device("meta")
    model = build_model(spec, RankMesh.single(), torch.bfloat16, nowhere, get_backend("reference"))
    held = sum(parameter.num_bytes for parameter in model.parameters())
    embedding = 2 * row.config["vocab_size"] * row.config["hidden_size"]
    assert held == pytest.approx(roofline_of(row).weight_bytes + embedding, rel=0.003)


@pytest.mark.parametrize(
    "name, kind, group", [("70b-nvfp4-kv8", "fp4", 16), ("70b-awq-kv8", "int4", 128)]
)
def test_the_quantized_weights_of_a_roofline_are_those_that_kernels_read(name, kind, group):
    quantized = random_quantized(kind, 256, 2048, group, kind == "int4", torch.device("cpu"))
    held = pack_gpu([quantized], keeps_zeros=True)
    assert held is not None
    (found,) = {matrix.kind for matrix in roofline_of(ROWS[name]).matrices[:-1]}
    assert held.num_bytes == pytest.approx(Matrix("", 256, 2048, found).num_bytes, rel=0.01)


def test_attention_that_is_left_plain_beside_quantized_experts_is_read_as_such():
    dense, experts = (roofline_of(ROWS["r1-13-layers-nvfp4"]).layers[i] for i in (0, 3))
    kinds = {matrix.name: matrix.kind for matrix in dense.matrices + experts.matrices}
    assert kinds["o"] == kinds["q_b"] == kinds["router"] == "bf16"
    assert kinds["gate_up"] == kinds["shared down"] == experts.experts.down.kind == "nvfp4"


@pytest.mark.parametrize("name, read_ms", [("next-80b-fp8", 17.9), ("oss-120b", 14.4)])
def test_a_lone_prompt_reads_its_weights_and_many_share_them(name, read_ms):
    roofline = roofline_of(ROWS[name])
    assert roofline.prompt_s(1024) * 1e3 == pytest.approx(read_ms, rel=0.01)
    assert roofline.prompt_among_many_s(1024) < roofline.prompt_s(1024)
    assert roofline.prompt_s(32768) == roofline.prompt_among_many_s(32768)  # FLOPs decide


def test_the_cache_of_the_large_model_does_not_hold_256_sequences():
    row = ROWS["70b-fp8-kv8"]
    held = roofline_of(row).burst_tok_s(201, 1024, 1024)
    assert held == pytest.approx(3605, rel=0.02)
    assert roofline_of(row).burst_tok_s(256, 1024, 1024) < 0.9 * held


def test_each_row_asks_the_engine_for_its_number_formats():
    bf16, fp8, fp8_cache, large = (ROWS[name].engine_settings(2048, 256) for name in DENSE)
    assert "quantization_config" not in ROWS["8b-bf16"].config
    assert ROWS["8b-fp8"].config["quantization_config"] == {"quant_algo": "FP8"}
    assert "dtype" not in bf16["kv_cache_config"] and "dtype" not in fp8["kv_cache_config"]
    assert fp8_cache["kv_cache_config"]["dtype"] == "fp8"
    assert (large["max_batch_size"], large["max_num_tokens"]) == (1024, 2048)
    assert large["cuda_graph_config"] == {"max_batch_size": 1024, "enable_padding": True}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_engine_knows_the_settings_of_a_row(row):
    config = EngineConfig(model="m", **row.engine_settings(2048, 256))
    assert config.load_format == "dummy"
    assert config.kv_cache_config.dtype == ("fp8" if row.has_fp8_cache else "auto")
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.9


@pytest.mark.parametrize("name", ("30b-a3b", "oss-120b", "next-80b-fp8"))
def test_of_the_experts_those_count_that_have_tokens(name):
    row = ROWS[name]
    evenly, few = roofline_of(row), roofline_of(row, {32: 20.0})
    assert evenly.num_activated(1) == pytest.approx(row.config["num_experts_per_tok"])
    assert few.num_activated(32) == 20.0 < evenly.num_activated(32)
    assert few.decode_step_s(32, 1024) < evenly.decode_step_s(32, 1024)
    assert few.decode_step_s(1, 1024) == evenly.decode_step_s(1, 1024)


def test_a_window_bounds_what_is_read_and_a_state_does_not_grow():
    windowed, full = roofline_of(ROWS["oss-20b"]).layers[:2]
    at = roofline_of(ROWS["oss-20b"]).at
    assert windowed.kv_s(4, 8000, at) == windowed.kv_s(4, 128, at)
    assert full.kv_s(4, 8000, at) == pytest.approx(80 * full.kv_s(4, 100, at))
    *states, attention = roofline_of(ROWS["next-80b-fp8"]).layers[:4]
    for state in states:
        assert state.kv_s(1, 8000, at) == state.kv_s(1, 1, at)
        assert 36 * state.state_bytes == pytest.approx(75.5e6, rel=0.01)
    assert attention.cached_bytes == 2 * 2 * 256 * 2


@pytest.mark.parametrize("name", ("tiny-moe", "tiny-oss", "tiny-next", "tiny-r1"))
def test_experts_are_counted_where_they_run(name):
    counted = count_activated(ROWS[name], [1, 3])
    experts = roofline_of(ROWS[name]).experts
    assert counted[1] == experts.num_active
    assert experts.num_active < counted[3] < experts.num_all
    assert counted[3] == pytest.approx(experts.expected(3), rel=0.3)


def test_rows_are_measured_told_and_saved(tmp_path, capsys):
    words = ["--rows", "tiny-moe", "--prompt", "8", "--tokens", "4", "--concurrency", "2"]
    args = parse([*words, "--output", str(tmp_path / "results" / "found.json")])
    run_rows(args, lambda row, args, tell: tell("tpot1_ms", 2.0) or {"tpot1_ms": 2.0})
    told = capsys.readouterr().out
    [(name, run)] = read_runs(tmp_path / "results").items()
    row = run.rows["tiny-moe"]
    assert (name, run.benchmark, run.engine) == ("found.json", "table", "penstock")
    assert run.workload == "8 in / 4 out" and run.software["torch"] and run.hardware
    assert row.model == ROWS["tiny-moe"].shape
    assert row.details["activated_experts"]["1"] == 8
    counted = {int(n): k for n, k in row.details["activated_experts"].items()}
    least = roofline_of(ROWS["tiny-moe"], counted).figures([2], 8, 4)["tpot1_ms"]
    assert row.figures == {"tpot1_ms": Figure(value=2.0, roofline=least)}
    assert "tiny-moe tpot1_ms 2.00" in told


def test_a_result_file_holds_what_every_mode_finds(tmp_path):
    found = {"cold_start_s": 28.8, "cold_phases": [{"phase": "import torch", "seconds": 3.5}]}
    path = tmp_path / "start.json"
    write_run(path, this_run("start", "1024 in / 1024 out", {"8b-bf16": row_result("m", found)}))
    [run] = read_runs(tmp_path).values()
    assert run.rows["8b-bf16"].figures == {"cold_start_s": Figure(value=28.8)}
    assert run.rows["8b-bf16"].details["cold_phases"][0]["seconds"] == 3.5


@pytest.mark.parametrize(
    "change", [{"rows": {}}, {"date": "16.11.2026"}, {"machine": "mine"}, {"engine": None}]
)
def test_a_result_file_that_is_not_one_is_refused(tmp_path, change):
    run = this_run("table", "w", {"tiny": row_result("m", {"tpot1_ms": 1.0})})
    (tmp_path / "bad.json").write_text(json.dumps(run.model_dump(mode="json") | change))
    with pytest.raises(ValueError, match=next(iter(change))):
        read_runs(tmp_path)


def test_old_names_of_groups_and_modes_are_accepted():
    assert parse(["--rows", "coded"]).rows == parse(["--rows", "weight-only"]).rows
    assert parse(["--touched"]).mode == parse(["--activated"]).mode == "activated"


def test_the_rows_with_experts_take_seven_minutes_at_most():
    args = parse(["--rows", "moe"])
    assert args.rows == list(MOE)
    assert sum(expected_s(ROWS[name], args) for name in args.rows) <= 7 * 60


def test_ratios_above_one_are_in_our_favor(capsys):
    figures = {"tpot1_ms": 4.2, "c32_tok_s": 5346.0, "ttft1_ms": 30.0}
    compared = compare(ROWS["8b-bf16"], figures, {"tpot1_ms": 3.36})
    assert compared["tpot1_ms"]["of_roofline"] == pytest.approx(0.8)
    assert compared["tpot1_ms"]["of_goal"] == pytest.approx(3.8 / 4.2)
    assert compared["c32_tok_s"]["of_goal"] == pytest.approx(5346 / 5300)
    assert compared["c32_tok_s"]["of_peer"] == pytest.approx(5346 / 4251)
    assert compared["ttft1_ms"]["of_goal"] is None
    show("row", compared)
    assert "80.0 %" in capsys.readouterr().out


def test_exclusive_time_is_what_a_kernel_adds():
    spans = [Span("a", 0, 10), Span("b", 4, 14), Span("c", 5, 9), Span("d", 20, 21)]
    assert exclusive(spans) == [10, 4, 0, 1]


def test_a_gemm_is_known_by_its_place_in_the_step():
    row = ROWS["tiny"]
    rooflines = roofline_of(row)
    layer = ["_add_rms_norm", "_gemv", "_rope_kv_write", "_decode", "_reduce"]
    layer += ["void nvjet_tst_64x8<float>(int)", "_gemv", "_gemv"]
    step = ["_decode_inputs", *layer * 2, "_gemv", "_best_of_split"]
    names = ["_reduce", *step * 3]  # the end of one step, three, of which the last may be cut
    spans = [Span(name, 10.0 * i, 10.0 * i + 8.0) for i, name in enumerate(names)]
    assert [len(one) for one in whole_steps(spans)] == [len(step)] * 2
    lines = {line.name: line for line in lines_of(spans, rooflines, batch=2, context=100)}
    assert {"qkv: _gemv", "o: nvjet_tst_64x8", "gate_up: _gemv", "head: _gemv"} < lines.keys()
    assert lines["down: _gemv"].count == pytest.approx(2)
    assert lines["down: _gemv"].exclusive_us == pytest.approx(16)
    assert lines["down: _gemv"].roofline_us == pytest.approx(2 * 128 * 256 * 2 / 4.52e6)
    assert lines["_decode"].roofline_us == pytest.approx(2 * 2 * 100 * 2 * 64 * 2 / 4.52e6)
    assert lines["_reduce"].roofline_us is None


def test_kernels_of_experts_and_memories_have_the_roofline_of_all_their_layers():
    row = ROWS["next-80b-fp8"]
    rooflines = roofline_of(row, {4: 30.0})
    kernels = [
        "_decode_inputs",
        "_step",
        "_gate_up_small_m",
        "_down_small_m",
        "_decode",
        "_grouped",
    ]
    spans = [Span(name, 10.0 * i, 10.0 * i + 8.0) for i, name in enumerate(kernels * 2)]
    lines = {line.name: line for line in lines_of(spans, rooflines, batch=4, context=100)}
    gate_up, down = (48 * 30 * n * 512 * 2048 * (8 + 1 / 512) / 8 / 4.52e6 for n in (2, 1))
    assert lines["_gate_up_small_m"].roofline_us == pytest.approx(gate_up)
    assert lines["_down_small_m"].roofline_us == pytest.approx(down)
    assert lines["_grouped"].roofline_us == pytest.approx(gate_up + down)
    assert lines["_step"].roofline_us == pytest.approx(36 * 2 * 4 * 32 * 128 * 128 * 4 / 4.28e6)
    assert lines["_decode"].roofline_us == pytest.approx(12 * 4 * 100 * 2 * 2 * 256 * 2 / 4.52e6)


def test_other_numbers_of_gemms_are_not_guessed():
    spans = [Span(name, i, i + 1) for i, name in enumerate(["_decode_inputs", "_gemv"] * 2)]
    lines = lines_of(spans, roofline_of(ROWS["tiny"]), batch=1, context=1)
    assert {line.name for line in lines} == {"_decode_inputs", "_gemv"}


def test_a_profile_knows_kernels_by_the_names_they_have():
    sources = (Path(penstock.__file__).parent / "kernels").rglob("*.py")
    jitted = re.compile(r"@(?:(?:triton|gluon)\.|gluon_|_)?jit(?:\([^)]*\))?\ndef (\w+)")
    kernels = {name for source in sources for name in jitted.findall(source.read_text())}
    known = {FIRST_KERNEL, *MEMORY_KERNELS, *bytes_of(roofline_of(ROWS["30b-a3b"]), 1)}
    known |= {part[1:] for part in GEMM.pattern.split("|") if part.startswith("^")}
    assert known <= kernels
    assert all(any(name.startswith(part) for name in kernels) for part in EXPERT_KERNELS)
    gemms = {"_gemv", "_small_m_gemm", "_int8_gemm", "_logits_sliced_k", "_wna16"}
    assert gemms <= kernels and all(map(GEMM.search, gemms))


def test_names_of_c_kernels_lose_their_parameters():
    assert short("void at::native::copy<at::X, 4>(int, at::Y<2>)") == "at::native::copy"
    assert short("_gemv") == "_gemv"


def test_the_profiled_engine_decodes_all_sequences():
    row = ROWS["tiny"]
    with model_folder(row) as folder:
        engine = decoding_engine(folder, row, batch=3, context=40)
        before = engine.counters.generated_tokens
        prefilled = engine.counters.prefill_chunks
        for _ in range(20):
            engine.turn()
        assert engine.counters.generated_tokens >= before + 3 * 9
        assert engine.counters.prefill_chunks == prefilled


class Answers(socketserver.StreamRequestHandler):
    """Each request gets as many events as it asks for tokens, in pieces."""

    def handle(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (line := self.rfile.readline()):
                return  # the time is over
            head += line
        size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        body = self.rfile.read(size)
        self.server.asked.append(json.loads(body))
        events = (
            b'data: {"choices":[{"text":"x"}]}\n\n' * json.loads(body)["max_tokens"]
            + b"data: [DONE]\n\n"
        )
        try:
            self.request.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            for i in range(0, len(events), 11):
                self.request.sendall(events[i : i + 11])
        except OSError:
            pass  # the time is over


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


def test_slots_ask_again_and_every_event_is_a_token():
    with Server(("127.0.0.1", 0), Answers) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        bodies = [{"prompt": [i], "max_tokens": 5} for i in range(6)]
        requests = [request_bytes("/v1/completions", body, usage=False) for body in bodies]
        seen = load(server.server_address[1], requests, 3, ramp_s=0.2, watch_s=1.0)
        server.shutdown()
    assert seen.problems == []
    assert len(server.asked) > 6
    assert {tuple(body["prompt"]) for body in server.asked} == {(i,) for i in range(6)}
    assert all(body["stream"] for body in server.asked)
    # all but those cut by the beginning and the end
    assert abs(seen.num_tokens - 5 * len(seen.firsts_s)) <= 3 * 5 * 2
    assert len(seen.gaps_s) <= seen.num_tokens
