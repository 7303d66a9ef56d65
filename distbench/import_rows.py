"""`python -m distbench import FILE --out DIR`: another tool's rows as run folders (docs/decision.md)."""

from __future__ import annotations

import argparse
from pathlib import Path

from distbench.errors import ExitCode
from distbench.runs.text import counted, plain

DESCRIPTION = """\
Make run folders of rows that another tool measured, so that `rank` and `report` show them beside ours. FILE is a JSON list
of objects or a CSV with a header; docs/decision.md has the fields. A row without a gate_tier is never ranked nor chosen.

exit codes: 0 written, 2 bad input"""


def main(argv: list[str]) -> int:
    """Check, write, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m distbench import", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path, help=".json or .csv")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the run folders are made")
    parser.add_argument(
        "--like",
        metavar="RUN",
        type=Path,
        help="a run folder of the same model, data, batch and machine; without it the rows are a group of their own",
    )
    options = parser.parse_args(argv)
    from distbench.runs.folder import read_record
    from distbench.runs.imported import UNNAMED, import_rows

    folders = import_rows(options.file, options.out, options.like)
    for folder in folders:
        record = read_record(folder)
        if record["gate"]["passed"] and record["window"]["step_time"]["meter"] == UNNAMED:
            note = "names no step_time_meter: its time will not be compared with ours (docs/decision.md)"
            print(f"note: {plain(folder.name)} {note}")
    print(f"{counted(len(folders), 'run folder')} in {plain(options.out)}")
    return ExitCode.OK
