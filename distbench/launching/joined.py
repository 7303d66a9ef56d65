"""Ranks that torchrun (or any launcher that sets its variables) started.

Rank 0 composes with Hydra and publishes the frozen config and the run folder through the rendezvous store; the other
ranks never run Hydra, they wait for it there. The store is the job's own, so nothing can be mistaken for another run's.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from distbench.config import Config, from_container, to_container
from distbench.launching.heartbeat import ranks_folder
from distbench.launching.signals import send
from distbench.launching.watch import keep_evidence
from distbench.runs.folder import RunFolder

if TYPE_CHECKING:
    import torch.distributed as dist

    from distbench.launching.stalls import Stall
    from distbench.launching.worker import RankProcess
    from distbench.numerics.cache import BaselineEntry

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
"""A scheduler's, or torchrun's own, which gives its ranks half a minute: time for the step, and a checkpoint."""
KEY = "distbench/run"
FOLDER = "distbench/folder"
FAILED = "distbench/failed"
RELEASED = "distbench/released"

LAST_WORDS_S = 1.0
"""How long a rank that lost a peer waits for what the others have to say before it speaks for all."""

_published: list[str] = []
"""Folders of the runs that this process, as rank 0, has told the others of: at most one."""


def _store(timeout_s: float) -> dist.Store:
    import torch.distributed as dist

    store, _, _ = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    # One store for all attempts, where torchrun's rendezvous is static: nothing of an earlier one may be found in it.
    return dist.PrefixStore(f"distbench/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def lead(config: Config, folder: RunFolder, baseline: BaselineEntry | None) -> int:
    """Rank 0: publish the run, then be its first rank. Returns this process's exit code."""
    keep_evidence(folder)  # of an attempt before
    ranks_folder(folder).mkdir(parents=True)
    store = _store(config.launch.timeout_s)
    message = {
        "config": to_container(config),
        "folder": str(folder.path.resolve()),
        "baseline": None if baseline is None else asdict(baseline),
    }
    store.set(KEY, json.dumps(message))
    _unprefixed(store).set(FOLDER, str(folder.path.resolve()))
    _published.append(str(folder.path))
    return _be_rank(config, folder, store, baseline)


def release(exit_code: int) -> None:
    """Rank 0, when it is done: if it published no run, let the waiting ranks go, with its exit code."""
    if _published:
        return
    store = _store(60.0)
    store.set(KEY, json.dumps({"exit_code": exit_code}))
    # Without torchrun the store is this process's own, and is gone when it ends: first all must have read it.
    store.wait([f"{RELEASED}{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))])


def follow() -> int:
    """Any other rank: wait for rank 0's run and be part of it. Returns this process's exit code."""
    store = _store(600.0)
    from distbench.numerics.cache import BaselineEntry

    message: dict[str, Any] = json.loads(store.get(KEY))
    if "exit_code" in message:
        store.set(f"{RELEASED}{os.environ['RANK']}", "")
        return int(message["exit_code"])
    baseline = None if message["baseline"] is None else BaselineEntry(**message["baseline"])
    return _be_rank(from_container(message["config"]), RunFolder(Path(message["folder"])), store, baseline)


def folder_to_go_on_in() -> str | None:
    """Rank 0, of a job that torchrun has started again: the run folder of the attempt before, if it has a checkpoint."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    from distbench.checkpoint.manifest import complete

    store = _unprefixed(_store(600.0))
    if not store.check([FOLDER]):
        return None
    folder = store.get(FOLDER).decode()
    return folder if complete(RunFolder(Path(folder)).checkpoints) else None


def _unprefixed(store: dist.Store) -> dist.Store:
    """The job's own store, whichever the attempt."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _watch(config: Config, folder: RunFolder, process: RankProcess) -> AbstractContextManager[Any]:
    """Over this host's ranks, by the first of them."""
    from distbench.launching.watch import Limits, Watch, stall_limit

    if os.environ.get("LOCAL_RANK", os.environ["RANK"]) != "0":
        return nullcontext()
    first = int(os.environ["RANK"])
    ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))

    def end(stall: Stall) -> None:
        from distbench.launching.failure import root_failure
        from distbench.launching.heartbeat import beats

        found = beats(folder, ranks)
        failure = root_failure(folder, [], int(os.environ["WORLD_SIZE"]), found, stall)
        _tell(folder, failure, process.console)
        send(signal.SIGKILL, (beat.pid for beat in found.values() if beat.pid != os.getpid()))
        os._exit(failure["exit_code"])  # the main thread waits in a collective, for good

    # Torchrun ends who outlives another.
    return Watch(folder, ranks, Limits(stall_limit(config), math.inf), end)


def _tell(folder: RunFolder, failure: dict[str, Any], console: TextIO) -> None:
    from distbench.experiment import record_failure
    from distbench.report.console import print_failure

    record_failure(folder, failure, [])
    with redirect_stdout(console):
        print_failure(folder.path, failure)
    keep_evidence(folder)


def _be_rank(config: Config, folder: RunFolder, store: dist.Store, baseline: BaselineEntry | None) -> int:
    import torch.distributed as dist

    from distbench.errors import StaleBaseline
    from distbench.experiment import EXIT_CODES, run_rank
    from distbench.launching.failure import root_failure, write_rank_failure
    from distbench.launching.heartbeat import DONE, beats
    from distbench.launching.worker import RankProcess
    from distbench.numerics.cache import discard

    rank = int(os.environ["RANK"])
    process = RankProcess.begin(folder, rank, *STOP_SIGNALS)
    console = process.console
    try:
        with _watch(config, folder, process):
            status = run_rank(config, folder, process, baseline, dist.PrefixStore("distbench/group", store))
        process.heartbeat.beat(DONE)
        if rank == 0:
            keep_evidence(folder)
        sys.stdout = console  # what is said about the finished run is for the console again
    except Exception as error:
        if isinstance(error, StaleBaseline) and baseline is not None:
            discard(baseline.path)
            error.args = (f"{error}; it is discarded now: start the run again",)
        own = write_rank_failure(folder, rank, error)
        if store.add(FAILED, 1) == 1:  # the first to fail speaks, once for all
            if own["lost_peer"]:
                time.sleep(LAST_WORDS_S)
            size = int(os.environ["WORLD_SIZE"])
            _tell(folder, root_failure(folder, [], size, beats(folder, range(size))), console)
        sys.stdout.flush()
        return int(own["exit_code"])
    return EXIT_CODES[status]
