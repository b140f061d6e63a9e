"""What becomes of every field TensorRT-LLM's YAML knows: supported, ignored or rejected, and why.

The table is data; `canonical` and `translate` apply it. Knows names only: what a supported field
may hold is the schema's business. Imports nothing heavy, so that the command line can use it.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.errors import ConfigError


class Verdict(StrEnum):
    SUPPORTED = "supported"
    IGNORED = "ignored"  # a warning, then as if it were not there
    REJECTED = "rejected"  # an error: ignoring it would give something else than was asked for


@dataclass(frozen=True, slots=True)
class Ruling:
    verdict: Verdict
    reason: str = ""
    # Values that ask for nothing that Penstock does not do anyway: no warning, no error.
    neutral: tuple[object, ...] = ()
    # Of a supported field: values that are dropped with a warning, and why.
    dropped: Mapping[str, str] = field(default_factory=dict)
    # Of a supported section: the kind that is; others are ignored with a warning, and why.
    kind: "Kind | None" = None


@dataclass(frozen=True, slots=True)
class Kind:
    """What a section is about, by a field of it; an alias is another name for one of the values."""

    name: str  # of the field
    model: str  # field that the text behind = sets, in the short form of the section: "name=model"
    values: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def expanded(self, text: str) -> dict[str, str]:
        """The section that a short form stands for."""
        kind, has_model, model = text.partition("=")
        return {self.name: kind} | ({self.model: model} if has_model else {})

    @property
    def described(self) -> str:
        *others, last = self.values
        return f"{', '.join(others)} and {last}"

    def value(self, path: str, section: Mapping[str, object]) -> str:
        """However it is spelled."""
        given = section.get(self.name)
        if not isinstance(given, str):
            raise ConfigError(f"{path} needs a {self.name}; there are {self.described}")
        known = {_plain(value): value for value in self.values}
        known |= {alias: known[_plain(value)] for alias, value in self.aliases.items()}
        if (value := known.get(_plain(given))) is None:
            raise ConfigError(
                f"{path}.{self.name} is {given!r}, which is not there; there are {self.described}"
            )
        return value


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


SUPPORTED = Ruling(Verdict.SUPPORTED)


def ignored(reason: str, *neutral: object) -> Ruling:
    return Ruling(Verdict.IGNORED, reason, neutral)


def rejected(reason: str, *neutral: object) -> Ruling:
    return Ruling(Verdict.REJECTED, reason, neutral)


def _section(name: str, ruling: Ruling, children: Mapping[str, Ruling] | str) -> dict[str, Ruling]:
    """A section and its fields; fields given as words share the section's ruling."""
    if isinstance(children, str):
        children = dict.fromkeys(children.split(), ruling)
    return {name: ruling} | {f"{name}.{child}": value for child, value in children.items()}


_NO_ALL_TO_ALL = "what ranks found for a decode is gathered in one message, not exchanged"
_NO_RAY = rejected(
    "with Ray a rank is a process with one bundle of a packed placement group; leave it out", None
)
_NO_WAIT = "prompts are never held back to fill a step"
_FP32_STATE = "recurrent states are float32"
_NO_PYTHON_OBJECT = "it takes a Python object, which a configuration file cannot hold"
_OTHER_DRAFTER = "it belongs to a decoding_type that is not there"
_NO_TREE = "drafts are no tree: one token is drafted for each place"
_DRAFTING_FIELDS = (
    *("decoding_type", "max_draft_len", "max_concurrency", "max_matching_ngram_size"),
    *("is_keep_all", "is_use_oldest", "speculative_model", "eagle3_layers_to_capture"),
    *("use_relaxed_acceptance_for_thinking", "relaxed_topk", "relaxed_delta", "greedy_sampling"),
    *("begin_thinking_phase_token", "end_thinking_phase_token", "posterior_threshold"),
    *("output_directory", "write_interval", "file_prefix", "drafter"),
)
_OTHER_DRAFTERS_FIELDS = (
    *("sa_config", "enable_global_pool", "global_pool_size"),
    *("mask_token_id", "target_layer_ids"),
)
_NO_COMPILE = ignored("no model is run through torch.compile")
_NO_TRANSFER = "prefill and decode in separate servers is not there yet"

_MODEL = {
    "model": SUPPORTED,
    "tokenizer": SUPPORTED,
    "tokenizer_mode": ignored("there is only the fast tokenizer", "auto"),
    "custom_tokenizer": rejected("only tokenizer.json is read; name another folder by 'tokenizer'"),
    "skip_tokenizer_init": SUPPORTED,
    "trust_remote_code": ignored("code of a checkpoint is never run; models are built in", False),
    "dtype": SUPPORTED,
    "revision": SUPPORTED,
    "tokenizer_revision": rejected("tokenizer and weights come from one 'revision'"),
    "model_kwargs": SUPPORTED,
    "load_format": SUPPORTED,
    "checkpoint_format": rejected("only Hugging Face checkpoints are read", "HF"),
    "checkpoint_loader": rejected(_NO_PYTHON_OBJECT),
    **_section(
        "mx_config",
        ignored("weights are read from files, not from peers"),
        "server_url server_query_timeout_s preshard_strategy",
    ),
    "force_dynamic_quantization": ignored("weights keep the format of the checkpoint", False),
    "mm_encoder_only": rejected("there is no encoder-only server", False),
    "encode_only": rejected("set task to embed, or to score", False),
}

_PARALLEL = {
    "tensor_parallel_size": SUPPORTED,
    "pipeline_parallel_size": SUPPORTED,
    "context_parallel_size": SUPPORTED,
    "gpus_per_node": ignored("the number of GPUs is found at start"),
    "moe_tensor_parallel_size": SUPPORTED,
    "moe_expert_parallel_size": SUPPORTED,
    "moe_cluster_parallel_size": rejected(
        "an expert is on the ranks that moe_expert_parallel_size gives it", 1, -1
    ),
    "enable_attention_dp": SUPPORTED,
    **_section(
        "attention_dp_config",
        SUPPORTED,
        dict.fromkeys(("enable_balance", "timeout_iters", "batching_wait_iters"), SUPPORTED)
        | dict.fromkeys(
            (
                "enable_kv_cache_aware_routing",
                "kv_cache_routing_load_balance_weight",
                "kv_cache_routing_match_rate_threshold",
                "kv_cache_routing_fair_share_multiplier",
                "kv_cache_routing_cold_start_warmup",
            ),
            rejected("a request goes to the rank with its prefix unless that one is busy", False),
        ),
    ),
    "enable_lm_head_tp_in_adp": rejected("with attention DP every rank has the whole head", False),
    "pp_partition": rejected("layers are split into stages as equal as may be"),
    **_section(
        "cp_config",
        Ruling(Verdict.SUPPORTED, kind=Kind("cp_type", "", ("HELIX", "RING"))),
        dict.fromkeys(("cp_type", "tokens_per_block"), SUPPORTED)
        | dict.fromkeys(("use_nccl_for_alltoall", "fifo_version"), ignored(_NO_ALL_TO_ALL))
        | dict.fromkeys(
            ("cp_anchor_size", "block_size"),
            rejected("it belongs to STAR, which is not exact; leave it out"),
        ),
    ),
    "allreduce_strategy": SUPPORTED,
    "dwdp_config": ignored("weights stay on the GPU that loaded them"),
    "orchestrator_type": SUPPORTED,
    "mpi_session": rejected(_NO_PYTHON_OBJECT),
    "ray_worker_extension_cls": _NO_RAY,
    "ray_placement_config": _NO_RAY,
    "ray_worker_nsight_options": _NO_RAY,
}

_LIMITS = {
    "max_batch_size": SUPPORTED,
    "max_num_tokens": SUPPORTED,
    "max_seq_len": SUPPORTED,
    "max_input_len": ignored("a prompt may be as long as max_seq_len leaves room for"),
    "max_beam_width": ignored("a request says how many beams it keeps (best_of)", 1),
}

_RUNTIME = {
    "enable_chunked_prefill": SUPPORTED,
    **_section(
        "scheduler_config",
        SUPPORTED,
        {
            "capacity_scheduler_policy": Ruling(
                Verdict.SUPPORTED,
                dropped={"STATIC_BATCH": "batches always change from step to step"},
            ),
            "context_chunking_policy": ignored(
                "prompts are cut first come first served", "FIRST_COME_FIRST_SERVED"
            ),
            "dynamic_batch_config": ignored("max_batch_size and max_num_tokens do not move"),
            "waiting_queue_policy": SUPPORTED,
            "use_python_scheduler": ignored("there is one scheduler", False, True),
        },
    ),
    "disable_overlap_scheduler": SUPPORTED,
    "stream_interval": SUPPORTED,
    "num_postprocess_workers": SUPPORTED,
    "postprocess_tokenizer_dir": ignored("every HTTP process uses the model's tokenizer"),
    "batch_wait_timeout_ms": ignored(_NO_WAIT, 0),
    "batch_wait_timeout_iters": ignored(_NO_WAIT, 0),
    "batch_wait_max_tokens_ratio": ignored(_NO_WAIT, 0),
    "reorder_policy_config": ignored("the order is set by scheduler_config.waiting_queue_policy"),
    "enable_early_first_token_response": ignored("tokens are sent when their step ends", False),
    "garbage_collection_gen0_threshold": ignored("the garbage collector is not adjustable"),
    "env_overrides": ignored("set environment variables before starting"),
    "enable_resource_governor": ignored("there is no governor endpoint", False),
    "sleep_config": ignored("there is no sleep mode"),
}

_KERNELS = {
    **_section(
        "cuda_graph_config",
        SUPPORTED,
        dict.fromkeys(("batch_sizes", "max_batch_size", "enable_padding"), SUPPORTED),
    ),
    **_section(
        "torch_compile_config",
        _NO_COMPILE,
        "enable_fullgraph enable_inductor enable_piecewise_cuda_graph capture_num_tokens "
        "enable_userbuffers max_num_streams",
    ),
    "attn_backend": SUPPORTED,
    **_section(
        "moe_config",
        SUPPORTED,
        {
            "backend": SUPPORTED,
            "max_num_tokens": SUPPORTED,
            "disable_finalize_fusion": ignored("sums are always in the same order", False, True),
            "use_low_precision_moe_combine": ignored("experts are summed in fp32", False),
        },
    ),
    **_section(
        "moe_config.load_balancer",
        SUPPORTED,
        "num_slots initial_global_assignments layer_updates_per_iter",
    ),
    **_section(
        "nvfp4_gemm_config", ignored("matrix kernels are chosen automatically"), "allowed_backends"
    ),
    "enable_autotuner": ignored("kernels are chosen automatically", True),
    "enable_min_latency": ignored("kernels are chosen automatically", False),
    "use_cute_dsl_*": ignored("kernels are chosen automatically", False),
    "enable_layerwise_nvtx_marker": ignored("there are no NVTX ranges", False),
    "layer_wise_benchmarks_config": ignored("layers are not timed one by one"),
    **_section(
        "sparse_attention_config", ignored("attention is dense, which is exact"), "algorithm"
    ),
}

_CACHE = {
    **_section(
        "kv_cache_config",
        SUPPORTED,
        {
            "enable_block_reuse": SUPPORTED,
            "max_tokens": SUPPORTED,
            "max_attention_window": ignored("windows are those of the model"),
            "sink_token_length": ignored("sinks are those of the model"),
            "free_gpu_memory_fraction": SUPPORTED,
            "host_cache_size": SUPPORTED,
            "secondary_offload_min_priority": ignored(
                "only blocks of preempted requests are moved to host memory"
            ),
            "cross_kv_cache_fraction": ignored("there are no encoder-decoder models"),
            "event_buffer_max_size": ignored("block events are not published yet", 0),
            "attention_dp_events_gather_period_ms": ignored(
                "block events are not published yet", 5
            ),
            "enable_partial_reuse": SUPPORTED,
            "copy_on_partial_reuse": ignored("a partly equal block is always copied", True),
            "use_uvm": ignored("the cache is plain GPU memory", False),
            "max_gpu_total_bytes": rejected(
                "limit the cache by kv_cache_config.max_tokens or free_gpu_memory_fraction", 0
            ),
            "iteration_stats_interval": ignored("every step is counted", 1),
            "dtype": SUPPORTED,
            "mamba_ssm_cache_dtype": ignored(_FP32_STATE, "auto", "float32"),
            "mamba_ssm_stochastic_rounding": ignored(_FP32_STATE, False),
            "mamba_ssm_philox_rounds": ignored(_FP32_STATE, 10),
            "mamba_state_cache_interval": SUPPORTED,
            "tokens_per_block": SUPPORTED,
            "use_kv_cache_manager_v2": ignored("there is one cache manager", False, True),
            "max_util_for_resume": ignored("a stopped request resumes when it fits", 0.95),
            "onboard_blocks": ignored("blocks in host memory are always read back", False),
        },
    ),
    **_section(
        "kv_connector_config",
        ignored("the cache is not shared with other servers yet"),
        "connector connector_module connector_scheduler_class connector_worker_class server_url",
    ),
    **_section(
        "cache_transceiver_config",
        rejected(_NO_TRANSFER),
        "backend transceiver_runtime max_tokens_in_buffer kv_transfer_timeout_ms "
        "kv_transfer_sender_future_timeout_ms",
    ),
    "enable_lora": SUPPORTED,
    **_section(
        "lora_config",
        SUPPORTED,
        {
            **dict.fromkeys(
                ("lora_dir", "lora_ckpt_source", "max_lora_rank", "lora_target_modules"), SUPPORTED
            ),
            **dict.fromkeys(("max_loras", "max_cpu_loras"), SUPPORTED),
            "trtllm_modules_to_hf_modules": rejected(
                "name modules as the checkpoint does in lora_target_modules", {}
            ),
            "swap_gate_up_proj_lora_b_weight": ignored(
                "gate and up are placed by their names", True, False
            ),
        },
    ),
    "peft_cache_config": rejected(
        "adapters are counted, not their bytes; use lora_config.max_loras and max_cpu_loras"
    ),
}

_OUTPUT = {
    "sampler_type": ignored("there is one sampler", "auto", "TorchSampler"),
    "disable_flashinfer_sampling": ignored("there is one sampler", False, True),
    "sampler_force_async_worker": ignored("there is one sampler", False),
    "enable_speculative_beam_history_d2h": ignored("beams are kept on the host", False),
    "enable_mixed_sampler": ignored("requests with different sampling always share a step", True),
    "enable_trtllm_sampler": ignored("there is one sampler", False),
    "guided_decoding_backend": ignored(
        "grammars always run on llguidance; every response format is served by it", "llguidance"
    ),
    "batched_logits_processor": rejected(_NO_PYTHON_OBJECT),
    "gather_generation_logits": ignored("logits stay on the device; ask for logprobs", False),
    "reasoning_parser": SUPPORTED,
    **_section(
        "speculative_config",
        Ruling(
            Verdict.SUPPORTED,
            kind=Kind(
                "decoding_type",
                "speculative_model",
                ("NGram", "MTP", "Draft_Target", "Eagle3", "AUTO", "User_Provided", "SaveState"),
                {"eagle": "Eagle3", "draft": "Draft_Target"},
            ),
        ),
        {
            **dict.fromkeys(_DRAFTING_FIELDS, SUPPORTED),
            "resource_manager": rejected("a drafter keeps what it needs; leave it out"),
            "use_mtp_vanilla": rejected("one MTP head is run as often as there are drafts", False),
            "mtp_eagle_one_model": ignored("one MTP head is run as often as needed", True),
            "eagle3_one_model": ignored("the head always runs beside the model", True),
            "eagle3_model_arch": rejected("heads of Llama's layout run", "llama3"),
            "load_format": ignored("the draft model is loaded as the model is", "auto"),
            **dict.fromkeys(("use_dynamic_tree",), rejected(_NO_TREE, False)),
            **dict.fromkeys(("dynamic_tree_max_topK", "eagle_choices"), rejected(_NO_TREE)),
            "is_public_pool": rejected(
                "a request drafts from its own tokens: by a pool of all requests one user could "
                "tell what others write; set it to false or leave it out",
                False,
            ),
            "max_total_draft_tokens": ignored("drafts are no tree; max_draft_len bounds them"),
            "draft_len_schedule": rejected("set max_draft_len, and max_concurrency"),
            **dict.fromkeys(
                ("acceptance_window", "acceptance_length_threshold"),
                rejected("drafting does not end by itself; set max_concurrency"),
            ),
            "allow_advanced_sampling": ignored(
                "sampled requests are always drafted for; their tokens stay the same", True
            ),
            "use_rejection_sampling": ignored(
                "a draft is accepted if it is the token that would have been drawn", False
            ),
            **dict.fromkeys(_OTHER_DRAFTERS_FIELDS, rejected(_OTHER_DRAFTER)),
        },
    ),
    **_section(
        "speculative_config.sa_config", rejected(_OTHER_DRAFTER), "threshold enable_global_pool"
    ),
}

_STATISTICS = {
    "print_iter_log": ignored("steps are counted, not logged; read GET /metrics", False),
    "enable_iter_perf_stats": ignored("steps are always recorded for GET /metrics", True),
    "enable_iter_req_stats": ignored("step records hold no list of requests", False),
    "iter_stats_max_iterations": ignored("use max_stats_len"),
    "request_stats_max_iterations": ignored("use max_stats_len"),
    "max_stats_len": SUPPORTED,
    "return_perf_metrics": ignored(
        "request times are always at /prometheus/metrics; there is no GET /perf_metrics", False
    ),
    "perf_metrics_max_requests": ignored("use max_stats_len", 0),
    "prometheus_metrics_config": ignored("histogram buckets are fixed"),
    "enable_energy_metrics": ignored("energy is not measured", False),
    "otlp_traces_endpoint": ignored("there is no tracing yet"),
    "telemetry_config": ignored("no usage is reported to anybody"),
}

FIELDS: dict[str, Ruling] = (
    _MODEL | _PARALLEL | _LIMITS | _RUNTIME | _KERNELS | _CACHE | _OUTPUT | _STATISTICS
)

# Other spellings: old names, names that documentation uses, and the short names of the flags.
ALIASES = {
    "attention_backend": "attn_backend",
    "hf_revision": "revision",
    "kv_cache_dtype": "kv_cache_config.dtype",
    "cuda_graph_config.padding_enabled": "cuda_graph_config.enable_padding",
    "speculative_config.num_nextn_predict_layers": "speculative_config.max_draft_len",
    "speculative_config.speculative_model_dir": "speculative_config.speculative_model",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "moe_expert_parallel_size",
}

_SECTIONS = {path.rpartition(".")[0] for path in FIELDS if "." in path}
_OPEN = {"sparse_attention_config"}  # its fields differ by algorithm; only that one is listed


def ruling_of(path: str) -> Ruling | None:
    """None: TensorRT-LLM has no such field (it may still be one of ours)."""
    if path in FIELDS:
        return FIELDS[path]
    for pattern, ruling in FIELDS.items():
        if pattern.endswith("*") and path.startswith(pattern[:-1]):
            return ruling
    return None


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """values[a][b][c] = value for the path a.b.c, making sections on the way."""
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[name] = value


def canonical(values: object) -> dict[str, Any]:
    """The same settings with every alias replaced by its field, short forms of sections by them."""
    result: dict[str, Any] = {}
    given: dict[str, tuple[str, Any]] = {}
    for path, value in _leaves(values):
        target = ALIASES.get(path, path)
        other, other_value = given.setdefault(target, (path, value))
        if value != other_value:
            raise ConfigError(
                f"'{other}' and '{path}' name the same setting; give only one of them"
            )
        put(result, target, value)
    return result


def _leaves(values: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        where = prefix.rstrip(".") or "the configuration"
        raise ConfigError(f"{where} must be a mapping of names to values")
    for name, value in values.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(
                f"{name!r} is not a field name" + (f" of {prefix[:-1]}" if prefix else "")
            )
        path = prefix + name
        kind = FIELDS[path].kind if path in FIELDS else None
        if kind is not None and isinstance(value, str):
            value = kind.expanded(value)
        if path in _SECTIONS and isinstance(value, Mapping) and value:
            yield from _leaves(value, path + ".")
        else:
            yield path, value


def translate(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """What the schema has to check, and one line for each thing that will not happen."""
    kept: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in values.items():
        path = prefix + name
        ruling = ruling_of(path)
        if ruling is None:
            kept[name] = value
        elif ruling.verdict is Verdict.SUPPORTED:
            if path in _SECTIONS and isinstance(value, Mapping):
                if ruling.kind is not None:
                    value = {**value, ruling.kind.name: ruling.kind.value(path, value)}
                kept[name], lines = translate(value, path + ".")
                warnings += lines
            elif (why := _dropped(value, ruling)) is not None:
                warnings.append(f"{path}: {value} is ignored: {why}")
            else:
                kept[name] = value
        elif value is None or _folded(value) in map(_folded, ruling.neutral):
            continue
        elif ruling.verdict is Verdict.REJECTED:
            raise ConfigError(f"{path} cannot be used: {ruling.reason}")
        else:
            _refuse_unknown_inside(path, value)
            warnings.append(f"{path} is ignored: {ruling.reason}")
    return kept, warnings


def _dropped(value: object, ruling: Ruling) -> str | None:
    reasons = {_folded(other): why for other, why in ruling.dropped.items()}
    return reasons.get(_folded(value)) if isinstance(value, str) else None


def _folded(value: object) -> object:
    """ "true" in quotes is a boolean, and names may be in any case, as in the schema."""
    if not isinstance(value, str):
        return value
    return {"true": True, "false": False}.get(value.lower(), value.lower())


def _refuse_unknown_inside(section: str, value: object) -> None:
    """A typo in an ignored section is still a typo."""
    if section not in _SECTIONS or not isinstance(value, Mapping) or section in _OPEN:
        return
    for name, inner in value.items():
        path = f"{section}.{name}"
        if ruling_of(path) is None:
            raise ConfigError(unknown(path))
        _refuse_unknown_inside(path, inner)


def unknown(path: str, own_names: Iterable[str] = ()) -> str:
    """The complaint about a name nobody knows, with the name that was probably meant."""
    section, _, name = path.rpartition(".")
    known = {*FIELDS, *ALIASES, *own_names}
    homes = sorted(other for other in known if other.rpartition(".")[2] == name)
    siblings = {other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section}
    near = homes or difflib.get_close_matches(name, sorted(siblings), n=1)
    where = f" in {section}" if section else ""
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"unknown field '{name}'{where}{hint}"
