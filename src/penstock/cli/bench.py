"""`penstock bench serve`, which is also TensorRT-LLM's `benchmark_serving`, and `bench sweep`."""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from penstock import log
from penstock.bench import serve
from penstock.bench.ceiling import ceiling_of
from penstock.bench.datasets import DatasetOptions
from penstock.bench.http import HttpClient
from penstock.bench.load import Arrivals
from penstock.bench.openai import PATHS, BodyOptions, bearer, served_model
from penstock.bench.report import page
from penstock.bench.results import Run, Series, save
from penstock.cli.api_key import api_key_of
from penstock.cli.tokenizer import load_tokenizer
from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.text.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_NOT_SHOWN = ("module", "parser", "command", "api_key", "is_original")


async def _served_model(url: str, headers: dict[str, str]) -> str:
    client = HttpClient(url, headers)
    try:
        return await served_model(client)
    finally:
        client.close()


def run(args: argparse.Namespace) -> int:
    log.setup("bench", "WARNING")
    url, headers = _address(args)
    if args.model is None:
        args.model = asyncio.run(_served_model(url, headers))
    options = options_of(args)
    print(_as_namespace(args) if args.is_original else _summary(args, options), flush=True)
    tokenizer = load_tokenizer(options.tokenizer_id)
    if args.command == "sweep":
        return _sweep(args, options, tokenizer)
    asks = serve.make_asks(options, tokenizer)
    result = _with_ceiling(args, serve.run(options, asks, tokenizer))
    folder = args.result_dir or Path()
    if args.save_request_time_breakdown:
        _save_breakdown(options, folder)
    if args.save_result or args.save_detailed:
        record = {**result.record, **(result.details if args.save_detailed else {})}
        save(folder / (args.result_filename or serve.default_name(options)), record)
    if args.report is not None:
        name = args.report.stem
        write_report(args.report, [Series(name, [Run(name, result.record)])])
    return 0 if result.figures.completed else 1


def _as_namespace(args: argparse.Namespace) -> argparse.Namespace:
    """The first line of the original tool, which scripts may read."""
    given = {name: value for name, value in vars(args).items() if name not in _NOT_SHOWN}
    return argparse.Namespace(**given)


def _summary(args: argparse.Namespace, options: serve.ServeOptions) -> str:
    """What will be sent where, in a line."""
    if args.command == "sweep":
        levels = args.concurrency or args.rates
        unit = "requests at once" if args.concurrency else "requests per second"
        load = f"{', '.join(f'{level:g}' for level in levels)} {unit}"
    else:
        limit = options.max_concurrency
        load = f"{args.num_prompts} prompts, {f'at most {limit}' if limit else 'all'} at once"
        if options.arrivals.rate != math.inf:
            load += f", {options.arrivals.rate:g} per second"
    lengths = ""
    if args.dataset_name in ("random", "random-ids"):
        lengths = f" ({args.random_input_len} tokens in, {args.random_output_len} out)"
    asked = f"{options.body.model} at {options.url}{options.path}"
    return f"{asked}: {load}, dataset {args.dataset_name}{lengths}, seed {args.seed}"


def _sweep(args: argparse.Namespace, options: serve.ServeOptions, tokenizer: Tokenizer) -> int:
    """Each level asks something else, else the server would remember it from the level before."""
    model = args.model.rstrip("/").rpartition("/")[2]
    folder = args.result_dir or Path(f"bench-{model}-{time.strftime('%Y%m%d-%H%M%S')}")
    runs = []
    for number, level in enumerate(args.concurrency or args.rates):
        seed = args.seed + number
        if args.concurrency:
            name, num_prompts = f"concurrency_{level}", args.rounds * level
            changes: dict[str, Any] = {"max_concurrency": level}
        else:
            name, num_prompts = f"rate_{level:g}", args.num_prompts
            changes = {"arrivals": Arrivals(level, args.burstiness, seed)}
        dataset = dataclasses.replace(options.dataset, num_prompts=num_prompts, seed=seed)
        one = dataclasses.replace(options, dataset=dataset, **changes)
        print(f"--- {name.replace('_', ' ')}")
        result = _with_ceiling(args, serve.run(one, serve.make_asks(one, tokenizer), tokenizer))
        save(folder / f"{name}.json", result.record)
        runs.append(Run(name, result.record))
    write_report(folder / "report.html", [Series(folder.name, runs)])
    return 0 if all(run.record["completed"] for run in runs) else 1


def _with_ceiling(args: argparse.Namespace, result: serve.Result) -> serve.Result:
    if args.ceiling is None or not result.figures.completed:
        return result
    path = local_folder(args.model, weights=False) / "config.json"
    if not path.is_file():
        raise ConfigError(f"--ceiling needs {path}")
    limit = result.record["max_concurrency"] or result.figures.completed
    running = min(limit, result.figures.completed)
    config = json.loads(path.read_bytes())
    found = ceiling_of(config, args.ceiling, result.figures, running, args.ceiling_fp8_cache)
    print(found.words)
    result.record["extra"]["ceiling"] = dataclasses.asdict(found)
    return result


def write_report(path: Path, series: list[Series]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(series), encoding="utf8")
    print(f"written: {path}")


def options_of(args: argparse.Namespace) -> serve.ServeOptions:
    _refuse(args)
    sampling: dict[str, Any] = {
        name: value for name in _SAMPLING if (value := getattr(args, name)) is not None
    }
    if args.use_beam_search:
        sampling["use_beam_search"] = True
    metrics = args.percentile_metrics
    if args.non_streaming:
        metrics = ("e2el",)
    names = {field.name for field in dataclasses.fields(DatasetOptions)}
    url, headers = _address(args)
    return serve.ServeOptions(
        url=url,
        path=args.endpoint if args.backend == "openai" else PATHS[args.backend],
        headers=headers,
        body=BodyOptions(
            backend=args.backend,
            model=args.served_model_name or args.model,
            stream=not args.non_streaming,
            ignore_eos=args.ignore_eos,
            logprobs=args.logprobs,
            sampling=sampling,
        ),
        tokenizer_id=args.tokenizer or args.model,
        dataset_name=args.dataset_name,
        dataset=DatasetOptions(**{name: getattr(args, name) for name in names}),
        arrivals=Arrivals(args.request_rate, args.burstiness, args.seed),
        max_concurrency=args.max_concurrency,
        goodput_ms=dict(args.goodput),
        metrics=metrics,
        percentiles=args.metric_percentiles,
        metadata=dict(args.metadata),
        lora_modules=args.lora_modules or (),
        test_first=not args.no_test_input,
        profile=args.profile,
        show_progress=not args.disable_tqdm,
    )


def _address(args: argparse.Namespace) -> tuple[str, dict[str, str]]:
    url = args.base_url or f"http://{args.host}:{args.port}"
    return url, bearer(api_key_of(args.api_key))


def _refuse(args: argparse.Namespace) -> None:
    """What cannot be had here; what makes no difference only gets a line."""
    if args.custom_tokenizer or args.tokenizer_mode in ("custom", "mistral"):
        raise ConfigError("only tokenizers with a tokenizer.json can be read; code is not loaded")
    if args.dataset_name == "random_image" and args.backend != "openai-chat":
        raise ConfigError("random_image needs --backend openai-chat: only a chat takes pictures")
    if args.tokenize_on_client and args.backend == "openai-chat":
        raise ConfigError("a chat has no room for token ids; leave out --tokenize-on-client")
    if args.trust_remote_code:
        print("--trust_remote_code is ignored: code of a model is never run", file=sys.stderr)
    if args.non_streaming:
        print("--non_streaming: a response comes as one; only e2el is shown", file=sys.stderr)


def _save_breakdown(options: serve.ServeOptions, folder: Path) -> None:
    measured = asyncio.run(serve.time_breakdown(options))
    if measured is None:
        print("the server has no /perf_metrics: no time breakdown", file=sys.stderr)
        return
    name = serve.default_name(options).removesuffix(".json")
    save(folder / f"{name}-time_breakdown.json", measured)
