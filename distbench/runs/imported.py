"""Rows that another tool measured, as run folders: shown beside ours, and ranked only if they say what gate they passed."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distbench.config import digest
from distbench.errors import OutputError, RunFolderError
from distbench.hydra_edge import label
from distbench.runs.candidates import TIERS, as_tree
from distbench.runs.files import write_json
from distbench.runs.folder import SCHEMA, Status, now, read_record
from distbench.runs.sides import number_of, read_text, settings
from distbench.runs.text import counted, detail

MAX_BYTES = 64 * 2**20
MAX_COUNT, MAX_RANKS = 10**9, 10**6
"""Of whole numbers, and of `world_size`: beyond what anybody has, and so a mistake."""
UNNAMED = "a meter that the row does not name"
AGREE = 0.01
"""Relative difference of two statements of one step time up to which they are the same."""


def _words(value: Any) -> str:
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("must be text")
    return str(value).strip()


def _count(most: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        number = _float(value)
        if not 1 <= number <= most or number != int(number):
            raise ValueError(f"must be a whole number from 1 to {most:,}")
        return int(number)

    return check


def _float(value: Any) -> float:
    """JSON's number, or one written as text."""
    if isinstance(value, str) and "_" in value:  # float() takes it as Python writes numbers; nobody's table does
        raise ValueError("must be a number without underscores")
    return number_of(value) if not isinstance(value, str) else float(value)


def _number(value: Any) -> float:
    number = _float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError("must be a finite number from 0 on; leave it out where it was not measured")
    return number


def _samples(value: Any) -> list[float]:
    parts = value.split(";") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise ValueError("must be a list of numbers; in CSV with `;` between them")
    samples = [_number(part) for part in parts]
    if min(samples) <= 0:
        raise ValueError("must be positive")
    return samples


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return check


FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("name", "strategy", "precision", "wrap", "prefetch", "model", "device", "torch", "reason"), _words
    ),
    **dict.fromkeys(("step_time_meter", "memory_meter", "exposed_comm_meter", "imported_from"), _words),
    **dict.fromkeys(("accumulation", "global_batch", "repeat"), _count(MAX_COUNT)),
    "world_size": _count(MAX_RANKS),
    **dict.fromkeys(("step_time_s", "tokens_per_second", "peak_memory_bytes", "exposed_comm_s"), _number),
    **dict.fromkeys(("parallel_error", "precision_error"), _number),
    "step_times_s": _samples,
    "gate_tier": _one_of(*TIERS),
    "status": _one_of(*(status.value for status in Status)),
}
"""What a row may have; only `name` must be there (docs/decision.md)."""


def import_rows(file: Path, out: Path, like: Path | None = None) -> list[Path]:
    """Make a run folder below `out` of each row of a JSON or CSV file, and return them.

    With `like`, a run folder of ours, the rows are of the same model, data, batch and machine as it, and so comparable.
    Everything is checked before anything is written. Raises RunFolderError and OutputError.
    """
    rows = {where: _checked(row, where) for where, row in _rows(file)}
    if not rows:
        raise RunFolderError(f"{file} has no rows")
    reference = _reference(like)
    if like is not None:
        for where, row in rows.items():
            _check_like(row, where, reference, like)
    records = [
        (f"{index:03d}_{label(row['name'])}", _record(row, file, reference)) for index, row in enumerate(rows.values())
    ]
    folders = [out / name for name, _ in records]
    if taken := next((folder for folder in folders if folder.exists()), None):
        raise OutputError(f"{taken} is there already; choose another --out")
    try:
        for folder, (_, record) in zip(folders, records, strict=True):
            folder.mkdir(parents=True)
            write_json(folder / "record.json", record)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename}: {error.strerror}; choose another --out") from error
    return folders


def _rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(where it is in the file, what is there) for each row."""
    if not file.exists():
        raise RunFolderError(f"{file}: no such file")
    text = read_text(file, MAX_BYTES).removeprefix("\ufeff")  # the mark that spreadsheets begin a file with
    if file.suffix.lower() == ".csv":
        yield from _csv_rows(file, text)
        return
    if file.suffix.lower() != ".json":
        raise RunFolderError(f"{file}: expected a .json or .csv file")
    try:
        tree = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} is damaged: {detail(error)}") from error
    if not isinstance(tree, list):
        raise RunFolderError(f"{file} is not a list of objects, one a run")
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(tree, 1))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; its reader would keep the last of two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has {_twice([key for key, _ in pairs])[:60]!r} twice")
    return found


def _csv_rows(file: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Cells that hold something, by heading. Empty lines are none."""
    reader = csv.reader(io.StringIO(text), strict=True)  # not strict, an open quote takes in the rest of the file
    heading: list[str] = []
    try:
        for cells in filter(None, reader):
            where = f"{file}, line {reader.line_num}"
            if not heading:
                heading = [cell.strip() for cell in cells]
                if len(set(heading)) < len(heading):
                    raise RunFolderError(f"{where}: the heading has {_twice(heading)[:60]!r} twice")
                continue
            if len(cells) != len(heading):
                fields = counted(len(cells), "field")
                raise RunFolderError(f"{where} has {fields}, the heading {len(heading)}: {str(cells)[:60]}")
            yield where, {key: cell.strip() for key, cell in zip(heading, cells, strict=True) if cell.strip()}
    except csv.Error as error:
        raise RunFolderError(f"{file}, line {reader.line_num}, is damaged: {error}") from error


def _twice(names: list[str]) -> str:
    return next(name for name, times in Counter(names).items() if times > 1)


def _checked(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RunFolderError(f"{where} is not an object")
    checked = {}
    for key, value in row.items():
        if key not in FIELDS:
            near = difflib.get_close_matches(str(key), FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"fields are {', '.join(FIELDS)}"
            raise RunFolderError(f"{where}: no field {str(key)[:60]!r}; {hint}")
        if value is None:
            continue
        try:
            checked[key] = FIELDS[key](value)
        except (ValueError, TypeError, OverflowError) as error:
            message = str(error) if str(error).startswith("must") else "must be a number"
            raise RunFolderError(f"{where}: {key}={str(value)[:60]!r} {message}") from error
    if "name" not in checked:
        raise RunFolderError(f"{where} has no name")
    if (contradiction := _contradiction(checked)) is not None:
        raise RunFolderError(f"{where}: {contradiction}")
    return checked


def _contradiction(row: dict[str, Any]) -> str | None:
    """Two fields of a row that cannot both be so, or None."""
    if row.get("status") == Status.gate_failed and "gate_tier" in row:
        return f"status=gate_failed contradicts gate_tier={row['gate_tier']}, which says what gate it passed; leave one out"
    said, median = row.get("step_time_s"), _step_time(row)
    if said is not None and median is not None and abs(said - median) > AGREE * median:
        return f"step_time_s={said:g} contradicts step_times_s, whose median is {median:g}; leave one out"
    exposed = row.get("exposed_comm_s")
    if exposed is not None and median is not None and exposed > median:
        return f"exposed_comm_s={exposed:g} is more than the step time, {median:g}: it is a part of it"
    return None


def _step_time(row: dict[str, Any]) -> float | None:
    """In s: the median where every step's is there."""
    samples = row.get("step_times_s")
    return row.get("step_time_s") if samples is None else statistics.median(samples)


def _reference(like: Path | None) -> dict[str, dict[str, Any]]:
    """The sections of a run's record that imported rows share with it, empty without one."""
    record = read_record(like) if like is not None else {}
    shared = {name: as_tree(record.get(name)) for name in ("config", "content", "environment", "topology")}
    settings(shared, (like or Path()) / "record.json")  # refuses what is nested too deeply to be written again
    return shared


def _check_like(row: dict[str, Any], where: str, reference: dict[str, dict[str, Any]], like: Path) -> None:
    """Refuse a row that says it is of another model, batch or machine than the run it is put beside."""
    ranks = reference["topology"].get("ranks")
    devices = {str(as_tree(rank).get("device_name")) for rank in ranks} if isinstance(ranks, list) else set()
    theirs = {
        "model": as_tree(reference["config"].get("model")).get("name"),
        "global_batch": reference["config"].get("global_batch"),
        "torch": as_tree(reference["environment"].get("packages")).get("torch"),
        "device": ", ".join(sorted(devices)) or None,
    }
    for field, value in theirs.items():
        if field in row and row[field] != value:
            raise RunFolderError(
                f"{where}: {field}={detail(repr(row[field]))}, but {like} has {detail(repr(value))}: "
                "with --like the rows are of the same model, batch and machine"
            )


SHARED = ("model", "data", "loss", "optimizer", "global_batch", "clip_norm", "seed")


def _record(row: dict[str, Any], file: Path, reference: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A record with what the row says, and with `reference`'s answers to what makes runs comparable."""
    config = {key: value for key, value in reference["config"].items() if key in SHARED}
    if not config:
        config = {"model": {"name": row.get("model")}, "global_batch": row.get("global_batch")}
    options = {"strategy": "name", "precision": "name", "wrap_policy": "name", "prefetch": "backward"}
    for group, key in options.items():
        config[group] = {key: row.get("wrap" if group == "wrap_policy" else group, "-")}
    config["sweep"] = {"repeat": row.get("repeat", 1)}
    config["launch"] = {"testbed": as_tree(reference["config"].get("launch")).get("testbed")}
    device = [{"device_name": row.get("device", "unknown")}]
    batch = {"world_size": row.get("world_size"), "accumulation": row.get("accumulation")}
    tool, tier = row.get("imported_from", file.name), row.get("gate_tier")
    experiment = {"name": row["name"], "config": {**config, "sweep": None}, "batch": batch, "tool": tool, "tier": tier}
    return {
        "schema": SCHEMA,
        "status": row.get("status", Status.passed.value),
        "reason": row.get("reason"),
        "imported_from": tool,
        "started": None,
        "finished": now(),
        "config": config,
        "content": reference["content"] or None,
        "effective": digest({"imported": True, **experiment}),
        "not_applicable": {},
        "environment": reference["environment"] or {"packages": {"torch": row.get("torch")}},
        "topology": {"ranks": reference["topology"].get("ranks") or device},
        "batch": batch,
        "gate": {
            "passed": True if tier else None,
            "tier": tier,
            "text": f"as imported: {tier or 'ungated'}",
            "parallel_error": row.get("parallel_error"),
            "precision_error": row.get("precision_error"),
            "parallel_error_reason": "not in the imported row",
            "precision_error_reason": "not in the imported row",
        },
        "window": _window(row),
    }


def _window(row: dict[str, Any]) -> dict[str, Any]:
    def figure(value: Any, unit: str, meter: str) -> dict[str, Any]:
        missing = None if value is not None else "not in the imported row"
        return {"median": value, "low": None, "high": None, "unit": unit, "meter": meter, "reason": missing}

    samples, median = row.get("step_times_s"), _step_time(row)
    return {
        "name": "imported",
        "accepted": True,
        "reason": None,
        "step_time": {
            **figure(median, "s", row.get("step_time_meter", UNNAMED)),
            "samples": samples or ([] if median is None else [median]),
        },
        "tokens_per_second": figure(row.get("tokens_per_second"), "tokens/s", "imported"),
        "exposed_comm": figure(row.get("exposed_comm_s"), "s", row.get("exposed_comm_meter", UNNAMED)),
        "memory": {
            "peak_allocated": {
                "bytes": row.get("peak_memory_bytes"),
                "rank": None,
                "meter": row.get("memory_meter", UNNAMED),
                "reason": None if "peak_memory_bytes" in row else "not in the imported row",
            }
        },
    }
