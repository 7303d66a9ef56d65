"""The rank side of a local launch: a fresh process, its own log, then one run.

The forkserver has imported this module, and all that a run needs, before any rank is forked (launching/preload.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from distbench.config import Config
from distbench.launching.failure import write_rank_failure
from distbench.launching.heartbeat import DONE, Heartbeat, rank_files
from distbench.launching.interfaces import interface_to
from distbench.launching.jobs import job_module
from distbench.launching.signals import StopRequest, answer_dumps, end_with_parent, requests
from distbench.numerics.cache import BaselineEntry
from distbench.runs.folder import RunFolder


def run_rank_process(config: Config, path: str, baseline: BaselineEntry | None, job: str) -> None:
    """Entry point that the elastic agent starts, for a job of `jobs.JOBS`. Returns None; what is to be known is in the run
    folder."""
    end_with_parent()
    # What went wrong is told in the run folder. The agent falls over an error file of its own that is cut short, as a full
    # disk or SIGKILL leaves it (torch 2.13, ProcessFailure).
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    # Ctrl-C reaches the whole foreground group: the parent decides what it means and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if socket.gethostbyname(os.environ["MASTER_ADDR"]).startswith("127."):
        # Stay on loopback, where Gloo would resolve the host's name and NCCL would take a network card.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    elif interface := interface_to(os.environ["MASTER_ADDR"]):
        # Gloo takes the one that the host's name resolves to, which is 127.0.1.1 on many. NCCL looks for fast ones itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    folder = RunFolder(Path(path))
    rank = int(os.environ["RANK"])
    process = RankProcess.begin(folder, rank, *requests())
    try:
        job_module(job).run_rank(config, folder, process, baseline)
    except BaseException as error:
        write_rank_failure(folder, rank, error)
        if isinstance(error, SystemExit):
            # Of the model's code. The agent would take 0 for success, and wait for a result.
            raise SystemExit(1) from error
        raise
    process.heartbeat.beat(DONE)


@dataclass(frozen=True)
class RankProcess:
    """How this process, as a rank, speaks with who started it."""

    console: TextIO
    heartbeat: Heartbeat
    asked_to_stop: StopRequest

    @classmethod
    def begin(cls, folder: RunFolder, rank: int, *stop: signal.Signals) -> RankProcess:
        """From now on it says where it is, answers when asked, and takes the signals `stop` as a request to end early."""
        files = rank_files(folder, rank)
        files.heartbeat.parent.mkdir(exist_ok=True)
        heartbeat = Heartbeat(files.heartbeat)
        console = redirect_output(folder, f"rank{rank}")
        faulthandler.enable()  # a crash in native code leaves the Python stack in the rank's log
        answer_dumps(files.stacks, files.collectives)
        return cls(console, heartbeat, StopRequest.on(*stop))


def redirect_output(folder: RunFolder, name: str) -> TextIO:
    """Send this process's stdout and stderr, native code's too, to `logs/<name>.log`; return the console they had."""
    sys.stdout.flush()
    sys.stderr.flush()
    console = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(folder.logs / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    return console
