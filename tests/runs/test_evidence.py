"""What runs are, beside their configuration: code, data, weights, who measured, and whether they are there twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distbench.config import Decide, Rule, TextData
from distbench.report import decision_html
from distbench.report.decision import other_lines
from distbench.runs.content import BLOCK, BLOCKS, content
from distbench.runs.rank import rank, to_json
from tests.configs import custom, small
from tests.models_for_tests import Plain
from tests.runs.noisy import Noise
from tests.runs.records import CONFIG, candidate, figure, record, window, write


def test_the_same_configuration_over_other_code_or_data_is_no_repeat(tmp_path: Path) -> None:
    for number, code in enumerate(("a", "a", "b"), 1):
        candidate(tmp_path, f"x{number}", content={"model_code": code, "data": None}, effective="same")
    ranking = rank([tmp_path])
    assert [len(c.runs) for c in ranking.candidates] == [2] and len(ranking.groups) == 2
    assert any("content.model_code b instead of a" in line for line in other_lines(ranking))


def test_nor_is_one_that_began_from_other_weights(tmp_path: Path) -> None:
    for start in ("1", "1", "2", None):
        candidate(tmp_path, f"x{start}", initial_weights=start, effective="same")
    assert sorted(len(c.runs) for c in rank([tmp_path]).candidates) == [1, 1, 2]


def test_content_is_what_the_files_hold(tmp_path: Path) -> None:
    texts = tmp_path / "books"
    texts.mkdir()
    (texts / "a.txt").write_bytes(bytes(100))
    config = small("single", data=TextData(path=str(texts)))
    before = content(config, None)
    assert before["model_code"] is None and before == content(config, None)
    shutil.copytree(texts, tmp_path / "elsewhere")
    assert content(replace(config, data=TextData(path=str(tmp_path / "elsewhere"))), None) == before, "wherever it lies"
    large = bytearray(2 * BLOCK * BLOCKS)
    (texts / "a.txt").write_bytes(large)
    changed = [content(config, None)["data"]]
    for place in (0, len(large) - 1):
        large[place] = 1
        (texts / "a.txt").write_bytes(large)
        changed.append(content(config, None)["data"])
    (texts / "a.txt").write_bytes(large + b"x")
    changed.append(content(config, None)["data"])
    assert len({before["data"], *changed}) == 5
    assert content(custom("Plain"), Plain())["model_code"] is not None


def test_a_copied_run_counts_once(tmp_path: Path) -> None:
    here = {"started": "t", "environment": {**record()["environment"], "host": "h"}}
    for name, pid in (("a", 1), ("b", 2)):
        candidate(tmp_path / "one", name, run={"name": name, "pid": pid}, **here)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    ranking = rank([tmp_path])
    assert [len(c.runs) for c in ranking.candidates] == [1, 1]
    assert "2 run folders left out: copies of runs that are there already" in ranking.notes


def test_links_are_told(tmp_path: Path) -> None:
    (folder,) = candidate(tmp_path / "real", "a")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "b").symlink_to(folder)
    ranking = rank([tmp_path / "links"])
    assert not ranking.candidates and ranking.notes == ["1 link to folders not followed: name them, to have them read"]
    assert len(rank([tmp_path / "links" / "b"]).candidates) == 1


def test_a_run_is_called_as_its_folder_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = candidate(tmp_path, "a")
    monkeypatch.chdir(folder)
    chosen = rank(["."]).chosen
    assert chosen is not None and chosen.name == "000_a"


def test_the_order_of_paths_decides_nothing(tmp_path: Path) -> None:
    for batch, place in ((8, "x"), (16, "y")):
        for name, step in (("a", 10), ("b", 11)):
            candidate(tmp_path / place, name, step, config={**CONFIG, "global_batch": batch})
    trees = [to_json(rank([tmp_path / a, tmp_path / b])) for a, b in (("x", "y"), ("y", "x"))]
    for tree in trees:
        del tree["made"]
    assert trees[0] == trees[1]


def test_the_rule_is_that_of_the_runs_that_are_ranked(tmp_path: Path) -> None:
    within = {"rule": "smallest_within", "memory_gib": None, "within_percent": 1000.0}
    for name, step, gib in (("a", 10, 2), ("b", 11, 1), ("c", 12, 3)):
        candidate(tmp_path / "x", name, step, gib, config={**CONFIG, "decide": within})
    candidate(tmp_path / "y", "d", config={**CONFIG, "global_batch": 16, "decide": {**within, "rule": "fastest"}})
    ranking = rank([tmp_path])
    assert ranking.decide.rule is Rule.smallest_within and ranking.chosen is not None
    assert ranking.chosen.name == "001_b"
    candidate(tmp_path / "x", "e", 13, config={**CONFIG, "decide": {**within, "rule": "fastest"}})
    ranking = rank([tmp_path])
    assert ranking.decide.rule is Rule.fastest and "different rules" in ranking.notes[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"rule": "fastest_within_memory", "memory_gib": None},
        {"rule": "fastest_within_memory", "memory_gib": "abc"},
        {"rule": "fastest_within_memory", "memory_gib": -1},
        {"rule": "smallest_within", "within_percent": "nan"},
        {"rule": "smallest_within", "within_percent": -50},
        {"rule": "nope"},
    ],
)
def test_a_rule_that_makes_no_sense_is_not_applied(damage: dict[str, Any], tmp_path: Path) -> None:
    candidate(tmp_path, "a", config={**CONFIG, "decide": {"memory_gib": None, "within_percent": 5.0, **damage}})
    ranking = rank([tmp_path])
    assert ranking.decide == Decide() and ranking.chosen is not None and "rule in the records" in ranking.notes[0]


def test_who_does_not_qualify_is_no_reason_for_the_choice(tmp_path: Path) -> None:
    """The fastest is too large; of the two that are left, as fast as each other, the one with the lower median is taken."""
    noise = Noise(between=0.03)
    candidate(tmp_path, "large", 5, gib=9, repeats=3, noise=noise, seed=1)
    candidate(tmp_path, "a", 10, gib=1, repeats=3, noise=noise, seed=2)
    candidate(tmp_path, "b", 10, gib=1, repeats=3, noise=noise, seed=3)
    ranking = rank([tmp_path], Decide(Rule.fastest_within_memory, memory_gib=2.0))
    assert "for its less memory" not in ranking.why and "no difference beyond noise" in ranking.why


def test_scaling_shows_the_fastest_of_each_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, ranks, step, gib in (("a", 2, 10, 2), ("b", 2, 50, 1), ("c", 4, 6, 2)):
        batch = {"world_size": ranks, "accumulation": 1, "global_batch": 8}
        candidate(tmp_path, name, step, gib, batch=batch)
    ranking = rank([tmp_path], Decide(Rule.smallest_within, within_percent=1000.0))
    assert ranking.chosen is not None and ranking.chosen.name == "001_b"
    drawn: list[Any] = []
    monkeypatch.setattr(decision_html, "_curves", lambda title, axis, lines, marks: drawn.append(lines) or "")
    decision_html._scaling(ranking.candidates)
    times = {c.name: 1e3 * c.step_time[0] for c in ranking.candidates}
    assert drawn[0] == [("ddp fp32 block pre", [(2.0, times["000_a"]), (4.0, times["002_c"])])]


def test_step_times_none_of_which_can_be(tmp_path: Path) -> None:
    tree = record()
    tree["window"]["step_time"]["samples"] = [-1.0, 0.0, float("inf")]
    write(tmp_path / "a", tree)
    (found,) = rank([tmp_path]).candidates
    assert found.notes == ["none of its 3 step times is a positive number: the median stands for them"]


@pytest.mark.parametrize("events", ["step 3", {"step": 3}, [{"step": 3}], [7]])
def test_steps_that_were_not_finite_exclude_however_they_are_written(events: Any, tmp_path: Path) -> None:
    write(tmp_path / "a", record(nonfinite=events))
    ranking = rank([tmp_path])
    assert not ranking.candidates and "not finite" in str(ranking.unranked[0].excluded)


def test_time_of_another_meter_is_not_compared_with_ours(tmp_path: Path) -> None:
    candidate(tmp_path, "ours", 10)
    for name in ("theirs1", "theirs2"):
        section = window(1)
        section["step_time"] |= figure(section["step_time"]["median"], meter="a wrist watch")
        candidate(tmp_path, name, imported_from="rows.csv", window=section)
    ranking = rank([tmp_path])
    assert [c.name for c in ranking.candidates] == ["000_ours"], "though they are more"
    assert "step time measured by a wrist watch" in str(ranking.unranked[0].excluded)
    assert json.dumps(to_json(ranking))


def test_who_was_not_run_in_every_repeat_is_named(tmp_path: Path) -> None:
    """For its sake nobody is compared repeat by repeat."""
    for repeat in (1, 2, 3):
        config = {"sweep.order": "interleaved", "sweep.repeat": repeat}
        for name, step in (("a", 10), ("b", 11)):
            candidate(tmp_path / "s", f"{name},repeat={repeat}", step, effective=name, config=record(config)["config"])
    assert rank([tmp_path]).times.blocks is not None  # type: ignore[union-attr]
    candidate(tmp_path / "other", "c", 12)
    ranking = rank([tmp_path])
    assert ranking.times is not None and ranking.times.blocks is None
    (note,) = (note for note in ranking.notes if "repeat by repeat" in note)
    assert note == "not compared repeat by repeat: 000_c was not run once in every repeat that another was"
