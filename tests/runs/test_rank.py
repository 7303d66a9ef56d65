"""From records to a decision: who is compared, who is chosen, and what is said of everyone else."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from distbench.config import Decide, Rule
from distbench.errors import RunFolderError
from distbench.runs.candidates import Figure, read_runs
from distbench.runs.files import strict
from distbench.runs.rank import Candidate, Ranking, rank, to_json
from distbench.runs.text import readable_bytes
from tests.runs.noisy import Noise
from tests.runs.records import candidate, figure, record, window, write


def named(ranking: Ranking, name: str) -> Candidate:
    (found,) = [c for c in ranking.candidates if c.name.endswith(name)]
    return found


def names(ranking: Ranking) -> list[str]:
    return [c.name.partition("_")[2] for c in ranking.candidates]


# --- rules


def sweep(root: Path) -> Path:
    """Four configurations of which none is best at everything."""
    accurate = {"gate": {"passed": True, "tier": "bound", "parallel_error": 1e-8, "precision_error": 1e-9}}
    candidate(root, "fast", 10, gib=4, repeats=3, seed=1)
    candidate(root, "small", 10.3, gib=1, repeats=3, seed=2)
    candidate(root, "accurate", 10.4, gib=4, repeats=3, seed=3, **accurate)
    candidate(root, "slow", 20, gib=0.5, repeats=3, seed=4)
    return root


@pytest.mark.parametrize(
    ("decide", "chosen"),
    [
        (Decide(), "fast"),
        (Decide(Rule.fastest_within_memory, memory_gib=2), "small"),
        (Decide(Rule.fastest_within_memory, memory_gib=0.7), "slow"),
        (Decide(Rule.smallest_within), "small"),
        (Decide(Rule.smallest_within, within_percent=1), "fast"),
        (Decide(Rule.smallest_within, within_percent=150), "slow"),
        (Decide(Rule.most_accurate_within), "accurate"),
        (Decide(Rule.most_accurate_within, within_percent=3.5), "fast"),
    ],
)
def test_rules(tmp_path: Path, decide: Decide, chosen: str) -> None:
    ranking = rank([sweep(tmp_path)], decide)
    assert ranking.chosen is not None and ranking.chosen.name.endswith(chosen)
    assert ranking.candidates[0] is ranking.chosen and ranking.chosen.chosen
    assert sum(c.chosen for c in ranking.candidates) == 1
    assert all(c.reason for c in ranking.candidates)


def test_the_front_and_the_reasons(tmp_path: Path) -> None:
    ranking = rank([sweep(tmp_path)])
    assert {c.name.partition("_")[2]: c.pareto for c in ranking.candidates} == {
        "fast": True,
        "small": True,
        "accurate": False,
        "slow": True,
    }
    assert named(ranking, "small").reason.startswith("3.")
    assert named(ranking, "small").reason.endswith("75 % less memory")
    assert "the same memory" in named(ranking, "accurate").reason
    assert ranking.why == "fastest of 4, beyond noise"
    over = rank([tmp_path], Decide(Rule.fastest_within_memory, memory_gib=0.7))
    assert named(over, "fast").reason == "needs 4 GiB, more than the 0.7 GiB there are"
    assert over.why == "fastest within 0.7 GiB: the only one of 4 that qualifies"
    none = rank([tmp_path], Decide(Rule.fastest_within_memory, memory_gib=0.1))
    assert none.chosen is None and re.match(
        r"no candidate satisfies decide=fastest_within_memory: the fastest, \S+, needs .* more than the .* beside it$",
        none.why,
    )
    within = rank([tmp_path], Decide(Rule.smallest_within))
    assert "slower than the fastest, more than 5 %" in named(within, "slow").reason


def test_what_is_within_the_noise_is_said_to_be_no_different(tmp_path: Path) -> None:
    candidate(tmp_path, "a", 10, repeats=3, noise=Noise(), seed=1)
    candidate(tmp_path, "b", 10, repeats=3, noise=Noise(), seed=2)
    ranking = rank([tmp_path])
    loser = ranking.candidates[1]
    assert loser.versus is not None and loser.versus.verdict == "no difference"
    assert loser.reason.startswith("no difference in step time (")
    assert loser.reason.endswith("the same memory; the choice is listed first for its lower median")
    assert ranking.why == f"fastest of 2, but no difference beyond noise to {loser.name}"
    assert all(c.pareto for c in ranking.candidates)


def test_of_two_as_fast_the_smaller_dominates_and_is_chosen(tmp_path: Path) -> None:
    candidate(tmp_path, "large", 10, gib=2, repeats=3, noise=Noise(between=0.03), seed=1)
    candidate(tmp_path, "small", 10.1, gib=1, repeats=3, noise=Noise(between=0.03), seed=5)
    ranking = rank([tmp_path])
    assert ranking.chosen is named(ranking, "small") and named(ranking, "large").pareto is False
    assert "100 % more memory" in named(ranking, "large").reason


def test_a_single_candidate(tmp_path: Path) -> None:
    candidate(tmp_path, "only")
    ranking = rank([tmp_path])
    assert ranking.chosen is not None and ranking.why == "the only candidate: there is nothing to compare it with"


# --- who is never ranked


EXCLUDED: dict[str, tuple[dict[str, Any], str]] = {
    "oom": ({"status": "oom", "reason": "CUDA\nout of memory"}, "oom: CUDA out of memory"),
    "crashed": ({"status": "crashed"}, "crashed"),
    "running": ({"status": "running"}, "running"),
    "a status of the future": ({"status": "paused"}, "paused"),
    "ungated": ({"gate": {"passed": None, "tier": None}}, "ungated"),
    "no gate": ({"gate": None}, "ungated"),
    "failed": ({"gate": {"passed": False, "tier": "fail"}}, "failed its gate"),
    "says it passed": ({"gate": {"passed": True, "tier": "fail"}}, "failed its gate"),
    "a word": ({"gate": {"passed": "yes", "tier": "bound"}}, "ungated"),
    "fault": ({"config": {"fault.name": "sum_not_mean"}}, "has a deliberate fault: sum_not_mean"),
    "no window": ({"window": None, "window_reason": "window=off"}, "no window: window=off"),
    "old": ({"window": None}, "no window: the record has none"),
    "rejected": (
        {"window": {**window(), "accepted": False, "reason": "meters cost 9 %"}},
        "window rejected: meters cost 9 %",
    ),
    "nan": ({"window": {**window(), "step_time": figure("nan")}}, "no step time: recorded as nan"),
    "zero": ({"window": {**window(), "step_time": figure(0.0)}}, "no step time: recorded as 0"),
    "null": ({"window": {**window(), "step_time": figure(None, reason="too short")}}, "no step time: too short"),
    "text": (
        {"window": {**window(), "step_time": figure("soon")}},
        "no step time: recorded as 'soon', which is no number",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), EXCLUDED.values(), ids=EXCLUDED)
def test_who_is_never_ranked(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write(tmp_path / "000_it", record(**{"effective": "it", "window": window(1.0), **changes}))
    candidate(tmp_path, "slower", 100)
    ranking = rank([tmp_path])
    assert names(ranking) == ["slower"] and [run.excluded for run in ranking.unranked] == [reason]


def test_nothing_to_rank(tmp_path: Path) -> None:
    candidate(tmp_path, "a", gate=None)
    candidate(tmp_path, "b", gate=None)
    ranking = rank([tmp_path])
    assert ranking.chosen is None and ranking.why == "no run can be ranked: 2 x ungated"
    (tmp_path / "empty").mkdir()
    assert rank([tmp_path / "empty"]).why == "there is no readable record"


def test_passing_once_does_not_undo_having_failed(tmp_path: Path) -> None:
    candidate(tmp_path, "a", repeats=2)
    write(tmp_path / "009_a,repeat=3", record(effective="a", status="gate_failed", reason="gate FAILED"))
    candidate(tmp_path, "b", 20)
    ranking = rank([tmp_path])
    assert names(ranking) == ["b"]
    assert sorted(str(run.excluded) for run in ranking.unranked) == [
        *["a repeat of it failed its gate"] * 2,
        "gate_failed: gate FAILED",
    ]


# --- figures


def test_a_missing_figure_is_not_zero(tmp_path: Path) -> None:
    candidate(tmp_path, "known", 10, gib=1)
    candidate(tmp_path, "unknown", 20, gib=None)
    ranking = rank([tmp_path])
    unknown = named(ranking, "unknown")
    assert unknown.memory == Figure(None, "tensor peak", "not measured") and unknown.pareto is None
    assert unknown.reason.endswith("memory not compared: not measured")
    budget = rank([tmp_path], Decide(Rule.fastest_within_memory, memory_gib=9))
    assert named(budget, "unknown").reason == "no peak memory to judge it by: not measured"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", -1, "lots", True, [1], {}])
def test_what_is_no_figure_is_missing_with_a_reason(tmp_path: Path, value: Any) -> None:
    section = window()
    section["memory"]["peak_allocated"]["bytes"] = value
    section["exposed_comm"]["median"] = value
    section["step_time"]["samples"][3] = value
    candidate(tmp_path, "it", window=section)
    ranking = rank([tmp_path])
    it = ranking.candidates[0]
    for missing in (it.memory, it.exposed):
        assert missing.value is None and missing.reason and missing.reason.startswith("recorded as")
    assert math.isfinite(it.step_time[0])
    json.dumps(strict(to_json(ranking)), allow_nan=False)


def test_memory_by_different_meters_is_not_compared(tmp_path: Path) -> None:
    candidate(tmp_path, "a", 10, gib=4)
    candidate(tmp_path, "b", 12, gib=3)
    candidate(tmp_path, "c", 20, window=window(20, 1, meter="rss"))
    ranking = rank([tmp_path])
    assert named(ranking, "c").pareto is None and named(ranking, "b").pareto
    assert named(ranking, "c").reason.endswith("memory not compared: measured by rss, the others by tensor peak")
    assert "memory measured by rss (1) is not compared with tensor peak" in ranking.notes


def test_repeats_by_different_meters_have_no_figure_together(tmp_path: Path) -> None:
    write(tmp_path / "a", record(effective="a", window=window(meter="x")))
    write(tmp_path / "b", record(effective="a", window=window(meter="y")))
    (together,) = rank([tmp_path]).candidates
    assert together.memory.reason == "repeats were measured by different meters: x, y"


def test_repeats_are_one_candidate_with_all_their_samples(tmp_path: Path) -> None:
    weaker = {"passed": True, "tier": "noise", "parallel_error": 2e-8, "precision_error": None}
    paths = candidate(tmp_path, "a", 10, gib=1, repeats=2)
    write(tmp_path / "009_a,repeat=3", record(effective="a", window=window(10, 2), gate=weaker))
    (together,) = rank([tmp_path]).candidates
    assert len(together.runs) == 3 and together.name == "000_a" and together.runs[0].path == paths[0]
    assert together.tier == "noise" and together.parallel_error.value == 2e-8
    assert together.memory.value == 2 * 2**30 and together.memory_low == 2**30
    assert sorted(run.repeat for run in together.runs) == [1, 1, 1], "config.sweep.repeat, where there is one"


@pytest.mark.parametrize(
    ("samples", "medians", "expected"),
    [
        ([1.0, 1.0, 2.0, 2.0], [1.0, 2.0], [2, 2]),
        ([[1.0, 1.0], [2.0]], [1.0, 2.0], [2, 1]),
        ([1.0, 1.0, 2.0], [1.0, 2.0], [3]),
        (None, [1.0, 2.0, 3.0], [1, 1, 1]),
        ([], None, [1]),
        (["nan", "inf"], None, [1]),
        ([1.0] * 5000, [1.0], [500]),
    ],
)
def test_samples_by_window(tmp_path: Path, samples: Any, medians: Any, expected: list[int]) -> None:
    section = {**window(), "step_time": {**figure(1.5), "samples": samples, "window_medians": medians}}
    candidate(tmp_path, "a", window=section)
    (run,) = read_runs([tmp_path]).runs
    assert [len(part) for part in run.windows] == expected


# --- groups


def test_only_what_is_comparable_is_compared(tmp_path: Path) -> None:
    for number in range(3):
        candidate(tmp_path, f"a{number}", 10 + number, config={"strategy.name": f"s{number}"})
    candidate(tmp_path, "larger", 1, config={"model.hidden_dim": 128, "global_batch": 16})
    candidate(tmp_path, "elsewhere", 1, topology={"ranks": [{"device_name": "H200"}]})
    ranking = rank([tmp_path])
    assert names(ranking) == ["a0", "a1", "a2"]
    assert [group.num_runs for group in ranking.groups] == [3, 1, 1]
    assert ranking.groups[1].differs == ("model.hidden_dim 128 instead of 64", "global_batch 16 instead of 8")
    assert ranking.groups[2].differs == ("device ['H200'] instead of ['cpu']",)
    assert names(rank([tmp_path], group=3)) == ["elsewhere"]
    with pytest.raises(RunFolderError, match="there is no group 4; there are 3"):
        rank([tmp_path], group=4)


@pytest.mark.parametrize(
    "key", ["strategy.name", "precision.name", "wrap_policy.name", "prefetch.backward", "accumulation"]
)
def test_what_is_compared_may_differ(tmp_path: Path, key: str) -> None:
    candidate(tmp_path, "a")
    candidate(tmp_path, "b", config={key: "other"}, batch={"world_size": 8})
    assert len(rank([tmp_path]).groups) == 1


def test_a_run_that_ended_before_it_knew_its_devices_is_with_its_sweep(tmp_path: Path) -> None:
    candidate(tmp_path, "a")
    candidate(tmp_path, "b", status="crashed", topology=None)
    ranking = rank([tmp_path])
    assert len(ranking.groups) == 1 and [run.status for run in ranking.unranked] == ["crashed"]


# --- reading


def test_what_cannot_be_read_is_one_line_and_the_rest_is_ranked(tmp_path: Path) -> None:
    candidate(tmp_path, "good")
    write(tmp_path / "torn", '{"schema": 1, "status"')
    write(tmp_path / "newer", record(schema=2))
    write(tmp_path / "list", "[]")
    write(tmp_path / "no status", {"schema": 1})
    write(tmp_path / "deep", "[" * 100_000)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "record.json")
    (tmp_path / "folder" / "record.json").mkdir(parents=True)
    ranking = rank([tmp_path])
    assert names(ranking) == ["good"]
    said = {path.name: reason for path, reason in ranking.reading.unreadable}
    assert set(said) >= {"torn", "newer", "list", "no status", "deep", "pipe"}
    assert "schema 2, this distbench reads up to 1" in said["newer"]
    assert all("\n" not in reason for reason in said.values())


@pytest.mark.parametrize("section", ["config", "gate", "window", "environment", "topology", "batch", "not_applicable"])
@pytest.mark.parametrize("value", [None, [], "text", 3, [[1]]])
def test_any_section_may_be_anything(tmp_path: Path, section: str, value: Any) -> None:
    candidate(tmp_path, "it", **{section: value} if section != "config" else {})
    if section == "config":
        write(tmp_path / "000_it", {**record(), "config": value})
    json.dumps(strict(to_json(rank([tmp_path]))), allow_nan=False)


def test_cells_of_a_sweep_that_hold_no_run(tmp_path: Path) -> None:
    candidate(tmp_path, "a")
    (tmp_path / "001_b").mkdir()
    (tmp_path / "001_b" / "duplicate_of.json").write_text('{"duplicate_of": "000_a"}')
    (tmp_path / "002_c" / ".hydra").mkdir(parents=True)
    (tmp_path / ".experiments").mkdir()
    reading = read_runs([tmp_path])
    assert len(reading.runs) == 1 and reading.duplicates == 1 and [p.name for p in reading.refused] == ["002_c"]


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate(tmp_path / "open", "a")
    (tmp_path / "closed").mkdir()
    listing = os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    reading = read_runs([tmp_path])
    assert len(reading.runs) == 1
    assert reading.unreadable == [(tmp_path / "closed", f"{tmp_path / 'closed'} cannot be read: Permission denied")]


def test_paths(tmp_path: Path) -> None:
    (first, second) = candidate(tmp_path, "a", repeats=2)
    for paths in ([first, second], [first / "record.json", second], [tmp_path, first], [str(tmp_path / "0*")]):
        assert len(read_runs(paths).runs) == 2, "each once"
    with pytest.raises(RunFolderError, match="no such file or folder"):
        read_runs([tmp_path / "missing"])
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(RunFolderError, match="neither a folder nor a record"):
        read_runs([tmp_path / "x.txt"])


def test_the_runs_own_rule_where_they_agree(tmp_path: Path) -> None:
    own = {"decide": {"rule": "smallest_within", "memory_gib": None, "within_percent": 7.0}}
    candidate(tmp_path, "a", config=own)
    assert rank([tmp_path]).decide == Decide(Rule.smallest_within, None, 7.0)
    assert rank([tmp_path], Decide()).decide.rule is Rule.fastest
    candidate(tmp_path, "b", config={"decide": {"rule": "of the future"}})
    assert rank([tmp_path]).decide == Decide()


def test_the_same_records_give_the_same_decision(tmp_path: Path) -> None:
    sweep(tmp_path)
    first, second = (to_json(rank([tmp_path], Decide()), tmp_path) for _ in range(2))
    first.pop("made"), second.pop("made")
    assert first == second and first["schema"] == 1
    assert first["candidates"][0]["runs"][0] == "000_fast,repeat=1"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (2**20, "1 MiB"), (1.5 * 2**30, "1.5 GiB"), (1023 * 2**20, "1,023 MiB")]
)
def test_bytes_as_people_read_them(num_bytes: float, text: str) -> None:
    assert readable_bytes(num_bytes) == text


def test_a_fault_in_any_form_is_never_ranked(tmp_path: Path) -> None:
    for index, fault in enumerate(["sum_not_mean", {"name": "sum_not_mean"}, ["sum_not_mean"], 3]):
        candidate(tmp_path / str(index), "a", config={"fault": fault})
    for index, fault in enumerate([None, "none", {"name": "none"}, {}, ""]):
        candidate(tmp_path / f"clean{index}", "a", config={"fault": fault})
    excluded = [run.excluded for run in read_runs([tmp_path]).runs]
    assert [text is not None and text.startswith("has a deliberate fault: ") for text in excluded] == [True] * 4 + [
        False
    ] * 5


def test_what_is_just_above_a_budget_has_the_digits_to_see_it(tmp_path: Path) -> None:
    candidate(tmp_path, "a", gib=1.0001)
    (only,) = rank([tmp_path], Decide(Rule.fastest_within_memory, memory_gib=1)).candidates
    assert only.reason == "needs 1.0001 GiB, more than the 1 GiB there are"


def test_percentages_have_room_in_a_table(tmp_path: Path) -> None:
    candidate(tmp_path, "a", 10)
    candidate(tmp_path, "b", 1e30, gib=1e8)
    ranking = rank([tmp_path], Decide(Rule.smallest_within))
    assert "e+31 % slower than the fastest" in named(ranking, "b").reason
    assert "e+10 % more memory" in named(rank([tmp_path]), "b").reason


def test_a_group_that_cannot_be_ranked_says_why(tmp_path: Path) -> None:
    candidate(tmp_path, "a")
    candidate(tmp_path, "b", config={"global_batch": 16}, status="crashed", reason="out of memory")
    other = rank([tmp_path]).groups[1]
    assert other.why_none == "no run can be ranked: 1 x crashed: out of memory"


def test_a_choice_for_its_less_memory_is_not_called_the_fastest(tmp_path: Path) -> None:
    candidate(tmp_path, "quick", 10, gib=4)
    candidate(tmp_path, "small", 10.3, gib=1)
    ranking = rank([tmp_path])
    assert ranking.chosen is named(ranking, "small")
    assert ranking.why == "fastest of 2 within the noise, for its less memory; not told apart in time from 000_quick"


def test_noise_is_no_reason_to_choose_what_was_measured_slower(tmp_path: Path) -> None:
    """Twice the median and a quarter of the memory, and noise that hides it."""
    noise = Noise(between=0.6)
    candidate(tmp_path, "quick", 10, gib=4, repeats=2, noise=noise, seed=1)
    candidate(tmp_path, "small", 18, gib=1, repeats=2, noise=noise, seed=1)
    ranking = rank([tmp_path])
    loser = named(ranking, "small")
    assert loser.versus is not None and loser.versus.verdict == "no difference" and loser.versus.value > 1.5
    assert ranking.chosen is named(ranking, "quick") and "for its less memory" not in ranking.why
    assert any("the largest that was seen, about sweep.repeats=" in note for note in ranking.notes), ranking.notes


def test_repeats_that_ended_otherwise_are_told(tmp_path: Path) -> None:
    candidate(tmp_path, "steady", 11, repeats=3)
    flaky = candidate(tmp_path, "flaky", 9.9, repeats=3)
    for folder in flaky[1:]:
        tree = json.loads((folder / "record.json").read_text())
        write(folder, {**tree, "status": "oom", "reason": "no memory"})
    ranking = rank([tmp_path])
    (noted,) = [c for c in ranking.candidates if c.notes]
    assert noted.notes == ["2 of its 3 repeats cannot be ranked: oom: no memory"] and "flaky" in noted.name


def test_a_run_with_steps_that_were_not_finite_is_not_ranked(tmp_path: Path) -> None:
    candidate(tmp_path, "sound", 11)
    candidate(tmp_path, "skips", 5, nonfinite=[{"step": 7, "text": "step 7: the loss is nan"}])
    candidate(tmp_path, "none", 12, nonfinite=[])
    ranking = rank([tmp_path])
    assert [run.excluded for run in ranking.unranked] == ["steps that were not finite: step 7: the loss is nan"]
    assert len(ranking.candidates) == 2 and "sound" in str(ranking.chosen and ranking.chosen.name)


@pytest.mark.parametrize(
    ("overhead", "note"),
    [
        ({"median": -0.8, "high": -0.5}, "steps without meters took 5.0 times as long as those with"),
        ({"median": -0.8, "high": 0.1}, None),
        ({"median": 0.01, "high": 0.02}, None),
        ({"median": None, "high": None}, None),
        ({"median": "-0.8", "high": -5.0}, None),
    ],
)
def test_a_machine_that_was_not_quiet_is_told(tmp_path: Path, overhead: dict[str, Any], note: str | None) -> None:
    write(tmp_path / "a", record(effective="a", window=window(10, 1) | {"overhead": overhead}))
    (only,) = rank([tmp_path]).candidates
    assert len(only.notes) == (note is not None) and (note is None or note in only.notes[0])
