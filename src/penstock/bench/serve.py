"""One benchmark of a running server, from the dataset to the table and the JSON file."""

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import uvloop

from penstock.bench import figures, layout
from penstock.bench.datasets import DATASETS, DatasetOptions
from penstock.bench.http import HttpClient, HttpError, allow_connections
from penstock.bench.load import Arrivals, ask_one, send_all
from penstock.bench.openai import BodyOptions, body_of
from penstock.bench.progress import shown
from penstock.bench.records import Ask
from penstock.errors import BackendError
from penstock.text.tokenizer import Tokenizer

_MAX_ERRORS = 3  # of different kinds, printed
_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything that is measured, and how."""

    url: str
    path: str
    headers: Mapping[str, str]
    body: BodyOptions
    tokenizer_id: str
    dataset_name: str
    dataset: DatasetOptions
    arrivals: Arrivals = Arrivals()
    max_concurrency: int | None = None
    goodput_ms: Mapping[str, float] = field(default_factory=dict)
    metrics: Sequence[str] = ("ttft", "tpot", "itl")
    percentiles: Sequence[float] = (99.0,)
    metadata: Mapping[str, str] = field(default_factory=dict)  # goes into the record as it is
    lora_modules: Sequence[str] = ()
    test_first: bool = True
    profile: bool = False
    show_progress: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """`record` is the JSON file's content; `details` what `--save-detailed` adds to it."""

    figures: figures.Figures
    record: dict[str, Any]
    details: dict[str, Any]


def make_asks(options: ServeOptions, tokenizer: Tokenizer) -> list[Ask]:
    asks = DATASETS[options.dataset_name](options.dataset, tokenizer)
    if not options.lora_modules:
        return asks
    drawn = random.Random(options.dataset.seed)
    return [replace(ask, model=drawn.choice(options.lora_modules)) for ask in asks]


async def measure(options: ServeOptions, asks: Sequence[Ask], tokenizer: Tokenizer) -> Result:
    """Ask everything, print what the original tool prints, and return the figures."""
    client = HttpClient(options.url, dict(options.headers))
    is_stream = options.body.stream
    requests = [
        client.post_request(options.path, msgspec.json.encode(body_of(ask, options.body)))
        for ask in asks
    ]
    try:
        if options.test_first:
            print("Starting initial single prompt test run...", flush=True)
            response = await ask_one(client, requests[0], is_stream)
            if response.error is not None:
                raise BackendError(f"the test request failed: {response.error}")
            print("Initial test run completed. Starting main benchmark run...")
        _print_load(options)
        if options.profile:
            await _tell(client, "/start_profile")
        async with shown(options.show_progress) as watch:
            outcome = await send_all(
                client,
                requests,
                options.arrivals.times_s(len(requests)),
                options.max_concurrency,
                is_stream,
                watch,
            )
        if options.profile:
            await _tell(client, "/stop_profile")
    finally:
        client.close()
    seen = figures.figures_of(
        asks,
        outcome,
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        options.goodput_ms,
        options.body.ignore_eos,
    )
    if seen.num_failed:
        errors = list(dict.fromkeys(one.error for one in outcome.responses if one.error))
        print(layout.failures(seen, errors[:_MAX_ERRORS]))
    print(layout.table(seen, options.metrics, options.percentiles))
    print(layout.by_other_formulas(seen), flush=True)
    for line in seen.warnings:
        print(f"warning: {line}", file=sys.stderr)
    record = {
        **_about(options, len(asks)),
        **figures.as_json(seen, options.metrics, options.percentiles),
        "request_rate": _rate(options),
        "burstiness": options.arrivals.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    return Result(seen, record, figures.details_as_json(asks, outcome.responses))


async def time_breakdown(options: ServeOptions) -> Any | None:
    """What the server itself measured of the last requests; None if it does not tell."""
    client = HttpClient(options.url, dict(options.headers))
    try:
        status, body = await client.fetch(client.get_request("/perf_metrics"))
        return json.loads(body) if status == _OK else None
    except (HttpError, ValueError):
        return None
    finally:
        client.close()


def default_name(options: ServeOptions) -> str:
    limit = "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    model = options.body.model.rstrip("/").rpartition("/")[2]
    now = time.strftime("%Y%m%d-%H%M%S")
    return f"{options.body.backend}-{_rate(options)}qps{limit}-{model}-{now}.json"


def run(options: ServeOptions, asks: Sequence[Ask], tokenizer: Tokenizer) -> Result:
    allow_connections(min(options.max_concurrency or len(asks), len(asks)))
    return uvloop.run(measure(options, asks, tokenizer))


def _about(options: ServeOptions, num_prompts: int) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.body.backend,
        "model_id": options.body.model,
        "tokenizer_id": options.tokenizer_id,
        "num_prompts": num_prompts,
        **options.metadata,
    }


def _print_load(options: ServeOptions) -> None:
    process = "Poisson process" if options.arrivals.burstiness == 1.0 else "Gamma distribution"
    print(f"Traffic request rate: {options.arrivals.rate}")
    print(f"Burstiness factor: {options.arrivals.burstiness} ({process})")
    print(f"Maximum request concurrency: {options.max_concurrency}", flush=True)


def _rate(options: ServeOptions) -> float | str:
    return "inf" if options.arrivals.rate == float("inf") else options.arrivals.rate


async def _tell(client: HttpClient, path: str) -> None:
    status, _ = await client.fetch(client.post_request(path, b"{}"))
    if status != _OK:
        print(f"warning: {path} answers {status}: nothing is profiled", file=sys.stderr)
