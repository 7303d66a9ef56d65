"""Text of others is bytes: any are taken, and what is no file of bytes is not opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from distbench.data.text import TextWindows
from distbench.errors import ConfigError
from tests.cli import distbench

CONTENTS: dict[str, bytes] = {
    "every byte": bytes(range(256)) * 8,
    "no UTF-8": b"\xff\xfe\xed\xa0\x80" * 100,
    "zeros": bytes(1000),
    "one long line": b"x" * 5_000_000,
    "line ends": b"\r\n\n\r" * 200,
    "noise": Random(0).randbytes(3000),
    "a pickle": b"\x80\x04\x95cos\nsystem\n" * 50,
    "YAML": b"!!python/object/apply:os.system ['touch executed']\n" * 20,
    "terminal": b"\x1b]0;title\x07\x1b[31m" * 50,
}
SEQ_LEN = 7


@pytest.mark.parametrize("name", CONTENTS)
def test_any_bytes_are_samples(name: str, tmp_path: Path) -> None:
    """As they stand in the file, each followed by the next."""
    (tmp_path / "text").write_bytes(CONTENTS[name])
    windows = TextWindows(str(tmp_path / "text"), "*", SEQ_LEN, 2**20, seed=None)
    stream = CONTENTS[name][: 2**20]
    assert windows.num_windows == (len(stream) - 1) // SEQ_LEN
    for index in (0, 1, windows.num_windows - 1):
        inputs, targets = windows.sample(index)
        at = index * SEQ_LEN
        assert bytes(inputs.tolist()) == stream[at : at + SEQ_LEN]
        assert bytes(targets.tolist()) == stream[at + 1 : at + 1 + SEQ_LEN]


def test_odd_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    """Empty ones, pipes, links to nowhere and to themselves; names of any bytes are names."""
    for name in ("b.txt", "\x1b[31m.txt", os.fsdecode(b"\xff\xfe.txt"), "<script>.txt"):
        (tmp_path / name).write_bytes(name.encode(errors="surrogateescape") * 10)
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "dangling.txt").symlink_to("/nowhere")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "around").symlink_to(tmp_path)
    (tmp_path / "folder.txt").mkdir()
    windows = TextWindows(str(tmp_path), "*.txt", SEQ_LEN, 2**20, seed=0)
    assert windows.num_windows == (10 * (5 + 9 + 6 + 12) - 1) // SEQ_LEN
    assert len(windows.sample(3)[0]) == SEQ_LEN


NOTHING: dict[str, Callable[[Path], object]] = {
    "an empty file": Path.touch,
    "a few bytes": lambda path: path.write_bytes(b"abc"),
    "a pipe": os.mkfifo,
    "an empty folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", NOTHING)
def test_nothing_to_train_on_is_refused(what: str, tmp_path: Path) -> None:
    NOTHING[what](tmp_path / "text")
    with pytest.raises(ConfigError, match="fewer than one window") as caught:
        TextWindows(str(tmp_path / "text"), "*", SEQ_LEN, 2**20, seed=0)
    assert str(tmp_path / "text") in str(caught.value)


def test_a_file_name_that_a_refusal_quotes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.\x1b[31m").touch()
    done = distbench("model=simple_text", "loss=cross_entropy", "data=text", "data.path=text", cwd=tmp_path)
    assert done.code == 2 and "no file in data.path=text matches" in done.err and "\x1b" not in done.said


def test_a_run_on_noise(tmp_path: Path) -> None:
    """Through the gate, whose baseline is of these files, by their names."""
    (tmp_path / "text").mkdir()
    for index, content in enumerate(CONTENTS.values()):
        (tmp_path / "text" / os.fsdecode(b"%d\xff\x1b[31m" % index)).write_bytes(content)
    done = distbench(
        *("model=simple_text", "loss=cross_entropy", "data=text", "data.path=text", "data.glob=*", "steps=2"),
        *("data.seq_len=8", "model.hidden_dim=8", "model.num_layers=1", "gate.steps=1", "window=off"),
        cwd=tmp_path,
    )
    assert done.code == 0 and "\x1b" not in done.said, done.said
    assert done.record["status"] == "passed" and done.record["gate"]["tier"] == "bitwise"
    assert not (tmp_path / "executed").exists()
