"""What the doctor says on the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from distbench.doctor.fit import SLOW
from distbench.measure.cores import CROWDED
from distbench.report.console import relative, table_console
from distbench.runs.text import readable_bytes


def print_network(found: dict[str, Any], folder: Path) -> None:
    """Collectives by size, their lines, the pairs, and who is slow."""
    hosts = ", ".join(f"{host['host']} ({len(host['ranks'])})" for host in found["hosts"])
    print(f"\n{found['world_size']} ranks on {hosts}; {found['backend']}, {found['device']}")
    for host in found["hosts"]:
        for card in host["interfaces"]:
            speed = card["mbit_per_second"]
            said = "speed not told" if speed is None else f"{speed:,} Mbit/s by its driver"
            print(
                f"  {host['host']}  {card['name']}  {card['address'] or 'no IPv4 address'}, {said}, MTU {card['mtu']}"
            )
    _show(_sizes(found["collectives"]))
    print("seconds are of the slowest rank; algbw and busbw as nccl-tests define them, in bytes\n")
    _show(_lines(found["lines"]))
    print(
        "seconds = alpha + bytes that busbw counts / beta; error: the largest relative difference from what was measured\n"
    )
    _print_pairs(found["pairs"])
    if (short := found["core_wait"]) is not None and short >= CROWDED:
        print(
            f"\ncores were short: a rank's thread could run and had none for {short:.0%} of the time; measure again when the"
        )
        print("hosts are quiet")
    if wrong := sorted({row["op"] for row in found["collectives"] if not row["right"]}):
        print(
            f"\nWRONG VALUES came out of {', '.join(wrong)}: nothing that is trained over this network can be believed"
        )
    print(f"\nresult       {relative(folder / 'network.json')}", flush=True)


def _sizes(rows: list[dict[str, Any]]) -> Table:
    table = _table(("collective", False), ("bytes", True), ("time", True), ("quickest, slowest", True), ("algbw", True))
    table.add_column("busbw", justify="right")
    before = None
    for row in rows:
        table.add_row(
            "" if row["op"] == before else row["op"],
            readable_bytes(row["bytes"]),
            _seconds(row["seconds"]),
            f"{_seconds(row['low'])}, {_seconds(row['high'])}",
            f"{readable_bytes(row['algbw'])}/s",
            f"{readable_bytes(row['busbw'])}/s",
        )
        before = row["op"]
    return table


def _lines(lines: dict[str, Any]) -> Table:
    table = _table(("collective", False), ("alpha", True), ("beta", True), ("error", True))
    for op, line in lines.items():
        if line is None:
            table.add_row(op, "-", "-", "no line")
        else:
            table.add_row(op, _seconds(line["alpha"]), f"{readable_bytes(line['beta'])}/s", f"{line['error']:.0%}")
    return table


def _print_pairs(pairs: dict[str, Any]) -> None:
    every = pairs["all"]
    table = _table(
        ("from", False), ("to", False), ("latency", True), ("best", True), ("bandwidth", True), ("best", True)
    )
    shown = sorted(every, key=lambda pair: pair["bandwidth"])[:MAX_PAIRS]
    for pair in shown:
        table.add_row(
            Text(pair["source"]),
            Text(pair["target"]),
            _seconds(pair["latency"]),
            _seconds(pair["latency_best"]),
            f"{readable_bytes(pair['bandwidth'])}/s",
            f"{readable_bytes(pair['bandwidth_best'])}/s",
        )
    _show(table)
    if len(every) > len(shown):
        print(f"the {len(shown)} slowest of {len(every)}")
    if pairs["rounds"] < pairs["of_rounds"]:
        print(f"each of the {pairs['between']} met {pairs['rounds']} of {pairs['of_rounds']} others")
    print(
        "medians, and the best of them, by which a pair is judged: what else runs on a host holds up some messages, not all"
    )
    usual = pairs["typical"]
    print(f"typical      {_seconds(usual['latency'])} one way, {readable_bytes(usual['bandwidth'])}/s")
    if not pairs["slow"]:
        print(f"slow         none: no {pairs['between'][:-1]} is {1 - SLOW:.0%} slower to reach than is typical")
        return
    for host in pairs["slow_hosts"]:
        print(f"SLOW         {host}: most of its pairs are; look at its card, cable or neighbours first")
    for pair in pairs["slow"]:
        print(
            f"SLOW         {pair['source']} to {pair['target']}: {_seconds(pair['latency'])} one way, "
            f"{readable_bytes(pair['bandwidth'])}/s, measured again alone"
        )


MAX_PAIRS = 12


def _table(*headings: tuple[str, bool]) -> Table:
    """(heading, whether its column is of numbers)"""
    table = Table(box=box.SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    for heading, numeric in headings:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    return table


def _show(table: Table) -> None:
    console = table_console()
    console.print()
    console.print(table)


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
