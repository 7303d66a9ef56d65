"""Rows that another tool measured, as run folders: shown beside ours, and ranked only if they say what gate they passed."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distbench.config import digest
from distbench.errors import OutputError, RunFolderError
from distbench.hydra_edge import label
from distbench.runs.candidates import TIERS, as_tree
from distbench.runs.files import write_json
from distbench.runs.folder import SCHEMA, Status, now, read_record
from distbench.runs.sides import number_of, read_text, settings
from distbench.runs.text import detail

MAX_BYTES = 64 * 2**20


def _words(value: Any) -> str:
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise ValueError("must be text")
    return str(value).strip()


def _count(value: Any) -> int:
    number = float(value)
    if number != int(number) or number < 1:
        raise ValueError("must be a whole number from 1 on")
    return int(number)


def _number(value: Any) -> float:
    number = number_of(value) if not isinstance(value, str) else float(value)
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
    **dict.fromkeys(("world_size", "accumulation", "global_batch", "repeat"), _count),
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
    rows = [_checked(row, f"{file}, row {number}") for number, row in enumerate(_rows(file), 1)]
    if not rows:
        raise RunFolderError(f"{file} has no rows")
    reference = _reference(like)
    records = [(f"{index:03d}_{label(row['name'])}", _record(row, file, reference)) for index, row in enumerate(rows)]
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


def _rows(file: Path) -> list[Any]:
    if not file.exists():
        raise RunFolderError(f"{file}: no such file")
    text = read_text(file, MAX_BYTES).removeprefix("\ufeff")  # the mark that spreadsheets begin a file with
    if file.suffix == ".csv":
        try:
            return [_csv_row(row, f"{file}, row {n}") for n, row in enumerate(csv.DictReader(io.StringIO(text)), 1)]
        except csv.Error as error:
            raise RunFolderError(f"{file} is damaged: {error}") from error
    if file.suffix != ".json":
        raise RunFolderError(f"{file}: expected a .json or .csv file")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} is damaged: {detail(error)}") from error
    if not isinstance(tree, list):
        raise RunFolderError(f"{file} is not a list of objects, one a run")
    return tree


def _csv_row(row: dict[Any, Any], where: str) -> dict[str, str]:
    """Cells that hold something, by heading. DictReader keeps what has no heading under None."""
    if None in row:
        raise RunFolderError(f"{where} has more cells than the file has headings: {str(row[None])[:60]}")
    return {key.strip(): value.strip() for key, value in row.items() if value is not None and value.strip()}


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
    return checked


def _reference(like: Path | None) -> dict[str, dict[str, Any]]:
    """The sections of a run's record that imported rows share with it, empty without one."""
    record = read_record(like) if like is not None else {}
    shared = {name: as_tree(record.get(name)) for name in ("config", "environment", "topology")}
    settings(shared, (like or Path()) / "record.json")  # refuses what is nested too deeply to be written again
    return shared


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
    device = [{"device_name": row.get("device", "unknown")}]
    return {
        "schema": SCHEMA,
        "status": row.get("status", Status.passed.value),
        "reason": row.get("reason"),
        "imported_from": row.get("imported_from", file.name),
        "started": None,
        "finished": now(),
        "config": config,
        "effective": digest({"imported": True, "name": row["name"], "config": {**config, "sweep": None}}),
        "not_applicable": {},
        "environment": reference["environment"] or {"packages": {"torch": row.get("torch")}},
        "topology": {"ranks": reference["topology"].get("ranks") or device},
        "batch": {"world_size": row.get("world_size"), "accumulation": row.get("accumulation")},
        "gate": {
            "passed": True if "gate_tier" in row else None,
            "tier": row.get("gate_tier"),
            "text": f"as imported: {row.get('gate_tier', 'ungated')}",
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

    samples = row.get("step_times_s")
    median = row.get("step_time_s")
    if median is None and samples is not None:
        median = sorted(samples)[len(samples) // 2]
    return {
        "name": "imported",
        "accepted": True,
        "reason": None,
        "step_time": {
            **figure(median, "s", row.get("step_time_meter", "another tool's")),
            "samples": samples or ([] if median is None else [median]),
        },
        "tokens_per_second": figure(row.get("tokens_per_second"), "tokens/s", "imported"),
        "exposed_comm": figure(row.get("exposed_comm_s"), "s", row.get("exposed_comm_meter", "another tool's")),
        "memory": {
            "peak_allocated": {
                "bytes": row.get("peak_memory_bytes"),
                "rank": None,
                "meter": row.get("memory_meter", "another tool's"),
                "reason": None if "peak_memory_bytes" in row else "not in the imported row",
            }
        },
    }
