"""A plain checkpoint -> a quantised one in a new folder, block by block, with a report.

Every block becomes a file of its own, written whole or not at all; a run that was interrupted goes
on behind the last one.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ConfigError
from penstock.hub.folder import local_folder
from penstock.hub.gguf import is_gguf
from penstock.kernels.attention.backend import get_backend
from penstock.kernels.device import probe
from penstock.layers.decoder import Decoder, DecoderBlock
from penstock.layers.linear import Linear
from penstock.layers.moe import Experts
from penstock.models.registry import build_model
from penstock.models.spec import parse_model_spec
from penstock.parallel.mesh import RankMesh
from penstock.quant.choose import choose_schemes
from penstock.quantize.blocks import Way, quantize_block
from penstock.quantize.calibrate import Texts
from penstock.quantize.formats import GROUPS, Format, settings
from penstock.text.tokenizer import Tokenizer
from penstock.weights.load import load_weights
from penstock.weights.mapping import Target
from penstock.weights.stored import StoredTensor
from penstock.weights.stream import stream, weight_files

_PROGRESS = "quantize_progress.json"
REPORT = "quantize_report.json"
_MAX_EVAL = 32  # pieces of text that perplexity is measured on
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pth")

Watch = Callable[[int, int], None]  # blocks done, of so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    model: str
    format: Format
    calib: Path
    output: Path
    eval: Path | None  # None: what calibration leaves of its text
    num_samples: int
    length: int  # of a sample, in tokens
    device: str  # "cuda" or "cpu"


@dataclass(frozen=True, slots=True)
class Report:
    format: str
    group: int
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
    if is_gguf(folder) or (found is not None and (found.format or found.codes)):
        raise ConfigError(
            f"'{task.model}' is quantised already; name the checkpoint that it was made of"
        )
    calibration, held_out = _texts(task, folder)
    device = torch.device(task.device)
    model = _load(folder, device)
    way = Way(task.format, _group(model, task.format))
    progress = _begin(task, way)
    files = {tensor.name: tensor for tensor in stream(weight_files(folder))}
    names = _OutputNames(task.output, len(model.layers))
    rules = model.weight_rules
    texts = Texts(model, calibration, task.length, device)
    for number, inputs in texts.through_blocks():
        file = names.block(number)
        if not file.is_file():
            source = rules.source(Target(f"layers.{number}.input_norm.weight"))
            prefix = source.rsplit(".", 2)[0] + "."
            block = model.layers[number]
            assert isinstance(block, DecoderBlock)
            made = quantize_block(
                block, f"layers.{number}", rules, inputs,
                lambda name: _plain(files, name).to(device, torch.float32), way,
            )  # fmt: skip
            kept = {
                name: _whole(tensor)
                for name, tensor in files.items()
                if name.startswith(prefix) and name not in made.replaced
            }
            norms = {name: x.to(_whole(files[name]).dtype) for name, x in made.norms.items()}
            progress["errors"] |= made.errors
            _save(made.tensors | norms | kept, file)
            _write(task.output / _PROGRESS, progress)
        watch(number + 1, len(model.layers))
    before = Texts(model, held_out, task.length, device).perplexity()
    del texts, model
    _finish(task, way, folder, files, names, progress["errors"])
    after = Texts(_load(task.output, device), held_out, task.length, device).perplexity()
    report = Report(task.format, way.group, before, after, progress["errors"])
    _write(task.output / REPORT, asdict(report))
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read '{path}': {error}") from error


def _group(model: Decoder, format: Format) -> int:
    """Of awq and gptq, whose group is one for the whole checkpoint."""
    if format not in ("awq", "gptq"):
        return 0
    sizes = {layer.shape.num_inputs for layer in model.modules() if isinstance(layer, Linear)}
    for layer in model.modules():
        if isinstance(layer, Experts):
            sizes |= {layer.hidden_size, layer.inner_size}
    for group in GROUPS:
        if all(size % group == 0 for size in sizes):
            return group
    raise ConfigError(
        f"the model has layers of {', '.join(map(str, sorted(sizes)))} inputs, which groups of "
        f"{', '.join(map(str, GROUPS))} do not divide; use fp8, int8_sq or nvfp4"
    )


def _begin(task: Task, way: Way) -> dict[str, Any]:
    """The progress of an earlier run with the same settings, or none."""
    wanted = {
        "model": task.model,
        "format": task.format,
        "group": way.group,
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
    _write(file, progress)
    return progress


@dataclass(frozen=True, slots=True)
class _OutputNames:
    folder: Path
    num_blocks: int

    def block(self, number: int) -> Path:
        return self.folder / f"model-{number + 1:05d}-of-{self.num_blocks + 1:05d}.safetensors"

    def rest(self) -> Path:
        return self.block(self.num_blocks)

    def all(self) -> Iterator[Path]:
        return (self.block(number) for number in range(self.num_blocks + 1))


def _finish(
    task: Task,
    way: Way,
    folder: Path,
    files: dict[str, StoredTensor],
    names: _OutputNames,
    errors: dict[str, float],
) -> None:
    """Everything but the blocks: tensors outside of them, the index, configuration, tokenizer."""
    in_blocks: dict[str, str] = {}
    for path in list(names.all())[:-1]:
        with safe_open(path, framework="pt") as opened:
            in_blocks |= dict.fromkeys(opened.keys(), path.name)
    rest = {
        name: _whole(tensor)
        for name, tensor in files.items()
        if name not in in_blocks and name not in errors
    }
    _save(rest, names.rest())
    index = in_blocks | dict.fromkeys(rest, names.rest().name)
    total = sum(path.stat().st_size for path in names.all())
    _write(
        task.output / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED):
            shutil.copy(path, task.output / path.name)
    left = sorted(
        {
            name.removesuffix(".weight")
            for name, tensor in files.items()
            if name.endswith(".weight") and len(tensor.shape) == 2 and name not in errors
        }
        - {"model.embed_tokens"}
        | {"lm_head"}
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings(task.format, way.group, left)
    _write(task.output / "config.json", config)


def _plain(files: dict[str, StoredTensor], name: str) -> Tensor:
    if name not in files or len(files[name].shape) > 2:
        raise ConfigError(
            f"the checkpoint keeps several matrices in '{name}'; such experts cannot be quantised"
        )
    return _whole(files[name])


def _whole(tensor: StoredTensor) -> Tensor:
    return tensor.read(tuple(slice(None) for _ in tensor.shape))


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(contiguous, partial, metadata={"format": "pt"})
    partial.rename(path)


def _write(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1), encoding="utf-8")
    partial.rename(path)


def default_device() -> str:
    return probe().kind
