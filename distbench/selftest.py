"""`distbench selftest`: inject known bugs, show that each is caught, and that clean runs are not.

Every cell goes through the path of any run. Beside the gate's answer stands what simpler comparisons would have said.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbench.errors import ConfigError, ExitCode, OutputError

if TYPE_CHECKING:
    from distbench.faults.catalogue import CatalogueFault
    from distbench.faults.naive import Naive
    from distbench.faults.trial import Trial

AXES = ("fault", "strategy", "precision", "ranks")
QUICK_FAULTS, QUICK_CLEAN = 12, 6
"""Cells of `--quick`: under three minutes on two cores."""


@dataclass(frozen=True)
class Cell:
    """One fault in one setting."""

    fault: str
    strategy: str
    precision: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.fault},{self.strategy},{self.precision},{self.ranks}"


@dataclass
class Row:
    """What came of a cell. None: the question does not apply."""

    fault: str
    strategy: str
    precision: str
    ranks: int
    detected: bool
    located: bool | None
    diagnosed: bool | None
    status: str
    check: str | None
    """The first failing check and its step."""
    found: str | None
    """The parameter or module that the gate named."""
    diagnosis: str | None
    text: str | None
    naive: dict[str, bool | None]
    seconds: float
    command: str


@dataclass
class CleanRow:
    """What came of a clean configuration."""

    index: int
    passed: bool
    status: str
    tier: str | None
    text: str | None
    seconds: float
    command: str


def main(argv: list[str]) -> int:
    """Exit code 0 if every fault was caught and no clean run flagged, 3 if not, 2 for bad usage."""
    options = _parse(argv)
    from distbench.faults.catalogue import catalogue

    faults = catalogue()
    if options.list:
        _print_catalogue(faults)
        return ExitCode.OK
    chosen = _choices(options.words, faults)
    cells = [] if options.clean else cells_of(faults, chosen)
    clean = _clean_configurations(options, chosen)
    if options.quick:
        cells, clean = _quick(cells, clean, options.seed)
    if not cells and not options.clean:
        raise ConfigError("no fault of the catalogue applies to that choice; see `distbench selftest --list`")
    out = Path(options.out or f"outputs/selftest-{datetime.now():%Y-%m-%d_%H-%M-%S}").resolve()
    if any(out.glob("selftest.*")):
        raise ConfigError(f"{options.out} already holds a self-test; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make {options.out}: {error.strerror}; choose another --out") from error

    from distbench.launching import local

    local.warm_up()
    started = time.perf_counter()
    rows: list[Row] = []
    clean_rows: list[CleanRow] = []
    try:
        for number, cell in enumerate(cells, 1):
            rows.append(_try(cell, faults[cell.fault], out, f"{number}/{len(cells)}"))
        for number, (index, overrides) in enumerate(clean, 1):
            clean_rows.append(_try_clean(index, overrides, out, f"clean {number}/{len(clean)}"))
    finally:  # interrupted, too: what has run is worth reading
        good = _report(rows, clean_rows, out, time.perf_counter() - started)
    return ExitCode.OK if good else ExitCode.GATE


# --- what to run


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="distbench selftest",
        description="Inject known bugs into short runs, and show that the gate catches each and flags no clean run.",
        epilog="choose with fault=A,B strategy=ddp,fsdp,fsdp2 precision=fp32,bf16,fp16 ranks=2,4; default: everything",
    )
    parser.add_argument("words", nargs="*", metavar="KEY=A,B")
    parser.add_argument("--list", action="store_true", help="the catalogue, and nothing else")
    parser.add_argument("--quick", action="store_true", help="a seeded subset, in under three minutes on two cores")
    parser.add_argument(
        "--clean", type=int, metavar="N", help="N clean configurations drawn from --seed, and no faults"
    )
    parser.add_argument("--start", type=int, default=0, metavar="I", help="first configuration of --clean (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of --quick and --clean (default 0)")
    parser.add_argument("--out", metavar="DIR", help="a new folder (default outputs/selftest-<time>)")
    options = parser.parse_intermixed_args(argv)
    if options.clean is not None and (options.clean < 1 or options.words or options.quick):
        raise ConfigError("--clean N runs N >= 1 drawn configurations and takes neither choices nor --quick")
    return options


def _choices(words: list[str], faults: dict[str, type[CatalogueFault]]) -> dict[str, list[str]]:
    """The chosen values of each axis, all of them where none is named. Raises ConfigError for names there are not."""
    every = {
        "fault": list(faults),
        "strategy": ["ddp", "fsdp", "fsdp2"],
        "precision": sorted({p for fault in faults.values() for p in fault.precisions}),
        "ranks": sorted({str(n) for fault in faults.values() for n in fault.ranks}),
    }
    chosen = dict(every)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in every:
            raise ConfigError(f"{word!r} is not a choice of the self-test; choose with {'=..., '.join(AXES)}=...")
        chosen[key] = [part for part in value.split(",") if part]
        unknown = [part for part in chosen[key] if part not in every[key]]
        if unknown or not chosen[key]:
            hint = "" if len(every[key]) > 12 else f"; there are {', '.join(every[key])}"
            near = _near(unknown[0], every[key]) if unknown else ""
            raise ConfigError(f"{key}={value} names no {key} {', '.join(unknown)}{near}{hint}")
    return chosen


def _near(word: str, names: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(word, names, n=1)
    return f", did you mean {near[0]}?" if near else "; see `distbench selftest --list`"


def cells_of(faults: dict[str, type[CatalogueFault]], chosen: dict[str, list[str]]) -> list[Cell]:
    """Every chosen fault in every chosen setting in which it can exist."""
    return [
        Cell(name, strategy, precision, ranks)
        for name, fault in faults.items()
        if name in chosen["fault"]
        for precision in fault.precisions
        if precision in chosen["precision"]
        for ranks in fault.ranks
        if str(ranks) in chosen["ranks"]
        for strategy in fault.strategies
        if strategy in chosen["strategy"]
    ]


def _clean_configurations(options: argparse.Namespace, chosen: dict[str, list[str]]) -> list[tuple[int, list[str]]]:
    from distbench.faults.clean import draw, grid

    if options.clean:
        return [(index, draw(options.seed, index)) for index in range(options.start, options.start + options.clean)]
    return list(enumerate(grid(chosen["strategy"], chosen["precision"], chosen["ranks"])))


def _quick(
    cells: list[Cell], clean: list[tuple[int, list[str]]], seed: int
) -> tuple[list[Cell], list[tuple[int, list[str]]]]:
    """A seeded sample: different faults on two ranks, and clean runs beside them."""
    rng = random.Random(seed)
    small = [cell for cell in cells if cell.ranks == min(c.ranks for c in cells)]
    rng.shuffle(small)
    first: dict[str, Cell] = {}
    for cell in small:
        first.setdefault(cell.fault, cell)
    few = [entry for entry in clean if "launch.nproc=2" in entry[1]]
    return list(first.values())[:QUICK_FAULTS], rng.sample(few, min(QUICK_CLEAN, len(few)))


# --- running


def _try(cell: Cell, fault: type[CatalogueFault], out: Path, progress: str) -> Row:
    from distbench.faults.naive import naive_verdicts
    from distbench.faults.trial import run_trial

    own = [
        f"fault={cell.fault}",
        f"strategy={cell.strategy}",
        f"precision={cell.precision}",
        f"launch.nproc={cell.ranks}",
        *fault.overrides_for(cell.strategy, cell.precision, cell.ranks),
        "gate.keep_gradients=true",
    ]
    trial = run_trial(own, out, f"fault_{cell.name}")
    row = judge(cell, fault, trial, naive_verdicts(trial, out))
    answer = "caught" if row.detected else "MISSED"
    print(f"[{progress}] {cell.fault} {cell.strategy} {cell.precision} {cell.ranks} ranks: {answer}", flush=True)
    return row


def judge(cell: Cell, fault: type[CatalogueFault], trial: Trial, naive: Naive) -> Row:
    """What the gate said of a fault: caught at all, in the right place, for the right reason."""
    failure = trial.first_failure
    named = _named(trial)
    diagnosis = (trial.gate.get("diagnosis") or {}).get("kind")
    return Row(
        **asdict(cell),
        detected=trial.status == "gate_failed" and failure is not None,
        located=_is_right(named, fault.location) if fault.location else None,
        diagnosed=diagnosis in fault.diagnosis if fault.diagnosis else None,
        status=trial.status,
        check=f"{failure['name']} at step {failure['step']}" if failure else None,
        found=named,
        diagnosis=diagnosis,
        text=trial.gate.get("text", trial.reason),
        naive=asdict(naive),
        seconds=trial.seconds,
        command=trial.command,
    )


def _named(trial: Trial) -> str | None:
    """The parameter or module that the gate puts first."""
    location: dict[str, Any] = trial.gate.get("location") or {}
    if location.get("parameters"):
        return str(location["parameters"][0])
    if location.get("module"):
        return str(location["module"])
    failure = trial.first_failure
    return None if failure is None or failure["parameter"] is None else str(failure["parameter"])


def _is_right(named: str | None, wanted: tuple[str, ...]) -> bool:
    """The parameter itself, or the module that owns it."""
    return named is not None and any(named in (name, name.rpartition(".")[0]) for name in wanted)


def _try_clean(index: int, overrides: list[str], out: Path, progress: str) -> CleanRow:
    from distbench.faults.trial import run_trial

    trial = run_trial(overrides, out, f"clean_{index:04d}")
    passed = trial.status == "passed"
    row = CleanRow(
        index=index,
        passed=passed,
        status=trial.status,
        tier=trial.gate.get("tier"),
        text=trial.gate.get("text", trial.reason),
        seconds=trial.seconds,
        command=trial.command,
    )
    answer = row.tier if passed else f"FLAGGED ({row.status}): {row.text}\n    {row.command}"
    print(f"[{progress}] {' '.join(overrides[:3])}: {answer}", flush=True)
    return row


# --- reporting


def _report(rows: list[Row], clean: list[CleanRow], out: Path, seconds: float) -> bool:
    """Write and print the tables. Returns whether every fault was caught and no clean run flagged."""
    from distbench.runs.files import write_atomic, write_json

    tree = {
        "schema": 1,
        "seconds": seconds,
        "totals": totals(rows, clean),
        "faults": [asdict(row) for row in rows],
        "clean": [asdict(row) for row in clean],
    }
    write_json(out / "selftest.json", tree)
    text = markdown(rows, clean)
    write_atomic(out / "selftest.md", text)
    print(f"\n{text}\nwritten to {out}", flush=True)
    return all(row.detected for row in rows) and all(row.passed for row in clean)


def totals(rows: list[Row], clean: list[CleanRow]) -> dict[str, Any]:
    """How many of how many."""

    def share(values: list[bool | None]) -> list[int]:
        known = [value for value in values if value is not None]
        return [sum(known), len(known)]

    naive = sorted({name for row in rows for name in row.naive})
    return {
        "detected": share([row.detected for row in rows]),
        "located": share([row.located for row in rows]),
        "diagnosed": share([row.diagnosed for row in rows]),
        **{name: share([row.naive[name] for row in rows]) for name in naive},
        "clean_passed": share([row.passed for row in clean]),
        "clean_tiers": {
            tier: sum(row.tier == tier for row in clean) for tier in sorted({row.tier or row.status for row in clean})
        },
    }


def markdown(rows: list[Row], clean: list[CleanRow]) -> str:
    """The tables: one line per fault and strategy over its precisions and ranks, then the clean matrix."""
    lines: list[str] = []
    counts = totals(rows, clean)
    if rows:
        lines += [
            "| fault | strategy | detected | located | diagnosed | loss | norm | assert_close | depth-scaled |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.fault, row.strategy), []).append(row)
        for (fault, strategy), same in groups.items():
            figures: list[list[bool | None]] = [
                [r.detected for r in same],
                [r.located for r in same],
                [r.diagnosed for r in same],
            ]
            figures += [[r.naive[name] for r in same] for name in ("loss", "norm", "assert_close", "depth_scaled")]
            lines.append(f"| {fault} | {strategy} | " + " | ".join(_share(values) for values in figures) + " |")
        total = ["detected", "located", "diagnosed", "loss", "norm", "assert_close", "depth_scaled"]
        lines.append("| **all** | | " + " | ".join(f"{counts[t][0]}/{counts[t][1]}" for t in total) + " |")
        for row in rows:
            if not row.detected:
                lines += ["", f"MISSED {row.fault} ({row.status}): {row.text}", f"    {row.command}"]
            elif row.located is False or row.diagnosed is False:
                lines += [
                    "",
                    f"caught, but not explained right: {row.fault} {row.strategy} {row.precision} {row.ranks} ranks: "
                    f"{row.check}, named {row.found}, class {row.diagnosis}",
                ]
    if clean:
        passed, number = counts["clean_passed"]
        tiers = ", ".join(f"{count} {tier}" for tier, count in counts["clean_tiers"].items())
        lines += ["", f"clean configurations: {passed} of {number} passed ({tiers})"]
        for clean_row in clean:
            if not clean_row.passed:
                lines += ["", f"FLAGGED ({clean_row.status}): {clean_row.text}", f"    {clean_row.command}"]
    return "\n".join(lines).strip() + "\n"


def _share(values: list[bool | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "n/a"
    if all(known):
        return "yes"
    return f"{sum(known)}/{len(known)}" if any(known) else "no"


def _print_catalogue(faults: dict[str, type[CatalogueFault]]) -> None:
    for name, fault in faults.items():
        seen = f" [{fault.seen_in}]" if fault.seen_in else ""
        print(f"{name}{seen}\n    {fault.title()}")
        print(f"    strategies {', '.join(fault.strategies)}" + (f" ({fault.why_not})" if fault.why_not else ""))
        needs = " ".join(fault.overrides)
        print(f"    precision {', '.join(fault.precisions)}" + (f"; needs {needs}" if needs else ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
