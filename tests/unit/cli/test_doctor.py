"""The doctor: finds what is there, names what is missing, and fails only on what is essential."""

import argparse
import json
import shutil
import sys
from importlib import metadata

import pytest
import torch
from rich.console import Console

from penstock.cli import doctor
from penstock.kernels.native import library


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor.log, "setup", lambda *_: None)  # it would stay for other tests
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def check(report: doctor.Report, name: str) -> doctor.Check:
    return next(found for found in report.checks if found.name == name)


def test_json_tells_what_a_run_would_use_and_the_exit_code_agrees(capsys):
    status = doctor.run(argparse.Namespace(json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0) is True
    facts = {fact["name"]: fact["value"] for fact in report["machine"] + report["choices"]}
    assert facts["torch"] == torch.__version__
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert facts["device"] == kind
    assert facts["attention_backend"] == {"cpu": "sdpa", "cuda": "triton"}[kind]
    assert any(found["name"].startswith("ops on ") for found in report["checks"])


def test_the_table_shows_every_check(tmp_path):
    report = doctor.examine()
    console = Console(width=300, record=True, file=(tmp_path / "out").open("w"))
    doctor.show(report, console)
    text = console.export_text()
    assert "Ready." in text
    assert all(found.name in text for found in report.checks)


def hub_fact() -> doctor.Fact:
    return next(fact for fact in doctor._storage([]) if fact.name == "hub")


def test_the_hub_is_asked_before_it_is_said_to_answer(server, monkeypatch):
    assert hub_fact().value == "not asked"
    assert "HF_HUB_OFFLINE" in hub_fact().note
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    assert hub_fact().value == "answers"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert hub_fact().value == "does not answer"
    assert "http://127.0.0.1:9: ConnectError" in hub_fact().note


def test_it_says_which_sizes_fit_in_which_format():
    plain, half, eight, four = doctor._fits("cpu", 2**30, 23 * 2**30)
    assert [fact.value for fact in (plain, half, eight, four)] == [
        *("up to 5.3 B", "up to 10 B", "up to 20 B", "up to 34 B"),
    ]
    assert "weights of 8 B: 29.8 GiB, too much (23.0 GiB of memory free)" in plain.note
    assert "weights of 8 B: 14.9 GiB, they fit" in half.note


def test_ready_says_for_what(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "available_bytes", lambda free: 23 * 2**30)
    report = doctor.examine()
    console = Console(width=300, record=True, file=(tmp_path / "out").open("w"))
    doctor.show(report, console)
    text = console.export_text()
    if not torch.cuda.is_available():
        memory = next(fact for fact in report.machine if fact.name == "memory")
        assert memory.note == "23.0 GiB free" and "(23.0 GiB of memory free)" in text
        assert (
            "Ready. Models up to 5.3 B parameters fit in float32 (default), up to 34 B in" in text
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a run on the CPU")
def test_without_a_compiler_native_ops_are_not_called_ok(monkeypatch):
    monkeypatch.setattr("penstock.kernels.native.compiler._COMPILERS", ("nosuch-cc",))
    library.cache_clear()
    try:
        found = check(doctor.examine(), "native CPU ops")
    finally:
        library.cache_clear()
    assert found.ok is None and found.fix == "install gcc or clang"
    assert found.detail == "no C compiler (nosuch-cc) was found: 3 to 10 times slower"


def test_sizes_and_reasons_of_settings_are_for_people():
    facts = {fact.name: fact for fact in doctor.examine().choices}
    assert facts["host_cache_bytes"].value.endswith(" GiB")
    assert "set by" not in facts["partial_reuse"].note  # nobody has set anything


def test_a_missing_package_is_essential_and_says_how_to_get_it(monkeypatch):
    known = metadata.version

    def version(name: str) -> str:
        if name in ("safetensors", "hf_xet"):
            raise metadata.PackageNotFoundError(name)
        return "0.5" if name == "httpx" else known(name)

    monkeypatch.setattr(metadata, "version", version)
    report = doctor.examine()
    assert not report.ok
    assert check(report, "safetensors").ok is False
    assert "pip install 'safetensors>=" in check(report, "safetensors").fix
    assert "at least" in check(report, "httpx").detail
    assert check(report, "hf_xet (optional)").ok is None


def test_an_op_that_disagrees_with_its_reference_is_broken(monkeypatch, capsys):
    from penstock.kernels import norm

    class Wrong:
        def __call__(self, x, weight, eps):
            return x * 1.01

    monkeypatch.setattr(norm, "rms_norm", Wrong())
    assert doctor.run(argparse.Namespace(json=True)) == 1
    broken = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["ok"] is False]
    assert [c["name"].split()[0] for c in broken] == ["ops"]
    assert "AssertionError" in broken[0]["detail"]


def test_without_torch_the_rest_is_still_examined(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine()
    assert check(report, "torch loads").ok is False
    assert {fact.name for fact in report.machine} >= {"python", "memory"}
    assert report.storage


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no GPU")
def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.1")
    report = doctor.examine()
    assert check(report, "GPU").ok is False
    assert "torch" in check(report, "GPU").fix


def test_little_disk_is_a_warning_with_the_variable_to_set(monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**30))
    report = doctor.examine()
    assert check(report, "penstock files").ok is None
    assert "PENSTOCK_HOME" in check(report, "penstock files").fix


@pytest.mark.parametrize(
    ("found", "minimum", "is_enough"),
    [("2.13.0+cpu", "2.11", True), ("2.9.1", "2.11", False), ("1.0", "1.0", True)],
)
def test_versions_compare_as_numbers(found, minimum, is_enough):
    assert (doctor._numbers(found) >= doctor._numbers(minimum)) is is_enough
