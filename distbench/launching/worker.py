"""The rank side of a local launch: a fresh process, its own log, then one run.

The forkserver has imported this module, and all that a run needs, before any rank is forked (launching/preload.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing.errors import record

from distbench.config import Config
from distbench.experiment import run_rank
from distbench.launching.failure import write_rank_failure
from distbench.numerics.cache import BaselineEntry
from distbench.runs.folder import RunFolder


@record
def run_rank_process(config: Config, path: str, baseline: BaselineEntry | None) -> None:
    """Entry point that the elastic agent starts. Returns None; what is to be known is in the run folder."""
    # Ctrl-C reaches the whole foreground group: the parent decides what it means and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.environ["MASTER_ADDR"].startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # stay on loopback instead of resolving the host's name
    folder = RunFolder(Path(path))
    rank = int(os.environ["RANK"])
    console = redirect_output(folder, f"rank{rank}")
    faulthandler.enable()  # a crash in native code leaves the Python stack in the rank's log
    try:
        run_rank(config, folder, console=console, baseline=baseline)
    except BaseException as error:
        write_rank_failure(folder, rank, error)
        raise


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
