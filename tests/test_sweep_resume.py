"""A sweep that died is started again with the same command, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distbench import sweep_folder
from distbench.errors import ConfigError, OutputError
from distbench.runs.folder import read_record
from tests.cli import CUSTOM, Finished, distbench

OK, USAGE, CRASHED = 0, 2, 4
NET = """
from pathlib import Path
from tests.models_for_tests import Plain

class Net(Plain):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.calls = fails, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails and Path("broken").exists():
            raise ArithmeticError("the user's own mistake")
        return super().forward(x)
"""
COMMAND = [
    *("-m", *CUSTOM[:-1], "steps=6", "model._target_=net.Net", "checkpoint.every=2", "window=off"),
    *("+model.kwargs.fails=0,2,6", "sweep.resume=true"),
]


def losses(run: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, list[str], Finished]:
    """A sweep of which one cell died before its first checkpoint and one after it, then the same command once more."""
    cwd = tmp_path_factory.mktemp("sweep")
    (cwd / "net.py").write_text(NET)
    (cwd / "broken").touch()
    first = distbench(*COMMAND, cwd=cwd)
    became = [read_record(run)["status"] for run in first.runs]
    (cwd / "broken").unlink()
    return first, became, distbench(*reversed(COMMAND[1:]), COMMAND[0], cwd=cwd)


def test_without_an_earlier_sweep_it_begins(both: tuple[Finished, list[str], Finished]) -> None:
    first, became, _ = both
    assert first.code == CRASHED and became == ["passed", "crashed", "crashed"], first.said
    assert first.out.startswith("sweep.resume=true: no sweep of this command in outputs yet, so it begins\n")


def test_what_is_finished_is_kept_and_the_rest_goes_on(both: tuple[Finished, list[str], Finished]) -> None:
    first, _, again = both
    assert again.code == OK, again.said
    assert again.runs == first.runs, "in the same folders"
    said = again.out.splitlines()
    assert said[0].endswith(", which goes on") and "3 of 3 runs passed" in again.out
    for line in ("passed before: not run again", "crashed before: run again", "crashed before: resumed"):
        assert sum(row.strip() == line for row in said) == 1, again.out
    records = [read_record(run) for run in again.runs]
    assert [record["status"] for record in records] == ["passed"] * 3
    assert [[row["step"] for row in record["resumes"]] for record in records] == [[], [], [4]]
    assert losses(again.runs[0]) == losses(again.runs[1]) == losses(again.runs[2]) and len(losses(again.runs[0])) == 6
    kept = [run / "logs" / "failed_1" / "failure.json" for run in again.runs]
    assert [file.exists() for file in kept] == [False, True, True], "what went wrong is not lost"


def test_another_command_is_another_sweep(both: tuple[Finished, list[str], Finished]) -> None:
    cwd, (run, *_) = both[0].cwd, both[0].runs
    words = [word.replace("steps=6", "steps=7") for word in COMMAND]
    refused = distbench(*words, f"hydra.sweep.dir={run.parent}", cwd=cwd)
    assert refused.code == USAGE, refused.said
    assert "is of another command (without steps=6, with steps=7); choose another hydra.sweep.dir" in refused.err
    single = distbench("sweep.resume=true", cwd=cwd)
    assert single.code == USAGE and "this is one run; add -m, or resume=RUN" in single.err
    without = distbench(*COMMAND[:-1], f"hydra.sweep.dir={run.parent}", cwd=cwd)
    assert without.code == USAGE and "or go on with it: sweep.resume=true" in without.err


def test_a_cell_that_is_another_experiment_now_is_refused(both: tuple[Finished, list[str], Finished]) -> None:
    """What a command means may change, with conf/ or with distbench."""
    cwd, (run, *_) = both[0].cwd, both[0].runs
    record = read_record(run)
    (run / "record.json").write_text(json.dumps(record | {"effective": "0" * 16}))
    try:
        ended = distbench(*COMMAND, cwd=cwd)
    finally:
        (run / "record.json").write_text(json.dumps(record))
    assert ended.code == USAGE and f"{run.name} holds another experiment than this cell now is" in ended.err
    assert ended.out.count("passed before: not run again") == 2


def test_the_newest_of_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["-m", "steps=3,4", "sweep.resume=true"]
    for name, words in (("old", command), ("it's", command), ("other", ["-m", "steps=3,5"])):
        assert not sweep_folder.begin(tmp_path / "outputs" / name, words, resume=True)
        sweep_folder._held.pop().close()
    assert sweep_folder.with_folder(command) == [*command, "hydra.sweep.dir='outputs/it\\'s'"]
    assert sweep_folder.with_folder(command[:-1]) == command[:-1]
    assert sweep_folder.with_folder([*command, "output_dir=elsewhere"]) == [*command, "output_dir=elsewhere"]
    with pytest.raises(ConfigError, match=r"without steps=3,5, with steps=3,4"):
        sweep_folder.with_folder([*command, "hydra.sweep.dir=outputs/other"])


def test_one_sweep_at_a_time_goes_on_in_a_folder(tmp_path: Path) -> None:
    assert not sweep_folder.begin(tmp_path / "sweep", ["-m"], resume=False)
    with pytest.raises(OutputError, match="is being written by process"):
        sweep_folder.begin(tmp_path / "sweep", ["-m"], resume=True)
    sweep_folder._held.pop().close()
    assert sweep_folder.begin(tmp_path / "sweep", ["-m"], resume=True)
    sweep_folder._held.pop().close()
    with pytest.raises(ConfigError, match="already holds a sweep"):
        sweep_folder.begin(tmp_path / "sweep", ["-m"], resume=False)
