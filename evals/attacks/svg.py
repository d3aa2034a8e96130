"""Line plots as inline SVG, without scripts or anything from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from evals.attacks.model import Plot

_WIDTH: Final = 420
_HEIGHT: Final = 260
_LEFT: Final = 58
_TOP: Final = 12
_RIGHT: Final = 12
_BOTTOM: Final = 44
_LEGEND_LINE: Final = 15
# Told apart without colour by their dashes.
_STYLES: Final = (
    ("#1f6feb", ""), ("#d1242f", "6 3"), ("#1a7f37", "2 2"), ("#8250df", "8 2 2 2"), ("#9a6700", "1 3"),
    ("#57606a", "10 4"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        """Where a value lies between the ends: 0 to 1."""
        if self.log:
            value = math.log10(value)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Values with labels; the values of a logarithmic axis are powers of ten."""
        if self.log:
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            return [(10.0**e, f"1e{e}") for e in exponents[:: max(1, (len(exponents) - 1) // 5 + 1)]]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 4))
        step = next(step * f for f in (1, 2, 5, 10) if span / (step * f) <= 6)
        first = math.ceil(self.low / step - 1e-9)
        count = int((self.high - first * step) / step + 1e-9) + 1
        return [((first + i) * step, f"{(first + i) * step:.6g}") for i in range(count)]


def plot_svg(plot: Plot) -> str:
    """``plot`` as an ``<svg>`` element. Points that its axes cannot show are left out."""
    curves = [
        (curve.label, [p for p in zip(curve.x, curve.y, strict=True) if _shown(p, plot)])
        for curve in plot.curves
    ]
    points = [p for _, own in curves for p in own]
    height = _HEIGHT + _LEGEND_LINE * len(curves)
    head = (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(plot.title)}">'
        f"<title>{escape(plot.title)}</title>"
    )
    if not points:
        return f'{head}<text x="{_LEFT}" y="40">nothing to show</text></svg>'
    x_axis = _axis([p[0] for p in points], log=plot.log_x)
    y_axis = _axis([p[1] for p in points], log=plot.log_y)
    parts = [head, *_frame(plot, x_axis, y_axis)]
    for i, (label, own) in enumerate(curves):
        colour, dashes = _STYLES[i % len(_STYLES)]
        style = f'stroke="{colour}" stroke-dasharray="{dashes}"'
        path = " ".join(f"{_x(x_axis, x):.1f},{_y(y_axis, y):.1f}" for x, y in own)
        if len(own) == 1:
            x, y = own[0]
            parts.append(f'<circle cx="{_x(x_axis, x):.1f}" cy="{_y(y_axis, y):.1f}" r="3" fill="{colour}"/>')
        elif own:
            parts.append(f'<polyline points="{path}" fill="none" stroke-width="1.5" {style}/>')
        line = _HEIGHT + _LEGEND_LINE * i + 6
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + 24}" y1="{line}" y2="{line}" stroke-width="2" {style}/>'
            f'<text x="{_LEFT + 30}" y="{line + 4}">{escape(label)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _shown(point: tuple[float, float], plot: Plot) -> bool:
    x, y = point
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not plot.log_x) and (y > 0 or not plot.log_y)


def _axis(values: Sequence[float], *, log: bool) -> _Axis:
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
        if math.floor(high) < math.ceil(low):
            # No power of ten in between to be a tick.
            low, high = float(math.floor(low)), float(math.ceil(high))
    if high - low < 1e-12 * max(1.0, abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    return _Axis(low, high, log)


def _x(axis: _Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: _Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.place(value) * (_HEIGHT - _TOP - _BOTTOM)


def _frame(plot: Plot, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" '
        'stroke="currentColor" stroke-opacity="0.4"/>'
    ]
    for value, label in x_axis.ticks():
        x = _x(x_axis, value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" stroke="currentColor"/>'
            f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{label}</text>'
        )
    for value, label in y_axis.ticks():
        y = _y(y_axis, value)
        parts.append(
            f'<line x1="{_LEFT - 4}" x2="{_LEFT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor"/>'
            f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text x="{(_LEFT + right) / 2}" y="{bottom + 31}" text-anchor="middle">'
        f"{escape(plot.x_label)}</text>"
        f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y_label)}</text>"
    )
    return parts
