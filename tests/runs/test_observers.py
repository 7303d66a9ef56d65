"""The metrics log and the progress bar."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distbench.build import build_trainer
from distbench.config import SGD, Logging
from distbench.runs.files import strict
from distbench.runs.folder import RunFolder
from distbench.runs.log import RunLog, StepSummary
from distbench.runs.observers import MetricLog, Progress
from distbench.trainer import StepMetrics, Trainer
from tests.configs import small
from tests.steps import ONE_PROCESS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path)


def trainer(lr: float = 0.1) -> Trainer:
    return build_trainer(small("single", steps=4, optimizer=SGD(lr=lr)), ONE_PROCESS)[0]


def rows(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]


def test_a_line_is_written_with_its_step_and_reads_back_to_the_same_bits(folder: RunFolder) -> None:
    training, log = trainer(), MetricLog(folder)
    for step in (1, 2, 3):
        metrics = training.train_step()
        log.on_step(metrics, training)
        # Read while the log is open: a run that is killed later keeps its lines.
        written = rows(folder)
        assert len(written) == step
        speed = written[-1].pop("tokens_per_second")
        assert written[-1] == asdict(metrics) and speed == metrics.tokens / metrics.step_seconds
    log.close()


def test_numbers_that_json_has_not_are_words(folder: RunFolder) -> None:
    training, log = trainer(lr=1e30), MetricLog(folder)
    for _ in range(4):
        log.on_step(training.train_step(), training)
    log.close()
    assert rows(folder)[0]["loss"] != "nan" and rows(folder)[-1]["loss"] in ("nan", "inf")
    assert "NaN" not in folder.metrics_path.read_text()


def test_progress_is_shown_on_terminals(folder: RunFolder) -> None:
    console = Terminal()
    training, bar = trainer(), Progress(4, "ddp fp32", console)
    for _ in range(4):
        bar.on_step(training.train_step(), training)
    bar.close()
    assert "ddp fp32" in console.getvalue() and "4/4" in console.getvalue() and "tokens/s" in console.getvalue()


@pytest.mark.parametrize(
    ("console", "wanted", "shown"), [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)]
)
def test_and_nowhere_else(folder: RunFolder, console: io.StringIO, wanted: bool, shown: bool) -> None:
    config = replace(small("single", steps=1), logging=Logging(progress=wanted))
    log = RunLog(config, folder, console)
    training = trainer()
    training.observers = log.observers
    training.run(until=1)
    assert bool(console.getvalue()) is shown
    if shown:
        assert log._progress is not None
        log._progress.close()


def metrics(step: int, seconds: float, skipped: bool = False) -> StepMetrics:
    return StepMetrics(step, 1.0 / step, float(step), float(step), 0.1, 1.0, skipped, 8, 24, 0.0, seconds)


def test_times_are_of_the_steps_after_the_warm_up() -> None:
    summary, training = StepSummary(warm_up=2), trainer()
    for step, seconds in enumerate([100.0, 50.0, 1.0, 3.0, 2.0], start=1):
        summary.on_step(metrics(step, seconds, skipped=step == 4), training)
    assert summary.result() == {
        "steps": 5,
        "first_loss": 1.0,
        "last_loss": 0.2,
        "first_grad_norm": 1.0,
        "last_grad_norm": 5.0,
        "skipped_steps": 1,
        "step_seconds_median": 2.0,
        "tokens_per_second_median": 12.0,
        "reason": None,
    }


@pytest.mark.parametrize("done", [3, 5])
def test_a_run_that_is_resumed_sums_up_all_its_steps(done: int) -> None:
    """Where it died after its last one, too."""
    steps = [metrics(step, float(step), skipped=step == 4) for step in range(1, 6)]
    straight, training = StepSummary(warm_up=2), trainer()
    resumed = StepSummary(warm_up=2, done=[strict(asdict(step)) for step in steps[:done]])
    for step in steps:
        straight.on_step(step, training)
    for step in steps[done:]:
        resumed.on_step(step, training)
    assert resumed.result() == straight.result() and resumed.result()["steps"] == 5


def test_missing_is_not_zero() -> None:
    summary, training = StepSummary(warm_up=1), trainer()
    assert summary.result() == {"steps": 0, "reason": "the run ended before its first step was done"}
    summary.on_step(metrics(1, 1.0), training)
    result = summary.result()
    assert result["step_seconds_median"] is None and result["tokens_per_second_median"] is None
    assert "no step after the first 1" in result["reason"]
