"""Rows of other tools: checked whole before anything is written, shown beside ours, chosen only if gated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distbench.errors import OutputError, RunFolderError
from distbench.report.decision import decision_rows
from distbench.runs.imported import import_rows
from distbench.runs.rank import rank
from tests.runs.records import candidate


def file(root: Path, rows: Any, name: str = "rows.json") -> Path:
    path = root / name
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def test_beside_ours_and_never_chosen_ungated(tmp_path: Path) -> None:
    (ours,) = candidate(tmp_path / "ours", "a", 10)
    rows = [
        {"name": "theirs", "strategy": "zero3", "step_time_s": 0.001, "peak_memory_bytes": 1000},
        {"name": "gated", "strategy": "zero3", "step_times_s": [0.02, 0.021, 0.022], "gate_tier": "tolerance"},
    ]
    made = import_rows(file(tmp_path, rows), tmp_path / "theirs", like=ours)
    assert [path.name for path in made] == ["000_theirs", "001_gated"]
    ranking = rank([tmp_path / "ours", tmp_path / "theirs"])
    assert ranking.chosen is not None and ranking.chosen.runs[0].path == ours
    shown = {row.cells["run"]: row for row in decision_rows(ranking)}
    assert shown["theirs"].cells["strategy"] == "zero3 (rows.json)"
    assert shown["theirs"].cells["ms/step"] == "1" and shown["theirs"].why == "ungated"
    assert shown["gated"].cells["gate"] == "tolerance" and "memory not compared" in shown["gated"].why


def test_without_a_run_of_ours_they_are_a_group_of_their_own(tmp_path: Path) -> None:
    candidate(tmp_path / "ours", "a", 10)
    import_rows(file(tmp_path, [{"name": "x", "step_time_s": 1, "gate_tier": "bound"}]), tmp_path / "theirs")
    assert [group.num_runs for group in rank([tmp_path / "ours", tmp_path / "theirs"]).groups] == [1, 1]


def test_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    text = "\ufeffname, step_time_s ,gate_tier\n x , 0.1 ,bound\n"
    (made,) = import_rows(file(tmp_path, text, "rows.csv"), tmp_path / "out")
    assert made.name == "000_x" and rank([made]).candidates[0].step_time[0] == pytest.approx(0.1)
    with pytest.raises(RunFolderError, match=r"row 1 has more cells than the file has headings: \['3'\]"):
        import_rows(file(tmp_path, "name\nx,3\n", "more.csv"), tmp_path / "more")


def test_csv_and_repeats(tmp_path: Path) -> None:
    text = "name,repeat,step_times_s,gate_tier,world_size\nx,1,0.1;0.11,bound,8\nx,2,0.1;0.12,bound,8\ny,,,,\n"
    import_rows(file(tmp_path, text, "rows.csv"), tmp_path / "out")
    ranking = rank([tmp_path / "out"])
    assert [len(c.runs) for c in ranking.candidates] == [2] and ranking.candidates[0].labels["ranks"] == "8"
    assert [run.excluded for run in ranking.unranked] == ["ungated"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        ({}, "not a list of objects"),
        ("[", "is damaged"),
        ([3], "row 1 is not an object"),
        ([{"strategy": "ddp"}], "row 1 has no name"),
        ([{"name": "a"}, {"name": "b", "step_tim_s": 1}], "row 2: no field 'step_tim_s'; did you mean step_time"),
        ([{"name": "a", "colour": 1}], "row 1: no field 'colour'; fields are"),
        ([{"name": "a", "step_time_s": "nan"}], "step_time_s='nan' must be a finite number"),
        ([{"name": "a", "step_time_s": -1}], "must be a finite number from 0 on"),
        ([{"name": "a", "step_time_s": "fast"}], "step_time_s='fast' must be a number"),
        ([{"name": "a", "world_size": 1.5}], "world_size='1.5' must be a whole number"),
        ([{"name": "a", "gate_tier": "fine"}], "gate_tier='fine' must be one of bitwise"),
        ([{"name": "a", "step_times_s": []}], "must be a list of numbers"),
        ([{"name": "a", "status": "won"}], "must be one of running"),
        ([{"name": ""}], "name='' must be text"),
    ],
)
def test_bad_rows_write_nothing(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(RunFolderError) as refused:
        import_rows(file(tmp_path, rows), tmp_path / "out")
    assert message in str(refused.value) and not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    rows = file(tmp_path, [{"name": "../../a"}])
    (made,) = import_rows(rows, tmp_path / "out")
    assert made.parent == tmp_path / "out", "a name cannot leave the folder"
    with pytest.raises(OutputError, match="is there already"):
        import_rows(rows, tmp_path / "out")
    with pytest.raises(RunFolderError, match=r"expected a \.json or \.csv"):
        import_rows(file(tmp_path, "", "rows.txt"), tmp_path / "out")
