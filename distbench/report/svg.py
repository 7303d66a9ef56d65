"""Plots as inline SVG: no script, no network, colours from the page's CSS variables, so light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 880, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34
FAR = 1e6
"""Of a plot's own units: where nobody looks."""
CHARACTER = 6.5
"""Width of a character of the labels, at most; they are 11 px high."""
MAX_POINTS = 1500
"""Marks of one plot. Beyond it neighbours share one, which shows the largest of them."""


@dataclass
class Plot:
    """A frame with two axes to draw in."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    label: str
    """What the plot shows, for screen readers."""
    parts: list[str] = field(default_factory=list)

    @classmethod
    def frame(cls, label: str, x_range: tuple[float, float], y_range: tuple[float, float], log: bool = False) -> Plot:
        """Axes with ticks. With `log`, `y_range` is in powers of ten and so must y values be."""
        plot = cls(_scale(x_range, LEFT, WIDTH - RIGHT), _scale(y_range, HEIGHT - BOTTOM, TOP), label)
        for tick in range(math.ceil(y_range[0]), math.floor(y_range[1]) + 1) if log else ticks(*y_range):
            y = plot.y(tick)
            text = f"1e{tick:d}" if log else f"{tick:.6g}"
            plot.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            plot.text(LEFT - 6, y + 4, text, "end")
        return plot

    def text(self, x: float, y: float, content: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>')

    def x_ticks(self, marks: Iterable[tuple[float, str]]) -> None:
        """Labels below the axis, left to right: moved in at the edges, left out where they would overlap."""
        free_from = 0.0
        for value, content in marks:
            half = len(content) * CHARACTER / 2
            at = min(max(self.x(value), half), WIDTH - half)
            if at - half >= free_from:
                self.text(at, HEIGHT - BOTTOM + 16, content)
                free_from = at + half + CHARACTER

    def x_title(self, content: str) -> None:
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, content)

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A polyline; a point that is not finite, or far outside, breaks it."""
        run: list[str] = []
        for x, y in [*points, (math.nan, math.nan)]:
            if abs(self.y(y)) < FAR:
                run.append(f"{self.x(x):.1f},{self.y(y):.1f}")
            elif run:
                if len(run) == 1:
                    cx, cy = run[0].split(",")
                    self.parts.append(f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="3"/>')
                else:
                    self.parts.append(f'<polyline class="{kind}" points="{" ".join(run)}"/>')
                run = []

    def stem(self, x: float, y: float, kind: str, hint: str, bar: tuple[float, float] | None = None) -> None:
        """A dot on a line from the floor, with an error bar where there is an error; `hint` shows on hover."""
        px, py = self.x(x), self.y(y)
        parts = [f"<title>{escape(hint)}</title>"]
        parts.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{HEIGHT - BOTTOM}" y2="{py:.1f}"/>')
        if bar is not None:
            low, high = self.y(bar[0]), self.y(bar[1])
            parts.append(f'<line class="bar" x1="{px:.1f}" x2="{px:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"/>')
        self.parts.append(f'<g class="stem {kind}">{"".join(parts)}</g>')

    def dot(self, x: float, y: float, kind: str, hint: str, name: str = "") -> None:
        """A point with its hint, and its name beside it."""
        px, py = self.x(x), self.y(y)
        self.parts.append(
            f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="5"><title>{escape(hint)}</title></circle>'
        )
        if name:
            near_right = px > WIDTH - RIGHT - 130
            self.text(px + (-9 if near_right else 9), py + 4, name, "end" if near_right else "start")

    def rule(self, y: float, content: str) -> None:
        """A dashed line across, named."""
        at = self.y(y)
        self.parts.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        self.text(WIDTH - RIGHT - 4, at - 4, content, "end")

    def __str__(self) -> str:
        body = "".join(self.parts)
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.label)}">'
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>'
            f"{body}</svg>"
        )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) within a range."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next((factor for factor in (1, 2, 5) if (high - low) / (step * factor) <= count), 10)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def padded(values: Iterable[float]) -> tuple[float, float]:
    """The range of the finite values with some room, never empty."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    if not math.isfinite(room):
        return -1.0, 1.0
    return low - room, high + room


def _scale(domain: tuple[float, float], start: float, stop: float) -> Callable[[float], float]:
    low, high = domain
    factor = (stop - start) / (high - low)
    return lambda value: start + (value - low) * factor
