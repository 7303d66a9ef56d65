"""`python -m distbench drill`: make go wrong what goes wrong where people train, and hold what is left against the promises.

Every case is a run, or a few, by the command line that a user types.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from distbench import __version__, interrupts
from distbench.errors import ConfigError, DistbenchError, ExitCode
from distbench.runs.files import check_output

if TYPE_CHECKING:
    from distbench.drills.base import Case, Drill, Try
    from distbench.drills.site import Site

DESCRIPTION = """\
Do on purpose, to small runs on this machine, what goes wrong where people train, and hold what is left against what
docs/drills.md promises. Takes about half an hour on two idle cores without --number.

exit codes: 0 everything ended as promised, 1 something did not, 2 bad usage"""


def main(argv: list[str]) -> int:
    """Hold the drills that were asked for, and return the exit code."""
    from distbench.drills.catalogue import DRILLS
    from distbench.drills.site import Site

    options = _parse(argv)
    if options.list:
        for drill in DRILLS.values():
            print(f"{drill.name:<12} {drill.number:>4} cases   {drill.promise}")
        return ExitCode.OK
    drills = _chosen(options.names, DRILLS)
    _check(options)
    root = Path(tempfile.mkdtemp(prefix="distbench-drill-"))
    began = time.perf_counter()
    site = Site(root)
    interrupts.listen(signal.SIGTERM)
    results: dict[str, list[Try]] = {drill.name: [] for drill in drills}
    good = False
    try:
        for drill in drills:
            hold(drill, options.seed, options.number or drill.number, site, results[drill.name])
        good = not any(one.broken for tries in results.values() for one in tries)
    finally:  # interrupted, too: what was held is worth reading
        text = markdown(drills, results)
        print(f"\n{text}", flush=True)
        if good:
            shutil.rmtree(root, ignore_errors=True)
        else:
            print(f"kept: {root}", flush=True)
    if options.write:
        options.write.write_text(_document(text, argv, time.perf_counter() - began))
    return ExitCode.OK if good else ExitCode.DIFFERENT


# --- what is asked for


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distbench drill", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which drills (default: all; --list names them)")
    parser.add_argument("--number", type=int, metavar="N", help="at most N cases of each (default: a full drill)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn at random is drawn from it (default 0)")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="a Markdown file for the tables, beside printing them"
    )
    parser.add_argument("--list", action="store_true", help="the drills and what each promises, and nothing else")
    return parser.parse_args(argv)


def _chosen(names: list[str], drills: dict[str, Drill]) -> list[Drill]:
    unknown = [name for name in names if name not in drills]
    if unknown:
        raise ConfigError(f"there is no drill {unknown[0]!r}; there are {', '.join(drills)}")
    return [drills[name] for name in dict.fromkeys(names or drills)]


def _check(options: argparse.Namespace) -> None:
    if options.number is not None and options.number < 1:
        raise ConfigError(f"--number {options.number} is no number of cases; use --number 1 or more")
    if options.write and not options.write.absolute().parent.is_dir():
        raise ConfigError(f"--write {options.write}: there is no folder {options.write.absolute().parent}")
    if options.write:
        check_output(options.write, "--write")
    if not Path("/proc/self/fd").is_dir():
        raise ConfigError("drills look at processes by /proc, which this system does not have: use Linux")


# --- holding


def hold(drill: Drill, seed: int, number: int, site: Site, tries: list[Try]) -> None:
    """Make the cases of a drill, one after another, and add what came of each to `tries`."""
    cases = drill.draw(random.Random(f"{seed} {drill.name}"), number)
    for index, case in enumerate(cases, 1):
        one = attempt(case, site, site.root / f"{drill.name}_{index:03d}")
        tries.append(one)
        print(f"[{drill.name} {index}/{len(cases)}] {case}: {_in_words(one)}", flush=True)


def attempt(case: Case, site: Site, folder: Path) -> Try:
    """Make a case in a new folder, which is kept where it did not end as promised."""
    from distbench.drills.base import Promises, Skipped, Try

    folder.mkdir(parents=True)
    promised, one = Promises(), Try(case)
    began = time.perf_counter()
    try:
        one.found = case.run(site, folder, promised)
    except Skipped as reason:
        one.skipped = str(reason)
    except DistbenchError as error:  # a file that cannot be read, a command that does not end
        promised(False, str(error))
    one.seconds = time.perf_counter() - began
    one.broken = promised.broken
    if not one.broken:
        shutil.rmtree(folder)
    return one


# --- telling


def _in_words(one: Try) -> str:
    found = ", ".join(f"{key} {value}" for key, value in one.found.items())
    if one.skipped is not None:
        return f"skipped: {one.skipped}"
    if one.broken:
        return "NOT AS PROMISED\n" + "\n".join(f"    {problem}" for problem in one.broken)
    return f"as promised ({found}), {one.seconds:.0f} s"


def markdown(drills: Sequence[Drill], results: dict[str, list[Try]]) -> str:
    """A section for each drill: its promise, its figures, its table."""
    from distbench.drills.base import rows

    lines: list[str] = []
    for drill in drills:
        if tries := results.get(drill.name):
            kept = sum(not one.broken for one in tries if one.skipped is None)
            made = sum(one.skipped is None for one in tries)
            lines += [f"## {drill.name}", "", f"{drill.promise}", "", f"**{kept} of {made} ended as promised.**", ""]
            lines += [*(drill.table or rows)(tries), ""]
            lines += [f"NOT AS PROMISED {one.case}: {'; '.join(one.broken)}\n" for one in tries if one.broken]
    return "\n".join(lines)


def _document(text: str, argv: list[str], seconds: float) -> str:
    words = shlex.join(["python", "-m", "distbench", "drill", *argv])
    made = (
        f"Made by distbench {__version__} with torch {version('torch')}, Python {platform.python_version()}, "
        f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} cores, in {seconds / 60:.0f} minutes. What each drill "
        "proves: [drills.md](drills.md)."
    )
    return f"# The drills' tables\n\n    {words}\n\n{made}\n\n{text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
