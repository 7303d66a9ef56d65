"""What watches a run: the metrics log and the progress bar. TensorBoard's is in report/tensorboard.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TextIO

from distbench.runs.files import strict
from distbench.runs.folder import RunFolder
from distbench.trainer import Observer, StepMetrics, Trainer


def metric_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """What a run's metrics log has: none for a new run."""
    if not folder.metrics_path.exists():
        return []
    return [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]


class MetricLog(Observer):
    """`metrics.jsonl`: one line a step, numbers as Python prints them (they read back to the same bits)."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.metrics_path.open("a", buffering=1)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        row = asdict(metrics)
        row["tokens_per_second"] = metrics.tokens / metrics.step_seconds
        self._file.write(json.dumps(strict(row), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


class Progress(Observer):
    """A progress bar with loss and speed, on a terminal only."""

    def __init__(self, steps: int, label: str, console: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=console),
            transient=True,
            auto_refresh=False,  # no thread of its own: it must not compete with the ranks for a core
        )
        self._task = self._bar.add_task(label, total=steps, note="")
        self._bar.start()

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        note = f"loss {metrics.loss:.4g}  {metrics.tokens / metrics.step_seconds:,.0f} tokens/s"
        self._bar.update(self._task, completed=metrics.step, note=note, refresh=True)

    def close(self) -> None:
        self._bar.stop()
