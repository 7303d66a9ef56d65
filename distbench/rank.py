"""`python -m distbench rank PATHS...`: a decision from the records that are there (docs/decision.md)."""

from __future__ import annotations

import argparse
import math
import sys

from distbench.config import Decide, Rule
from distbench.errors import ConfigError, ExitCode, RunFolderError
from distbench.runs.rank import Ranking, rank

DESCRIPTION = """\
Rank run folders and choose one: gate, memory, communication and step time in columns of their own, a Pareto front of
step time and peak memory, and a reason for each that is not chosen. PATHS are run folders or folders of them at any depth.

exit codes: 0 read, whether or not there is a choice; 2 bad input, or no record at all"""


def main(argv: list[str]) -> int:
    """Read, decide, print, and return the exit code."""
    options = _parse(argv)
    ranking = ranked(options)
    if options.json:
        from distbench.runs.files import json_text
        from distbench.runs.rank import to_json

        sys.stdout.write(json_text(to_json(ranking)))
    else:
        from distbench.report.console import print_decision

        print_decision(ranking)
    return ExitCode.OK


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `rank` and `report` share."""
    parser.add_argument("paths", nargs="+", metavar="PATHS", help="run folders, or folders of them")
    rules = [rule.name for rule in Rule]
    parser.add_argument(
        "--rule", choices=rules, help="default: the one the runs were started with, where they agree, else fastest"
    )
    parser.add_argument("--memory-gib", type=_positive, metavar="X", help="for fastest_within_memory")
    parser.add_argument(
        "--within-percent", type=_not_negative, metavar="Y", help="for the rules named within; default 5"
    )
    parser.add_argument(
        "--group", type=int, metavar="K", help="rank this group of comparable runs; default: the largest"
    )


def ranked(options: argparse.Namespace) -> Ranking:
    """The ranking that the options ask for. Raises RunFolderError where there is not a single record."""
    ranking = rank(options.paths, _decide(options), options.group)
    if not ranking.reading.runs:
        unreadable = ranking.reading.unreadable
        detail = f"; {unreadable[0][1]}" if unreadable else "; a run folder holds a record.json"
        raise RunFolderError(f"no record to rank in {', '.join(options.paths[:3])}{detail}")
    return ranking


def _decide(options: argparse.Namespace) -> Decide | None:
    if options.rule is None:
        if options.memory_gib is not None:
            raise ConfigError("--memory-gib is for --rule fastest_within_memory")
        if options.within_percent is not None:
            raise ConfigError("--within-percent is for --rule smallest_within or most_accurate_within")
        return None
    rule = Rule[options.rule]
    if rule is Rule.fastest_within_memory and options.memory_gib is None:
        raise ConfigError("--rule fastest_within_memory needs --memory-gib X")
    default = Decide.within_percent
    return Decide(rule, options.memory_gib, default if options.within_percent is None else options.within_percent)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distbench rank", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print decision.json's content instead of the table")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value
