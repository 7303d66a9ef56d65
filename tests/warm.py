"""`python -m distbench ...` without the seconds of importing: in a process forked from one that has imported what it needs.

The command is then what it would be: the same entry under the same name, in a session, folder and environment of its own,
with a forkserver of its own, which is forked instead of started. For tests that are about something else than how
processes start and end, and what they import.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

FORKSERVER = "from multiprocessing.forkserver import main"
"""How the command with which multiprocessing starts a forkserver begins."""

_spawn = multiprocessing.util.spawnv_passfds


class WarmProcess:
    """As far as tests and drills go, a `subprocess.Popen` of the command in a session of its own."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], cwd: Path, out: Path, err: Path) -> None:
        """`out`, `err`: files to which it appends what it says."""
        from tests.distributed import forkserver

        places = [str(place) for place in (cwd, out, err)]
        self._process = forkserver().Process(target=_command, args=(list(words), dict(env), *places))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("distbench", timeout or 0.0)
        return self.returncode


def _popen(words: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **same: Any) -> WarmProcess:
    assert list(words[1:3]) == ["-m", "distbench"] and set(same) == {"stdin", "stderr", "start_new_session"}
    return WarmProcess(words[3:], env, Path.cwd(), Path(stdout.name), Path(stdout.name))


SUBPROCESS = SimpleNamespace(**{**vars(subprocess), "Popen": _popen})
"""For the commands of drills: they say everything to one file."""


def _command(words: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    """The process of the command: what an interpreter would have set up, then the command, then an interpreter's end."""
    os.setsid()
    for number, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    tempfile.tempdir = None  # it is the environment's
    sys.argv = ["distbench", *words]
    sys.path[:] = [cwd, *(place for place in sys.path if place != cwd)]
    multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _fork_forkserver
    try:
        runpy.run_module("distbench", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def _fork_forkserver(path: str, args: Sequence[str], passfds: Sequence[int]) -> int:
    """In place of `spawnv_passfds`: a forkserver is forked, anything else is started."""
    if not args[-1].startswith(FORKSERVER):
        return int(_spawn(path, args, passfds))
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if number not in {0, 1, 2, *passfds}:
                with contextlib.suppress(OSError):  # the one that listed them
                    os.close(number)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]
        # Again, for what else it does: this process is to end with its parent.
        sys.modules.pop("distbench.launching.preload", None)
        exec(args[-1], {"__name__": "__main__"})
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
