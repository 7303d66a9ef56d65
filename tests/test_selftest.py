"""`distbench selftest`: what it runs, what it refuses, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distbench import selftest
from distbench.__main__ import main
from distbench.errors import ConfigError, ExitCode
from distbench.faults.catalogue import catalogue
from distbench.faults.naive import Naive
from distbench.faults.trial import Trial, overrides_of

FAULTS = catalogue()

CELL = selftest.Cell("one_element_flipped", "ddp", "fp32", 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fault=sum_not_maen"], "did you mean sum_not_mean"),
        (["strategy=zero"], "there are ddp, fsdp, fsdp2"),
        (["precision=int8"], "there are bf16, fp16, fp32"),
        (["ranks=7"], "there are 2, 4"),
        (["fault="], "names no fault"),
        (["colour=red"], "choose with fault=..., strategy=..., precision=..., ranks=..."),
        (["sum_not_mean"], "is not a choice"),
        (["fault=wrapper_bypassed", "strategy=fsdp2"], "no fault of the catalogue applies"),
        (["--clean", "0"], "N >= 1"),
        (["--clean", "3", "fault=sum_not_mean"], "takes neither choices"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["selftest", *words, "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_unknown_flag_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        selftest.main(["--nope"])
    assert stopped.value.code == ExitCode.USAGE
    assert "--nope" in capsys.readouterr().err


def test_a_folder_with_a_self_test_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "selftest.json").write_text("{}")
    with pytest.raises(ConfigError, match="already holds a self-test"):
        selftest.main(["fault=sum_not_mean", "--out", str(tmp_path)])


def test_the_list_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--list"]) == ExitCode.OK
    listed = capsys.readouterr().out
    for name, fault in FAULTS.items():
        assert name in listed
        assert fault.title() in listed


def test_cells_are_only_settings_in_which_the_fault_can_be() -> None:
    every = selftest.cells_of(FAULTS, selftest._choices([], FAULTS))
    for cell in every:
        fault = FAULTS[cell.fault]
        assert cell.strategy in fault.strategies
        assert cell.precision in fault.precisions
        assert cell.ranks in fault.ranks
    assert {cell.fault for cell in every} == set(FAULTS)
    few = selftest.cells_of(FAULTS, selftest._choices(["strategy=ddp", "ranks=2", "precision=fp32"], FAULTS))
    assert {(cell.strategy, cell.ranks, cell.precision) for cell in few} == {("ddp", 2, "fp32")}


def test_quick_is_seeded_small_and_of_different_faults() -> None:
    cells = selftest.cells_of(FAULTS, selftest._choices([], FAULTS))
    one, _ = selftest._quick(cells, [], seed=1)
    again, _ = selftest._quick(cells, [], seed=1)
    other, _ = selftest._quick(cells, [], seed=2)
    assert one == again != other
    assert len({cell.fault for cell in one}) == len(one) == selftest.QUICK_FAULTS


def trial(**changes: object) -> Trial:
    failure = {"name": "gradients", "step": 1, "passed": False, "parameter": "layers.0.mlp.0.weight"}
    gate = {
        "checks": [{"name": "loss", "step": 1, "passed": True, "parameter": None}, failure],
        "text": "gate FAILED",
        "location": {"parameters": ["layers.0.mlp.0.weight"], "module": None},
        "diagnosis": {"kind": "before_communication"},
    }
    return replace(Trial(["strategy=ddp"], "gate_failed", "gate FAILED", 1.0, Path("x"), gate), **changes)  # type: ignore[arg-type]


def judged(found: Trial) -> selftest.Row:
    return selftest.judge(CELL, FAULTS[CELL.fault], found, Naive(loss=False, norm=True))


def test_a_caught_fault_in_the_right_place() -> None:
    row = judged(trial())
    assert (row.detected, row.located, row.diagnosed) == (True, True, True)
    assert row.check == "gradients at step 1"


def test_the_owning_module_is_the_right_place_and_another_is_not() -> None:
    gate = trial().gate
    right = {**gate, "location": {"parameters": [], "module": "layers.0.mlp.0"}}
    wrong = {**gate, "location": {"parameters": ["layers.1.norm.bias"], "module": None}}
    assert judged(trial(gate=right)).located is True
    assert judged(trial(gate=wrong)).located is False


def test_a_crash_is_not_a_catch() -> None:
    row = judged(trial(status="crashed", gate={}))
    assert row.detected is False
    assert row.diagnosed is False
    assert row.check is None


def test_the_tables_say_what_was_missed_and_how_to_run_it() -> None:
    missed = judged(trial(status="passed", gate={}))
    flagged = selftest.CleanRow(3, False, "gate_failed", "fail", "gate FAILED: x", 1.0, "python -m distbench a=b")
    text = selftest.markdown([judged(trial()), missed], [flagged])
    assert "| one_element_flipped | ddp | 1/2 |" in text
    assert "MISSED one_element_flipped" in text
    assert "0 of 1 passed" in text
    assert "python -m distbench a=b" in text


def test_own_overrides_win_over_the_self_tests() -> None:
    overrides = overrides_of(["steps=9", "model.hidden_dim=16", "optimizer=sgd"])
    assert [o for o in overrides if o.startswith("steps")] == ["steps=9"]
    assert [o for o in overrides if o.startswith("model.hidden_dim")] == ["model.hidden_dim=16"]
    assert overrides.index("optimizer=sgd") < overrides.index("model.hidden_dim=16")


def test_a_self_test_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["fault=sum_not_mean", "strategy=ddp", "precision=fp32", "ranks=2"]
    assert main(["selftest", *words, "--out", str(out)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "sum_not_mean ddp fp32 2 ranks: caught" in shown
    assert "clean configurations: 2 of 2 passed (2 bitwise)" in shown
    tree = json.loads((out / "selftest.json").read_text())
    (row,) = tree["faults"]
    assert row["detected"] and row["diagnosed"]
    assert row["naive"] == {"loss": False, "norm": True, "assert_close": True, "depth_scaled": True}
    assert tree["totals"]["clean_passed"] == [2, 2]
    assert "| sum_not_mean | ddp | yes |" in (out / "selftest.md").read_text()
