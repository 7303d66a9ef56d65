"""Who waits for whom, from what ranks that do not move have left: their phase, stacks and collectives."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distbench.launching.heartbeat import Beat

STOPPED = "T"
"""State of a process that a signal has stopped, as /proc has it."""


@dataclass(frozen=True)
class Seen:
    """What is known of one rank."""

    beat: Beat
    idle: float
    """Seconds since it last said where it is."""
    state: str | None
    """Its process's state as /proc has it; None: unknown."""
    collectives: Mapping[str, Any] | None
    """Of the flight recorder (`flight.dump`); None: it did not answer."""
    stacks: str
    """As faulthandler writes them; empty: it did not answer."""

    @property
    def where(self) -> str:
        """Phase, and the line of Python it is at."""
        frame = _users_frame(self.stacks)
        return f"{self.beat}" + (f", at {frame}" if frame else "")


@dataclass(frozen=True)
class Stall:
    """Ranks that do not move, explained."""

    rank: int
    """The one that the others wait for; of several the first."""
    beat: Beat
    """Where that one was."""
    message: str
    """In one line."""
    lines: tuple[str, ...]
    """One a rank: where it is."""


@dataclass(frozen=True)
class _Waiting:
    """A collective that a rank has entered and not left."""

    group: str
    number: int
    operation: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        return f"{self.operation} {self.number} of group {self.group} ({self.dtype} {shapes})"


def explain(ranks: Mapping[int, Seen]) -> Stall:
    """What the evidence of a host's ranks says, and no more."""
    rank, message = _blamed(ranks)
    lines = tuple(f"rank {rank}: {_line(seen)}" for rank, seen in sorted(ranks.items()))
    return Stall(rank, ranks[min(ranks) if rank not in ranks else rank].beat, message, lines)


def _blamed(ranks: Mapping[int, Seen]) -> tuple[int, str]:
    """(rank, why)."""
    for rank, seen in sorted(ranks.items()):
        if seen.state == STOPPED:
            return rank, f"rank {rank} is stopped (SIGSTOP), in {seen.where}"
    waiting = {rank: own for rank, seen in sorted(ranks.items()) if (own := _waiting(seen)) is not None}
    by_group: dict[str, dict[int, _Waiting]] = defaultdict(dict)
    for rank, own in waiting.items():
        by_group[own.group][rank] = own
    for group, inside in sorted(by_group.items()):
        if found := _odd_one(group, inside, ranks):
            return found
    outside = set(ranks) - set(waiting)
    rank = max(sorted(outside or ranks), key=lambda rank: ranks[rank].idle)
    seen = ranks[rank]
    if outside:
        return rank, f"rank {rank} has not moved for {seen.idle:.0f} s, in {seen.where}"
    return rank, f"all ranks are in {waiting[rank]}, for {seen.idle:.0f} s: a link or a device, not a rank"


def _odd_one(group: str, inside: dict[int, _Waiting], ranks: Mapping[int, Seen]) -> tuple[int, str] | None:
    """(rank, why) of a member that is not where the others are, or in another collective."""
    latest = max(own.number for own in inside.values())
    there = {rank: own for rank, own in inside.items() if own.number == latest}
    first = min(there)
    members = _members(group, ranks)
    for rank in members:
        if rank in there:
            continue
        if rank in inside:
            what = f"is still in {inside[rank]}"
        else:
            what = f"has not come to it: it is in {ranks[rank].where}" if rank in ranks else "is on another host"
        names = _names(sorted(there))
        return rank, f"{names} wait{'s' * (len(there) == 1)} for rank {rank} in {there[first]}; rank {rank} {what}"
    kinds = defaultdict(list)
    for rank, own in sorted(there.items()):
        kinds[own].append(rank)
    if len(kinds) > 1:
        said = "; ".join(f"{_names(who)} in {own}" for own, who in kinds.items())
        odd = min(kinds.values(), key=len)[0]
        return odd, f"ranks are in different collectives at the same place: {said}"
    return None


def _members(group: str, ranks: Mapping[int, Seen]) -> list[int]:
    known = [(seen.collectives or {}).get("groups", {}).get(group) for seen in ranks.values()]
    return next((sorted(found) for found in known if found), sorted(ranks))


def _waiting(seen: Seen) -> _Waiting | None:
    """The newest collective that it has entered and not left."""
    entries = [entry for entry in (seen.collectives or {}).get("entries", []) if not entry["ended"]]
    if not entries:
        return None
    last = entries[-1]
    shapes = tuple(map(tuple, last["shapes"]))
    return _Waiting(str(last["group"]), last["number"], last["operation"], last["dtype"], shapes)


def _line(seen: Seen) -> str:
    own = _waiting(seen)
    text = f"{seen.where}, since {seen.idle:.0f} s"
    if own is not None:
        text += f", in {own}"
    if seen.state == STOPPED:
        return f"{text}; its process is stopped"
    return text if seen.collectives is not None else f"{text}; it does not answer: native code holds its interpreter"


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _users_frame(stacks: str) -> str | None:
    """`file:line in function` of the main thread, which faulthandler writes last: the innermost frame that is no library's,
    or of all the innermost."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stacks.rpartition("hread 0x")[2])
    if not frames:
        return None
    file, line, function = next(
        (f for f in frames if "/site-packages/" not in f[0] and "/lib/python" not in f[0]), frames[0]
    )
    return f"{file.rpartition('/')[2]}:{line} in {function}"
