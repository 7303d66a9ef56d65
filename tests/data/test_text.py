"""Byte windows over files: every byte once an epoch, any sample at once, files joined in name order."""

from __future__ import annotations

from pathlib import Path

import pytest

from distbench.data.text import TextWindows
from distbench.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, one of them empty and one in a subfolder, and one that the glob leaves out."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_bytes(bytes(range(10)))
    (tmp_path / "b.py").write_bytes(b"")
    (tmp_path / "sub" / "c.py").write_bytes(bytes(range(10, 24)))
    (tmp_path / "z.txt").write_bytes(b"not this")
    return tmp_path


def windows(path: Path, seq_len: int = 4, max_bytes: int = 1000, seed: int | None = None) -> TextWindows:
    return TextWindows(str(path), "*.py", seq_len, max_bytes, seed)


def test_windows_follow_the_stream_across_files(folder: Path) -> None:
    text = windows(folder)
    assert text.num_windows == 5  # 24 bytes: five windows of 4, each with the byte that follows it
    stream = list(range(24))
    for index in range(5):
        inputs, targets = text.sample(index)
        assert inputs.tolist() == stream[4 * index : 4 * index + 4]
        assert targets.tolist() == stream[4 * index + 1 : 4 * index + 5]


def test_a_single_file_needs_no_glob(folder: Path) -> None:
    text = TextWindows(str(folder / "z.txt"), "*.py", 3, 1000, None)
    assert bytes(text.sample(0)[0].tolist()) == b"not"


def test_the_stream_is_cut_at_max_bytes(folder: Path) -> None:
    text = windows(folder, max_bytes=13)
    assert text.num_windows == 3
    assert text.sample(2)[1].tolist() == [9, 10, 11, 12]


@pytest.mark.parametrize("number", [23, 22, 20, 18, 12])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_an_epoch_is_every_window_once(folder: Path, seed: int, number: int) -> None:
    text = windows(folder, seq_len=1, max_bytes=number + 1, seed=seed)
    assert text.num_windows == number
    epochs = [[text.sample(index)[0].item() for index in range(number * e, number * (e + 1))] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(number))
    assert epochs[0] != epochs[1] != epochs[2], "every epoch has its own order"
    assert epochs[0] != list(range(number))


def test_the_order_depends_on_the_seed_alone(folder: Path) -> None:
    orders = [[windows(folder, 1, seed=seed).sample(i)[0].item() for i in range(23)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_samples_wrap_around_without_shuffling(folder: Path) -> None:
    text = windows(folder)
    assert text.sample(7)[0].tolist() == text.sample(2)[0].tolist()


@pytest.mark.parametrize(("glob", "seq_len"), [("*.nothing", 4), ("*.py", 24)])
def test_too_little_text_is_refused(folder: Path, glob: str, seq_len: int) -> None:
    held = {"*.nothing": 0, "*.py": 24}[glob]
    with pytest.raises(ConfigError, match=rf"holds {held} bytes .* fewer than one window of data.seq_len={seq_len}"):
        TextWindows(str(folder), glob, seq_len, 1000, None)


def test_the_smallest_text_is_one_window(folder: Path) -> None:
    text = windows(folder, seq_len=23, seed=5)
    assert text.num_windows == 1 and text.sample(0)[0].tolist() == text.sample(9)[0].tolist() == list(range(23))
