"""A decision in words: table, Markdown, files, console, page."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from distbench.__main__ import main
from distbench.report.console import print_decision
from distbench.report.decision import COLUMNS, decision_rows, headline, other_lines, to_markdown, write_decision
from distbench.report.decision_html import to_html
from distbench.runs.rank import rank
from tests.runs.records import candidate, record, window, write

HOSTILE = '<script>alert("x")</script>&\x1b[31m|`*'


def sweep(root: Path) -> Path:
    candidate(root, "strategy=ddp", 10, gib=2, repeats=3, config={"strategy.name": "ddp"})
    candidate(root, "strategy=fsdp", 12, gib=1, repeats=3, config={"strategy.name": "fsdp"})
    candidate(root, "strategy=slow", 20, gib=2, config={"strategy.name": "slow"}, batch={"world_size": 4})
    candidate(root, "oom", status="oom", reason="out of memory")
    return root


def test_rows(tmp_path: Path) -> None:
    rows = decision_rows(rank([sweep(tmp_path)]))
    assert [row.cells["verdict"] for row in rows] == ["chosen", "slower", "slower", "oom"]
    assert [row.cells[""] for row in rows] == [">*", " *", "  ", "  "]
    assert [row.cells["run"] for row in rows] == ["000 x3", "003 x3", "006", "007"]
    assert rows[3].cells["ms/step"] == "-" and rows[3].why == "oom: out of memory"
    assert all(set(row.cells) >= set(COLUMNS) for row in rows)


def test_cells_of_different_sweeps_keep_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        candidate(tmp_path / name, f"{name}s", 10)
    assert sorted(row.cells["run"] for row in decision_rows(rank([tmp_path]))) == ["000_ones", "000_twos"]


def test_files(tmp_path: Path) -> None:
    ranking = rank([sweep(tmp_path)])
    write_decision(ranking, tmp_path)
    tree = json.loads((tmp_path / "decision.json").read_text())
    assert tree["schema"] == 1 and tree["chosen"] == "000_strategy=ddp"
    assert [c["chosen"] for c in tree["candidates"]] == [True, False, False]
    assert tree["candidates"][1]["runs"][0] == "003_strategy=fsdp,repeat=1"
    assert tree["unranked"][0]["reason"] == "oom: out of memory"
    page = (tmp_path / "decision.md").read_text()
    assert page.startswith("# Decision\n\n**000\\_strategy=ddp: fastest of 3, beyond noise**")
    assert len([line for line in page.splitlines() if line.startswith("|")]) == 2 + 4
    assert rank([tmp_path]).chosen is not None, "what was written is not a run"


def test_a_page_is_written_to_a_file_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "pipe")]) == 2
    assert f"--out {tmp_path / 'pipe'} is there and is no regular file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("width", [None, "100"])
def test_the_console_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: str | None
) -> None:
    if width:
        monkeypatch.setenv("COLUMNS", width)
    long = {"strategy.name": "s" * 60, "precision.name": "p" * 60}
    candidate(tmp_path, "n" * 100, 123456.7, gib=1000, config=long)
    print_decision(rank([sweep(tmp_path)]))
    said = capsys.readouterr().out
    table = said.partition("> chosen")[0]
    assert max(len(line) for line in table.splitlines()) <= 240, "names are cut, figures are not"
    assert "decision     001_strategy=ddp: fastest of 4, beyond noise" in said
    assert "  004 x3  20 % slower (" in said


def test_the_console_lists_so_many_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(30):
        candidate(tmp_path, f"c{number}", 10 + number)
    print_decision(rank([tmp_path]))
    assert "  and 9 more\n" in capsys.readouterr().out


def test_nothing_to_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidate(tmp_path, "a", window=None)
    ranking = rank([tmp_path])
    assert headline(ranking) == "none: no run can be ranked: 1 x no window: the record has none"
    print_decision(ranking)
    assert "no window" in capsys.readouterr().out
    assert "no run can be ranked" in to_markdown(ranking) and "no run can be ranked" in to_html(ranking, "t")
    empty = rank([tmp_path / "000_a"], group=None)
    assert empty.chosen is None


def test_what_else_must_be_known(tmp_path: Path) -> None:
    sweep(tmp_path)
    candidate(tmp_path, "other", config={"global_batch": 16})
    for number in range(7):
        write(tmp_path / f"torn{number}", "{")
    (tmp_path / "refused" / ".hydra").mkdir(parents=True)
    lines = other_lines(rank([tmp_path]))
    assert lines[0].startswith("step times vary by 0.05 % from run to run")
    assert "group 2 (1 run) is not comparable: global_batch 16 instead of 8; --group 2 ranks it" in lines
    assert sum("is damaged" in line for line in lines) == 5 and "and 2 more records that cannot be read" in lines
    assert "1 run refused before it started" in lines


# --- the page


def rich_run(root: Path) -> Path:
    sweep(root)
    for path in sorted(root.iterdir()):
        rows = [
            {"name": f"w{i}", "step": 1, "margin": margin, "relative_l2": 1e-8} for i, margin in enumerate([0, 0.1, 3])
        ]
        (path / "gate.json").write_text(json.dumps({"schema": 1, "gradients": rows}))
        (path / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "loss": {5 / s}}}\n' for s in range(1, 900)))
    return root


def test_the_page_has_everything(tmp_path: Path) -> None:
    page = to_html(rank([rich_run(tmp_path)]), "a title")
    for heading in ("Decision", "Step time and memory", "Time", "Memory", "Loss", "Runs"):
        assert f"<h2>{heading}</h2>" in page
    assert page.count("<h3>One step</h3>") == 3 and "rank 1 all_reduce" in page
    assert (
        'title="meter: perf_counter, slowest rank"' in page and "<title>w2: margin 3, relative L2 1e-08</title>" in page
    )
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    longest = max(len(points.split()) for points in re.findall(r'points="([^"]+)"', page))
    assert longest <= 401


def test_scaling_over_ranks(tmp_path: Path) -> None:
    for ranks in (2, 4, 8):
        candidate(tmp_path, f"n{ranks}", 20 / ranks, batch={"world_size": ranks})
    page = to_html(rank([tmp_path]), "t")
    assert "<h2>Scaling</h2>" in page and "tokens per second by ranks" in page


def test_text_stays_text_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {"strategy.name": HOSTILE, "precision.name": HOSTILE}
    section = window()
    section["timeline"][0][0]["name"] = HOSTILE
    section["step_time"]["meter"] = HOSTILE
    section["memory"]["peak_allocated"] |= {"meter": HOSTILE}
    path = tmp_path / "000_<img src=x onerror=y>"
    write(path, record(hostile, effective="a", window=section))
    (path / "gate.json").write_text(json.dumps({"gradients": [{"name": HOSTILE, "margin": 1}]}))
    write(tmp_path / "001_b", record(hostile, effective="b", status="oom", reason=HOSTILE))
    candidate(tmp_path, "c", 20, config={"model.name": HOSTILE})
    ranking = rank([tmp_path])
    page = to_html(ranking, HOSTILE)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    assert "\x1b" not in to_markdown(ranking) and "<script" not in to_markdown(ranking).replace("\\<", "")
    print_decision(ranking)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "timeline", [None, [], {}, "x", [[None]], [{"rank": 0, "spans": []}], [[{"start": "nan"}]], [3]]
)
@pytest.mark.parametrize("gate", ["", "{", "[]", '{"gradients": 3}', '{"gradients": []}', '{"gradients": [{}]}'])
def test_any_damage_leaves_a_page(tmp_path: Path, timeline: Any, gate: str) -> None:
    section = {**window(), "timeline": timeline, "split": timeline, "memory_by_kind": timeline, "memory_predicted": [1]}
    (path,) = candidate(tmp_path, "a", window=section)
    (path / "gate.json").write_text(gate)
    (path / "metrics.jsonl").write_text(gate + "\n")
    assert "no timeline" in to_html(rank([tmp_path]), "t")


@pytest.mark.parametrize(
    "timeline",
    [
        {"0": [{"kind": "forward", "name": "f", "start": 0, "end": 1}]},
        [{"rank": 0, "spans": [{"kind": "forward", "name": "f", "start": 0, "end": 1}]}],
        [{"kind": "forward", "name": "f", "start": 0, "end": 1}],
    ],
)
def test_a_timeline_in_any_shape(tmp_path: Path, timeline: Any) -> None:
    candidate(tmp_path, "a", window={**window(), "timeline": timeline})
    assert "rank 0 f: 1000 ms from 0 ms" in to_html(rank([tmp_path]), "t")
