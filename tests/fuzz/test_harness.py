"""The harness itself: a reader that is not as it should be is found, whatever is wrong with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from distbench.errors import RunFolderError
from tests.fuzz import harness, mutations
from tests.fuzz.harness import Target, fuzz
from tests.fuzz.targets import TARGETS

WHOLE = b'{"a": 1}'


def target(read: Callable[[bytes], Any], damage: mutations.Damage = lambda content, random: b"bad") -> Target:
    """Of a folder with one file, whose content `read` is given; it is called for the whole one first."""

    def make(folder: Path) -> None:
        (folder / "file").write_bytes(WHOLE)

    return Target("t", "file", damage, make, lambda folder: read((folder / "file").read_bytes()))


def unless_whole(action: Callable[[], object]) -> Callable[[bytes], Any]:
    return lambda content: None if content == WHOLE else action()


def problems(read: Callable[[bytes], Any], number: int = 3) -> list[str]:
    return [finding["problem"] for finding in fuzz(target(read), number, seed=0).findings]


def raises(error: BaseException) -> Callable[[], object]:
    def action() -> object:
        raise error

    return action


def forever() -> None:
    while True:
        pass


def test_what_is_read_or_refused_by_name_is_no_finding(tmp_path: Path) -> None:
    assert problems(lambda content: None) == []

    def refuse(folder: Path) -> None:
        if (folder / "file").read_bytes() != WHOLE:
            raise RunFolderError(f"{folder / 'file'} is damaged")

    outcome = fuzz(Target("t", "file", lambda *_: b"bad", target(lambda c: None).make, refuse), 5, seed=0)
    assert (outcome.read, outcome.refused, outcome.findings) == (0, 5, [])


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (raises(KeyError("x")), "KeyError"),
        (raises(SystemExit(0)), "SystemExit"),
        (lambda: bytearray(2 * harness.MEMORY), "MemoryError"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the process ended: SIGKILL"),
        (lambda: os._exit(3), "the process ended: exit code 3"),
        (raises(RunFolderError("file is\ndamaged")), "of several lines"),
        (raises(RunFolderError("x" * 5000)), "a message of 5000 characters"),
        (raises(RunFolderError("damaged")), "does not say which file"),
    ],
)
def test_what_is_wrong_is_found_in_every_case(action: Callable[[], object], problem: str) -> None:
    found = problems(unless_whole(action))
    assert len(found) == 3 and all(problem in text for text in found)


def test_what_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SECONDS", 0.2)
    (found,) = problems(unless_whole(forever), number=1)
    assert "TooSlow" in found


def test_a_corpus_that_cannot_be_read_is_no_test() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        problems(lambda content: {}[content])


def test_findings_are_kept(tmp_path: Path) -> None:
    fuzz(target(unless_whole(raises(KeyError("x")))), 1, seed=4, first=7, keep=tmp_path)
    assert (tmp_path / "t-4-7" / "file").read_bytes() == b"bad"


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_the_same_for_the_same_seed_and_hardly_ever_none(name: str, tmp_path: Path) -> None:
    TARGETS[name].make(tmp_path)
    content = (tmp_path / TARGETS[name].file).read_bytes()
    damaged = [TARGETS[name].damage(content, Random(seed)) for seed in range(40)]
    assert damaged == [TARGETS[name].damage(content, Random(seed)) for seed in range(40)]
    assert len(set(damaged) - {content}) > 30
