"""Results as one HTML page: a table and charts, nothing to load from elsewhere."""

import html
from collections.abc import Sequence

from penstock.bench.results import FIGURES, Run, Series
from penstock.bench.svg import COLOURS, Line, chart

_MAX_DRAWN = 6  # runs in one chart of distributions or of a time line
_DISTRIBUTIONS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Between two chunks",
    "e2el": "Whole answer",
}
_STYLE = """
:root { color-scheme: light dark; --line: #8885; --text: #222; --back: #fff; --soft: #666; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --back: #16181c; --soft: #999; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 14px; }
svg .tick, svg .label { fill: var(--soft); }
svg .note { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: .6; fill: none; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; color: var(--soft); }
.legend i { display: inline-block; width: 1.4em; height: 3px; margin: 0 .4em .25em 0; }
"""


def page(series: Sequence[Series]) -> str:
    runs = [(one, run) for one in series for run in one.runs]
    first = runs[0][1].record
    title = "Serving benchmark: " + str(first.get("model_id", series[0].name))
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_about(runs))}</p>",
        "<h2>Figures</h2>",
        _table(runs),
    ]
    if len(runs) > 1:
        body += ["<h2>Throughput against latency</h2>", _legend([one.name for one in series])]
        body.append(_charts(_throughput(series)))
    drawn = _spread_out(runs)
    names = [_run_name(one, run, len(series) > 1) for one, run in drawn]
    body += ["<h2>Distributions</h2>", _legend(names), _charts(_distributions(drawn, names))]
    body += ["<h2>Over time</h2>", _legend(names), _charts(_time_lines(drawn, names))]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _about(runs: Sequence[tuple[Series, Run]]) -> str:
    records = [run.record for _, run in runs]
    dates = sorted(str(one.get("date", "")) for one in records)
    requests = sum(int(one["completed"]) for one in records)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"{len(runs)} runs, {requests} requests, {span}"


def _table(runs: Sequence[tuple[Series, Run]]) -> str:
    shown = [
        (name, title)
        for name, title, _ in FIGURES
        if any(run.value(name) is not None for _, run in runs)
    ]
    heads = "".join(f"<th>{html.escape(title)}</th>" for _, title in shown)
    rows = []
    for one, run in runs:
        cells = ["" if (value := run.value(name)) is None else f"{value:,.2f}" for name, _ in shown]
        first = html.escape(_run_name(one, run, True))
        rows.append(f"<tr><td>{first}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<div class="wide"><table><tr><th>run, load</th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _throughput(series: Sequence[Series]) -> list[str]:
    pictures = []
    for name, x_label in (
        ("median_tpot_ms", "median time per output token, ms"),
        ("median_ttft_ms", "median time to first token, ms"),
    ):
        lines = []
        for index, one in enumerate(series):
            runs = [run for run in one.runs if run.value(name) is not None]
            points = [
                (run.value(name) or 0.0, run.value("output_throughput") or 0.0) for run in runs
            ]
            colour = COLOURS[index % len(COLOURS)]
            lines.append(Line(one.name, points, colour, [run.load for run in runs]))
        pictures.append(chart("Output tokens per second", x_label, "tok/s", lines))
    return pictures


def _distributions(drawn: Sequence[tuple[Series, Run]], names: Sequence[str]) -> list[str]:
    pictures = []
    for metric, title in _DISTRIBUTIONS.items():
        lines = []
        for index, (name, (_, run)) in enumerate(zip(names, drawn, strict=True)):
            values = run.extra("quantiles_ms").get(metric, [])
            points = [(float(value), float(i)) for i, value in enumerate(values)]
            lines.append(Line(name, points, COLOURS[index]))
        unit = "% of chunks" if metric == "itl" else "% of requests"
        pictures.append(chart(title, "ms, at most", unit, lines, log_x=True))
    return pictures


def _time_lines(drawn: Sequence[tuple[Series, Run]], names: Sequence[str]) -> list[str]:
    pictures = []
    for field, title, unit in (
        ("tokens_per_s", "Tokens as they arrived", "tok/s"),
        ("running", "Requests under way", "requests"),
    ):
        lines = []
        for index, (name, (_, run)) in enumerate(zip(names, drawn, strict=True)):
            line = run.extra("timeline")
            width = float(line.get("bin_s", 1.0))
            points = [((i + 0.5) * width, float(v)) for i, v in enumerate(line.get(field, []))]
            lines.append(Line(name, points, COLOURS[index]))
        pictures.append(chart(title, "seconds", unit, lines))
    return pictures


def _charts(pictures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(f"<div>{one}</div>" for one in pictures if one)}</div>'


def _legend(names: Sequence[str]) -> str:
    entries = [
        f'<span><i style="background:{COLOURS[i % len(COLOURS)]}"></i>{html.escape(name)}</span>'
        for i, name in enumerate(names)
    ]
    return f'<p class="legend">{"".join(entries)}</p>'


def _run_name(one: Series, run: Run, is_one_of_several: bool) -> str:
    if len(one.runs) == 1:
        return run.name
    return f"{one.name}, {run.load}" if is_one_of_several else f"load {run.load}"


def _spread_out(runs: Sequence[tuple[Series, Run]]) -> list[tuple[Series, Run]]:
    """Few enough to tell apart, from the first to the last."""
    if len(runs) <= _MAX_DRAWN:
        return list(runs)
    step = (len(runs) - 1) / (_MAX_DRAWN - 1)
    return [runs[round(i * step)] for i in range(_MAX_DRAWN)]
