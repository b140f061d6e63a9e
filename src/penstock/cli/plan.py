"""`penstock plan MODEL --gpus N`: how to share a model among GPUs, and what to expect."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.bench.scaling import GIB, GPUS, Load, Outlook, best, outlook, strategies
from penstock.errors import ConfigError, did_you_mean
from penstock.hub.folder import local_folder

_GOALS = {"throughput": "the most tokens per second", "latency": "the quickest single request"}
_HEADS = ("strategy", "weights/GPU", "cache/GPU", "sequences", "TTFT", "TPOT", "loaded", "tok/s")


def run(args: argparse.Namespace) -> int:
    config = _read_config(args.model)
    if args.gpu not in GPUS:
        raise ConfigError(
            f"--gpu {args.gpu}{did_you_mean(args.gpu, list(GPUS))}; there are {', '.join(GPUS)}"
        )
    load = Load(args.concurrency, args.input_len, args.output_len)
    if min(args.gpus, *(load.concurrency, load.input_len, load.output_len)) < 1:
        raise ConfigError("--gpus, --concurrency, --input_len and --output_len are at least 1")
    if args.kv_cache_dtype == "nvfp4" and "kv_lora_rank" in config:
        raise ConfigError(
            "--kv_cache_dtype is nvfp4, which the latents of this model cannot have; use fp8"
        )
    gpu = GPUS[args.gpu]
    outlooks = [
        outlook(config, one, gpu, load, cache=args.kv_cache_dtype)
        for one in strategies(config, args.gpus)
    ]
    chosen = best(outlooks, args.goal)
    if args.json:
        records = [_record(one, _command(one, args), one is chosen) for one in outlooks]
        print(json.dumps(records, indent=2))
        return 0
    print(f"{args.model} on {args.gpus} x {gpu.name}, predicted, not measured", end="")
    print("" if gpu.is_measured else "; this GPU's figures are its datasheet's", end=".\n")
    print(
        f"Load: {load.concurrency} requests of {load.input_len} tokens in, {load.output_len} out."
    )
    print()
    _show(outlooks)
    print()
    print("sequences: of that length in the cache; TTFT, TPOT: of one request alone, ms;")
    print("loaded: TPOT under the load, ms; tok/s: output of all GPUs under the load.")
    print()
    _recommend(chosen, outlooks, _command(chosen, args), args.goal)
    return 0


def _read_config(model: str) -> Mapping[str, Any]:
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    elif not path.is_file():
        path = local_folder(model, weights=False) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= config.get("text_config", {})
        beside = path.with_name("hf_quant_config.json")  # ModelOpt's
        if beside.is_file():
            described = json.loads(beside.read_text(encoding="utf-8"))["quantization"]
            config["quantization_config"] = described
        return config  # type: ignore[no-any-return]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a model's config.json; a plan is made from one") from error


def _command(one: Outlook, args: argparse.Namespace) -> str:
    cache = "" if args.kv_cache_dtype == "auto" else f" --kv_cache_dtype {args.kv_cache_dtype}"
    return one.strategy.command(args.model) + cache


def _record(one: Outlook, command: str, is_chosen: bool) -> dict[str, object]:
    return {
        "replicas": one.strategy.replicas,
        "tp_size": one.strategy.tp_size,
        "ep_size": one.strategy.ep_size,
        "fits": one.fits,
        "recommended": is_chosen,
        "weight_bytes_per_gpu": int(one.weight_bytes),
        "cache_bytes_per_gpu": int(one.cache_bytes),
        "max_running": one.max_running,
        "ttft_ms": one.ttft_s * 1e3,
        "tpot_ms": one.tpot_s * 1e3,
        "loaded_tpot_ms": one.loaded_tpot_s * 1e3,
        "output_tok_s": one.tok_s,
        "command": command,
    }


def _show(outlooks: list[Outlook]) -> None:
    rows: list[tuple[str, ...]] = [_HEADS]
    for one in outlooks:
        memory = (f"{one.weight_bytes / GIB:.1f} GiB", f"{one.cache_bytes / GIB:.1f} GiB")
        figures: tuple[str, ...] = ("does not fit", "", "", "", "")
        if one.fits:
            times = (one.ttft_s, one.tpot_s, one.loaded_tpot_s)
            figures = (
                f"{one.max_running:,}",
                *(f"{1e3 * seconds:.3g}" for seconds in times),
                f"{one.tok_s:,.0f}",
            )
        rows.append((str(one.strategy), *memory, *figures))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join((first.strip().ljust(widths[0]), *others)).rstrip())


def _recommend(chosen: Outlook, outlooks: list[Outlook], command: str, goal: str) -> None:
    tp_size = chosen.strategy.tp_size
    others = [one for one in outlooks if one.fits and one.strategy.tp_size != tp_size]
    print(f"Recommended for {_GOALS[goal]}: {chosen.strategy}.")
    if not others:
        print("It is the only size that fits.")
    elif goal == "latency":
        second = min(others, key=lambda one: one.tpot_s)
        why = "all-reduces cost less than reading fewer weights saves"
        if tp_size < second.strategy.tp_size:
            why = "more all-reduces would cost more than reading fewer weights saves"
        print(
            f"A token takes {1e3 * chosen.tpot_s:.3g} ms, with {second.strategy} "
            f"{1e3 * second.tpot_s:.3g}: {why}."
        )
    else:
        second = max(others, key=lambda one: one.tok_s)
        print(f"{chosen.tok_s:,.0f} tok/s, with {second.strategy} {second.tok_s:,.0f}.")
    print()
    print(f"    {command}")
