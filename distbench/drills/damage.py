"""Damage to the files of the checkpoint that a run is resumed from."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distbench.checkpoint.keeping import LATEST
from distbench.checkpoint.manifest import MANIFEST, complete
from distbench.checkpoint.shards import shard_name
from distbench.checkpoint.state import STATE
from distbench.drills.base import Case, Drill, Promises
from distbench.drills.command import run
from distbench.drills.site import SMALL, STEPS, Site, same
from distbench.errors import ExitCode

SETTINGS = {"strategy": "fsdp2", **SMALL, "checkpoint.keep_last": 3}
FILES = (shard_name(0), shard_name(1), STATE, MANIFEST)


def cut_short(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(1, len(data))])


def flip_a_bit(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def empty(file: Path, rng: random.Random) -> None:
    file.write_bytes(b"")


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


WAYS: dict[str, Callable[[Path, random.Random], None]] = {
    "cut short": cut_short,
    "with one bit flipped": flip_a_bit,
    "empty": empty,
    "deleted": delete,
}
OTHER_STEP, OTHER_RANK = "of another step", "of the other rank"


@dataclass(frozen=True)
class Damage(Case):
    """One file of the newest checkpoint, or the file that names it. `how` is one of WAYS, or what it is exchanged with."""

    file: str
    how: str
    seed: float

    def __str__(self) -> str:
        return f"{self.file} {self.how}"

    def run(self, site: Site, folder: Path, promised: Promises) -> dict[str, str]:
        straight = site.straight(SETTINGS)
        path = folder / "run"
        shutil.copytree(straight, path)
        shutil.rmtree(path / "checkpoints" / f"step_{STEPS:08d}")
        before, newest = complete(path / "checkpoints")[-2:]
        self.spoil(before, newest)
        left = contents(path / "checkpoints")
        code, said = run([f"resume={path}"], folder / "resumed.txt")
        if self.does_not_matter:
            promised(code == ExitCode.OK, f"resuming ends with {code}: {said}")
            return {"resume": f"goes on, {'bitwise' if same(promised, path, straight) else 'NOT bitwise'}"}
        promised(code == ExitCode.USAGE, f"exit code {code}, not {int(ExitCode.USAGE)}: {said}")
        promised("Traceback" not in said, f"a traceback: {said}")
        named = next((name for name in self.to_blame if str(newest / name) in said), None)
        promised(named is not None, f"{' or '.join(self.to_blame)} is not named: {said}")
        promised(contents(path / "checkpoints") == left, "the checkpoints have changed")
        return {"resume": f"refused, {named} named"}

    def spoil(self, before: Path, newest: Path) -> None:
        if self.how == OTHER_STEP:
            exchange(newest / self.file, before / self.file)
        elif self.how == OTHER_RANK:
            exchange(newest / shard_name(0), newest / shard_name(1))
        else:
            file = newest.with_name(LATEST) if self.file == LATEST else newest / self.file
            WAYS[self.how](file, random.Random(self.seed))

    @property
    def does_not_matter(self) -> bool:
        """A folder without its manifest is no checkpoint: there is the one before. LATEST is for people."""
        return self.file == LATEST or (self.file, self.how) == (MANIFEST, "deleted")

    @property
    def to_blame(self) -> tuple[str, ...]:
        """Files that a refusal may name: a whole manifest that others do not match may be right."""
        if (self.file, self.how) == (MANIFEST, OTHER_STEP):
            return FILES
        return FILES[:2] if self.how == OTHER_RANK else (self.file,)


def exchange(file: Path, other: Path) -> None:
    aside = file.with_suffix(".aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def draw(rng: random.Random, number: int) -> list[Case]:
    """Every way for every file, in random order; of which byte, is random."""
    pairs = [(file, how) for file in FILES for how in (*WAYS, OTHER_STEP)]
    pairs += [(FILES[0], OTHER_RANK), *((LATEST, how) for how in WAYS)]
    rng.shuffle(pairs)
    return [Damage(file, how, rng.random()) for file, how in pairs[:number]]


DRILL = Drill(
    name="damage",
    promise=(
        "Damage to a file of the checkpoint that a run is resumed from: exit code 2, the file is named, every checkpoint is "
        "left as it is; nothing is ever trained on from it."
    ),
    number=25,
    draw=draw,
)
