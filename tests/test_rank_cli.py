"""`rank`, `report` and `import` as commands: what they print, write, and end with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from distbench.__main__ import main
from distbench.errors import ExitCode
from tests.runs.records import candidate


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    root = tmp_path / "sweep"
    root.mkdir()
    candidate(root, "fast", 10, gib=2)
    candidate(root, "small", 12, gib=1)
    return root


def test_rank(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(sweep)]) == ExitCode.OK
    assert "decision     000_fast: fastest of 2, beyond the 3 % assumed" in capsys.readouterr().out
    assert main(["rank", str(sweep), "--rule", "smallest_within", "--within-percent", "30", "--json"]) == ExitCode.OK
    tree = json.loads(capsys.readouterr().out)
    assert tree["chosen"] == "001_small" and tree["decide"]["within_percent"] == 30
    assert main(["rank", str(sweep), "--rule", "fastest_within_memory", "--memory-gib", "1.5"]) == ExitCode.OK
    assert "decision     001_small: fastest within 1.5 GiB" in capsys.readouterr().out


def test_report(sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["report", str(sweep)]) == ExitCode.OK
    assert (sweep / "report.html").read_text().startswith("<!doctype html>")
    out = sweep.parent / "mine.html"
    assert main(["report", str(sweep), "--out", str(out)]) == ExitCode.OK and out.exists()
    assert f"page     {out}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rank", "missing"], "missing: no such file or folder"),
        (["rank", "."], "no record to rank in .; a run folder holds a record.json"),
        (["report", "."], "no record to rank in ."),
        (["rank", "sweep", "--group", "2"], "there is no group 2; there are 1"),
        (["rank", "sweep", "--memory-gib", "2"], "--memory-gib is for --rule fastest_within_memory"),
        (["rank", "sweep", "--within-percent", "2"], "--within-percent is for --rule smallest_within"),
        (["rank", "sweep", "--rule", "fastest_within_memory"], "needs --memory-gib X"),
        (["report", "sweep", "--out", "no/such/folder/x.html"], "cannot write no/such/folder/x.html"),
        (["import", "missing.json", "--out", "x"], "missing.json: no such file"),
    ],
)
def test_bad_input_is_one_line(
    sweep: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[1] == ".":
        (sweep.parent / "empty").mkdir()
        monkeypatch.chdir(sweep.parent / "empty")
    else:
        monkeypatch.chdir(sweep.parent)
    assert main(words) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["--rule", "best"], ["--memory-gib", "-1"], ["--memory-gib", "nan"], []])
def test_bad_options(words: list[str], sweep: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["rank", *([str(sweep)] if words else []), *words])
    assert ended.value.code == ExitCode.USAGE


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.is_char_device(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [["--help"], ["rank", "."]])
def test_an_output_that_cannot_be_written_is_told(words: list[str], sweep: Path) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "distbench", *words], cwd=sweep, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == ExitCode.USAGE
    assert done.stderr == "distbench: cannot write the output: No space left on device\n"


def test_import_prints_nothing_that_drives_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text('[{"name": "x"}]')
    assert main(["import", str(rows), "--out", str(tmp_path / "a\x1b[31m")]) == ExitCode.OK
    assert capsys.readouterr().out == f"1 run folder in {tmp_path}/a\\x1b[31m\n"
