"""When checkpoints are written, which are kept, and what a run is told when one cannot be."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from distbench.checkpoint import lock
from distbench.checkpoint.attributes import Watch, attributes_of
from distbench.checkpoint.manifest import MANIFEST, MODEL, complete, step_of
from distbench.checkpoint.saving import InBackground, Save, Staging, remove_unfinished, save_together
from distbench.checkpoint.sharded import begin
from distbench.checkpoint.state import STATE
from distbench.config import Config, OnError, to_container
from distbench.errors import CheckpointError
from distbench.runs.files import write_atomic
from distbench.runs.folder import RunFolder
from distbench.strategies.extra_state import extra_states
from distbench.trainer import Trainer

LATEST = "latest"
"""A file with the name of the newest complete checkpoint's folder, for people and their scripts."""
PATIENCE_S = 60.0
"""How long a rank that fails waits for the checkpoint that is on its way."""


class Keeper:
    """Trains on, and writes `checkpoints/step_XXXXXXXX/` on the way."""

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer, console: TextIO | None = None) -> None:
        """Raises OutputError where another run writes in the folder. `console`: where a rank's user looks, if not at its
        stderr."""
        self.config, self.folder, self.trainer, self.console = config, folder, trainer, console
        self.options = config.checkpoint
        self._staging = Staging()
        self._pending: InBackground | None = None
        """The one that is on its way."""
        self._unnoted: InBackground | None = None
        """The same, until the record says that it is there."""
        self._times = {"saves": 0, "blocked_seconds": 0.0, "waited_seconds": 0.0}
        self._not_kept: list[str] = []
        """What checkpoints do not hold and a resumed run may lack, in sentences."""
        self._watch = Watch(attributes_of(trainer)) if self._leads and self.options.every is not None else None
        if self.options.async_:
            trainer.optimizer.register_step_pre_hook(self._before_update)
        self._lock: TextIO | None = None
        if self._leads and (self.options.every is not None or config.resume is not None):
            self._lock = lock.join(folder.path)
            remove_unfinished(folder.checkpoints)

    @property
    def _leads(self) -> bool:
        return self.trainer.world.rank == 0

    def run(self, until: int, since: int) -> None:
        """Train until a step. Checkpoints that fell due since `since` (while the gate or a window ran) are made up for by
        one. A collective; the last one is on disk when it returns."""
        try:
            for stop, due in self._stops(until, since):
                for step in range(self.trainer.step + 1, stop + 1):
                    self.trainer.run(until=step)
                    self._note()
                if due:
                    self.save()
            self.settle()
        finally:
            self.wait(PATIENCE_S)

    def _stops(self, until: int, since: int) -> Iterator[tuple[int, bool]]:
        every, now = self.options.every, self.trainer.step
        if every is None:
            yield until, False
            return
        if since // every < now // every and now < until:
            yield now, True
        yield from ((step, True) for step in range((now // every + 1) * every, until, every))
        yield until, True

    def stopped(self, passed: bool) -> str:
        """Write a checkpoint of where the run was asked to stop, and say where that was. A collective.

        `passed`: whether it has passed its gate; there is nothing to go on from before.
        """
        if not passed:
            return "stopped as asked, before its gate was passed: start it again"
        step = self.trainer.step
        if self.options.every is None and not self.options.final:
            return f"stopped as asked after step {step}, without a checkpoint: checkpoint=off"
        self.settle()
        latest, *_ = self.trainer.world.gather(step_of_latest(self.folder.checkpoints))  # as rank 0 sees it
        if latest != step:
            self.save()
            self.settle()
        return f"stopped as asked after step {step}"

    def save(self) -> None:
        """Write one, drop what need not be kept; with `checkpoint.async` its way to disk begins here. A collective; raises
        CheckpointError with `on_error=stop`, of the one before as well."""
        self.settle()
        self._beat()
        began = time.perf_counter()
        try:
            save = begin(self.trainer, self.folder.checkpoints, {"config": to_container(self.config)})
            self.tell_what_is_not_kept()
            if self.options.async_:
                self._pending = self._unnoted = InBackground(save, self._staging, lambda: self._committed(save))
            else:
                save_together(self.trainer.world, save)
                if self._leads:
                    self._committed(save)
        except CheckpointError as error:
            self._failed(self.trainer.step, error)
            return
        self._times["saves"] += 1
        self._times["blocked_seconds"] += time.perf_counter() - began
        if not self.options.async_:
            self._say(save)

    def settle(self) -> None:
        """See the one that is on its way through, on every rank. A collective; raises as `save` does."""
        if self._pending is None:
            return
        self._beat()
        began, pending, self._pending = time.perf_counter(), self._pending, None
        try:
            pending.finish(self.trainer.world)
        except CheckpointError as error:
            self._unnoted = None
            self._failed(pending.save.step, error)
            return
        self._times["waited_seconds"] += time.perf_counter() - began
        self._note()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until this rank has nothing on its way: for one that is about to end. Not a collective; what went wrong is told by
        `settle`."""
        if self._pending is not None:
            self._pending.wait(timeout_s)
            self._note()

    def _before_update(self, *_: object) -> None:
        """The optimizer's state may still be being copied."""
        if self._pending is not None and not self._pending.copied.is_set():
            began = time.perf_counter()
            self._pending.copied.wait()
            self._times["blocked_seconds"] += time.perf_counter() - began

    def _beat(self) -> None:
        self.trainer.beat("checkpoint", self.trainer.step)

    def _committed(self, save: Save) -> None:
        """Rank 0, as soon as it is a checkpoint, in whichever thread: files that nobody else writes. It is one whatever
        becomes of them."""
        try:
            write_atomic(self.folder.checkpoints / LATEST, f"{save.final.name}\n")
            self._drop()
        except OSError as error:
            print(f"distbench: after {save.final} was written: {error}", file=sys.stderr, flush=True)

    def _note(self) -> None:
        """Say of one that was written in the background that it is there. The record has one writer, the main thread, which
        comes by after every step."""
        if self._unnoted is not None and self._unnoted.committed.is_set():
            save, self._unnoted = self._unnoted.save, None
            self._say(save)

    def tell_what_is_not_kept(self) -> None:
        """Once each: what has changed and is of a kind that checkpoints do not hold, and extra state that is no tensor.
        Not a collective."""
        if not self._leads:
            return
        new = self._watch.changed(attributes_of(self.trainer)) if self._watch is not None else []
        _, others = extra_states(self.trainer.module, self.trainer.strategy.canonical_name)
        extra = [f"{name} is no tensor and is not kept, nor is it in {MODEL}" for name in others]
        new += [sentence for sentence in extra if sentence not in self._not_kept]
        self._not_kept += new
        for sentence in new:
            print(f"distbench: note: {sentence}", file=self.console or sys.stderr, flush=True)
        if new:
            self.folder.update_record(saving=self._saving)

    @property
    def _saving(self) -> dict[str, Any]:
        """A section of the record."""
        return {**self._times, "not_kept": self._not_kept}

    def _say(self, save: Save) -> None:
        if self._leads:
            self.folder.update_record(
                last_checkpoint=str(save.final.relative_to(self.folder.path)),
                checkpoint_error=None,
                saving=self._saving,
            )

    def _failed(self, step: int, error: CheckpointError) -> None:
        if self.options.on_error is OnError.stop:
            raise error
        if self._leads:
            told = f"distbench: no checkpoint of step {step}: {error}; the run goes on"
            print(told, file=self.console or sys.stderr, flush=True)
            self.folder.update_record(checkpoint_error=f"step {step}: {error}")

    def _drop(self) -> None:
        """Shards only: a plain model in the same folder stays."""
        keep, every = self.options.keep_last, self.options.keep_every
        # A link is someone's who keeps that checkpoint elsewhere: neither followed, nor removed, nor one of ours.
        own = [path for path in complete(self.folder.checkpoints) if not path.is_symlink()]
        for path in own[:-keep]:
            if every is not None and step_of(path) % every == 0:
                continue
            # Not complete any more from here on, whatever happens.
            (path / MANIFEST).unlink()
            if (path / MODEL).exists():
                for file in (*path.glob("rank_*.safetensors"), path / STATE):
                    file.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)


def step_of_latest(checkpoints: Path) -> int | None:
    """Of the newest complete checkpoint; None where there is none."""
    found = complete(checkpoints)
    return step_of(found[-1]) if found else None
