"""What a drill is made of: cases, each one thing that goes wrong, and the promises that hold all the same."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distbench.errors import DistbenchError

if TYPE_CHECKING:
    from distbench.drills.site import Site


class DrillError(DistbenchError):
    """A case could not be made, or a command did not end."""


class Skipped(Exception):
    """A case that cannot be made on this machine; says why."""


class Promises:
    """Those that were not kept."""

    def __init__(self) -> None:
        self.broken: list[str] = []

    def __call__(self, kept: bool, otherwise: str) -> bool:
        """`otherwise`: what is told where it was not kept. Returns whether it was."""
        if not kept:
            self.broken.append(otherwise)
        return kept

    def said(self, words: str, text: str) -> bool:
        """That a command says something."""
        return self(words in text, f"it does not say {words!r}, but: {' / '.join(text.strip().splitlines()[-6:])}")


class Case(ABC):
    """One thing that goes wrong, once. `str()` says what, and where."""

    @abstractmethod
    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        """Make it so in an empty folder, and see what came of it: the table's columns.

        Raises Skipped; any DistbenchError is a promise that was not kept, too.
        """


@dataclass
class Try:
    """What came of a case."""

    case: Case
    found: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Promises that were not kept."""
    skipped: str | None = None
    """Why there was nothing to see."""
    seconds: float = 0.0
    folder: Path | None = None
    """Where it was made, kept if it did not end as promised."""


@dataclass(frozen=True)
class Drill:
    """One kind of trouble."""

    name: str
    promise: str
    """What is so afterwards, in a line."""
    number: int
    """Cases of a full drill."""
    draw: Callable[[random.Random, int], Sequence[Case]]
    """(random state, how many) -> cases."""
    table: Callable[[Sequence[Try]], list[str]] | None = None
    """Its tries as lines of Markdown; None: a row each."""


def rows(tries: Sequence[Try]) -> list[str]:
    """A table with a row for each try."""
    columns = list(dict.fromkeys(key for one in tries for key in one.found))
    lines = [
        "| " + " | ".join(["what goes wrong", *columns, "as promised"]) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for one in tries:
        cells = [str(one.case), *(one.found.get(column, "") for column in columns), answer(one)]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def answer(one: Try) -> str:
    """Whether it ended as promised."""
    if one.skipped is not None:
        return f"skipped: {one.skipped}"
    return "NO" if one.broken else "yes"
