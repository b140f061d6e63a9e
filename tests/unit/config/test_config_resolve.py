"""Every automatic choice, with its reason, on made-up models and devices."""

from dataclasses import replace

import pytest
from made_up import CPU, DELTA, EXPERTS, GIB, GPU, make_device, make_spec, reason, run

from penstock.config.resolve import resolve
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.cache_spec import NVFP4
from penstock.types.model_spec import (
    DeltaSpec,
    LatentSpec,
    QuantPart,
    QuantSpec,
    W8A8Spec,
    WeightOnlySpec,
)


def test_defaults_on_a_gpu():
    config = run(GPU)
    assert (config.model, config.model_path) == ("m", "/models/m")
    assert (config.device, config.dtype, config.attention_backend) == ("cuda", "bfloat16", "triton")
    assert (config.max_batch_size, config.max_num_tokens, config.max_seq_len) == (2048, 8192, 4096)
    assert config.depth == 2
    assert config.graph_batch_sizes[:3] == (1, 2, 4) and config.graph_batch_sizes[-1] == 512
    assert config.graph_padding
    assert config.kv_cpu_bytes == 0
    assert config.kv_dtype == "bfloat16"


def test_codes_on_a_cpu_are_multiplied_with_16_bits_where_asked():
    for asked, path, expected in (
        ("bfloat16", "/models/m.gguf", ("float32", True)),
        ("auto", "/models/m.gguf", ("float32", False)),
        ("float32", "/models/m.gguf", ("float32", False)),
        ("bfloat16", "/models/m", ("bfloat16", False)),
    ):
        config = resolve(EngineConfig(model="m", dtype=asked), make_spec(), CPU, path)
        assert (config.dtype, config.reduced_precision_matmul) == expected
    config = resolve(EngineConfig(model="m", dtype="bfloat16"), make_spec(), GPU, "/models/m.gguf")
    assert (config.dtype, config.reduced_precision_matmul) == ("bfloat16", False)


def test_defaults_on_a_cpu():
    config = run(CPU)
    assert (config.device, config.dtype, config.attention_backend) == ("cpu", "float32", "sdpa")
    assert (config.max_batch_size, config.max_num_tokens) == (64, 2048)
    assert config.depth == 1
    assert config.graph_batch_sizes == ()
    assert config.kv_cpu_bytes == GIB
    assert config.num_threads == 16


@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_every_choice_has_a_value_and_a_reason_and_a_name_of_the_run(device):
    config = run(device)
    names = [choice.name for choice in config.choices]
    assert len(names) == len(set(names)) >= 10
    for choice in config.choices:
        assert choice.value and choice.reason
        assert hasattr(config, choice.name)


@pytest.mark.parametrize(
    ("device", "spec_dtype", "asked", "expected", "why"),
    [
        (GPU, "bfloat16", "auto", "bfloat16", "checkpoint"),
        (GPU, "float32", "auto", "float32", "checkpoint"),
        (GPU, "bfloat16", "float16", "float16", "set by dtype"),
        (make_device(arch=75), "bfloat16", "auto", "float16", "sm_75 has no fast bfloat16"),
        (CPU, "bfloat16", "auto", "float32", "CPU"),
        (CPU, "bfloat16", "bfloat16", "bfloat16", "set by dtype"),
    ],
)
def test_dtype(device, spec_dtype, asked, expected, why):
    config = run(device, make_spec(dtype=spec_dtype), dtype=asked)
    assert config.dtype == config.kv_dtype == expected
    assert why in reason(config, "dtype")


@pytest.mark.parametrize(
    "asked", ["TRTLLM", "FLASHINFER", "VANILLA", "FLASHINFER_STAR_ATTENTION", "X"]
)
def test_foreign_attention_names_become_the_best_that_fits(asked):
    assert run(GPU, attn_backend=asked).attention_backend == "triton"
    config = run(CPU, attn_backend=asked)
    assert config.attention_backend == "sdpa"
    assert f"stands in for {asked}" in reason(config, "attention_backend")


@pytest.mark.parametrize("asked", ["reference", "sdpa"])
def test_own_attention_names_are_honoured(asked):
    assert run(GPU, attn_backend=asked).attention_backend == asked
    assert run(CPU, attn_backend=asked).attention_backend == asked


def test_triton_attention_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="needs a GPU and the triton package"):
        run(CPU, attn_backend="triton")


def test_a_gpu_without_triton_falls_back():
    config = run(make_device(triton_version=None))
    assert config.attention_backend == "sdpa"
    assert config.graph_batch_sizes == ()
    assert "cannot be captured" in reason(config, "graph_batch_sizes")


def test_device_may_be_forced_to_the_cpu_but_not_to_a_missing_gpu():
    assert run(GPU, device="cpu").device == "cpu"
    with pytest.raises(ConfigError, match="there is no GPU; set device to cpu or auto"):
        run(CPU, device="cuda")


def test_sequence_length_beyond_the_model_is_lowered_with_a_reason():
    config = run(GPU, max_seq_len=100_000)
    assert config.max_seq_len == 4096
    assert "lowered from 100000" in reason(config, "max_seq_len")


def test_on_a_cpu_the_sequence_fits_the_cache():
    long = make_spec(max_position=10**6, num_layers=32, num_kv_heads=8, head_size=128)
    config = run(CPU, long)
    bytes_per_token = 32 * 2 * 8 * 128 * 4
    assert (config.max_seq_len + config.tokens_per_block) * bytes_per_token <= config.kv_cpu_bytes
    assert "what the cache holds" in reason(config, "max_seq_len")


def test_on_a_cpu_an_asked_sequence_length_grows_the_cache():
    long = make_spec(max_position=10**6, num_layers=32, num_kv_heads=8, head_size=128)
    config = run(CPU, long, max_seq_len=8192)
    assert config.max_seq_len == 8192
    assert GIB < config.kv_cpu_bytes <= 12 * GIB


def test_on_a_cpu_the_cache_is_not_sized_for_more_than_the_model_has_positions():
    spec = make_spec(max_position=8192, num_layers=30, num_kv_heads=3, head_size=64)
    config = run(CPU, spec, max_seq_len=100_000)
    assert config.max_seq_len == 8192
    assert config.kv_cpu_bytes == GIB  # 4.3 GiB would hold 100000 tokens


def test_on_a_gpu_sequences_are_no_longer_than_its_memory_could_cache():
    spec = make_spec(max_position=1 << 23, num_layers=32, num_kv_heads=8, head_size=128)
    config = run(GPU, spec)
    assert config.max_seq_len == 140 * GIB // (32 * 2 * 8 * 128 * 2)
    assert "lowered from 8388608" in reason(config, "max_seq_len")
    windows = (None, 128) * 16
    windowed = run(GPU, replace(spec, window=128, layer_windows=windows))
    assert windowed.max_seq_len == 2 * config.max_seq_len


def test_on_a_cpu_max_tokens_sets_the_cache():
    config = run(CPU, kv_cache_config={"max_tokens": 100})
    block_bytes = 32 * 4 * 2 * 2 * 64 * 4
    assert config.kv_cpu_bytes == 5 * block_bytes  # 4 blocks for 100 tokens and the reserved one
    assert config.max_seq_len == 128
    with pytest.raises(ConfigError, match="half of the memory"):
        run(CPU, kv_cache_config={"max_tokens": 10**9})


def test_a_small_machine_gives_a_tenth_of_its_memory():
    assert run(make_device("cpu", total_bytes=2 * GIB)).kv_cpu_bytes == 2 * GIB // 10


@pytest.mark.parametrize(
    ("settings", "rows", "tokens"),
    [
        ({"max_batch_size": 720, "max_num_tokens": 16384}, 720, 16384),
        ({"max_batch_size": 10000}, 10000, 10000),
        ({"max_num_tokens": 512}, 512, 512),
        ({"max_batch_size": 64, "max_num_tokens": 16}, 16, 16),
    ],
)
def test_each_sequence_of_a_step_has_a_token(settings, rows, tokens):
    config = run(GPU, **settings)
    assert (config.max_batch_size, config.max_num_tokens) == (rows, tokens)


def test_overlap_follows_the_setting_where_it_is_given():
    assert run(GPU, disable_overlap_scheduler=True).depth == 1
    assert run(CPU, disable_overlap_scheduler=False).depth == 2


def test_graphs_can_be_turned_off():
    config = run(GPU, cuda_graph_config=None)
    assert config.graph_batch_sizes == () and not config.graph_padding


def test_recipe_graphs_follow_the_batch_limit():
    config = run(GPU, max_batch_size=720, cuda_graph_config={"max_batch_size": 720})
    assert config.graph_batch_sizes[-2:] == (704, 720)
    config = run(GPU, max_batch_size=16, cuda_graph_config={"max_batch_size": 720})
    assert config.graph_batch_sizes == (1, 2, 4, 8, 16)


def test_graphs_have_room_for_drafted_tokens():
    asked = {"decoding_type": "NGram", "max_draft_len": 3}
    config = run(GPU, max_batch_size=16, speculative_config=asked)
    assert config.graph_batch_sizes == (1, 2, 4, 8, 16, 32, 64)
    assert "room for drafted tokens" in reason(config, "graph_batch_sizes")
    exact = {"enable_padding": False, "batch_sizes": [1, 3]}
    config = run(GPU, max_batch_size=16, speculative_config=asked, cuda_graph_config=exact)
    assert config.graph_batch_sizes == (1, 3, 4, 12)


def test_auto_drafts_with_the_models_head_or_by_ngrams():
    config = run(speculative_config="auto")
    assert type(config.drafting).__name__ == "NGramDrafting" and config.max_drafts == 4
    assert reason(config, "decoding_type")


def test_partial_reuse_needs_reuse():
    config = run(kv_cache_config={"enable_block_reuse": False, "enable_partial_reuse": True})
    assert not config.block_reuse and not config.partial_reuse


def test_requests_that_leave_the_cache_have_an_eighth_of_host_memory_unless_set():
    assert run().host_cache_bytes == 16 * GIB
    two = run(replace(GPU, num_devices=2), tensor_parallel_size=2)
    assert two.host_cache_bytes == 8 * GIB and "2 rank(s)" in reason(two, "host_cache_bytes")
    assert run(kv_cache_config={"host_cache_size": 0}).host_cache_bytes == 0
    assert run(kv_cache_config={"host_cache_size": 5}).host_cache_bytes == 5
    assert run(CPU).host_cache_bytes == 0


def test_scheduling_settings_are_passed_on():
    config = run(
        scheduler_config={
            "capacity_scheduler_policy": "GUARANTEED_NO_EVICT",
            "waiting_queue_policy": "fcfs",
        },
        max_queued_requests=7,
        seed=5,
    )
    assert config.capacity_policy == "GUARANTEED_NO_EVICT"
    assert config.queue_policy == "fcfs"
    assert (config.max_queued, config.seed) == (7, 5)


MADE_FOR_FP8 = make_spec(quantization=QuantSpec(format=None, cache_dtype="float8_e4m3fn"))
MADE_FOR_INT8 = make_spec(quantization=QuantSpec(format=None, cache_dtype="INT8"))
MADE_FOR_NVFP4 = make_spec(quantization=QuantSpec(format=None, cache_dtype=NVFP4))
LATENT = LatentSpec(
    kv_rank=512, q_rank=1536, nope_size=128, rope_size=64, value_size=128, is_interleaved=True
)
ADA, AMPERE = make_device(arch=89), make_device(arch=80)


@pytest.mark.parametrize(
    ("machine", "spec", "asked", "expected", "why"),
    [
        (GPU, make_spec(), "auto", "bfloat16", "the number format the model computes in"),
        (GPU, MADE_FOR_FP8, "auto", "float8_e4m3fn", "the checkpoint is made for it"),
        (CPU, MADE_FOR_FP8, "auto", "float8_e4m3fn", "the checkpoint is made for it"),
        (AMPERE, MADE_FOR_FP8, "auto", "bfloat16", "sm_80 has no FP8"),
        (AMPERE, MADE_FOR_INT8, "auto", "int8", "the checkpoint is made for it; scales are found"),
        (ADA, make_spec(), "fp8", "float8_e4m3fn", "set by kv_cache_config.dtype"),
        (AMPERE, MADE_FOR_FP8, "int8", "int8", "set by kv_cache_config.dtype"),
        (GPU, MADE_FOR_FP8, "bfloat16", "bfloat16", "set by kv_cache_config.dtype"),
        (AMPERE, make_spec(), "nvfp4", NVFP4, "set by kv_cache_config.dtype"),
        (AMPERE, MADE_FOR_NVFP4, "auto", NVFP4, "the checkpoint is made for it"),
        (CPU, MADE_FOR_NVFP4, "fp8", "float8_e4m3fn", "set by kv_cache_config.dtype"),
    ],
)
def test_the_cache_has_the_format_asked_for_or_that_of_the_checkpoint(
    machine, spec, asked, expected, why
):
    config = run(machine, spec, kv_cache_config={"dtype": asked})
    assert config.kv_dtype == expected
    assert reason(config, "kv_dtype").startswith(why)


def test_a_checkpoint_made_for_a_cache_format_we_do_not_have_wants_another_named():
    spec = make_spec(quantization=QuantSpec(format=None, cache_dtype="FP4 by tensor_group"))
    with pytest.raises(ConfigError, match=r"FP4 by tens.*_dtype\) to fp8, nvfp4, int8 or bf"):
        run(GPU, spec)
    assert run(GPU, spec, kv_cache_config={"dtype": "fp8"}).kv_dtype == "float8_e4m3fn"
    assert run(GPU, spec, kv_cache_config={"dtype": "bfloat16"}).kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(latent=LATENT), "the latents of"),
        (dict(head_size=72), r"scales groups of 16 channels; the heads of \w+ have 72"),
    ],
)
def test_an_nvfp4_cache_that_cannot_be_is_refused_with_the_way_out(change, why):
    made_for_it = replace(MADE_FOR_NVFP4, **change)
    with pytest.raises(ConfigError, match=f"made for a KV cache in NVFP4.*{why}.*to fp8 or bfl"):
        run(GPU, made_for_it)
    assert run(GPU, made_for_it, kv_cache_config={"dtype": "fp8"}).kv_dtype == "float8_e4m3fn"
    with pytest.raises(ConfigError, match=f"kv_cache_config.dtype is nvfp4.*{why}.*to fp8 or bfl"):
        run(GPU, make_spec(**change), kv_cache_config={"dtype": "nvfp4"})


W4A4 = WeightOnlySpec(layout="nvfp4", bits=4, group=16, inputs="nvfp4")


@pytest.mark.parametrize(
    "found",
    [
        QuantSpec(format=None, weight_only=W4A4),
        QuantSpec(format="mxfp4"),
        QuantSpec(
            format=None,
            mixed=(QuantPart(modules=("m",), spec=QuantSpec(format=None, weight_only=W4A4)),),
        ),
    ],
)
def test_activations_are_quantized_where_tensor_cores_multiply_them(found):
    spec, blackwell = make_spec(quantization=found), replace(GPU, arch=100)
    config = run(blackwell, spec)
    assert config.quantized_activations
    assert reason(config, "quantized_activations").startswith("the tensor cores of sm_100")
    assert not run(GPU, spec).quantized_activations
    assert not run(blackwell, spec, quantize_activations="never").quantized_activations
    assert run(GPU, spec, quantize_activations="always").quantized_activations
    for plain in (None, QuantSpec(format=None, weight_only=replace(W4A4, inputs="plain"))):
        assert not run(blackwell, make_spec(quantization=plain)).quantized_activations
        with pytest.raises(ConfigError, match="has no weights that are multiplied with NVFP4"):
            run(GPU, make_spec(quantization=plain), quantize_activations="always")


def test_int4_meets_fp8_from_sm_89_on_and_nvfp4_beside_it_from_sm_100():
    w4a8 = WeightOnlySpec(layout="modelopt", bits=4, group=128, inputs="fp8")
    parts = [
        QuantPart(modules=(name,), spec=QuantSpec(format=None, weight_only=one))
        for name, one in (("a", w4a8), ("b", W4A4))
    ]
    mixed = make_spec(quantization=QuantSpec(format=None, mixed=tuple(parts)))
    alone = make_spec(quantization=parts[0].spec)
    ada, blackwell = replace(GPU, arch=89), replace(GPU, arch=100)
    assert run(ada, alone).quantized_activations == ("fp8",)
    assert run(blackwell, mixed).quantized_activations == ("fp8", "nvfp4")
    config = run(ada, mixed)
    assert config.quantized_activations == ("fp8",)
    assert reason(config, "quantized_activations") == (
        "the tensor cores of sm_89 multiply fp8; tensor cores that multiply nvfp4 begin with sm_100"
    )
    for unable in (replace(GPU, arch=86), CPU):
        config = run(unable, alone)
        assert config.quantized_activations == ()
        assert reason(config, "quantized_activations") == (
            "tensor cores that multiply fp8 begin with sm_89"
        )
        assert run(unable, alone, quantize_activations="always").quantized_activations == ("fp8",)


def test_a_cache_format_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"fp8, which needs sm_89 or newer; this is sm_80"):
        run(AMPERE, kv_cache_config={"dtype": "fp8"})
    with pytest.raises(ConfigError, match=r"is float16, but the model computes in bfloat16"):
        run(kv_cache_config={"dtype": "float16"})
    with pytest.raises(ConfigError, match=r"int8, which the latents of \w+ cannot have"):
        run(spec=make_spec(latent=LATENT), kv_cache_config={"dtype": "int8"})


FP8_WEIGHTS = QuantSpec(format=W8A8Spec(weights="channel", inputs="row"))
INT8_WEIGHTS = QuantSpec(format=W8A8Spec(weights="channel", inputs="row", numbers="int8"))
AWQ_WEIGHTS = QuantSpec(format=None, weight_only=WeightOnlySpec(layout="awq", bits=4, group=128))
TURING = make_device(arch=75)


@pytest.mark.parametrize(
    ("machine", "found", "asked"),
    [
        (GPU, FP8_WEIGHTS, None),
        (ADA, None, "fp8"),
        (AMPERE, INT8_WEIGHTS, None),
        (AMPERE, AWQ_WEIGHTS, None),
        (AMPERE, None, "nf4"),
        (TURING, None, None),
        (CPU, FP8_WEIGHTS, None),
        (CPU, None, "fp8_block"),
    ],
)
def test_weights_of_a_format_run_where_there_are_kernels_for_it(machine, found, asked):
    assert run(machine, make_spec(quantization=found), quantization=asked).quantization == asked


@pytest.mark.parametrize(
    ("machine", "found", "asked", "message"),
    [
        (AMPERE, FP8_WEIGHTS, None, r"the checkpoint needs .* sm_89; this is sm_80, .* AWQ, GPTQ"),
        (AMPERE, None, "fp8", r"quantization fp8 needs .* sm_89.*int8 or nf4"),
        (TURING, AWQ_WEIGHTS, None, r"sm_80; this is sm_75, where a plain checkpoint works"),
        (TURING, None, "int8", r"quantization int8 needs .* sm_80"),
        (GPU, AWQ_WEIGHTS, "fp8", r"fp8, but the checkpoint is quantized already"),
    ],
)
def test_weights_without_kernels_are_refused_with_what_works(machine, found, asked, message):
    with pytest.raises(ConfigError, match=message):
        run(machine, make_spec(quantization=found), quantization=asked)


def test_a_cpu_pool_of_so_many_tokens_is_smaller_in_8_bit_floats():
    pools = [
        run(CPU, kv_cache_config={"dtype": dtype, "max_tokens": 3200}).kv_cpu_bytes
        for dtype in ("auto", "fp8")
    ]
    assert pools[0] == 4 * pools[1] == 101 * 32 * 4 * 2 * 2 * 64 * 4


NO_TRITON = make_device(triton_version=None)


@pytest.mark.parametrize(
    ("machine", "asked", "expected", "why"),
    [
        (GPU, "AUTO", "triton", "preferred on sm_90"),
        (GPU, "TRITON", "triton", "preferred on sm_90"),
        *(
            (GPU, name, "triton", f"preferred on sm_90; stands in for {name}")
            for name in ("CUTLASS", "TRTLLM", "DEEPGEMM", "WIDEEP", "CUTEDSL", "DENSEGEMM")
        ),
        (GPU, "VANILLA", "reference", "set by moe_config.backend"),
        (NO_TRITON, "CUTLASS", "reference", "the triton package is not installed; stands in"),
        (CPU, "AUTO", "torch", "preferred on a CPU"),
        (CPU, "TRITON", "torch", "preferred on a CPU; stands in for TRITON"),
        (CPU, "VANILLA", "reference", "set by moe_config.backend"),
    ],
)
def test_every_expert_backend_becomes_one_that_is_there(machine, asked, expected, why):
    settings = {"moe_config": {"backend": asked, "max_num_tokens": 3200}}
    config = run(machine, make_spec(moe=EXPERTS), **settings)
    assert (config.moe_backend, config.moe_max_tokens) == (expected, 3200)
    assert reason(config, "moe_backend").startswith(why)


def test_a_model_without_experts_has_no_expert_backend():
    config = run(GPU, moe_config={"backend": "CUTLASS"})
    assert config.moe_backend == "none"
    assert "moe_backend" not in {choice.name for choice in config.choices}


STATE_BYTES = 3 * (3 * (2 * 2 + 4) * 64 * 4 + 4 * 64 * 64 * 4)


def test_recurrent_layers_have_states_and_take_no_part_in_a_tokens_cache():
    plain, hybrid = run(CPU), run(CPU, make_spec(delta=DELTA))
    assert plain.state_cpu_bytes == 0
    assert hybrid.state_cpu_bytes == (1 + 2 * hybrid.max_batch_size) * STATE_BYTES
    settings = {"max_batch_size": 4, "kv_cache_config": {"max_tokens": 320}}
    plain, hybrid = (run(CPU, make_spec(delta=delta), **settings) for delta in (None, DELTA))
    assert plain.kv_cpu_bytes == 4 * hybrid.kv_cpu_bytes
    assert hybrid.state_cpu_bytes == 9 * STATE_BYTES
    assert run(GPU, make_spec(delta=DELTA)).state_cpu_bytes == 0


def test_states_on_a_cpu_stay_modest():
    large = DeltaSpec(
        layers=(True, True, True, False) * 12, num_key_heads=16, num_value_heads=32, key_size=128,
        value_size=128, conv_width=4,
    )  # fmt: skip
    config = run(CPU, make_spec(num_layers=48, delta=large))
    assert config.state_cpu_bytes == CPU.total_bytes // 10


def test_mixes_are_captured_on_a_gpu():
    config = run(GPU)
    assert config.graph_mixes[0] == (512, 512) and len(config.graph_mixes) == 28
    assert len(config.graph_mixes_when_idle) == 63
    for other in (
        run(CPU),
        run(GPU, cuda_graph_config={"enable_mixed": False}),
        run(GPU, attn_backend="sdpa"),
    ):
        assert other.graph_mixes == other.graph_mixes_when_idle == ()


def test_prompt_tokens_beside_decodes():
    assert run(GPU).tokens_beside_decodes == 512
    assert run(GPU).tokens_in_bursts == 2048
    assert run(GPU, max_num_tokens=1024).tokens_in_bursts == 1024
    without = run(GPU, cuda_graph_config={"enable_mixed": False})
    assert without.tokens_beside_decodes == without.max_num_tokens
    assert run(CPU).tokens_beside_decodes is None
    assert "measured" in reason(run(CPU), "tokens_beside_decodes")
    asked = {"scheduler_config": {"max_prompt_tokens_beside_decodes": 300}}
    assert run(GPU, **asked).tokens_beside_decodes == run(CPU, **asked).tokens_beside_decodes == 300
    assert run(CPU, **asked, max_num_tokens=200).tokens_beside_decodes == 200
    assert run(GPU, **asked).tokens_in_bursts is run(CPU).tokens_in_bursts is None
    assert run(CPU, enable_chunked_prefill=False).tokens_beside_decodes == 2048
    with pytest.raises(ConfigError, match="enable_chunked_prefill is false; leave one of the two"):
        run(CPU, **asked, enable_chunked_prefill=False)
