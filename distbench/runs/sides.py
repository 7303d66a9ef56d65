"""What there is to compare on one side of `distbench diff`: found and read as data, never executed or unpickled.

A side is a run folder (whatever became of the run), a folder or file that `GradientRecorder` wrote, or a safetensors
file or checkpoint folder from anywhere. Everything is optional; what a file holds is checked before it is believed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from distbench.errors import RunFolderError
from distbench.runs.files import is_plain_name
from distbench.runs.folder import read_record
from distbench.runs.text import detail

MAX_METRICS_BYTES = 256 * 2**20
"""A million steps."""
MAX_GATE_BYTES = 64 * 2**20
"""Of gate.json: 50,000 parameters. A tree may take 25 times its text in memory."""
MAX_YAML_BYTES = 2**18
"""A hundred times what a run writes, and the most that PyYAML reads in seconds whatever it is."""
MAX_SETTINGS = 20_000
"""Leaves of a config tree: far more than any real one has, and few enough that aliases cannot blow it up."""
MAX_BITS = 4096
"""Of a whole number: YAML may have longer ones than Python writes in decimals."""
LEAST, MOST = 1e-200, 1e200
"""Beyond which nothing is a measurement."""
GATE_SCHEMA = 1

_SUMMARY = re.compile(r"step_(\d{1,18})\.safetensors")
_FULL = re.compile(r"step_(\d{1,18})\.full\.safetensors")
_CHECKPOINT = re.compile(r"step_(\d{1,18})")
_DUPLICATE = "duplicate_of.json"
_RUN_FILES = ("record.json", "resolved.yaml", "metrics.jsonl", "gate.json", "gradients", "checkpoints", ".hydra")


class Kind(StrEnum):
    """What a path is."""

    run = "run"
    summaries = "gradient summaries"
    tensors = "tensors"


@dataclass(frozen=True)
class Losses:
    """metrics.jsonl: the loss of each step, in order of steps."""

    by_step: dict[int, float]
    notes: tuple[str, ...] = ()


@dataclass
class Side:
    """What one path holds."""

    path: Path
    kind: Kind
    record: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    """As dotted settings: leaves of `record.json`'s or `resolved.yaml`'s tree."""
    gate: str | None = None
    """The verdict, in its own words."""
    losses: Losses | None = None
    summaries: dict[int | None, Path] = field(default_factory=dict)
    """Gradient summaries by step; None where a file does not say which step it is of."""
    full_gradients: dict[int | None, Path] = field(default_factory=dict)
    weights: dict[int | None, Path] = field(default_factory=dict)
    """Checkpoints by step."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path) -> Side:
        """Find out what `path` is and read its small files.

        Raises RunFolderError (or a TensorFileError or SummaryError once its tensors are read) for a path that is
        missing, damaged, foreign, or of a newer schema.
        """
        path = Path(path)
        try:
            if path.is_dir():
                return _open_folder(path)
            if not path.exists():
                raise RunFolderError(f"{path}: no such file or folder")
            return _open_file(path)
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error

    @property
    def status(self) -> str | None:
        """What became of a run."""
        status = self.record.get("status")
        return status if isinstance(status, str) else None


def _open_folder(path: Path) -> Side:
    if (path / _DUPLICATE).exists():
        return _open_twin(path)
    if not _is_run(path):
        summaries = _steps(path, _SUMMARY)
        if summaries and is_summary(next(iter(summaries.values()))):
            return Side(path, Kind.summaries, summaries=summaries, full_gradients=_steps(path, _FULL))
        if not any(path.glob("*.safetensors*")) and (inside := _folders_inside(path)):
            raise RunFolderError(f"{path} holds nothing to compare itself; name a folder in it: {inside}")
        return Side(path, Kind.tensors, weights={None: path})

    side = Side(path, Kind.run)
    if (path / "record.json").exists():
        side.record = read_record(path)
        side.config = settings(side.record.get("config"), path / "record.json")
    else:
        side.notes.append(f"{path}: no record.json, the run did not get that far; compared by what is there")
        if (path / "resolved.yaml").exists():
            side.config = settings(_read_yaml(path / "resolved.yaml"), path / "resolved.yaml")
    side.gate = _read_gate(path, side.record)
    if (path / "metrics.jsonl").exists():
        side.losses = read_losses(path / "metrics.jsonl")
        side.notes += side.losses.notes
    side.summaries = _steps(path / "gradients", _SUMMARY)
    side.full_gradients = _steps(path / "gradients", _FULL)
    for step, checkpoint in _steps(path / "checkpoints", _CHECKPOINT).items():
        model = checkpoint / "model.safetensors"
        side.weights[step] = model if model.exists() else checkpoint
    return side


def _open_twin(path: Path) -> Side:
    """The run that a sweep's cell names instead of holding one of its own: a neighbour, and itself a run."""
    file = path / _DUPLICATE
    content = read_text(file, MAX_YAML_BYTES)
    with _as_run_folder_error(file):
        name = json.loads(content)["duplicate_of"]
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the name of a cell")
    twin = path.resolve().parent / name
    if not twin.is_dir() or (twin / _DUPLICATE).exists():
        raise RunFolderError(f"{path} is the same experiment as {detail(name)}, which is no run folder beside it")
    side = _open_folder(twin)
    side.notes.insert(0, f"{path} was not run, as it is the same experiment as {detail(name)}: that one is compared")
    return side


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _RUN_FILES)


def _folders_inside(path: Path, depth: int = 2) -> str:
    """Folders below `path` that `Side.open` would take: the first few, and how many more."""

    def holding(folder: Path, depth: int) -> Iterator[Path]:
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                if _is_run(entry) or any(entry.glob("*.safetensors")):
                    yield entry
                elif depth > 1:
                    yield from holding(entry, depth - 1)

    found = [str(entry.relative_to(path)) for entry in holding(path, depth)]
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _open_file(path: Path) -> Side:
    if not is_summary(path):
        return Side(path, Kind.tensors, weights={None: path})
    match = _SUMMARY.fullmatch(path.name)
    return Side(path, Kind.summaries, summaries={int(match[1]) if match else None: path})


def summaries_in(folder: Path) -> list[Path]:
    """Files of a folder that are named as gradient summaries are, in order of steps."""
    return list(_steps(folder, _SUMMARY).values())


def is_summary(path: Path) -> bool:
    """Whether this is a gradient summary; what cannot be opened is not, and its reader says why."""
    from safetensors import SafetensorError, safe_open

    from distbench.numerics.summary import FORMAT, MAX_HEADER_BYTES

    if not path.is_file():
        return False
    with path.open("rb") as file:
        if int.from_bytes(file.read(8), "little") > min(MAX_HEADER_BYTES, path.stat().st_size):
            return False
    try:
        with safe_open(path, framework="numpy") as opened:
            return FORMAT in (opened.metadata() or {})
    except (SafetensorError, ValueError):
        return False


def _steps(folder: Path, pattern: re.Pattern[str]) -> dict[int | None, Path]:
    """The entries of a folder that are named after a step, in order of steps."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name))}
    return dict(sorted(found.items()))


# --- small files


def read_losses(path: Path) -> Losses:
    """The losses of a `metrics.jsonl`. A last line cut short is what a crash leaves, and is left out.

    Raises RunFolderError, with the number of the line, for anything else that is not what distbench writes.
    """
    losses: dict[int, float] = {}
    notes: list[str] = []
    repeated = 0
    lines = read_text(path, MAX_METRICS_BYTES).split("\n")
    complete, rest = lines[:-1], lines[-1]
    if rest:
        notes.append(f"{path}: the last line is cut short and left out")
    for number, line in enumerate(complete, 1):
        if not line.strip():
            continue
        with _as_run_folder_error(path, f"line {number}"):
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            step, loss = row["step"], number_of(row["loss"])
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
                raise ValueError(f"step {step!r}")
        repeated += step in losses
        losses[step] = loss
    if repeated:
        notes.append(f"{path}: {repeated} steps are there more than once (resumed?); the last of each counts")
    return Losses(dict(sorted(losses.items())), tuple(notes))


def number_of(value: Any) -> float:
    """A number as distbench writes it: JSON's own, or the name of a non-finite one."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def is_measurable(value: float) -> bool:
    """Whether a number from 0 on may be a measurement: sums, shares and products of it are numbers, too."""
    return value == 0 or LEAST < value < MOST


def settings(tree: Any, path: Path) -> dict[str, Any]:
    """The leaves of a config tree by dotted key; a short list of plain values is one leaf.

    Raises RunFolderError where there are too many for a config, or it is nested too deeply.
    """
    found: dict[str, Any] = {}

    def visit(prefix: str, value: Any, depth: int) -> None:
        if depth > 32 or len(found) >= MAX_SETTINGS:
            raise RunFolderError(f"{path} is damaged: its config is too large or too deeply nested")
        if isinstance(value, list | tuple) and not _is_short(value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                visit(f"{prefix}.{_plain(key)}" if prefix else str(_plain(key)), inner, depth + 1)
        elif prefix:
            found[prefix] = _plain(value)

    visit("", tree if isinstance(tree, dict) else {}, 0)
    return found


def _is_short(values: list[Any] | tuple[Any, ...]) -> bool:
    return len(values) <= 16 and not any(isinstance(value, list | tuple | dict) for value in values)


def _plain(value: Any) -> Any:
    """A leaf as JSON can hold it."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_BITS else hex(value)[:500]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)[:500]  # an empty tree, a date


def _read_gate(path: Path, record: dict[str, Any]) -> str | None:
    file = path / "gate.json"
    if not file.exists():
        section = record.get("gate")
        text = section.get("text") if isinstance(section, dict) else None
        return text if isinstance(text, str) else None
    return read_gate(file)


def read_gate(path: Path) -> str:
    """The verdict of a `gate.json`, in its own words. Raises RunFolderError for a damaged or newer one."""
    content = read_text(path, MAX_GATE_BYTES)
    with _as_run_folder_error(path):
        tree = json.loads(content)
        schema, text = tree["schema"], tree["text"]
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1 or not isinstance(text, str):
            raise ValueError("not a distbench gate verdict")
    if schema > GATE_SCHEMA:
        raise RunFolderError(
            f"{path} has schema {detail(schema)}, this distbench reads up to {GATE_SCHEMA}; upgrade distbench"
        )
    return text


def _read_yaml(path: Path) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Without merge keys (`<<`): distbench writes none, and before PyYAML 6.0.4 a few of them could fill memory."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
                raise yaml.constructor.ConstructorError(problem="merge keys are not read")

    content = read_text(path, MAX_YAML_BYTES)
    with _as_run_folder_error(path):
        try:
            return yaml.load(content, Loader)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error


def read_text(path: Path, limit: int) -> str:
    """A file's text. Raises RunFolderError for what is no regular file, larger than `limit` bytes, or no UTF-8."""
    if not path.is_file():  # a pipe would be waited for
        raise RunFolderError(f"{path} is not a regular file; is this a run folder?")
    with _as_run_folder_error(path):
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"{size} bytes, more than the {limit} of any that distbench writes")
        return path.read_text(encoding="utf-8")


@contextmanager
def _as_run_folder_error(path: Path, where: str = "") -> Iterator[None]:
    """Turn what reading and parsing can raise into one line that names the file."""
    place = f"{path}, {where}," if where else f"{path}"
    try:
        yield
    except KeyError as error:
        raise RunFolderError(f"{place} is damaged: no {error} in it") from error
    except OSError as error:
        raise RunFolderError(f"{place} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise RunFolderError(f"{place} is damaged: {detail(error)}") from error
