"""What the record says of the machine and of how it was started."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from distbench import __version__
from distbench.runs import environment as module
from distbench.runs.environment import environment


@pytest.fixture(autouse=True)
def uncached() -> None:
    environment.cache_clear()


def test_versions_and_machine_are_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    found = environment()
    assert found["packages"]["torch"] == version("torch")
    assert found["distbench"] == __version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["variables"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "hush" not in str(found), "only variables that steer the run belong into a record"


def test_git_is_the_working_directorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", "init", "-q"], check=True)
    (tmp_path / "a").write_text("1")
    subprocess.run(["git", "add", "a"], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "-m", "first"], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    environment.cache_clear()
    assert environment()["git"] == {"repository": tmp_path.name, "commit": commit, "dirty": False}
    (tmp_path / "a").write_text("2")
    environment.cache_clear()
    assert environment()["git"] == {"repository": tmp_path.name, "commit": commit, "dirty": True}


def test_a_package_that_is_missing_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("torch", "no-such-package-at-all"))
    assert environment()["packages"]["no-such-package-at-all"] is None


def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/distbench", "name=my run", "steps=3"])
    assert module.launch_command() == "distbench 'name=my run' steps=3"
