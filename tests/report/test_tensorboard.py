"""TensorBoard's event file, read with TensorBoard's own reader."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from distbench.build import build_trainer
from distbench.config import Logging, to_container
from distbench.report.tensorboard import SHOWN, TensorBoardLog, hparams
from distbench.runs.folder import RunFolder
from distbench.runs.log import RunLog
from tests.configs import small
from tests.steps import ONE_PROCESS

SCALARS = {
    "train/loss",
    "train/grad_norm",
    "train/grad_norm_clipped",
    "train/lr",
    "time/step_seconds",
    "time/data_seconds",
    "time/tokens_per_second",
}


def logged(folder: RunFolder, precision: str = "fp32", histograms: bool = False) -> tuple[EventAccumulator, Any]:
    """Two steps of one process, logged as rank 0 logs them; the events and the record."""
    config = replace(
        small("single", precision=precision, steps=2), logging=Logging(histograms=histograms, progress=False)
    )
    trainer, facts = build_trainer(config, ONE_PROCESS)
    folder.update_record(
        config=to_container(config),
        not_applicable={"wrap_policy": "x"},
        batch={"world_size": 1, "text": "12 x 1 x 1 = 12"},
        run={"command": "python -m distbench strategy=single"},
        **facts,
    )
    with (folder.path / "console").open("w") as console:
        log = RunLog(config, folder, console)
        trainer.observers = log.observers
        trainer.run(until=2)
        log.finish(status="passed", dtypes={"compute": precision}, gate={"text": "gate off", "passed": None})
    events = EventAccumulator(str(folder.tensorboard), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events, folder.preview_record()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path)


def test_scalars_are_the_metrics(folder: RunFolder) -> None:
    events, record = logged(folder)
    assert set(events.Tags()["scalars"]) >= SCALARS and "train/scale" not in events.Tags()["scalars"]
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2]
    expected = [record["result"]["first_loss"], record["result"]["last_loss"]]
    assert [event.value for event in losses] == [struct.unpack("f", struct.pack("f", loss))[0] for loss in expected]


def test_a_scaled_run_shows_its_scale(folder: RunFolder) -> None:
    events, _ = logged(folder, precision="fp16")
    assert [event.value for event in events.Scalars("train/scale")] == [65536.0, 65536.0]


def test_the_text_page_has_verdict_command_and_config(folder: RunFolder) -> None:
    events, _ = logged(folder)
    (page,) = events.Tensors("run/text_summary")
    text = page.tensor_proto.string_val[0].decode()
    assert text.startswith("**status** passed: gate off")
    for words in ("`python -m distbench strategy=single`", "12 x 1 x 1 = 12", '"hidden_dim": 13', '"compute": "fp32"'):
        assert words in text


def test_the_hparams_row_is_in_the_run_itself(folder: RunFolder) -> None:
    events, record = logged(folder)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    row = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert row["strategy"] == "single" and row["precision"] == "fp32" and row["global_batch"] == 12
    assert row["wrap_policy"] == "n/a" and row.keys() == hparams(record).keys()
    assert [path for path in folder.tensorboard.iterdir() if path.is_dir()] == [], "a run below the run"
    assert "hparam/last_loss" in events.Tags()["scalars"]
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    # The backend puts those that differ first, and the table shows five.
    assert {info.name for info in experiment.hparam_infos if info.differs} == set(SHOWN)
    assert experiment.metric_infos[0].name.tag == "hparam/gate_margin" or record["gate"].get("worst_margin") is None


def test_options_are_written_as_the_plugin_takes_them(folder: RunFolder) -> None:
    record = {
        "config": to_container(small("fsdp")),
        "not_applicable": {},
        "batch": {"world_size": 2},
    }
    row = hparams(record)
    assert row["strategy.use_orig_params"] == "True" and row["wrap_policy"] == "block" and row["prefetch"] == "pre"
    assert all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in row.values())


@pytest.mark.parametrize("histograms", [False, True])
def test_histograms_on_request(folder: RunFolder, histograms: bool) -> None:
    events, _ = logged(folder, histograms=histograms)
    tags = set(events.Tags()["histograms"])
    assert ("weights_rank0/layers.0.attn.weight" in tags) is histograms
    assert ("gradients_rank0/layers.0.attn.weight" in tags) is histograms
    if histograms:
        assert events.Histograms("weights_rank0/layers.0.attn.weight")[0].histogram_value.num == 13 * 13


def test_a_log_that_is_never_closed_keeps_its_scalars(folder: RunFolder) -> None:
    """A run that fails later still shows how far it came."""
    trainer, _ = build_trainer(small("single", steps=2), ONE_PROCESS)
    log = TensorBoardLog(folder)
    trainer.observers = [log]
    trainer.run(until=2)
    log._writer.flush()
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert len(events.Scalars("train/loss")) == 2
