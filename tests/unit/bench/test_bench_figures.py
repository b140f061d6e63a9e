"""Figures against formulas written down once more, the table against the recipes' sample."""

import re
import statistics
from array import array
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.figures import as_json, details_as_json, figures_of
from penstock.bench.layout import by_other_formulas, failures, table
from penstock.bench.load import Outcome, Tally
from penstock.bench.records import Ask, Response

RECIPES = Path(__file__).parents[4] / "shared" / "recipes"
METRICS = ("ttft", "tpot", "itl", "e2el")


def response(started: float, chunks: list[float], num_output: int | None, **more) -> Response:
    gaps = array("d", np.diff(chunks).tolist())
    return Response(
        started_at=started, first_at=chunks[0], last_at=chunks[-1], gaps_s=gaps, text="x " * 3,
        num_output=num_output, **more,
    )  # fmt: skip


# Five tokens in three chunks; one token; one that the server does not count; one that failed.
ANSWERS = [
    response(10.0, [10.5, 11.0, 12.0], 5, tokens_per_step=2.0, num_prompt=100),
    response(10.0, [10.25], 1, num_prompt=50),
    response(11.0, [11.5, 13.5], None),
    Response(started_at=10.0, error="status 500: no"),
]
ASKS = [Ask(prompt="p", num_input=n, max_tokens=5) for n in (100, 50, 10, 7)]


def make_figures(goodput_ms=None, ignore_eos=False):
    outcome = Outcome(ANSWERS, 10.0, 4.0, 0.95, Tally(4))
    return figures_of(ASKS, outcome, lambda text: len(text.split()), goodput_ms or {}, ignore_eos)


def test_throughput_counts_answered_requests_over_the_whole_time():
    seen = make_figures()
    assert (seen.completed, seen.num_failed) == (3, 1)
    assert (seen.total_input, seen.total_output) == (160, 5 + 1 + 3)
    assert seen.request_throughput == 3 / 4
    assert seen.output_throughput == 9 / 4
    assert seen.total_token_throughput == 169 / 4
    assert seen.user_throughput == pytest.approx(statistics.mean([5 / 2.0, 1 / 0.25, 3 / 2.5]))
    assert seen.request_goodput is None


def test_tpot_is_over_requests_with_a_second_token_and_itl_over_chunks():
    spreads = make_figures().spreads
    assert spreads["ttft"].values_ms.tolist() == [500.0, 250.0, 500.0]
    assert spreads["tpot"].values_ms.tolist() == [1500.0 / 4, 2000.0 / 2]
    assert spreads["itl"].values_ms.tolist() == [500.0, 1000.0, 2000.0]
    assert spreads["e2el"].values_ms.tolist() == [2000.0, 250.0, 2500.0]
    assert spreads["itl"].median == 1000.0
    assert spreads["itl"].std == pytest.approx(statistics.pstdev([500.0, 1000.0, 2000.0]))


def test_goodput_counts_requests_within_all_limits():
    assert make_figures({"ttft": 300.0}).num_good == 1
    assert make_figures({"ttft": 500.0}).num_good == 3
    assert make_figures({"ttft": 500.0, "tpot": 400.0}).num_good == 2
    assert make_figures({"ttft": 500.0, "tpot": 400.0, "e2el": 1000.0}).request_goodput == 1 / 4


def test_the_json_has_the_names_scripts_read_and_the_recipes_formulas_beside_them():
    record = as_json(make_figures({"ttft": 300.0}), METRICS, (50.0, 99.9))
    assert record["request_goodput:"] == 1 / 4
    assert record["median_ttft_ms"] == record["p50_ttft_ms"] == 500.0
    assert record["p99.9_e2el_ms"] == pytest.approx(np.percentile([2000, 250, 2500], 99.9))
    assert set(record["avg_decoded_tokens_per_iter"]) == {
        *("mean", "min", "max", "median", "std", "percentiles")
    }
    extra = record["extra"]
    # From the first token of all (10.25) to the last (13.5); gaps of all over tokens of all.
    assert extra["output_throughput_first_to_last"] == 9 / 3.25
    assert extra["total_token_throughput_first_to_last"] == 169 / 3.25
    assert extra["mean_itl_per_token_ms"] == pytest.approx(3500.0 / 9)
    assert by_other_formulas(make_figures()) == (
        "all tokens alike: mean ITL 388.89 ms; "
        "first token to last: output 2.77 tok/s, total 52.00 tok/s"
    )
    assert extra["failed"] == 1
    names = [name for name in record if not name.startswith(("mean_", "median_", "std_", "p"))]
    assert names[:9] == [
        *("duration", "completed", "total_input_tokens", "total_output_tokens"),
        *("request_throughput", "request_goodput:", "output_throughput"),
        *("total_token_throughput", "user_throughput"),
    ]


def test_only_the_metrics_asked_for_are_in_the_json():
    record = as_json(make_figures(), ("ttft",), (99.0,))
    assert "p99_ttft_ms" in record
    assert not any("itl_ms" in name or "e2el" in name for name in record)


def test_details_are_request_by_request():
    details = details_as_json(ASKS, ANSWERS)
    assert details["input_lens"] == [100, 50, 10, 7]
    assert details["itls"] == [[0.5, 1.0], [], [2.0], []]
    assert details["errors"] == ["", "", "", "status 500: no"]
    assert details["ttfts"] == [0.5, 0.25, 0.5, 0.0]


def test_quantiles_and_time_line_hold_the_whole_run():
    seen = make_figures()
    assert seen.quantiles["e2el"][0] == 250.0
    assert seen.quantiles["e2el"][100] == 2500.0
    line = seen.timeline
    assert len(line["tokens_per_s"]) == 40
    assert line["bin_s"] == pytest.approx(0.1)
    assert sum(line["tokens_per_s"]) * line["bin_s"] == pytest.approx(9, rel=1e-3)
    seconds_running = sum(one.latency_s for one in ANSWERS[:3])
    assert sum(line["running"]) * line["bin_s"] == pytest.approx(seconds_running, rel=1e-2)


def test_what_looks_wrong_is_said():
    said = "\n".join(make_figures(ignore_eos=True).warnings)
    assert "busy 95% of the time and up to 0 ms late" in said
    assert "did not count 1 responses" in said
    assert "2 responses are shorter than was asked for" in said
    assert "input tokens" not in said
    ANSWERS[0].num_prompt = 150
    ANSWERS[1].text = ""
    try:
        said = "\n".join(make_figures().warnings)
    finally:
        ANSWERS[0].num_prompt, ANSWERS[1].text = 100, "x"
    assert "counts +25.0% input tokens" in said
    assert "1 responses have no text" in said
    assert "shorter" not in said


def sample(recipe: str) -> list[str]:
    """The table that a recipe prints as what one should see."""
    text = (RECIPES / recipe).read_text()
    found = re.search(r"^=+ Serving Benchmark Result =+\n(?:.*\n)*?={50}$", text, re.MULTILINE)
    assert found is not None
    return found[0].splitlines()


@pytest.mark.skipif(not RECIPES.is_dir(), reason="the recipes are not at hand")
@pytest.mark.parametrize("recipe", ["gpt-oss.md", "llama-3.3-70b.md", "deepseek-r1.md"])
def test_the_table_is_the_recipes_line_by_line(recipe):
    printed = table(make_figures(), METRICS, (99.0,)).splitlines()
    expected = sample(recipe)
    assert len(printed) == len(expected)
    for ours, theirs in zip(printed, expected, strict=True):
        if theirs.startswith(("=", "-")):
            assert ours == theirs
            continue
        # The sample was edited by hand: its values begin one column further right.
        label, value = theirs[:42].rstrip(), theirs[42:]
        assert ours[:40].rstrip() == label
        assert (len(ours), ours[40]) == (51, " ")
        assert re.fullmatch(r"\d+ *" if value.isdigit() else r"\d+\.\d\d *", ours[41:])


def test_goodput_has_its_row_only_when_limits_were_given():
    lines = table(make_figures({"ttft": 300.0}), ("ttft",), (50.0, 99.9)).splitlines()
    assert lines[6] == "Request goodput (req/s):                 0.25      "
    assert [line.split(":")[0] for line in lines[-5:-1]] == [
        *("Mean TTFT (ms)", "Median TTFT (ms)", "P50 TTFT (ms)", "P99.9 TTFT (ms)")
    ]


def test_failures_are_counted_before_the_table():
    lines = failures(make_figures(), ["status 500: no"]).splitlines()
    assert lines[0] == "Total failed requests: 1"
    assert "status 500: no" in lines


def test_a_benchmark_in_which_all_failed_still_has_figures():
    outcome = Outcome(ANSWERS[3:], 10.0, 4.0, 0.1, Tally(1))
    seen = figures_of(ASKS[3:], outcome, len, {"ttft": 1.0}, False)
    assert (seen.completed, seen.num_good, seen.user_throughput) == (0, 0, 0.0)
    assert "nan" not in table(seen, METRICS, (99.0,))
    assert as_json(seen, METRICS, (99.0,))["extra"]["quantiles_ms"]["itl"] == []
