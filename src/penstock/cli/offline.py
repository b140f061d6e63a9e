"""`penstock bench throughput`, `latency` and `prepare-dataset`; trtllm-bench calls them, too."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from penstock import log
from penstock.bench import offline_report
from penstock.bench.datasets.files import asks_of_lines, plain_ids
from penstock.bench.figures import figures_of
from penstock.bench.offline import OfflineOptions, OfflineRun, run_offline
from penstock.bench.prepare import Lengths, Normal, Uniform, real_lines, synthetic_lines
from penstock.bench.records import Ask
from penstock.cli.flags import Flag, settings
from penstock.cli.offline_flags import ENGINE_FLAGS, PREPARE_FLAGS
from penstock.config.load import load_config
from penstock.config.schema import EngineConfig
from penstock.config.trtllm_fields import put
from penstock.config.yaml_file import read_yaml
from penstock.errors import ConfigError
from penstock.hub.folder import has_tokenizer, local_folder
from penstock.text.tokenizer import Tokenizer

_logger = log.get(__name__)
_NUM_SYNTHETIC = 100


def run(args: argparse.Namespace) -> int:
    log.setup("bench", args.log_level)
    if args.command == "prepare-dataset":
        return _prepare(args)
    config = _config(args)
    asks = _asks(args)
    options = _options(args)
    measured = uvloop.run(run_offline(config, asks, options))
    figures = figures_of(asks, measured.outcome, len, {}, "stop_token_ids" not in options.sampling)
    sections = offline_report.sections(args.model, asks, measured, figures, options)
    print(offline_report.as_text(sections))
    errors = dict.fromkeys(one.error for one in measured.outcome.responses if one.error)
    for error in list(errors)[:3]:
        print(f"failed: {error}", file=sys.stderr)
    _write(args, sections, asks, measured)
    return 0 if figures.completed and not figures.num_failed else 1


def _config(args: argparse.Namespace) -> EngineConfig:
    values = _values(args, ENGINE_FLAGS)
    values["model"] = args.model_path or args.model
    if not args.no_skip_tokenizer_init:
        values["skip_tokenizer_init"] = True
    if args.scheduler_policy is not None:
        policy = args.scheduler_policy.upper()
        put(values, "scheduler_config.capacity_scheduler_policy", policy)
    # The first requests were asked once ahead; a prompt out of the prefix cache measures nothing.
    put(values, "kv_cache_config.enable_block_reuse", False)
    return load_config(values, args.config, args.set)


def _values(args: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    values, warnings = settings(args, flags)
    for line in warnings:
        _logger.warning("%s", line)
    return values


def _asks(args: argparse.Namespace) -> list[Ask]:
    if args.dataset_type == "synthetic":
        _, ids = _vocabulary(args)
        num = args.num_requests or _NUM_SYNTHETIC
        lengths = Normal(args.target_input_len, 0), Normal(args.target_output_len, 0)
        lines = map(json.dumps, synthetic_lines(num, *lengths, ids, seed=0))
        return asks_of_lines(lines, "synthetic", None, as_ids=True)
    tokenizer, _ = _vocabulary(args)
    if args.dataset is None:
        if sys.stdin.isatty():
            raise ConfigError("name a file with --dataset, or --dataset-type synthetic")
        asks = asks_of_lines(sys.stdin, "stdin", tokenizer, as_ids=True)
    else:
        try:
            with args.dataset.open(encoding="utf8") as file:
                asks = asks_of_lines(file, str(args.dataset), tokenizer, as_ids=True)
        except OSError as error:
            raise ConfigError(f"cannot read --dataset {args.dataset}: {error}") from None
    if not asks:
        raise ConfigError("the dataset holds no request; --dataset-type synthetic makes some up")
    if args.num_requests > len(asks):
        raise ConfigError(f"--num-requests {args.num_requests}, but the dataset has {len(asks)}")
    return asks[: args.num_requests or None]


def _vocabulary(args: argparse.Namespace) -> tuple[Tokenizer | None, list[int]]:
    """The tokenizer and its ids of text; of a folder without one the ids that its model has."""
    folder = local_folder(args.model_path or args.model, weights=False)
    if has_tokenizer(folder):
        tokenizer = Tokenizer.from_folder(folder)
        return tokenizer, plain_ids(tokenizer)
    return None, list(range(json.loads((folder / "config.json").read_bytes())["vocab_size"]))


def _options(args: argparse.Namespace) -> OfflineOptions:
    is_latency = args.command == "latency"
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    if args.sampler_options is not None:
        sampling |= read_yaml(args.sampler_options)
    if args.eos_id >= 0:
        sampling["stop_token_ids"] = (args.eos_id,)
    return OfflineOptions(
        concurrency=1 if is_latency else (args.concurrency if args.concurrency > 0 else None),
        streaming=is_latency or args.streaming,
        num_warmup=args.warmup,
        sampling=sampling,
    )


def _write(
    args: argparse.Namespace,
    sections: dict[str, offline_report.Section],
    asks: Sequence[Ask],
    measured: OfflineRun,
) -> None:
    files = (args.report_json, args.output_json, args.request_json)
    for path, content in zip(files, offline_report.as_json(sections, asks, measured), strict=True):
        if path is not None:
            path.write_text(json.dumps(content, indent=1), encoding="utf8")
    if args.iteration_log is not None:
        lines = [json.dumps(dataclasses.asdict(one)) for one in measured.iterations]
        args.iteration_log.write_text("\n".join(lines) + "\n", encoding="utf8")


def _prepare(args: argparse.Namespace) -> int:
    _values(args, PREPARE_FLAGS)
    tokenizer, ids = _vocabulary(args)
    inputs: Lengths
    outputs: Lengths
    if args.kind == "real-dataset":
        if args.dataset_path is None or tokenizer is None:
            raise ConfigError("real-dataset needs --dataset-path FILE and a tokenizer")
        lines = real_lines(
            args.dataset_path,
            tokenizer,
            args.num_requests,
            args.max_input_len,
            _normal(args.output_len_dist),
            args.random_seed,
        )
    else:
        if args.kind == "token-norm-dist":
            inputs = Normal(args.input_mean, args.input_stdev)
            outputs = Normal(args.output_mean, args.output_stdev)
        else:
            inputs = Uniform(args.input_min, args.input_max)
            outputs = Uniform(args.output_min, args.output_max)
        lines = synthetic_lines(args.num_requests, inputs, outputs, ids, args.random_seed)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if args.stdout:
        print(text, end="")
    else:
        Path(args.output).write_text(text, encoding="utf8")
    return 0


def _normal(text: str | None) -> Normal | None:
    if text is None:
        return None
    try:
        mean, stdev = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--output-len-dist '{text}' is not MEAN,STDEV") from None
    return Normal(mean, stdev)
