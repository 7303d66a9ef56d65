"""One run from config to record, in the order that cannot be skipped. Reads top to bottom."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from distbench import config as configuration
from distbench.config import Config, batch_shape, joined_world, not_applicable, to_container, world_size
from distbench.errors import ConfigError, DistbenchError, ExitCode
from distbench.runs.environment import environment, launch_command
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder, Status, now, read_record

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from distbench.numerics.cache import BaselineEntry

EXIT_CODES = {
    Status.passed: ExitCode.OK,
    Status.gate_failed: ExitCode.GATE,
    Status.interrupted: ExitCode.INTERRUPTED,
}
"""Every other status ends with ExitCode.CRASHED."""


RANKS_SECTIONS = (
    *("model", "initial_weights", "units", "wrapper", "topology", "dtypes", "gate"),
    *("window", "window_reason", "result", "checkpoint", "last_checkpoint", "checkpoint_error"),
)
"""The record's keys that rank 0 fills in."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run, for the command line."""

    status: Status
    exit_code: int


# --------------------------------------------------------------------------------------------------------------
# Parent
# --------------------------------------------------------------------------------------------------------------


def run(config: Config, folder: RunFolder) -> Outcome:
    """Run one validated config in a fresh folder: baseline, ranks, and what became of it."""
    from distbench.checkpoint.manifest import step_of
    from distbench.checkpoint.resuming import resumed_sections
    from distbench.launching import joined, local
    from distbench.preflight import preflight
    from distbench.report.console import print_run, relative, say_how_to_resume

    start = starting_point(config)
    if joined_world() is None:
        local.check_port(config)
    if joined_world() is None or config.gate.enabled:
        local.warm_up()
    try:
        config, model, notes = preflight(config)
        if config.resume is None or start is None:
            sections = first_sections(config, folder, notes)
        else:
            sections = resumed_sections(config, folder, step_of(start))
    except DistbenchError:
        local.cool_down()
        raise
    folder.write_resolved(to_container(config))
    folder.update_record(**sections)
    if start is not None:
        print(f"    from {relative(start)}", flush=True)
    for note in notes:
        print(f"    note: {note}", flush=True)

    try:
        baseline = ready_baseline(config, model, folder)
        if joined_world() is not None:
            joined.lead(config, folder, baseline)
        else:
            try:
                local.start_ranks(config, folder, baseline)
            except local.RanksFailed:
                if not discard_stale(folder, baseline):
                    raise
                local.start_ranks(config, folder, ready_baseline(config, model, folder))
    except local.RanksFailed as failed:
        return report_failure(folder, failed.ranks)
    except (local.Interrupted, KeyboardInterrupt):
        folder.update_record(status=Status.interrupted.value, reason="stopped by the user", finished=now())
        print(f"    interrupted: run folder {relative(folder.path)}", flush=True)
        say_how_to_resume(folder.path)
        return Outcome(Status.interrupted, ExitCode.INTERRUPTED)
    except Exception as error:  # whatever it was, no record says running once nothing runs
        reason = f"{type(error).__name__}: {error}"
        folder.update_record(status=Status.crashed.value, reason=reason, finished=now())
        raise

    status = Status(read_record(folder.path)["status"])
    if status in EXIT_CODES:
        print_run(folder.path)
    return Outcome(status, EXIT_CODES.get(status, ExitCode.CRASHED))


def first_sections(config: Config, folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    """The record before any rank exists. What only ranks know is null until they say it; `reason` says why it stays so."""
    shape = batch_shape(config)
    return {
        "status": Status.running.value,
        "reason": None,
        "run": {"name": folder.path.name, "command": launch_command(), "pid": os.getpid()},
        "started": now(),
        "finished": None,
        "config": to_container(config),
        "effective": configuration.digest(configuration.effective(config)),
        "not_applicable": not_applicable(config),
        "environment": environment(),
        "batch": {**shape.to_dict(), "text": str(shape)},
        "seeds": asdict(config.seed),
        "warnings": notes,
        "resumes": [],
        **dict.fromkeys(RANKS_SECTIONS),
    }


def ready_baseline(config: Config, model: nn.Module | None, folder: RunFolder) -> BaselineEntry | None:
    """The run's baseline, from the cache or computed now; None where the gate is off."""
    from distbench.numerics.cache import ensure_baseline

    if not config.gate.enabled or config.resume is not None:
        return None  # a run that is resumed has passed its gate
    local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if joined_world() is not None else world_size(config)
    entry = ensure_baseline(config, model, folder, local_size)
    print(f"    baseline {Path(entry.path).name} {'reused' if entry.reused else 'computed'}", flush=True)
    return entry


def discard_stale(folder: RunFolder, baseline: BaselineEntry | None) -> bool:
    """Whether the ranks ended because a cached baseline was made from other weights; then it is gone now."""
    from distbench.errors import StaleBaseline
    from distbench.launching.failure import clear_failures, first_failure
    from distbench.numerics.cache import discard

    failure = first_failure(folder)
    if baseline is None or failure is None or failure["type"] != StaleBaseline.__name__:
        return False
    print(f"    {failure['message']}: computed again", flush=True)
    discard(baseline.path)
    clear_failures(folder)
    return True


def report_failure(folder: RunFolder, ranks: list[tuple[int, int]]) -> Outcome:
    """Name the first failure, in the record and on the console."""
    from distbench.launching.failure import root_failure
    from distbench.report.console import print_failure

    failure = root_failure(folder, ranks, read_record(folder.path)["batch"]["world_size"])
    status = record_failure(folder, failure, ranks)
    print_failure(folder.path, failure, ranks)
    return Outcome(status, failure["exit_code"])


def record_failure(folder: RunFolder, failure: dict[str, Any], ranks: list[tuple[int, int]]) -> Status:
    """Write `logs/failure.json` and the record's status and reason."""
    status = Status(failure["status"])
    write_json(folder.logs / "failure.json", {"first": failure, "exit_codes": {str(r): code for r, code in ranks}})
    folder.update_record(status=status.value, reason=failure["reason"], finished=now())
    return status


# --------------------------------------------------------------------------------------------------------------
# Rank
# --------------------------------------------------------------------------------------------------------------


def run_rank(
    config: Config,
    folder: RunFolder,
    console: TextIO,
    baseline: BaselineEntry | None,
    store: dist.Store | None = None,
) -> Status:
    """One rank's part of one run, and what became of it. Rank 0 writes the shared files."""
    from distbench.build import EffectiveDtypes, build_trainer, set_determinism
    from distbench.checkpoint.keeping import Keeper
    from distbench.checkpoint.save import save_model
    from distbench.checkpoint.sharded import load_shards
    from distbench.launching.world import World
    from distbench.measure.measuring import measure_windows, window_sections
    from distbench.numerics.gating import pass_gate
    from distbench.runs.log import RunLog
    from distbench.runs.statistics import Statistics
    from distbench.strategies import strategy_class

    needs_group = strategy_class(config.strategy.name).needs_group
    world = World.join(configuration.resolve_device(config), config.launch.timeout_s, needs_group, store)
    set_determinism(config, configuration.threads_per_rank(config, world.local_size))

    trainer, facts = build_trainer(config, world)
    log = RunLog(config, folder, console) if world.rank == 0 else None
    if log:
        folder.update_record(**facts)
    dtypes = EffectiveDtypes(trainer)
    trainer.observers = [dtypes, *(log.observers if log else [])]
    if every := config.logging.statistics_every:
        blocks = getattr(config.model, "block_classes", [])
        trainer.observers.append(Statistics(every, blocks, trainer, log.write if log else None))

    start = starting_point(config)
    observers, before = trainer.observers, trainer.step
    if start is not None:
        trainer.observers = [dtypes]  # the steps before are not the run's
    if config.resume is not None:
        trainer.run(until=1)  # wrappers settle, as they had in the run that goes on
        gate = read_record(folder.path)["gate"]
    else:
        gate = pass_gate(config, baseline, trainer, dtypes, folder)
    ranks = world.gather(world.describe())
    topology = {"world_size": world.size, "backend": world.backend, "ranks": ranks}
    if gate["passed"] is False:
        if log:
            log.finish(
                status=Status.gate_failed.value, reason=gate["text"], gate=gate, topology=topology, dtypes=dtypes.seen
            )
        world.leave()
        return Status.gate_failed

    if log:
        folder.update_record(gate=gate, topology=topology)  # whatever becomes of the run, this is known
    if start is not None:
        load_shards(trainer, start)
        trainer.observers, before = observers, trainer.step
    known = read_record(folder.path) if config.resume is not None else {}
    measured, reason = measure_windows(config, trainer, folder) if known.get("window") is None else (None, None)
    Keeper(config, folder, trainer).run(until=config.steps, since=before)
    state = trainer.strategy.full_state(trainer.module) if config.checkpoint.final else None
    checkpoint = save_model(folder, trainer.step, state) if log and state is not None else None
    del state  # a whole model, which would count as memory of the tracked steps
    window = window_sections(
        config, trainer, measured, reason, save=(lambda sections: folder.update_record(**sections)) if log else None
    )
    if known.get("window") is not None:
        window = {key: known[key] for key in ("window", "window_reason")}
    if log:
        log.finish(
            status=Status.passed.value,
            gate=gate,
            **window,
            topology=topology,
            dtypes=dtypes.seen,
            checkpoint=checkpoint,
        )
    del trainer, measured  # a wrapper's collectives must not outlive the process group
    world.leave()
    return Status.passed


def starting_point(config: Config) -> Path | None:
    """The checkpoint that a run goes on from, or None where it starts anew. Raises ConfigError."""
    from distbench.checkpoint.manifest import step_of
    from distbench.checkpoint.resuming import checkpoint_of

    what = "start_from" if config.resume is None else "resume"
    asked = getattr(config, what)
    if asked is None:
        return None
    start = checkpoint_of(Path(asked), what)
    if step_of(start) >= config.steps:
        raise ConfigError(
            f"{what}={asked} is at step {step_of(start)} of steps={config.steps}; add steps=... to train on"
        )
    return start
