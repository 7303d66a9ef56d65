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
    (ours,) = candidate(tmp_path / "ours", "a", 10, content={"model_code": "1", "data": None})
    rows = [
        {"name": "theirs", "strategy": "zero3", "step_time_s": 0.001, "peak_memory_bytes": 1000},
        {"name": "gated", "strategy": "zero3", "step_times_s": [0.02, 0.021, 0.022], "gate_tier": "tolerance"},
    ]
    rows.append({**rows[1], "name": "unnamed", "step_times_s": [0.001, 0.001, 0.001]})
    rows[1]["step_time_meter"] = "perf_counter, slowest rank"
    made = import_rows(file(tmp_path, rows), tmp_path / "theirs", like=ours)
    assert [path.name for path in made] == ["000_theirs", "001_gated", "002_unnamed"]
    ranking = rank([tmp_path / "ours", tmp_path / "theirs"])
    assert ranking.chosen is not None and ranking.chosen.runs[0].path == ours
    shown = {row.cells["run"]: row for row in decision_rows(ranking)}
    assert shown["theirs"].cells["strategy"] == "zero3 (rows.json)"
    assert shown["theirs"].cells["ms/step"] == "1" and shown["theirs"].why == "ungated"
    assert shown["gated"].cells["gate"] == "tolerance" and "memory not compared" in shown["gated"].why
    assert shown["unnamed"].why == (
        "step time measured by a meter that the row does not name, the others' by perf_counter, slowest rank: not compared"
    )


def test_without_a_run_of_ours_they_are_a_group_of_their_own(tmp_path: Path) -> None:
    candidate(tmp_path / "ours", "a", 10)
    import_rows(file(tmp_path, [{"name": "x", "step_time_s": 1, "gate_tier": "bound"}]), tmp_path / "theirs")
    assert [group.num_runs for group in rank([tmp_path / "ours", tmp_path / "theirs"]).groups] == [1, 1]


def test_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    text = "\ufeffname, step_time_s ,gate_tier\n x , 0.1 ,bound\n"
    (made,) = import_rows(file(tmp_path, text, "rows.csv"), tmp_path / "out")
    assert made.name == "000_x" and rank([made]).candidates[0].step_time[0] == pytest.approx(0.1)


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
        ('[{"name": "a", "step_time_s": 1, "step_time_s": 2}]', "is damaged: an object has 'step_time_s' twice"),
        ([{"name": "a", "world_size": 1e300}], "world_size='1e+300' must be a whole number from 1 to 1,000,000"),
        ([{"name": "a", "world_size": True}], "world_size='True' must be a number"),
        ([{"name": "a", "global_batch": 10**10}], "must be a whole number from 1 to 1,000,000,000"),
        ([{"name": "a", "step_time_s": "1_0"}], "step_time_s='1_0' must be a number without underscores"),
        (
            [{"name": "a", "gate_tier": "bitwise", "status": "gate_failed"}],
            "row 1: status=gate_failed contradicts gate_tier=bitwise",
        ),
        (
            [{"name": "a"}, {"name": "b", "step_time_s": 5, "step_times_s": [1, 2, 3]}],
            "row 2: step_time_s=5 contradicts step_times_s, whose median is 2",
        ),
        (
            [{"name": "a", "step_time_s": 0.1, "exposed_comm_s": 0.2}],
            "exposed_comm_s=0.2 is more than the step time, 0.1",
        ),
        (
            [{"name": "a", "step_times_s": [1, 2, 9], "exposed_comm_s": 3}],
            "exposed_comm_s=3 is more than the step time, 2",
        ),
    ],
)
def test_bad_rows_write_nothing(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(RunFolderError) as refused:
        import_rows(file(tmp_path, rows), tmp_path / "out")
    assert message in str(refused.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name\nx,3\n", "rows.csv, line 2 has 2 fields, the heading 1: ['x', '3']"),
        ("name,wrap\n\nx,block\ny\n", "rows.csv, line 4 has 1 field, the heading 2: ['y']"),
        ("name, name,step_time_s\na,b,1\n", "line 1: the heading has 'name' twice"),
        ('name,wrap\n"x,block\ny,block\n', "line 3, is damaged: unexpected end of data"),
        ("name,step_time_s\nx,1\ny,1_0\n", "line 3: step_time_s='1_0' must be a number without underscores"),
    ],
)
def test_a_damaged_csv_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RunFolderError) as refused:
        import_rows(file(tmp_path, text, "rows.csv"), tmp_path / "out")
    assert message in str(refused.value) and not (tmp_path / "out").exists()


def test_endings_in_capitals(tmp_path: Path) -> None:
    import_rows(file(tmp_path, "name\nx\n", "ROWS.CSV"), tmp_path / "csv")
    import_rows(file(tmp_path, [{"name": "x"}], "ROWS.JSON"), tmp_path / "json")


def test_the_step_time_is_the_median(tmp_path: Path) -> None:
    rows = [
        {"name": "even", "step_times_s": [1, 2, 3, 100]},
        {"name": "both", "step_time_s": 2.51, "step_times_s": [1, 2, 3, 100]},
        {"name": "one", "step_time_s": 3},
    ]
    made = import_rows(file(tmp_path, rows), tmp_path / "out")
    found = [json.loads((path / "record.json").read_text())["window"]["step_time"]["median"] for path in made]
    assert found == [2.5, 2.5, 3]


@pytest.mark.parametrize(
    "other", [{"world_size": 4}, {"accumulation": 2}, {"gate_tier": "tolerance"}, {"imported_from": "another"}]
)
def test_rows_that_differ_in_more_than_their_figures_are_no_repeats(tmp_path: Path, other: dict[str, Any]) -> None:
    row = {"name": "x", "step_time_s": 1, "gate_tier": "bitwise", "world_size": 2, "imported_from": "tool"}
    rows = [row, {**row, "step_time_s": 1.1, "repeat": 2}, {**row, **other}]
    import_rows(file(tmp_path, rows), tmp_path / "out")
    assert sorted(len(c.runs) for c in rank([tmp_path / "out"]).candidates) == [1, 2]


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("model", "other", "'simple'"),
        ("global_batch", 64, "8"),
        ("torch", "1.0", "'2.13.0'"),
        ("device", "H100", "'cpu'"),
    ],
)
def test_a_row_of_something_else_is_not_like_the_run(tmp_path: Path, field: str, value: Any, ours: str) -> None:
    (run,) = candidate(tmp_path / "ours", "a", 10)
    same = {"name": "x", "model": "simple", "global_batch": 8, "torch": "2.13.0", "device": "cpu"}
    rows = file(tmp_path, [same, {"name": "y", field: value}])
    with pytest.raises(RunFolderError) as refused:
        import_rows(rows, tmp_path / "out", like=run)
    assert f"row 2: {field}={value!r}, but {run} has {ours}: with --like" in str(refused.value)
    assert not (tmp_path / "out").exists()
    import_rows(file(tmp_path, [same]), tmp_path / "out", like=run)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    rows = file(tmp_path, [{"name": "../../a"}])
    (made,) = import_rows(rows, tmp_path / "out")
    assert made.parent == tmp_path / "out", "a name cannot leave the folder"
    with pytest.raises(OutputError, match="is there already"):
        import_rows(rows, tmp_path / "out")
    with pytest.raises(RunFolderError, match=r"expected a \.json or \.csv"):
        import_rows(file(tmp_path, "", "rows.txt"), tmp_path / "out")
