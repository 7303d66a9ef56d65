"""`distbench report`: the decision, its reasons and its plots as one page. Nothing is loaded, and all text is escaped."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from distbench.errors import RunFolderError
from distbench.report.charts import KINDS, NUM_COLOURS, Bar, Span, bars, legend, timeline
from distbench.report.decision import (
    COLUMNS,
    LEGEND,
    NUMERIC,
    Row,
    candidate_row,
    decision_rows,
    headline,
    other_lines,
    short_name,
)
from distbench.report.page import document
from distbench.report.svg import MAX_POINTS, Plot, padded, ticks
from distbench.runs.candidates import Figure, as_tree
from distbench.runs.folder import read_record
from distbench.runs.rank import Candidate, Ranking
from distbench.runs.sides import MAX_GATE_BYTES, is_measurable, number_of, read_losses, read_text
from distbench.runs.text import plain, readable_bytes

SHOWN = tuple(column for column in COLUMNS if column != "verdict")
"""The reason says it."""
MAX_ROWS = 2000
"""Of the decision's table; the rest is counted, and in decision.json."""
MAX_BARS = 40
MAX_DETAILS = 60
"""Candidates with a timeline and gradients of their own: the choice, the front, then by step time."""
MAX_CURVES = 7
MAX_CURVE_POINTS = 400

STYLE = """
:root { --k0:#3b6fb6; --k1:#57b5d8; --k2:#2f8f4e; --k3:#c9a227; --k4:#d9566a; --k5:#9a4a8f; --k6:#8a6a4f; --k7:#9aa1a9 }
@media (prefers-color-scheme: dark) { :root { --k0:#6f9fe0; --k1:#6fcbe8; --k2:#58b877; --k3:#d9bb55; --k4:#ef7a8b;
  --k5:#c47fbb; --k6:#b8957a; --k7:#7c848d } }
.k0{fill:var(--k0);background:var(--k0)} .k1{fill:var(--k1);background:var(--k1)} .k2{fill:var(--k2);background:var(--k2)}
.k3{fill:var(--k3);background:var(--k3)} .k4{fill:var(--k4);background:var(--k4)} .k5{fill:var(--k5);background:var(--k5)}
.k6{fill:var(--k6);background:var(--k6)} .k7{fill:var(--k7);background:var(--k7)}
rect.faint { opacity:.5 } svg text.name { fill:var(--fg) }
polyline.k0,polyline.k1,polyline.k2,polyline.k3,polyline.k4,polyline.k5,polyline.k6,polyline.k7 {
  fill:none; background:none }
polyline.k0{stroke:var(--k0)} polyline.k1{stroke:var(--k1)} polyline.k2{stroke:var(--k2)} polyline.k3{stroke:var(--k3)}
polyline.k4{stroke:var(--k4)} polyline.k5{stroke:var(--k5)} polyline.k6{stroke:var(--k6)}
polyline.k7{stroke:var(--k7)}
polyline.k1{stroke-dasharray:14 6} polyline.k2{stroke-dasharray:8 8} polyline.k3{stroke-dasharray:3 9}
polyline.k4{stroke-dasharray:10 12} polyline.k5{stroke-dasharray:5 15} polyline.k6{stroke-dasharray:8 3}
polyline.k7{stroke-dasharray:2 18}
body { max-width:1360px }
h3 { font-size:14px; margin:14px 0 4px } caption { text-align:left; color:var(--dim); padding-bottom:4px }
table { font-size:13px }
td,th[scope=row] { white-space:nowrap }
th { vertical-align:bottom } td.why { white-space:normal; min-width:260px }
tbody th { vertical-align:top }
tr.chosen td,tr.chosen th { background:var(--card);
  font-weight:600 } tr.unranked td { color:var(--dim) } td[title] { cursor:help } section { break-inside:avoid }
dl { display:grid; grid-template-columns:auto 1fr; gap:2px 14px; margin:6px 0 } dt { color:var(--dim) } dd { margin:0 }
@media print { :root { color-scheme:light; --fg:#000; --dim:#444; --bg:#fff; --card:#f4f4f4; --line:#ccc; --k0:#3b6fb6;
    --k1:#57b5d8; --k2:#2f8f4e; --k3:#c9a227; --k4:#d9566a; --k5:#9a4a8f; --k6:#8a6a4f; --k7:#9aa1a9 }
  @page { size:A4 landscape; margin:12mm } body { max-width:none; padding:0; font-size:11px } table { font-size:9px }
  * { print-color-adjust:exact; -webkit-print-color-adjust:exact } svg,tr,details { break-inside:avoid }
  h2 { break-after:avoid }
  td.n { font-size:9px; white-space:nowrap } .scroll { overflow:visible } td,th { white-space:normal; padding-right:6px } }
"""


def to_html(ranking: Ranking, title: str) -> str:
    """The whole report. Records of the candidates that plots show are read again, one after another."""
    shown = _in_view(ranking.candidates)
    details = [_Detail(candidate) for candidate in shown[:MAX_DETAILS]]
    body = [
        f"<h1>distbench report</h1><p class='dim'>{_e(title)}</p>",
        f'<p class="verdict{"" if ranking.chosen else " bad"}">{_e(headline(ranking))}</p>',
        _lines(other_lines(ranking)),
        _table(ranking),
        _meters(ranking.candidates),
        _front(ranking.candidates),
        _bar_section(
            "Time",
            SPLIT,
            details,
            _Detail.time_bars,
            _ms,
            10,
        ),
        _bar_section(
            "Memory",
            "by kind at the peak of a tracked step, and below it as predicted",
            details,
            _Detail.memory_bars,
            readable_bytes,
            1024,
        ),
        _scaling(ranking.candidates),
        _losses(details),
        _runs(details, len(shown) - len(details)),
    ]
    return document("distbench report", "".join(body), STYLE)


SPLIT = (
    "where a step's time goes, slowest rank, in ms: medians of its parts, whose sum is not the median of the whole; of each "
    "candidate's first run"
)


def _e(text: object) -> str:
    return escape(plain(text))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _lines(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{_e(line)}</li>' for line in lines)}</ul>" if lines else ""


def _in_view(candidates: list[Candidate]) -> list[Candidate]:
    """The choice, the front, the rest; each by step time."""
    return sorted(candidates, key=lambda candidate: (not candidate.chosen, not candidate.pareto))


# --- the table


def _table(ranking: Ranking) -> str:
    rows = decision_rows(ranking)
    if not rows:
        return ""
    head = "".join(f'<th scope="col" class="{"n" if c in NUMERIC else ""}">{_e(c)}</th>' for c in (*SHOWN, "why"))
    lines = "".join(map(_table_row, rows[:MAX_ROWS]))
    rest = f'<p class="dim">and {len(rows) - MAX_ROWS} more, in decision.json</p>' if len(rows) > MAX_ROWS else ""
    rule = f"rule: {ranking.decide.rule.name}. {LEGEND.replace('   ', '; ')}"
    return (
        f'<h2>Decision</h2><div class="scroll"><table><caption>{_e(rule)}. Hover a figure for its meter.</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>{rest}"
    )


def _table_row(row: Row) -> str:
    figures = _figures(row.candidate) if row.candidate else {}
    cells = []
    for column in SHOWN:
        hint = _hint(figures[column]) if column in figures else ""
        kind = "n" if column in NUMERIC else ""
        text = _e(row.cells[column])
        if column == "run":
            name = row.candidate.name if row.candidate else row.cells["run"]
            cells.append(f'<th scope="row" title="{_e(name)}">{text}</th>')
        else:
            cells.append(f'<td class="{kind}"{f" title={chr(34)}{_e(hint)}{chr(34)}" if hint else ""}>{text}</td>')
    state = "chosen" if row.chosen else "" if row.ranked else "unranked"
    return f'<tr class="{state}">{"".join(cells)}<td class="why">{_e(row.why)}</td></tr>'


def _figures(candidate: Candidate) -> dict[str, Figure]:
    step = candidate.runs[0].step_time
    return {
        "parallel err": candidate.parallel_error,
        "precision err": candidate.precision_error,
        "peak memory": candidate.memory,
        "exposed comm": candidate.exposed,
        "ms/step": step,
        "tokens/s": candidate.tokens,
    }


def _hint(figure: Figure) -> str:
    if figure.value is None:
        return f"missing: {figure.reason}"
    return f"meter: {figure.meter or 'not recorded'}"


def _meters(candidates: list[Candidate]) -> str:
    """What each column was measured with, and how often nothing was measured."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for candidate in candidates:
        for column, figure in _figures(candidate).items():
            found[column][_hint(figure).removeprefix("meter: ")] += 1
    if not found:
        return ""
    items = "".join(
        f"<dt>{_e(column)}</dt><dd>{_e('; '.join(f'{meter} ({count})' for meter, count in meters.most_common(4)))}</dd>"
        for column, meters in found.items()
    )
    return f"<details><summary>Meters</summary><dl>{items}</dl></details>"


def _front(candidates: list[Candidate]) -> str:
    """Step time against peak memory: what a choice is between."""
    points = [(c, 1e3 * c.step_time[0], c.memory.value / 2**20) for c in candidates if c.memory.value is not None]
    if len(points) < 2:
        return ""
    step = max(1, -(-len(points) // MAX_POINTS))
    points = [point for index, point in enumerate(points) if index % step == 0 or point[0].pareto]
    x_range, y_range = padded(x for _, x, _ in points), padded(y for _, _, y in points)
    plot = Plot.frame("peak memory in MiB over step time in ms", x_range, y_range)
    for candidate, x, y in reversed(points):  # the choice last, on top
        kind = "k2" if candidate.chosen else "k0" if candidate.pareto else "k7"
        name = short_name(candidate.name) if candidate.pareto or len(points) <= 20 else ""
        plot.dot(x, y, kind, f"{plain(candidate.name)}: {x:.4g} ms, {y:,.4g} MiB; {plain(candidate.reason)}", name)
    plot.x_ticks((tick, f"{tick:.6g}") for tick in ticks(*x_range, count=8))
    plot.x_title("step time in ms")
    items = (("k2", "chosen"), ("k0", "on the Pareto front"), ("k7", "dominated beyond noise, or memory not compared"))
    named = "".join(f'<span><i class="{kind}"></i>{text}</span>' for kind, text in items)
    return (
        "<section><h2>Step time and memory</h2><p class='dim'>peak memory in MiB over step time in ms</p>"
        f'<p class="legend">{named}</p>{plot}</section>'
    )


# --- one candidate's own record


class _Detail:
    """A candidate's first run, read again for what a row does not hold."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate, self.run = candidate, candidate.runs[0]
        self.problems: list[str] = []
        try:
            record = read_record(self.run.path)
        except RunFolderError as error:
            record = {}
            self.problems.append(str(error))
        self.window = as_tree(record.get("window"))

    @property
    def label(self) -> str:
        """As the table names it."""
        labels = self.candidate.labels
        return f"{short_name(self.candidate.name)} {labels['strategy']} {labels['precision']}"

    def time_bars(self) -> list[Bar]:
        split = as_tree(self.window.get("split"))
        parts = [(kind, value) for kind in split if kind != "rank" and (value := _value(split[kind])) is not None]
        total = sum(value for _, value in parts)
        return [Bar(self.label, parts, _ms(total), f"rank {split.get('rank', '?')}")] if total > 0 else []

    def memory_bars(self) -> list[Bar]:
        found = []
        for key, name, faint in (("memory_by_kind", self.label, False), ("memory_predicted", "predicted", True)):
            tree = as_tree(self.window.get(key))
            parts = [(kind, value) for kind in tree if kind in KINDS and (value := _value(tree[kind])) is not None]
            if parts and sum(value for _, value in parts) > 0:
                total = readable_bytes(sum(value for _, value in parts))
                meter = f"{'closed form' if faint else 'tracked step'}, rank {tree.get('rank', '?')}"
                found.append(Bar(name, parts, total, meter, faint))
        return found if found and not found[0].faint else []

    def missing(self) -> list[tuple[str, str]]:
        """What the plots above leave out of this run, and why."""
        reason = self.window.get("memory_by_kind_reason")
        return [("memory by kind", f"missing: {reason}")] if reason and not self.memory_bars() else []

    def timeline(self) -> str:
        ranks = []
        for index, entry in enumerate(_rank_entries(self.window.get("timeline"))):
            spans = [span for part in entry if (span := _span(part)) is not None]
            if spans:
                ranks.append((f"rank {index}", spans))
        if not ranks:
            return '<p class="dim">no timeline in the record</p>'
        kinds = [kind for kind in KINDS if any(span.kind == kind for _, spans in ranks for span in spans)]
        return legend(kinds) + timeline(f"one measured step of {self.label}, per rank", ranks)

    def gradients(self) -> str:
        """Margin of each parameter: its error over its bound; 1 is the bound."""
        path = self.run.path / "gate.json"
        if not path.exists():
            return '<p class="dim">no gate.json</p>'
        try:
            rows = json.loads(read_text(path, MAX_GATE_BYTES))["gradients"]
            found = [(str(r["name"]), r.get("step"), _value(r["margin"]), _value(r.get("relative_l2"))) for r in rows]
        except RunFolderError as error:
            return f'<p class="dim">{_e(error)}</p>'
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f'<p class="dim">{_e(path)} is damaged: {_e(type(error).__name__)}: {_e(error)}</p>'
        return _margins(found)

    def losses(self) -> list[tuple[float, float]]:
        path = self.run.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            points = [(float(step), loss) for step, loss in read_losses(path).by_step.items()]
        except RunFolderError as error:
            self.problems.append(str(error))
            return []
        kept = points[:: -(-len(points) // MAX_CURVE_POINTS) or 1]
        return [*kept, points[-1]] if kept and kept[-1] != points[-1] else kept


def _value(value: Any) -> float | None:
    """A measurement, or None."""
    try:
        number = number_of(value)
    except (ValueError, OverflowError):
        return None
    return number if is_measurable(number) else None


def _rank_entries(section: Any) -> list[list[Any]]:
    """The spans of each rank, held as a list a rank, or as objects that have such a list."""
    if isinstance(section, dict):
        section = list(section.values())
    if not isinstance(section, list):
        return []
    lists = [
        entry if isinstance(entry, list) else next((v for v in as_tree(entry).values() if isinstance(v, list)), None)
        for entry in section
    ]
    if lists and all(entry is None for entry in lists):  # one rank's spans, bare
        return [section]
    return [entry for entry in lists if entry is not None]


def _span(part: Any) -> Span | None:
    tree = as_tree(part)
    start, end = _value(tree.get("start")), _value(tree.get("end"))
    if start is None or end is None or end < start:
        return None
    return Span(str(tree.get("kind"))[:60], str(tree.get("name"))[:120], start, end)


# --- sections


def _bar_section(
    heading: str,
    explanation: str,
    details: list[_Detail],
    of: Callable[[_Detail], list[Bar]],
    text: Callable[[float], str],
    base: int,
) -> str:
    rows: list[Bar] = []
    for detail in details:
        rows += of(detail)
        if len(rows) >= MAX_BARS:
            break
    if not rows:
        return ""
    kinds = [kind for kind in KINDS if any(kind == part for row in rows for part, _ in row.parts)]
    head = "".join(f'<th scope="col" class="n">{_e(kind.replace("_", " "))}</th>' for kind in kinds)
    lines = "".join(_bar_row(row, kinds, text) for row in rows)
    table = f'<table><thead><tr><th scope="col">run</th>{head}<th scope="col" class="n">all</th></tr></thead>{lines}</table>'
    return (
        f"<section><h2>{heading}</h2><p class='dim'>{_e(explanation)}</p>{legend(kinds)}"
        f"{bars(f'{heading}: {explanation}', rows, text, base)}</section>"
        f"<details><summary>{heading.lower()} in figures</summary><div class='scroll'>{table}</div></details>"
    )


def _bar_row(row: Bar, kinds: Sequence[str], text: Callable[[float], str]) -> str:
    values = dict(row.parts)
    cells = "".join(f'<td class="n">{_e(text(values[kind])) if kind in values else "-"}</td>' for kind in kinds)
    return (
        f'<tr title="{_e(row.meter)}"><th scope="row">{_e(row.name)}</th>{cells}<td class="n">{_e(row.total)}</td></tr>'
    )


def _curves(
    label: str,
    x_title: str,
    curves: Sequence[tuple[str, list[tuple[float, float]]]],
    x_marks: Iterable[float] | None = None,
) -> str:
    """Lines of different colours over one x, with their legend."""
    xs = [x for _, points in curves for x, _ in points]
    x_range = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) - 1, max(xs) + 1)
    plot = Plot.frame(label, x_range, padded(y for _, points in curves for _, y in points))
    items = []
    for index, (name, points) in enumerate(curves):
        plot.line(points, f"k{index % NUM_COLOURS}")
        items.append(f'<span><i class="k{index % NUM_COLOURS}"></i>{_e(name)}</span>')
    marks = ticks(*x_range, count=8) if x_marks is None else x_marks
    plot.x_ticks((mark, f"{mark:.6g}") for mark in marks if mark == int(mark))
    plot.x_title(x_title)
    return f'<p class="legend">{"".join(items)}</p>{plot}'


def _losses(details: list[_Detail]) -> str:
    curves = []
    for detail in details:
        if points := detail.losses():
            curves.append((detail.label, points))
        if len(curves) == MAX_CURVES:
            break
    if not curves:
        return ""
    rest = f'<p class="dim">the first {MAX_CURVES} candidates that have losses</p>' if len(details) > MAX_CURVES else ""
    return f"<section><h2>Loss</h2>{rest}{_curves('loss by step', 'step', curves)}</section>"


def _scaling(candidates: list[Candidate]) -> str:
    """Step time and tokens/s over the number of ranks, where configurations differ in nothing else that is shown."""
    families: dict[str, dict[int, Candidate]] = defaultdict(dict)
    for candidate in candidates:
        labels = candidate.labels
        if labels["ranks"].isdigit():
            family = " ".join(labels[key] for key in ("strategy", "precision", "wrap", "prefetch"))
            if labels["accumulation"] not in ("1", "-"):
                family += f" x {labels['accumulation']}"
            ranks = int(labels["ranks"])
            other = families[family].get(ranks)
            if other is None or candidate.step_time[0] < other.step_time[0]:
                families[family][ranks] = candidate
    lines = [(name, sorted(by_ranks.items())) for name, by_ranks in families.items() if len(by_ranks) > 1][:MAX_CURVES]
    if not lines:
        return ""
    times = [(name, [(float(n), 1e3 * c.step_time[0]) for n, c in points]) for name, points in lines]
    tokens = [
        (name, kept)
        for name, points in lines
        if (kept := [(float(n), c.tokens.value) for n, c in points if c.tokens.value is not None])
    ]
    marks = sorted({x for _, points in times for x, _ in points})
    plots = f"<p class='dim'>step time in ms</p>{_curves('step time in ms by ranks', 'ranks', times, marks)}"
    if tokens:
        plots += f"<p class='dim'>tokens/s</p>{_curves('tokens per second by ranks', 'ranks', tokens, marks)}"
    note = "the same global batch at every number of ranks (strong scaling); the fastest candidate of each"
    return f"<section><h2>Scaling</h2><p class='dim'>{note}</p>{plots}</section>"


def _margins(found: list[tuple[str, Any, float | None, float | None]]) -> str:
    """Of each parameter its largest margin over the gate's steps, on a logarithmic axis, against the bound."""
    worst: dict[str, tuple[float | None, float | None]] = {}
    for name, _, margin, relative in found:
        if name not in worst or (margin is None) or (worst[name][0] is not None and margin > (worst[name][0] or 0.0)):
            worst[name] = (margin, relative)
    size = max(1, -(-len(worst) // MAX_POINTS))
    rows = list(worst.items())
    if size > 1:
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        rows = [max(part, key=lambda row: math.inf if row[1][0] is None else row[1][0]) for part in parts]
    if not rows:
        return '<p class="dim">the gate compared no gradient</p>'
    positive = [margin for _, (margin, _) in rows if margin]
    if not positive and all(margin is not None for _, (margin, _) in rows):
        return f"<p>every gradient of {len(worst)} parameters is bitwise equal to the baseline's</p>"
    low = math.floor(math.log10(min(positive, default=0.1)))
    low = max(low - 1, -12)
    high = max(math.ceil(math.log10(max(positive, default=1.0))), 0) + 1
    plot = Plot.frame(
        "error of each parameter's gradient over its bound", (-0.5, len(rows) - 0.5), (low, high), log=True
    )
    for index, (name, (margin, relative)) in enumerate(rows):
        hint = f"{plain(name)}: margin {margin if margin is None else f'{margin:.3g}'}"
        hint += f", relative L2 {'none' if relative is None else f'{relative:.3g}'}"
        if margin is None:
            plot.stem(index, high, "undefined", hint)
        elif margin == 0:
            plot.stem(index, low, "equal", hint)
        else:
            plot.stem(index, max(low, math.log10(margin)), "exact" if margin <= 1 else "undefined", hint)
    plot.rule(0, "bound")
    plot.x_title("parameters in the order of the model (hover for names)")
    items = (("--a", "error / bound"), ("--good", "bitwise equal"), ("--bad", "beyond the bound, or no figure"))
    legend_ = "".join(f'<span><i style="background:var({c})"></i>{t}</span>' for c, t in items)
    return f'<p class="legend">{legend_}</p>{plot}'


UNITS = {"exposed comm": " ms", "ms/step": " ms", "tokens/s": " tokens/s"}
"""Behind figures whose column says them."""


def _runs(details: list[_Detail], num_left: int) -> str:
    if not details:
        return ""
    parts = [_run(detail) for detail in details]
    rest = (
        f'<p class="dim">and {num_left} more candidates; `report` on their folders shows them</p>' if num_left else ""
    )
    return f"<h2>Runs</h2>{''.join(parts)}{rest}"


def _run(detail: _Detail) -> str:
    candidate = detail.candidate
    cells = candidate_row(candidate).cells
    facts: list[tuple[str, object]] = [
        ("folders", ", ".join(run.name for run in candidate.runs)),
        ("reason", candidate.reason),
        ("gate", candidate.tier),
        *(
            (name, f"{cells[name]}{UNITS.get(name, '')} ({_hint(figure)})")
            for name, figure in _figures(candidate).items()
        ),
        *((name, reason) for name, reason in detail.missing()),
        *(("problem", problem) for problem in detail.problems),
    ]
    items = "".join(f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>" for name, value in facts)
    mark = " (chosen)" if candidate.chosen else " (Pareto front)" if candidate.pareto else ""
    return (
        f"<details{' open' if candidate.chosen else ''}><summary>{_e(candidate.name)}{mark}</summary><dl>{items}</dl>"
        f"<h3>One step</h3>{detail.timeline()}<h3>Gradients against the baseline</h3>{detail.gradients()}</details>"
    )


def title_of(paths: Sequence[str], num_runs: int) -> str:
    """What the report is of."""
    listed = ", ".join(str(Path(path)) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
    return f"{num_runs} runs in {listed}"
