"""A reader never sees half a file."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import pytest

from distbench.runs import files
from distbench.runs.files import write_atomic, write_json


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "grüße")
    write_atomic(tmp_path / "b.bin", b"\x00\xff")
    assert (tmp_path / "a.txt").read_text() == "grüße"
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.bin"]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failure_in_the_middle_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "record.json"
    write_atomic(file, "old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, "new and longer")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"], "a temporary file was left"


def test_the_file_appears_only_when_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append("flushed"), fsync(handle)))
    monkeypatch.setattr(files.os, "replace", lambda a, b: (order.append("renamed"), replace(a, b)))
    write_atomic(tmp_path / "x", "y")
    assert order == ["flushed", "renamed"]


def test_json_is_strict_and_numbers_keep_their_bits(tmp_path: Path) -> None:
    tree = {"a": [0.1 + 0.2, 5e-324, (1, 2)], "b": {"nan": math.nan, "inf": math.inf, "low": -math.inf}, "c": None}
    write_json(tmp_path / "x.json", tree)
    text = (tmp_path / "x.json").read_text()
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == {"a": [0.1 + 0.2, 5e-324, [1, 2]], "b": {"nan": "nan", "inf": "inf", "low": "-inf"}, "c": None}
