"""Read tensors from safetensors files that anyone may have written: validated, then mapped, never executed.

The safetensors library checks the header (JSON, dtypes, sizes, offsets without overlap or hole, nothing
beyond the end of the file). Here comes what it leaves to its caller: a bound on the header's size, since
parsing takes about twenty times the header in memory; names given twice; folders of shards and their index;
and readable reasons for what is commonly found in place of a safetensors file.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from distbench.errors import TensorFileError
from distbench.runs.files import is_plain_name
from distbench.runs.text import detail

MAX_HEADER_BYTES = 16 * 2**20
"""A header of this size describes about 100,000 tensors in one file."""
MAX_INDEX_BYTES = 64 * 2**20

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
_FOREIGN = (
    (b"PK\x03\x04", "a zip or PyTorch .pt file"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"version https://git-lfs", "a Git LFS pointer"),
    (b"GGUF", "a GGUF file"),
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a mapped file.

    `dtype` is the safetensors code (`"F32"`); `start` and `stop` are byte positions in the file.
    """

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        # With a zero in it a shape may name any other sizes, whose product need not be small.
        return 0 if 0 in self.shape else math.prod(self.shape)

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes `start` to `stop` of this tensor's data, read-only, not copied."""
        return self.file.read(self.start + start, self.start + stop)

    def drop(self, start: int, stop: int) -> None:
        """Let go of the pages behind these bytes, so that resident memory stays bounded."""
        self.file.drop(self.start + start, self.start + stop)


class MappedFile:
    """A safetensors file whose header was found valid, mapped read-only.

    Raises `TensorFileError` for a file that is missing, truncated, damaged, or something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = _valid_header(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self.tensors = {name: self._stored(entry, header.data_start) for name, entry in header.entries.items()}

    def _stored(self, entry: dict[str, Any], data_start: int) -> StoredTensor:
        start, stop = entry["data_offsets"]
        return StoredTensor(self, entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + stop)

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes `start` to `stop` of the file.

        Reading a mapped page beyond the end of a file kills the process, so the size is looked up again here:
        a file cut short while it is compared is an error and not a crash (but for the moment of reading).
        """
        if self._map.size() < stop or len(self._bytes) < stop:
            raise TensorFileError(f"{self.path}: became shorter while it was read; compare again once it is complete")
        return self._bytes[start:stop]

    def drop(self, start: int, stop: int) -> None:
        """Let go of the resident pages of these bytes; they stay in the page cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            aligned = start - start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, aligned, stop - aligned)

    def close(self) -> None:
        """Unmap the file. A view still in use (by an exception's traceback, say) delays that."""
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


@dataclass
class TensorSource:
    """All tensors of one file or one folder of files, by name. A context manager: leaving it unmaps them."""

    path: Path
    files: list[MappedFile] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | Path) -> TensorSource:
        """Open a safetensors file or a folder of them.

        In a folder, `*.index.json` says which file holds what; without one, all `*.safetensors` files in it
        (not below it) belong together, and no name may appear twice. What was left out is in `notes`.
        Raises `TensorFileError`.
        """
        source = cls(Path(path))
        try:
            if source.path.is_dir():
                source._open_folder()
            else:
                source.tensors = source._map(source.path).tensors
        except BaseException:
            source.close()
            raise
        return source

    def _map(self, path: Path) -> MappedFile:
        file = MappedFile(path)
        self.files.append(file)
        return file

    def _open_folder(self) -> None:
        present = sorted(entry.name for entry in self.path.iterdir() if entry.name.endswith(".safetensors"))
        assigned = self._read_indexes()
        if not present and not assigned:
            raise TensorFileError(f"{self.path}: no *.safetensors file in this folder; name one that holds some")
        if assigned:
            names = sorted(set(assigned.values()))
            self.notes += [f"{self.path / name}: left out, no index lists it" for name in present if name not in names]
        else:
            names = present
            _refuse_missing_shards(self.path, names)
        for name in names:
            for tensor, stored in self._map(self.path / name).tensors.items():
                if assigned.get(tensor, name) != name:
                    continue  # a stale copy: the index says another shard holds this tensor
                if tensor in self.tensors:
                    other = self.tensors[tensor].file.path.name
                    raise TensorFileError(
                        f"{self.path}: tensor {tensor!r} is in {other} and in {name}; compare single files"
                    )
                self.tensors[tensor] = stored
        for tensor, name in assigned.items():
            if tensor not in self.tensors:
                raise TensorFileError(
                    f"{self.path / name}: does not hold tensor {tensor!r}, which the index places there; "
                    "copy the shards and the index again, from one save"
                )

    def _read_indexes(self) -> dict[str, str]:
        """Tensor name to shard name, from every index of safetensors files in the folder."""
        assigned: dict[str, str] = {}
        for path in sorted(self.path.glob("*.index.json")):
            weight_map = _read_index(path)
            if not all(name.endswith(".safetensors") for name in weight_map.values()):
                self.notes.append(f"{path}: left out, it lists files that are not safetensors")
                continue
            for tensor, name in weight_map.items():
                if assigned.setdefault(tensor, name) != name:
                    raise TensorFileError(f"{path}: tensor {tensor!r} is placed elsewhere by another index beside it")
        return assigned

    def close(self) -> None:
        """Unmap every file."""
        for file in self.files:
            file.close()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Header:
    entries: dict[str, dict[str, Any]]
    data_start: int


def _valid_header(path: Path) -> _Header:
    """The header of a file, checked by the safetensors library and, for what it leaves open, by us."""
    with _as_tensor_file_error(path):
        if not path.exists():
            raise TensorFileError(f"{path}: no such file or folder")
        if not path.is_file():
            raise TensorFileError(f"{path}: not a regular file; name a .safetensors file or a folder of them")
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(32)
            for magic, what in _FOREIGN:
                if start.startswith(magic) and start[8:9] != b"{":  # a header may have such a length
                    raise TensorFileError(
                        f"{path}: this is {what}, not a safetensors file; convert or fetch it first "
                        "(distbench never unpickles)"
                    )
            if len(start) < 8:
                raise TensorFileError(f"{path}: {size} bytes are too few for a safetensors file; copy it again")
            (length,) = struct.unpack("<Q", start[:8])
            if length > size - 8:
                raise TensorFileError(
                    f"{path}: announces a header of {length} bytes in a file of {size}; "
                    "it is truncated or not a safetensors file: copy it again"
                )
            if length > MAX_HEADER_BYTES:
                raise TensorFileError(
                    f"{path}: header of {length} bytes, more than the {MAX_HEADER_BYTES} accepted here; "
                    "if it is genuine, save it as several files"
                )
            with safe_open(str(path), framework="numpy"):
                pass  # opening it validates the whole header against the size of the file
            file.seek(8)
            entries = json.loads(file.read(length).decode(), object_pairs_hook=_without_duplicates)
        entries.pop("__metadata__", None)
        return _Header(entries, data_start=8 + length)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. The library lets the last of two equal names win; here that is refused."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name appears twice in one JSON object")
    return result


def _read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of a Hugging Face style index: tensor name to the plain name of a file beside it."""
    with _as_tensor_file_error(path):
        if not path.is_file():  # a pipe would be waited for
            raise TensorFileError(f"{path}: not a regular file; write the index again or remove it")
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise TensorFileError(f"{path}: larger than the {MAX_INDEX_BYTES} bytes accepted for an index")
        index = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict):
            raise TensorFileError(f"{path}: has no `weight_map` object; write the index again or remove it")
        for name in weight_map.values():
            if not is_plain_name(name):
                raise TensorFileError(
                    f"{path}: {detail(repr(name))} is not the plain name of a file in this folder; paths are refused"
                )
        return weight_map


@contextlib.contextmanager
def _as_tensor_file_error(path: Path) -> Iterator[None]:
    """Turn what reading and parsing `path` can raise into one line that names it."""
    try:
        yield
    except (SafetensorError, ValueError, RecursionError, OSError) as error:
        reason = detail(error) or type(error).__name__
        raise TensorFileError(
            f"{path}: cannot be read ({reason}); check that it was written and copied whole"
        ) from error


def _refuse_missing_shards(folder: Path, names: list[str]) -> None:
    """`x-00001-of-00003.safetensors` says by its name that there are three."""
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            found.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in found.items():
        # Counted, not listed: the announced number is not to be trusted with a loop over it.
        if len(numbers) != count or min(numbers) < 1 or max(numbers) > count:
            raise TensorFileError(
                f"{folder}: {len(numbers)} of the {count} shards of {stem!r} are here; copy the missing ones"
            )
