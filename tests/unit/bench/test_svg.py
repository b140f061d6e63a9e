"""Grouped bars: as high as their value, none where there is no value."""

from xml.etree import ElementTree

import pytest

from penstock.bench.svg import BarGroup, bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_as_high_as_their_values():
    groups = [BarGroup("a & b", (100.0, 25.0)), BarGroup("c", (50.0, None))]
    drawn = ElementTree.fromstring(bar_chart("t", {"p": groups}, ("x", "y"), high=100.0))
    heights = [float(rect.get("height")) for rect in drawn.iter(f"{SVG}rect")][2:]  # legend first
    assert [height / heights[0] for height in heights] == pytest.approx([1.0, 0.25, 0.5], abs=0.01)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"t", "p", "x", "y", "a & b", "c", "25", "n/a"} <= set(texts)


def test_no_line_of_the_grid_runs_through_a_value():
    groups = [BarGroup("a", (91.0, 54.0)), BarGroup("b", (25.0, 2.0))]
    drawn = ElementTree.fromstring(bar_chart("t", {"p": groups}, ("x", "y"), high=100.0))
    bars = list(drawn.iter(f"{SVG}rect"))[2:]
    values = [text for text in drawn.iter(f"{SVG}text") if text.text in {"91", "54", "25", "2"}]
    for bar, value in zip(bars, values, strict=True):
        bottom = float(bar.get("y")) + float(bar.get("height"))
        is_inside = float(bar.get("y")) + 8 < float(value.get("y")) < bottom
        assert is_inside == (value.text != "2")  # too low a bar has its value above it
