"""The dense benchmark's own parts: floors, table, what is read from a trace, the even load."""

import json
import socketserver
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from decode_profile import Span, decoding_engine, exclusive, lines_of, short, whole_steps
from dense import compare, show
from floors import Floors
from shapes import ROWS, TABLE, model_folder
from sse_client import request_bytes
from steady_load import load

from penstock.config.schema import EngineConfig

# design figures: TPOT(1) in ms, then tok/s of 32 and of 256 requests at once
KNOWN_FLOORS = {
    "8b-bf16": (3.36, 5940, 11790),
    "8b-fp8": (1.82, 8930, 14600),
    "8b-fp8-kv8": (1.80, 11140, 21640),
    "70b-fp8-kv8": (15.7, 1530, 3190),
}


@pytest.mark.parametrize("name", TABLE)
def test_floors_computed_from_the_shape_are_the_known_ones(name):
    floors = Floors(ROWS[name]).figures([32, 256], 1024, 1024)
    tpot, c32, c256 = KNOWN_FLOORS[name]
    known = {"tpot1_ms": tpot, "c32_tok_s": c32, "c256_tok_s": c256}
    assert {key: floors[key] for key in known} == pytest.approx(known, rel=0.02)


def test_the_cache_of_the_large_model_does_not_hold_256_sequences():
    row = ROWS["70b-fp8-kv8"]
    held = Floors(row).burst_tok_s(201, 1024, 1024)
    assert held == pytest.approx(3605, rel=0.02)
    assert Floors(row).burst_tok_s(256, 1024, 1024) < 0.9 * held


def test_each_row_asks_the_engine_for_its_number_formats():
    bf16, fp8, fp8_cache, large = (ROWS[name].engine_settings(2048, 256) for name in TABLE)
    assert "model_kwargs" not in bf16
    assert fp8["model_kwargs"] == {"quantization_config": {"quant_algo": "FP8"}}
    assert "dtype" not in fp8["kv_cache_config"]
    assert fp8_cache["kv_cache_config"]["dtype"] == "fp8"
    assert (large["max_batch_size"], large["max_num_tokens"]) == (1024, 2048)
    assert large["cuda_graph_config"] == {"max_batch_size": 1024, "enable_padding": True}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_engine_knows_the_settings_of_a_row(row):
    config = EngineConfig(model="m", **row.engine_settings(2048, 256))
    assert config.load_format == "dummy"
    assert config.kv_cache_config.dtype == ("fp8" if row.has_fp8_cache else "auto")
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.9


def test_ratios_above_one_are_in_our_favour(capsys):
    figures = {"tpot1_ms": 4.2, "c32_tok_s": 5346.0, "ttft1_ms": 30.0}
    compared = compare(ROWS["8b-bf16"], figures, {"tpot1_ms": 3.36})
    assert compared["tpot1_ms"]["of_floor"] == pytest.approx(0.8)
    assert compared["tpot1_ms"]["of_goal"] == pytest.approx(3.8 / 4.2)
    assert compared["c32_tok_s"]["of_goal"] == pytest.approx(5346 / 5300)
    assert compared["c32_tok_s"]["of_peer"] == pytest.approx(5346 / 4251)
    assert compared["ttft1_ms"]["of_goal"] is None
    show("row", compared)
    assert "80.0 %" in capsys.readouterr().out


def test_exclusive_time_is_what_a_kernel_adds():
    spans = [Span("a", 0, 10), Span("b", 4, 14), Span("c", 5, 9), Span("d", 20, 21)]
    assert exclusive(spans) == [10, 4, 0, 1]


def test_a_product_is_known_by_its_place_in_the_step():
    row = ROWS["tiny"]
    floors = Floors(row)
    layer = ["_add_rms_norm", "_gemv", "_rope_kv_write", "_decode", "_reduce"]
    layer += ["void nvjet_tst_64x8<float>(int)", "_gemv", "_gemv"]
    step = ["_decode_inputs", *layer * 2, "_gemv", "_best_of_split"]
    names = ["_reduce", *step * 3]  # the end of one step, three, of which the last may be cut
    spans = [Span(name, 10.0 * i, 10.0 * i + 8.0) for i, name in enumerate(names)]
    assert [len(one) for one in whole_steps(spans)] == [len(step)] * 2
    lines = {line.name: line for line in lines_of(spans, floors, batch=2, context=100)}
    assert {"qkv: _gemv", "o: nvjet_tst_64x8", "gate_up: _gemv", "head: _gemv"} < lines.keys()
    assert lines["down: _gemv"].count == pytest.approx(2)
    assert lines["down: _gemv"].exclusive_us == pytest.approx(16)
    assert lines["down: _gemv"].floor_us == pytest.approx(2 * 128 * 256 * 2 / 4.52e6)
    assert lines["_decode"].floor_us == pytest.approx(2 * 2 * 100 * 2 * 64 * 2 / 4.52e6)
    assert lines["_reduce"].floor_us is None


def test_other_numbers_of_products_are_not_guessed():
    spans = [Span(name, i, i + 1) for i, name in enumerate(["_decode_inputs", "_gemv"] * 2)]
    lines = lines_of(spans, Floors(ROWS["tiny"]), batch=1, context=1)
    assert {line.name for line in lines} == {"_decode_inputs", "_gemv"}


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


class Answers(socketserver.BaseRequestHandler):
    """Each request gets as many events as it asks for tokens, in pieces."""

    def handle(self) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.request.recv(1)
        size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        body = b""
        while len(body) < size:
            body += self.request.recv(size - len(body))
        self.server.asked.append(json.loads(body))
        events = b'data: {"x":1}\n\n' * json.loads(body)["max_tokens"] + b"data: [DONE]\n\n"
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
        seen = load(server.server_address[1], requests, 3, ramp_s=0.2, watch_s=1.0, processes=2)
        server.shutdown()
    assert seen.problems == []
    assert len(server.asked) > 6
    assert {tuple(body["prompt"]) for body in server.asked} == {(i,) for i in range(6)}
    assert all(body["stream"] for body in server.asked)
    # all but those cut by the beginning and the end
    assert abs(seen.num_tokens - 5 * len(seen.firsts_s)) <= 3 * 5 * 2
    assert len(seen.gaps_s) <= seen.num_tokens
