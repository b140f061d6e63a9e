"""Tuned launch configs: where they come from, that every file is usable, how the best is found."""

import dataclasses
import itertools
import json
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from penstock.cli.main import _tuned_ops, main
from penstock.errors import ConfigError
from penstock.kernels import triton_cache, tuned, tuning, tuning_case
from penstock.kernels.attention import triton_decode
from penstock.kernels.attention import tuning as attention_tuning
from penstock.kernels.attention.triton_decode import DecodeConfig, Load, decode_config, load_of
from penstock.kernels.attention.triton_prefill import PrefillConfig, prefill_config
from penstock.kernels.device import probe
from penstock.kernels.gemm import tuning as gemm_tuning
from penstock.kernels.gemm.gemv import GemvConfig, gemv_config
from penstock.kernels.gemm.small_m import (
    USE_CUBLAS,
    SmallMGemmConfig,
    is_faster_than_cublas,
    small_m_gemm_config,
)
from penstock.kernels.moe import tuning as experts_tuning
from penstock.kernels.moe.grouped_gemm import GroupedConfig, grouped_config
from penstock.kernels.moe.mxfp4_triton import Mxfp4Config, mxfp4_config
from penstock.kernels.moe.small_m import SmallMConfig, small_m_config
from penstock.kernels.moe.tuning import Layer

CPU = torch.device("cpu")
FILES = sorted(f.name for f in resources.files(tuned).iterdir() if f.name.endswith(".json"))
KINDS = {
    "gemv": GemvConfig,
    "small_m": SmallMGemmConfig,
    "decode": DecodeConfig,
    "prefill": PrefillConfig,
    "experts small_m": SmallMConfig,
    "experts grouped": GroupedConfig,
    "experts mxfp4": Mxfp4Config,
}
H200 = "NVIDIA H200"
LLAMA_8B = tuning.SHAPES["llama-3.1-8b"]
TINY = tuning.Shape(
    hidden=64, features=96, heads=2, kv_heads=1, head_size=16, vocabulary=80,
    experts=Layer(hidden=64, features=32, num_experts=5, num_active=2, format="plain"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    experts = (small_m_config, grouped_config, mxfp4_config)
    gemms = (gemv_config, small_m_gemm_config)
    for cached in (tuned.entries, *gemms, decode_config, prefill_config, *experts):
        cached.cache_clear()


@pytest.fixture
def on_gpu(monkeypatch):
    """Say that this machine has that GPU."""

    def pretend(name: str) -> None:
        device = dataclasses.replace(probe(), kind="cuda", name=name, arch=90)
        for module in (tuned, tuning, triton_cache):
            monkeypatch.setattr(module, "probe", lambda: device)

    return pretend


def own(gpu: str, **ops) -> None:
    file = tuned.own_file(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"gpu": gpu, "ops": ops}))
    forget()


@pytest.mark.parametrize("name", FILES)
def test_every_entry_of_a_shipped_file_is_a_configuration_of_a_known_shape(name):
    content = json.loads((resources.files(tuned) / name).read_text())
    assert tuned.file_name(content["gpu"]) == name
    assert content["ops"].keys() <= KINDS.keys()
    shapes = {
        (one.op, one.key)
        for shape in tuning.SHAPES.values()
        for one in tuning.subjects(shape, tuning.OPS)
    }
    for op, entries in content["ops"].items():
        for key, fields in entries.items():
            config = KINDS[op](**fields)
            assert all(isinstance(value, int) and value >= 0 for value in fields.values())
            assert config == USE_CUBLAS or all(fields.values())
            assert config.num_warps in (1, 2, 4, 8, 16)
            assert (op, key) in shapes


def test_an_h200_has_a_file():
    assert "nvidia-h200.json" in FILES
    assert tuned.ceilings(H200)["read_tbps"] == 4.52
    assert len(tuned.entries(H200)["gemv"]) >= 8


def test_ceilings_are_those_the_benchmark_counts_with():
    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    import roofline

    known = tuned.ceilings(H200)
    assert known["read_tbps"] * 1e12 == roofline.H200.read_bytes_s
    assert known["bf16_tflops"] * 1e12 == roofline.H200.flops["bf16"]


def test_an_entry_is_found_by_shape_and_other_shapes_have_the_default(on_gpu):
    usual = gemv_config(512, 4096, 2, 1)
    key = tuned.key(outputs=512, inputs=4096, bits=16, tokens=1)
    own("Fast GPU 9000", gemv={key: {"rows": 16, "block": 64, "num_warps": 1}})
    assert gemv_config(512, 4096, 2, 1) == usual  # of another GPU
    on_gpu("Fast GPU 9000")
    forget()
    assert gemv_config(512, 4096, 2, 1) == GemvConfig(16, 64, 1)
    assert gemv_config(512, 4096, 1, 1) == GemvConfig(2, 4096, 4)
    assert gemv_config(512, 4096, 2, 2) == usual
    assert gemv_config(1024, 4096, 2, 1) == usual


def test_what_was_tuned_here_comes_before_what_is_shipped(on_gpu):
    on_gpu(H200)
    forget()
    shipped = gemv_config(6144, 4096, 2, 1)
    key = tuned.key(outputs=6144, inputs=4096, bits=16, tokens=1)
    own(H200, gemv={key: {"rows": 1, "block": 1024, "num_warps": 4}})
    assert gemv_config(6144, 4096, 2, 1) == GemvConfig(1, 1024, 4) != shipped
    assert gemv_config(4096, 4096, 2, 1) == GemvConfig(2, 2048, 8)


def test_cublas_multiplies_where_it_was_measured_faster(on_gpu):
    weight_OI = torch.empty(8192, 1024, dtype=torch.bfloat16)
    key = tuned.key(outputs=8192, inputs=1024, bits=16, tokens=32)
    on_gpu("g")
    own("g", small_m={key: dataclasses.asdict(USE_CUBLAS)})
    assert not is_faster_than_cublas(32, weight_OI)
    assert is_faster_than_cublas(16, weight_OI)  # 128 programs
    own("g", small_m={key: {"outputs": 32}})
    assert is_faster_than_cublas(32, weight_OI)
    assert small_m_gemm_config(8192, 1024, 2, 32, False) == SmallMGemmConfig(outputs=32)
    assert not is_faster_than_cublas(65, weight_OI)
    assert not is_faster_than_cublas(32, weight_OI[:512])


def test_files_of_earlier_versions_are_read_by_the_old_names_of_ops(on_gpu):
    key = tuned.key(outputs=8192, inputs=1024, bits=16, tokens=32)
    experts = tuned.key(outputs=64, inputs=128, bits=16)
    on_gpu("g")
    old = {"tiles": {key: {"outputs": 16}}, "coded": {}}
    own("g", **old, **{"experts few": {experts: {"rows": 1, "tiles": 1, "num_warps": 2}}})
    assert tuned.entries("g").keys() == {"small_m", "weight_only", "experts small_m"}
    assert small_m_gemm_config(8192, 1024, 2, 32, False) == SmallMGemmConfig(outputs=16)
    assert small_m_config(64, 128, 16, 2) == SmallMConfig(1, 1, 2)


def test_attention_is_looked_up_by_heads_and_number_formats(on_gpu):
    for op, dims in (
        ("decode", dict(heads=32, kv_heads=8, head_size=128, cache_bits=8, sequences=256)),
        ("prefill", dict(heads=32, kv_heads=8, head_size=128, bits=16, cache_bits=8)),
    ):
        on_gpu("g")
        own("g", **{op: {tuned.key(**dims): {"tile": 32}}})
        if op == "decode":
            assert decode_config(32, 8, 128, 8, Load.MANY_WAVES) == DecodeConfig(tile=32)
            assert decode_config(32, 8, 128, 8, Load.ONE_WAVE).tile == 128
            assert decode_config(32, 8, 128, 16, Load.MANY_WAVES).tile == 64
        else:
            assert prefill_config(32, 8, 128, 2, 8) == PrefillConfig(tile=32)
            assert prefill_config(32, 8, 128, 2, 16) == PrefillConfig()


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"ops": {"gemv": 1}}', '{"ops": {"gemv": {"KEY": {"x": 1}}}}']
)
def test_a_file_that_cannot_be_used_is_named(on_gpu, text):
    on_gpu("g")
    file = tuned.own_file("g")
    file.parent.mkdir(parents=True)
    key = tuned.key(outputs=8, inputs=8, bits=16, tokens=1)
    file.write_text(text.replace("KEY", key))
    forget()
    with pytest.raises(ConfigError, match=r"g\.json.*penstock tune"):
        gemv_config(8, 8, 2, 1)


@pytest.mark.parametrize(
    ("num_sequences", "longest", "load"),
    [
        (1, 4096, Load.PARTIAL_WAVE),
        (6, 4096, Load.PARTIAL_WAVE),  # 48 programs on 132 multiprocessors
        (8, 4096, Load.ONE_WAVE),
        (8, 131072, Load.PARTIAL_WAVE),  # one long sequence would keep the others waiting
        (16, 131072, Load.ONE_WAVE),
        (17, 4096, Load.FEW_WAVES),
        (32, 131072, Load.FEW_WAVES),
        (128, 131072, Load.MANY_WAVES),
        (1, 256, Load.MANY_WAVES),  # or a window
    ],
)
def test_the_load_of_decodes_follows_from_how_far_they_fill_a_gpu(num_sequences, longest, load):
    assert load_of(8 * num_sequences, longest) is load


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_decodes_fit_into_the_shared_memory_of_any_gpu(monkeypatch, kib):
    monkeypatch.setattr(triton_decode, "shared_bytes", lambda: kib << 10)
    for load, head_size, num_bytes in itertools.product(Load, (64, 80, 128, 256), (1, 2)):
        decode_config.cache_clear()
        c = decode_config(32, 8, head_size, 8 * num_bytes, load)
        row_bytes = 2 * triton.next_power_of_2(head_size) * num_bytes
        assert c.tile * row_bytes * (c.num_stages // 2) < kib << 10
        assert c.tile // c.num_warps >= 16
    decode_config.cache_clear()


def test_subjects_are_what_the_kernels_ask_for():
    found = {(one.op, one.key) for one in tuning.subjects(LLAMA_8B, tuning.OPS)}
    assert ("gemv", tuned.key(outputs=28672, inputs=4096, bits=8, tokens=1)) in found
    assert ("gemv", tuned.key(outputs=128256, inputs=4096, bits=16, tokens=2)) in found
    assert ("gemv", tuned.key(outputs=28672, inputs=4096, bits=8, tokens=2)) not in found
    assert not any("outputs=128256" in key and "bits=8 " in key for _, key in found)
    assert len([key for op, key in found if op == "decode"]) == 8
    assert len([key for op, key in found if op == "prefill"]) == 2
    assert {one.op for one in tuning.subjects(LLAMA_8B, ["decode"])} == {"decode"}


@pytest.mark.parametrize("op", tuning.OPS)
def test_candidates_begin_with_the_present_one_and_are_all_different(op):
    shapes = tuning.SHAPES.values()
    subjects = [subject for shape in shapes for subject in tuning.subjects(shape, [op])]
    assert subjects
    for subject in subjects:
        tried = tuning.candidates(subject)
        assert tried[0] == tuning.now_used(subject)
        assert len(tried) == len(set(tried)) > 8
        assert all(type(config) is KINDS[subject.op] for config in tried)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")
@pytest.mark.parametrize("format", ["plain", "fp8 outputs", "fp8 blocks", "mxfp4"])
def test_entries_of_experts_are_those_that_the_kernels_look_for(monkeypatch, format):
    asked = []
    monkeypatch.setattr(tuned, "best", lambda op, usual, **key: asked.append((op, key)) or usual)
    monkeypatch.setattr(experts_tuning, "_TOKENS", (1, 9))
    layer = Layer(hidden=64, features=32, num_experts=4, num_active=2, format=format)
    shape = dataclasses.replace(TINY, experts=layer)
    subjects = tuning.subjects(shape, ["experts"])
    assert len(subjects) == 4
    for subject in subjects:
        config = tuning.now_used(subject)
        assert asked == [(subject.op, dict(subject.dims))]
        for case in tuning.compiling_cases(subject, CPU) if format in ("plain", "mxfp4") else ():
            assert case.output(config).isfinite().all()
        forget()
        asked.clear()


def search_with(monkeypatch, op, time_of, num=3):
    """Search among a few candidates; a timing is `time_of(configuration)`."""
    subject = tuning.subjects(TINY, [op])[0]
    tried = tuning.candidates(subject)[:num]
    monkeypatch.setattr(tuning_case, "L2_BYTES", 1)
    monkeypatch.setattr(attention_tuning, "_MAX_KV_LEN", 512)
    short = {load: ((0.0, 64), (0.03, 96)) for load in Load}
    monkeypatch.setattr(attention_tuning, "_DECODE_CASES", short)
    monkeypatch.setattr(attention_tuning, "_PREFILL_CASES", ((1, 64),))
    monkeypatch.setattr(tuning, "graph_us", lambda launches: time_of(launches[0].args[0]))
    return subject, tried, tuning.search(subject, tried, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")
@pytest.mark.parametrize("op", tuning.OPS)
def test_the_fastest_candidate_wins_and_is_written(monkeypatch, on_gpu, op, home):
    order = iter(range(100))
    known: dict = {}

    def time_of(config) -> float:
        return known.setdefault(config, 100.0 - next(order))

    subject, tried, found = search_with(monkeypatch, op, time_of)
    assert found.best == tried[2] != found.now == tried[0]
    for launch_of in (tuning.cases, tuning.compiling_cases):
        assert all(case.output(tried[1]).isfinite().all() for case in launch_of(subject, CPU))
    assert [case[2:] for case in found.cases] == [(98.0, 100.0)] * len(found.cases)
    on_gpu("My GPU")
    file = tuned.own_file("My GPU")
    tuning.write(file, [found])
    assert file == home / "tuned" / "my-gpu.json"
    forget()
    assert tuning.now_used(subject) == tried[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")
def test_noise_and_wrong_results_do_not_win(monkeypatch):
    now = tuning.now_used(tuning.subjects(TINY, ["gemv"])[0])
    *_, found = search_with(monkeypatch, "gemv", lambda c: 10.0 if c == now else 9.95)
    assert found.best == now
    real = gemm_tuning.gemv

    def wrong(*args, config, **kwargs):
        return real(*args, config=config, **kwargs) * (1 if config == now else 2)

    monkeypatch.setattr(gemm_tuning, "gemv", wrong)
    *_, found = search_with(monkeypatch, "gemv", lambda c: 10.0 if c == now else 1.0)
    assert found.best == now


def test_a_file_keeps_its_other_entries_and_belongs_to_one_gpu(on_gpu, tmp_path):
    on_gpu("a")
    file = tmp_path / "a.json"
    old = {"gpu": "a", "ceilings": {"read_tbps": 1.0}, "ops": {"gemv": {"x": {"rows": 1}}}}
    file.write_text(json.dumps(old))
    subject = tuning.Subject("gemv", (("outputs", 8),))
    tuning.write(file, [tuning.Found(subject, GemvConfig(1, 2, 4), GemvConfig(1, 2, 4), ())])
    content = json.loads(file.read_text())
    assert content["ceilings"] == {"read_tbps": 1.0}
    entry = {"rows": 1, "block": 2, "num_warps": 4}
    assert content["ops"]["gemv"] == {"x": {"rows": 1}, "outputs=8": entry}
    on_gpu("b")
    with pytest.raises(ConfigError, match="is for 'a', this is 'b'"):
        tuning.write(file, [])


def test_a_candidate_that_does_not_compile_says_why():
    subject = tuning.subjects(TINY, ["gemv"])[0]
    refusal = tuning.compile_candidate((subject, tuning.now_used(subject)))
    assert (refusal is None) == torch.cuda.is_available()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--model", "llama-3.1-8b"])
    assert ended.value.code == 1
    assert "tuning needs a GPU" in capsys.readouterr().err


def test_ops_may_be_given_by_their_old_names():
    assert _tuned_ops("gemv,tiles") == ("gemv", "small_m")


def test_an_unknown_op_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--ops", "gemv,nothing"])
    assert ended.value.code == 2
    assert "gemv, small_m, decode, prefill, experts" in capsys.readouterr().err


# Where Triton keeps binaries


def test_binaries_are_kept_apart_by_gpu_and_versions(on_gpu, monkeypatch, home):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    on_gpu(H200)
    triton_cache.use_cache_folder()
    folder = Path(triton_cache.os.environ["TRITON_CACHE_DIR"])
    assert folder.parent == home / "triton"
    assert folder.name.startswith("nvidia-h200-torch-")
    assert folder.is_dir()
    device = dataclasses.replace(probe(), name="other", triton_version="99")
    assert triton_cache.cache_folder(device).name.startswith("other-torch-")
    assert "triton-99" in triton_cache.cache_folder(device).name


def test_the_users_own_folder_stays(monkeypatch, home):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    triton_cache.use_cache_folder()
    assert triton_cache.os.environ["TRITON_CACHE_DIR"] == "/somewhere"
    assert not (home / "triton").exists()


def test_a_folder_that_cannot_be_made_leaves_triton_its_own(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    triton_cache.use_cache_folder()
    assert "TRITON_CACHE_DIR" not in triton_cache.os.environ
    assert "cached where Triton likes" in caplog.text


def test_triton_reads_the_variable_when_it_compiles(monkeypatch):
    """It is set after Triton may have been imported."""
    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert knobs.cache.dir == "/elsewhere"


def test_what_is_compiled_while_serving_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = pytest.importorskip("triton").knobs.runtime
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, hook, None)
    now = 0.0
    monkeypatch.setattr(triton_cache.time, "monotonic", lambda: now)
    triton_cache.report_compilations()
    with caplog.at_level("WARNING"):
        for name, seconds in (("_quick", 0.05), ("_slow", 2.0)):
            is_done = runtime.jit_cache_hook(key=name, fn=None, already_compiled=False)
            assert not is_done  # else Triton would not compile
            now += seconds
            runtime.jit_post_compile_hook(key=name, fn=SimpleNamespace(name=name))
    (record,) = caplog.records
    assert record.getMessage() == "kernel _slow was compiled while serving, in 2.0 s"
