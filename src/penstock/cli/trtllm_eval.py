"""`trtllm-eval`: its flags become those of `penstock eval`."""

import argparse
import json
from pathlib import Path
from typing import Any

from penstock import log
from penstock.cli.eval import show_results
from penstock.cli.eval_flags import TRTLLM_FLAGS
from penstock.cli.flags import settings
from penstock.cli.tokenizer import load_tokenizer
from penstock.config.load import load_config
from penstock.config.trtllm_fields import put
from penstock.errors import ConfigError
from penstock.eval.ask import Engine
from penstock.eval.published_run import RunOptions, prepare
from penstock.eval.task import Task
from penstock.eval.tasks import TASKS

_logger = log.get(__name__)
_UNAVAILABLE = (
    *("cnn_dailymail", "json_mode_eval", "mmmu", "mmmu_pro", "longbench_v1", "longbench_v2"),
    "covost2",
)
_NAMES = tuple(name for name, task in TASKS.items() if not isinstance(task, Task))


def run(args: argparse.Namespace) -> int:
    log.setup("eval", "WARNING")
    values, warnings = settings(args, TRTLLM_FLAGS)
    for line in warnings:
        _logger.warning("%s", line)
    values["model"] = args.model
    if args.tokenizer is not None:
        values["tokenizer"] = args.tokenizer
    if args.disable_kv_cache_reuse:
        put(values, "kv_cache_config.enable_block_reuse", False)
    output = None
    if args.output_dir is not None:
        args.output_dir.mkdir(parents=True, exist_ok=True)
        output = Path(args.output_dir, f"{args.task}.json")
    name = _task(args.task)
    task = TASKS[name]
    assert not isinstance(task, Task)
    options = RunOptions(
        data=args.dataset_path,
        shots=args.shots,
        num_fewshot=args.num_fewshot,
        limit=args.num_samples,
        max_tokens=args.max_output_length,
        max_input_len=args.max_input_length,
        apply_chat_template=args.apply_chat_template,
        template_kwargs=_template_kwargs(args.chat_template_kwargs),
        system_prompt=args.system_prompt,
    )
    ask = prepare(name, task, options)
    with Engine(load_config(values, args.config, args.set)) as engine:
        given = args.tokenizer or args.model
        results = ask(engine, lambda: load_tokenizer(given).encode)
    min_score = args.accuracy_threshold / 100 if args.check_accuracy else 0.0
    return show_results(args.task, args.model, results, output, min_score)


def _task(name: str) -> str:
    """The three parts of GPQA are one task with different files."""
    if name in _UNAVAILABLE:
        raise ConfigError(f"trtllm-eval {name} is not available; there are {', '.join(_NAMES)}")
    known = "gpqa" if name.startswith("gpqa_") else name
    if known not in _NAMES:
        raise ConfigError(f"no task '{name}'; there are {', '.join(_NAMES)}")
    return known


def _template_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ConfigError(f"--chat_template_kwargs '{text}' is no JSON object") from None
