"""A checkpoint's way to disk: each rank its own shard, then rank 0 what makes the folder a checkpoint.

Nothing here is a collective on tensors. While a run goes on ranks meet in files alone (`InBackground`).
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distbench.checkpoint.manifest import MANIFEST, Entry, read_small, write_manifest
from distbench.checkpoint.shards import shard_name
from distbench.checkpoint.state import STATE
from distbench.checkpoint.tensors import write_tensors
from distbench.errors import CheckpointError
from distbench.launching.world import World
from distbench.runs.files import json_text, write_json

POLL_S = 0.02
UNFINISHED = ".step_*.tmp"
"""Folders of checkpoints that are being written, or never were to the end."""


@dataclass
class Save:
    """One checkpoint, as far as one rank writes it."""

    checkpoints: Path
    step: int
    rank: int
    size: int
    """Of the world."""
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    own: dict[str, Any]
    """This rank's part of `train_state.json`."""
    shared: dict[str, Any]
    """All ranks' part of it."""

    @property
    def final(self) -> Path:
        return self.checkpoints / f"step_{self.step:08d}"

    @property
    def temporary(self) -> Path:
        return self.checkpoints / f".step_{self.step:08d}.tmp"

    def prepare(self) -> None:
        """Rank 0: an empty folder for all. Raises CheckpointError."""
        try:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot make {self.temporary}: {error.strerror}") from error

    def write(self) -> dict[str, Any]:
        """Write this rank's shard, to disk, and return what rank 0 has to know of it. Raises CheckpointError."""
        file = self.temporary / shard_name(self.rank)
        try:
            entry = write_tensors(file, self.tensors, self.metadata)
        except OSError as error:
            with suppress(OSError):  # now: the run goes on, and on a full disk it could not write a line of its log
                file.unlink()
            raise CheckpointError(f"cannot write {self.temporary.name}/{file.name}: {error.strerror}") from error
        return {"entry": asdict(entry), "state": self.own}

    def commit(self, shares: list[dict[str, Any]]) -> None:
        """Rank 0, once every rank has written: the folder gets its name, and is on disk. Raises CheckpointError."""
        try:
            state = {**self.shared, "ranks": [share["state"] for share in shares]}
            write_json(self.temporary / STATE, state)
            entries = [Entry(**share["entry"]) for share in shares]
            write_manifest(self.temporary, [*entries, Entry.of(self.temporary / STATE)])
            for rank in range(self.size):
                self.share(rank).unlink(missing_ok=True)
            _sync(self.temporary)
            if self.final.is_symlink():
                raise CheckpointError(f"cannot write {self.final}: it is a link; move it away")
            if self.final.exists():  # of this step again, after a resume from an earlier one
                (self.final / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(self.final)
            self.temporary.rename(self.final)
            _sync(self.checkpoints)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.final}: {error.strerror}") from error

    def share(self, rank: int) -> Path:
        """Where a rank says that its shard is on disk, while there is no other way to tell rank 0."""
        return self.temporary / f"share_{rank:05d}.json"


def save_together(world: World, save: Save) -> None:
    """Write one while the run waits. A collective; raises CheckpointError on every rank where one could not, and leaves
    nothing half-written."""
    share, problem = None, None
    try:
        share = save.write()
    except CheckpointError as error:
        problem = str(error)
    shares = world.gather((share, problem))
    problem = next((found for _, found in shares if found), None)
    if world.rank == 0 and problem is None:
        try:
            save.commit([share for share, _ in shares])
        except CheckpointError as error:
            problem = str(error)
    agree(world, problem, save.temporary)


def agree(world: World, problem: str | None, unfinished: Path | None = None) -> None:
    """Go on together, or raise the first rank's problem on every rank. A collective."""
    found = next((share for share in world.gather(problem) if share), None)
    if found is None:
        return
    if world.rank == 0 and unfinished is not None:
        shutil.rmtree(unfinished, ignore_errors=True)
    raise CheckpointError(found)


def _sync(folder: Path) -> None:
    """Make names in a folder last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass
class Staging:
    """Host memory that tensors are copied to, kept from save to save: new memory costs more than the copy."""

    _copies: dict[str, Tensor] = field(default_factory=dict)

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies that hold until these names are copied again."""
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[name] = copy.copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: self._copies[name] for name in tensors}


class InBackground:
    """A save that goes on while the run does, in a thread of each rank. No collective, no CUDA: files alone.

    Rank 0's thread makes the folder a checkpoint as soon as every rank says, in a file, that its shard is on disk.
    """

    def __init__(self, save: Save, staging: Staging, committed: Callable[[], None]) -> None:
        """Returns once what the next forward may change is copied. What is the optimizer's alone is copied by the thread:
        the optimizer must not step before `copied`. `committed` is called on rank 0, in the thread."""
        self.save = save
        self.problem: str | None = None
        self.copied, self.committed = threading.Event(), threading.Event()
        """It shares no memory with the run any more; it is a checkpoint, as rank 0 knows."""
        self._staging, self._then = staging, committed
        self._written, self._given_up, self._done = threading.Event(), threading.Event(), threading.Event()
        state = {name: t for name, t in save.tensors.items() if name.startswith("O/") and not t.is_cuda}
        copies = staging.copy({name: t for name, t in save.tensors.items() if name not in state})
        save.tensors = state | copies
        # A daemon: a rank that fails must not wait for its peers.
        threading.Thread(target=self._run, args=(state,), name="checkpoint", daemon=True).start()

    def _run(self, state: dict[str, Tensor]) -> None:
        try:
            self.save.tensors |= self._staging.copy(state)
            self.copied.set()
            share = self.save.write()
            if self.save.rank == 0:
                self._written.set()
                self._commit(share)
            else:
                self._tell(share)
        except Exception as error:  # seen by nobody here: told when the run asks
            self.problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        finally:
            for event in (self.copied, self._written, self._done):
                event.set()

    def _tell(self, share: dict[str, Any]) -> None:
        """Rank 0, which may read a name as soon as it is there."""
        file = self.save.share(self.save.rank)
        new = file.with_suffix(".new")
        new.write_text(json_text(share))
        new.rename(file)

    def _commit(self, own: dict[str, Any]) -> None:
        others = [self.save.share(rank) for rank in range(1, self.save.size)]
        while not all(file.exists() for file in others):
            if self._given_up.wait(POLL_S):
                return
        self.save.commit([own, *(read_small(file) for file in others)])
        self._then()
        self.committed.set()

    def wait(self, timeout_s: float | None) -> None:
        """Until it is a checkpoint (rank 0) or this rank's part of it is done. Not a collective."""
        self._done.wait(timeout_s)

    def finish(self, world: World) -> None:
        """Wait for all ranks. A collective; raises CheckpointError on every rank where one could not, and leaves nothing
        half-written."""
        self._written.wait()
        problems = [found for found in world.gather(self.problem) if found]
        if problems:
            self._given_up.set()
        self._done.wait()
        agree(world, next(iter(problems), self.problem), self.save.temporary)


def remove_unfinished(checkpoints: Path) -> None:
    """What a run that died has left half-written: checkpoints, and the file that was to become `latest`."""
    for left in checkpoints.glob(".*.tmp"):
        with suppress(OSError):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
