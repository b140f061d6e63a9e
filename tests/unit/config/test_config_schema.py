"""`EngineConfig`: bounds, names, and messages that say what is wrong and what to do."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from penstock.config.graphs import CudaGraphConfig
from penstock.config.kv_cache import KvCacheConfig
from penstock.config.run import CapacityPolicy
from penstock.config.schema import DEFAULT_MODEL, EngineConfig
from penstock.config.trtllm_fields import ALIASES, FIELDS
from penstock.errors import ConfigError

MALFORMED = [
    ({"max_batch_size": 0}, "max_batch_size is 0, it must be at least 1"),
    ({"max_batch_size": True}, "max_batch_size is true, it must be an integer"),
    ({"max_batch_size": "64"}, "max_batch_size is '64', it must be an integer"),
    ({"max_batch_size": 7.5}, "max_batch_size is 7.5, it must be an integer"),
    ({"max_batch_size": 10**9}, "max_batch_size is 1000000000, it must be at most 65536"),
    ({"max_num_tokens": -1}, "max_num_tokens is -1, it must be at least 1"),
    ({"max_seq_len": 1}, "max_seq_len is 1, it must be at least 2"),
    ({"model": ""}, "model is '', it must be a text of 1 or more characters"),
    ({"model": 5}, "model is 5, it must be a text"),
    ({"model": " x"}, "model is ' x': it must not begin or end with a space"),
    ({"dtype": "int4"}, "dtype is 'int4', it must be 'auto', 'bfloat16', 'float16' or 'float32'"),
    ({"load_format": "vision_only"}, "load_format is 'vision_only', it must be 'auto' or 'dummy'"),
    ({"device": "tpu"}, "device is 'tpu', it must be 'auto', 'cuda' or 'cpu'"),
    ({"port": 70000}, "port is 70000, it must be at most 65535"),
    ({"port": "http"}, "port is 'http', it must be an integer"),
    ({"seed": -1}, "seed is -1, it must be at least 0"),
    ({"stream_interval": 0}, "stream_interval is 0, it must be at least 1"),
    (
        {"enable_chunked_prefill": "yes"},
        "enable_chunked_prefill is 'yes', it must be true or false",
    ),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, it must be at least 1"),
    ({"model_kwargs": [1]}, "model_kwargs is [1], it must be a mapping"),
    ({"api_key": 1234567}, "api_key is not usable, it must be a text"),
    ({"kv_cache_config": None}, "kv_cache_config is null, it must be a mapping"),
    ({"kv_cache_config": 0.9}, "kv_cache_config is 0.9, it must be a mapping"),
    (
        {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}},
        "kv_cache_config.free_gpu_memory_fraction is 1.5, it must be at most 1",
    ),
    (
        {"kv_cache_config": {"free_gpu_memory_fraction": 0}},
        "kv_cache_config.free_gpu_memory_fraction is 0, it must be more than 0",
    ),
    (
        {"kv_cache_config": {"tokens_per_block": 64, "mamba_state_cache_interval": 96}},
        "mamba_state_cache_interval is 96, which is no multiple of tokens_per_block (64)",
    ),
    (
        {"kv_cache_config": {"tokens_per_block": 48}},
        "kv_cache_config.tokens_per_block is 48: it must be a power of two",
    ),
    (
        {"kv_cache_config": {"dtype": "int3"}},
        "kv_cache_config.dtype is 'int3', it must be 'auto'",
    ),
    (
        {"kv_cache_config": {"tokens_per_blok": 64}},
        "unknown field 'tokens_per_blok' in kv_cache_config; did you mean 'tokens_per_block'?",
    ),
    (
        {"cuda_graph_config": {"batch_sizes": [1, 2, 0]}},
        "cuda_graph_config.batch_sizes.2 is 0, it must be at least 1",
    ),
    (
        {"cuda_graph_config": {"batch_sizes": []}},
        "cuda_graph_config.batch_sizes is [], it must be 1 or more entries long",
    ),
    (
        {"cuda_graph_config": {"batch_sizes": [1, 2, 4], "max_batch_size": 8}},
        "max_batch_size is 8, but the largest of batch_sizes is 4",
    ),
    (
        {"scheduler_config": {"capacity_scheduler_policy": "MAX"}},
        "scheduler_config.capacity_scheduler_policy is 'MAX', it must be 'EXPECTED_OUTPUT', "
        "'MAX_UTILIZATION' or 'GUARANTEED_NO_EVICT'",
    ),
    ({"max_batchsize": 4}, "unknown field 'max_batchsize'; did you mean 'max_batch_size'?"),
    ({"zzz": 4}, "unknown field 'zzz'"),
    ({"portt": 4}, "unknown field 'portt'; did you mean 'port'?"),
    (
        {"free_gpu_memory_fraction": 0.8},
        "did you mean 'kv_cache_config.free_gpu_memory_fraction'?",
    ),
    (
        {"moe_config": {"bakend": "TRTLLM"}},
        "unknown field 'bakend' in moe_config; did you mean 'backend'?",
    ),
    (
        {"moe_config": {"load_balancer": {"num_slot": 3}}},
        "unknown field 'num_slot' in moe_config.load_balancer; did you mean 'num_slots'?",
    ),
    ({"encode_only": True}, "encode_only cannot be used: set task to embed, or to score"),
    (
        {"lora_config": {"lora_ckpt_source": "nemo"}},
        "lora_config.lora_ckpt_source is 'nemo', it must be 'hf'",
    ),
    ({"lora_config": {"lora_modules": ["a"]}}, "'a' is not NAME=FOLDER"),
    (
        {"lora_config": {"lora_dir": ["/x/a"], "lora_modules": {"a": "/y"}}},
        "two adapters are called 'a'",
    ),
    ({"lora_config": {"max_loras": 4, "max_cpu_loras": 3}}, "max_cpu_loras is 3, less than"),
    (
        {"lora_config": {"trtllm_modules_to_hf_modules": {"attn_q": "wq"}}},
        "lora_config.trtllm_modules_to_hf_modules cannot be used: name modules as the checkpoint",
    ),
    (
        {"peft_cache_config": {"host_cache_size": 1}},
        "peft_cache_config cannot be used: adapters are counted, not their bytes",
    ),
    ({"tokenizer_revision": "v2"}, "tokenizer_revision cannot be used"),
    (
        {"attn_backend": "a", "attention_backend": "b"},
        "'attn_backend' and 'attention_backend' name the same setting",
    ),
    (
        {"speculative_config": {"max_draft_len": 2}},
        "speculative_config needs a decoding_type; there are NGram, MTP",
    ),
    (
        {"speculative_config": {"decoding_type": "NGram", "quantization": "fp8"}},
        "quantization belongs to decoding_type Draft_Target, not NGram",
    ),
    (
        {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 0}},
        "speculative_config.max_draft_len is 0, it must be at least 1",
    ),
    (
        {"speculative_config": {"decoding_type": "NGram", "is_public_pool": True}},
        "speculative_config.is_public_pool cannot be used: a request drafts from its own tokens",
    ),
    (
        {"speculative_config": {"decoding_type": "MTP", "relaxed_topk": 3}},
        "relaxed_topk and relaxed_delta need use_relaxed_acceptance_for_thinking: true",
    ),
    (
        {"speculative_config": {"decoding_type": "MTP", "max_matching_ngram_size": 3}},
        "max_matching_ngram_size belongs to decoding_type NGram, not MTP",
    ),
    (
        {"speculative_config": "eagle3"},
        "decoding_type Eagle3 needs a speculative_model: a folder or a name",
    ),
    (
        {"speculative_config": {"decoding_type": "User_Provided"}},
        "decoding_type User_Provided needs a drafter: the name of an entry point",
    ),
    (
        {"speculative_config": {"decoding_type": "SaveState"}},
        "decoding_type SaveState needs an output_directory: where files of hidden states go",
    ),
    (
        {
            "speculative_config": {
                "decoding_type": "save_state",
                "output_directory": "x",
                "max_draft_len": 2,
            }
        },
        "with decoding_type SaveState nothing is drafted; remove max_draft_len",
    ),
    (
        {
            "speculative_config": {
                "decoding_type": "Eagle3",
                "speculative_model": "x",
                "eagle3_layers_to_capture": [1, 2],
            }
        },
        "an Eagle3 head reads three layers; give eagle3_layers_to_capture three",
    ),
    (
        {"speculative_config": {"decoding_type": "Medusa"}},
        "speculative_config.decoding_type is 'Medusa', which is not there; there are NGram, MTP",
    ),
    (
        {"speculative_config": {"decoding_type": "MTP", "max_draft_lenn": 3}},
        "unknown field 'max_draft_lenn' in speculative_config; did you mean 'max_draft_len'?",
    ),
    ({3: 4}, "3 is not a field name"),
    ({"kv_cache_config": {7: 1}}, "7 is not a field name of kv_cache_config"),
    ({"kv_cache_config.dtype": "auto"}, "'kv_cache_config.dtype' is not a field name"),
    (["model"], "the configuration must be a mapping"),
]


@pytest.mark.parametrize(("values", "message"), MALFORMED, ids=lambda v: str(v)[:50])
def test_malformed_configuration_names_field_value_and_limit(values, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.model_validate(values)
    assert message in str(caught.value)
    assert "1234567" not in str(caught.value)  # the secret of the api_key case


def test_every_mistake_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_batch_size=0, port=-1)
    assert str(caught.value).splitlines() == [
        "max_batch_size is 0, it must be at least 1",
        "port is -1, it must be at least 0",
    ]


def test_every_field_is_described_has_a_status_and_numbers_are_bounded():
    def check(model: type[BaseModel]) -> int:
        count = 0
        for name, info in model.model_fields.items():
            assert info.description and info.description.endswith("."), name
            assert info.json_schema_extra["status"] in {"stable", "beta", "prototype"}, name
            kinds = [info.annotation, *getattr(info.annotation, "__args__", ())]
            if int in kinds or float in kinds:
                limits = [m for m in info.metadata if hasattr(m, "ge") or hasattr(m, "gt")]
                assert limits and any(hasattr(m, "le") for m in info.metadata), name
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    count += check(kind)
            count += 1
        return count

    assert check(EngineConfig) >= 40


def test_defaults_are_the_documented_ones():
    config = EngineConfig()
    assert config.model == DEFAULT_MODEL
    assert config.enable_chunked_prefill is True
    assert config.scheduler_config.capacity_scheduler_policy == "EXPECTED_OUTPUT"
    assert config.cuda_graph_config is not None and config.cuda_graph_config.enable_padding
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.9
    assert (config.host, config.port) == ("localhost", 8000)


def test_a_configuration_survives_the_way_to_the_engine_process():
    config = EngineConfig(
        model="m",
        cuda_graph_config={"batch_sizes": [4, 1]},
        scheduler_config={"waiting_queue_policy": "fcfs"},
        model_kwargs={"num_hidden_layers": 2, "rope_scaling": {"type": "x"}},
    )
    assert EngineConfig(**config.model_dump(mode="json")) == config
    without = EngineConfig(cuda_graph_config=None)
    assert EngineConfig(**without.model_dump(mode="json")).cuda_graph_config is None


def test_sections_may_be_given_as_objects():
    config = EngineConfig(
        kv_cache_config=KvCacheConfig(max_tokens=512), cuda_graph_config=CudaGraphConfig()
    )
    assert config.kv_cache_config.max_tokens == 512


def test_the_api_key_is_never_shown():
    config = EngineConfig(api_key="s3cret")
    assert config.api_key == "s3cret"
    assert "s3cret" not in repr(config)
    assert "s3cret" not in config.model_dump_json()


def test_ignored_fields_warn_once_each_and_only_when_they_ask_for_something(caplog):
    with caplog.at_level(logging.WARNING):
        EngineConfig(enable_attention_dp=False, moe_expert_parallel_size=1, max_beam_width=1)
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        config = EngineConfig(
            kv_cache_config={"event_buffer_max_size": 10},
            trust_remote_code=True,
            use_cute_dsl_blockscaling_mm=True,
        )
    starts = [line.partition(" is ignored: ")[0] for line in caplog.messages]
    assert starts == [
        "kv_cache_config.event_buffer_max_size",
        "trust_remote_code",
        "use_cute_dsl_blockscaling_mm",
    ]
    assert all(line.partition(" is ignored: ")[2] for line in caplog.messages)
    assert config.kv_cache_config == KvCacheConfig()


@pytest.mark.parametrize(
    ("values", "num_ranks"),
    [
        ({"moe_expert_parallel_size": 8}, 8),
        ({"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 4}, 8),
        ({"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": -1}, 2),
        ({"moe_expert_parallel_size": 2, "tensor_parallel_size": 4}, 4),
        ({"moe_tensor_parallel_size": 2}, 1),
    ],
)
def test_sets_of_experts_alone_say_how_many_ranks_there_are(values, num_ranks):
    config = EngineConfig(**values)
    assert config.tensor_parallel_size == num_ranks
    assert EngineConfig(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"attention_backend": "sdpa"}, ("attn_backend",), "sdpa"),
        ({"hf_revision": "main"}, ("revision",), "main"),
        ({"tp_size": 4}, ("tensor_parallel_size",), 4),
        (
            {"cuda_graph_config": {"padding_enabled": False}},
            ("cuda_graph_config", "enable_padding"),
            False,
        ),
        ({"kv_cache_dtype": "auto"}, ("kv_cache_config", "dtype"), "auto"),
    ],
)
def test_other_spellings_set_the_field(values, path, expected):
    value = EngineConfig.model_validate(values)
    for name in path:
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize("name", ["NGram", "ngram", "N_GRAM", "n-gram"])
def test_a_decoding_type_may_be_spelled_in_any_way(name, caplog):
    asked = {"decoding_type": name, "is_public_pool": False, "max_matching_ngram_size": 3}
    config = EngineConfig(speculative_config=asked).speculative_config
    assert (config.decoding_type, config.max_draft_len) == ("NGram", None)
    assert config.max_matching_ngram_size == 3
    assert not caplog.messages


def test_the_recipes_way_to_ask_for_mtp_works_without_a_warning(caplog):
    asked = {"decoding_type": "mtp", "num_nextn_predict_layers": 2, "relaxed_topk": 1}
    config = EngineConfig(speculative_config=asked).speculative_config
    assert (config.decoding_type, config.max_draft_len) == ("MTP", 2)
    assert not caplog.messages


def test_an_alias_beside_its_field_is_fine_when_both_say_the_same():
    assert EngineConfig(tp_size=2, tensor_parallel_size=2).tensor_parallel_size == 2


def test_an_alias_does_not_replace_the_rest_of_its_section():
    config = EngineConfig(kv_cache_config={"max_tokens": 64}, kv_cache_dtype="auto")
    assert config.kv_cache_config.max_tokens == 64


_NAMES = sorted({part for path in (*FIELDS, *ALIASES) for part in path.split(".")})
_KEYS = st.sampled_from([*_NAMES, *EngineConfig.model_fields]) | st.text(max_size=8) | st.integers()
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=4))
def test_whatever_a_file_holds_gives_a_configuration_or_a_config_error(values):
    try:
        config = EngineConfig.model_validate(values)
    except ConfigError as error:
        assert str(error)
    else:
        assert EngineConfig(**config.model_dump(mode="json")).model == config.model


def test_names_of_choices_are_in_any_case_and_booleans_may_be_in_quotes():
    config = EngineConfig.model_validate(
        {
            "enable_attention_dp": "true",
            "enable_chunked_prefill": "False",
            "dtype": "BFloat16",
            "moe_config": {"backend": "trtllm"},
            "scheduler_config": {"capacity_scheduler_policy": "guaranteed_no_evict"},
            "cuda_graph_config": {"enable_padding": "TRUE"},
            "allreduce_strategy": "auto",
            "tokenizer_mode": "AUTO",
            "trust_remote_code": "false",
            "model": "False",  # any text is a name
        }
    )
    assert config.enable_attention_dp is True
    assert config.enable_chunked_prefill is False
    assert (config.dtype, config.moe_config.backend) == ("bfloat16", "TRTLLM")
    assert config.scheduler_config.capacity_scheduler_policy is CapacityPolicy.GUARANTEED_NO_EVICT
    assert config.cuda_graph_config is not None and config.cuda_graph_config.enable_padding is True
    assert config.model == "False"
    with pytest.raises(ConfigError, match="enable_attention_dp is 'on', it must be true or false"):
        EngineConfig.model_validate({"enable_attention_dp": "on"})
