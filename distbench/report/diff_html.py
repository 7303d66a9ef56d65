"""`distbench diff --html`: one self-contained page. Nothing is loaded, nothing runs, and all text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from distbench.report.diff_console import figure, loss_text, number, tensors_text, value_texts, with_error
from distbench.report.page import document
from distbench.report.svg import MAX_POINTS, Plot, padded, ticks
from distbench.runs.diff import Diff, LossDifference
from distbench.runs.diff_rows import Row, Tensors
from distbench.runs.text import plain

MAX_ROWS = 2000
"""Of one table; the rest is counted, and in the JSON."""


def to_html(found: Diff) -> str:
    """The whole comparison as one page."""
    body = [
        "<h1>distbench diff</h1>",
        f'<p class="verdict{" bad" if found.differs else ""}">{_e(found.verdict())}</p>',
        _sides(found),
        _sentences("What it points to", found.reading),
        _settings(found),
    ]
    if found.losses is not None:
        body += ["<h2>Losses</h2>", f"<p>{_e(loss_text(found.losses))}</p>", _loss_plots(found.losses)]
    if found.gradients:
        first = found.first_gradients or found.gradients[0]
        body.append("<h2>Gradients</h2>")
        body += [_tensors(part, found.tolerance, is_open=part is first) for part in found.gradients]
    if found.weights is not None:
        body += ["<h2>Weights</h2>", _tensors(found.weights, found.tolerance, is_open=True)]
    body.append(_sentences("Notes", found.notes))
    return document("distbench diff", "".join(body))


def _e(text: str) -> str:
    return escape(plain(text))


def _sides(found: Diff) -> str:
    rows = []
    for name, side in (("A", found.a), ("B", found.b)):
        facts = "; ".join(_e(fact) for fact in (side.kind.value, side.status, side.gate) if fact)
        rows.append(
            f'<span class="tag {name.lower()}">{name}</span><span><code>{_e(str(side.path))}</code><br>{facts}</span>'
        )
    return f'<div class="sides">{"".join(rows)}</div><p class="dim">Relative differences are |A - B| / |B|.</p>'


def _sentences(title: str, sentences: list[str]) -> str:
    if not sentences:
        return ""
    return f"<h2>{title}</h2><ul>{''.join(f'<li>{_e(sentence)}</li>' for sentence in sentences)}</ul>"


def _settings(found: Diff) -> str:
    if not found.settings:
        return ""
    rows: list[tuple[bool, tuple[str, ...]]] = [
        (False, (setting.section, setting.key, *value_texts(setting), setting.unused)) for setting in found.settings
    ]
    return f"<h2>Settings that differ</h2>{_table(('section', 'setting', 'A', 'B', ''), rows, numeric=())}"


def _table(headings: tuple[str, ...], rows: list[tuple[bool, tuple[str, ...]]], numeric: tuple[int, ...]) -> str:
    """Cells are escaped here. A row's flag marks it as bad."""

    def cells(values: tuple[str, ...], tag: str) -> str:
        classes = ["n" if index in numeric else "k" if index < 2 else "" for index in range(len(values))]
        return "".join(f'<{tag} class="{c}">{_e(v)}</{tag}>' for c, v in zip(classes, values, strict=True))

    lines = [f'<tr class="{"bad" if bad else ""}">{cells(values, "td")}</tr>' for bad, values in rows[:MAX_ROWS]]
    rest = f'<p class="dim">and {len(rows) - MAX_ROWS} more rows</p>' if len(rows) > MAX_ROWS else ""
    return f'<div class="scroll"><table><tr>{cells(headings, "th")}</tr>{"".join(lines)}</table></div>{rest}'


def _loss_plots(losses: LossDifference) -> str:
    steps = losses.steps[:: -(-len(losses.steps) // MAX_POINTS)]
    index = {step: i for i, step in enumerate(losses.steps)}
    curves = {
        side: [(step, values[index[step]]) for step in steps] for side, values in (("a", losses.a), ("b", losses.b))
    }
    x_range = (steps[0], steps[-1]) if steps[0] < steps[-1] else (steps[0] - 1, steps[0] + 1)
    plot = Plot.frame("loss of both runs by step", x_range, padded(y for curve in curves.values() for _, y in curve))
    for side, curve in curves.items():
        plot.line(curve, side)
    _step_axis(plot, x_range)
    legend = '<p class="legend"><span><i style="background:var(--a)"></i>A</span>'
    legend += '<span><i style="background:var(--b)"></i>B, dashed</span></p>'
    return legend + str(plot) + _loss_differences(losses, x_range)


def _loss_differences(losses: LossDifference, x_range: tuple[float, float]) -> str:
    points = [
        (step, math.log10(relative))
        for step, a, b in zip(losses.steps, losses.a, losses.b, strict=True)
        if b != 0 and 0 < (relative := abs(a - b) / abs(b)) < math.inf
    ]
    if not points:
        return ""
    points = points[:: -(-len(points) // MAX_POINTS)]
    low, high = min(y for _, y in points), max(y for _, y in points)
    plot = Plot.frame("relative difference of losses", x_range, (math.floor(low), math.floor(high) + 1), log=True)
    plot.line(points, "d")
    _step_axis(plot, x_range)
    return f'<p class="dim">relative difference of the losses, where they differ</p>{plot}'


def _step_axis(plot: Plot, x_range: tuple[float, float]) -> None:
    plot.x_ticks((tick, f"{tick:.0f}") for tick in ticks(*x_range, count=8) if tick == int(tick))
    plot.x_title("step")


def _tensors(part: Tensors, tolerance: float, is_open: bool) -> str:
    notes = "".join(f"<p>{_e(note)}</p>" for note in [*part.notes, *part.replicas])
    for side, names in (("A", part.only_a), ("B", part.only_b)):
        if names:
            listed = ", ".join(f"<code>{_e(name)}</code>" for name in names[:MAX_ROWS])
            notes += f"<p>only in {side} ({len(names)}): {listed}</p>"
    content = notes + _parameter_plot(part, tolerance) + _parameter_table(part)
    mark = '<span class="tag" style="color:var(--bad)">differs</span> ' if part.differs else ""
    summary = f"<summary>{mark}{_e(tensors_text(part))}</summary>"
    return f"<details{' open' if is_open else ''}>{summary}{content}</details>"


def _parameter_table(part: Tensors) -> str:
    headings = ("parameter", "", "relative", "cosine", "alpha", "|A|", "|B|", "detail")
    rows: list[tuple[bool, tuple[str, ...]]] = [
        (
            row.differs,
            (
                row.name,
                row.relation + (" (uncertain)" if row.uncertain else ""),
                figure(row),
                with_error(row.cosine, row.cosine_error),
                with_error(row.alpha, row.alpha_error),
                number(row.norm_a),
                number(row.norm_b),
                row.detail,
            ),
        )
        for row in part.rows
    ]
    return _table(headings, rows, numeric=(2, 3, 4, 5, 6))


def _parameter_plot(part: Tensors, tolerance: float) -> str:
    """Relative difference of every parameter, in the order of the model, on a logarithmic axis."""
    rows = _thinned(part)
    figures = [figure for row in rows if row.relative for figure in _likely(row)]
    if not figures and not any(_has_no_figure(row) for row in rows):  # all equal: the sentence above has said it
        return ""
    low = math.floor(math.log10(min(figures, default=1e-8))) - 1
    high = math.floor(math.log10(max(figures, default=1e-7))) + 1
    shown_tolerance = math.log10(tolerance) if tolerance > 0 and low < math.log10(tolerance) < high + 2 else None
    if shown_tolerance is not None:
        high = max(high, math.floor(shown_tolerance) + 1)
    plot = Plot.frame("relative difference by parameter", (-0.5, len(rows) - 0.5), (low, high), log=True)
    for index, row in enumerate(rows):
        hint = f"{plain(row.name)}: {figure(row)} {row.relation} {plain(row.detail)}"
        if row.relative:
            least, most = _likely(row)
            bar = None if row.exact else (math.log10(least), math.log10(most))
            plot.stem(index, math.log10(row.relative), "exact" if row.exact else "estimated", hint, bar)
        elif _has_no_figure(row):
            plot.stem(index, high, "undefined", hint)
        else:
            plot.stem(index, low, "equal", hint)
    if shown_tolerance is not None:
        plot.rule(shown_tolerance, f"tolerance {tolerance:g}")
    plot.x_ticks(_name_ticks(rows))
    plot.x_title("parameters in the order of the model (hover for names)")
    legend = [
        ("--a", "exact"),
        ("--estimate", "estimated, bar: 95 %"),
        ("--good", "equal"),
        ("--bad", "no figure: see table"),
    ]
    items = "".join(f'<span><i style="background:var({colour})"></i>{text}</span>' for colour, text in legend)
    return f'<p class="legend">{items}</p>{plot}'


def _likely(row: Row) -> tuple[float, float]:
    """Between which relative differences the true one is in 95 % of cases."""
    if not (row.relative and row.distance and row.distance_low and row.distance_high):
        return row.relative or 0.0, row.relative or 0.0
    return row.relative * (row.distance_low / row.distance), row.relative * (row.distance_high / row.distance)


def _has_no_figure(row: Row) -> bool:
    """Differs, and no relative difference says how far: NaN, None, another shape, a reference that is zero."""
    return row.relation not in ("bitwise", "equal") and row.relative is None


def _thinned(part: Tensors) -> list[Row]:
    """Rows in the order of the model; beyond MAX_POINTS the worst of each group of neighbours."""
    by_name = {row.name: row for row in part.rows}
    rows = [by_name[name] for name in part.order]
    size = max(1, -(-len(rows) // MAX_POINTS))
    return [max(rows[i : i + size], key=lambda row: row.severity) for i in range(0, len(rows), size)]


def _name_ticks(rows: list[Row]) -> Iterable[tuple[float, str]]:
    """Where a new block begins, by the first two parts of its names."""
    starts: list[tuple[float, str]] = []
    previous = None
    for index, row in enumerate(rows):
        block = ".".join(row.name.split(".")[:2])
        if block != previous:
            starts.append((index, plain(block)[:18]))
        previous = block
    return starts
