"""The flags of `penstock bench throughput`, `latency` and `prepare-dataset`: those of trtllm-bench.

Light like `bench_flags`. What sets a field of the engine is a table, as in `flags`.
"""

import argparse
from pathlib import Path

from penstock.cli.flags import FLAGS, Flag, add_flags, without_field
from penstock.cli.parser import add_help_all
from penstock.config.trtllm_fields import ignored, rejected

_TEXT_ONLY = rejected("only text models are run")
_NO_LORA = rejected("datasets name no LoRA adapters; benchmarks/lora.py measures them", -1)

_AS_SERVED = (
    *("max_batch_size", "max_num_tokens", "max_seq_len", "revision", "dtype", "load_format"),
    *("num_threads", "custom_tokenizer", "backend", "custom_module_dirs", "telemetry"),
)
ENGINE_FLAGS: tuple[Flag, ...] = (
    *(flag for flag in FLAGS if flag.field in _AS_SERVED),
    Flag(
        "kv_cache_free_gpu_mem_fraction kv_cache_free_gpu_memory_fraction",
        "float",
        "share of the memory left after loading that the cache takes",
        path="kv_cache_config.free_gpu_memory_fraction",
    ),
    Flag("tp tp_size", "int", "GPUs that share each layer", path="tensor_parallel_size"),
    Flag(
        "ep ep_size",
        "int",
        "expert-parallel groups of these GPUs",
        path="moe_expert_parallel_size",
    ),
    Flag("enable_chunked_context", "switch", "the default", path="enable_chunked_prefill"),
    Flag("pp pp_size", "int", path="pipeline_parallel_size"),
    Flag("cluster_size", "int", path="moe_cluster_parallel_size"),
    Flag("beam_width", "int", path="max_beam_width"),
    without_field("engine_dir", "text", rejected("weights are read; there are no built engines")),
    without_field(
        "medusa_choices",
        "text",
        rejected("there are no Medusa heads; see --speculate"),
    ),
    without_field("modality", "text", _TEXT_ONLY),
    without_field("image_data_format", "text", ignored("only text models are run", "pt")),
    without_field("data_device", "text", ignored("only text models are run", "cuda")),
    without_field("max_input_len", "int", ignored("it bounds pictures; only text is run", 4096)),
    without_field("workspace", "text", ignored("nothing is written there")),
)
PREPARE_FLAGS: tuple[Flag, ...] = (
    without_field("task_id", "int", _NO_LORA),
    without_field("rand_task_id", "text", _NO_LORA),
    without_field("lora_dir", "text", _NO_LORA),
    without_field("trust_remote_code", "switch", ignored("code of a model is never run", False)),
)


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    add_help_all(parser)
    parser.add_argument("-m", "--model", required=True, help="model to start and measure")
    parser.add_argument("--model_path", help="its folder, where `--model` is only a name")
    parser.add_argument("--log_level", default="warning", help=argparse.SUPPRESS)
    parser.add_argument("--config", "--extra_llm_api_options", metavar="FILE", help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set any field"
    )
    requests = parser.add_argument_group("requests")
    requests.add_argument("--dataset", type=Path, metavar="FILE", help="JSON lines; default: stdin")
    requests.add_argument("--dataset_type", choices=("synthetic",), help="instead of a file")
    requests.add_argument("--target_input_len", type=int, default=128, help="of synthetic ones")
    requests.add_argument("--target_output_len", type=int, default=128, help="of synthetic ones")
    requests.add_argument("--num_requests", type=int, default=0, help="0: all; 100 synthetic ones")
    requests.add_argument("--warmup", type=int, default=2, help="requests sent ahead, uncounted")
    requests.add_argument("--concurrency", type=int, default=-1, help="-1: unlimited")
    requests.add_argument("--streaming", action="store_true", help="measure first tokens, too")
    requests.add_argument("--eos_id", type=int, default=-1, help="ends an output; -1: nothing does")
    requests.add_argument("--sampler_options", type=Path, metavar="FILE", help="YAML; else greedy")
    requests.add_argument(
        "--no_skip_tokenizer_init", action="store_true", help="detokenize outputs"
    )
    results = parser.add_argument_group("results")
    results.add_argument("--report_json", type=Path, metavar="FILE", help="the figures")
    results.add_argument("--output_json", type=Path, metavar="FILE", help="every output")
    results.add_argument("--request_json", type=Path, metavar="FILE", help="times of every request")
    results.add_argument(
        "--iteration_log", type=Path, metavar="FILE", help="the engine's last steps"
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--disable_chunked_context",
        dest="enable_chunked_prefill",
        action="store_false",
        default=argparse.SUPPRESS,
        help="a prompt is computed in one piece",
    )
    engine.add_argument(
        "--scheduler_policy",
        choices=("guaranteed_no_evict", "max_utilization"),
        help="when a request starts; default: by the expected output",
    )
    add_flags(engine, ENGINE_FLAGS)


def add_prepare_flags(parser: argparse.ArgumentParser) -> None:
    add_help_all(parser)
    parser.add_argument(
        "kind",
        choices=("token-norm-dist", "token-unif-dist", "real-dataset"),
        help="lengths from a normal or a uniform distribution, or questions of a file",
    )
    parser.add_argument("-m", "--model", "--tokenizer", required=True, help="whose tokens count")
    parser.add_argument("--model_path", help="its folder, where `--model` is only a name")
    parser.add_argument(
        "--output", type=Path, default=Path("preprocessed_dataset.json"), help="file to write"
    )
    parser.add_argument("--stdout", action="store_true", help="print instead")
    parser.add_argument("--random_seed", type=int, default=420, help="of lengths and tokens")
    parser.add_argument("--num_requests", type=int, default=100, help="requests to write")
    parser.add_argument("--log_level", default="warning", help=argparse.SUPPRESS)
    normal = parser.add_argument_group("token-norm-dist")
    uniform = parser.add_argument_group("token-unif-dist")
    for kind in ("input", "output"):
        normal.add_argument(f"--{kind}_mean", type=float, default=128.0, help="tokens")
        normal.add_argument(f"--{kind}_stdev", type=float, default=0.0, help="tokens")
        uniform.add_argument(f"--{kind}_min", type=int, default=1, help="tokens")
        uniform.add_argument(f"--{kind}_max", type=int, default=128, help="tokens")
    real = parser.add_argument_group("real-dataset")
    real.add_argument("--dataset_path", type=Path, metavar="FILE", help="JSON lines")
    real.add_argument("--max_input_len", type=int, help="longer questions are left out")
    real.add_argument("--output_len_dist", metavar="MEAN,STDEV", help="default: the dataset's own")
    add_flags(parser.add_argument_group("of trtllm-bench, ignored or rejected here"), PREPARE_FLAGS)
