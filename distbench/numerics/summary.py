"""Gradient summaries: what two runs are compared by when neither kept its gradients.

A summary holds a few hundred numbers per parameter, each a SUM or a MAX over elements, so partial summaries
of any sharding merge into the same whole. Fields and file format: docs/gradient-summaries.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from distbench.errors import SummaryError
from distbench.numerics import summary_torch as fields
from distbench.numerics.shards import DTYPES, Shard
from distbench.runs.text import detail

FORMAT = "distbench.gradient-summary"
SCHEMA = 1
MAX_HEADER_BYTES = 64 << 20
"""Bound on a file's header: names and shapes (about a million parameters) and the caller's metadata."""
MAX_METADATA_BYTES = 1 << 20

CHUNK = 1 << 20
"""Elements a thread takes at a time. Fixed, so that sums do not depend on the number of threads."""

_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)


@dataclass(frozen=True)
class ParameterSummary:
    """The fields of one parameter's gradient. All but counts and digest are over the finite elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`float32`, ...; empty if every rank's gradient is None."""
    aliases: tuple[str, ...]
    """Other names of the same (tied) parameter."""
    digest: int
    """64 bits; equal for equal shape and dtype means bitwise equal, whatever the sharding."""
    elements: int
    """Elements seen: `numel` if the shards cover the tensor once, a multiple if replicas were summed."""
    zeros: int
    subnormals: int
    nans: int
    infs: int
    nones: int
    """Ranks whose gradient was None."""
    exponents: np.ndarray
    """int64 [256]: bin k counts 2^(k-127) <= |g| < 2^(k-126); bin 0 the nonzero below, 255 those above."""
    sum: float
    sum_abs: float
    sum_squares: float
    max_abs: float
    projections: np.ndarray
    """float64 [16]: sum of +-g, with signs keyed on seed, name and global flat index."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_none(self) -> bool:
        """The gradient is None: on some rank it is, and no rank has an element of it."""
        return self.nones > 0 and self.elements == 0

    @property
    def complete(self) -> bool:
        """Whether the shards covered the tensor exactly once (or the gradient is None)."""
        return self.is_none or self.elements == self.numel

    @property
    def nonfinite(self) -> int:
        """NaNs and infinities."""
        return self.nans + self.infs

    @property
    def norm(self) -> float:
        """L2 norm of the finite elements."""
        return math.sqrt(self.sum_squares)


@dataclass(frozen=True)
class Summary:
    """Summaries of several parameters: columns over parameters, in three arrays by the way they merge."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    aliases: tuple[tuple[str, ...], ...]
    seed: int
    integers: np.ndarray
    """int64 [parameters, INTEGERS], merged by SUM mod 2^64."""
    floats: np.ndarray
    """float64 [parameters, FLOATS], merged by SUM."""
    maxima: np.ndarray
    """float64 [parameters], merged by MAX."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the writer of the file said about it."""

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[ParameterSummary]:
        return (self._parameter(i) for i in range(len(self)))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> ParameterSummary:
        if name not in self.names:
            raise KeyError(name)
        return self._parameter(self.names.index(name))

    def _parameter(self, i: int) -> ParameterSummary:
        integers, floats = self.integers[i], self.floats[i]
        return ParameterSummary(
            name=self.names[i],
            shape=self.shapes[i],
            dtype=self.dtypes[i],
            aliases=self.aliases[i],
            digest=int(integers[fields.DIGEST]) & fields.MASK64,
            elements=int(integers[fields.ELEMENTS]),
            zeros=int(integers[fields.ZEROS]),
            subnormals=int(integers[fields.SUBNORMALS]),
            nans=int(integers[fields.NANS]),
            infs=int(integers[fields.INFS]),
            nones=int(integers[fields.NONES]),
            exponents=integers[fields.EXPONENTS :],
            sum=float(floats[fields.SUM]),
            sum_abs=float(floats[fields.SUM_ABS]),
            sum_squares=float(floats[fields.SUM_SQUARES]),
            max_abs=float(self.maxima[i]),
            projections=floats[fields.PROJECTED :],
        )

    def select(self, names: Sequence[str]) -> Summary:
        """These parameters only, in this order. Raises KeyError for one that is not here."""
        row = {name: i for i, name in enumerate(self.names)}
        rows = [row[name] for name in names]
        return replace(
            self,
            names=tuple(names),
            shapes=tuple(self.shapes[i] for i in rows),
            dtypes=tuple(self.dtypes[i] for i in rows),
            aliases=tuple(self.aliases[i] for i in rows),
            integers=self.integers[rows],
            floats=self.floats[rows],
            maxima=self.maxima[rows],
        )

    def merge(self, other: Summary) -> Summary:
        """Both together: fields of a parameter in both are combined, others are kept as they are.

        Exact and independent of the order but for the float64 sums (docs/gradient-summaries.md).
        Raises SummaryError if a parameter has two shapes or dtypes, or the seeds differ.
        """
        if self.seed != other.seed:
            raise SummaryError(
                f"summaries of projection seeds {self.seed} and {other.seed} cannot be merged: use one seed"
            )
        shapes: dict[str, list[tuple[int, ...]]] = {}
        dtypes: dict[str, list[str]] = {}
        aliases: dict[str, set[str]] = {}
        for part in (self, other):
            for name, shape, dtype, tied in zip(part.names, part.shapes, part.dtypes, part.aliases, strict=True):
                shapes.setdefault(name, []).append(shape)
                dtypes.setdefault(name, []).extend([dtype] if dtype else [])
                aliases.setdefault(name, set()).update(tied)
        merged = _empty(
            tuple(shapes),
            tuple(_only(name, "shapes", found) for name, found in shapes.items()),
            tuple(_only(name, "dtypes", found or [""]) for name, found in dtypes.items()),
            tuple(tuple(sorted(found)) for found in aliases.values()),
            self.seed,
        )
        row = {name: i for i, name in enumerate(merged.names)}
        for part in (self, other):
            rows = [row[name] for name in part.names]
            merged.integers[rows] += part.integers
            with np.errstate(over="ignore", invalid="ignore"):  # the square of a float64 may be inf
                merged.floats[rows] += part.floats
            merged.maxima[rows] = np.maximum(merged.maxima[rows], part.maxima)
        return merged

    def reduce(self, group: dist.ProcessGroup | None) -> Summary:
        """The whole, on every rank, from each rank's part: three all-reduces for all parameters together.

        Args:
            group: the ranks that *shard* the parameters, and only those: summing over replicas counts every
                gradient as often as it is replicated (`complete` is then false). None: nothing to reduce.

        Raises:
            SummaryError: on every rank, if ranks hold other parameters, seeds or dtypes than each other.
        """
        if group is None:
            return self
        device = _collective_device(group)
        known = np.array([_DTYPE_NAMES.index(name) if name else -1 for name in self.dtypes], dtype=np.float64)
        layout = self._layout()
        # MAX goes first: it also tells ranks that disagree. Padded, so that a parameter more or less on some
        # rank ends in that message and not in a collective of unequal sizes.
        head = np.array([layout, -layout])
        unknown = np.where(known < 0, -len(DTYPES), -known)
        maxima = np.concatenate([head, self.maxima, known, unknown])
        padded = np.zeros(-(-maxima.size // 4096) * 4096)
        padded[: maxima.size] = maxima
        padded = _all_reduce(padded, dist.ReduceOp.MAX, group, device)
        if padded[0] != layout or padded[1] != -layout:
            raise SummaryError(
                "gradient summaries differ in parameter names, shapes or seed between ranks: summarize the "
                "same parameters everywhere, with an empty shard where a rank holds nothing of one"
            )
        top, high, low = np.split(padded[2 : maxima.size], 3)
        dtypes = []
        for name, most, least in zip(self.names, high, -low, strict=True):
            if most >= 0 and most != least:
                one, another = _DTYPE_NAMES[int(least)], _DTYPE_NAMES[int(most)]
                raise SummaryError(f"gradient of {name} is {one} on one rank and {another} on another")
            dtypes.append(_DTYPE_NAMES[int(most)] if most >= 0 else "")
        integers = _all_reduce(self.integers, dist.ReduceOp.SUM, group, device)
        floats = _all_reduce(self.floats, dist.ReduceOp.SUM, group, device)
        return replace(self, dtypes=tuple(dtypes), integers=integers, floats=floats, maxima=top)

    def _layout(self) -> float:
        """What ranks must agree on, as 48 bits: exact in the float64 that travels with the maxima."""
        return _hash48(json.dumps([self.names, self.shapes, self.seed]))

    def save(self, path: Path | str, metadata: Mapping[str, str] | None = None) -> None:
        """Write the summary as safetensors, atomically: the file is there as a whole or not at all.

        Raises SummaryError if `metadata` (kept as is, text to text) or the list of parameters is too large.
        """
        path = Path(path)
        user = json.dumps(dict(self.metadata if metadata is None else metadata))
        if len(user.encode()) > MAX_METADATA_BYTES:
            raise SummaryError(f"metadata of {len(user.encode())} bytes; at most {MAX_METADATA_BYTES} fit")
        tensors = _to_columns(self)
        parameters = zip(self.names, self.shapes, self.dtypes, self.aliases, strict=True)
        header = {
            "schema": SCHEMA,
            "seed": self.seed,
            "metadata": json.loads(user),
            "parameters": [dict(zip(_PARAMETER_KEYS, values, strict=True)) for values in parameters],
        }
        header["sha256"] = _checksum(header, tensors)
        # One key: safetensors keeps several in no order, and equal summaries are to be equal files.
        content = to_safetensors(tensors, metadata={FORMAT: json.dumps(header)})
        if struct.unpack("<Q", content[:8])[0] > MAX_HEADER_BYTES:
            raise SummaryError(f"{len(self)} parameters do not fit in a header of {MAX_HEADER_BYTES} bytes")
        _write_atomically(path, content)

    @classmethod
    def load(cls, path: Path | str) -> Summary:
        """Read a file that `save` wrote. Parsed as data only, and every field checked.

        Raises SummaryError if the file is missing, damaged, truncated, foreign, or of a newer schema.
        """
        path = Path(path)
        try:
            return _load(path)
        except SummaryError:
            raise
        except (OSError, SafetensorError) as error:
            raise SummaryError(f"{path}: not readable as safetensors, damaged or foreign ({detail(error)})") from error
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
            reason = f"{type(error).__name__}: {detail(error)}"
            raise SummaryError(f"{path}: damaged gradient summary ({reason})") from error


def summarize(shards: Iterable[Shard], seed: int = 0, aliases: Mapping[str, Sequence[str]] | None = None) -> Summary:
    """This rank's part of a summary: whole after `merge` or `reduce` over the ranks that shard parameters.

    Args:
        shards: what this rank holds; every parameter at least once, in the same order on every rank, with an
            empty shard where it holds nothing. Several shards of one name are parts of one tensor.
        seed: of the projections. Only summaries with equal seeds can be compared.
        aliases: other names of tied parameters.

    CPU tensors are read by a compiled kernel in `torch.get_num_threads()` threads if numba is importable;
    others by torch operations on their device. Extra memory does not grow with the tensors.
    """
    shards, tied = list(shards), aliases or {}
    pieces: dict[str, list[Shard]] = {}
    for shard in shards:
        pieces.setdefault(shard.name, []).append(shard)
    names, row = tuple(pieces), {name: i for i, name in enumerate(pieces)}
    shapes, dtypes = [], []
    for name, same in pieces.items():
        shapes.append(_only(name, "shapes", [shard.shape for shard in same]))
        known = [str(shard.values.dtype).removeprefix("torch.") for shard in same if shard.values is not None]
        dtypes.append(_only(name, "dtypes", known or [""]))
    summary = _empty(names, tuple(shapes), tuple(dtypes), tuple(tuple(tied.get(name, ())) for name in names), seed)
    for shard in shards:
        summary.integers[row[shard.name], fields.NONES] += shard.values is None

    for name, (integers, floats, maximum) in _scan_all(shards, seed):
        i = row[name]
        summary.integers[i] += integers
        with np.errstate(over="ignore", invalid="ignore"):
            summary.floats[i] += floats
        summary.maxima[i] = max(summary.maxima[i], maximum)
    return summary


def same_everywhere(texts: Sequence[str], group: dist.ProcessGroup) -> list[bool]:
    """Whether each text is the same on every rank of the group: one small all-reduce of 48-bit hashes."""
    words = np.array([_hash48(text) for text in texts])
    reduced = _all_reduce(np.concatenate([words, -words]), dist.ReduceOp.MAX, group, _collective_device(group))
    return [bool(most == -least) for most, least in zip(*np.split(reduced, 2), strict=True)]


def prepare() -> None:
    """Load the kernels, or compile them (once a machine, seconds). Starts no thread: safe before a fork."""
    _kernels()


# --- reading the elements

Rows = tuple[np.ndarray, np.ndarray, float]


@cache
def _kernels() -> Any:
    """The compiled kernels, or None where they cannot be had."""
    try:
        from distbench.numerics import summary_kernels

        for dtype in (torch.float32, torch.bfloat16, torch.float64):  # all the specialisations there are
            _scan_chunk(summary_kernels, Shard.whole("", torch.zeros(1, dtype=dtype)), 0, 1, 0)
        return summary_kernels
    except ImportError:
        return None
    except Exception as error:  # a broken numba or cache folder must not cost the run
        warnings.warn(f"gradient summaries fall back to torch, slower: numba failed ({error})", stacklevel=2)
        return None


def _scan_all(shards: list[Shard], seed: int) -> Iterator[tuple[str, Rows]]:
    filled = [shard for shard in shards if shard.values is not None and shard.values.numel() > 0]
    fast = [shard for shard in filled if _is_fast(shard)]
    for shard in filled:
        if not _is_fast(shard):
            yield shard.name, fields.scan(_on_capable_device(shard), seed)

    kernels = _kernels() if fast else None

    def work(batch: list[tuple[Shard, int, int]]) -> list[tuple[str, Rows]]:
        return [(shard.name, _scan_chunk(kernels, shard, first, last, seed)) for shard, first, last in batch]

    batches, threads = _batches(fast), torch.get_num_threads()
    if threads == 1 or len(batches) < 2:
        for batch in batches:
            yield from work(batch)
        return
    with ThreadPoolExecutor(min(threads, len(batches))) as pool:  # gone before any later fork
        for done in pool.map(work, batches):  # in order: sums must not depend on scheduling
            yield from done


def _is_fast(shard: Shard) -> bool:
    assert shard.values is not None
    return shard.values.device.type == "cpu" and _kernels() is not None


def _on_capable_device(shard: Shard) -> Shard:
    """MPS and the like have no float64: their shards are read on the CPU."""
    assert shard.values is not None
    if shard.values.device.type in ("cpu", "cuda", "xpu"):
        return shard
    return replace(shard, values=shard.values.cpu())


def _batches(shards: list[Shard]) -> list[list[tuple[Shard, int, int]]]:
    """Work for a thread at a time: chunks of large shards, or several small shards."""
    batches: list[list[tuple[Shard, int, int]]] = [[]]
    size = 0
    for shard in shards:
        assert shard.values is not None
        count = shard.values.numel()
        for first in range(0, count, CHUNK):
            last = min(first + CHUNK, count)
            if size and size + last - first > CHUNK:
                batches.append([])
                size = 0
            batches[-1].append((shard, first, last))
            size += last - first
    return batches if size else []


def _scan_chunk(kernels: Any, shard: Shard, first: int, last: int, seed: int) -> Rows:
    """Local elements [first, last) of a CPU shard, by the compiled kernel."""
    assert shard.values is not None
    values = shard.values.detach().view(-1)[first:last]
    integers, floats = np.zeros(fields.INTEGERS, np.int64), np.zeros(fields.FLOATS)
    place = (first, shard.start, shard.run, shard.stride, np.uint64(fields.projection_key(shard.name, seed)))
    if values.dtype == torch.float64:
        array = values.numpy()
        top = kernels.scan_float64(array.view(np.uint32), array.view(np.uint64), *place, integers, floats)
        return integers, floats, fields.decode(int(top), torch.float64)
    if values.dtype == torch.float32:
        kind, array = kernels.FLOAT32, values.numpy()
        raw = array.view(np.uint32)
        bits = raw
    else:
        kind = kernels.BFLOAT16 if values.dtype == torch.bfloat16 else kernels.FLOAT16
        raw = values.view(torch.int16).numpy().view(np.uint16)
        bits, array = np.empty(0, np.uint32), np.empty(0, np.float32)
    top = kernels.scan(raw, bits, array, kind, *place, integers, floats)
    return integers, floats, fields.decode(int(top), torch.float32)


# --- combining and moving


def _empty(
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    aliases: tuple[tuple[str, ...], ...],
    seed: int,
) -> Summary:
    count = len(names)
    return Summary(
        names,
        shapes,
        dtypes,
        aliases,
        seed,
        np.zeros((count, fields.INTEGERS), np.int64),
        np.zeros((count, fields.FLOATS)),
        np.zeros(count),
    )


def _hash48(text: str) -> float:
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little"))


def _only(name: str, what: str, values: list[Any]) -> Any:
    if any(value != values[0] for value in values):
        raise SummaryError(f"parts of {name} have different {what}: {sorted(set(map(str, values)))}")
    return values[0]


def _collective_device(group: dist.ProcessGroup) -> torch.device:
    """Where this group's collectives take their tensors: the CPU wherever it has a CPU backend."""
    backends = dist.distributed_c10d.get_backend_config(group)  # "cpu:gloo,cuda:nccl", or one of the two
    if "gloo" in backends or "mpi" in backends or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _all_reduce(
    array: np.ndarray, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, device: torch.device
) -> np.ndarray:
    tensor = torch.from_numpy(array).clone().to(device)
    dist.all_reduce(tensor, op, group=group)
    if device.type == "cpu":
        _wait_until_released(tensor)
    return tensor.cpu().numpy()


def _wait_until_released(tensor: torch.Tensor) -> None:
    """Wait until Gloo's thread has let go of a tensor that it has reduced, a second at most.

    It takes the GIL to do so. Where this was the last collective and a DistributedDataParallel holds the last reference
    to the process group, the group is destroyed by a thread that has the GIL and waits for Gloo's: both wait for ever
    (torch 2.13; a rank of a small script that ended right after this hung so).
    """
    for _ in range(10_000):
        if tensor._use_count() <= 1:
            return
        time.sleep(1e-4)


# --- the file

_PARAMETER_KEYS = ("name", "shape", "dtype", "aliases")
_COUNTS = {
    "elements": fields.ELEMENTS,
    "zeros": fields.ZEROS,
    "subnormals": fields.SUBNORMALS,
    "nans": fields.NANS,
    "infs": fields.INFS,
    "nones": fields.NONES,
}
_SUMS = {"sum": fields.SUM, "sum_abs": fields.SUM_ABS, "sum_squares": fields.SUM_SQUARES}


def _to_columns(summary: Summary) -> dict[str, np.ndarray]:
    """The file's tensors: one a field, with the parameters along dim 0."""
    integers, floats = summary.integers, summary.floats
    columns = {name: integers[:, column] for name, column in _COUNTS.items()}
    columns |= {name: floats[:, column] for name, column in _SUMS.items()}
    columns |= {
        "digest": integers[:, fields.DIGEST].view(np.uint64),
        "exponents": integers[:, fields.EXPONENTS :],
        "max_abs": summary.maxima,
        "projections": floats[:, fields.PROJECTED :],
    }
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> str:
    """Over everything that means something, so that one flipped bit is noticed."""
    meaning = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def _load(path: Path) -> Summary:
    _check_header_size(path)
    with safe_open(path, framework="numpy") as file:
        header = _header(path, file.metadata() or {})
        parameters = header["parameters"]
        if len(parameters) * 8 * (fields.INTEGERS + fields.FLOATS + 1) > path.stat().st_size:
            raise ValueError(f"too short for {len(parameters)} parameters")  # before making room for them
        names = tuple(str(entry["name"]) for entry in parameters)
        shapes = tuple(tuple(int(size) for size in entry["shape"]) for entry in parameters)
        dtypes = tuple(str(entry["dtype"]) for entry in parameters)
        aliases = tuple(tuple(str(alias) for alias in entry["aliases"]) for entry in parameters)
        summary = _empty(names, shapes, dtypes, aliases, int(header["seed"]))
        expected = _to_columns(summary)
        if set(file.keys()) != set(expected):
            raise ValueError(f"tensors {sorted(set(file.keys()) ^ set(expected))} are missing or unknown")
        tensors = {}
        for name, like in expected.items():
            if tuple(file.get_slice(name).get_shape()) != like.shape:
                raise ValueError(f"tensor {name} does not have the shape {like.shape}")
            tensors[name] = file.get_tensor(name)
            if tensors[name].dtype != like.dtype:
                raise ValueError(f"tensor {name} has dtype {tensors[name].dtype}, not {like.dtype}")
    if header["sha256"] != _checksum(header, tensors):
        raise ValueError("contents do not match their checksum")
    if len(set(names)) != len(names) or any(not 0 <= size < 2**63 for shape in shapes for size in shape):
        raise ValueError("repeated names, or sizes that no tensor has")
    if abs(summary.seed) >= 2**64:
        raise ValueError("a seed of more than 64 bits")
    if not set(dtypes) <= {"", *_DTYPE_NAMES}:
        raise ValueError(f"unknown dtypes {sorted(set(dtypes) - {'', *_DTYPE_NAMES})}")

    for name, column in _COUNTS.items():
        summary.integers[:, column] = tensors[name]
    for name, column in _SUMS.items():
        summary.floats[:, column] = tensors[name]
    summary.integers[:, fields.DIGEST] = tensors["digest"].view(np.int64)
    summary.integers[:, fields.EXPONENTS :] = tensors["exponents"]
    summary.floats[:, fields.PROJECTED :] = tensors["projections"]
    summary.maxima[:] = tensors["max_abs"]
    metadata = {str(key): str(value) for key, value in header["metadata"].items()}
    return replace(summary, metadata=metadata)


def _check_header_size(path: Path) -> None:
    """Before anything is parsed: a few bytes must not make the reader allocate gigabytes."""
    size = path.stat().st_size
    if not path.is_file():  # a pipe would be waited for
        raise SummaryError(f"{path}: not a regular file")
    with path.open("rb") as file:
        start = file.read(8)
    if len(start) < 8:
        raise SummaryError(f"{path}: {size} bytes, too short for a safetensors file; truncated or foreign")
    (header,) = struct.unpack("<Q", start)
    if header > min(size - 8, MAX_HEADER_BYTES):
        raise SummaryError(f"{path}: truncated or foreign (a header of {header} bytes in a file of {size})")


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The file's own header, once it is known to be ours and of a schema this code knows."""
    if FORMAT not in metadata:
        raise SummaryError(f"{path}: a safetensors file, but not a gradient summary (no {FORMAT} in its header)")
    header: dict[str, Any] = json.loads(metadata[FORMAT])
    schema = int(header["schema"])
    if schema > SCHEMA:
        raise SummaryError(
            f"{path}: schema {detail(schema)}, newer than the {SCHEMA} this distbench reads: update distbench"
        )
    if schema < 1:
        raise ValueError(f"schema {schema}")
    return header


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
