"""`python -m distbench doctor [--network [KEY=VALUE ...]]`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from distbench.config import joined_world, spelled, world_size
from distbench.errors import ConfigError, ExitCode, OutputError
from distbench.runs.folder import RunFolder

DESCRIPTION = """\
What this machine can run, and what to do about what it cannot.

--network starts ranks as a run with the same settings would (launch.nproc=4, launch.nodes=2, launch=testbed, device=cuda;
under srun, torchrun, or the variables of docs/cluster.md on several machines) and measures every collective over sizes, and
every pair of hosts. Names the slow pair. Runs with the same ranks have the result in their records.

exit codes: 0 done, 2 bad usage, 3 a collective gave wrong values, 4 a rank died or hung"""


def main(argv: list[str]) -> int:
    """Examine, and return the exit code."""
    options = _parse(argv)
    if not options.network:
        if options.overrides:
            raise ConfigError(f"{options.overrides[0]} goes with doctor --network only")
        return _machine()
    from distbench.launching import nodes

    node = nodes.told()
    if node is not None and not node.leads:
        nodes.follow(node)
        return ExitCode.OK
    return _network(options.overrides, options.largest)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distbench doctor", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", action="store_true", help="measure the network between ranks")
    parser.add_argument("--largest", type=int, default=64, metavar="MIB", help="size of the largest collective (64)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="how to start them, as for a run")
    return parser.parse_intermixed_args(argv)


def _machine() -> int:
    from distbench.doctor.machine import GOOD, MISSING, examine

    for heading, lines in examine(Path("outputs")):
        print(f"\n{heading}")
        for line in lines:
            print(f"  {GOOD if line.good else MISSING}  {line.what:<30}  {line.said}", flush=True)
            if line.remedy is not None:
                print(f"      {'':<30}  -> {line.remedy}", flush=True)
    return ExitCode.OK


def _network(words: list[str], largest_mib: int) -> int:
    from distbench.composing import compose_only
    from distbench.doctor import network
    from distbench.hydra_edge import stamp
    from distbench.validation import validate

    if odd := next((word for word in words if "=" not in word), None):
        raise ConfigError(f"{odd!r} is no override; they look like launch.nproc=4")
    if largest_mib < 1:
        raise ConfigError(f"--largest {largest_mib} is no size in MiB; use --largest 1 or more")
    config = compose_only(spelled(words))
    config = replace(config, global_batch=world_size(config), accumulation=1)  # there are no batches to divide
    validate(config)
    if world_size(config) < 2:
        raise ConfigError("there is no network with 1 rank: set launch.nproc=2 or more, or launch.nodes=2")
    path = Path(config.output_dir) / f"{stamp()}_network"
    if joined_world() is not None:
        return network.joined(config, RunFolder(path), largest_mib * 2**20)
    folder = RunFolder(path)
    try:
        folder.logs.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; set output_dir=...") from error
    return network.run(config, folder, largest_mib * 2**20).exit_code
