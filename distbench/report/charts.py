"""The report's plots that `svg.Plot` does not draw: stacked bars and the timeline of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from distbench.report.svg import WIDTH, ticks
from distbench.runs.text import plain

KINDS: dict[str, int] = {
    "forward": 0,
    "backward": 1,
    "optimizer": 2,
    "data": 3,
    "collective": 4,
    "parameters": 0,
    "gradients": 1,
    "optimizer_state": 2,
    "activations": 3,
    "communication": 4,
    "gathered_parameters": 5,
    "buffers": 6,
    "other": 7,
}
"""Colour of each kind, of time and of memory; any other is the last one's."""
NUM_COLOURS = 8
ROW, LABEL, TOTAL = 24, 210, 120
"""Height of a row, width of its name and of what stands behind its bar."""
FOOT = 26
MAX_SPANS = 3000
"""Of one rank's timeline: beyond it the shortest are left out, and counted."""
MAX_RANKS = 16


@dataclass(frozen=True)
class Bar:
    """One row of a chart: named parts that add up."""

    name: str
    parts: Sequence[tuple[str, float]]
    """(kind, value), in the order they are stacked."""
    total: str
    """What stands behind the bar."""
    meter: str = ""
    faint: bool = False
    """A prediction beside a measurement."""

    @property
    def length(self) -> float:
        return sum(value for _, value in self.parts)


def colour(kind: str) -> str:
    """The CSS class of a kind."""
    return f"k{KINDS.get(kind, NUM_COLOURS - 1)}"


def legend(kinds: Iterable[str]) -> str:
    """Which colour is what."""
    items = (
        f'<span><i class="{colour(kind)}"></i>{escape(plain(kind).replace("_", " "))}</span>'
        for kind in dict.fromkeys(kinds)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def bars(label: str, rows: Sequence[Bar], text: Callable[[float], str], base: int = 10) -> str:
    """Stacked horizontal bars on one scale from zero; `text` writes a value with its unit.

    With `base` 1024 the axis has round numbers of KiB, MiB or GiB.
    """
    longest = max((row.length for row in rows), default=0.0)
    if not longest > 0 or not math.isfinite(longest):
        return '<p class="dim">nothing to show</p>'
    height = ROW * len(rows) + FOOT
    scale = (WIDTH - LABEL - TOTAL) / longest
    unit = float(base ** math.floor(math.log(longest, base)))
    parts = [
        _axis([tick * unit for tick in ticks(0, longest / unit, 6)], lambda value: LABEL + value * scale, height, text)
    ]
    for index, row in enumerate(rows):
        top = index * ROW + 4
        parts.append(_text(LABEL - 8, top + 12, plain(row.name)[:34], "end", "name"))
        x = float(LABEL)
        for kind, value in row.parts:
            width = value * scale
            hint = f"{plain(row.name)}: {plain(kind).replace('_', ' ')} {text(value)}"
            hint += f", {100 * value / row.length:.0f} %" + (f"; {plain(row.meter)}" if row.meter else "")
            style = f"{colour(kind)} faint" if row.faint else colour(kind)
            parts.append(
                f'<rect class="{style}" x="{x:.1f}" y="{top}" width="{max(width, 0.3):.1f}" height="{ROW - 8}">'
                f"<title>{escape(hint)}</title></rect>"
            )
            x += width
        parts.append(_text(x + 6, top + 12, plain(row.total), "start"))
    return _svg(label, height, parts)


@dataclass(frozen=True)
class Span:
    """Something that a rank did in one step, in s from the step's start."""

    kind: str
    name: str
    start: float
    end: float


def timeline(label: str, ranks: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """One step, two lanes a rank: what the training thread did, and below it the collectives."""
    end = max((span.end for _, spans in ranks for span in spans), default=0.0)
    if not end > 0 or not math.isfinite(end):
        return '<p class="dim">no timeline</p>'
    shown = ranks[:MAX_RANKS]
    height = 2 * ROW * len(shown) + FOOT
    scale = (WIDTH - 70 - 12) / end
    parts = [_axis(ticks(0, end * 1e3, 8), lambda ms: 70 + ms / 1e3 * scale, height, lambda ms: f"{ms:g} ms")]
    left_out = 0
    for index, (name, spans) in enumerate(shown):
        top = index * 2 * ROW
        parts.append(_text(62, top + ROW + 4, plain(name)[:10], "end", "name"))
        kept = sorted(spans, key=lambda span: span.start - span.end)[:MAX_SPANS]
        left_out += len(spans) - len(kept)
        for span in kept:
            y = top + (ROW if span.kind == "collective" else 5)
            hint = f"{plain(name)} {plain(span.name)}: {1e3 * (span.end - span.start):.4g} ms from {1e3 * span.start:.4g} ms"
            parts.append(
                f'<rect class="{colour(span.kind)}" x="{70 + span.start * scale:.2f}" y="{y}" '
                f'width="{max((span.end - span.start) * scale, 0.4):.2f}" height="{ROW - 8}">'
                f"<title>{escape(hint)}</title></rect>"
            )
    rest = [f"{len(ranks) - len(shown)} more ranks"] if len(ranks) > len(shown) else []
    rest += [f"the {left_out} shortest spans"] if left_out else []
    note = f'<p class="dim">not shown: {" and ".join(rest)}</p>' if rest else ""
    return _svg(label, height, parts) + note


def _axis(marks: list[float], x: Callable[[float], float], height: int, text: Callable[[float], str]) -> str:
    lines = "".join(
        f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" y2="{height - FOOT}"/>'
        + _text(x(mark), height - 8, text(mark) if mark else "0")
        for mark in marks
    )
    return f"<g>{lines}</g>"


def _text(x: float, y: float, content: str, anchor: str = "middle", kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _svg(label: str, height: int, parts: list[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(plain(label))}">{"".join(parts)}</svg>'
