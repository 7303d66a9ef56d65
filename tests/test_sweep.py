"""Cells of a sweep: claimed once, wherever they run."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from distbench import experiment, sweep
from distbench.config import Config, Order, SizeWrap, SweepOptions, digest, effective, from_container
from distbench.errors import ConfigError, ExitCode
from distbench.runs.folder import RunFolder
from distbench.sweep import SweepCallback, _refused, _typed_already, exit_code, read_duplicate
from distbench.sweep_folder import begin, claim
from tests.composing import compose_tree
from tests.configs import small
from tests.runs.records import candidate


@pytest.fixture(autouse=True)
def no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_exit_codes", [])


def test_the_first_cell_claims_an_experiment(tmp_path: Path) -> None:
    ddp, same, fsdp = small("ddp"), small("ddp", wrap=SizeWrap()), small("fsdp")
    assert claim(tmp_path, ddp, tmp_path / "000") is None
    assert claim(tmp_path, same, tmp_path / "001") == "000"
    assert claim(tmp_path, fsdp, tmp_path / "002") is None
    assert claim(tmp_path, same, tmp_path / "003") == "000"


def test_a_repeat_is_no_duplicate_but_a_cell_of_the_same_repeat_is(tmp_path: Path) -> None:
    first, second = (small("ddp", sweep=SweepOptions(repeats=2, repeat=number)) for number in (1, 2))
    assert digest(effective(first)) == digest(effective(second))
    assert claim(tmp_path, first, tmp_path / "000") is None
    assert claim(tmp_path, second, tmp_path / "001") is None
    assert claim(tmp_path, second, tmp_path / "002") == "001"


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order.interleaved, ["1 ddp", "1 fsdp", "2 fsdp", "2 ddp", "3 ddp", "3 fsdp"]),
        (Order.grouped, ["1 ddp", "2 ddp", "3 ddp", "1 fsdp", "2 fsdp", "3 fsdp"]),
    ],
)
def test_the_order_of_repeats(order: Order, expected: list[str]) -> None:
    config = compose_tree(f"sweep.order={order.name}", "sweep.repeats=3", hydra=True)
    with flag_override(config, "readonly", False):
        config.hydra.overrides.task.append("strategy=ddp,fsdp")
    OmegaConf.set_readonly(config.hydra, True)
    sweep._add_repeats(config)
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*params, *config.hydra.overrides.task])
    hydras = sweep._split_by_hydra(BasicSweeper)
    (cells,) = sweep._split(hydras, overrides, None)
    first, second = sweep._split(hydras, overrides, 4)
    assert [*first, *second] == cells and len(first) == 4
    values = [dict(word.split("=") for word in cell) for cell in cells]
    assert [f"{cell['sweep.repeat']} {cell['strategy']}" for cell in values] == expected


def test_repeats_are_for_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        SweepCallback().on_run_start(compose_tree("sweep.repeats=3", hydra=True))
    assert ended.value.code == ExitCode.USAGE and "add -m" in capsys.readouterr().err


def test_a_sweeps_end_writes_its_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    candidate(tmp_path, "fast", 10, gib=2)
    candidate(tmp_path, "small", 10.1, gib=1)
    sweep.conclude(tmp_path, compose_tree("decide=fastest_within_memory", "decide.memory_gib=1.5").decide)
    assert json.loads((tmp_path / "decision.json").read_text())["chosen"] == "001_small"
    assert "decision     001_small: fastest within 1.5 GiB" in capsys.readouterr().out
    assert exit_code() == ExitCode.OK


def test_a_decision_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.conclude(tmp_path / "gone", compose_tree().decide)
    assert "no decision for" in capsys.readouterr().err and exit_code() == ExitCode.USAGE


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    begin(tmp_path / "mine", ["-m"], resume=False)
    with pytest.raises(ConfigError, match=r"mine already holds a sweep; .*, or go on with it"):
        begin(tmp_path / "mine", ["-m"], resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"set output_dir=\.\.\."):
        begin(tmp_path / "file" / "below", ["-m"], resume=False)


@pytest.mark.parametrize(("mode", "kept"), [(RunMode.MULTIRUN, False), (RunMode.RUN, True)])
def test_a_sweep_does_not_keep_the_configs_of_its_cells(mode: RunMode, kept: bool) -> None:
    config = OmegaConf.create({"hydra": {"mode": mode}})
    returned = JobReturn(cfg=config, hydra_cfg=config)
    SweepCallback().on_job_end(config, returned)
    assert (returned.cfg is not None, returned.hydra_cfg is not None) == (kept, kept)


def test_cells_that_start_at_once_claim_it_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        twins = list(pool.map(lambda number: claim(tmp_path, small("ddp"), tmp_path / f"{number:03d}"), range(32)))
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
    swept, sweeper = SimpleNamespace(dir=str(tmp_path)), SimpleNamespace(_target_=sweep.BASIC_SWEEPER)
    hydra = SimpleNamespace(runtime=runtime, mode=RunMode.MULTIRUN, sweep=swept, sweeper=sweeper)
    monkeypatch.setattr(sweep.HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(sweep, "typed", lambda cfg: small("ddp", steps=3))
    monkeypatch.setattr(experiment, "run", broken)
    status = sweep.run_cell(OmegaConf.create())
    assert status == {"status": "crashed", "reason": "LookupError: a defect"}
    assert "LookupError: a defect" in capsys.readouterr().err and exit_code() == ExitCode.CRASHED


def own(tree: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(tree, [str(key) for key in tree])


@pytest.mark.parametrize(
    "words",
    [
        "steps=3 device=cpu clip_norm=null",
        "strategy=fsdp2 strategy.reshard_after_forward=2",
        "model=simple_text data=text data.path=/x loss=cross_entropy",
        "precision=fp16 gate=off window=quick fault=sum_not_mean",
        "model=custom model._target_=a.b model.input_shape=[3] model.target_shape=[3] +model.kwargs.x=3 wrap_policy=size",
    ],
)
def test_what_hydra_typed_is_what_its_plain_tree_gives(words: str) -> None:
    tree = compose_tree(*words.split())
    plain = OmegaConf.to_container(tree, resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    config = _typed_already(own(tree))
    assert config is not None and config == from_container({str(key): value for key, value in plain.items()})


def test_what_hydra_did_not_type_is_left_to_the_plain_tree() -> None:
    assert _typed_already(own(compose_tree("model=custom"))) is None, "a value that must be set"
    assert _typed_already(own(compose_tree("strategy.name=fsdp"))) is None
    untyped = compose_tree()
    with flag_override(untyped, "struct", False):
        untyped.strategy = {"name": "ddp"}  # as an option of the user's own, without a schema
    assert _typed_already(own(untyped)) is None


def test_a_cell_of_which_nothing_is_left_is_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its job ended before it could write a record."""
    slurm = pytest.importorskip("distbench.launching.slurm", reason="distbench[slurm] not installed")
    monkeypatch.setattr(sweep, "_exit_codes", [])
    found = slurm._lost(tmp_path / "none", "FAILED", "no result")
    assert found["status"] == "crashed" and sweep.exit_code() == 4
