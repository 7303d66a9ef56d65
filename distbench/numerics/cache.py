"""Baselines cached by content under `<output_dir>/.baselines/`, shared by every run of a sweep and by sweeps at once.

An entry is a folder that appears under its name only when it is complete. Its manifest holds its key, and every file's size
and SHA-256; an entry that does not match is rebuilt. Old entries go when the cache is over its limit.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from distbench.config import (
    Config,
    CustomModel,
    Schedule,
    TextData,
    batch_shape,
    digest,
    resolve_device,
    threads_per_rank,
    to_container,
    world_size,
)
from distbench.errors import BaselineError, RunFolderError
from distbench.numerics.baseline import MAX_SKIPPED
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder
from distbench.runs.sides import read_text
from distbench.strategies import strategy_class

FORMAT = 1
"""Raised when the files of an entry change."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 2**20

GIB = 2**30


@dataclass(frozen=True)
class BaselineEntry:
    """Where a run's baseline is, and whether it was there before."""

    path: str
    reused: bool


def ensure_baseline(config: Config, model: nn.Module | None, run: RunFolder, local_world_size: int) -> BaselineEntry:
    """The baseline of this config: from the cache, or computed now in a process of its own.

    `model`: the meta-device model, if the user's factory allows one; its classes' source is part of the key.
    Raises RanksFailed if the replay fails (`logs/failure_baseline.json` has the traceback), BaselineError if it cannot
    fit into memory.
    """
    root = Path(config.output_dir).resolve() / ".baselines"
    entry = root / key(config, model, local_world_size)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f"{entry.name}.lock"):
            _use(entry)
            if _intact(entry):
                os.utime(entry / MANIFEST)  # least recently used goes first
                return BaselineEntry(str(entry), reused=True)
            _check_memory(config, model)
            _make(entry, config, run, local_world_size)
        _evict(root, config.gate.cache_gib * GIB, keep=entry.name)
    except OSError as error:
        raise BaselineError(f"cannot write baselines in {root}: {error}; set output_dir=..., or gate=off") from error
    return BaselineEntry(str(entry), reused=False)


def _make(entry: Path, config: Config, run: RunFolder, local_world_size: int) -> None:
    """Compute an entry under another name, and rename it when it is complete."""
    if entry.is_symlink() or entry.is_file():
        entry.unlink()
    shutil.rmtree(entry, ignore_errors=True)
    for left in entry.parent.glob(f".{entry.name}.*.tmp"):  # by a run that was killed; its replay may still be writing
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}.", suffix=".tmp"))
    temporary.chmod(0o755)
    try:
        _compute(config, temporary, run, local_world_size)
        write_json(temporary / MANIFEST, {"format": FORMAT, "key": entry.name, "files": _manifest(temporary)})
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(path: str) -> None:
    """Remove a stale entry."""
    shutil.rmtree(path, ignore_errors=True)


def key(config: Config, model: nn.Module | None, local_world_size: int) -> str:
    """Content address: everything that the replay's bits depend on, and nothing else."""
    tree = to_container(config)
    reduction = strategy_class(config.strategy.name).reduction(config).to_dict()
    if model is not None and next(model.buffers(), None) is None:
        reduction["broadcast_buffers"] = None  # nothing to send: ddp and fsdp share their baseline
    parts = {
        name: tree[name] for name in ("model", "precision", "loss", "optimizer", "seed", "clip_norm", "deterministic")
    }
    device = resolve_device(config)
    return digest(
        {
            **parts,
            "format": FORMAT,
            "data": [tree["data"], _data_files(config)],
            "batch": batch_shape(config).to_dict(),
            "reduction": reduction,
            "units": tree["wrap_policy"] if reduction["unit_calls"] or reduction["packed"] else None,
            "steps": min(config.gate.steps, config.steps),
            "most_steps": min(config.steps, MAX_SKIPPED) if config.precision.scaler.enabled else None,
            "schedule": None if config.optimizer.schedule is Schedule.constant else config.steps,
            "fp64_reference": config.gate.fp64_reference,
            "device": torch.cuda.get_device_name(0) if device == "cuda" else _cpu(),
            "noise": config.gate.noise if device == "cuda" else None,
            "threads": threads_per_rank(config, local_world_size),
            "torch": torch.__version__,
            "code": _code(config, model),
        }
    )


def _cpu() -> str:
    """What kernels depend on; matrix products ask the processor itself, so its model is part of it."""
    name = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{name} {torch.backends.cpu.get_cpu_capability()} {sys.platform}"


def text_files(data: TextData) -> list[Path]:
    """In the order in which they are read."""
    root = Path(data.path).expanduser().resolve()
    found = sorted(root.rglob(data.glob)) if root.is_dir() else [root]
    return [file for file in found if file.is_file()]


def _data_files(config: Config) -> list[Any]:
    """Names, sizes and times of the text's files: the samples follow from them."""
    if not isinstance(config.data, TextData):
        return []
    return [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in text_files(config.data)]


def _code(config: Config, model: nn.Module | None) -> str:
    """Digest of the source that computes the baseline: this package's, and the user's model's with what it imported."""
    files = set(Path(__file__).resolve().parents[1].rglob("*.py"))
    for source in model_sources(config, model):
        files |= _neighbours(source)
    return _digest_of(files)


def model_sources(config: Config, model: nn.Module | None) -> set[Path]:
    """Files that define the model's modules, and its factory; torch's own not."""
    found: set[Path] = set()
    classes: list[Any] = [type(module) for module in model.modules()] if model is not None else []
    if isinstance(config.model, CustomModel):
        classes.append(sys.modules.get(config.model._target_.rpartition(".")[0]))
    for known in dict.fromkeys(classes):
        try:
            source = inspect.getsourcefile(known) if known is not None else None
        except (TypeError, OSError):
            source = None  # built in C, or typed at a prompt: no source to follow
        if source and "/torch/" not in source:
            found.add(Path(source).resolve())
    return found


def _digest_of(files: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for file in sorted(files):
        content.update(hashlib.sha256(file.read_bytes()).digest())
    return content.hexdigest()[:16]


def _neighbours(source: Path) -> set[Path]:
    """A source file, and the imported modules of its package (without one: of its folder and below)."""
    root = source.parent
    while (root / "__init__.py").exists() and (root.parent / "__init__.py").exists():
        root = root.parent
    found = {source}
    if "site-packages" in root.parts:
        return found  # an installed package changes with its version; its whole source would be much to read
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if name and name.endswith(".py") and "site-packages" not in name and _resolved(name).is_relative_to(root):
            found.add(_resolved(name))
    return {file for file in found if file.is_file()}


@functools.cache
def _resolved(name: str) -> Path:
    """A module's file; there are more than a thousand to ask for each run of a sweep."""
    return Path(name).resolve()


# --- integrity

_verified: dict[str, dict[str, tuple[int, int]]] = {}
"""Entries whose digests this process has checked: path -> sizes and times of its files then."""


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    rows = {}
    for file in sorted(folder.iterdir()):
        if file.name == MANIFEST:
            continue
        with file.open("rb") as handle:
            rows[file.name] = {
                "bytes": file.stat().st_size,
                "sha256": hashlib.file_digest(handle, "sha256").hexdigest(),
            }
    return rows


def _intact(entry: Path) -> bool:
    """Whether every file is there with the bytes its manifest names; digests are read once a process and state."""
    try:
        manifest = json.loads(read_text(entry / MANIFEST, MAX_MANIFEST_BYTES))
        if (manifest["format"], manifest["key"]) != (FORMAT, entry.name):  # of another key: someone has moved it
            return False
        files = {file.name: file.stat() for file in entry.iterdir() if file.name != MANIFEST}
        # First: what has another size need not be read, and what is no regular file (a pipe) would be waited for.
        if {name: file.st_size for name, file in files.items()} != {
            n: row["bytes"] for n, row in manifest["files"].items()
        }:
            return False
        state = {name: (file.st_size, file.st_mtime_ns) for name, file in files.items()}
        if _verified.get(str(entry)) == state:
            return True
        if _manifest(entry) != manifest["files"]:
            return False
    except (RunFolderError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    _verified[str(entry)] = state
    return True


def _evict(root: Path, limit: float, keep: str) -> None:
    """Remove least recently used entries until the rest fits, never one that another run makes or uses."""

    def size(entry: Path) -> int:
        try:
            return sum(file.stat().st_size for file in entry.iterdir())
        except OSError:
            return 0  # another process has just removed it

    def used(entry: Path) -> float:
        try:
            return (entry / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0

    entries = sorted((e for e in root.iterdir() if e.is_dir() and not e.name.startswith(".")), key=used)
    total = sum(size(entry) for entry in entries)
    for entry in entries:
        if total <= limit:
            return
        if entry.name == keep:
            continue
        making, using = root / f"{entry.name}.lock", root / f"{entry.name}.use"
        with _lock(making, wait=False) as unmade, _lock(using, wait=False) as unused:
            if unmade and unused:
                total -= size(entry)
                shutil.rmtree(entry, ignore_errors=True)


_used: list[IO[str]] = []
"""The shared lock on the entry that this process's run uses: the ranks read it long after it was found."""


def _use(entry: Path) -> None:
    """Keep an entry from eviction until this process uses another, or ends."""
    while _used:
        _used.pop().close()
    handle = (entry.parent / f"{entry.name}.use").open("a")
    fcntl.flock(handle, fcntl.LOCK_SH)
    _used.append(handle)


@contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """An advisory lock on a file beside the entry; freed by the kernel when its holder dies."""
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


# --- computing

BYTES_PER_PARAMETER = 4 + 12 + 8 + 4 + 4
"""fp32 weight, gradient and two moments, then G in fp64, A and the reduced gradient, at the least."""


def _check_memory(config: Config, model: nn.Module | None) -> None:
    """Refuse, with what it needs, a baseline that cannot fit."""
    if model is None or resolve_device(config) == "cuda":
        return
    parameters = sum(p.numel() for p in model.parameters())
    ranks = world_size(config)
    need = parameters * (BYTES_PER_PARAMETER + 4 * ranks + (16 if config.gate.fp64_reference else 0))
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass  # not Linux: what sysconf said has to do
    if need > available:
        raise BaselineError(
            f"the baseline of {parameters:,} parameters and {ranks} ranks needs about {need / GIB:.1f} GiB of memory, "
            f"{available / GIB:.1f} GiB are available; use gate.fp64_reference=false, fewer layers for the gate, or gate=off"
        )


def _compute(config: Config, folder: Path, run: RunFolder, local_world_size: int) -> None:
    from distbench.launching.local import RanksFailed
    from distbench.numerics.baseline_process import BASELINE_RANK, main

    context = multiprocessing.get_context("forkserver")
    threads = threads_per_rank(config, local_world_size)
    process = context.Process(target=main, args=(to_container(config), str(folder), str(run.path), threads))
    process.start()
    try:
        process.join()
    except BaseException:
        process.kill()
        raise
    if process.exitcode != 0:
        raise RanksFailed([(BASELINE_RANK, process.exitcode or 0)])
