"""The flags of `penstock bench`, light on purpose: `--help` must not wait for a library.

Those of `serve` are the flags of TensorRT-LLM's `benchmark_serving`, with its defaults.
"""

import argparse
import math
from pathlib import Path

from penstock.cli.api_key import HELP as API_KEY_HELP
from penstock.cli.parser import add_help_all, hide

_DATASETS = (
    *("sharegpt", "burstgpt", "sonnet", "random", "random-ids", "random_image"),
    *("custom", "trtllm_custom", "hf"),
)
_METRICS = ("ttft", "tpot", "itl", "e2el")
_METADATA = "for the result file"
_LIMITED = ("ttft", "tpot", "e2el")


def add_benchmark_flags(parser: argparse.ArgumentParser) -> None:
    """What to ask of which server, and which figures to show."""
    add_help_all(parser)
    _add_target(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_datasets(parser)
    _add_sampling(parser.add_argument_group("sampling; without a temperature it is greedy"))
    _add_figures(parser.add_argument_group("figures"))


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--save_result", action="store_true", help="write a JSON file")
    group.add_argument(
        "--save_detailed", action="store_true", help="also every text, time and error"
    )
    group.add_argument("--result_dir", type=Path, help="folder of the JSON file")
    group.add_argument("--result_filename", help="default: backend, rate, model, time")
    group.add_argument(
        "--metadata", nargs="*", metavar="K=V", type=_pair, default=[], help=_METADATA
    )
    group.add_argument(
        "--save_request_time_breakdown",
        action="store_true",
        help="write what the server measured itself (GET /perf_metrics), if it does",
    )
    group.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots")


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    levels = group.add_mutually_exclusive_group(required=True)
    levels.add_argument("--concurrency", type=_counts, metavar="N,N", help="1,4,16,64")
    levels.add_argument("--rates", type=_rates, metavar="R,R", help="requests per second: 1,2,4")
    group.add_argument(
        "--rounds", type=count, default=5, help="requests of each level, times its concurrency"
    )
    group.add_argument("--result_dir", type=Path, help="default: bench-MODEL-DATE")
    group.add_argument(
        "--metadata", nargs="*", metavar="K=V", type=_pair, default=[], help=_METADATA
    )


def _add_target(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--backend", choices=("openai", "openai-chat"), default="openai", help="kind of API"
    )
    add_address_flags(group)
    group.add_argument(
        "--endpoint", default="/v1/completions", help="chats always go to /v1/chat/completions"
    )
    group.add_argument(
        "--model", help="whose tokenizer is used; name in requests; default: what is served"
    )
    group.add_argument("--served_model_name", help="name in requests, where it is another")
    group.add_argument("--tokenizer", help="name or folder, where it is not the model's")
    group.add_argument(
        "--tokenizer_mode",
        choices=("auto", "slow", "mistral", "custom"),
        default="auto",
        help="the last two are rejected",
    )
    custom = group.add_argument("--custom_tokenizer")
    hide(custom, "rejected: code of others is not loaded")
    trust = group.add_argument("--trust_remote_code", action="store_true")
    hide(trust, "ignored: code of a model is never run")
    group.add_argument("--lora_modules", nargs="+", metavar="NAME", help="a request draws one")


def add_address_flags(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--base_url", help="instead of host and port")
    group.add_argument("--host", default="127.0.0.1", help="of the server")
    group.add_argument("--port", type=int, default=8000, help="of the server")
    group.add_argument("--api_key", help=API_KEY_HELP)


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--num_prompts", type=count, default=1000, help="requests to send")
    group.add_argument("--max_concurrency", type=count, help="most requests at once (default: all)")
    group.add_argument("--request_rate", type=rate, default=math.inf, help="requests per second")
    group.add_argument(
        "--burstiness", type=rate, default=1.0, help="1: Poisson; lower: bursts; higher: even"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    group.add_argument("--no_test_input", action="store_true", help="send no request ahead")
    group.add_argument("--profile", action="store_true", help="POST /start_profile, /stop_profile")
    group.add_argument("--disable_tqdm", action="store_true", help="show no progress")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset_name", choices=_DATASETS, default="sharegpt", help="random makes prompts up"
    )
    group.add_argument("--dataset_path", metavar="FILE", help="file; for hf a name of the hub")
    group.add_argument("--download_path", type=Path, help="folder to fetch ShareGPT into")
    group.add_argument(
        "--download_timeout", type=float, default=180.0, metavar="SECONDS", help="of ShareGPT"
    )
    group.add_argument("--random_input_len", type=count, default=1024, help="tokens of a prompt")
    group.add_argument("--random_output_len", type=count, default=128, help="tokens to ask for")
    group.add_argument(
        "--random_range_ratio", type=_share, default=0.0, help="lengths vary by this share"
    )
    group.add_argument(
        "--random_prefix_len", type=natural, default=0, help="tokens that all prompts share"
    )
    group.add_argument("--random_ids", action="store_true", help="runs of ids instead of texts")
    group.add_argument("--tokenize_on_client", action="store_true", help="send ids, not text")
    group.add_argument("--random_image_width", type=count, default=512, help="pixels")
    group.add_argument("--random_image_height", type=count, default=512, help="pixels")
    group.add_argument("--random_image_size", type=count, help="width and height")
    group.add_argument("--random_num_images", type=count, default=1, help="of a request")
    group.add_argument("--sharegpt_output_len", type=count, help="instead of the dataset's own")
    group.add_argument("--sonnet_input_len", type=count, default=550, help="tokens of a prompt")
    group.add_argument("--sonnet_output_len", type=count, default=150, help="tokens to ask for")
    group.add_argument(
        "--sonnet_prefix_len", type=natural, default=200, help="tokens that all prompts share"
    )
    group.add_argument("--hf_subset", help="of a dataset of the hub")
    group.add_argument("--hf_split", help="of a dataset of the hub")
    group.add_argument("--hf_output_len", type=count, help="instead of the dataset's own")


def _add_sampling(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--temperature", type=float, help="0 takes the likeliest token")
    group.add_argument("--top_p", type=float, help="tokens of this share of probability")
    group.add_argument("--top_k", type=int, help="so many likeliest tokens")
    group.add_argument("--min_p", type=float, help="tokens of this share of the likeliest one")
    group.add_argument("--ignore_eos", action="store_true", help="all outputs have full length")
    group.add_argument("--logprobs", type=natural, help="log-probabilities of a token")
    group.add_argument("--use_beam_search", action="store_true", help="if the server can")
    group.add_argument("--non_streaming", action="store_true", help="only e2el can be measured")


def _add_figures(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--percentile_metrics",
        type=_metrics,
        default="ttft,tpot,itl",
        metavar="NAME,NAME",
        help=f"of {', '.join(_METRICS)}",
    )
    group.add_argument(
        "--metric_percentiles", type=_percents, default="99", metavar="P,P", help="0 to 100"
    )
    group.add_argument(
        "--goodput", nargs="+", type=_limit, default=[], metavar="NAME:MS", help="of a good request"
    )
    group.add_argument("--ceiling", choices=("h200",), help="show what share of it is reached")
    group.add_argument("--ceiling_fp8_cache", action="store_true", help="its cache has 8 bits")


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise ValueError
    return value


def rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise ValueError
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(one) for one in text.split(","))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(rate(one) for one in text.split(","))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name, value


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(_METRICS):
        raise argparse.ArgumentTypeError(f"'{text}': there are {', '.join(_METRICS)}")
    return names


def _percents(text: str) -> tuple[float, ...]:
    values = tuple(float(one) for one in text.split(","))
    if not all(0 <= one <= 100 for one in values):
        raise ValueError
    return values


def _limit(text: str) -> tuple[str, float]:
    name, colon, value = text.partition(":")
    if name not in _LIMITED or not colon:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not NAME:MILLISECONDS; there are {', '.join(_LIMITED)}"
        )
    return name, float(value)
