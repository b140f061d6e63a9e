"""Names become folders, or errors that say what to do. No network: the hub is off or replaced."""

import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub.errors as hub_errors
import pytest

from penstock.errors import ConfigError
from penstock.hub import folder as hub


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


def test_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.local_folder(str(tmp_path)) == tmp_path


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hub.local_folder(str(tmp_path))


def test_gguf_file_is_used_as_it_is_also_when_only_its_folder_is_named(tmp_path, monkeypatch):
    file = tmp_path / "some.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    for model in (str(file), "some.gguf", str(tmp_path)):
        assert hub.local_folder(model) == file
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ConfigError, match=r"or to a \.gguf file"):
        hub.local_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        hub.local_folder("missing.gguf")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "a/b/c", "", "a b"])
def test_path_that_is_not_there_is_no_hub_id(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if model == "":
        with pytest.raises(ConfigError):
            hub.local_folder(model)
        return
    with pytest.raises(ConfigError, match="no such folder"):
        hub.local_folder(model)


def test_offline_and_not_cached_says_both(tmp_path):
    code = (
        "from penstock.hub.folder import local_folder\n"
        "from penstock.errors import ConfigError\n"
        "try: local_folder('some-org/some-model')\n"
        "except ConfigError as error: print(error)\n"
    )
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "HF_HUB_OFFLINE" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (hub_errors.GatedRepoError("no", response=response(403)), "accept its license"),
        (hub_errors.RepositoryNotFoundError("no", response=response(404)), "check the spelling"),
        (hub_errors.RevisionNotFoundError("no", response=response(404)), "no such revision"),
        (hub_errors.HfHubHTTPError("boom", response=response(500)), "download failed: boom"),
    ],
)
def test_hub_failures_become_config_errors_with_a_way_out(monkeypatch, error, hint):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("penstock.hub.download.snapshot_download", fail)
    with pytest.raises(ConfigError, match=hint):
        hub.local_folder("org/name", revision="main")


def test_only_files_that_are_read_are_downloaded(monkeypatch, tmp_path):
    asked = {}

    def download(model, **kwargs):
        asked.update(kwargs, model=model)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("penstock.hub.download.snapshot_download", download)
    assert hub.local_folder("org/name", "v1") == tmp_path
    assert (asked["model"], asked["revision"]) == ("org/name", "v1")
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "tokenizer.model",
        "chat_template.jinja", "1_Pooling/config.json",
        "pytorch_model.bin", "original/consolidated.00.pth",
        "consolidated.safetensors", "onnx/model.safetensors", "README.md",
    ]  # fmt: skip
    kept = filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:6]


def test_tiny_is_part_of_the_package_and_needs_no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = hub.local_folder("tiny")
    assert folder.is_relative_to(Path(hub.__file__).parent)
    assert {path.name for path in folder.iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors", "skills.jsonl"),
        *("tokenizer.json", "tokenizer_config.json", "README.md"),
    }
    assert list(tmp_path.iterdir()) == []
