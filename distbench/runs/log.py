"""Everything rank 0 writes while a run goes on, as one object."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, TextIO

from distbench.config import Config
from distbench.report.tensorboard import TensorBoardLog
from distbench.runs.folder import RunFolder, now
from distbench.runs.observers import MetricLog, Progress, metric_rows
from distbench.trainer import Observer, StepMetrics, Trainer


class StepSummary(Observer):
    """The result section's numbers; times are of the steps after the first `warm_up` (set-up, and the gate's)."""

    def __init__(self, warm_up: int, done: Sequence[dict[str, Any]] = ()) -> None:
        """`done`: what the metrics log has already."""
        self.warm_up = warm_up
        self.first: tuple[float, float] | None = None
        """(loss, gradient norm)."""
        self.last: dict[str, Any] | None = None
        """A row of the metrics log, or what the result needs of it."""
        self.seconds: list[float] = []
        self.skipped = 0
        if done:
            self.first, self.last = (float(done[0]["loss"]), float(done[0]["grad_norm"])), done[-1]
            self.seconds = [float(row["step_seconds"]) for row in done if row["step"] > warm_up]
            self.skipped = sum(bool(row["skipped"]) for row in done)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        if self.first is None:
            self.first = metrics.loss, metrics.grad_norm
        if metrics.step > self.warm_up:
            self.seconds.append(metrics.step_seconds)
        self.last = {name: getattr(metrics, name) for name in ("step", "loss", "grad_norm", "tokens")}
        self.skipped += metrics.skipped

    def result(self) -> dict[str, Any]:
        if self.first is None or self.last is None:
            return {"steps": 0, "reason": "the run ended before its first step was done"}
        median = statistics.median(self.seconds) if self.seconds else None
        return {
            "steps": self.last["step"],
            "first_loss": self.first[0],
            "last_loss": float(self.last["loss"]),
            "first_grad_norm": self.first[1],
            "last_grad_norm": float(self.last["grad_norm"]),
            "skipped_steps": self.skipped,
            "step_seconds_median": median,
            "tokens_per_second_median": None if median is None else self.last["tokens"] / median,
            "reason": f"no step after the first {self.warm_up}, which are warm-up: no step time"
            if median is None
            else None,
        }


class RunLog:
    """Rank 0's observers, and the record's last sections."""

    def __init__(self, config: Config, folder: RunFolder, console: TextIO) -> None:
        self._folder = folder
        done = metric_rows(folder)  # of a run that is resumed
        self._metrics = MetricLog(folder)
        self._tensorboard = TensorBoardLog(folder, purge_step=done[-1]["step"] + 1 if done else None)
        self.write = self._tensorboard.write
        self.steps = StepSummary(config.gate.steps if config.gate.enabled else 1, done)
        self.observers: list[Observer] = [self._metrics, self._tensorboard, self.steps]
        if config.logging.histograms:
            self.observers.append(self._tensorboard.histograms())
        self._progress = None
        if config.logging.progress and console.isatty():
            label = f"{config.strategy.name} {config.precision.name}"
            self._progress = Progress(config.steps, label, console)
            self.observers.append(self._progress)

    def finish(self, **sections: Any) -> None:
        """Close the logs, then write the record: a record that says passed has complete logs beside it."""
        if self._progress:
            self._progress.close()
        self._metrics.close()
        sections |= {"result": self.steps.result(), "finished": now()}
        preview = self._folder.preview_record(**sections)
        self._tensorboard.close(preview)
        self._folder.update_record(**sections)
