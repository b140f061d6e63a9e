"""The flags of `penstock eval` and of trtllm-eval, light like all flags."""

import argparse
from pathlib import Path

from penstock.cli.api_key import HELP as API_KEY_HELP
from penstock.cli.flags import FLAGS, Flag, add_flags, without_field
from penstock.cli.parser import add_help_all
from penstock.config.trtllm_fields import ignored

TASKS = (
    *("skills", "gsm8k", "aime24", "aime25", "aime26", "gpqa"),
    *("mmlu", "hellaswag", "perplexity"),
)
LM_EVAL = "lm-eval:"
_GREEDY = "decoding is greedy"
_FIELDS = (
    *("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size", "revision"),
    *("kv_cache_config.free_gpu_memory_fraction", "pipeline_parallel_size", "trust_remote_code"),
    *("moe_expert_parallel_size", "gpus_per_node", "backend", "max_beam_width", "telemetry"),
)
TRTLLM_FLAGS: tuple[Flag, ...] = (
    *(flag for flag in FLAGS if flag.field in _FIELDS),
    without_field("random_seed", "int", ignored("examples are taken in their order", 0)),
    without_field("temperature", "float", ignored(_GREEDY, 0.0)),
    without_field("top_p", "float", ignored(_GREEDY, 1.0)),
    without_field("top_k", "int", ignored(_GREEDY, 1)),
    without_field("sampling_seed", "int", ignored(_GREEDY)),
    without_field("log_samples", "switch", ignored("--output_dir gets them always")),
)


def add_eval_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help="model to start and score")
    command.add_argument(
        "--task",
        type=_task,
        required=True,
        metavar="TASK",
        help=f"one of {', '.join(TASKS)}; or {LM_EVAL}NAME,... for tasks of lm-eval",
    )
    command.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="file, or a folder that has it under its name; of lm-eval: more task files",
    )
    command.add_argument(
        "--limit", type=_positive, metavar="N", help="most examples; of tasks with groups, of each"
    )
    command.add_argument("--max_tokens", type=_positive, metavar="N", help="longest output")
    command.add_argument("--output", type=Path, metavar="FILE", help="write every response as JSON")
    command.add_argument("--show", type=int, default=0, metavar="N", help="wrong answers per skill")
    command.add_argument(
        "--min_score", type=float, default=0.0, metavar="SHARE", help="exit with 1 below this"
    )
    published = command.add_argument_group("all tasks but skills")
    published.add_argument("--shots", type=Path, metavar="FILE", help="examples to show before")
    published.add_argument("--num_fewshot", type=int, metavar="N", help="how many of them")
    published.add_argument("--apply_chat_template", action="store_true", help="ask in a chat")
    published.add_argument("--system_prompt", metavar="TEXT", help="first message of a chat")
    published.add_argument(
        "--max_input_len", type=_positive, metavar="N", help="most tokens weighed at a time"
    )
    published.add_argument("--tokenizer", help="default: the model's")
    engine = command.add_argument_group("MODEL")
    engine.add_argument("--config", metavar="FILE", help="YAML file with fields of docs/config.md")
    engine.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set any field"
    )
    server = command.add_argument_group("a running server instead")
    server.add_argument("--url", help="its address, such as http://localhost:8000")
    server.add_argument("--model", dest="served_model", help="default: the first one it lists")
    server.add_argument("--api_key", help=API_KEY_HELP)
    server.add_argument(
        "--concurrency", type=_positive, default=32, metavar="N", help="requests at once"
    )


def add_trtllm_eval_flags(parser: argparse.ArgumentParser) -> None:
    add_help_all(parser)
    parser.add_argument("task", metavar="TASK", help=f"one of {', '.join(TASKS[1:])}")
    parser.add_argument("--model", required=True, help="model to start and score")
    parser.add_argument("--tokenizer", help="default: the model's")
    parser.add_argument("--config", "--extra_llm_api_options", metavar="FILE", help="YAML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set any field"
    )
    parser.add_argument("--log_level", help=argparse.SUPPRESS)
    parser.add_argument("--disable_kv_cache_reuse", action="store_true", help="no prefix reuse")
    parser.add_argument(
        "--dataset_path", type=Path, required=True, metavar="PATH", help="file or folder"
    )
    parser.add_argument("--shots", type=Path, metavar="FILE", help="examples to show before")
    parser.add_argument("--num_samples", type=_positive, metavar="N", help="most examples")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="examples shown before")
    parser.add_argument("--apply_chat_template", action="store_true", help="ask in a chat")
    parser.add_argument("--chat_template_kwargs", metavar="JSON", help="for the template")
    parser.add_argument("--system_prompt", metavar="TEXT", help="first message of a chat")
    parser.add_argument("--max_input_length", type=_positive, metavar="N", help="tokens")
    parser.add_argument("--max_output_length", type=_positive, metavar="N", help="tokens")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="every response as JSON")
    parser.add_argument("--check_accuracy", action="store_true", help="exit with 1 below")
    parser.add_argument(
        "--accuracy_threshold", type=float, default=30.0, metavar="PERCENT", help="for it"
    )
    add_flags(parser.add_argument_group("engine"), TRTLLM_FLAGS)


def _task(text: str) -> str:
    if text not in TASKS and not text.startswith(LM_EVAL):
        raise argparse.ArgumentTypeError(f"invalid choice: '{text}' (one of {', '.join(TASKS)})")
    return text


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value
