"""What the console says of a run and of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distbench.report.console import print_failure, print_run, print_sweep, relative, say_how_to_resume, sweep_rows
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder
from distbench.runs.rank import rank


def record(path: Path, **sections: Any) -> RunFolder:
    folder = RunFolder.create(path)
    result = {
        "steps": 3,
        "first_loss": 1.23456789,
        "last_loss": 0.5,
        "tokens_per_second_median": 12345.6,
        "step_seconds_median": 0.0123,
    }
    sections = {
        "status": "passed",
        "config": {
            "strategy": {"name": "ddp"},
            "precision": {"name": "fp32"},
            "wrap_policy": {"name": "size"},
            "prefetch": {"backward": "pre"},
        },
        "not_applicable": {"wrap_policy": "does not shard"},
        "batch": {"world_size": 2, "text": "4 x 1 x 2 = 8"},
        "result": result,
        **sections,
    }
    folder.update_record(**sections)
    return folder


def test_one_runs_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    print_run(record(tmp_path / "outputs" / "mine").path)
    said = capsys.readouterr().out
    assert "passed: loss 1.23457 -> 0.5 in 3 steps, 12.3 ms a step, 12,346 tokens/s, batch 4 x 1 x 2 = 8" in said
    assert said.endswith("run folder outputs/mine\n")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"steps": 2, "first_loss": 1.0, "last_loss": "nan", "step_seconds_median": None}, "loss 1 -> nan in 2 steps,"),
        ({"steps": 0, "reason": "ended early"}, "loss - -> - in 0 steps,"),
    ],
)
def test_missing_and_infinite_numbers_do_not_hide_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], result: dict[str, Any], words: str
) -> None:
    print_run(record(tmp_path / "run", result=result).path)
    assert words in capsys.readouterr().out


def test_steps_that_were_not_finite_are_told_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_run(record(tmp_path / "a", nonfinite=[{"step": 3}]).path)
    assert "not finite: the loss or gradient of step 3; causes in " in capsys.readouterr().out
    print_run(record(tmp_path / "b", nonfinite=[{"step": step} for step in (1, 2, 3, 5, 8, 13)]).path)
    assert "of steps 1, 2, 3, 5, 8 and more; causes" in capsys.readouterr().out
    print_run(record(tmp_path / "c", nonfinite=[]).path)
    assert "not finite" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("every", "saved", "words"),
    [
        (None, None, "checkpoint   none; checkpoint.every=N writes one every N steps"),
        (9, None, "checkpoint   none yet, with checkpoint.every=9"),
        (
            9,
            "checkpoints/step_00000009",
            "checkpoint   checkpoints/step_00000009\n    go on        python -m distbench",
        ),
    ],
)
def test_how_a_run_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int | None, saved: str | None, words: str
) -> None:
    config = {"checkpoint": {"every": every}}
    say_how_to_resume(record(tmp_path / "run", config=config, gate={}, last_checkpoint=saved).path)
    assert words in capsys.readouterr().out


def test_a_sweeps_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    sweep = tmp_path / "outputs" / "sweep"
    record(sweep / "000_a")
    record(sweep / "001_b", status="crashed", result=None)
    (sweep / "002_c").mkdir()
    write_json(sweep / "002_c" / "duplicate_of.json", {"duplicate_of": "000_a"})
    (sweep / "003_d").mkdir()
    (sweep / ".experiments").mkdir()
    assert [(row["cell"], row["status"]) for row in sweep_rows(sweep)] == [
        ("000_a", "passed"),
        ("001_b", "crashed"),
        ("002_c", "same as 000"),
        ("003_d", "refused"),
    ]
    print_sweep(sweep, rank([sweep]))
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.strip().startswith("00")]
    assert [row[0] for row in rows] == ["000", "001", "002", "003"]
    assert rows[0][1:6] == ["ddp", "fp32", "n/a", "pre", "2"] and rows[0][-3:] == ["12.3", "12,346", "passed"]
    assert rows[1][-3:] == ["-", "-", "crashed"], "a run that did not pass shows no speed"
    assert "decision     none: no run can be ranked: 1 x ungated; 1 x crashed\n" in said
    assert "1 of 3 runs passed; 1 more cells" in said
    assert "reasons      outputs/sweep/decision.md, decision.json" in said
    assert "logs         outputs/sweep/*/logs/rank*.log" in said
    assert "tensorboard --logdir outputs" in said


def test_paths_are_short_where_they_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert relative(tmp_path / "here" / "a") == "a"
    assert relative(tmp_path / "there") == str((tmp_path / "there").resolve())


LAST = "    the end of its log, whatever that has to do with it:\n"
FAILURE = {
    "rank": 1,
    "host": "node7",
    "message": "m",
    "traceback": "Traceback:\n  user.py\nValueError: m\n",
    "user_error": False,
    "step": 3,
    "phase": "forward",
    "ended_with_it": [0, 2],
}


WHERE = "    where        step 3, forward, rank 1 on node7\n"
EARLY = "    where        forward, rank 1 on node7\n"
LOGS = "    logs         "


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            f"rank 1 on node7 failed:\nTraceback:\n  user.py\nValueError: m\n{WHERE}    with it      ranks 0, 2\n{LOGS}",
        ),
        (
            {"step": None, "ended_with_it": []},
            f"rank 1 on node7 failed:\nTraceback:\n  user.py\nValueError: m\n{EARLY}{LOGS}",
        ),
        ({"rank": -1}, "the baseline's process on node7 failed:\nTraceback:\n"),
        ({"user_error": True}, "distbench: m\n"),
        (
            {
                "type": "RankDied",
                "traceback": None,
                "message": "rank 1 died",
                "lines": ["a\x1b[2J", "b"],
                "ended_with_it": [0],
            },
            f"distbench: rank 1 died\n{LAST}    a\\x1b[2J\n    b\n{WHERE}    with it      rank 0\n{LOGS}",
        ),
        ({"traceback": None, "phase": None, "ended_with_it": []}, f"distbench: m\n{LOGS}"),
    ],
)
def test_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: str) -> None:
    print_failure(tmp_path, {**FAILURE, **changes})
    assert capsys.readouterr().out.startswith(expected)
