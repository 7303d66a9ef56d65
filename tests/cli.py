"""The command line as a process: started, watched, ended, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from distbench.runs.folder import find_runs, read_record
from tests.warm import WarmProcess

REPOSITORY = Path(__file__).parents[1]
TIMEOUT_S = 240.0
"""For one command on a crowded machine; none takes a tenth of it on an idle one."""

SMALL = ["gate=off", "model.hidden_dim=6", "model.num_layers=2", "model.seq_len=3", "steps=2"]
CUSTOM = [
    *("gate=off", "model=custom", "model.input_shape=[6]", "model.target_shape=[6]", "model.block_classes=[Block]"),
    "steps=2",
]


def target(name: str, **kwargs: object) -> list[str]:
    """Overrides for the model `tests.models_for_tests.<name>`."""
    given = [f"+model.kwargs.{key}={value}" for key, value in kwargs.items()]
    return [*CUSTOM, f"model._target_=tests.models_for_tests.{name}", *given]


@dataclass
class Finished:
    """A command that has ended, and where it ran."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def runs(self) -> list[Path]:
        return find_runs(self.cwd / "outputs") if (self.cwd / "outputs").exists() else []

    @property
    def run(self) -> Path:
        (run,) = self.runs
        return run

    @property
    def record(self) -> dict[str, Any]:
        return read_record(self.run)

    @property
    def left(self) -> list[str]:
        """Every file and folder that the command made, but for an empty `outputs`."""
        made = sorted(str(path.relative_to(self.cwd)) for path in self.cwd.rglob("*"))
        return [] if made == ["outputs"] else made


class Command:
    """A command in a session of its own, so that whatever it started can be found, and ended."""

    process: subprocess.Popen[str] | WarmProcess

    def __init__(self, *words: str, cwd: Path, env: dict[str, str] | None = None) -> None:
        self.cwd = cwd
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environment() if env is None else env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def signal(self, number: signal.Signals) -> None:
        """To the whole foreground group, as Ctrl-C in a terminal."""
        os.killpg(self.process.pid, number)

    def finish(self) -> Finished:
        """Wait for the end, and for the end of everything it started."""
        try:
            out, err = self._communicate()
            self.wait_for_orphans()
        finally:
            for process in self.alive():
                process.kill()
            self.process.wait()
        return Finished(self.process.returncode, out, err, self.cwd)

    def _communicate(self) -> tuple[str, str]:
        assert isinstance(self.process, subprocess.Popen)
        return self.process.communicate(timeout=TIMEOUT_S)

    def wait_for_orphans(self, patience_s: float = 20.0) -> None:
        """The forkserver notices its parent's end by itself, which takes it a moment."""
        deadline = time.monotonic() + patience_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive, f"still running: {alive}"

    def alive(self) -> list[psutil.Process]:
        """Processes of the session that have not ended."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found


class WarmCommand(Command):
    """`python -m distbench ...`, the same in all but how its process starts (tests/warm.py)."""

    process: WarmProcess

    def __init__(self, *words: str, cwd: Path) -> None:
        self.cwd = cwd
        self._said = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.process = WarmProcess(words, environment(), cwd, *(Path(file.name) for file in self._said))

    def _communicate(self) -> tuple[str, str]:
        self.process.wait(TIMEOUT_S)
        out, err = (Path(file.name).read_text() for file in self._said)
        return out, err


def environment() -> dict[str, str]:
    """This process's, with the checkout importable from anywhere, for `tests.models_for_tests`."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}


def distbench(*words: str, cwd: Path) -> Finished:
    """`python -m distbench ...` in `cwd`, to its end, without waiting for its imports."""
    return start_warm(*words, cwd=cwd).finish()


def start_warm(*words: str, cwd: Path) -> Command:
    return WarmCommand(*words, cwd=cwd)


def start(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Command:
    """`python -m distbench ...` in `cwd`, as a process from its first instruction."""
    return Command(sys.executable, "-m", "distbench", *words, cwd=cwd, env=env)


def torchrun(*words: str, cwd: Path, options: Sequence[str] = ()) -> Finished:
    """`torchrun --nproc-per-node 2 -m distbench ...` in `cwd`, on a free port, to its end."""
    return start_torchrun(*words, cwd=cwd, options=options).finish()


def start_torchrun(*words: str, cwd: Path, options: Sequence[str] = ()) -> Command:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *options]
    return Command(*launcher, "-m", "distbench", *words, cwd=cwd)
