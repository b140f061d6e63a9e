"""`penstock eplb RECORD`: from the recorded load of experts, which slot should hold which."""

import argparse
import json
from pathlib import Path

import yaml

from penstock.errors import ConfigError
from penstock.types.expert_slots import balanced_slots, check_num_slots, first_slots, imbalance


def run(args: argparse.Namespace) -> int:
    load, num_experts = _read(Path(args.record))
    num_slots = num_experts if args.num_slots is None else args.num_slots
    if args.ep_size < 2:
        raise ConfigError(f"--ep_size is {args.ep_size}; one rank has all experts, use 2 or more")
    check_num_slots(num_slots, num_experts, args.ep_size)
    plain = first_slots(num_experts, num_slots, args.ep_size)
    found = {layer: balanced_slots(loads, num_slots, args.ep_size) for layer, loads in load.items()}
    text = yaml.safe_dump(
        {
            "num_slots": num_slots,
            "layer_updates_per_iter": args.layer_updates_per_iter,
            "initial_global_assignments": {layer: list(slots) for layer, slots in found.items()},
        },
        default_flow_style=None,
        width=2**16,
        sort_keys=False,
    )
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    print(f"{args.output}: {num_slots} slots on {args.ep_size} ranks for {num_experts} experts.")
    print("Busiest rank over the mean, as recorded:")
    for layer, loads in load.items():
        before, after = (imbalance(loads, slots, args.ep_size) for slots in (plain, found[layer]))
        print(f"  layer {layer}: {before:.2f} -> {after:.2f}")
    return 0


def _read(path: Path) -> tuple[dict[int, list[int]], int]:
    try:
        record = json.loads(path.read_bytes())
        num_experts = record["num_experts"]
        load = {int(layer): list(loads) for layer, loads in record["load"].items()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{path} is no record of experts' load; moe_config.load_record_path writes one"
        ) from None
    for layer, loads in load.items():
        if len(loads) != num_experts or not all(isinstance(one, int) and one >= 0 for one in loads):
            raise ConfigError(
                f"{path}: layer {layer} has no load for each of {num_experts} experts"
            )
    return load, num_experts
