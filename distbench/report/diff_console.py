"""What `distbench diff` prints. Text that came from a file is printed as text: no markup, no control characters."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from distbench.numerics.compare import Progress
from distbench.runs.diff import Diff, LossDifference, Setting
from distbench.runs.diff_rows import Row, Tensors
from distbench.runs.text import plain

TOP = 20
"""Rows of a table; the rest is counted."""


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}g}"


def figure(row: Row) -> str:
    """The relative difference with its error; the absolute one, marked so, where the reference is zero."""
    if row.relative is None:
        return "-" if row.distance is None else f"{number(row.distance)} absolute"
    if row.exact:
        return number(row.relative)
    return with_error(row.relative, row.relative_error)


def with_error(value: float | None, error: float | None) -> str:
    """As many digits as its error leaves."""
    if value is None or not error or error < 1e-6 * abs(value):
        return number(value, 6)
    return f"{number(value)} ± {number(error, 2)}"


@contextmanager
def reading_progress() -> Iterator[Progress | None]:
    """A bar while large files are read, on a terminal only; gone when they are."""
    if not sys.stderr.isatty():
        yield None
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading weights", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_diff(found: Diff) -> None:
    """Header, settings, losses, gradients, weights, what it points to, and the verdict last, where the eye is."""
    console = Console(highlight=False, width=None if os.isatty(1) else 140)
    for name, side in (("A", found.a), ("B", found.b)):
        facts = [side.kind.value, *([side.status] if side.status else []), *([side.gate] if side.gate else [])]
        _say(console, f"{name}  {plain(side.path)}", style="bold")
        _say(console, f"   {plain('; '.join(facts))}")
    _print_settings(console, found)
    if found.losses is not None:
        _say(console, f"\nlosses  {loss_text(found.losses)}")
    if found.gradients:
        _print_steps(console, found.gradients)
        _print_tensors(console, found.first_gradients)
    if found.weights is not None:
        _say(console, f"\nweights  {tensors_text(found.weights)}")
        if found.weights.rows and any(row.relation != "bitwise" for row in found.weights.rows):
            _print_tensors(console, found.weights)
        else:
            _print_one_sided(console, found.weights)
    for note in found.notes:
        _say(console, f"\nnote: {plain(note)}")
    for sentence in found.reading:
        _say(console, f"\n-> {plain(sentence)}")
    _say(console, f"\n{plain(found.verdict())}", style="bold red" if found.differs else "bold green")


def loss_text(losses: LossDifference) -> str:
    """One sentence."""
    count = len(losses.steps)
    if losses.num_different == 0:
        return f"equal in all {count} steps that both have"
    text = f"{losses.num_different} of {count} steps differ, first step {losses.first_step}"
    if losses.largest is not None:
        text += f"; largest relative difference {number(losses.largest)} at step {losses.largest_step}"
    if losses.num_nonfinite:
        text += f"; NaN or inf in {losses.num_nonfinite} steps, never equal"
    if losses.num_absolute:
        text += f"; B is zero in {losses.num_absolute} steps, where any difference counts"
    return text


def tensors_text(part: Tensors) -> str:
    """One sentence on a set of tensors."""
    equal = sum(row.relation in ("bitwise", "equal") for row in part.rows)
    sides = [
        side if step is None else f"step {step} of {side}" for side, step in (("A", part.step_a), ("B", part.step_b))
    ]
    at = f"step {part.step_a}" if part.step_a == part.step_b else ", ".join(sides)
    text = "" if part.step_a is None and part.step_b is None else f"{at}: "
    text += f"{equal} of {len(part.rows)} parameters equal, {len(part.differing)} beyond the tolerance"
    if part.relative:
        error = f" ± {number(part.relative_error, 2)}" if part.relative_error else ""
        text += f"; all together relative {number(part.relative)}{error}"
    return text + ("" if all(row.exact for row in part.rows) else " (estimated where digests differ)")


def value_texts(setting: Setting) -> tuple[str, str]:
    """A setting's two values, short; a dash where a side does not have it."""
    shown = []
    for side, value in (("a", setting.a), ("b", setting.b)):
        text = "-" if setting.missing == side else json.dumps(value, ensure_ascii=False)
        text = plain(value) if isinstance(value, str) else plain(text)
        shown.append(text if len(text) <= 60 else f"{text[:57]}...")
    return shown[0], shown[1]


def _print_settings(console: Console, found: Diff) -> None:
    if not found.settings:
        return
    table = _table(f"settings that differ ({len(found.settings)})", "setting", "A", "B", "")
    for setting in found.settings[: 2 * TOP]:
        key = setting.key if setting.section == "config" else f"[{setting.section}] {setting.key}"
        _add(table, plain(key), *value_texts(setting), plain(setting.unused))
    _show(console, table)
    if len(found.settings) > 2 * TOP:
        _say(console, f"and {len(found.settings) - 2 * TOP} more (--json or --html has all)")


def _print_steps(console: Console, parts: list[Tensors]) -> None:
    _say(console, "\ngradients")
    for part in parts[:TOP]:
        _say(console, f"  {tensors_text(part)}", style="red" if part.differs else "green")
        for note in part.notes:
            _say(console, f"  note: {plain(note)}")
    if len(parts) > TOP:
        more = parts[TOP:]
        _say(console, f"  and {len(more)} more steps, {sum(part.differs for part in more)} of them different")


def _print_tensors(console: Console, part: Tensors | None) -> None:
    """The worst parameters of one set, and those on one side only."""
    if part is None:
        return
    shown = [row for row in part.rows if row.relation != "bitwise"]
    if shown:
        at = "" if part.step_a is None else f" of step {part.step_a}"
        headings = ("parameter", "", "relative", "cosine", "alpha", "|A|", "|B|", "detail")
        table = _table(f"{part.what}{at}, worst first", *headings)
        for row in shown[:TOP]:
            _add(
                table,
                plain(row.name),
                ("!" if row.differs else "") + row.relation + ("?" if row.uncertain else ""),
                figure(row),
                with_error(row.cosine, row.cosine_error),
                with_error(row.alpha, row.alpha_error),
                number(row.norm_a),
                number(row.norm_b),
                plain(row.detail),
            )
        _show(console, table)
        if len(shown) > TOP:
            rest = len(shown) - TOP
            _say(console, f"and {rest} more, {sum(row.differs for row in shown[TOP:])} of them beyond the tolerance")
    _print_one_sided(console, part)


def _print_one_sided(console: Console, part: Tensors) -> None:
    for side, names in (("A", part.only_a), ("B", part.only_b)):
        if names:
            more = f" and {len(names) - TOP} more" if len(names) > TOP else ""
            _say(console, f"only in {side} ({len(names)}): {', '.join(map(plain, names[:TOP]))}{more}", style="red")


def _table(title: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", title_style="bold", pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=False, ratio=None, min_width=8 if index == 0 else None)
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(cell) for cell in cells))


def _show(console: Console, table: Table) -> None:
    console.print()
    console.print(table)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text), style=style, soft_wrap=True)
