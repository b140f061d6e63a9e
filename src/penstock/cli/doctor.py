"""`penstock doctor`: what this machine has, what is missing, what a run would use and why.

The one command that loads torch. Changes nothing and downloads nothing; asks the hub whether it
answers.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import __version__, log
from penstock.cli.doctor_sizes import (
    CPU_FORMATS,
    EXAMPLE,
    GPU_FORMATS,
    available_bytes,
    billions,
    room_on_cpu,
    room_on_gpu,
    sizes,
)

_GIB = 2**30
_MIN_DISK_BYTES = 10 * _GIB
_HUB_TIMEOUT_S = 3.0
_OPTIONAL = {
    "hf_xet": "faster downloads from the hub",
    "openai": "a client library for the server",
    "transformers": "the reference that the tests compare with",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """`ok` is None for something that is missing but not needed."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


@dataclasses.dataclass(slots=True)
class Report:
    machine: list[Fact] = dataclasses.field(default_factory=list)
    storage: list[Fact] = dataclasses.field(default_factory=list)
    choices: list[Fact] = dataclasses.field(default_factory=list)
    fits: list[Fact] = dataclasses.field(default_factory=list)
    checks: list[Check] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(check.ok is not False for check in self.checks)


def run(args: argparse.Namespace) -> int:
    log.setup("doctor", "error")  # what is missing is in the table
    report = examine()
    if args.json:
        print(json.dumps({"ok": report.ok} | dataclasses.asdict(report), indent=2))
    else:
        show(report, Console())
    return 0 if report.ok else 1


def examine() -> Report:
    report = Report()
    # One number for all: loading torch takes some of it.
    free_bytes = available_bytes(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    report.machine += _host(free_bytes)
    report.checks += [*_required_packages(), *_optional_packages()]
    report.storage += _storage(report.checks)
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "install torch for this Python and platform, see pytorch.org"
        report.checks.append(Check("torch loads", False, str(error), fix))
        return report
    report.machine += _devices(torch, report.checks)
    report.checks.append(_smoke_test("configuration", partial(_choose, report, free_bytes)))
    for device in _device_names(torch):
        report.checks.append(_smoke_test(f"ops on {device}", partial(_run_ops, torch, device)))
        if device == "cpu":
            report.checks.append(_native_ops())
    return report


def show(report: Report, console: Console) -> None:
    console.print(f"[bold]penstock {__version__}[/bold]")
    for title, facts in (
        ("This machine", report.machine),
        ("Storage", report.storage),
        ("What a run would use, of an 8 B model", report.choices),
        ("What fits, by free memory", report.fits),
    ):
        if facts:
            table = Table(title=title, title_justify="left", show_header=False, expand=False)
            for fact in facts:
                table.add_row(fact.name, fact.value, f"[dim]{fact.note}[/dim]")
            console.print(table)
    table = Table("", "check", "found", "what to do", title="Checks", title_justify="left")
    marks = {True: "[green]ok[/green]", False: "[red]broken[/red]", None: "[yellow]-[/yellow]"}
    for check in report.checks:
        table.add_row(marks[check.ok], check.name, check.detail, check.fix)
    console.print(table)
    console.print(
        f"[green]Ready.[/green] {_what_fits(report)}Try: penstock serve"
        if report.ok
        else "[red]Something essential is broken, see above.[/red]"
    )


def _what_fits(report: Report) -> str:
    """Ready for what: the sizes that fit in the default format and in the smallest."""
    if not report.fits:
        return ""
    first, last = report.fits[0], report.fits[-1]
    return f"Models {first.value} parameters fit in {first.name}, {last.value} in {last.name}. "


def _host(free_bytes: int) -> list[Fact]:
    num_cpus = os.cpu_count() or 1
    may_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_cpus
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        Fact("python", platform.python_version(), sys.executable),
        Fact("system", f"{platform.system()} {platform.release()}", platform.machine()),
        Fact("cpus", str(num_cpus), f"this process may use {may_use}"),
        Fact("memory", _gib(total_bytes), f"{_gib(free_bytes)} free"),
    ]


def _required_packages() -> list[Check]:
    """What the installed package says it needs."""
    try:
        requirements = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        fix = "install the package, so that its requirements can be checked"
        return [Check("penstock package", None, "runs from a source tree", fix)]
    checks = []
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        match = re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", wanted)
        if match and "extra" not in marker:
            name, minimum = match.group(1), match.group(2)
            checks.append(_package(name, minimum, is_needed=not marker))
    return checks


def _package(name: str, minimum: str | None, is_needed: bool) -> Check:
    missing = False if is_needed else None
    fix = f"pip install '{name}>={minimum}'" if minimum else f"pip install {name}"
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, missing, "not installed", fix)
    if minimum and _numbers(found) < _numbers(minimum):
        return Check(name, missing, f"{found}, at least {minimum} is needed", fix)
    return Check(name, True, found)


def _optional_packages() -> list[Check]:
    checks = []
    for name, purpose in _OPTIONAL.items():
        found = _package(name, None, is_needed=False)
        hint = f"{found.fix}: {purpose}" if found.ok is None else ""
        checks.append(dataclasses.replace(found, name=f"{name} (optional)", fix=hint))
    return checks


def _storage(checks: list[Check]) -> list[Fact]:
    from huggingface_hub import constants

    from penstock.hub.folder import cache_home

    facts = [_hub(constants.ENDPOINT, bool(constants.HF_HUB_OFFLINE))]
    for name, folder, variable in (
        ("model downloads", Path(constants.HF_HUB_CACHE), "HF_HOME"),
        ("penstock files", cache_home(), "PENSTOCK_HOME"),
    ):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free_bytes = shutil.disk_usage(existing).free
        facts.append(Fact(name, str(folder), f"{variable}; {_gib(free_bytes)} free"))
        if not os.access(existing, os.W_OK):
            fix = f"make it writable or set {variable} to another folder"
            checks.append(Check(name, False, f"{existing} cannot be written", fix))
        elif free_bytes < _MIN_DISK_BYTES:
            fix = f"free some space or set {variable} to another disk"
            checks.append(Check(name, None, f"{_gib(free_bytes)} free at {existing}", fix))
    return facts


def _hub(url: str, is_offline: bool) -> Fact:
    if is_offline:
        return Fact("hub", "not asked", "HF_HUB_OFFLINE is set: only what is in the cache is used")
    import httpx

    try:
        status = httpx.head(url, timeout=_HUB_TIMEOUT_S).status_code
    except httpx.HTTPError as error:
        return Fact(
            "hub", "does not answer", f"{url}: {type(error).__name__}; what is cached works"
        )
    return Fact("hub", "answers", f"{url}, status {status}")


def _devices(torch: Any, checks: list[Check]) -> list[Fact]:
    facts = [
        Fact("torch", torch.__version__, f"CUDA {torch.version.cuda or 'not built in'}"),
        Fact("triton", _version("triton")),
    ]
    driver = _driver_version()
    if driver:
        facts.append(Fact("NVIDIA driver", driver))
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            note = f"sm_{gpu.major}{gpu.minor}, {_gib(total_bytes)}, {_gib(free_bytes)} free"
            facts.append(Fact(f"GPU {index}", gpu.name, note))
    elif driver and torch.version.cuda is None:
        fix = "install a torch build with CUDA, see pytorch.org"
        checks.append(Check("GPU", False, "there is one, but this torch cannot use it", fix))
    elif driver:
        fix = f"torch was built for CUDA {torch.version.cuda}; the driver may be too old for it"
        checks.append(Check("GPU", False, "torch finds none, the driver does", fix))
    else:
        checks.append(Check("GPU", None, "none found", "models run on the CPU"))
    return facts


def _driver_version() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None


def _device_names(torch: Any) -> list[str]:
    if torch.cuda.is_available():
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["cpu"]


def _choose(report: Report, free_bytes: int) -> str:
    """Let the real rules decide, with nothing set by the user, for a model of 8 billion weights."""
    from penstock.config.resolve import resolve
    from penstock.config.schema import EngineConfig
    from penstock.kernels.device import probe
    from penstock.models.registry import supported_architectures
    from penstock.types.model_spec import ModelSpec, RopeSpec

    spec = ModelSpec(
        architecture="LlamaForCausalLM", model_type="llama", vocab_size=128256, hidden_size=4096,
        intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_size=128,
        max_position=131072, norm_eps=1e-5, hidden_act="silu", rope=RopeSpec(),
        tie_embeddings=False,
    )  # fmt: skip
    device = probe()
    config = resolve(EngineConfig(), spec, device, "")
    report.choices += [
        Fact(choice.name, choice.value, choice.reason)
        for choice in config.choices
        if choice.name != "max_seq_len"  # the model's, not the machine's
    ]
    report.fits += _fits(device.kind, config.kv_cpu_bytes, free_bytes)
    ranks = Fact("tensor_parallel_size", "1", "one device")
    if device.kind == "cuda" and device.num_devices > 1:
        ranks = Fact("tensor_parallel_size", f"1 to {device.num_devices}", "GPUs of this machine")
    report.choices.append(ranks)
    return f"{len(supported_architectures())} model architectures can run"


def _fits(device: str, cache_bytes: int, free_bytes: int) -> list[Fact]:
    """The largest model in each format, and what the one of `EXAMPLE` parameters would need."""
    if device == "cuda":
        import torch

        free_bytes = min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))
        found = sizes(GPU_FORMATS, room_on_gpu(free_bytes))
        where = "a GPU"
    else:
        found = sizes(CPU_FORMATS, room_on_cpu(free_bytes, cache_bytes))
        where = "memory"
    example = billions(EXAMPLE)
    return [
        Fact(
            size.format,
            f"up to {billions(size.max_parameters)}",
            f"weights of {example}: {_gib(int(size.bytes_of_example))}, "
            f"{'they fit' if size.fits_example else 'too much'} "
            f"({_gib(free_bytes)} of {where} free)",
        )
        for size in found
    ]


def _run_ops(torch: Any, device: str) -> str:
    """A norm against torch's own, and a draw against the reference on the CPU."""
    from penstock.kernels.norm import rms_norm
    from penstock.kernels.sampling import gumbel_argmax
    from penstock.kernels.tolerances import tolerance

    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(8, 256, generator=generator)
    weight_D = torch.randn(256, generator=generator)
    expected_TD = torch.nn.functional.rms_norm(x_TD, (256,), weight_D, 1e-5)
    found_TD = rms_norm(x_TD.to(device), weight_D.to(device), 1e-5).cpu()
    close = tolerance(x_TD.dtype)
    torch.testing.assert_close(found_TD, expected_TD, atol=close.atol, rtol=close.rtol)

    draw = (x_TD, torch.ones(8), torch.arange(8), torch.arange(8))
    found_L = gumbel_argmax(*(tensor.to(device) for tensor in draw)).cpu()
    if not torch.equal(found_L, gumbel_argmax.reference(*draw)):
        raise AssertionError(f"gumbel_argmax drew {found_L.tolist()}")
    return rms_norm.explain(x_TD.to(device), weight_D.to(device), 1e-5)


def _native_ops() -> Check:
    """Without them a CPU run works, slowly."""
    from penstock.kernels import native

    found, name = native.library() or native.library_or_reason(), "native CPU ops"
    if isinstance(found, str):
        return Check(name, None, f"{found}: {native.SLOWER}", "install gcc or clang")
    return Check(name, True, Path(found._name).name)


def _smoke_test(name: str, test: Callable[[], str]) -> Check:
    started = time.perf_counter()
    try:
        detail = test()
    except Exception as error:  # whatever is broken is what we are here to tell
        lines = str(error).strip().splitlines() or [""]
        fix = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        return Check(name, False, f"{type(error).__name__}: {lines[0]}", fix)
    return Check(name, True, f"{detail} ({time.perf_counter() - started:.1f} s)")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"
