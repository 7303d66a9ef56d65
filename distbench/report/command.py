"""`python -m distbench report PATHS...`: the decision and its plots as one HTML file (docs/decision.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from distbench.errors import ExitCode, OutputError
from distbench.rank import add_options, ranked

DESCRIPTION = """\
One self-contained page, for a browser or a printer: the decision with its reasons, where time and memory go, a step's
timeline on every rank, gradients against their bounds, losses, scaling.

exit codes: 0 written, 2 bad input, or no record at all"""


def main(argv: list[str]) -> int:
    """Read, decide, write the page, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m distbench report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the first of PATHS")
    options = parser.parse_args(argv)
    from distbench.report.decision import headline
    from distbench.report.decision_html import title_of, to_html
    from distbench.runs.files import check_output, write_atomic

    first = Path(options.paths[0])
    out = Path(options.out) if options.out else (first if first.is_dir() else Path()) / "report.html"
    check_output(out, "--out")
    ranking = ranked(options)
    try:
        write_atomic(out, to_html(ranking, title_of(options.paths, len(ranking.reading.runs))))
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror}; use --out FILE") from error
    print(f"decision {headline(ranking)}\npage     {out}")
    return ExitCode.OK
