"""Every automatic choice, with its reason, on made-up models and devices."""

import re
from dataclasses import replace

import pytest

from penstock.config.resolve import resolve
from penstock.config.run import PromptBalance
from penstock.config.schema import EngineConfig
from penstock.errors import ConfigError
from penstock.types.device import DeviceInfo
from penstock.types.expert_slots import ExpertSlots
from penstock.types.mesh import MeshShape
from penstock.types.model_spec import (
    DeltaSpec,
    LatentSpec,
    ModelSpec,
    MoeSpec,
    QuantPart,
    QuantSpec,
    RopeSpec,
    W8A8Spec,
    WeightOnlySpec,
)

GIB = 2**30


def make_spec(**changes) -> ModelSpec:
    fields = {
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "max_position": 4096,
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope": RopeSpec(),
        "tie_embeddings": False,
        "dtype": "bfloat16",
    }
    return ModelSpec(**fields | changes)


def make_device(kind: str = "cuda", **changes) -> DeviceInfo:
    fields = {
        "kind": kind,
        "name": "H200" if kind == "cuda" else "x86_64",
        "arch": 90 if kind == "cuda" else 0,
        "num_devices": 1,
        "total_bytes": 140 * GIB if kind == "cuda" else 24 * GIB,
        "free_bytes": 20 * GIB,
        "host_bytes": 128 * GIB if kind == "cuda" else 24 * GIB,
        "num_sms": 132,
        "num_threads": 16,
        "torch_version": "2.11",
        "triton_version": "3.6",
        "cuda_version": "13.0",
    }
    return DeviceInfo(**fields | changes)


CPU, GPU = make_device("cpu"), make_device("cuda")


def run(machine: DeviceInfo = GPU, spec: ModelSpec | None = None, **settings):
    return resolve(EngineConfig(model="m", **settings), spec or make_spec(), machine, "/models/m")


def reason(config, name: str) -> str:
    return next(choice.reason for choice in config.choices if choice.name == name)


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


def test_more_ranks_than_gpus_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="is 8, but there are 1 GPUs; lower it to 1"):
        run(GPU, tensor_parallel_size=8)
    with pytest.raises(ConfigError, match=r"there are 0 GPUs.*set device to cpu"):
        run(CPU, tensor_parallel_size=2)


def test_ranks_on_a_cpu_run_when_asked_for_and_share_the_cores():
    config = run(CPU, tensor_parallel_size=2, device="cpu")
    assert (config.mesh.tp, config.num_threads) == (2, 8)


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(3, 8, 2), (4, 12, 6)])
def test_ranks_must_divide_the_heads(size, heads, kv_heads):
    spec = make_spec(num_heads=heads, num_kv_heads=kv_heads)
    with pytest.raises(ConfigError, match="heads of the model"):
        run(make_device(num_devices=8), spec, tensor_parallel_size=size)


def test_kv_heads_may_be_fewer_than_ranks():
    spec = make_spec(num_heads=8, num_kv_heads=2)
    assert run(make_device(num_devices=8), spec, tensor_parallel_size=8).mesh.tp == 8


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
    ],
)
def test_the_cache_has_the_format_asked_for_or_that_of_the_checkpoint(
    machine, spec, asked, expected, why
):
    config = run(machine, spec, kv_cache_config={"dtype": asked})
    assert config.kv_dtype == expected
    assert reason(config, "kv_dtype").startswith(why)


def test_a_checkpoint_made_for_a_cache_format_we_do_not_have_wants_another_named():
    spec = make_spec(quantization=QuantSpec(format=None, cache_dtype="NVFP4"))
    with pytest.raises(ConfigError, match=r"cache in NVFP4.*--kv_cache_dtype\) to fp8, int8 or bf"):
        run(GPU, spec)
    assert run(GPU, spec, kv_cache_config={"dtype": "fp8"}).kv_dtype == "float8_e4m3fn"
    assert run(GPU, spec, kv_cache_config={"dtype": "bfloat16"}).kv_dtype == "bfloat16"


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


def test_a_cache_format_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"fp8, which needs sm_89 or newer; this is sm_80"):
        run(AMPERE, kv_cache_config={"dtype": "fp8"})
    with pytest.raises(ConfigError, match=r"is float16, but the model computes in bfloat16"):
        run(kv_cache_config={"dtype": "float16"})
    latent = LatentSpec(
        kv_rank=512, q_rank=1536, nope_size=128, rope_size=64, value_size=128, is_interleaved=True
    )
    with pytest.raises(ConfigError, match=r"int8, which the latents of \w+ cannot have"):
        run(spec=make_spec(latent=latent), kv_cache_config={"dtype": "int8"})


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


EXPERTS = MoeSpec(layers=(True,) * 4, num_experts=8, num_active=2, intermediate_size=64)
NO_TRITON = make_device(triton_version=None)
EIGHT_GPUS = make_device(num_devices=8)


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


@pytest.mark.parametrize(
    ("asked", "expected", "why"),
    [
        ({}, 1, "all ranks share every expert"),
        ({"ep_size": 4}, 4, "set by moe_expert_parallel_size; 2 rank(s) share an expert"),
        ({"ep_size": 8, "moe_tensor_parallel_size": -1}, 8, "set by moe_expert_parallel_size; 1"),
        ({"moe_tensor_parallel_size": 4}, 2, "set by moe_tensor_parallel_size; 4 rank(s)"),
        ({"ep_size": 2, "moe_tensor_parallel_size": 4}, 2, "set by moe_expert_parallel_size; 4"),
    ],
)
def test_ranks_fall_into_sets_of_experts(asked, expected, why):
    config = run(EIGHT_GPUS, make_spec(moe=EXPERTS), tensor_parallel_size=8, **asked)
    assert config.mesh.ep == expected
    assert reason(config, "mesh").startswith(f"set by tensor_parallel_size; {why}")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ep_size": 3}, "3 x moe_tensor_parallel_size 2 = 6 ranks, but tensor_parallel_size is 8"),
        ({"ep_size": 16}, "16 x moe_tensor_parallel_size 1 = 16 ranks, but"),
        ({"ep_size": 2, "moe_tensor_parallel_size": 2}, "2 x moe_tensor_parallel_size 2 = 4 ranks"),
        ({"ep_size": 8}, "is 8, but there are 4 experts; use a smaller one"),
    ],
)
def test_sets_that_ranks_cannot_fall_into_are_refused(asked, message):
    few = make_spec(moe=replace(EXPERTS, num_experts=4))
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(EIGHT_GPUS, few, tensor_parallel_size=8, **asked)


def test_a_model_without_experts_has_one_set_and_it_is_said():
    config = run(EIGHT_GPUS, tensor_parallel_size=8, ep_size=4)
    assert config.mesh.ep == 1
    assert reason(config, "mesh").endswith("; the model has no experts")


def test_attention_dp_gives_every_rank_its_own_requests():
    asked = {"enable_balance": True, "batching_wait_iters": 50, "timeout_iters": 1}
    spec = make_spec(moe=EXPERTS, num_heads=6, num_kv_heads=3)  # which 8 ranks could not share
    config = run(
        EIGHT_GPUS, spec, tensor_parallel_size=8, ep_size=8, enable_attention_dp=True,
        attention_dp_config=asked,
    )  # fmt: skip
    assert config.mesh == MeshShape(dp=8, ep=8)
    assert reason(config, "mesh").startswith("enable_attention_dp gives each of tensor_parallel")
    assert config.balance == PromptBalance(batching_wait=50, timeout=1)
    shared = run(EIGHT_GPUS, make_spec(), tensor_parallel_size=8, attention_dp_config=asked)
    assert shared.balance is None


def test_a_rank_with_its_own_requests_caches_all_heads():
    whole, shared, own = (
        run(CPU, device="cpu", **settings)
        for settings in ({}, {"tensor_parallel_size": 2},
                         {"tensor_parallel_size": 2, "enable_attention_dp": True})
    )  # fmt: skip
    assert own.kv_cpu_bytes == whole.kv_cpu_bytes and own.max_seq_len == whole.max_seq_len
    assert shared.mesh == MeshShape(tp=2) and own.mesh == MeshShape(dp=2)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"tensor_parallel_size": 2, "enable_attention_dp": True}, "enable_attention_dp"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
    ],
)
def test_adapters_are_refused_where_tokens_or_layers_are_elsewhere(asked, name):
    with pytest.raises(ConfigError, match=rf"\(lora_config\) and {name} cannot be combined yet"):
        run(EIGHT_GPUS, enable_lora=True, **asked)
    assert run(EIGHT_GPUS, enable_lora=True, tensor_parallel_size=2).lora is not None


def test_slots_for_experts_and_tokens_that_go_to_the_ranks_of_theirs():
    asked = {"num_slots": 16, "layer_updates_per_iter": 1}
    wide = {"tensor_parallel_size": 8, "ep_size": 8, "enable_attention_dp": True}
    spec = make_spec(moe=EXPERTS)
    config = run(EIGHT_GPUS, spec, moe_config={"backend": "WIDEEP", "load_balancer": asked}, **wide)
    assert config.expert_slots == ExpertSlots(num_slots=16, layer_updates=1)
    assert config.moe_all_to_all
    for moe_config, further in (
        ({"backend": "CUTLASS"}, wide),
        ({"backend": "WIDEEP"}, wide | {"enable_attention_dp": False}),
        ({"backend": "WIDEEP"}, wide | {"ep_size": 4}),
    ):
        config = run(EIGHT_GPUS, spec, moe_config=moe_config, **further)
        assert not config.moe_all_to_all and config.expert_slots is None


@pytest.mark.parametrize(
    ("asked", "further", "message"),
    [
        ({}, {"ep_size": 1}, "no rank has other experts than another"),
        ({}, {"ep_size": 4}, "is not one set of whole experts per rank; set moe_expert_parallel"),
        ({"num_slots": 18}, {}, "which 8 expert-parallel ranks cannot share equally; use 24"),
        ({"initial_global_assignments": {99: [0]}}, {}, "layer 99 is given, but that is no layer"),
        ({"initial_global_assignments": {1: [0]}}, {}, "layer 1 has 1 slots, but num_slots is 8"),
        ({"initial_global_assignments": {1: [0] * 8}}, {}, "has no slot for expert 1"),
    ],
)
def test_slots_that_do_not_fit_are_refused(asked, further, message):
    settings = {"tensor_parallel_size": 8, "ep_size": 8, "moe_config": {"load_balancer": asked}}
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(EIGHT_GPUS, make_spec(moe=EXPERTS), **(settings | further))


def test_stages_have_a_step_each_and_ranks_of_their_own():
    config = run(EIGHT_GPUS, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert config.mesh == MeshShape(pp=2, tp=4) and config.depth == 3
    assert config.graph_batch_sizes == ()
    assert run(CPU, device="cpu", pp_size=2).depth == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_size": 8, "pp_size": 2},
         "tensor_parallel_size 8 x pipeline_parallel_size 2 = 16 ranks, but there are 8 GPUs"),
        ({"pp_size": 5}, "pipeline_parallel_size is 5, but the model has 4 layers"),
        ({"pp_size": 2, "speculative_config": {"decoding_type": "MTP"}},
         "pipeline_parallel_size 2 and speculative_config (MTP) cannot be combined yet: drafts are "
         "made on the last stage"),
        ({"pp_size": 4}, "of 4 layers stage 0 has 1, which do not have all kinds of cache"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_are_refused(asked, message):
    spec = make_spec(num_layers=4, layer_windows=(16, None, 16, None), num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(EIGHT_GPUS, spec, **asked)
    config = run(EIGHT_GPUS, spec, pp_size=2, speculative_config={"decoding_type": "NGram"})
    assert config.mesh.pp == 2 and config.max_drafts == 4


DELTA = DeltaSpec(
    layers=(True, True, True, False), num_key_heads=2, num_value_heads=4, key_size=64,
    value_size=64, conv_width=4,
)  # fmt: skip


def test_context_parallel_ranks_have_a_part_of_each_block():
    spec = make_spec(moe=EXPERTS)
    config = run(EIGHT_GPUS, spec, cp_size=4, tp_size=2, ep_size=8, cp_config={"cp_type": "helix"})
    assert config.mesh == MeshShape(cp=4, tp=2, ep=8) and config.tokens_per_block == 4 * 32
    assert config.graph_batch_sizes and not config.graph_mixes + config.graph_token_sizes
    alone, shared = (run(CPU, device="cpu", max_seq_len=10**6, cp_size=size) for size in (1, 2))
    assert shared.kv_cpu_bytes == alone.kv_cpu_bytes  # of a rank
    implied = run(EIGHT_GPUS, spec, cp_size=2, ep_size=8)
    assert implied.mesh == MeshShape(cp=2, tp=4, ep=8)


@pytest.mark.parametrize(
    ("asked", "of_spec", "message"),
    [
        ({"cp_size": 4, "tp_size": 4}, {},
         "tensor_parallel_size 4 x context_parallel_size 4 = 16 ranks, but there are 8 GPUs"),
        ({"cp_size": 3}, {}, "context_parallel_size is 3; use a power of two"),
        ({"cp_size": 2, "tp_size": 2, "enable_attention_dp": True}, {},
         "context_parallel_size 2 and enable_attention_dp cannot be combined"),
        ({"cp_size": 2}, {"layer_windows": (16, 16, 16, 16)},
         "all layers of the model see a window"),
        ({"cp_size": 2}, {"delta": DELTA}, "recurrent layers, whose states cannot be split"),
        ({"cp_size": 2, "tp_size": 2, "ep_size": 2, "moe_tensor_parallel_size": 1},
         {"moe": EXPERTS},
         "= 2 ranks, but tensor_parallel_size x context_parallel_size = 4; give one of the two"),
        ({"cp_config": {"cp_type": "RING", "tokens_per_block": 64}}, {},
         "cp_config.tokens_per_block is 64, but kv_cache_config.tokens_per_block is 32"),
        ({"cp_config": {"cp_type": "STAR"}}, {},
         "cp_config.cp_type is 'STAR', which is not there; there are HELIX and RING"),
        ({"cp_config": {"cp_type": "RING", "cp_anchor_size": 64}}, {},
         "cp_config.cp_anchor_size cannot be used: it belongs to STAR"),
    ],
)  # fmt: skip
def test_context_parallelism_that_cannot_be_is_refused(asked, of_spec, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(EIGHT_GPUS, make_spec(num_layers=4, **of_spec), **asked)


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
