"""Watches a host's ranks from outside: ends those that outlive another by too long, and all that do not move any more.

Needs nothing of the ranks but their heartbeats, so that it works for ranks that are frozen, swapped out or in native code.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from distbench.config import Config
from distbench.launching.heartbeat import DONE, Beat, beats, rank_files, ranks_folder
from distbench.launching.signals import DUMP, STOP, send
from distbench.launching.stalls import STOPPED, Seen, Stall, explain
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder

PERIOD_S = 0.25
SUSPENDED_S = 5.0
"""Between two looks: then this process did not run either (Ctrl-Z), and nobody's standing still says anything."""
ANSWER_S = 3.0
"""How long ranks have to write their stacks and collectives."""


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    stall: float | None
    """A rank may stay in one phase so long."""
    grace: float
    """Ranks may outlive another so long."""


class Watch:
    """A thread beside whatever waits for the ranks. `ranks`: this host's; `others_failed`: whether another's have ended;
    `on_nobody`: called from the thread where all are gone and nobody has noticed."""

    def __init__(
        self,
        folder: RunFolder,
        ranks: Sequence[int],
        limits: Limits,
        on_stall: Callable[[Stall], None] | None = None,
        others_failed: Callable[[], bool] | None = None,
        on_nobody: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.ranks, self.limits = folder, ranks, limits
        self.stall: Stall | None = None
        self.last_beats: dict[int, Beat] = {}
        self._children: dict[int | None, BaseProcess] = {}
        self._on_stall, self._others_failed, self._on_nobody = on_stall, others_failed, on_nobody
        self.nobody_left = False
        """All ranks are gone, and who started them still waits for a word of theirs."""
        self._found: dict[int, Beat] = {}
        """As last read: where a run folder is gone, its ranks may still be there."""
        self._moved: dict[int, tuple[int, float]] = {}
        """Rank -> (beats, when they last grew)."""
        self._died: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.last_beats = self._found | beats(self.folder, self.ranks)

    def exit_codes(self) -> dict[int, int]:
        """Of the ranks that this process has started, once they have ended; negative for a signal."""
        children = {rank: self._children.get(beat.pid) for rank, beat in self.last_beats.items()}
        return {rank: child.exitcode for rank, child in children.items() if child and child.exitcode is not None}

    def ask_to_stop(self) -> bool:
        """Ask all ranks to end after their step; False where some have not begun, so that nobody would hear it."""
        found = beats(self.folder, self.ranks)
        if set(found) != set(self.ranks):
            return False
        send(STOP, (beat.pid for beat in found.values()))
        return True

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(PERIOD_S):
            found = self._found = self._found | beats(self.folder, self.ranks)
            # Kept from here on: the agent says the exit code of one rank that has ended, not of all. (Not
            # `active_children()`, which would take the codes from under the agent.)
            self._children |= {child.pid: child for child in list(getattr(process, "_children", ()))}
            now = time.monotonic()
            if now - before > SUSPENDED_S:
                self._moved.clear()
            before = now
            for rank, beat in found.items():
                if self._moved.get(rank, (-1, 0.0))[0] != beat.beats:
                    self._moved[rank] = beat.beats, now
            states = {rank: process_state(beat.pid) for rank, beat in found.items() if beat.phase != DONE}
            alive = {rank: state for rank, state in states.items() if not is_gone(state)}
            if len(alive) < len(states) or (self._others_failed is not None and self._others_failed()):
                self._died = self._died or now
                if now - self._died > self.limits.grace:
                    self._end(found, alive)
                    if not alive and set(found) == set(self.ranks) and self._on_nobody is not None:
                        self.nobody_left = True
                        self._on_nobody()
                        return
            elif self.limits.stall is not None and any(
                now - self._moved[rank][1] > self.limits.stall for rank in alive
            ):
                self._stalled(found, alive)
                return

    def _stalled(self, found: dict[int, Beat], alive: dict[int, str | None]) -> None:
        now = time.monotonic()
        answers = self._ask(found, alive)
        seen = {
            rank: Seen(found[rank], now - self._moved[rank][1], state, answers[rank], self._stacks(rank))
            for rank, state in alive.items()
        }
        self.stall = explain(seen)
        with suppress(OSError):  # a full disk; ranks are ended whether it can be written down or not
            write_json(self.folder.logs / "stall.json", {**asdict(self.stall), "ranks": _tree(seen)})
        if self._on_stall is not None:
            self._on_stall(self.stall)
        self._end(found, alive)

    def _ask(self, found: dict[int, Beat], alive: dict[int, str | None]) -> dict[int, Any]:
        """Each rank's collectives, or None of one that does not answer in time."""
        send(DUMP, (found[rank].pid for rank in alive))
        files = {rank: rank_files(self.folder, rank).collectives for rank, state in alive.items() if state != STOPPED}
        until = time.monotonic() + ANSWER_S
        while time.monotonic() < until and not all(file.exists() for file in files.values()):
            time.sleep(0.05)
        return {rank: _read(files[rank]) if rank in files else None for rank in alive}

    def _stacks(self, rank: int) -> str:
        try:
            return rank_files(self.folder, rank).stacks.read_text(errors="replace")
        except OSError:
            return ""

    def _end(self, found: dict[int, Beat], alive: dict[int, str | None]) -> None:
        """At once: who is stopped, or in native code, does not hear anything else."""
        send(signal.SIGKILL, (found[rank].pid for rank in alive))


def stall_limit(config: Config) -> float | None:
    """Before collectives give up, so that the ranks are still there to be asked."""
    own = config.launch.stall_timeout_s
    return None if own is None else float(min(own, 0.8 * config.launch.timeout_s))


def keep_evidence(folder: RunFolder) -> None:
    """Move what ranks were asked for to the logs, and drop the rest. When no rank runs any more."""
    root = ranks_folder(folder)
    for file in sorted(root.glob("*_rank*")) if root.is_dir() else []:
        if file.stat().st_size:
            file.replace(folder.logs / file.name)
    shutil.rmtree(root, ignore_errors=True)
    for unfinished in folder.logs.glob(".failure_*.tmp"):
        unfinished.unlink()


def process_state(pid: int) -> str | None:
    """A letter as /proc has it (R, S, D, T, Z, ...), "gone", or None where there is no /proc."""
    if not Path("/proc/self").exists():
        return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "gone"
    return stat.rpartition(")")[2].split()[0]


def is_gone(state: str | None) -> bool:
    """Whether no code of it runs any more."""
    return state in ("gone", "Z", "X")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None


def _tree(seen: dict[int, Seen]) -> dict[str, Any]:
    return {
        str(rank): {"step": s.beat.step, "phase": s.beat.phase, "idle_s": round(s.idle, 1), "state": s.state}
        for rank, s in seen.items()
    }
