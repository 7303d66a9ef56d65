"""Readers of other people's files: each damaged one is read or refused by name, in bounded time and memory."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load
from safetensors.torch import save_file

from distbench.errors import ConfigError, DistbenchError, RunFolderError, SummaryError, TensorFileError
from distbench.numerics.compare import compare_files
from distbench.numerics.summary import FORMAT, Summary, _checksum
from distbench.numerics.tensor_files import TensorSource
from distbench.resume import resumed_config
from distbench.runs.candidates import read_runs
from distbench.runs.diff import diff
from distbench.runs.files import json_text
from distbench.runs.folder import read_record
from distbench.runs.imported import import_rows
from distbench.runs.rank import rank, to_json
from distbench.runs.sides import Side, read_gate, read_losses
from tests.cli import REPOSITORY
from tests.fuzz.mutations import split_tensors
from tests.fuzz.targets import ROW, TARGETS, run, runs, stored, tensor_file, two_summaries
from tests.runs.folders import usual_run
from tests.runs.records import write

NUMBER = 15
"""Files for each reader here; `python -m tests.fuzz --number 5000` reads more."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of every reader, from one process that has threads of nobody else's."""
    file = tmp_path_factory.mktemp("fuzz") / "outcomes.json"
    words = ["-m", "tests.fuzz", "--number", str(NUMBER), "--seed", "1", "--json", str(file)]
    done = subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert file.exists(), done.stdout + done.stderr
    return {outcome["target"]: outcome for outcome in json.loads(file.read_text())}


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_read_or_refused_by_name(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    outcome = outcomes[name]
    assert not outcome["findings"], outcome["findings"][0]["problem"]
    assert outcome["read"] + outcome["refused"] == NUMBER
    if not name.startswith(("rank", "report")):  # to which a damaged record, or file of one, is a line of theirs
        assert outcome["refused"]


# --- what no damage by chance would find


SPARSE = 1 << 33
"""8 GiB that take no room on disk."""
READERS: dict[str, Callable[[Path], Any]] = {
    "record.json": lambda file: read_record(file.parent),
    "metrics.jsonl": read_losses,
    "gate.json": read_gate,
    "duplicate_of.json": lambda file: Side.open(file.parent),
    "resolved.yaml": lambda file: Side.open(file.parent),
    "rows.json": lambda file: import_rows(file, file.parent / "out"),
    "rows.csv": lambda file: import_rows(file, file.parent / "out"),
    "model.safetensors.index.json": lambda file: TensorSource.open(file.parent),
    "model.safetensors": TensorSource.open,
    "summary.safetensors": Summary.load,
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_beyond_any_size_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, SPARSE)
    with pytest.raises(DistbenchError, match=name):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_is_not_waited_for(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / name)
    with pytest.raises(DistbenchError, match=name):
        READERS[name](tmp_path / name)


def test_pipes_in_a_run_folder(tmp_path: Path) -> None:
    a, b = usual_run(tmp_path / "a"), usual_run(tmp_path / "b")
    file = a / "gradients" / "step_00000001.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SummaryError, match="not a regular file"):
        diff(a, b)


def test_names_of_tensors_are_no_paths(tmp_path: Path) -> None:
    names = ["../up", "/etc/passwd", "a/b", "..", "\x00", "a\x1b[31m"]
    for file, value in (("a", 1.0), ("b", 2.0)):
        save_file({name: torch.tensor([value]) for name in names}, tmp_path / f"{file}.safetensors")
    found = compare_files(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {tensor.name for tensor in found.tensors} == set(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "place", ["../up.safetensors", "/etc/passwd.safetensors", "a/b.safetensors", "..", "\0.safetensors"]
)
def test_an_index_names_files_beside_it_only(place: str, tmp_path: Path) -> None:
    tensor_file(tmp_path / "model.safetensors")
    tensor_file(tmp_path.parent / "up.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(TensorFileError, match="paths are refused"):
        TensorSource.open(tmp_path)


@pytest.mark.parametrize("name", ["../a", "/a", "..", ".", "", "a/b", "\0"])
def test_a_duplicate_names_its_neighbour_only(name: str, tmp_path: Path) -> None:
    usual_run(tmp_path / "a")
    (tmp_path / "sweep" / "b").mkdir(parents=True)
    (tmp_path / "sweep" / "b" / "duplicate_of.json").write_text(json.dumps({"duplicate_of": name}))
    with pytest.raises(RunFolderError, match="b"):
        Side.open(tmp_path / "sweep" / "b")


def test_rows_are_made_into_folders_of_the_one_asked_for(tmp_path: Path) -> None:
    names = ["../up", "/etc", "..", "a\x00b", "x" * 500, "-", "é"]
    (tmp_path / "rows.json").write_text(json.dumps([{"name": name} for name in names]))
    folders = import_rows(tmp_path / "rows.json", tmp_path / "out")
    assert {folder.resolve().parent for folder in folders} == {tmp_path / "out"} and len(folders) == len(names)


TAGS = [
    "!!python/object/apply:os.system",
    "!!python/object/new:os.system",
    "!<tag:yaml.org,2002:python/object/apply:os.system>",
]


@pytest.mark.parametrize("tag", TAGS)
def test_a_tag_in_yaml_runs_nothing(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = usual_run(tmp_path / "a"), usual_run(tmp_path / "b")
    (a / "record.json").unlink()
    (a / "resolved.yaml").write_text(f"model: {tag} ['touch executed']\n")
    with pytest.raises(RunFolderError, match="could not determine a constructor"):
        diff(a, b)
    assert not (tmp_path / "executed").exists()


def test_merge_keys_in_yaml_are_refused(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a")
    (a / "record.json").unlink()
    (a / "resolved.yaml").write_text("x: &x {k: 1}\ny: {<<: [*x, *x]}\n")
    with pytest.raises(RunFolderError, match="merge keys are not read"):
        Side.open(a)


def test_a_record_names_code_that_no_reader_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a config of `model=custom` does: only a run, and `resume`, call it."""
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    runs(tmp_path / "runs")
    for folder in (tmp_path / "runs").iterdir():
        tree = json.loads((folder / "record.json").read_text())
        tree["config"]["model"] = {"name": "custom", "_target_": "planted.build", "kwargs": {}}
        tree["config"]["fault"]["_target_"] = "planted.build"
        tree["config"]["hydra"] = {"launcher": {"_target_": "planted.build"}}
        (folder / "record.json").write_text(json.dumps(tree))
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    TARGETS["diff-record"].read(tmp_path / "runs")
    TARGETS["rank-record"].read(tmp_path / "runs")
    TARGETS["report-record"].read(tmp_path / "runs")
    import_rows(tmp_path / "rows.json", tmp_path / "runs" / "imported", tmp_path / "runs" / "000_a")
    assert "planted" not in sys.modules


# --- what damage by chance has found


def test_a_topology_that_is_no_list(tmp_path: Path) -> None:
    a, b = usual_run(tmp_path / "a", topology={"ranks": 3}), usual_run(tmp_path / "b")
    assert not diff(a, b).differs


def test_whole_numbers_that_are_too_long_for_decimals(tmp_path: Path) -> None:
    a, b = usual_run(tmp_path / "a"), usual_run(tmp_path / "b")
    for path in (a, b):
        (path / "record.json").unlink()
    (a / "resolved.yaml").write_text(f"global_batch: 0x{'f' * 9000}\n? 0x{'f' * 9000}\n: 1\n")
    (found,) = [setting for setting in diff(a, b).settings if setting.key == "global_batch"]
    assert found.a.startswith("0xfff") and len(found.a) == 500
    json_text([vars(setting) for setting in diff(a, b).settings])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inner: inner["parameters"][0].update(shape=[math.inf]), "OverflowError"),
        (lambda inner: inner["parameters"][0].update(shape=[10**4000]), "sizes that no tensor has"),
        (lambda inner: inner["parameters"][0].update(shape=[-5, -7]), "sizes that no tensor has"),
        (lambda inner: inner.update(schema=10**4000), "update distbench"),
        (lambda inner: inner.update(seed=10**4000), "a seed of more than 64 bits"),
    ],
)
def test_a_summary_with_a_right_checksum(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    two_summaries(tmp_path)
    content = (tmp_path / "a.safetensors").read_bytes()
    header, data = split_tensors(content)
    inner = json.loads(header["__metadata__"][FORMAT])
    del inner["sha256"]
    change(inner)
    header["__metadata__"][FORMAT] = json.dumps({**inner, "sha256": _checksum(inner, load(content))})
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(SummaryError, match=message) as caught:
        Summary.load(tmp_path / "a.safetensors")
    assert len(str(caught.value)) < 1000


def test_messages_quote_a_little(tmp_path: Path) -> None:
    tensor_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "x/" * 50_000}}))
    with pytest.raises(TensorFileError, match="paths are refused") as caught:
        TensorSource.open(tmp_path)
    assert len(str(caught.value)) < 1000


def test_a_cell_beyond_what_csv_readers_take(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"name\n{'x' * 200_000}\n")
    with pytest.raises(RunFolderError, match="field larger than field limit"):
        import_rows(tmp_path / "rows.csv", tmp_path / "out")


@pytest.mark.parametrize("section", ["config", "topology", "environment"])
@pytest.mark.parametrize("value", [3, "x", [1], None])
def test_rows_like_a_damaged_run(section: str, value: Any, tmp_path: Path) -> None:
    folder = run(tmp_path / "ours")
    write(folder, {**read_record(folder), section: value})
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    (made,) = import_rows(tmp_path / "rows.json", tmp_path / "out", folder)
    assert read_runs([made]).runs


def nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize("depth", [40, 300, 600])
def test_one_record_nested_too_deeply_is_a_line_and_the_rest_is_ranked(depth: int, tmp_path: Path) -> None:
    runs(tmp_path)
    folder = tmp_path / "000_a"
    tree = read_record(folder)
    tree["config"]["model"] = nested(depth)
    (folder / "record.json").write_text(json.dumps(tree))
    ranking = rank([tmp_path])
    assert ranking.chosen is not None and ranking.chosen.name == "001_b"
    ((_, why),) = ranking.reading.unreadable
    assert "too deeply nested" in why
    json_text(to_json(ranking))
    (tmp_path / "rows.json").write_text(json.dumps([ROW]))
    with pytest.raises(RunFolderError, match="too deeply nested"):
        import_rows(tmp_path / "rows.json", tmp_path / "out", folder)


@pytest.mark.parametrize("name", ["record.json", "gate.json"])
def test_a_schema_of_thousands_of_digits(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f'{{"schema": {"9" * 4000}, "text": ""}}')
    with pytest.raises(RunFolderError, match="upgrade distbench") as caught:
        READERS[name](tmp_path / name)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("step", ["9" * 19, "9" * 400, "-1", "true", "1.0", "null"])
def test_a_step_that_is_none(step: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}, "loss": 1}}\n')
    with pytest.raises(RunFolderError, match="line 1, is damaged: step"):
        read_losses(tmp_path / "metrics.jsonl")


def test_a_duplicate_of_many_lines(tmp_path: Path) -> None:
    (tmp_path / "duplicate_of.json").write_text(json.dumps({"duplicate_of": "a\n\nb"}))
    with pytest.raises(RunFolderError, match="same experiment as a b, which is no run folder"):
        Side.open(tmp_path)


@pytest.mark.parametrize("config", [None, [], "model: {}", 3, {}, {"model": 3}, {"model": [1]}, {"steps": {"a": 1}}])
def test_a_config_that_cannot_be_resumed(config: Any, tmp_path: Path) -> None:
    stored(tmp_path)
    tree = json.loads((tmp_path / "record.json").read_text())
    tree["config"] = {**tree["config"], **config} if isinstance(config, dict) and config else config
    (tmp_path / "record.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=f"resume={tmp_path}: ") as caught:
        resumed_config(tmp_path, [])
    assert "\n" not in str(caught.value)


def test_folders_deeper_than_calls(tmp_path: Path) -> None:
    run(tmp_path / "run")
    folder = tmp_path / "deep"
    for _ in range(1500):
        folder.mkdir()
        folder /= "d"
    try:
        assert len(rank([tmp_path]).reading.runs) == 1
    finally:  # pytest's own removal of old folders is recursive, too
        subprocess.run(["rm", "-r", tmp_path / "deep"], check=True)


def test_json_that_is_printed_drives_no_terminal() -> None:
    text = json_text({"a": "\x9b2J\x7f\u202e\ufeff"})
    assert text.isascii() and json.loads(text) == {"a": "\x9b2J\x7f\u202e\ufeff"}
