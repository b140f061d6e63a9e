"""docs/performance.md and its plot are what the result files say today."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import report
from results import Figure, Run, newest, read_runs
from shapes import ROWS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def runs():
    return read_runs()


def a_run(date, figures, engine="penstock"):
    return Run(
        benchmark="table",
        engine=engine,
        version=None,
        date=date,
        hardware="h",
        software={},
        command="c",
        commit=None,
        workload="w",
        rows={"8b-bf16": {"model": "m", "figures": {k: {"value": v} for k, v in figures.items()}}},
    )


def test_the_committed_page_is_up_to_date():
    command = [sys.executable, str(ROOT / "benchmarks" / "report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_another_figure_gives_another_page_and_plot(runs):
    name = "2026-11-16-h200-penstock-2.json"
    row = runs[name].rows["8b-bf16"]
    slower = row.model_copy(
        update={"figures": {**row.figures, "tpot1_ms": Figure(value=6.72, roofline=3.36)}}
    )
    changed = runs[name].model_copy(update={"rows": {**runs[name].rows, "8b-bf16": slower}})
    page = report.render({**runs, name: changed})
    assert "**6.72** / 4.89 / 3.36 (50 %)" in page
    assert page != report.render(runs)
    assert report.plot({**runs, name: changed}) != report.plot(runs)


def test_the_page_names_every_result_file_and_shows_the_newest_traffic_figures(runs):
    page = report.render(runs)
    for name, run in runs.items():
        assert f"({'../benchmarks/results/' + name})" in page
        if run.benchmark == "traffic":
            for load, row in run.rows.items():
                for name_of_figure in row.figures:
                    figure = newest([*runs.values()], "traffic", run.engine, load, name_of_figure)
                    assert report._plain(figure.value) in page


def test_of_each_figure_the_newest_run_counts():
    old, undated = a_run("2026-11-15", {"tpot1_ms": 4.0, "ttft1_ms": 9.0}), a_run(None, {"x": 1.0})
    new, peer = a_run("2026-11-16", {"tpot1_ms": 3.0}), a_run("2026-11-17", {"tpot1_ms": 9.0}, "v")
    runs = [undated, old, new, peer]

    def found(name):
        return newest(runs, "table", "penstock", "8b-bf16", name)

    assert found("tpot1_ms") == Figure(value=3.0)
    assert found("ttft1_ms") == Figure(value=9.0)
    assert found("c32_tok_s") is None


def test_runs_are_read_in_the_order_of_their_dates(tmp_path):
    dates = {"a.json": "2026-11-16", "b.json": None, "c.json": "2026-11-15", "0.json": "2026-11-16"}
    for name, date in dates.items():
        (tmp_path / name).write_text(a_run(date, {"x": 1.0}).model_dump_json())
    assert list(read_runs(tmp_path)) == ["b.json", "c.json", "0.json", "a.json"]


@pytest.mark.parametrize("row", report.MODELS)
def test_the_peer_that_the_table_prints_is_the_one_of_the_page(runs, row):
    for name in ("tpot1_ms", "c32_tok_s", "c256_tok_s"):
        peers = (newest(runs.values(), "table", e, row, name) for e in ("vllm", "tensorrt-llm"))
        found = next((figure.value for figure in peers if figure is not None), None)
        assert ROWS[row].peer.get(name) == found


def test_percent_of_the_roofline_is_below_100_for_times_and_for_rates():
    assert report.percent(4.0, 3.0) == pytest.approx(75)
    assert report.percent(3000.0, 4000.0) == pytest.approx(75)


def test_a_missing_figure_is_named(runs):
    without = {name: run for name, run in runs.items() if run.engine != "penstock"}
    with pytest.raises(SystemExit, match="tpot1_ms of 8b-bf16"):
        report.render(without)
