"""Our safetensors files are everybody's, and everybody's are checked before they are ours."""

from __future__ import annotations

import json
import os
import struct
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from distbench.checkpoint import format as safetensors_format
from distbench.checkpoint.format import CHUNK, CODES, Source, read_header
from distbench.checkpoint.manifest import Entry
from distbench.checkpoint.tensors import dtype_of, memory, write_tensors
from distbench.errors import CheckpointError

DTYPES = [getattr(torch, name) for name in CODES]


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits that the dtype has."""
    numbers = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        numbers %= 2
    return numbers.reshape(-1).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return bytes(memory(tensor.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_every_dtype_and_shape(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = {
        "matrix": some(dtype, 5, 3),
        "turned": some(dtype, 5, 3).t(),
        "every other": some(dtype, 9)[::2],
        "scalar": some(dtype),
        "empty": some(dtype, 0, 4),
        'a/name with ü and "quotes"': some(dtype, 1),
        "odd bytes before": some(torch.uint8, 3),
    }
    file = tmp_path / "x.safetensors"
    write_tensors(file, wanted, {"format": "pt", "note": "ä\n"})
    loaded = load_file(file)
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(loaded[name]) == bits(tensor), name
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "note": "ä\n"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_and_what_safetensors_writes_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = {"matrix": some(dtype, 5, 3), "scalar": some(dtype), "empty": some(dtype, 0, 4)}
    save_file(wanted, tmp_path / "x", metadata={"a": "b"})
    with Source(tmp_path / "x") as source:
        header = read_header(source)
        assert header.metadata == {"a": "b"} and header.tensors.keys() == wanted.keys()
        for name, stored in header.tensors.items():
            assert (dtype_of(stored), stored.shape) == (dtype, tuple(wanted[name].shape))
            assert source.read(stored.start, stored.stop - stored.start) == bits(wanted[name])


class Grudging(FileIO):
    """A file that takes a few bytes at once."""

    def write(self, data: Any) -> int:
        return super().write(data[:300_001])


@pytest.mark.parametrize("kind", [FileIO, Grudging])
def test_the_digest_is_of_the_file(kind: type[FileIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"long": torch.randn(CHUNK), "a": torch.ones(3), "b": torch.tensor(True)}
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_format, "FLUSH", CHUNK)
        patch.setattr(Path, "open", lambda path, *_, **__: kind(path, "wb"))
        entry = write_tensors(tmp_path / "x", tensors, {})
    data = (tmp_path / "x").read_bytes()
    assert entry == Entry("x", len(data), xxhash.xxh3_128_hexdigest(data)) == Entry.of(tmp_path / "x")
    assert torch.equal(load_file(tmp_path / "x")["long"], tensors["long"])


def test_the_same_tensors_are_the_same_file(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.ones(2, dtype=torch.float64), "c": torch.zeros(1, dtype=torch.int8)}
    first = write_tensors(tmp_path / "1", tensors, {})
    second = write_tensors(tmp_path / "2", dict(reversed(tensors.items())), {})
    assert first.xxh3_128 == second.xxh3_128
    with Source(tmp_path / "1") as source:
        assert list(read_header(source).tensors) == ["a", "b", "c"]


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a tensor of complex128 cannot be stored: safetensors has float64, "):
        write_tensors(tmp_path / "x", {"a": torch.ones(1, dtype=torch.complex128)}, {})


# --- what is not right


def entry(start: int, stop: int, **changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop], **changes}


HEADERS: dict[str, tuple[Any, str]] = {
    "no object": ([], "no object"),
    "no JSON": (b"{", "no JSON"),
    "deep": (b'{"a":' * 100_000, "no JSON"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry(0, 8)}, "no table of words"),
    "gap": ({"a": entry(0, 3), "b": entry(4, 8)}, "overlap or leave a gap at byte"),
    "overlap": ({"a": entry(0, 5), "b": entry(4, 8)}, "overlap or leave a gap at byte"),
    "twice": ({"a": entry(0, 8), "b": entry(0, 8)}, "overlap or leave a gap at byte"),
    "beyond": ({"a": entry(0, 9)}, "overlap or leave a gap at byte"),
    "short": ({"a": entry(0, 7)}, "overlap or leave a gap at byte"),
    "dtype": ({"a": entry(0, 8, dtype="F4")}, "'a' is "),
    "dtype of another type": ({"a": entry(0, 8, dtype=["U8"])}, "'a' is "),
    "negative": ({"a": entry(0, 8, shape=[-8])}, "'a' is "),
    "huge": ({"a": entry(0, 8, shape=[2**62, 2**62])}, "'a' is "),
    "many": ({"a": entry(0, 8, shape=[1] * 100_000)}, "'a' is "),
    "fraction": ({"a": entry(0, 8, shape=[8.0])}, "'a' is "),
    "true": ({"a": entry(0, 8, shape=[8, True])}, "'a' is "),
    "other size": ({"a": entry(0, 8, shape=[7])}, "'a' is "),
    "backwards": ({"a": entry(0, 8, data_offsets=[8, 0])}, "'a' is "),
    "words": ({"a": entry(0, 8, data_offsets=["0", "8"])}, "'a' is "),
    "nan": (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 8]}}', "'a' is "),
    "null": ({"a": None}, "'a' is None"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    tree, message = HEADERS[name]
    header = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with Source(tmp_path / "x") as source, pytest.raises(CheckpointError, match=message):
        read_header(source)


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_a_file_too_short_for_a_header(length: int, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * length)
    with Source(tmp_path / "x") as source, pytest.raises(CheckpointError, match="/x "):
        read_header(source)


def test_a_header_beyond_any_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", 1 << 32))
    os.truncate(tmp_path / "x", 1 << 33)
    with (
        Source(tmp_path / "x") as source,
        pytest.raises(CheckpointError, match="header would have 4,294,967,296 bytes"),
    ):
        read_header(source)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe", "missing"):
        with pytest.raises(CheckpointError, match=f"/{name} "):
            Source(tmp_path / name)


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(100))
    with Source(tmp_path / "x") as source:
        os.truncate(tmp_path / "x", 50)
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            source.read(0, 100)
