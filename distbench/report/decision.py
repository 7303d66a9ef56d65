"""A decision in words: the rows of every table that shows one, decision.json and decision.md."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from distbench.errors import OutputError
from distbench.runs.candidates import UNGATED, Figure, Run
from distbench.runs.files import write_atomic, write_json
from distbench.runs.rank import Candidate, Ranking, to_json
from distbench.runs.text import plain, readable_bytes

COLUMNS = (
    *("", "run", "strategy", "precision", "wrap", "prefetch", "acc", "ranks", "gate", "parallel err", "precision err"),
    *("peak memory", "exposed comm", "ms/step", "tokens/s", "verdict"),
)
NUMERIC = ("ranks", "acc", "parallel err", "precision err", "peak memory", "exposed comm", "ms/step", "tokens/s")
LEGEND = "> chosen   * on the Pareto front of step time and peak memory   exposed comm in ms   ms/step: median, 95 %"
MAX_ROWS = 2000
"""Of decision.md's tables; decision.json has all."""


@dataclass(frozen=True)
class Row:
    """One line of a decision's table: a candidate, or a run that cannot be ranked."""

    cells: dict[str, str]
    """By `COLUMNS`; printable text that is not escaped for any format."""
    why: str
    chosen: bool = False
    ranked: bool = True
    candidate: Candidate | None = None


def decision_rows(ranking: Ranking) -> list[Row]:
    """The choice, the other candidates by step time, then what cannot be ranked and why."""
    rows = [*map(candidate_row, ranking.candidates), *map(_unranked_row, ranking.unranked)]
    names = [candidate.name for candidate in ranking.candidates] + [run.name for run in ranking.unranked]
    known = Counter(map(short_name, dict.fromkeys(names)))
    for name, row in zip(names, rows, strict=True):
        if known[short_name(name)] > 1:  # cells of different sweeps
            row.cells["run"] = row.cells["run"].replace(short_name(name), plain(name)[:28], 1)
    return rows


def _own_name(row: Candidate | Run) -> str:
    """An imported row's name is its tool's, not a cell of a sweep."""
    return plain(row.name)[4:32] if row.labels["from"] and re.match(r"\d{3}_", row.name) else short_name(row.name)


def candidate_row(candidate: Candidate) -> Row:
    """A candidate's line of the table."""
    median, low, high = (1e3 * value for value in candidate.step_time)
    verdict = "chosen" if candidate.chosen else candidate.versus.verdict if candidate.versus else "not eligible"
    cells = {
        "": (">" if candidate.chosen else " ") + ("*" if candidate.pareto else " "),
        "run": _own_name(candidate) + (f" x{len(candidate.runs)}" if len(candidate.runs) > 1 else ""),
        **_labels(candidate.labels),
        "gate": candidate.tier,
        "parallel err": number(candidate.parallel_error, "{:.1e}"),
        "precision err": number(candidate.precision_error, "{:.1e}"),
        "peak memory": "-" if candidate.memory.value is None else readable_bytes(candidate.memory.value),
        "exposed comm": number(candidate.exposed, "{:.3g}", 1e3),
        "ms/step": f"{median:.4g} ({low:.3g} to {high:.3g})",
        "tokens/s": number(candidate.tokens, "{:,.0f}"),
        "verdict": verdict,
    }
    return Row(cells, plain(candidate.reason), candidate.chosen, True, candidate)


def _unranked_row(run: Run) -> Row:
    """Its numerics are shown, its speed is not: throughput means nothing where the numbers may deviate.

    Of another tool's ungated row it is all there is, so that is shown.
    """
    figures = {
        "peak memory": "-" if run.memory.value is None else readable_bytes(run.memory.value),
        "exposed comm": number(run.exposed, "{:.3g}", 1e3),
        "ms/step": number(run.step_time, "{:.4g}", 1e3),
        "tokens/s": number(run.tokens, "{:,.0f}"),
    }
    cells = dict.fromkeys(COLUMNS, "-") | {
        "": "  ",
        "run": _own_name(run),
        **_labels(run.labels),
        "gate": run.tier or "-",
        "parallel err": number(run.parallel_error, "{:.1e}"),
        "precision err": number(run.precision_error, "{:.1e}"),
        **(figures if run.labels["from"] and run.excluded == UNGATED else {}),
        "verdict": plain((run.excluded or "").partition(":")[0])[:24],
    }
    return Row(cells, plain(run.excluded), ranked=False)


ROOM = {"strategy": 20, "precision": 14, "wrap": 10, "prefetch": 10, "acc": 5, "ranks": 6}
"""Characters of each label: the table fits a page whatever a record says."""


def _labels(labels: dict[str, str]) -> dict[str, str]:
    named = {**labels, "acc": labels["accumulation"]}
    if labels["from"]:
        named["strategy"] = f"{labels['strategy']} ({labels['from']})"
    return {key: plain(named[key])[:room] for key, room in ROOM.items()}


SHOWN_KEYS = {"strategy", "precision", "wrap_policy", "prefetch", "accumulation", "launch.nproc"}
"""Overrides that have a column of their own in a sweep's table."""


def short_name(name: str) -> str:
    """A cell's number and what it varies that no column shows, or as much of another folder's name as has room."""
    name = plain(name)
    if cell := re.match(r"(\d{3,})_(.*)", name):
        varied = [part for part in cell[2].split(",") if "=" in part and part.partition("=")[0] not in SHOWN_KEYS]
        name = " ".join([cell[1], *(re.sub(r"^[^=]*\.", "", part) for part in varied)])
        return name if len(name) <= 18 else f"{name[:17]}…"
    return name if len(name) <= 28 else f"{name[:27]}…"


def number(figure: Figure, form: str, factor: float = 1.0) -> str:
    """A figure, or a dash where there is none."""
    return "-" if figure.value is None else form.format(figure.value * factor)


def headline(ranking: Ranking) -> str:
    """The decision in one line."""
    if ranking.chosen is None:
        return f"none: {plain(ranking.why)}"
    return f"{plain(ranking.chosen.name)}: {plain(ranking.why)}"


def other_lines(ranking: Ranking) -> list[str]:
    """What else a reader of the decision must know: the noise, other groups, what could not be read."""
    lines = [plain(note) for note in ranking.notes]
    for group in ranking.groups:
        if ranking.group is not None and group.number != ranking.group.number:
            lines.append(
                f"group {group.number} ({_count(group.num_runs, 'run')}) is not comparable: "
                f"{plain(', '.join(group.differs))}; " + (plain(group.why_none) or f"--group {group.number} ranks it")
            )
    unreadable = ranking.reading.unreadable
    lines += [plain(why) for _, why in unreadable[:5]]
    if len(unreadable) > 5:
        lines.append(f"and {_count(len(unreadable) - 5, 'more record')} that cannot be read")
    if refused := len(ranking.reading.refused):
        lines.append(f"{_count(refused, 'run')} refused before {'it' if refused == 1 else 'they'} started")
    notes = [(c.name, note) for c in ranking.candidates for note in c.notes]
    lines += [f"{plain(name)}: {plain(note)}" for name, note in notes[:5]]
    return lines


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def write_decision(ranking: Ranking, folder: Path) -> None:
    """decision.json and decision.md in a sweep's folder. Raises OutputError."""
    try:
        write_json(folder / "decision.json", to_json(ranking, folder))
        write_atomic(folder / "decision.md", to_markdown(ranking))
    except OSError as error:
        raise OutputError(f"cannot write {folder}/decision.json: {error.strerror}") from error


def to_markdown(ranking: Ranking) -> str:
    """The decision as a page that a repository's viewer renders."""
    rows = decision_rows(ranking)
    rule = ranking.decide
    options = {
        "fastest_within_memory": f", memory_gib={rule.memory_gib}",
        "smallest_within": f", within_percent={rule.within_percent:g}",
        "most_accurate_within": f", within_percent={rule.within_percent:g}",
    }
    lines = [
        "# Decision",
        "",
        f"**{_md(headline(ranking))}**",
        "",
        f"Rule: {rule.rule.name}{options.get(rule.rule.name, '')}.",
        "",
        *(f"- {_md(line)}" for line in other_lines(ranking)),
    ]
    if rows:
        lines += [
            "",
            _md_row(COLUMNS),
            _md_row(["---:" if heading in NUMERIC else "---" for heading in COLUMNS]),
            *(_md_row([row.cells[heading] for heading in COLUMNS]) for row in rows[:MAX_ROWS]),
            "",
            _md(LEGEND),
            "",
            "## Why not the others",
            "",
            *(f"- `{row.cells['run'].replace('`', '')}` {_md(row.why)}" for row in rows[:MAX_ROWS] if not row.chosen),
        ]
        if len(rows) > MAX_ROWS:
            lines.append(f"- and {len(rows) - MAX_ROWS} more, in decision.json")
    return "\n".join(lines) + "\n"


def _md_row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(_md(cell) if set(cell) - set('-:') else cell for cell in cells)} |"


def _md(text: str) -> str:
    """Text as text: nothing in a name or a reason becomes markup."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", text)
