"""What a decision needs of each run, read from records one at a time: a small row each, whatever else a record holds."""

from __future__ import annotations

import gc
import glob
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distbench.config import Order, digest
from distbench.errors import RunFolderError
from distbench.measure.cores import CROWDED
from distbench.runs.folder import Status, read_record
from distbench.runs.noise import Windows
from distbench.runs.sides import LEAST, MOST, is_measurable, number_of, settings

MAX_WINDOWS, MAX_STEPS = 64, 500
"""Step times kept of one run: its first windows, and every n-th step of longer ones."""
MAX_REASON = 300
UNQUIET = 0.25
"""Meters cannot make a step shorter by this share."""
UNGATED = "ungated"
TIERS = ("bitwise", "bound", "noise", "tolerance")
"""Evidence a gate can pass with, strongest first."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, or why there is none; `meter` says how it was measured."""

    value: float | None
    meter: str | None = None
    reason: str | None = None

    @classmethod
    def read(cls, section: Any, key: str = "median", positive: bool = False) -> Figure:
        """From a record's section. What is null, absent, not finite or impossible is missing, with the reason."""
        if not isinstance(section, dict):
            return cls(None, None, "not in the record")
        meter = _text(section.get("meter"))
        raw = section.get(key)
        if raw is None:
            return cls(None, meter, _text(section.get("reason")) or "not measured")
        try:
            value = number_of(raw)
        except (ValueError, OverflowError):
            return cls(None, meter, f"recorded as {str(raw)[:40]!r}, which is no number")
        if not is_measurable(value) or (positive and value == 0):
            return cls(None, meter, f"recorded as {value:g}")
        return cls(value, meter)


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder's row. Strings come from the record and are shown as text only."""

    path: Path
    status: str
    excluded: str | None
    """Why it is never ranked nor chosen; None: it may be."""
    group: str
    """Digest of what runs must share to be compared (`comparable`)."""
    effective: str
    """Of the effective experiment and the weights that it began from: repeats share it."""
    repeat: int
    labels: dict[str, str]
    """strategy, precision, wrap, prefetch, accumulation, ranks, from."""
    tier: str | None
    parallel_error: Figure
    precision_error: Figure
    memory: Figure
    """Peak allocated bytes, worst rank."""
    exposed: Figure
    """Exposed communication in s a step, worst rank."""
    step_time: Figure
    tokens: Figure
    block: str | None = None
    """Repeat of a sweep, where it was run among one run of every other cell; None: repeats have nothing in common."""
    windows: Windows = ()
    notes: tuple[str, ...] = ()
    decide: str | None = None
    """The run's own `decide` options, as JSON."""
    identity: str | None = None
    """Of the run, wherever its folder was copied to; None where the record does not say."""

    @property
    def name(self) -> str:
        return self.path.name


@dataclass
class Reading:
    """What a set of paths holds."""

    runs: list[Run] = field(default_factory=list)
    known: set[str | None] = field(default_factory=set)
    """Identities of the runs."""
    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Group -> what its runs share, by the key's name."""
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    refused: list[Path] = field(default_factory=list)
    """Cells that were refused before they started: folders without a record."""
    copies: int = 0
    """Folders of runs that were read already, from another place."""
    links: int = 0
    """Links to folders, which are not followed: they may lead round in a circle."""
    duplicates: int = 0
    """Cells that were not run, being the same experiment as another."""


def read_runs(paths: Iterable[str | Path]) -> Reading:
    """Read every record at or below the paths (folders, record.json files, or patterns a shell did not expand).

    A record that cannot be read is one line in `unreadable`. Raises RunFolderError for a path that is not there.
    """
    reading = Reading()
    seen: set[tuple[int, int]] = set()
    with _uncollected():
        for folder, kind in (found for path in paths for found in _find(path)):
            status = folder.lstat() if kind == "link" else folder.stat()
            if (identity := (status.st_dev, status.st_ino)) in seen:
                continue
            seen.add(identity)
            if kind == "duplicate":
                reading.duplicates += 1
            elif kind == "refused":
                reading.refused.append(folder)
            elif kind == "link":
                reading.links += 1
            elif kind == "run":
                _read(folder, reading)
            else:
                reading.unreadable.append((folder, f"{folder} {kind}"))
    _place_unstarted(reading)
    return reading


def _place_unstarted(reading: Reading) -> None:
    """A run that ended before it knew its devices belongs to the runs that it matches in everything else."""
    largest = Counter(run.group for run in reading.runs)
    homes: dict[str, str] = {}
    for group, _ in reversed(largest.most_common()):
        if reading.shared[group]["device"] is not None:
            homes[digest({**reading.shared[group], "device": None})] = group
    reading.runs = [replace(run, group=homes[run.group]) if run.group in homes else run for run in reading.runs]


def _read(folder: Path, reading: Reading) -> None:
    try:
        record = read_record(folder)
        shared = comparable(record)
        run = row(folder, record, digest(shared))
        if run.group not in reading.shared:
            settings(shared, folder / "record.json")  # it is told apart from others setting by setting, and written out
    except RunFolderError as error:
        reading.unreadable.append((folder, str(error)))
        return
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        reading.unreadable.append((folder, f"{folder / 'record.json'} is damaged: {words}"))
        return
    if run.identity is not None and run.identity in reading.known:
        reading.copies += 1
        return
    reading.known.add(run.identity)
    reading.runs.append(run)
    reading.shared.setdefault(run.group, shared)


@contextmanager
def _uncollected() -> Iterator[None]:
    """JSON trees have no cycles, and looking for some takes a third of the time of reading thousands of records."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _find(path: str | Path) -> Iterator[tuple[Path, str]]:
    """(folder, `run`, `duplicate`, `refused`, `link` or why it cannot be read) at or below a path, in name order."""
    root = Path(path)
    if root.is_file() and root.name == "record.json":
        yield root.parent, "run"
        return
    if not root.exists():
        matches = sorted(glob.glob(str(path)))  # noqa: PTH207  an absolute pattern, too
        if not matches:
            raise RunFolderError(f"{path}: no such file or folder")
        for match in matches:
            yield from _find(match)
        return
    if not root.is_dir():
        raise RunFolderError(f"{path} is neither a folder nor a record.json")
    if not root.name:  # `.`: a run has its folder's name
        root = root.resolve()
    yield from _below(str(root))


KINDS = {"record.json": "run", "duplicate_of.json": "duplicate", ".hydra": "refused"}
"""What a folder is that holds such an entry; nothing of a run's own is a run."""


def _below(root: str) -> Iterator[tuple[Path, str]]:
    """As os.walk, with a third of its time: it asks what kind every entry of every run folder is.

    Not recursive: folders may be nested deeper than calls may be.
    """
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                found = {entry.name: entry for entry in entries}
        except OSError as error:
            yield Path(folder), f"cannot be read: {error.strerror}"
            continue
        if kind := next((kind for name, kind in KINDS.items() if name in found), None):
            yield Path(folder), kind
            continue
        yield from ((Path(entry.path), "link") for entry in found.values() if entry.is_symlink() and entry.is_dir())
        inner = [name for name in found if not name.startswith(".") and found[name].is_dir(follow_symlinks=False)]
        folders += [found[name].path for name in sorted(inner, reverse=True)]


# --- one record


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    """What two runs must share for their figures to be compared, by name. Everything else is what is compared."""
    config = as_tree(record.get("config"))
    environment = as_tree(record.get("environment"))
    ranks = as_tree(record.get("topology")).get("ranks")
    devices = sorted({str(as_tree(rank).get("device_name")) for rank in ranks}) if isinstance(ranks, list) else None
    shared = {name: config.get(name) for name in ("model", "data", "loss", "optimizer", "global_batch", "clip_norm")}
    return {
        **shared,
        "seed": config.get("seed"),
        "content": record.get("content"),
        "device": devices,
        "cpu": [environment.get("cpu"), environment.get("cores")],
        "torch": as_tree(environment.get("packages")).get("torch"),
        "link": as_tree(config.get("launch")).get("testbed"),
    }


def row(folder: Path, record: dict[str, Any], group: str) -> Run:
    """The row of one record; what is missing is missing with a reason."""
    config, gate = as_tree(record.get("config")), as_tree(record.get("gate"))
    window = as_tree(record.get("window"))
    step_time = Figure.read(window.get("step_time"), positive=True)
    windows, notes = _windows(as_tree(window.get("step_time")), step_time)
    notes = (*notes, *_quiet(as_tree(window.get("overhead"))), *_cores(window))
    effective = _text(record.get("effective")) or digest(_experiment(config))
    status = record.get("status")
    if not isinstance(status, str):
        raise ValueError(f"status {status!r}")
    if (start := record.get("initial_weights")) is not None:  # a factory may read its weights from a file
        effective = f"{effective} {start}"
    sweep = as_tree(config.get("sweep"))
    repeat = sweep.get("repeat", 1)
    tier = _text(gate.get("tier"))
    return Run(
        path=folder,
        status=status,
        excluded=_excluded(record, config, gate, window, step_time),
        group=group,
        effective=effective,
        repeat=repeat if isinstance(repeat, int) else 1,
        labels=_labels(record, config),
        tier=tier if tier in TIERS else None,
        parallel_error=_gate_figure(gate, "parallel_error"),
        precision_error=_gate_figure(gate, "precision_error"),
        memory=Figure.read(as_tree(window.get("memory")).get("peak_allocated"), "bytes", positive=True),
        exposed=Figure.read(window.get("exposed_comm")),
        step_time=step_time,
        tokens=Figure.read(window.get("tokens_per_second"), positive=True),
        block=f"{folder.parent}:{repeat}" if sweep.get("order") == Order.interleaved.name else None,
        windows=windows,
        notes=notes,
        decide=_decide(config),
        identity=_identity(record),
    )


def _identity(record: dict[str, Any]) -> str | None:
    """Who ran, where and when."""
    ran, host = as_tree(record.get("run")), as_tree(record.get("environment")).get("host")
    known = [ran.get("name"), ran.get("pid"), record.get("started"), host]
    return None if None in known else " ".join(map(str, known))


def _excluded(
    record: dict[str, Any], config: dict[str, Any], gate: dict[str, Any], window: dict[str, Any], step_time: Figure
) -> str | None:
    status = record["status"]
    if status != Status.passed.value:
        reason = _text(record.get("reason"))
        return f"{status}: {reason}" if reason else status
    if gate.get("passed") is not True or gate.get("tier") not in TIERS:
        return "failed its gate" if gate.get("passed") is False or gate.get("tier") == "fail" else UNGATED
    if (fault := _fault(config.get("fault"))) is not None:
        return f"has a deliberate fault: {fault}"
    if events := record.get("nonfinite"):
        first = as_tree(events[0]) if isinstance(events, list) else {}
        return f"steps that were not finite: {_text(first.get('text')) or 'the record does not say which'}"
    if not window:
        return f"no window: {_text(record.get('window_reason')) or 'the record has none'}"
    if window.get("accepted") is not True:
        return f"window rejected: {_text(window.get('reason')) or 'no reason recorded'}"
    if step_time.value is None:
        return f"no step time: {step_time.reason}"
    return None


def _fault(section: Any) -> str | None:
    """Its name; a record that says it in another form than ours has one all the same."""
    name = section.get("name", "none") if isinstance(section, dict) else section
    return None if name in (None, "", "none") else _text(name)


def _windows(section: dict[str, Any], step_time: Figure) -> tuple[Windows, tuple[str, ...]]:
    """The step times of each window in s. Without samples, windows' medians or the median stand for themselves."""
    if step_time.value is None:
        return (), ()
    samples, medians = section.get("samples"), section.get("window_medians")
    num_windows = len(medians) if isinstance(medians, list) else 1
    if not isinstance(samples, list) or not samples:
        samples = [[value] for value in medians] if isinstance(medians, list) else []
    elif not isinstance(samples[0], list):
        size = len(samples) // num_windows if num_windows and len(samples) % num_windows == 0 else len(samples)
        samples = [samples[start : start + size] for start in range(0, len(samples), size)]
    kept, dropped = [], 0
    for window in samples[:MAX_WINDOWS]:
        values = _samples(window[:: -(-len(window) // MAX_STEPS) or 1])
        good = values[(values > LEAST) & (values < MOST)]
        dropped += len(values) - len(good)
        if len(good):
            kept.append(good)
    notes = (f"{dropped} step times are not positive numbers and left out",) if dropped else ()
    if dropped and not kept:
        notes = (f"none of its {dropped} step times is a positive number: the median stands for them",)
    return tuple(kept) or (np.array([step_time.value]),), notes


def _quiet(overhead: dict[str, Any]) -> tuple[str, ...]:
    """A note where steps with meters took less time than those without, for sure: then something else took the time."""
    values = [overhead.get(key) for key in ("median", "high")]
    if not all(isinstance(value, float) and -1 < value < MOST for value in values):
        return ()
    median, high = map(float, values)  # type: ignore[arg-type]
    if high > -UNQUIET:
        return ()
    return (f"the machine was not quiet: steps without meters took {1 / (1 + median):.1f} times as long as those with",)


def _cores(window: dict[str, Any]) -> tuple[str, ...]:
    """A note where ranks waited for cores through much of their steps."""
    share = as_tree(window.get("core_wait")).get("share")
    if not isinstance(share, float) or not CROWDED <= share <= 1:
        return ()
    return (f"cores were short: a thread could run and had none for {share:.0%} of a step",)


def _samples(values: list[Any]) -> NDArray[np.float64]:
    """As numbers; NaN where there is none."""
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.array([_sample(value) for value in values], dtype=np.float64)


def _sample(value: Any) -> float:
    try:
        return number_of(value)
    except (ValueError, OverflowError):
        return math.nan


def _gate_figure(gate: dict[str, Any], key: str) -> Figure:
    """The gate's own section has plain numbers, with a reason beside them."""
    meter = "relative L2, worst parameter" if key == "parallel_error" else "relative L2 against fp64"
    return Figure.read({"median": gate.get(key), "reason": gate.get(f"{key}_reason"), "meter": meter})


def _labels(record: dict[str, Any], config: dict[str, Any]) -> dict[str, str]:
    unused, batch = as_tree(record.get("not_applicable")), as_tree(record.get("batch"))

    def option(group: str, key: str = "name") -> str:
        return "n/a" if group in unused else _text(as_tree(config.get(group)).get(key)) or "-"

    return {
        "strategy": option("strategy"),
        "precision": option("precision"),
        "wrap": option("wrap_policy"),
        "prefetch": option("prefetch", "backward"),
        "accumulation": _text(batch.get("accumulation", config.get("accumulation"))) or "-",
        "ranks": _text(batch.get("world_size")) or "-",
        "from": _text(record.get("imported_from")) or "",
    }


def _experiment(config: dict[str, Any]) -> dict[str, Any]:
    """What stands for the effective experiment in a record without its digest."""
    return {k: v for k, v in config.items() if k not in ("name", "output_dir", "logging", "decide", "sweep")}


def _decide(config: dict[str, Any]) -> str | None:
    import json

    decide = config.get("decide")
    return json.dumps(decide, sort_keys=True) if isinstance(decide, dict) else None


def as_tree(value: Any) -> dict[str, Any]:
    """A section of a record, or nothing where it is no section."""
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    """A short single line of a value from a file."""
    if value is None or value == "":
        return None
    return " ".join(str(value).split())[:MAX_REASON]
