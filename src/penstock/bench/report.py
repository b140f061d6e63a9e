"""Results as one HTML page: a table and charts, nothing to load from elsewhere."""

import html
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.bench.results import FIGURES, Run, Series
from penstock.bench.svg import COLORS, Line, chart, swatch

_MAX_DRAWN = 6  # runs in one chart of distributions or of a time line
_DASHES = ("", "7 4", "2 3", "9 3 2 3")  # of one series each, where several are drawn
_EDGE = 5  # per cent of a distribution that may lie before the chart's edge
_DISTRIBUTIONS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Between two chunks",
    "e2el": "Whole response",
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
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
svg .title { font-weight: 600; font-size: 14px; }
svg .tick, svg .label { fill: var(--soft); }
svg .note { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: .6; fill: none; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; color: var(--soft); }
.legend svg { width: 2em; height: .8em; margin-right: .4em; }
"""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One run in the charts. One load has one color, one series one dash."""

    name: str
    run: Run
    color: str
    dash: str = ""

    def line(self, points: Sequence[tuple[float, float]]) -> Line:
        return Line(self.name, points, self.color, dash=self.dash)


def page(series: Sequence[Series]) -> str:
    runs = [(one, run) for one in series for run in one.runs]
    models = dict.fromkeys(str(run.record.get("model_id", one.name)) for one, run in runs)
    title = f"Serving benchmark: {', '.join(models)}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_about(runs))}</p>",
        "<h2>Figures</h2>",
        _table(runs),
    ]
    if len(runs) > 1:
        body.append(_section("Throughput against latency", *_throughput(series)))
    drawn = [one for one in _chosen(series) if one.run.extra("timeline")]
    body.append(_section("Distributions", *_distributions(drawn)))
    body.append(_section("Over time", *_time_lines(drawn)))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _about(runs: Sequence[tuple[Series, Run]]) -> str:
    records = [run.record for _, run in runs]
    requests = sum(int(one["completed"]) for one in records)
    dates = sorted({_date(str(one.get("date", ""))) for one in records})
    counted = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return ", ".join((counted, f"{requests:,} requests", " to ".join((dates[0], *dates[1:][-1:]))))


def _date(text: str) -> str:
    """20261115-120000 -> "2026-11-15 12:00"."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.strptime(text, "%Y%m%d-%H%M%S"))
    except ValueError:
        return text


def _table(runs: Sequence[tuple[Series, Run]]) -> str:
    shown = [
        (name, title)
        for name, title, _ in FIGURES
        if any(run.value(name) is not None for _, run in runs)
    ]
    heads = "".join(f"<th>{html.escape(title)}</th>" for _, title in shown)
    rows = []
    for one, run in runs:
        cells = ["" if (value := run.value(name)) is None else _cell(value) for name, _ in shown]
        first = html.escape(_run_name(one, run, True))
        rows.append(f"<tr><td>{first}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f'<div class="wide"><table><tr><th>run, load</th>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _cell(value: float) -> str:
    """Four digits or so."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _throughput(series: Sequence[Series]) -> tuple[list[Line], list[str]]:
    """A dot for each load, which is written at it."""
    pictures = []
    for name, title, x_label in (
        ("median_tpot_ms", "Against time per token", "median time per output token, ms"),
        ("median_ttft_ms", "Against time to first token", "median time to first token, ms"),
    ):
        lines = []
        for index, one in enumerate(series):
            runs = [run for run in one.runs if run.value(name) is not None]
            points = [
                (run.value(name) or 0.0, run.value("output_throughput") or 0.0) for run in runs
            ]
            color, notes = COLORS[index % len(COLORS)], [run.load for run in runs]
            lines.append(Line(one.name, points, color, notes, is_noted_below=index % 2 == 1))
        pictures.append(chart(title, x_label, "output tok/s", lines))
    return lines, pictures


def _distributions(drawn: Sequence[_Drawn]) -> tuple[list[Line], list[str]]:
    pictures = []
    for metric, title in _DISTRIBUTIONS.items():
        lines, edges = [], []
        for one in drawn:
            values = one.run.extra("quantiles_ms").get(metric, [])
            lines.append(one.line([(float(value), float(i)) for i, value in enumerate(values)]))
            edges += [float(value) for value in values[_EDGE : _EDGE + 1]]
        unit = "% of chunks" if metric == "itl" else "% of requests"
        edge = min(edges, default=0.0)
        pictures.append(chart(title, "ms, at most", unit, lines, log_x=True, x_from=edge))
    return [one.line([]) for one in drawn], pictures


def _time_lines(drawn: Sequence[_Drawn]) -> tuple[list[Line], list[str]]:
    pictures = []
    for field, title, unit in (
        ("tokens_per_s", "Tokens as they arrived", "tok/s"),
        ("running", "Requests under way", "requests"),
    ):
        lines = []
        for one in drawn:
            line = one.run.extra("timeline")
            width = float(line.get("bin_s", 1.0))
            values = line.get(field, [])
            lines.append(one.line([((i + 0.5) * width, float(v)) for i, v in enumerate(values)]))
        pictures.append(chart(title, "seconds", unit, lines))
    return [one.line([]) for one in drawn], pictures


def _section(title: str, lines: Sequence[Line], pictures: Sequence[str]) -> str:
    """A legend and charts, or nothing where no file has what they show."""
    charts = "".join(f"<div>{one}</div>" for one in pictures if one)
    if not charts:
        return ""
    legend = "".join(f"<span>{swatch(line)}{html.escape(line.name)}</span>" for line in lines)
    return f'<h2>{title}</h2><p class="legend">{legend}</p><div class="charts">{charts}</div>'


def _run_name(one: Series, run: Run, is_one_of_several: bool) -> str:
    if len(one.runs) == 1:
        return run.name
    return f"{one.name}, {run.load}" if is_one_of_several else f"load {run.load}"


def _chosen(series: Sequence[Series]) -> list[_Drawn]:
    """Few enough to tell apart: loads from the lowest to the highest, of every series the same."""
    if all(len(one.runs) == 1 for one in series):
        return [
            _Drawn(one.runs[0].name, one.runs[0], color)
            for one, color in zip(series, COLORS, strict=False)
        ]
    loads = list(dict.fromkeys(run.load for one in series for run in one.runs))
    num = min(len(loads), max(2, _MAX_DRAWN // len(series)))
    places = [round(i * (len(loads) - 1) / max(1, num - 1)) for i in range(num)]
    colors = {loads[place]: COLORS[i] for i, place in enumerate(places)}
    return [
        _Drawn(
            _run_name(one, run, len(series) > 1),
            run,
            colors[run.load],
            _DASHES[index % len(_DASHES)],
        )
        for index, one in enumerate(series)
        for run in one.runs
        if run.load in colors
    ]
