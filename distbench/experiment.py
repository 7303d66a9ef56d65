"""One run from config to record, in the order that cannot be skipped. Reads top to bottom."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench import config as configuration
from distbench import interrupts
from distbench.config import (
    Config,
    LocalLaunch,
    TestbedLaunch,
    batch_shape,
    joined_world,
    not_applicable,
    num_nodes,
    to_container,
    world_size,
)
from distbench.errors import ConfigError, ExitCode
from distbench.runs.environment import environment, launch_command
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder, Status, now, read_record

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

    from distbench.launching.local import RanksFailed
    from distbench.launching.nodes import Leader, Node
    from distbench.launching.worker import RankProcess
    from distbench.launching.world import World
    from distbench.numerics.cache import BaselineEntry

EXIT_CODES = {
    Status.passed: ExitCode.OK,
    Status.gate_failed: ExitCode.GATE,
    Status.interrupted: ExitCode.INTERRUPTED,
}
"""Every other status ends with ExitCode.CRASHED."""


RANKS_SECTIONS = (
    *("model", "initial_weights", "units", "wrapper", "topology", "dtypes", "gate"),
    *("nonfinite", "window", "window_reason", "result", "checkpoint", "last_checkpoint", "checkpoint_error", "saving"),
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
    from distbench.launching import nodes, testbed

    if isinstance(config.launch, TestbedLaunch):
        return testbed.run(config, folder)  # which comes back to `lead`, on the first of its hosts
    return lead(config, folder, nodes.here(config))


def lead(config: Config, folder: RunFolder, node: Node) -> Outcome:
    """The run, as its first machine has it to do."""
    from distbench.launching.nodes import Leader

    leader = Leader(node)
    try:
        return _run(config, folder, leader)
    finally:
        leader.end()


def _run(config: Config, folder: RunFolder, leader: Leader) -> Outcome:
    from distbench.checkpoint.manifest import step_of
    from distbench.checkpoint.resuming import resumed_sections
    from distbench.launching import joined, local
    from distbench.preflight import preflight
    from distbench.report.console import print_run, relative, say_how_to_resume

    start = starting_point(config)
    if joined_world() is None and isinstance(config.launch, LocalLaunch):
        local.check_port(config)
    if joined_world() is None or config.gate.enabled:
        local.warm_up()
    try:
        config, model, notes = preflight(config, start)
        if config.resume is None or start is None:
            sections = first_sections(config, folder, model, notes)
        else:
            sections = resumed_sections(config, folder, step_of(start))
        interrupts.heed()
    except BaseException as error:  # a signal's, too
        local.cool_down()
        if isinstance(error, KeyboardInterrupt) and config.resume is not None:
            print("    interrupted before it went on: the run is as it was", flush=True)
            say_how_to_resume(folder.path)
        raise
    folder.write_resolved(to_container(config))
    folder.update_record(**sections)
    if start is not None:
        print(f"    from {relative(start)}", flush=True)
    for note in notes:
        print(f"    note: {note}", flush=True)

    try:
        if joined_world() is not None:
            joined.lead(config, folder, ready_baseline(config, model, folder))
        else:
            start_ranks(config, model, folder, leader)
    except local.RanksFailed as failed:
        return report_failure(folder, failed)
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
    if status is Status.interrupted:
        print(f"    interrupted: run folder {relative(folder.path)}", flush=True)
        say_how_to_resume(folder.path)
    elif status in EXIT_CODES:
        print_run(folder.path)
    elif status is Status.running:
        status, reason = Status.crashed, "the ranks ended and said nothing of what became of the run"
        folder.update_record(status=status.value, reason=reason, finished=now())
        print(f"    {reason}: run folder {relative(folder.path)}", flush=True)
    return Outcome(status, EXIT_CODES.get(status, ExitCode.CRASHED))


def first_sections(config: Config, folder: RunFolder, model: nn.Module | None, notes: list[str]) -> dict[str, Any]:
    """The record before any rank exists. What only ranks know is null until they say it; `reason` says why it stays so."""
    from distbench.runs.content import content

    shape = batch_shape(config)
    return {
        "status": Status.running.value,
        "reason": None,
        "run": {"name": folder.path.name, "command": launch_command(), "pid": os.getpid()},
        "started": now(),
        "finished": None,
        "config": to_container(config),
        "effective": configuration.digest(configuration.effective(config)),
        "content": content(config, model),
        "not_applicable": not_applicable(config),
        "environment": environment(),
        "batch": {**shape.to_dict(), "text": str(shape)},
        "seeds": asdict(config.seed),
        "warnings": notes,
        "resumes": [],
        "restarts": [],
        **dict.fromkeys(RANKS_SECTIONS),
    }


def ready_baseline(config: Config, model: nn.Module | None, folder: RunFolder) -> BaselineEntry | None:
    """The run's baseline, from the cache or computed now; None where the gate is off."""
    from distbench.numerics.cache import ensure_baseline

    if not config.gate.enabled or config.resume is not None:
        return None  # a run that is resumed has passed its gate
    joined = joined_world() is not None
    local_size = int(os.environ["LOCAL_WORLD_SIZE"]) if joined else world_size(config) // num_nodes(config)
    entry = ensure_baseline(config, model, folder, local_size)
    print(f"    baseline {Path(entry.path).name} {'reused' if entry.reused else 'computed'}", flush=True)
    return entry


def start_ranks(config: Config, model: nn.Module | None, folder: RunFolder, leader: Leader) -> None:
    """Run the ranks to their end, again after a stale baseline, and as often as `launch.max_restarts` says. Raises as
    `nodes.start_ranks` does."""
    from distbench.checkpoint.resuming import restarted
    from distbench.checkpoint.saving import remove_unfinished
    from distbench.launching import local, nodes

    restarts, stale = 0, False
    while True:
        baseline = ready_baseline(config, model, folder)
        interrupts.heed()
        try:
            return nodes.start_ranks(config, folder, baseline, leader)
        except local.RanksFailed as failed:
            remove_unfinished(folder.checkpoints)  # where that filled the disk there was no room to say so
            if not stale and discard_stale(folder, baseline):
                stale = True
                continue
            failure = explain_failure(folder, failed)
            if restarts == config.launch.max_restarts or failure["user_error"]:
                raise
            restarts += 1
            write_failure(folder, failure, failed.ranks)
            print(f"    {failure['reason']}: restart {restarts} of {config.launch.max_restarts}", flush=True)
            config = restarted(config, folder, failure["reason"])


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


def explain_failure(folder: RunFolder, failed: RanksFailed) -> dict[str, Any]:
    """What happened first, where, and whom it took with it."""
    from distbench.launching.failure import root_failure

    num_ranks = read_record(folder.path)["batch"]["world_size"]
    return root_failure(folder, failed.ranks, num_ranks, failed.beats, failed.stall, failed.out_of_memory, failed.lost)


def report_failure(folder: RunFolder, failed: RanksFailed) -> Outcome:
    """Name the first failure, in the record and on the console."""
    from distbench.report.console import print_failure

    failure = explain_failure(folder, failed)
    status = record_failure(folder, failure, failed.ranks)
    print_failure(folder.path, failure)
    return Outcome(status, failure["exit_code"])


def write_failure(folder: RunFolder, failure: dict[str, Any], ranks: list[tuple[int, int]]) -> None:
    """`logs/failure.json`."""
    write_json(folder.logs / "failure.json", {"first": failure, "exit_codes": {str(r): code for r, code in ranks}})


def record_failure(folder: RunFolder, failure: dict[str, Any], ranks: list[tuple[int, int]]) -> Status:
    """Write `logs/failure.json` and the record's status and reason."""
    status = Status(failure["status"])
    write_failure(folder, failure, ranks)
    folder.update_record(status=status.value, reason=failure["reason"], finished=now())
    return status


# --------------------------------------------------------------------------------------------------------------
# Rank
# --------------------------------------------------------------------------------------------------------------


def run_rank(
    config: Config,
    folder: RunFolder,
    process: RankProcess,
    baseline: BaselineEntry | None,
    store: dist.Store | None = None,
) -> Status:
    """One rank's part of one run, and what became of it. Rank 0 writes the shared files."""
    from distbench.build import set_determinism
    from distbench.launching.world import World
    from distbench.strategies import strategy_class

    process.heartbeat.beat("joining")
    needs_group = strategy_class(config.strategy.name).needs_group
    world = World.join(configuration.resolve_device(config), config.launch.timeout_s, needs_group, store)
    set_determinism(config, configuration.threads_per_rank(config, world.local_size))
    status = pass_and_train(config, folder, process, baseline, world)
    world.leave()  # all that was built is gone: a wrapper's collectives must not outlive the process group
    return status


def pass_and_train(
    config: Config, folder: RunFolder, process: RankProcess, baseline: BaselineEntry | None, world: World
) -> Status:
    """Build, pass the gate, measure, train. A collective."""
    from distbench.build import EffectiveDtypes, build_trainer
    from distbench.checkpoint.keeping import Keeper
    from distbench.checkpoint.save import save_model
    from distbench.checkpoint.sharded import load_shards
    from distbench.measure.measuring import measure_windows, window_sections
    from distbench.numerics.gating import pass_gate
    from distbench.numerics.nonfinite import Guard
    from distbench.runs.log import RunLog
    from distbench.runs.statistics import Statistics
    from distbench.trainer import Stopped

    beat = process.heartbeat.beat
    beat("building")
    trainer, facts = build_trainer(config, world)
    trainer.beat, trainer.asked_to_stop = beat, process.asked_to_stop
    log = RunLog(config, folder, process.console) if world.rank == 0 else None
    if log:
        folder.update_record(**facts)
    dtypes, guard = EffectiveDtypes(trainer), Guard(config, folder, process.console if log else None)
    trainer.observers = [dtypes, guard, *(log.observers if log else [])]
    if every := config.logging.statistics_every:
        blocks = getattr(config.model, "block_classes", [])
        trainer.observers.append(Statistics(every, blocks, trainer, log.write if log else None))

    def end(status: Status, **sections: Any) -> Status:
        if log:
            log.finish(status=status.value, dtypes=dtypes.seen, **sections)
        return status

    keeper, gate = Keeper(config, folder, trainer, process.console), None
    try:
        start = starting_point(config)
        known = read_record(folder.path) if config.resume is not None else {}
        observers, before = trainer.observers, trainer.step
        if start is not None:
            trainer.observers = [dtypes]  # the steps before are not the run's
        beat("gate")
        if config.resume is not None:
            trainer.run(until=1)  # wrappers settle, as they had in the run that goes on
            gate = known["gate"]
        else:
            if baseline is None and start is None:
                guard.begin(trainer)
            gate = pass_gate(config, baseline, trainer, dtypes, folder)
        topology = topology_of(config, world)
        if known.get("window") is not None:
            topology = known["topology"]  # where its figures were measured
        if gate["passed"] is False:
            return end(Status.gate_failed, reason=gate["text"], gate=gate, topology=topology)
        if log:
            folder.update_record(gate=gate, topology=topology)  # whatever becomes of the run, this is known
        if start is not None:
            load_shards(trainer, start)
            trainer.observers, before = observers, trainer.step
        guard.begin(trainer, baseline)
        measured, reason = measure_windows(config, trainer, folder) if known.get("window") is None else (None, None)
        keeper.run(until=config.steps, since=before)
    except Stopped:
        return end(Status.interrupted, reason=keeper.stopped(gate is not None))

    trainer.asked_to_stop = lambda: False  # what is left is short
    beat("writing")
    state = trainer.strategy.full_state(trainer.module) if config.checkpoint.final else None
    if state is not None:
        keeper.tell_what_is_not_kept()
    checkpoint = save_model(folder, trainer.step, state) if log and state is not None else None
    del state  # a whole model, which would count as memory of the tracked steps
    window = window_sections(
        config, trainer, measured, reason, save=(lambda sections: folder.update_record(**sections)) if log else None
    )
    if known.get("window") is not None:
        window = {key: known[key] for key in ("window", "window_reason")}
    return end(Status.passed, gate=gate, **window, topology=topology, checkpoint=checkpoint)


def topology_of(config: Config, world: World) -> dict[str, Any]:
    """The record's `topology`. A collective."""
    from distbench.doctor.network import known_network
    from distbench.launching.hosts import hosts_of

    ranks, hosts = world.gather(world.describe()), hosts_of(world)
    network, reason = known_network(config, hosts) if world.size > 1 else (None, "one rank")
    return {
        "world_size": world.size,
        "backend": world.backend,
        "ranks": ranks,
        "hosts": hosts,
        "network": network,
        "network_reason": reason,
    }


def starting_point(config: Config) -> Path | None:
    """The checkpoint that a run goes on from, or None where it starts anew. Raises ConfigError."""
    from distbench.checkpoint.manifest import step_of
    from distbench.checkpoint.resuming import checkpoint_of

    what = "start_from" if config.resume is None else "resume"
    asked = getattr(config, what)
    if asked is None:
        return None
    start = checkpoint_of(Path(asked), what)
    # A run that died after its last step has its model and its record to write.
    unfinished = config.resume is not None and read_record(Path(asked))["status"] != Status.passed
    if step_of(start) >= config.steps + unfinished:
        raise ConfigError(
            f"{what}={asked} is at step {step_of(start)} of steps={config.steps}; add steps=... to train on"
        )
    return start
