"""The parent side of a local launch: torch's elastic agent over a warm forkserver.

A forkserver that has imported torch and everything a run needs forks a fresh process per rank and run, so a sweep
pays the import once and memory figures stay clean. (Not fork from the parent: children hung after it had run one
multi-threaded matrix product.)
"""

from __future__ import annotations

import logging
import multiprocessing.forkserver
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.config import AUTO, Config, world_size
from distbench.errors import ConfigError
from distbench.launching.heartbeat import DONE
from distbench.launching.signals import ignored, requests
from distbench.launching.watch import Limits, Watch, stall_limit
from distbench.runs.folder import RunFolder

if TYPE_CHECKING:
    from distbench.launching.heartbeat import Beat
    from distbench.launching.nodes import Meeting
    from distbench.launching.stalls import Stall
    from distbench.numerics.cache import BaselineEntry


@dataclass(eq=False)  # not frozen: context managers that an exception passes set its traceback
class RanksFailed(Exception):
    """Ranks did not all end well."""

    ranks: list[tuple[int, int]]
    """(rank, exit code; negative for a signal) as the agent saw them."""
    beats: Mapping[int, Beat] = field(default_factory=dict)
    """Where each was."""
    stall: Stall | None = None
    """Why they were ended, where none had ended by itself."""
    out_of_memory: bool = False
    """Whether the kernel has killed processes for want of memory meanwhile."""
    lost: list[str] = field(default_factory=list)
    """Nodes that do not answer any more."""


class Interrupted(Exception):
    """The parent was asked to stop (SIGINT, SIGTERM) while ranks ran."""


stopped_by: list[int] = []
"""Signals that asked runs of this process to end early."""


def warm_up() -> None:
    """Start the forkserver and its imports in the background; cheap to call again.

    Called before the parent imports torch itself, so the two imports overlap.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # a line for every window otherwise
    if multiprocessing.get_start_method(allow_none=True) not in {None, *multiprocessing.get_all_start_methods()}:
        # A worker of joblib's: its children would look for a method that only its workers know.
        multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_forkserver_preload(["distbench.launching.preload"])
    with ignored(requests()):  # which what is started here inherits: a scheduler's signals reach every process
        multiprocessing.forkserver.ensure_running()


def cool_down() -> None:
    """End a forkserver that no rank was forked from yet: still importing, it would outlive a refusal by seconds and hold
    its output open."""
    server = multiprocessing.forkserver._forkserver
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None and hasattr(server, "_stop"):
        os.kill(pid, signal.SIGKILL)
        server._stop()


def check_port(config: Config) -> None:
    """Refuse a `launch.master_addr` that is not this machine's, and a `master_port` that is taken, before anything
    starts."""
    address, port = config.launch.master_addr, config.launch.master_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ConfigError(
                f"launch.master_addr={address} is not an address of this machine: {error.strerror}; ranks meet on "
                "launch.master_addr=127.0.0.1"
            ) from error
    if port == AUTO:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ConfigError(
                f"launch.master_port={port} cannot be used on {address}: {error.strerror}; "
                "use launch.master_port=auto or a free port"
            ) from error


def out_of_memory_kills() -> int:
    """How often this machine's kernel has killed a process for want of memory; 0 where it does not say."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counters.get("oom_kill", 0))


def _silence(*names: str) -> None:
    """Keep a library's log records, and those of its submodules, off the console: what they tell is told better."""
    for name in names:
        logger = logging.getLogger(name)
        logger.propagate = False
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def run_ranks(config: Config, folder: RunFolder, baseline: BaselineEntry | None, meeting: Meeting) -> None:
    """Start this machine's ranks and wait for them. Raises RanksFailed or Interrupted; none of them outlives this call."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from distbench.launching.worker import run_rank_process

    _silence("torch.distributed.elastic", "torch.multiprocessing")
    node, store = meeting.node, meeting.store
    num_ranks = world_size(config) // node.count
    agent_logs = folder.logs / f".agent{node.rank}"
    launch = LaunchConfig(
        min_nodes=node.count,
        max_nodes=node.count,
        nproc_per_node=num_ranks,
        run_id=meeting.run_id,
        # Not "c10d": it walks the interpreter's stack, sources included, at each of its steps; 0.4 s a run. And it does not
        # keep the order of the nodes.
        rdzv_backend="static",
        rdzv_endpoint=f"{node.address}:{store.port}",  # the agent's own store shares this one's server
        rdzv_configs={"rank": node.rank},
        local_addr=node.address if node.leads else None,
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are ours, below
        logs_specs=DefaultLogsSpecs(log_dir=str(agent_logs)),
    )
    handlers = {number: signal.getsignal(number) for number in {signal.SIGINT, signal.SIGTERM, *requests()}}

    ranks = range(node.rank * num_ranks, (node.rank + 1) * num_ranks)
    limits = Limits(stall_limit(config), config.launch.grace_s)
    others_failed = meeting.failed if node.count > 1 else None
    # The agent waits for a value that every rank returns, and one that calls os._exit(0) returns none.
    watch = Watch(folder, ranks, limits, None, others_failed, on_nobody=lambda: os.kill(os.getpid(), signal.SIGTERM))
    asked = False

    def stop(number: int, frame: object) -> None:
        nonlocal asked
        if watch.nobody_left:
            raise SignalException("all ranks have ended", signal.SIGTERM)
        if not asked and watch.ask_to_stop():
            asked = True
            stopped_by.append(number)
            print("    stopping after this step, with a checkpoint; once more: now", flush=True)
            return
        # The agent passes on the signal named here. Ranks ignore SIGINT, and it would wait half a minute for them.
        raise SignalException("stopped by the user", signal.SIGTERM)

    for number in handlers:
        signal.signal(number, stop)
    killed_before = out_of_memory_kills()
    try:
        with watch:
            elastic_launch(launch, run_rank_process)(config, str(folder.path), baseline, meeting.job)
    except ChildFailedError as error:
        meeting.fail()
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise _failed(watch, codes, out_of_memory_kills() > killed_before) from None
    except (SignalException, KeyboardInterrupt) as error:
        meeting.fail()
        if watch.nobody_left:
            raise _failed(watch, {}, out_of_memory_kills() > killed_before) from None
        raise Interrupted(str(error)) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(agent_logs, ignore_errors=True)


def _failed(watch: Watch, seen: dict[int, int], out_of_memory: bool) -> RanksFailed:
    """From the agent's exit codes and the watch's. One of 0 is a failure, too, of a rank that was not done."""
    codes = seen | watch.exit_codes()
    done = {rank for rank, beat in watch.last_beats.items() if beat.phase == DONE}
    ranks = [(rank, code) for rank, code in sorted(codes.items()) if code != 0 or rank not in done]
    return RanksFailed(ranks, watch.last_beats, watch.stall, out_of_memory)
