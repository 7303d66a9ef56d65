"""When checkpoints are written, which are kept, and what a run is told when one cannot be."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from distbench.checkpoint.manifest import MANIFEST, complete, step_of
from distbench.checkpoint.save import NAME
from distbench.checkpoint.sharded import STATE, save_shards
from distbench.config import Config, OnError, to_container
from distbench.errors import CheckpointError
from distbench.runs.files import write_atomic
from distbench.runs.folder import RunFolder
from distbench.trainer import Trainer

LATEST = "latest"
"""A file with the name of the newest complete checkpoint's folder, for people and their scripts."""


class Keeper:
    """Trains on, and writes `checkpoints/step_XXXXXXXX/` on the way."""

    def __init__(self, config: Config, folder: RunFolder, trainer: Trainer) -> None:
        self.config, self.folder, self.trainer = config, folder, trainer
        self.options = config.checkpoint

    def run(self, until: int, since: int) -> None:
        """Train until a step. Checkpoints that fell due since `since` (while the gate or a window ran) are made up for by
        one. A collective."""
        for stop, due in self._stops(until, since):
            self.trainer.run(until=stop)
            if due:
                self.save()

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
        if step_of_latest(self.folder.checkpoints) != step:
            self.save()
        return f"stopped as asked after step {step}"

    def save(self) -> None:
        """Write one, drop what need not be kept. A collective; raises CheckpointError with `on_error=stop`."""
        self.trainer.beat("checkpoint", self.trainer.step)
        trainer, facts = self.trainer, {"config": to_container(self.config)}
        try:
            path = save_shards(trainer, self.folder.checkpoints, facts)
        except CheckpointError as error:
            if self.options.on_error is OnError.stop:
                raise
            if trainer.world.rank == 0:
                print(
                    f"distbench: no checkpoint of step {trainer.step}: {error}; the run goes on",
                    file=sys.stderr,
                    flush=True,
                )
                self.folder.update_record(checkpoint_error=f"step {trainer.step}: {error}")
            return
        if trainer.world.rank == 0:
            write_atomic(self.folder.checkpoints / LATEST, f"{path.name}\n")
            self.folder.update_record(last_checkpoint=str(path.relative_to(self.folder.path)))
            self._drop()

    def _drop(self) -> None:
        """Shards only: a plain model in the same folder stays."""
        keep, every = self.options.keep_last, self.options.keep_every
        for path in complete(self.folder.checkpoints)[:-keep]:
            if every is not None and step_of(path) % every == 0:
                continue
            # Not complete any more from here on, whatever happens.
            (path / MANIFEST).unlink()
            if (path / NAME).exists():
                for file in (*path.glob("rank_*.safetensors"), path / STATE):
                    file.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)


def step_of_latest(checkpoints: Path) -> int | None:
    """Of the newest complete checkpoint; None where there is none."""
    found = complete(checkpoints)
    return step_of(found[-1]) if found else None
