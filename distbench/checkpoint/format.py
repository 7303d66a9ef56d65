"""The safetensors format, written straight from memory and read without mapping. What a file says of itself is checked.

safetensors' own writer leaves a file that has to be read back for a digest, and its reader maps: a mapped file that is cut
short while it is read kills the process. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from distbench.errors import CheckpointError
from distbench.runs.files import parse_json
from distbench.runs.text import detail

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""The format's code -> torch's name, and bytes an element."""
CODES = {name: code for code, (name, _) in DTYPES.items()}

CHUNK = 1 << 20
"""Bytes that are hashed while a core's cache still has them."""
FLUSH = 1 << 24
"""Bytes after which the disk is told to begin with them."""
MAX_HEADER = 1 << 26
"""Bytes: of a few hundred thousand tensors. Parsing takes many times as much memory."""
MAX_DIMS = 64
"""Of a shape that is read: torch's limit."""


@dataclass(frozen=True)
class Form:
    """What a tensor is, without its values."""

    dtype: str
    """The format's code."""
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return DTYPES[self.dtype][1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{detail(self.shape)} {DTYPES[self.dtype][0]}"


@dataclass(frozen=True)
class Stored(Form):
    """A tensor in a file."""

    start: int
    """Of its first byte in the file."""

    @property
    def stop(self) -> int:
        return self.start + self.numel * self.itemsize


# --- writing


class Writer:
    """A new file. Its bytes are hashed on their way, so that it need not be read back.

    A context manager: what is left without `finish` is no file that a reader would take.
    """

    def __init__(self, file: Path, forms: Mapping[str, Form], metadata: Mapping[str, str]) -> None:
        self.order = sorted(forms, key=lambda name: (-forms[name].itemsize, name))
        """In which the tensors are to be written: each begins at a multiple of its itemsize."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name in self.order:
            form, start = forms[name], end
            end += form.numel * form.itemsize
            header[name] = {"dtype": form.dtype, "shape": list(form.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.size = self._flushed = 0
        self._whole = 8 + len(text) + end
        self._digest = xxhash.xxh3_128()
        self._file = file.open("wb", buffering=0)
        self.write(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, data: memoryview) -> None:
        """The next bytes: all of the first tensor's in `order`, in pieces of any size, then the second's."""
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            self._digest.update(chunk)
            self.size += len(chunk)
            while chunk:
                chunk = chunk[self._file.write(chunk) :]
            if self.size - self._flushed >= FLUSH:
                self._begin_to_flush()

    def _begin_to_flush(self) -> None:
        """Linux begins to write these pages out, and keeps them, since they are not clean: the disk works while the rest is
        copied, and there is half as much to wait for in the end."""
        if hasattr(os, "posix_fadvise"):
            handle, length = self._file.fileno(), self.size - self._flushed
            os.posix_fadvise(handle, self._flushed, length, os.POSIX_FADV_DONTNEED)
            self._flushed = self.size

    def finish(self) -> str:
        """Wait for the disk. Returns the XXH3 (128 bits, hex) of what the kernel was given."""
        assert self.size == self._whole, "not what the header says"
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


# --- reading


class Source:
    """An open file, read in pieces. Raises CheckpointError for one that is missing, a link, no plain file, or cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Not blocking: opening a pipe would wait for who writes to it.
            self._handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is missing, or cannot be read: {detail(error)}") from error
        status = os.fstat(self._handle)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise CheckpointError(f"{path} is not a plain file")

    def fill(self, start: int, view: memoryview) -> None:
        """Read as many bytes as `view` has, from byte `start` of the file on."""
        while view:
            try:
                count = os.preadv(self._handle, [view], start)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path} became shorter while it was read")
            start, view = start + count, view[count:]

    def read(self, start: int, count: int) -> bytearray:
        """Bytes, which the file must have."""
        if not 0 <= start <= start + count <= self.size:
            raise CheckpointError(f"{self.path} has {self.size:,} bytes, and no {count:,} from byte {start:,} on")
        data = bytearray(count)
        self.fill(start, memoryview(data))
        return data

    def digest(self) -> str:
        """XXH3 (128 bits, hex) of the whole file."""
        found, scratch = xxhash.xxh3_128(), memoryview(bytearray(CHUNK))
        for chunk in self.chunks(0, self.size, scratch):
            found.update(chunk)
        return found.hexdigest()

    def chunks(self, start: int, stop: int, scratch: memoryview) -> Iterator[memoryview]:
        """The bytes from `start` to `stop`, each chunk in `scratch`, until the next is asked for."""
        while start < stop:
            chunk = scratch[: min(len(scratch), stop - start)]
            self.fill(start, chunk)
            yield chunk
            start += len(chunk)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._handle)


@dataclass(frozen=True)
class Header:
    """What a file says is in it; checked against its size."""

    metadata: dict[str, str]
    tensors: dict[str, Stored]


def read_header(source: Source) -> Header:
    """Raises CheckpointError for what is no safetensors file, or one that cannot be as it says."""
    path = source.path
    length = int.from_bytes(source.read(0, 8), "little")
    if length > min(MAX_HEADER, source.size - 8):
        raise CheckpointError(f"{path} is damaged: its header would have {length:,} bytes")
    try:
        tree = parse_json(bytes(source.read(8, length)))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is no JSON: {detail(error)}") from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is damaged: its header is no object")
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path} is damaged: its metadata is no table of words")
    tensors = {}
    for name, entry in tree.items():
        if (stored := _stored(entry, 8 + length)) is None:
            raise CheckpointError(f"{path} is damaged: {detail(repr(name))} is {detail(repr(entry))}")
        tensors[name] = stored
    _check_gapless(path, tensors, 8 + length, source.size)
    return Header(metadata, tensors)


def _stored(entry: Any, data_start: int) -> Stored | None:
    """An entry of a header; None for one that is not right."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if dtype in DTYPES:
            if is_shape(shape) and is_count(start) and is_count(stop):
                stored = Stored(dtype, tuple(shape), data_start + start)
                return stored if stored.stop == data_start + stop else None
    return None


def _check_gapless(path: Path, tensors: dict[str, Stored], start: int, size: int) -> None:
    """Every byte of the file is one tensor's."""
    edges = sorted((stored.start, stored.stop) for stored in tensors.values())
    for (_, stop), (following, _) in pairwise([(0, start), *edges, (size, size)]):
        if stop != following:
            raise CheckpointError(f"{path} is damaged: tensors overlap or leave a gap at byte {min(stop, following):,}")


def is_count(value: Any) -> bool:
    """A whole number from 0 on, as sizes in a file are; True is none."""
    return type(value) is int and 0 <= value < 2**63


def is_shape(value: Any) -> bool:
    """A list of counts whose product is one, too."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(is_count(size) for size in value)
        and math.prod(value) < 2**63
    )
