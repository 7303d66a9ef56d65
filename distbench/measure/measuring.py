"""The window's place in a run: measured inside training, put together after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distbench.config import Config, LossKind
from distbench.measure import flops
from distbench.measure.predicted import predict_memory
from distbench.measure.section import section
from distbench.measure.tracked import Tracked, track
from distbench.measure.traffic import Traffic
from distbench.measure.window import Measurement, Window, planned
from distbench.precision import DTYPES
from distbench.runs.folder import RunFolder
from distbench.trainer import Trainer


def measure_windows(config: Config, trainer: Trainer, folder: RunFolder) -> tuple[Measurement | None, str | None]:
    """This rank's share of the windows, or why there is none. A collective; the steps are training steps."""
    if not config.window.enabled:
        return None, "window=off"
    warm_up, repeats, reason = planned(config.window, trainer.step, config.steps)
    if reason is not None:
        return None, reason
    traces = folder.path / "traces" if config.window.trace else None
    return Window(config.window, trainer, traces).measure(warm_up, repeats), None


def window_sections(
    config: Config,
    trainer: Trainer,
    measured: Measurement | None,
    reason: str | None,
    save: Callable[[dict[str, Any]], None] | None,
) -> dict[str, Any]:
    """The record's `window` and `window_reason`, the same on every rank. A collective; it trains on, so call it when
    what was trained is safe. `save`: given the sections before the tracked steps, which a model's code could still
    break."""
    if measured is None:
        return {"window": None, "window_reason": reason}
    world, dtype = trainer.world, config.precision.compute_dtype
    syncs = config.accumulation if config.accumulation_sync else 1
    promised = [
        *trainer.strategy.expected_traffic(trainer.module, config.accumulation, syncs),
        *own_traffic(config, world.size),
    ]
    world.barrier()
    rate = flops.calibrate(world.device, DTYPES[dtype])
    ranks = world.gather((measured, rate, predict_memory(config, trainer)))

    def sections(tracked: list[Tracked], **untracked: str) -> dict[str, Any]:
        found = section(
            config,
            [own for own, _, _ in ranks],
            tracked,
            [predicted for _, _, predicted in ranks],
            promised,
            flops.known_peak(world.device, dtype),
            [rate for _, rate, _ in ranks],
            world.backend if world.size > 1 else None,
            **untracked,
        )
        return {"window": found, "window_reason": None}

    if not config.window.track:
        return sections([])
    if save is not None:
        save(sections([], untracked="the run ended in its tracked steps"))  # and keeps this when it is resumed
    return sections(world.gather(track(trainer)))


def own_traffic(config: Config, size: int) -> list[Traffic]:
    """The trainer's own small reductions of one step: loss, squared norm, whether to stop (three fp64); tokens (int64)."""
    found = [Traffic("loss, norm, stop", "all_reduce", 24, size)]
    if config.loss.name is LossKind.cross_entropy:
        found.append(Traffic("token count", "all_reduce", 8, size))
    return found
