"""What differs between two runs, where first, and what that points to: the engine of `python -m distbench diff`.

In this order: settings and environment, losses, gradients, weights. Settings explain and never count; the others do, by
one tolerance on relative L2 differences. What is exact and what is estimated is said row by row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distbench.checkpoint.manifest import MANIFEST, MODEL
from distbench.checkpoint.state import STATE
from distbench.errors import CheckpointError, OutputError, RunFolderError, SummaryError
from distbench.export import export
from distbench.numerics.compare import Progress, compare_files
from distbench.numerics.summary import Summary
from distbench.numerics.summary_difference import LIKELY, RELATIVE_ERROR
from distbench.runs.diff_reading import explain
from distbench.runs.diff_rows import Pair, Tensors, estimated_rows, exact_rows
from distbench.runs.sides import Kind, Losses, Side, settings

SCHEMA = 1
"""Of the JSON that `to_json` returns (docs/diff.md)."""

LABELS = ("name", "output_dir")
"""Settings that name a run and do nothing."""


@dataclass(frozen=True)
class Setting:
    """One setting that differs."""

    section: str
    """`environment` (machine, versions, dtypes, ranks) or `config`."""
    key: str
    a: Any
    b: Any
    missing: str = ""
    """`a` or `b` where that side does not have the setting at all; its value is then None, as a null is."""
    unused: str = ""
    """Why it had no effect on some side, where it had none."""


@dataclass(frozen=True)
class LossDifference:
    """Losses of the steps that both sides have."""

    steps: list[int]
    a: list[float]
    b: list[float]
    num_different: int
    num_beyond: int
    """Steps that differ beyond the tolerance."""
    first_step: int | None
    """The first that differs at all."""
    largest: float | None
    """Largest relative difference; None where none is defined."""
    largest_step: int | None
    num_nonfinite: int
    """Steps with a loss that is NaN or infinite on a side: never equal."""
    num_absolute: int
    """Steps where b's loss is zero, and any difference counts."""

    @property
    def differs(self) -> bool:
        return self.num_beyond > 0


@dataclass(frozen=True)
class Diff:
    """All that was found between sides a and b."""

    a: Side
    b: Side
    tolerance: float
    settings: list[Setting]
    losses: LossDifference | None
    gradients: list[Tensors]
    """By step."""
    weights: Tensors | None
    notes: list[str]
    reading: list[str]
    """What the differences point to, in sentences."""

    @property
    def differs(self) -> bool:
        """Whether anything that was compared differs beyond the tolerance."""
        parts = [*self.gradients, *([self.weights] if self.weights else [])]
        return any(part.differs for part in parts) or (self.losses is not None and self.losses.differs)

    @property
    def first_gradients(self) -> Tensors | None:
        """Of the first step whose gradients differ beyond the tolerance."""
        return next((part for part in self.gradients if part.differs), None)

    def verdict(self) -> str:
        """One line: what differs, where first."""
        if not self.differs:
            within = "bit for bit" if self.tolerance == 0 else f"within a relative difference of {self.tolerance:g}"
            parts = [
                name
                for name, there in (
                    ("losses", self.losses is not None),
                    ("gradients", bool(self.gradients)),
                    ("weights", self.weights is not None),
                )
                if there
            ]
            return f"EQUAL {within}: {', '.join(parts)}"
        found = []
        if self.losses is not None and self.losses.differs:
            found.append(f"losses (first at step {self.losses.first_step})")
        for part in (self.first_gradients, self.weights):
            if part is not None and part.differs:
                found.append(_headline(part))
        beyond = "" if self.tolerance == 0 else f" beyond a relative difference of {self.tolerance:g}"
        return f"DIFFERENT{beyond}: {'; '.join(found)}"


def diff(
    path_a: str | Path,
    path_b: str | Path,
    *,
    tolerance: float = 0.0,
    step: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two run folders, checkpoints, gradient summaries or safetensors files.

    Args:
        path_a, path_b: see `Side.open`; b is the reference that relative differences refer to.
        tolerance: largest relative L2 difference, parameter by parameter, that is not counted. With 0, exact things
            must be equal bit for bit, and estimates must not exceed their own rounding.
        step: compare this step only.
        progress: of reading weights; see `compare_files`.

    Raises:
        RunFolderError, SummaryError, TensorFileError: a side is missing, damaged, foreign or of a newer schema, or the
            two have nothing in common.
    """
    a, b = Side.open(path_a), Side.open(path_b)
    summaries_a, summaries_b = _Summaries(a), _Summaries(b)
    notes = [*a.notes, *b.notes]

    losses = None
    if a.losses is not None and b.losses is not None:
        losses = compare_losses(a.losses, b.losses, tolerance, step)
    gradients = []
    for pair in _pairs("gradients", _gradient_steps(a), _gradient_steps(b), step, notes, every=True):
        part = _compare_gradients(summaries_a, summaries_b, pair, tolerance)
        if part is None:
            notes.append(f"gradients: one side has full tensors of step {pair[0]}, the other a summary: not compared")
        else:
            gradients.append(part)
    weights = None
    for pair in _pairs("weights", a.weights, b.weights, step, notes, every=False):
        order = gradients[0].order if gradients else []
        with _whole(a.weights[pair[0]], notes) as in_a, _whole(b.weights[pair[1]], notes) as in_b:
            if in_a is not None and in_b is not None:
                comparison = compare_files(in_a, in_b, progress=progress)
                weights = exact_rows("weights", pair, comparison, tolerance, order)
    if losses is None and not gradients and weights is None:
        raise RunFolderError(_nothing_in_common(a, b, step, notes))
    parts = [*gradients, *([] if weights is None else [weights])]
    if losses is None and not any(part.rows for part in parts) and any(part.only_a and part.only_b for part in parts):
        raise RunFolderError(_no_parameter_in_common(a, b, parts[0]))

    different = _differing_settings(a, b, summaries_a, summaries_b, notes)
    found = Diff(a, b, tolerance, different, losses, gradients, weights, notes, [])
    found.reading.extend(explain(found))
    return found


# --- what belongs together


@contextmanager
def _whole(path: Path, notes: list[str]) -> Iterator[Path | None]:
    """Where a side's weights are whole: of a checkpoint that has only what its ranks wrote, in a temporary file. None, and a
    note, where they cannot be put together."""
    ours = any((path / name).is_file() for name in (MANIFEST, STATE))
    if not ours or not any(path.glob("rank_*.safetensors")):
        yield path
    elif (path / MODEL).is_file():
        yield path / MODEL
    else:
        with TemporaryDirectory(prefix="distbench-diff-") as folder:
            file: Path | None = Path(folder) / MODEL
            try:
                export(path, Path(folder) / MODEL)
            except (CheckpointError, OutputError) as error:
                notes.append(f"weights: not compared, as {path} has no {MODEL} and its shards give none: {error}")
                file = None
            yield file


def _gradient_steps(side: Side) -> dict[int | None, Path]:
    return side.summaries or side.full_gradients


def _pairs(
    what: str,
    a: Mapping[int | None, Path],
    b: Mapping[int | None, Path],
    step: int | None,
    notes: list[str],
    every: bool,
) -> list[Pair]:
    """Steps to compare. A single file is compared with what it is held against, whatever step it is of."""
    if not a or not b:
        if a or b:
            notes.append(f"{what}: only {'A' if a else 'B'} has any")
        return []
    if step is not None:
        steps = [[step] if step in side else [None] if None in side else [] for side in (a, b)]
        return [(steps[0][0], steps[1][0])] if steps[0] and steps[1] else []
    common = sorted(key for key in a.keys() & b.keys() if key is not None)
    if common:
        apart = len(a.keys() ^ b.keys())
        if apart and every:
            notes.append(f"{what}: {apart} steps are on one side only and not compared")
        return [(key, key) for key in (common if every else common[-1:])]
    if every and len(a) + len(b) > 2:
        notes.append(
            f"{what}: no step is on both sides (A {_listed(a)}, B {_listed(b)}); name single files to compare them"
        )
        return []
    pair = list(a)[-1], list(b)[-1]
    if None in pair:
        return [pair]
    if not every:
        notes.append(
            f"{what}: A's last are of step {pair[0]}, B's of step {pair[1]}: not compared, as training alone makes them "
            "differ; name two checkpoint folders to compare them"
        )
        return []
    notes.append(f"{what}: step {pair[0]} of A against step {pair[1]} of B, as these two files were named")
    return [pair]


def _nothing_in_common(a: Side, b: Side, step: int | None, notes: list[str]) -> str:
    def holds(side: Side) -> str:
        parts: dict[str, Mapping[Any, Any]] = {
            "losses of steps": side.losses.by_step if side.losses else {},
            "gradients of steps": _gradient_steps(side),
            "weights of steps": side.weights,
        }
        named = [f"{what} {_listed(steps)}" for what, steps in parts.items() if steps]
        return f"{side.path} ({side.kind}) has {', '.join(named) or 'none of them'}"

    wanted = "losses, gradients or weights" if step is None else f"losses, gradients or weights of step {step}"
    return "; ".join([f"nothing to compare: no {wanted} on both sides", holds(a), holds(b), *notes])


def _no_parameter_in_common(a: Side, b: Side, part: Tensors) -> str:
    def few(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    return (
        f"nothing to compare: no parameter has the same name on both sides; {a.path} has {few(part.only_a)}; "
        f"{b.path} has {few(part.only_b)}"
    )


def _listed(steps: Mapping[Any, Any]) -> str:
    known = [step for step in steps if step is not None]
    if len(known) < 4:
        return ", ".join(map(str, known)) or "unknown"
    return f"{known[0]}, {known[1]}, ... {known[-1]}"


# --- settings


def _differing_settings(
    a: Side, b: Side, summaries_a: _Summaries, summaries_b: _Summaries, notes: list[str]
) -> list[Setting]:
    if bool(a.config) != bool(b.config):
        # One is no run. What a recorder says of itself has other names: all of it would be on one side only.
        if Kind.tensors not in (a.kind, b.kind):
            notes.append(f"settings: only {'A' if a.config else 'B'} has any")
        return []
    sections = (
        ("environment", _environment(a, summaries_a), _environment(b, summaries_b)),
        ("config", a.config, b.config),
    )
    unused = [_unused(side) for side in (a, b)]
    found = []
    for section, in_a, in_b in sections:
        if not in_a or not in_b:
            continue  # a run that has no record: everything would differ
        for key in [*in_a, *(key for key in in_b if key not in in_a)]:
            values = in_a.get(key), in_b.get(key)
            # By their text, so that 1, 1.0 and true are three values.
            same = (key in in_a) == (key in in_b) and json.dumps(values[0]) == json.dumps(values[1])
            if key not in LABELS and not same:
                missing = "a" if key not in in_a else "b" if key not in in_b else ""
                found.append(Setting(section, key, *values, missing, "; ".join(_reasons(key, unused))))
    return found


def _environment(side: Side, summaries: _Summaries) -> dict[str, Any]:
    """What a run was made with and on, without what every run has of its own (times, process ids, paths)."""
    if not side.record:
        metadata = summaries.metadata()
        return {key: value for key, value in metadata.items() if key not in ("step", "run")}
    record = side.record
    sections = ("environment", "dtypes", "batch", "model", "initial_weights")
    tree = {key: record[key] for key in sections if record.get(key) is not None}  # null: the run did not get there
    topology = record.get("topology")
    if isinstance(topology, dict):
        ranks = topology.get("ranks")
        ranks = [rank for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
        tree["topology"] = {
            "backend": topology.get("backend"),
            "hosts": len({str(rank.get("host")) for rank in ranks}),
            "devices": sorted({str(rank.get("device_name")) for rank in ranks}),
            "threads": sorted({str(rank.get("threads")) for rank in ranks}),
        }
    found = settings(tree, side.path / "record.json")
    return {key.removeprefix("environment."): value for key, value in found.items() if key != "batch.text"}


def _unused(side: Side) -> dict[str, str]:
    reasons = side.record.get("not_applicable")
    return {str(key): str(reason) for key, reason in reasons.items()} if isinstance(reasons, dict) else {}


def _reasons(key: str, unused: list[dict[str, str]]) -> list[str]:
    return [
        f"unused in {side}: {reason}"
        for side, reasons in zip("AB", unused, strict=True)
        for prefix, reason in reasons.items()
        if key == prefix or key.startswith(f"{prefix}.")
    ]


# --- losses


def compare_losses(a: Losses, b: Losses, tolerance: float, step: int | None = None) -> LossDifference | None:
    """Step by step, by |a - b| / |b|. None where no step is on both sides."""
    steps = sorted(
        a.by_step.keys() & b.by_step.keys() if step is None else {step} & a.by_step.keys() & b.by_step.keys()
    )
    if not steps:
        return None
    different: list[int] = []
    relatives: dict[int, float] = {}
    beyond = nonfinite = absolute = 0
    for at in steps:
        x, y = a.by_step[at], b.by_step[at]
        if not (math.isfinite(x) and math.isfinite(y)):
            different.append(at)
            nonfinite += 1
            beyond += 1
        elif x != y:
            different.append(at)
            relatives[at] = abs(x - y) / abs(y) if y else math.inf
            absolute += y == 0
            beyond += relatives[at] > tolerance
    largest_step = max(relatives, key=lambda at: relatives[at], default=None)
    largest = 0.0 if not different else None
    if largest_step is not None and relatives[largest_step] < math.inf:
        largest = relatives[largest_step]
    return LossDifference(
        steps=steps,
        a=[a.by_step[at] for at in steps],
        b=[b.by_step[at] for at in steps],
        num_different=len(different),
        num_beyond=beyond,
        first_step=different[0] if different else None,
        largest=largest,
        largest_step=largest_step,
        num_nonfinite=nonfinite,
        num_absolute=absolute,
    )


# --- gradients


class _Summaries:
    """One side's gradient summaries, read when asked for: those of a large model need not all fit in memory."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def get(self, step: int | None) -> Summary | None:
        return Summary.load(self.side.summaries[step]) if step in self.side.summaries else None

    def metadata(self) -> dict[str, str]:
        """Of the first, which says what the recorder ran on."""
        first = self.get(next(iter(self.side.summaries), None))
        return {} if first is None else dict(first.metadata)


def _compare_gradients(a: _Summaries, b: _Summaries, pair: Pair, tolerance: float) -> Tensors | None:
    """Full tensors where both sides kept them, else summaries; None where each side has only the other one's kind."""
    in_a, in_b = a.get(pair[0]), b.get(pair[1])
    if pair[0] in a.side.full_gradients and pair[1] in b.side.full_gradients:
        comparison = compare_files(a.side.full_gradients[pair[0]], b.side.full_gradients[pair[1]])
        found = exact_rows("gradients", pair, comparison, tolerance, list(in_a.names) if in_a else [])
    elif in_a is not None and in_b is not None:
        try:
            found = estimated_rows(in_a, in_b, pair, tolerance)
        except (ValueError, ArithmeticError) as error:
            files = a.side.summaries[pair[0]], b.side.summaries[pair[1]]
            raise SummaryError(f"{files[0]} or {files[1]}: no gradient has such sums ({error})") from error
    else:
        return None
    for side, summary in (("A", in_a), ("B", in_b)):
        replicas = summary.metadata.get("replicas", "agree") if summary is not None else "agree"
        if replicas != "agree":
            found.replicas.append(f"In {side}, ranks that should hold the same gradients do not: {replicas}.")
    return found


def _headline(part: Tensors) -> str:
    at = "" if part.step_a is None else f" at step {part.step_a}"
    text = f"{part.what}{at}"
    if part.differing:
        text += f" ({len(part.differing)} of {len(part.rows)}, worst {part.differing[0].name})"
    if apart := len(part.only_a) + len(part.only_b):
        text += f" ({apart} on one side only)"
    return text


# --- for other programs


def to_json(found: Diff) -> dict[str, Any]:
    """The whole comparison as plain data; a figure that is not known is null."""
    return {
        "schema": SCHEMA,
        "tolerance": found.tolerance,
        "differs": found.differs,
        "verdict": found.verdict(),
        "a": _side_json(found.a),
        "b": _side_json(found.b),
        "settings": [vars(setting) for setting in found.settings],
        "losses": None if found.losses is None else {**vars(found.losses), "differs": found.losses.differs},
        "gradients": [_tensors_json(part) for part in found.gradients],
        "weights": None if found.weights is None else _tensors_json(found.weights),
        "reading": found.reading,
        "notes": found.notes,
        "estimates": {"relative_standard_error": RELATIVE_ERROR, "within_95_percent": list(LIKELY)},
    }


def _side_json(side: Side) -> dict[str, Any]:
    return {"path": str(side.path), "kind": side.kind.value, "status": side.status, "gate": side.gate}


def _tensors_json(part: Tensors) -> dict[str, Any]:
    return {
        "step_a": part.step_a,
        "step_b": part.step_b,
        "method": part.method,
        "differs": part.differs,
        "num_compared": len(part.rows),
        "num_differing": len(part.differing),
        "relative": part.relative,
        "relative_error": part.relative_error,
        "only_a": part.only_a,
        "only_b": part.only_b,
        "parameters": [{**vars(row), "relative_error": row.relative_error} for row in part.rows],
        "notes": part.notes,
    }
