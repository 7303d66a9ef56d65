"""The run folder: made once, its record merged section by section, damage told from absence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from distbench.errors import OutputError, RunFolderError
from distbench.runs.folder import SCHEMA, RunFolder, find_runs, read_record


def test_sections_are_merged_and_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.update_record(status="running", batch={"a": 1, "b": 2})
    folder.update_record(batch={"c": 3}, reason=None)
    assert read_record(folder.path) == {"schema": SCHEMA, "status": "running", "batch": {"c": 3}, "reason": None}
    assert folder.preview_record(status="passed")["status"] == "passed"
    assert read_record(folder.path)["status"] == "running", "a preview was written"


def test_a_folder_with_a_run_is_not_used_again(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").update_record(status="passed")
    with pytest.raises(OutputError, match=r"already holds a run; choose another hydra\.run\.dir"):
        RunFolder.create(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match=r"cannot write the run folder .*file/run: Not a directory; set output_dir="):
        RunFolder.create(tmp_path / "file" / "run")


def test_the_frozen_config_is_plain_yaml(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_resolved({"steps": 3, "model": {"name": "simple"}, "clip_norm": None})
    assert yaml.safe_load(folder.resolved_path.read_text()) == {
        "steps": 3,
        "model": {"name": "simple"},
        "clip_norm": None,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; is .* a run folder"),
        ("", "is damaged"),
        ('{"schema": 1, "status"', "is damaged"),
        ("\x00", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "is not a distbench record"),
        ('{"status": "passed"}', "is not a distbench record"),
        ('{"schema": "1"}', "is not a distbench record"),
        (json.dumps({"schema": SCHEMA + 1}), f"has schema {SCHEMA + 1}, this distbench reads up to {SCHEMA}; upgrade"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "record.json").write_text(content)
    with pytest.raises(RunFolderError, match=message):
        read_record(tmp_path)


def test_runs_are_found_at_any_depth_in_name_order(tmp_path: Path) -> None:
    for name in ("b/001", "a", "b/000"):
        RunFolder.create(tmp_path / name).update_record(status="passed")
    (tmp_path / "c").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)] == ["a", "b/000", "b/001"]


class TestDiscardUnused:
    """What a refused run leaves, and only that, is removed."""

    @staticmethod
    def refused(path: Path) -> RunFolder:
        folder = RunFolder.create(path)
        (path / ".hydra").mkdir()
        for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
            (path / ".hydra" / name).write_text("")
        return folder

    def test_nothing_is_left(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "run").discard_unused()
        assert list(tmp_path.iterdir()) == []

    def test_other_peoples_files_are(self, tmp_path: Path) -> None:
        """hydra.run.dir may name any folder."""
        (tmp_path / "thesis.tex").write_text("years of work")
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "mine.log").write_text("mine")
        self.refused(tmp_path).discard_unused()
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
            "logs",
            "logs/mine.log",
            "thesis.tex",
        ]

    def test_a_run_is(self, tmp_path: Path) -> None:
        folder = self.refused(tmp_path)
        folder.update_record(status="crashed")
        before: list[Any] = sorted(tmp_path.rglob("*"))
        folder.discard_unused()
        assert sorted(tmp_path.rglob("*")) == before
