"""What a model's folder says it is for."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.hub.task import served_task
from penstock.types.pooling import Task


def modules(folder, *kinds, pooling=None):
    listed = [
        {"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_lasttoken": True}, {"pooling_mode": "lasttoken"}]
)
def test_a_folder_of_sentence_transformers_embeds(tmp_path, pooling):
    modules(tmp_path, "Transformer", "Pooling", "Normalize", pooling=pooling)
    found = served_task("auto", tmp_path)
    assert (found.task, found.normalizes) == (Task.EMBED, True)
    assert served_task("generate", tmp_path).task is Task.GENERATE


def test_without_a_norm_in_the_folder_vectors_keep_their_length(tmp_path):
    modules(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True})
    assert not served_task("embed", tmp_path).normalizes


def test_other_folders_generate_unless_they_are_told(tmp_path):
    assert served_task("auto", tmp_path).task is Task.GENERATE
    assert served_task("embed", tmp_path).task is Task.EMBED
    assert served_task("score", tmp_path).task is Task.SCORE
    assert served_task("auto", tmp_path / "model.gguf").task is Task.GENERATE


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True}, "mean_tokens"),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, "cls"),
        (("Transformer", "Dense"), None, "'Dense'"),
    ],
)
def test_what_is_not_pooled_by_the_last_token_is_refused_by_its_name(
    tmp_path, kinds, pooling, words
):
    modules(tmp_path, *kinds, pooling=pooling)
    with pytest.raises(ConfigError, match=words):
        served_task("auto", tmp_path)


def test_a_broken_list_of_modules_is_refused(tmp_path):
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match="no list"):
        served_task("auto", tmp_path)
