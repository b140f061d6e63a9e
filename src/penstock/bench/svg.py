"""Charts as SVG text: lines, dots, grouped bars, round numbers. Knows nothing of benchmarks."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Okabe and Ito's colors, which people tell apart however they see them; black and yellow left out.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 16, 40, 46
_NUM_TICKS = 6
_VALUE_HEIGHT = 16  # of a number inside a bar, with its margins
# A page has a style of its own; a picture that is shown as a file brings it along.
_STANDALONE_STYLE = """<style>
text { font: 11px system-ui, sans-serif; fill: #333; }
text.title { font-size: 14px; font-weight: 600; }
text.label { font-size: 12px; }
.grid { stroke: #888; stroke-opacity: 0.27; fill: none; }
@media (prefers-color-scheme: dark) { text { fill: #ddd; } }
text.inside { fill: #fff; font-weight: 600; }
</style>"""


@dataclass(frozen=True, slots=True)
class Line:
    """`notes` are written at its dots; a line without notes has no dots."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str
    notes: Sequence[str] = ()
    is_noted_below: bool = False  # so that two lines close together can both be read
    dash: str = ""  # lengths drawn and left out, as in SVG


@dataclass(frozen=True, slots=True)
class _Axis:
    """Value -> place, from `low` to `high`; logarithmic where `is_log`."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = self.low, self.high, max(value, self.low)
        if self.is_log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return self.begin + (at - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.is_log:
            return _log_ticks(self.low, self.high)
        step = round_step((self.high - self.low) / _NUM_TICKS)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    log_x: bool = False,
    x_from: float = 0.0,
) -> str:
    """One picture; the y axis begins at 0. What lies before `x_from` is drawn at the edge."""
    xs = [max(x, x_from) for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    if not xs:
        return ""
    x_axis = _x_axis(xs, log_x)
    y_axis = _Axis(0.0, max(ys) * 1.08 or 1.0, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        _text(_LEFT, 16, title, "title"),
        *_grid(x_axis, y_axis),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "label", "middle"),
        _text(_LEFT, _TOP - 6, y_label, "label"),
        *(_drawn(line, x_axis, y_axis) for line in lines),
        "</svg>",
    ]
    return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class BarGroup:
    """Bars side by side, one for each series; None: there is none."""

    name: str
    values: Sequence[float | None]


def bar_chart(
    title: str, panels: Mapping[str, Sequence[BarGroup]], series: Sequence[str], high: float
) -> str:
    """A file of its own: panels one below the other, bars from 0 to `high` with their values."""
    panel_height = 150
    width, left, top = 760, 44, 52
    height = top + panel_height * len(panels) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(title)}">',
        _STANDALONE_STYLE,
        _text(left, 18, title, "title"),
    ]
    for i, name in enumerate(series):
        x = left + 110 * i
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{COLORS[i]}"/>')
        parts.append(_text(x + 18, 38, name, "label"))
    for i, (name, groups) in enumerate(panels.items()):
        floor = top + panel_height * i + 124
        y_axis = _Axis(0.0, high, floor, floor - 96)
        parts.append(_text(left, floor - 104, name, "label"))
        for value in y_axis.ticks():
            y = y_axis.place(value)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}H{width - 8}"/>')
            parts.append(_text(left - 6, y + 4, short(value), "tick", "end"))
        parts += _bars(groups, y_axis, left, (width - 8 - left) / len(groups))
    return "\n".join([*parts, "</svg>\n"])


def _bars(groups: Sequence[BarGroup], y_axis: _Axis, left: float, pitch: float) -> list[str]:
    parts = []
    for i, group in enumerate(groups):
        wide = 0.76 * pitch / len(group.values)
        for j, value in enumerate(group.values):
            x = left + pitch * (i + 0.12) + wide * j
            if value is None:
                parts.append(_text(x + wide / 2, y_axis.begin - 4, "n/a", "tick", "middle"))
                continue
            y = y_axis.place(min(value, y_axis.high))
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide - 2:.1f}" '
                f'height="{y_axis.begin - y:.1f}" fill="{COLORS[j]}"/>'
            )
            # Inside, where no line of the grid runs through it.
            is_inside = y_axis.begin - y >= _VALUE_HEIGHT
            parts.append(
                _text(
                    x + wide / 2 - 1,
                    y + 12 if is_inside else y - 4,
                    f"{value:.0f}",
                    "inside" if is_inside else "tick",
                    "middle",
                )
            )
        parts.append(
            _text(left + pitch * (i + 0.5), y_axis.begin + 14, group.name, "tick", "middle")
        )
    return parts


def swatch(line: Line) -> str:
    """A piece of it, for a legend."""
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    stroke = f'stroke="{line.color}" stroke-width="3"{dash}'
    return f'<svg viewBox="0 0 30 12"><path {stroke} d="M0 6H30"/></svg>'


def round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))


def short(value: float) -> str:
    """1234567 -> "1.2M", 0.05 -> "0.05"."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def _x_axis(xs: Sequence[float], log_x: bool) -> _Axis:
    low, high = min(xs), max(xs)
    is_log = log_x and low > 0 and high > 20 * low
    if is_log:
        return _Axis(low, high, _LEFT, _WIDTH - _RIGHT, is_log=True)
    return _Axis(0.0, high * 1.05 or 1.0, _LEFT, _WIDTH - _RIGHT)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) < 5 else (1,)
    found = [n * 10.0**power for power in powers for n in steps]
    return [one for one in found if low <= one <= high]


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, short(value), "tick", "end"))
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, short(value), "tick", "middle"))
    return parts


def _drawn(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    parts = [f'<path class="line" stroke="{line.color}"{dash} d="M{path}"/>']
    for (x, y), point, note in zip(places, line.points, line.notes, strict=False):
        told = html.escape(f"{line.name}, {note}: {short(point[0])}, {short(point[1])}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.color}">'
            f"<title>{told}</title></circle>"
        )
        side = "end" if x > _WIDTH - _RIGHT - 40 else "start"
        note_y = y + 15 if line.is_noted_below else y - 6
        parts.append(_text(x + (-7 if side == "end" else 7), note_y, note, "note", side))
    return "\n".join(parts)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{html.escape(text)}</text>"
    )
