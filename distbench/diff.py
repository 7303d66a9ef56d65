"""`python -m distbench diff A B`: what differs between two runs, where first, and why (docs/diff.md)."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from distbench.errors import ExitCode, OutputError

DESCRIPTION = """\
Compare two run folders, whatever their strategy, world size, precision or torch version: settings, losses, gradients,
weights. Also two checkpoint folders or safetensors files from anywhere, or what distbench.GradientRecorder wrote.
B is the reference: relative differences are |A - B| / |B|.

exit codes: 0 equal within the tolerance, 1 different, 2 bad input"""


def main(argv: list[str]) -> int:
    """Compare, print, write the files asked for, and return the exit code."""
    options = _parse(argv)
    from distbench.report.diff_console import print_diff, reading_progress
    from distbench.report.diff_html import to_html
    from distbench.runs.diff import diff, to_json
    from distbench.runs.files import check_output, json_text

    if options.json not in (None, "-"):
        check_output(Path(options.json), "--json")
    if options.html is not None:
        check_output(Path(options.html), "--html")
    with reading_progress() as progress:
        found = diff(options.a, options.b, tolerance=options.tolerance, step=options.step, progress=progress)
    if options.json is not None:
        text = json_text(to_json(found))
        if options.json == "-":
            sys.stdout.write(text)
        else:
            _write(options.json, text)
    if options.html is not None:
        _write(options.html, to_html(found))
    if options.json != "-":
        print_diff(found)
        if options.html is not None:
            print(f"page {options.html}")
    return ExitCode.DIFFERENT if found.differs else ExitCode.OK


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m distbench diff", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", metavar="A", help="run folder, checkpoint folder, safetensors file, or recorded gradients")
    parser.add_argument("b", metavar="B", help="the same, for the reference")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        default=0.0,
        metavar="X",
        help="largest relative L2 difference of a parameter, and of a loss, that does not count; default 0: none",
    )
    parser.add_argument("--step", type=int, metavar="N", help="compare this step only")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; `-` prints that alone")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    return parser.parse_args(argv)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a tolerance; expected a number from 0 on, such as 1e-5")
    return value


def _write(path: str, text: str) -> None:
    from distbench.runs.files import write_atomic

    try:
        write_atomic(Path(path), text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
