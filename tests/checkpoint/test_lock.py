"""One run at a time writes a run folder, and who dies leaves it to others."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from distbench.checkpoint import lock
from distbench.errors import OutputError
from tests.cli import environment

HOLD = "import sys; from pathlib import Path; from distbench.checkpoint import lock; "


def holder(call: str, folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock until it is killed."""
    words = [sys.executable, "-c", f"{HOLD} held = lock.{call}(Path(sys.argv[1])); print('held', flush=True); input()"]
    process = subprocess.Popen(
        [*words, str(folder)], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("call", ["take", "join"])
def test_a_folder_that_is_written_is_not_taken(call: str, tmp_path: Path) -> None:
    with holder(call, tmp_path) as process:
        with pytest.raises(OutputError, match=rf"{tmp_path} is being written by process {process.pid} on .*: wait for"):
            lock.take(tmp_path)
        lock.join(tmp_path).close()  # as the run's own rank 0
        process.kill()
    lock.take(tmp_path).close()


def test_who_joins_does_not_let_another_in(tmp_path: Path) -> None:
    command = lock.take(tmp_path)
    rank = lock.join(tmp_path)
    command.close()  # it was killed, and its rank lives on
    with pytest.raises(OutputError, match="is being written"):
        lock.take(tmp_path)
    rank.close()
    lock.take(tmp_path).close()


def test_a_file_system_without_locks_tells_nobody_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    with lock.take(tmp_path), lock.take(tmp_path):
        pass


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*/\.lock: No such file or directory"):
        lock.take(tmp_path / "nowhere")
