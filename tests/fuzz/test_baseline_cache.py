"""A cached baseline with any damage to any of its files is found, discarded and computed again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from distbench.config import SGD, Config
from distbench.numerics import cache
from distbench.numerics.baseline import compute_baseline
from distbench.numerics.cache import MANIFEST, ensure_baseline
from distbench.runs.folder import RunFolder
from tests.fuzz.mutations import bytes_damaged, json_damaged
from tests.gates import CPU
from tests.numerics.test_cache import config_of

FILES = (
    *("baseline.json", MANIFEST, "state_0.safetensors", "step_1.safetensors", "summary_1.safetensors"),
    *("weights_0.safetensors", "weights_1.safetensors"),
)
"""Of an entry of one step."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output folder with one entry that is whole."""
    torch.set_num_threads(1)  # as each test has it, so that bits are the same
    root = tmp_path_factory.mktemp("whole")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(cache, "_compute", compute_here)
    ensure(root)
    monkeypatch.undo()
    return root


def compute_here(config: Config, folder: Path, run: RunFolder, local_world_size: int) -> None:
    compute_baseline(config, folder, CPU)


def ensure(root: Path) -> tuple[Path, bool]:
    """Path of the entry, and whether it was reused."""
    run = root / "run"
    shutil.rmtree(run, ignore_errors=True)
    found = ensure_baseline(config_of(root, optimizer=SGD(lr=0.1)), None, RunFolder.create(run), 2)
    return Path(found.path), found.reused


@pytest.fixture
def entry(made: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the entry, for a process that has not seen it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    cache._verified.clear()
    (found,) = [path for path in (tmp_path / ".baselines").iterdir() if path.is_dir()]
    assert sorted(path.name for path in found.iterdir()) == sorted(FILES)
    yield found
    cache._verified.clear()
    while cache._used:
        cache._used.pop().close()


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def as_dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere")


WHOLE_FILE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: os.truncate(file, 0),
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "two bytes less": lambda file: os.truncate(file, file.stat().st_size - 2),
    "a byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "8 GiB": lambda file: os.truncate(file, 1 << 33),
    "a pipe": as_pipe,
    "a folder": as_folder,
    "a dangling link": as_dangling_link,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", WHOLE_FILE)
def test_files_that_are_not_what_they_were(how: str, name: str, entry: Path) -> None:
    assert cache._intact(entry)
    WHOLE_FILE[how](entry / name)
    assert not cache._intact(entry), "found by the process that has read it before"
    cache._verified.clear()
    assert not cache._intact(entry)


@pytest.mark.parametrize("name", [name for name in FILES if name != MANIFEST])
def test_flipped_bits(name: str, entry: Path) -> None:
    """Each of the first and last bytes, and a hundred bits between: same size, and the same time."""
    file, random = entry / name, Random(name)
    content, times = file.read_bytes(), file.stat()
    ends = [8 * byte + random.randrange(8) for byte in (*range(16), *range(len(content) - 16, len(content)))]
    for bit in [*ends, *(random.randrange(8 * len(content)) for _ in range(100))]:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert not cache._intact(entry), f"bit {bit}"
    file.write_bytes(content)
    assert cache._intact(entry)


@pytest.mark.parametrize("name", FILES)
def test_damage_by_chance(name: str, entry: Path) -> None:
    """Also to the manifest, where not every byte means something: what is still believed must be what it was."""
    file, random = entry / name, Random(name)
    content = file.read_bytes()
    damages = [bytes_damaged, json_damaged] if name.endswith(".json") else [bytes_damaged]
    found = 0
    for damage in damages * 60:
        file.write_bytes(damage(content, random))
        cache._verified.clear()
        if cache._intact(entry):
            assert name == MANIFEST or file.read_bytes() == content
        else:
            found += 1
    assert found > 50 * len(damages)


def test_swapped_files(entry: Path) -> None:
    """Any two for each other, and the files of one size that a manifest of sizes alone would not tell apart."""
    pairs = [(a, b) for a in FILES for b in FILES if a < b]
    for a, b in pairs:
        swap(entry / a, entry / b)
        assert not cache._intact(entry), (a, b)
        swap(entry / a, entry / b)
    assert (entry / FILES[5]).stat().st_size == (entry / FILES[6]).stat().st_size
    assert cache._intact(entry)


def swap(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def test_an_entry_under_another_name(entry: Path) -> None:
    """Whole, and the baseline of something else."""
    other = entry.with_name("0" * 16)
    entry.rename(other)
    assert not cache._intact(other)


def test_a_manifest_that_names_files_elsewhere(entry: Path) -> None:
    tree = json.loads((entry / MANIFEST).read_text())
    for name in ("../outside", "/etc/passwd", "", ".", "a\0b"):
        (entry / MANIFEST).write_text(
            json.dumps({**tree, "files": {**tree["files"], name: {"bytes": 1, "sha256": "0"}}})
        )
        assert not cache._intact(entry)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["half", "zeros", "a pipe", "a folder"])
def test_a_damaged_entry_is_discarded_and_computed_again(
    how: str, name: str, entry: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_compute", compute_here)
    WHOLE_FILE[how](entry / name)
    assert ensure(tmp_path) == (entry, False)
    assert ensure(tmp_path) == (entry, True)
    for file in FILES:
        if file.endswith(".safetensors"):
            assert (entry / file).read_bytes() == (made / ".baselines" / entry.name / file).read_bytes()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_entry_that_is_no_folder(kind: str, entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_compute", compute_here)
    aside = tmp_path / "aside"
    entry.rename(aside)
    entry.write_text("x") if kind == "file" else entry.symlink_to(tmp_path / "nowhere")
    assert ensure(tmp_path) == (entry, False)
    assert ensure(tmp_path) == (entry, True)
