"""Runs a reader on many damaged files, in a process whose memory and time are bounded, and says what went wrong.

A damaged file is read, or refused by a named error in one line that says which. Anything else is a finding: another
exception, a process that dies, more memory or processor time than a small file is worth.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from distbench.errors import DistbenchError
from tests.fuzz.mutations import Damage

MEMORY = 1 << 30
"""Bytes of address space beyond what the process has before it reads."""
SECONDS = 30
"""Of processor time for one file: a guard against what never ends, far above what any takes."""
MAX_MESSAGE = 1000
FAST = "/dev/shm"
"""Where folders are quickly made and removed."""


@dataclass(frozen=True)
class Target:
    """One reader and what it reads."""

    name: str
    file: str
    """Which file of the corpus is damaged: a path in its folder."""
    damage: Damage
    make: Callable[[Path], Any]
    """Writes the corpus into a folder."""
    read: Callable[[Path], Any]
    """Reads the folder; raises DistbenchError for what it refuses."""


@dataclass
class Outcome:
    """What became of a target's files. JSON between processes."""

    target: str
    read: int = 0
    refused: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)
    """`case`, and `problem` with its traceback."""


class TooSlow(BaseException):
    """More processor time than a file is worth. No reader catches it by chance."""


def fuzz(target: Target, number: int, seed: int, first: int = 0, keep: Path | None = None) -> Outcome:
    """Read `number` damaged files, from case `first` on. After a case that kills the process, a new one goes on.

    With `keep`, the folders of findings are copied there.
    """
    outcome = Outcome(target.name)
    case, end = first, first + number
    while case < end:
        part, died = _in_child(target, case, end, seed, keep)
        outcome.read += part.read
        outcome.refused += part.refused
        outcome.findings += part.findings
        if died is None:
            break
        outcome.findings.append({"case": died[0], "problem": f"the process ended: {died[1]}"})
        case = died[0] + 1
    return outcome


def _in_child(
    target: Target, first: int, end: int, seed: int, keep: Path | None
) -> tuple[Outcome, tuple[int, str] | None]:
    """The outcome of the cases done, and (case, how) where the process died in one."""
    reading, writing = os.pipe()
    # Made here, so that it is removed whatever becomes of the child.
    with tempfile.TemporaryDirectory(dir=FAST if os.access(FAST, os.W_OK) else None) as temporary:
        child = os.fork()
        if child == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                _cases(
                    target,
                    Path(temporary),
                    range(first, end),
                    seed,
                    keep,
                    lambda event: print(json.dumps(event), file=pipe, flush=True),
                )
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            events = [json.loads(line) for line in pipe]
        _, status = os.waitpid(child, 0)
    if broken := next((event["broken"] for event in events if "broken" in event), None):
        raise AssertionError(f"{target.name}: {broken}")
    done = next((Outcome(**event["done"]) for event in events if "done" in event), None)
    if done is not None:
        return done, None
    begun = [event["begun"] for event in events if "begun" in event]
    partial = Outcome(target.name, findings=[event for event in events if "problem" in event])
    partial.read = max(0, len(begun) - 1 - len(partial.findings))
    how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
    return partial, (begun[-1], how)


def _cases(
    target: Target, root: Path, cases: range, seed: int, keep: Path | None, say: Callable[[dict[str, Any]], None]
) -> None:
    """The child's part. What goes wrong outside a reader is `broken`: the corpus, or the damage."""
    signal.signal(signal.SIGPROF, _too_slow)
    outcome = Outcome(target.name)
    whole, folder = root / "whole", root / "damaged"
    try:
        whole.mkdir()
        target.make(whole)
        shutil.copytree(whole, folder)
        target.read(folder)  # also imports what it needs, before memory is bounded
        shutil.rmtree(folder)
        content = (whole / target.file).read_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
        for case in cases:
            say({"begun": case})
            shutil.copytree(whole, folder, copy_function=os.link)  # quicker; readers write into no file that is there
            (folder / target.file).unlink()
            (folder / target.file).write_bytes(target.damage(content, Random(f"{seed}/{target.name}/{case}")))
            problem = _problem(target, folder, outcome)
            if problem is not None:
                finding = {"case": case, "problem": problem}
                say(finding)
                outcome.findings.append(finding)
                if keep is not None:
                    shutil.copytree(folder, keep / f"{target.name}-{seed}-{case}", dirs_exist_ok=True)
            shutil.rmtree(folder)
    except BaseException:
        say({"broken": traceback.format_exc()})
    else:
        say({"done": asdict(outcome)})


def _problem(target: Target, folder: Path, outcome: Outcome) -> str | None:
    """What is wrong with how a reader took a file; None: nothing."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        target.read(folder)
        outcome.read += 1
    except DistbenchError as error:
        outcome.refused += 1
        return _bad_message(str(error), folder)
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def _bad_message(message: str, folder: Path) -> str | None:
    if "\n" in message:
        return f"a message of several lines: {message[:MAX_MESSAGE]!r}"
    if len(message) > MAX_MESSAGE:
        return f"a message of {len(message)} characters: {message[:MAX_MESSAGE]!r}"
    if str(folder) not in message:
        return f"a message that does not say which file: {message!r}"
    return None


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s of processor time")


def _address_space() -> int:
    """Bytes that the process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
