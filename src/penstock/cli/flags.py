"""The flags of `serve`, as a table: one line per flag, its spellings, and the field it sets.

Light on purpose: `--help` must not wait for pydantic. A test keeps it in step with the schema.
All flags of `trtllm-serve` are here; those that are no YAML field have a ruling of their own.
"""

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.cli.flag_defaults import DEFAULTS
from penstock.cli.parser import add_help_all, hide
from penstock.cli.peer_flags import peer_hint
from penstock.config.trtllm_fields import (
    SUPPORTED,
    Ruling,
    Verdict,
    ignored,
    put,
    rejected,
    ruling_of,
)
from penstock.errors import ConfigError, did_you_mean

Kind = Literal["text", "texts", "int", "float", "switch"]


@dataclass(frozen=True, slots=True)
class Flag:
    names: str  # spellings without dashes, the best one first
    kind: Kind
    help: str = ""
    path: str = ""  # YAML field, where it is not the first spelling
    ruling: Ruling | None = None  # of a flag that has no YAML field

    @property
    def field(self) -> str:
        return self.path or self.names.split()[0]

    @property
    def verdict(self) -> Ruling:
        return self.ruling or ruling_of(self.field) or SUPPORTED


def without_field(names: str, kind: Kind, ruling: Ruling) -> Flag:
    return Flag(names, kind, ruling=ruling)


_MODEL = (
    Flag("tokenizer", "text", "tokenizer id or folder, when not the model's own"),
    Flag("revision hf_revision", "text", "branch, tag or commit of the model"),
    Flag("dtype", "text", "auto, bfloat16, float16 or float32"),
    Flag("quantization", "text", "fp8, fp8_block, int8 or nf4: of plain weights, while loading"),
    Flag("task", "text", "auto, generate, embed or score"),
    Flag("load_format", "text", "auto, or dummy for random weights"),
    Flag("skip_tokenizer_init", "switch", "load no tokenizer; prompts are token ids"),
    Flag("chat_template", "text", "Jinja file or template, when not the tokenizer's own"),
    Flag(
        "trust_request_chat_template allow_request_chat_template",
        "switch",
        "requests may bring a chat template of their own",
    ),
    Flag("reasoning_parser", "text", "auto, none, think, deepseek-r1, kimi_k2 or harmony"),
    Flag("tool_parser", "text", "auto, none, hermes, qwen3_coder, llama3_json, mistral, ..."),
    Flag(
        "generation_config",
        "text",
        "sampling parameters of requests that set none: auto (the model's), vllm (neutral), folder",
    ),
    Flag("served_model_name", "text", "name of the model in the API"),
    Flag("seed", "int", "start value of dummy weights and of requests without a seed"),
)
_DEVICES = (
    Flag("device", "text", "auto, cuda or cpu"),
    Flag("tensor_parallel_size tp_size", "int", "GPUs that share each layer"),
    Flag(
        "pipeline_parallel_size pp_size",
        "int",
        "stages of layers, each with tensor_parallel_size GPUs",
    ),
    Flag(
        "context_parallel_size cp_size",
        "int",
        "ranks that share the tokens of each sequence, each with tensor_parallel_size GPUs",
    ),
    Flag(
        "data_parallel_size dp_size", "int", "engines behind this port, each with GPUs of its own"
    ),
    Flag("moe_expert_parallel_size ep_size", "int", "expert-parallel groups of these GPUs"),
    Flag("moe_tensor_parallel_size", "int", "GPUs that share each expert"),
    Flag("enable_attention_dp", "switch", "requests and KV cache of its own on each of these GPUs"),
    Flag("num_threads", "int", "CPU threads of each engine process"),
    Flag("launcher", "text", "who starts the ranks: auto, local, torchrun, slurm, mpi or ray"),
    Flag("allreduce_strategy", "text", "how ranks sum: AUTO, NCCL or ONESHOT"),
    Flag("orchestrator_type", "text", "ray: the same as --launcher ray; rpc, mpi: nothing else"),
    Flag("rank_interface", "text", "network interface between ranks on several nodes"),
    Flag("quantize_activations", "text", "beside 4-bit weights: auto, always, never"),
    Flag(
        "attn_backend attention_backend", "text", "attention kernels: auto, triton, sdpa, reference"
    ),
)
_LIMITS = (
    Flag("max_batch_size", "int", "most sequences in one step"),
    Flag("max_num_tokens", "int", "most tokens in one step"),
    Flag("max_seq_len", "int", "most tokens of one request, prompt and output"),
    Flag("max_queued_requests", "int", "most requests waiting or running; more get status 429"),
    Flag("max_queued_tokens", "int", "most prompt tokens waiting or running; more get status 429"),
    Flag(
        "free_gpu_memory_fraction kv_cache_free_gpu_memory_fraction",
        "float",
        "share of the memory left after loading that the cache takes",
        path="kv_cache_config.free_gpu_memory_fraction",
    ),
    Flag("kv_cache_dtype", "text", "number format of the cache", path="kv_cache_config.dtype"),
    Flag("enable_chunked_prefill", "switch", "compute long prompts in pieces"),
    Flag("disable_overlap_scheduler", "switch", "plan a step only when the last one has ended"),
    Flag(
        "speculate",
        "text",
        "speculative decoding: auto, mtp, ngram, draft=MODEL or eagle3=FOLDER",
        path="speculative_config",
    ),
)
_LORA = (
    Flag("enable_lora", "switch", "take low-rank adapters (docs/lora.md)"),
    Flag("lora_modules", "texts", "NAME=FOLDER of each adapter", path="lora_config.lora_modules"),
    Flag("max_loras", "int", "adapters on the device at a time", path="lora_config.max_loras"),
    Flag("max_lora_rank", "int", "largest rank of an adapter", path="lora_config.max_lora_rank"),
    Flag("max_cpu_loras", "int", "adapters kept in host memory", path="lora_config.max_cpu_loras"),
)
_SERVER = (
    Flag("host", "text", "address to listen on"),
    Flag("port", "int", "port to listen on; 0 picks a free one"),
    Flag("api_key", "text", "key that clients must send; better set in the YAML file"),
    Flag(
        "api_keys_file",
        "text",
        "file of several names and keys (docs/security.md)",
        path="access_config.api_keys_file",
    ),
    Flag(
        "log_level",
        "text",
        "internal_error, error, warning, info, verbose, debug or trace (the last three are one)",
    ),
    Flag("stream_interval", "int", "tokens between two streamed chunks"),
    Flag("num_postprocess_workers num_serve_frontends", "int", "processes that serve HTTP"),
    Flag("max_stats_len", "int", "most records kept between two reads"),
    Flag(
        "shutdown_timeout",
        "float",
        "seconds that running requests may take after a signal",
        path="http_config.shutdown_timeout",
    ),
    Flag(
        "access_log",
        "switch",
        "log a line for each request (default); --no_access_log: none",
        path="http_config.access_log",
    ),
    Flag(
        "allowed_origins",
        "text",
        "web pages whose scripts may call the server, separated by commas, or *",
        path="http_config.allowed_origins",
    ),
)

_ONE_SERVER = rejected("Penstock serves a model in one place; there is no cluster to join yet")
_NO_FOREIGN_CODE = rejected("code named on the command line is not loaded")
_TEXT_ONLY = ignored("only text models are served")
_NO_IMAGES = rejected("only text models are served", False)
_COMPATIBLE = (
    without_field("backend", "text", ignored("there is one backend", "pytorch")),
    Flag("trust_remote_code", "switch"),
    Flag("custom_tokenizer", "text"),
    Flag("max_beam_width", "int"),
    Flag("moe_cluster_parallel_size cluster_size", "int"),
    Flag("gpus_per_node", "int"),
    Flag("otlp_traces_endpoint", "text"),
    without_field("telemetry", "switch", ignored("no usage is reported to anybody", False)),
    without_field(
        "fail_fast_on_attention_window_too_large", "switch", ignored("it has no use here")
    ),
    without_field("num_input_processor_workers", "int", _TEXT_ONLY),
    without_field("num_media_load_workers", "int", _TEXT_ONLY),
    without_field("media_io_kwargs", "text", _TEXT_ONLY),
    without_field("video_pruning_rate", "float", _TEXT_ONLY),
    without_field(
        "agent_percentage", "float", ignored("requests are not told apart by agent", 0.0)
    ),
    without_field("agent_types", "text", ignored("requests are not told apart by agent")),
    without_field("report_addr", "text", ignored("the address is in the log")),
    without_field("custom_module_dirs", "text", _NO_FOREIGN_CODE),
    without_field("middleware", "text", _NO_FOREIGN_CODE),
    without_field("post_processor_hook", "text", _NO_FOREIGN_CODE),
    without_field("grpc", "switch", rejected("only HTTP is served", False)),
    without_field("server_role", "text", _ONE_SERVER),
    without_field("disagg_cluster_uri", "text", _ONE_SERVER),
    without_field("metadata_server_config_file", "text", _ONE_SERVER),
    without_field("visual_gen_args extra_visual_gen_options", "text", _NO_IMAGES),
    without_field("enable_visual_gen", "switch", _NO_IMAGES),
)

_GROUPS = {
    "model": _MODEL,
    "devices": _DEVICES,
    "limits": _LIMITS,
    "adapters": _LORA,
    "server": _SERVER,
    "of trtllm-serve, ignored or rejected here": _COMPATIBLE,
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in _GROUPS.values() for flag in group)

_TYPES: dict[str, Any] = {"text": str, "texts": str, "int": int, "float": float}
_YES, _NO = {"true", "1", "yes", "on"}, {"false", "0", "no", "off"}


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of the table; one that is not given leaves no trace in the parsed namespace."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    add_help_all(parser)
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="name, hub id, folder or GGUF file; without one `penstock serve` takes smollm2",
    )
    parser.add_argument(
        "--config",
        "--extra_llm_api_options",
        metavar="FILE",
        help="YAML file with any field of docs/config.md; it wins over the flags",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="settings of a published recipe, which flags, --config and --set win over; "
        "'penstock recipes' lists them",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set any field, such as kv_cache_config.max_tokens=4096; wins over everything",
    )
    for title, flags in _GROUPS.items():
        add_flags(parser.add_argument_group(title), flags)


def add_flags(group: "argparse._ArgumentGroup", flags: Iterable[Flag]) -> None:
    for flag in flags:
        _add(group, flag)


def _add(group: "argparse._ArgumentGroup", flag: Flag) -> None:
    spellings = [f"--{name}" for name in flag.names.split()]
    common: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS}
    if flag.kind == "switch":
        action = group.add_argument(*spellings, action="store_true", **common)
        opposites = [f"--no_{name}" for name in flag.names.split()]
        group.add_argument(*opposites, action="store_false", help=argparse.SUPPRESS, **common)
    else:
        kind, metavar = _TYPES[flag.kind], flag.kind.upper()
        if flag.kind == "texts":
            common["nargs"], metavar = "+", "TEXT"
        action = group.add_argument(*spellings, type=kind, metavar=metavar, **common)
    if flag.help:
        known = f" (default: {DEFAULTS[flag.field]})" if flag.field in DEFAULTS else ""
        action.help = f"{flag.help}{known}".replace("%", "%%")
    else:
        hide(action, f"{flag.verdict.verdict}: {flag.verdict.reason}".replace("%", "%%"))


def normalize(argv: Sequence[str]) -> list[str]:
    """`--max-batch-size` -> `--max_batch_size`, and `--switch=false` -> `--no_switch`."""
    switches = {name for flag in FLAGS if flag.kind == "switch" for name in flag.names.split()}
    result: list[str] = []
    for position, argument in enumerate(argv):
        if argument == "--":
            return result + list(argv[position:])
        if not argument.startswith("--"):
            result.append(argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if equals and name in switches:
            if value.lower() not in _YES | _NO:
                raise ConfigError(f"--{name} is '{value}', it must be true or false")
            result.append(f"--{name}" if value.lower() in _YES else f"--no_{name}")
        else:
            result.append(f"--{name}{equals}{value}")
    return result


def settings(
    args: argparse.Namespace, flags: Sequence[Flag] = FLAGS
) -> tuple[dict[str, Any], list[str]]:
    """The given flags in the shape of the YAML file, and a line for each that has no effect."""
    values: dict[str, Any] = {}
    warnings: list[str] = []
    if args.model is not None:
        values["model"] = args.model
    for flag in flags:
        if not hasattr(args, flag.field):
            continue
        value = getattr(args, flag.field)
        if flag.ruling is None:
            put(values, flag.field, value)
        elif value in flag.ruling.neutral:
            continue
        elif flag.ruling.verdict is Verdict.REJECTED:
            raise ConfigError(f"--{flag.field} cannot be used: {flag.ruling.reason}")
        else:
            warnings.append(f"--{flag.field} is ignored: {flag.ruling.reason}")
    return values, warnings


def refuse_unknown(extra: Sequence[str], known: Collection[str]) -> None:
    """Complain about the first argument that no flag took."""
    if not extra:
        return
    name = extra[0].partition("=")[0]
    if not name.startswith("-"):
        raise ConfigError(f"unexpected argument '{extra[0]}'")
    raise ConfigError(f"unknown flag '{name}'{peer_hint(name, known) or did_you_mean(name, known)}")
