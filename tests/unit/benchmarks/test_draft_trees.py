"""What the benchmark of trees counts and reckons, on paths made up here and on a trained head."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import draft_trees

CHAIN = [(0,) * length for length in (1, 2)]


def test_a_tree_keeps_what_lies_on_the_path_of_the_model():
    judged = [(0, 0, 0, 1, 0, 0), (1, 0, 0, 0, 0, 0), (0, 3, 0, 0, 0, 0), (7, 0, 0, 0, 0, 0)]
    took = draft_trees.step_ms(1 + 2) + 2 * draft_trees.HEAD_SHARE * draft_trees.step_ms(1)
    assert draft_trees.rate(CHAIN, judged, 1) == pytest.approx((1 + 3 / 4) / took)
    tree = [*CHAIN, (1,), (1, 0)]
    passes = draft_trees.step_ms(8) + draft_trees.step_ms(8 * 2)
    took = draft_trees.step_ms(8 * 5) + draft_trees.HEAD_SHARE * passes
    assert draft_trees.rate(tree, judged, 8) == pytest.approx((1 + 5 / 4) / took)


def test_where_the_second_choice_is_as_good_a_tree_pays_for_one_sequence_and_for_many_it_does_not():
    paths = [((step // 2) % 2, (step // 4) % 2, *[0] * 4) for step in range(400)]
    one, _, many = draft_trees.compared(paths)
    assert float(one.rpartition(" ")[2].rstrip("%")) > 50
    assert float(many.rpartition(" ")[2].rstrip("%")) < 25


def test_the_choices_of_a_trained_head_are_found():
    flags = ["--each", "1", "--tokens", "20", "--heads", "eagle3", "--right"]
    run = [sys.executable, draft_trees.__file__, *flags]
    shown = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    first = shown.splitlines()[1].split()[0]
    assert float(first.rstrip("%")) > 80, shown
