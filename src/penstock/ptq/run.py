"""A plain checkpoint -> a quantized one in a new folder, block by block, with a report.

Every block becomes a file of its own, written whole or not at all; a run that was interrupted goes
on behind the last one.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.device import probe
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.linear import Linear
from penstock.layers.moe import Experts
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.ptq.blocks import Recipe, quantize_block
from penstock.ptq.calibrate import Texts
from penstock.ptq.formats import GROUPS, MOVING, Format, settings
from penstock.ptq.output import Output, save, write
from penstock.ptq.source import Source
from penstock.quantization.choose import choose_schemes
from penstock.text.tokenizer import Tokenizer
from penstock.weights.load import load_weights
from penstock.weights.mapping import Target, Unfuse

_PROGRESS = "quantize_progress.json"
REPORT = "quantize_report.json"
_SMALL = 1_000_000_000  # parameters: rounding inputs costs models below more than it gains
_PER_RANDOM = 3  # pieces of text for each one of random tokens
_MAX_EVAL = 32  # pieces of text that perplexity is measured on

Watch = Callable[[int, int], None]  # blocks done, of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    model: str
    format: Format
    calib: Path
    output: Path
    eval: Path | None  # None: what calibration leaves of its text
    exclude: tuple[str, ...]  # words of modules' names, see `any_excluded`
    inputs: int | None  # bits of the inputs of fp8's layers, 8 or 16; None: by the model's size
    num_samples: int
    length: int  # of a sample, in tokens
    device: str  # "cuda" or "cpu"


@dataclass(frozen=True, slots=True)
class Report:
    format: str
    group: int
    input_bits: int
    perplexity_before: float
    perplexity_after: float
    errors: dict[str, float]  # of each matrix: of its output, over the output

    @property
    def change(self) -> float:
        return self.perplexity_after / self.perplexity_before - 1


def quantize(task: Task, watch: Watch) -> Report:
    folder = local_folder(task.model)
    spec = parse_model_spec(folder)
    found = spec.quantization
    if found is not None and found.is_quantized:
        raise ConfigError(
            f"'{task.model}' is quantized already; name the checkpoint that it was made of"
        )
    calibration, held_out = _texts(task, folder)
    if task.format not in MOVING:
        num_pieces = len(calibration) // task.length // _PER_RANDOM
        calibration += _random_ids(num_pieces * task.length, spec.vocab_size)
    device = torch.device(task.device)
    model = _load(folder, device)
    rules, num_blocks = model.weight_rules, len(model.layers)
    if fused := next((rule.name for rule in rules.table if isinstance(rule, Unfuse)), None):
        raise ConfigError(
            f"checkpoints of {spec.architecture} keep several matrices in one tensor ('{fused}'), "
            "which `penstock quantize` does not take apart; serve it with --quantization fp8, int8 "
            "or nf4, which quantizes while loading"
        )
    source, output = Source(folder, rules), Output(task.output, num_blocks)
    recipe = Recipe(task.format, _group(model, task.format), task.exclude)
    input_bits = _input_bits(task, source)
    progress = _begin(task, recipe, input_bits)
    texts = Texts(model, calibration, task.length, device)
    for number, inputs in texts.through_blocks():
        file = output.block(number)
        if not file.is_file():
            block = model.layers[number]
            assert isinstance(block, DecoderBlock)
            done = quantize_block(
                block, f"layers.{number}", rules, inputs,
                lambda name: source.matrix(name).to(device, torch.float32), recipe,
            )  # fmt: skip
            norm = rules.source(Target(f"layers.{number}.input_norm.weight"))
            in_block = source.names(norm.rsplit(".", 2)[0] + ".")
            kept = {name: source.kept(name) for name in in_block if name not in done.replaced}
            norms = {name: x.to(source.kept(name).dtype) for name, x in done.norms.items()}
            progress["errors"] |= done.errors
            save(done.tensors | norms | kept, file)
            write(task.output / _PROGRESS, progress)
        watch(number + 1, num_blocks)
    before = Texts(model, held_out, task.length, device).perplexity()
    del texts, model
    errors = progress["errors"]
    written = output.in_blocks().keys() | errors.keys()
    rest = {name: source.kept(name) for name in source.names() if name not in written}
    config = settings(task.format, recipe.group, _left(source, errors), input_bits)
    output.finish(rest, folder, spec.architecture, config)
    after = Texts(_load(task.output, device), held_out, task.length, device).perplexity()
    report = Report(task.format, recipe.group, input_bits, before, after, errors)
    write(task.output / REPORT, asdict(report))
    (task.output / _PROGRESS).unlink()
    return report


def _load(folder: Path, device: torch.device) -> Decoder:
    spec, mesh = parse_model_spec(folder), RankMesh.single()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    schemes = choose_schemes(spec.quantization, folder, dtype, device)
    backend = get_backend("sdpa" if device.type == "cpu" else "triton")
    model = build_model(spec, mesh, dtype, device, backend, schemes)
    load_weights(model, folder, spec, mesh, progress=False)
    with torch.inference_mode():
        model.finish()
    return model


def _texts(task: Task, folder: Path) -> tuple[list[int], list[int]]:
    encode = Tokenizer.from_folder(folder).encode
    ids = encode(_read(task.calib))
    needed = task.num_samples * task.length
    if len(ids) < 2 * task.length:
        raise ConfigError(
            f"'{task.calib}' has {len(ids)} tokens; calibration needs {2 * task.length} at least, "
            "name a longer text or lower --length"
        )
    if task.eval is not None:
        held_out = encode(_read(task.eval))
    else:
        needed = min(needed, len(ids) // 2 // task.length * task.length)
        held_out = ids[needed:]
    if len(held_out) < task.length:
        raise ConfigError(f"'{task.eval}' has {len(held_out)} tokens, fewer than --length")
    return ids[:needed], held_out[: _MAX_EVAL * task.length]


def _random_ids(num_ids: int, vocab_size: int) -> list[int]:
    """What no text says: columns of a layer shall make up for each other there, too."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(num_ids)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error


def _group(model: Decoder, format: Format) -> int:
    """Of awq and gptq, whose group is one for the whole checkpoint."""
    if format not in ("awq", "gptq"):
        return 0
    sizes = {layer.shape.in_features for layer in model.modules() if isinstance(layer, Linear)}
    for layer in model.modules():
        if isinstance(layer, Experts):
            sizes |= {layer.hidden_size, layer.intermediate_size}
    for group in GROUPS:
        if all(size % group == 0 for size in sizes):
            return group
    raise ConfigError(
        f"the model has layers of {', '.join(map(str, sorted(sizes)))} inputs, which groups of "
        f"{', '.join(map(str, GROUPS))} do not divide; use fp8, int8_sq or nvfp4"
    )


def _input_bits(task: Task, source: Source) -> int:
    if task.format == "fp8":
        size = sum(math.prod(source.shape(name)) for name in source.names())
        return task.inputs or (16 if size < _SMALL else 8)
    fixed = 8 if task.format == "int8_sq" else 16
    if task.inputs not in (None, fixed):
        raise ConfigError(
            f"--inputs is {task.inputs}, but layers of {task.format} have inputs of {fixed} bits; "
            "leave it out, or use fp8"
        )
    return fixed


def _begin(task: Task, recipe: Recipe, input_bits: int) -> dict[str, Any]:
    """The progress of an earlier run with the same settings, or none."""
    wanted = {
        "model": task.model,
        "format": task.format,
        "group": recipe.group,
        "exclude": list(task.exclude),
        "inputs": input_bits,
        "calib": str(task.calib),
        "num_samples": task.num_samples,
        "length": task.length,
    }
    file = task.output / _PROGRESS
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text())
        if found["settings"] != wanted:
            raise ConfigError(
                f"'{task.output}' holds a run with other settings, {found['settings']}; finish "
                "that one, delete the folder, or name another one"
            )
        return found
    if task.output.exists() and any(task.output.iterdir()):
        raise ConfigError(f"'{task.output}' is not empty; name another folder with --output")
    task.output.mkdir(parents=True, exist_ok=True)
    progress = {"settings": wanted, "errors": {}}
    write(file, progress)
    return progress


def _left(source: Source, errors: dict[str, float]) -> list[str]:
    """Modules whose matrix is not quantized. Every layout leaves the embedding out unasked."""
    found = {
        name.removesuffix(".weight")
        for name in source.names()
        if name.endswith(".weight") and len(source.shape(name)) == 2 and name not in errors
    }
    return sorted(found - {"model.embed_tokens"} | {"lm_head"})


def default_device() -> str:
    return probe().kind
