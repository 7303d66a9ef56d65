"""Cells of a sweep: claimed once, wherever they run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from distbench import experiment, sweep
from distbench.config import Config, SizeWrap
from distbench.errors import ConfigError, ExitCode
from distbench.runs.folder import RunFolder
from distbench.sweep import _claim, _refused, exit_code, read_duplicate
from tests.configs import small


@pytest.fixture(autouse=True)
def no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_exit_codes", [])


def test_the_first_cell_claims_an_experiment(tmp_path: Path) -> None:
    ddp, same, fsdp = small("ddp"), small("ddp", wrap=SizeWrap()), small("fsdp")
    assert _claim(tmp_path, ddp, tmp_path / "000") is None
    assert _claim(tmp_path, same, tmp_path / "001") == "000"
    assert _claim(tmp_path, fsdp, tmp_path / "002") is None
    assert _claim(tmp_path, same, tmp_path / "003") == "000"


def test_cells_that_start_at_once_claim_it_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        twins = list(pool.map(lambda number: _claim(tmp_path, small("ddp"), tmp_path / f"{number:03d}"), range(32)))
    assert twins.count(None) == 1


@pytest.mark.parametrize("content", [None, "", "{}", "[1]", '{"duplicate_of": '])
def test_a_folder_that_names_no_twin_has_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "duplicate_of.json").write_text(content)
    assert read_duplicate(tmp_path) is None


def test_the_exit_code_is_the_first_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code() == ExitCode.OK
    monkeypatch.setattr(sweep, "_exit_codes", [0, 4, 3])
    assert exit_code() == ExitCode.CRASHED


@pytest.mark.parametrize(("mode", "left"), [(RunMode.RUN, False), (RunMode.MULTIRUN, True)])
def test_a_refused_run_leaves_nothing_and_a_refused_cell_its_row(
    tmp_path: Path, mode: RunMode, left: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    status = _refused(ConfigError("steps=0 is too small"), folder, mode)
    assert status == {"status": "refused", "reason": "steps=0 is too small"}
    assert capsys.readouterr().err == "distbench: steps=0 is too small\n"
    assert exit_code() == ExitCode.USAGE
    assert folder.exists() is left


def test_an_error_of_our_own_stops_one_cell_and_not_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: Config, folder: RunFolder) -> None:
        raise LookupError("a defect")

    runtime = SimpleNamespace(output_dir=str(tmp_path / "000"))
    hydra = SimpleNamespace(runtime=runtime, mode=RunMode.MULTIRUN, sweep=SimpleNamespace(dir=str(tmp_path)))
    monkeypatch.setattr(sweep.HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(sweep, "typed", lambda cfg: small("ddp", steps=3))
    monkeypatch.setattr(experiment, "run", broken)
    status = sweep.run_cell(OmegaConf.create())
    assert status == {"status": "crashed", "reason": "LookupError: a defect"}
    assert "LookupError: a defect" in capsys.readouterr().err and exit_code() == ExitCode.CRASHED
