"""TensorBoard: scalars on charts that all runs share, one hparams row and one text page a run."""

from __future__ import annotations

import json
from typing import Any

from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams as torch_hparams

from distbench.runs.folder import RunFolder
from distbench.trainer import Backward, Observer, StepMetrics, Trainer


class TensorBoardLog(Observer):
    """Rank 0's event file. Tags are the metrics' names under the group they belong to."""

    def __init__(self, folder: RunFolder, purge_step: int | None = None) -> None:
        """`purge_step`: from which step on an earlier file's points are to be forgotten."""
        self._writer = SummaryWriter(str(folder.tensorboard), flush_secs=10, purge_step=purge_step)
        self._writer.add_custom_scalars(LAYOUT)

    def histograms(self) -> Histograms:
        return Histograms(self._writer)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        scalars = {
            "train/loss": metrics.loss,
            "train/grad_norm": metrics.grad_norm,
            "train/grad_norm_clipped": metrics.grad_norm_clipped,
            "train/lr": metrics.lr,
            "time/step_seconds": metrics.step_seconds,
            "time/data_seconds": metrics.data_seconds,
            "time/tokens_per_second": metrics.tokens / metrics.step_seconds,
        }
        if trainer.scaler.enabled:
            scalars["train/scale"] = metrics.scale
        self.write(scalars, metrics.step)

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Scalars by tag, at one step."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, record: dict[str, Any]) -> None:
        """Write the pages that need the finished record, and flush."""
        self._writer.add_text("run", _page(record), 0)
        gate = record["gate"]
        for row in gate.get("by_step", []):
            self._writer.add_scalar(f"numerics/worst_margin_{row['mode']}", row["worst_margin"], row["step"])
            if row["worst_relative_l2"] is not None:
                self._writer.add_scalar(f"numerics/parallel_error_{row['mode']}", row["worst_relative_l2"], row["step"])
        if gate.get("precision_error") is not None:
            self._writer.add_scalar("numerics/precision_error", gate["precision_error"], 1)
        window = window_scalars(record.get("window"))
        self.write(window, record["result"]["steps"])
        outcomes = {
            "gate_margin": gate.get("worst_margin"),
            **{tag.removeprefix("window/"): window.get(tag) for tag in HEADLINES},
            "parallel_error": gate.get("parallel_error"),
            "precision_error": gate.get("precision_error"),
            **record["result"],
        }
        metrics = {f"hparam/{name}": value for name, value in outcomes.items() if isinstance(value, int | float)}
        self._add_row(hparams(record), metrics)
        self._writer.close()

    def _add_row(self, chosen: dict[str, str | int | float], metrics: dict[str, float]) -> None:
        """A row of the hparams table, in this run. (`add_hparams` leaves the order to the alphabet, and the table shows the
        first five of either kind.)"""
        file = self._writer.file_writer
        assert file is not None
        experiment, *session = torch_hparams(chosen, metrics)
        (value,) = experiment.value
        data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for info in data.experiment.hparam_infos:
            info.differs = info.name in SHOWN  # the backend sorts by that first
        value.metadata.plugin_data.content = data.SerializeToString()
        for summary in (experiment, *session):
            file.add_summary(summary)
        self.write(metrics, 0)


SHOWN = ("strategy", "precision", "wrap_policy", "prefetch", "world_size")
"""Of the choices, the columns that the hparams table shows unasked."""
HEADLINES = ("window/memory/peak_allocated", "window/exposed_comm", "window/step_time", "window/tokens_per_second")
"""Of the window, what the hparams table shows."""

LAYOUT = {
    "loss": {"loss": ["Multiline", ["^train/loss$"]], "gradient norm": ["Multiline", ["^train/grad_norm$"]]},
    "numerics": {
        "margin of the gate": ["Multiline", ["^numerics/worst_margin_"]],
        "parallel error": ["Multiline", ["^numerics/parallel_error_"]],
        "precision error": ["Multiline", ["^numerics/precision_error$"]],
    },
    "memory": {"peak": ["Multiline", ["^window/memory/"]], "by kind": ["Multiline", ["^window/memory_by_kind/"]]},
    "communication": {
        "busy and exposed": ["Multiline", ["^window/comm_busy$", "^window/exposed_comm$"]],
        "overlap": ["Multiline", ["^window/overlap$"]],
        "bytes a rank sends": ["Multiline", ["^window/bytes/"]],
    },
    "time": {
        "step": ["Multiline", ["^time/step_seconds$", "^window/step_time$"]],
        "split": ["Multiline", ["^window/split/"]],
        "tokens/s": ["Multiline", ["^time/tokens_per_second$"]],
    },
}
"""The custom-scalars page: what a decision needs, over all runs."""


def window_scalars(window: dict[str, Any] | None) -> dict[str, float]:
    """The measured figures of the record's `window` by tag; the tags are the record's keys. Empty for a rejected one."""
    if window is None or not window["accepted"]:
        return {}
    found: dict[str, Any] = {
        f"window/{name}": window[name]["median"]
        for name in (
            "step_time",
            "tokens_per_second",
            "data_wait",
            "core_wait",
            "comm_busy",
            "exposed_comm",
            "overlap",
            "overhead",
        )
    }
    found |= {f"window/split/{name}": value for name, value in window["split"].items() if name != "rank"}
    found |= {f"window/memory/{name}": value["bytes"] for name, value in window["memory"].items()}
    kinds = window["memory_by_kind"] or {}
    found |= {f"window/memory_by_kind/{name}": value for name, value in kinds.items() if name != "rank"}
    found |= {f"window/bytes/{name}": window["bytes"][name] for name in ("formula", "ledger", "interface")}
    found |= {f"window/{name}": window[name]["value"] for name in ("mfu", "mfu_calibrated")}
    return {tag: float(value) for tag, value in found.items() if value is not None}


class Histograms(Observer):
    """Histograms of rank 0's own shards at every step: gathering the model each time would not be a side concern."""

    reads_state = True

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        for slot in trainer.strategy.slots(trainer.module):
            if slot.parameter.grad is not None and slot.numel:
                local = slot.cut(trainer.strategy.local(slot.parameter.grad))
                self._writer.add_histogram(f"gradients_rank0/{slot.name}", local.float(), backward.step)

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        for slot in trainer.strategy.slots(trainer.module):
            local = slot.cut(trainer.strategy.local(slot.parameter.detach()))
            if local.numel():
                self._writer.add_histogram(f"weights_rank0/{slot.name}", local.float(), metrics.step)


def hparams(record: dict[str, Any]) -> dict[str, str | int | float]:
    """The choices a sweep varies, as the hparams plugin takes them: booleans and lists as strings."""
    config, unused = record["config"], record["not_applicable"]
    chosen: dict[str, Any] = {
        "strategy": config["strategy"]["name"],
        "precision": config["precision"]["name"],
        "wrap_policy": "n/a" if "wrap_policy" in unused else config["wrap_policy"]["name"],
        "prefetch": "n/a" if "prefetch" in unused else config["prefetch"]["backward"],
        "model": config["model"]["name"],
        "world_size": record["batch"]["world_size"],
        "global_batch": config["global_batch"],
        "accumulation": config["accumulation"],
        "optimizer": config["optimizer"]["name"],
        "lr": config["optimizer"]["lr"],
    }
    for key, value in config["strategy"].items():
        if key != "name":
            chosen[f"strategy.{key}"] = str(value)
    return chosen


def _page(record: dict[str, Any]) -> str:
    """Markdown: verdict first, then what was run."""
    config = json.dumps(record["config"], indent=2)
    fence = "    " + config.replace("\n", "\n    ")
    return "\n\n".join(
        [
            f"**status** {record['status']}: {record['gate']['text']}",
            f"**command** `{record['run']['command']}`",
            f"**batch** {record['batch']['text']} (micro-batch x accumulation x ranks = global batch)",
            f"**dtypes** {json.dumps(record['dtypes'])}",
            "**config**",
            fence,
        ]
    )
