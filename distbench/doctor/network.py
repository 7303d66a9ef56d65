"""`distbench doctor --network`: what the network between the ranks does, before a job depends on it (docs/cluster.md).

Ranks are started as a run's are: on this machine, on each node, on the hosts of a testbed, by torchrun.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench import config as configuration
from distbench.config import Config, TestbedLaunch, to_container
from distbench.errors import ExitCode, RunFolderError
from distbench.runs.environment import environment, launch_command
from distbench.runs.files import parse_json, write_json
from distbench.runs.folder import RunFolder, Status, now

if TYPE_CHECKING:
    from distbench.experiment import Outcome
    from distbench.launching.nodes import Node
    from distbench.launching.worker import RankProcess
    from distbench.launching.world import World
    from distbench.numerics.cache import BaselineEntry

RESULT, ASKED = "network.json", "asked.json"
"""What came of it; what the command line asks of the ranks, while they run."""
SCHEMA = 1
MAX_ROUNDS, MAX_ALONE = 64, 8
"""Rounds in which hosts meet (of `hosts - 1`), and slow pairs that are looked at again, alone."""


# --- the first machine


def run(config: Config, folder: RunFolder, largest: int) -> Outcome:
    """Start the ranks and show what they found. `largest`: bytes of a collective."""
    from distbench.launching import nodes, testbed
    from distbench.launching.jobs import NETWORK

    write_json(folder.path / ASKED, {"largest": largest})
    if isinstance(config.launch, TestbedLaunch):
        return testbed.run(config, folder, NETWORK)
    return lead(config, folder, nodes.here(config))


def lead(config: Config, folder: RunFolder, node: Node) -> Outcome:
    """As the first machine of the job has it to do. An outcome that is not passed has been told."""
    from distbench.experiment import Outcome, write_failure
    from distbench.launching import local, nodes
    from distbench.launching.failure import root_failure
    from distbench.launching.jobs import NETWORK
    from distbench.report.console import print_failure

    local.warm_up()
    leader = nodes.Leader(node, NETWORK)
    try:
        nodes.start_ranks(config, folder, None, leader)
    except local.RanksFailed as failed:
        num_ranks = configuration.world_size(config)
        failure = root_failure(
            folder, failed.ranks, num_ranks, failed.beats, failed.stall, failed.out_of_memory, failed.lost
        )
        write_failure(folder, failure, failed.ranks)
        print_failure(folder.path, failure)
        return Outcome(Status(failure["status"]), failure["exit_code"])
    except (local.Interrupted, KeyboardInterrupt):
        print("distbench: interrupted", file=sys.stderr)
        return Outcome(Status.interrupted, ExitCode.INTERRUPTED)
    finally:
        leader.end()
    return finish(folder, config)


def finish(folder: RunFolder, config: Config) -> Outcome:
    """Show what rank 0 has written, and keep it for runs to come."""
    from distbench.doctor.tables import print_network
    from distbench.experiment import Outcome

    found = read_network(folder.path / RESULT)
    (folder.path / ASKED).unlink(missing_ok=True)
    kept = kept_in(config, found["hosts"])
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder.path / RESULT, kept)
    print_network(found, folder.path)
    right = all(row["right"] for row in found["collectives"])
    return Outcome(Status.passed, ExitCode.OK) if right else Outcome(Status.gate_failed, ExitCode.GATE)


def kept_in(config: Config, hosts: list[dict[str, Any]]) -> Path:
    """Where runs with as many ranks on the same hosts, over the same link, find it."""
    link = config.launch.testbed if isinstance(config.launch, TestbedLaunch) else None
    key = {
        "hosts": [[host["host"], host["ranks"]] for host in hosts],
        "device": configuration.resolve_device(config),
        "link": None if link is None else asdict(link),
    }
    return Path(config.output_dir).resolve() / ".networks" / f"{configuration.digest(key)}.json"


def read_network(file: Path) -> dict[str, Any]:
    """Raises RunFolderError where it is missing, damaged or of a newer schema."""
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("schema"), int):
        raise RunFolderError(f"{file} is no {RESULT}")
    if found["schema"] > SCHEMA:
        raise RunFolderError(f"{file} has schema {found['schema']}, this distbench reads up to {SCHEMA}")
    return found


# --- each rank


def run_rank(config: Config, folder: RunFolder, process: RankProcess, baseline: BaselineEntry | None) -> None:
    """One rank's part. Rank 0 writes `network.json`."""
    from distbench.launching.world import World

    process.heartbeat.beat("joining")
    world = World.join(configuration.resolve_device(config), config.launch.timeout_s, needs_group=True)
    asked = parse_json((folder.path / ASKED).read_bytes()) if world.rank == 0 else None
    measure(config, folder, world, world.gather(asked)[0]["largest"], process.heartbeat.beat)
    world.leave()


def joined(config: Config, folder: RunFolder, largest: int) -> int:
    """This process is a rank already, torchrun's. Returns its exit code."""
    from distbench.launching.world import World

    world = World.join(configuration.resolve_device(config), config.launch.timeout_s, needs_group=True)
    if world.rank == 0:
        folder.path.mkdir(parents=True, exist_ok=True)
    world.barrier()
    measure(config, folder, world, largest, lambda _: None)
    code = finish(folder, config).exit_code if world.rank == 0 else int(ExitCode.OK)
    codes = world.gather(code)
    world.leave()
    return int(codes[0])


def measure(config: Config, folder: RunFolder, world: World, largest: int, beat: Any) -> None:
    """All of it. A collective."""
    import torch

    from distbench.doctor.probe import time_collectives
    from distbench.launching.hosts import hosts_of
    from distbench.measure import cores

    torch.set_num_threads(1)
    hosts = hosts_of(world)
    queued, began = cores.queued(), time.perf_counter()
    timings = list(time_collectives(world, largest, beat))
    pairs = pairs_of(world, hosts, beat)
    waited, took = cores.waited(queued, cores.queued()), time.perf_counter() - began
    waits = [wait for wait in world.gather(waited) if wait is not None]
    if world.rank == 0:
        sections = {
            "schema": SCHEMA,
            "measured": now(),
            "command": launch_command(),
            "backend": world.backend,
            "device": str(world.device.type),
            "world_size": world.size,
            "hosts": hosts,
            "collectives": [asdict(timing) for timing in timings],
            "lines": lines_of([asdict(timing) for timing in timings], world.size),
            "pairs": pairs,
            "core_wait": max(waits) / took if waits else None,
            "config": to_container(config),
            "environment": environment(),
        }
        write_json(folder.path / RESULT, sections)


def lines_of(timings: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Collective -> alpha, beta and how well they describe it; null where they do not."""
    from distbench.doctor.fit import fit
    from distbench.doctor.probe import COLLECTIVES

    found: dict[str, Any] = {}
    for op, collective in COLLECTIVES.items():
        factor = collective.factor(ranks)
        line = fit([(row["bytes"] * factor, row["seconds"]) for row in timings if row["op"] == op])
        found[op] = None if line is None else asdict(line)
    return found


def pairs_of(world: World, hosts: list[dict[str, Any]], beat: Any) -> dict[str, Any]:
    """Between the hosts' first ranks; on one host, between its ranks. A collective."""
    from distbench.doctor.fit import Direction, slow, slow_hosts, typical
    from distbench.doctor.probe import Pair, time_alone, time_pairs

    apart = len(hosts) > 1
    names = {host["ranks"][0]: host["host"] for host in hosts}
    if not apart:
        names = {rank: f"rank {rank}" for rank in hosts[0]["ranks"]}

    def directions(pairs: list[Pair]) -> list[Direction]:
        return [
            Direction(names[p.source], names[p.target], p.latency, p.bandwidth, p.latency_best, p.bandwidth_best)
            for p in pairs
        ]

    together = time_pairs(world, list(names), MAX_ROUNDS, beat)
    found = directions(together)
    usual = typical(found)
    slower = slow(found, *usual)
    suspects = slower[:MAX_ALONE]
    numbers = {name: rank for rank, name in names.items()}
    again = sorted({tuple(sorted((numbers[d.source], numbers[d.target]))) for d in suspects})
    alone = {(d.source, d.target): d for d in directions(time_alone(world, again, beat))}
    still = slow([alone[d.source, d.target] for d in suspects], *usual)
    return {
        "between": "hosts" if apart else "ranks",
        "rounds": min(MAX_ROUNDS, len(names) - 1 + len(names) % 2),
        "of_rounds": len(names) - 1 + len(names) % 2,
        "typical": {"latency": usual[0], "bandwidth": usual[1]},
        "all": [asdict(d) for d in found],
        "slow": [asdict(d) for d in still],
        "slow_hosts": slow_hosts(found, slower) if still else [],
    }


# --- for the record


def known_network(config: Config, hosts: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, str | None]:
    """(when, where from, alpha and beta of each collective) as the doctor found it between these ranks, or why it is not
    known."""
    file = kept_in(config, hosts)
    if not file.exists():
        return None, "not measured: python -m distbench doctor --network, with the same launch.* settings, does"
    try:
        found = read_network(file)
        return {"measured": found["measured"], "file": str(file), "lines": found["lines"]}, None
    except (RunFolderError, KeyError) as error:
        return None, f"{file} is damaged: {error}"
