"""Result files side by side and drawn: what the page shows is what the files say."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.bench.compare import differences, matches, table
from penstock.bench.report import page
from penstock.bench.results import read_series
from penstock.bench.svg import Line, chart, round_step, short
from penstock.cli.main import main
from penstock.errors import ConfigError

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def write(path: Path, speed: float, concurrency: int | None = 4, **more: object) -> Path:
    record = {
        "date": "20261115-120000", "model_id": "a<b>", "duration": 2.0, "completed": 8,
        "request_throughput": 4.0 * speed, "request_goodput:": None,
        "output_throughput": 100.0 * speed, "total_token_throughput": 200.0 * speed,
        "median_ttft_ms": 50.0 / speed, "median_tpot_ms": 10.0 / speed,
        "request_rate": "inf", "max_concurrency": concurrency,
        "extra": {
            "quantiles_ms": {"ttft": [float(i) for i in range(1, 102)], "tpot": [], "itl": []},
            "timeline": {"bin_s": 0.5, "tokens_per_s": [10.0, 30.0], "running": [1.0, 2.0]},
        },
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record | more))
    return path


def test_a_folder_is_a_series_in_the_order_of_its_load(tmp_path):
    for level in (16, 2, None, 4):
        write(tmp_path / "sweep" / f"c{level}.json", 1.0, level)
    series = read_series(tmp_path / "sweep")
    assert series.name == "sweep"
    assert [run.load for run in series.runs] == ["2", "4", "16", "all"]
    rated = write(tmp_path / "rated.json", 1.0, None, request_rate=2.5)
    assert [run.load for run in read_series(rated).runs] == ["2.5/s"]


def test_a_change_for_the_better_is_told_from_one_for_the_worse(tmp_path):
    first = read_series(write(tmp_path / "old.json", 1.0))
    second = read_series(write(tmp_path / "new.json", 1.25))
    [(one, other)] = matches(first, second)
    worse = {seen.name: seen.worse for seen in differences(one, other)}
    assert worse["output tok/s"] == pytest.approx(-0.25)
    assert worse["median TTFT ms"] == pytest.approx(-0.2)
    assert "good requests/s" not in worse  # neither file has it
    lines = table(("old", "new"), one, other).splitlines()
    assert lines[0].split() == ["load", "4", "old", "new", "change"]
    assert lines[2].split() == ["output", "tok/s", "100.00", "125.00", "+25.0%", "better"]
    assert all(line.endswith("worse") for line in table(("a", "b"), other, one).splitlines()[1:])


def test_runs_of_two_series_match_by_their_load(tmp_path):
    for name, levels in (("a", (1, 2)), ("b", (2, 3)), ("c", (7, 8))):
        for level in levels:
            write(tmp_path / name / f"{level}.json", 1.0, level)
    a, b, c = (read_series(tmp_path / name) for name in "abc")
    assert [(one.load, other.load) for one, other in matches(a, b)] == [("2", "2")]
    with pytest.raises(ConfigError, match="no run with the same load"):
        matches(a, c)


def call(*argv: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *map(str, argv)])
    return ended.value.code


def test_compare_fails_where_more_is_lost_than_allowed(tmp_path, capsys):
    old, new = write(tmp_path / "old.json", 1.0), write(tmp_path / "new.json", 0.9)
    assert call("compare", old, new) == 0
    assert call("compare", old, new, "--max-worse", 0.2) == 0
    assert call("compare", old, new, "--max-worse", 0.05) == 1
    assert "a figure is 11.1% worse, at most 5.0% may be" in capsys.readouterr().out


def test_what_is_no_result_is_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert call("report", tmp_path / "x.json", "-o", tmp_path / "r.html") == 2
    assert "is no result of `penstock bench serve --save-result`" in capsys.readouterr().err
    assert call("compare", tmp_path / "x.json") == 2


def pictures(text: str) -> list[ElementTree.Element]:
    found = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    named = f"<svg xmlns='{NAMESPACE['s']}'"
    return [ElementTree.fromstring(one.replace("<svg", named, 1)) for one in found]


def test_the_page_draws_every_figure_and_loads_nothing(tmp_path):
    for name, speed in (("a", 1.0), ("b", 1.5)):
        for level in (1, 4):
            write(tmp_path / name / f"{level}.json", speed * level, level)
    output = tmp_path / "page.html"
    assert call("report", tmp_path / "a", tmp_path / "b", "-o", output) == 0
    text = output.read_text()
    assert not re.search(r"https?://|<script|<link|url\(", text)
    assert "a&lt;b&gt;" in text
    assert "<td>600.0</td>" in text  # tok/s of b at 4
    drawn = [one for one in pictures(text) if one.find("s:text", NAMESPACE) is not None]
    titles = [one.find("s:text", NAMESPACE).text for one in drawn]
    assert titles == [
        *("Against time per token", "Against time to first token"),
        "Time to first token",  # the other distributions have no values
        *("Tokens as they arrived", "Requests under way"),
    ]
    told = [one.text for one in drawn[0].iterfind(".//s:title", NAMESPACE)]
    assert told == ["a, 1: 10, 100", "a, 4: 2.5, 400", "b, 1: 6.67, 150", "b, 4: 1.67, 600"]


def test_files_without_our_extras_are_drawn_as_far_as_they_go(tmp_path):
    path = write(tmp_path / "theirs.json", 1.0)
    record = json.loads(path.read_text())
    del record["extra"]
    path.write_text(json.dumps(record))
    text = page([read_series(path)])
    assert "<td>100.0</td>" in text
    assert pictures(text) == []


def test_one_load_has_one_color_and_one_series_one_dash(tmp_path):
    for name in "ab":
        for level in (1, 2, 4, 8, 16):
            write(tmp_path / name / f"{level}.json", 1.0, level)
    text = page([read_series(tmp_path / name) for name in "ab"])
    names = re.findall(r"</svg>(\w+, \d+)</span>", text.partition("<h2>Distributions</h2>")[2])
    assert names[:6] == ["a, 1", "a, 4", "a, 16", "b, 1", "b, 4", "b, 16"]
    [*_, last] = pictures(text)
    lines = last.findall(".//s:path[@class='line']", NAMESPACE)
    colors, dashes = ([line.get(name) for line in lines] for name in ("stroke", "stroke-dasharray"))
    assert colors[:3] == colors[3:] and len(set(colors)) == 3
    assert len(set(dashes[:3])) == len(set(dashes[3:])) == 1 and len(set(dashes)) == 2


def test_what_lies_before_the_edge_is_drawn_at_it():
    points = [(0.001, 0.0), (50.0, 5.0), (100.0, 10.0)]
    line = Line("l", points, "#123", "abc")
    [picture] = pictures(chart("t", "x", "y", [line], log_x=True, x_from=50.0))
    xs = [float(dot.get("cx")) for dot in picture.iterfind(".//s:circle", NAMESPACE)]
    assert xs[0] < xs[1] < xs[2]  # not a wide range: an axis from 0
    [picture] = pictures(chart("t", "x", "y", [line], log_x=True, x_from=2.0))
    xs = [float(dot.get("cx")) for dot in picture.iterfind(".//s:circle", NAMESPACE)]
    [edge] = {
        re.match(r"M([\d.]+) [\d.]+H", grid.get("d"))[1]
        for grid in picture.iterfind(".//s:path[@class='grid']", NAMESPACE)
        if "H" in grid.get("d")
    }
    assert xs[0] == float(edge)


def test_dots_stand_where_their_values_say():
    [picture] = pictures(
        chart("t", "x", "y", [Line("one", [(0.0, 0.0), (10.0, 5.0), (20.0, 10.0)], "#123", "abc")])
    )
    dots = [
        (float(dot.get("cx")), float(dot.get("cy")))
        for dot in picture.iterfind(".//s:circle", NAMESPACE)
    ]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.11)
    # Half of the way from 0 to 10 on the y axis is where its tick for 5 would be.
    ticks = {
        text.text: float(text.get("y"))
        for text in picture.iterfind(".//s:text[@class='tick']", NAMESPACE)
        if text.get("text-anchor") == "end"
    }
    assert ticks["0"] - 4 == pytest.approx(y0, abs=0.11)
    assert ticks["10"] - 4 == pytest.approx(y2, abs=0.11)


def test_a_wide_range_gets_a_logarithmic_axis():
    points = [(1.0, 1.0), (10.0, 2.0), (100.0, 3.0)]
    [picture] = pictures(chart("t", "x", "y", [Line("l", points, "#123", "abc")], log_x=True))
    xs = [float(dot.get("cx")) for dot in picture.iterfind(".//s:circle", NAMESPACE)]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)


def test_numbers_on_axes_are_round_and_short():
    assert [round_step(one) for one in (0.9, 1.0, 1.2, 2.1, 7, 30)] == [1, 1, 2, 5, 10, 50]
    assert [short(one) for one in (0, 0.05, 7, 1500, 2_340_000)] == [
        *("0", "0.05", "7", "1.5k", "2.34M")
    ]
