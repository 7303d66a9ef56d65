"""What the console says: one run's summary, a failure's one block, a sweep's table."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console

from distbench.errors import RunFolderError
from distbench.measure.cores import CROWDED
from distbench.report.diff_console import plain
from distbench.runs.folder import Status, read_record
from distbench.runs.rank import Ranking
from distbench.runs.text import counted, readable_bytes
from distbench.sweep import read_duplicate


def relative(path: Path) -> str:
    """A path as short as it can be typed from here."""
    short = os.path.relpath(path)
    return short if not short.startswith("..") else str(path.resolve())


def print_run(path: Path) -> None:
    """The summary of one finished run."""
    record = read_record(path)
    result = record["result"]
    speed, step = result.get("tokens_per_second_median"), result.get("step_seconds_median")
    loss = f"loss {_number(result.get('first_loss'), '{:.6g}')} -> {_number(result.get('last_loss'), '{:.6g}')}"
    print(
        f"    {record['status']}: {loss} in {counted(result['steps'], 'step')}"
        + ("" if step is None or speed is None else f", {step * 1e3:.1f} ms a step, {speed:,.0f} tokens/s")
        + f", batch {record['batch']['text']}",
        flush=True,
    )
    if record.get("gate"):
        print(f"    {record['gate']['text']}", flush=True)
    if window := record.get("window"):
        print(f"    window: {_window(window)}", flush=True)
    elif record.get("window_reason"):
        print(f"    no window: {record['window_reason']}", flush=True)
    if (events := record.get("nonfinite")) and record["status"] == Status.passed.value:
        steps = ", ".join(dict.fromkeys(str(event["step"]) for event in events[:MAX_STEPS]))
        more = " and more" if len(events) > MAX_STEPS else ""
        s = "s" * ("," in steps)
        print(
            f"    not finite: the loss or gradient of step{s} {steps}{more}; causes in record.json's nonfinite",
            flush=True,
        )
    print(f"    run folder {relative(path)}", flush=True)


MAX_STEPS = 5
"""Named of those that were not finite."""


def _window(window: dict[str, Any]) -> str:
    """The headlines of one line; what could not be measured is left out, its reason is in the record."""
    if not window["accepted"]:
        return f"rejected: {window['reason']}"
    step, memory = window["step_time"], window["memory"]["peak_allocated"]
    parts = [f"step {step['median'] * 1e3:.1f} ms ({step['low'] * 1e3:.1f} to {step['high'] * 1e3:.1f})"]
    if memory["bytes"] is not None:
        parts.append(f"peak {readable_bytes(memory['bytes'])} on rank {memory['rank']}")
    for name, label in (("exposed_comm", "exposed communication"), ("data_wait", "data wait")):
        if window[name]["median"] is not None:
            parts.append(f"{label} {window[name]['median'] * 1e3:.1f} ms")
    short = window.get("core_wait", {}).get("share")
    if short is not None and short >= CROWDED:
        parts.append(f"cores were short: a thread had none for {short:.0%} of a step")
    parts += window["bytes"]["warnings"]
    return ", ".join(parts)


def print_failure(path: Path, failure: dict[str, Any]) -> None:
    """The first failure, whole, and where it was; the ranks that ended with it, by number only."""
    if failure["traceback"] is None or failure["user_error"]:
        print("\n".join(map(plain, f"distbench: {failure['message']}".split("\n"))), flush=True)
    else:
        who = f"rank {failure['rank']}" if failure["rank"] >= 0 else "the baseline's process"
        print(f"{who} on {failure['host']} failed:", flush=True)
        for line in failure["traceback"].rstrip().split("\n"):
            print(plain(line), flush=True)
    if not failure["user_error"]:
        lines = failure.get("lines", [])
        if lines and failure.get("type") == "RankDied":
            print("    the end of its log, whatever that has to do with it:")
        for line in lines:
            print(f"    {plain(line)}")
        if failure["phase"] is not None:
            step = "" if failure["step"] is None else f"step {failure['step']}, "
            print(f"    where        {step}{failure['phase']}, rank {failure['rank']} on {failure['host']}")
        if others := ", ".join(map(str, failure["ended_with_it"])):
            print(f"    with it      rank{'s' * (',' in others)} {others}")
        print(f"    logs         {relative(path / 'logs')}", flush=True)
    say_how_to_resume(path)


def say_how_to_resume(path: Path) -> None:
    """The command, where the run has left a checkpoint; else that there is none."""
    try:
        record = read_record(path)
        saved, every = record.get("last_checkpoint"), record["config"]["checkpoint"]["every"]
    except RunFolderError:  # it ended before there was one
        return
    if saved is None and record.get("gate") is not None:
        why = (
            "; checkpoint.every=N writes one every N steps" if every is None else f" yet, with checkpoint.every={every}"
        )
        print(f"    checkpoint   none{why}", flush=True)
    if saved is not None:
        # It would come to the same step again.
        otherwise = " on_nonfinite=skip" if "NonFiniteError" in str(record.get("reason")) else ""
        words = f"python -m distbench resume={shlex.quote(relative(path))}{otherwise}"
        print(f"    checkpoint   {saved}\n    go on        {words}", flush=True)


SAME_AS = "same as"
"""How the status of a cell begins that was not run, being the same effective experiment as another."""


def sweep_rows(sweep: Path) -> list[dict[str, Any]]:
    """One row per cell, in cell order: passed, failed, or a duplicate of another."""
    rows: list[dict[str, Any]] = []
    for folder in sorted(p for p in sweep.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if twin := read_duplicate(folder):
            rows.append({"cell": folder.name, "status": f"{SAME_AS} {twin.split('_')[0]}"})
            continue
        try:
            record = read_record(folder)
        except RunFolderError:
            rows.append({"cell": folder.name, "status": "refused"})
            continue
        rows.append({"cell": folder.name, "record": record, "status": record["status"]})
    return rows


def print_sweep(sweep: Path, ranking: Ranking) -> None:
    """The table at a sweep's end, the decision, and where everything is."""
    rows = sweep_rows(sweep)
    if not ranking.candidates:
        _print_runs(rows)
    print_decision(ranking, table=bool(ranking.candidates))
    run = [row for row in rows if not row["status"].startswith(SAME_AS)]
    passed = sum(row["status"] == Status.passed.value for row in run)
    same = f"; {len(rows) - len(run)} more cells are the same experiment as one of them" if len(run) < len(rows) else ""
    print(f"\n{passed} of {len(run)} runs passed{same}")
    print(f"reasons      {relative(sweep)}/decision.md, decision.json")
    print(f"runs         {relative(sweep)}")
    print(f"logs         {relative(sweep)}/*/logs/rank*.log")
    print(f"TensorBoard  {_tensorboard()} --logdir {relative(sweep.parent)}", flush=True)


def _tensorboard() -> str:
    """As it can be called here: beside this Python, where its environment is not activated."""
    beside = Path(sys.executable).with_name("tensorboard")
    return relative(beside) if shutil.which("tensorboard") is None and beside.exists() else "tensorboard"


MAX_REASONS = 20
"""Lines that say why not the others; the rest is counted, and in decision.md."""


def print_decision(ranking: Ranking, table: bool = True) -> None:
    """The runs as a table, why not each, and the decision last, where the eye is."""
    from rich.table import Table
    from rich.text import Text

    from distbench.report.decision import COLUMNS, LEGEND, NUMERIC, decision_rows, headline, other_lines

    if table:
        grid = Table(box=box.SIMPLE, title=None, show_edge=False, padding=(0, 1, 0, 0))
        for heading in COLUMNS:
            grid.add_column(heading, justify="right" if heading in NUMERIC else "left", no_wrap=True)
        rows = decision_rows(ranking)
        for row in rows:
            grid.add_row(*(Text(row.cells[heading]) for heading in COLUMNS), style="bold" if row.chosen else None)
        console = table_console()
        console.print()
        console.print(grid)
        print(f"{LEGEND}\n")
        losers = [row for row in rows if not row.chosen]
        for row in losers[:MAX_REASONS]:
            print(f"  {row.cells['run']}  {row.why}")
        if len(losers) > MAX_REASONS:
            print(f"  and {len(losers) - MAX_REASONS} more")
    print(f"\ndecision     {headline(ranking)}")
    for line in other_lines(ranking):
        print(f"             {line}")


def table_console() -> Console:
    return Console(width=None if os.isatty(1) else 400, soft_wrap=True, highlight=False)


def _print_runs(rows: list[dict[str, Any]]) -> None:
    """Every cell as far as it came: what there is to see where no run has a window."""
    from rich.table import Table

    from distbench.report.decision import short_name

    table = Table(box=box.SIMPLE, title=None, show_edge=False)
    for heading in ("cell", "strategy", "precision", "wrap", "prefetch", "ranks", "gate"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parallel err", "precision err", "last loss", "ms/step", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in rows:
        cell = short_name(row["cell"])
        if "record" not in row:
            table.add_row(cell, *[""] * 11, f"{row['status']}: {row['cell'].partition('_')[2]}")
            continue
        record = row["record"]
        config, unused = record["config"], record["not_applicable"]
        result, gate = record.get("result") or {}, record.get("gate") or {}
        # Throughput means nothing where the numbers deviate: only a run that passed its gate shows any.
        speed = result if record["status"] == Status.passed.value else {}
        table.add_row(
            cell,
            config["strategy"]["name"],
            config["precision"]["name"],
            "n/a" if "wrap_policy" in unused else config["wrap_policy"]["name"],
            "n/a" if "prefetch" in unused else config["prefetch"]["backward"],
            str(record["batch"]["world_size"]),
            gate.get("tier") or "-",
            _number(gate.get("parallel_error"), "{:.1e}"),
            _number(gate.get("precision_error"), "{:.1e}"),
            _number(result.get("last_loss"), "{:.7g}"),
            _number(speed.get("step_seconds_median"), "{:.1f}", 1e3),
            _number(speed.get("tokens_per_second_median"), "{:,.0f}"),
            row["status"],
        )
    console = table_console()
    console.print()
    console.print(table)


def _number(value: Any, form: str, factor: float = 1.0) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else form.format(value * factor)
