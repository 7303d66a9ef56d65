"""One run from config to record, in the order that cannot be skipped. Reads top to bottom."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

from distbench import config as configuration
from distbench.config import Config, batch_shape, joined_world, not_applicable, to_container, world_size
from distbench.errors import ExitCode
from distbench.runs.environment import environment, launch_command
from distbench.runs.folder import RunFolder, Status, now, read_record

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class Outcome:
    """What became of a run, for the command line."""

    status: Status
    exit_code: int


# --------------------------------------------------------------------------------------------------------------
# Parent
# --------------------------------------------------------------------------------------------------------------


def run(config: Config, folder: RunFolder) -> Outcome:
    """Run one validated config in a fresh folder: freeze, launch ranks, and say what became of it."""
    from distbench.launching import local
    from distbench.preflight import preflight
    from distbench.report.console import print_run

    joined = joined_world() is not None
    if not joined:
        local.check_port(config)
        local.warm_up()
    config, warnings = preflight(config)
    folder.write_resolved(to_container(config))
    folder.update_record(**first_sections(config, folder, warnings))
    for warning in warnings:
        print(f"    note: {warning}", flush=True)

    if joined:
        from distbench.launching.joined import lead

        exit_code = lead(config, folder)
        return Outcome(Status(read_record(folder.path)["status"]), exit_code)
    try:
        local.start_ranks(config, to_container(config), folder, world_size(config))
    except local.RanksFailed as failed:
        return _failed(folder, failed.ranks)
    except local.Interrupted:
        folder.update_record(status=Status.interrupted.value, reason="stopped by the user", finished=now())
        return Outcome(Status.interrupted, ExitCode.INTERRUPTED)
    print_run(folder.path)
    return Outcome(Status.passed, ExitCode.OK)


def first_sections(config: Config, folder: RunFolder, warnings: list[str]) -> dict[str, Any]:
    """The record before any rank exists."""
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
        "warnings": warnings,
    }


def _failed(folder: RunFolder, ranks: list[tuple[int, int]]) -> Outcome:
    """Name the first failure, in the record and on the console."""
    from distbench.launching.failure import first_failure
    from distbench.report.console import print_failure

    failure = first_failure(folder)
    status = record_failure(folder, failure, ranks)
    print_failure(folder.path, failure, ranks)
    return Outcome(status, failure["exit_code"] if failure else ExitCode.CRASHED)


def record_failure(folder: RunFolder, failure: dict[str, Any] | None, ranks: list[tuple[int, int]]) -> Status:
    from distbench.runs.files import write_json

    if failure is None:
        reason = ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in ranks)
        status = Status.crashed
    else:
        reason = f"rank {failure['rank']}: {failure['type']}: {failure['message']}"
        status = Status(failure["status"])
    write_json(folder.logs / "failure.json", {"first": failure, "exit_codes": dict(ranks)})
    folder.update_record(status=status.value, reason=reason, finished=now())
    return status


# --------------------------------------------------------------------------------------------------------------
# Rank
# --------------------------------------------------------------------------------------------------------------


def run_rank(config: Config, folder: RunFolder, console: TextIO, store: dist.Store | None = None) -> None:
    """One rank's part of one run. Rank 0 writes the shared files."""
    from distbench.build import build_trainer, effective_dtypes, set_determinism
    from distbench.checkpoint.save import save_model
    from distbench.launching.world import World
    from distbench.runs.log import RunLog
    from distbench.strategies import strategy_class

    needs_group = strategy_class(config.strategy.name).needs_group
    world = World.join(configuration.resolve_device(config), config.launch.timeout_s, needs_group, store)
    set_determinism(config, world)

    trainer, facts = build_trainer(config, world)
    log = RunLog(config, folder, console) if world.rank == 0 else None
    if log:
        folder.update_record(**facts)
        trainer.observers = log.observers

    with effective_dtypes(trainer) as dtypes:
        trainer.run(until=1)
    trainer.run(until=config.steps)

    state = trainer.strategy.full_state(trainer.module) if config.checkpoint.final else None
    ranks = world.gather(world.describe())
    if log:
        log.finish(
            topology={"world_size": world.size, "backend": world.backend, "ranks": ranks},
            dtypes=dtypes,
            checkpoint=save_model(folder, trainer.step, state) if state is not None else None,
            result=log.steps.result(),
            status=Status.passed.value,
            finished=now(),
        )
    del trainer, state  # a wrapper's collectives must not outlive the process group
    world.leave()
