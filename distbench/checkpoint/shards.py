"""The tensors of a checkpoint, whoever wrote which part of them: where each piece is, checked before any is believed.

Nothing here imports torch: `export` copies bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from distbench.checkpoint.format import CHUNK, Form, Source, Stored, is_count, is_shape, read_header
from distbench.checkpoint.manifest import Entry, read_manifest
from distbench.checkpoint.state import TrainState
from distbench.errors import CheckpointError
from distbench.runs.files import parse_json
from distbench.runs.text import detail

PIECES = "distbench_pieces"
"""Key of a shard file's metadata: name -> [first element, whole shape]."""
STEP, RANK = "distbench_step", "distbench_rank"
"""Keys of a shard file's metadata: so that it cannot be taken for another."""


def shard_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Piece:
    """Where some neighbouring elements of a tensor are."""

    rank: int
    """Who wrote it."""
    first: int
    """Element of the flattened whole."""
    numel: int
    at: int
    """Byte of the file."""


@dataclass(frozen=True)
class Whole(Form):
    """A tensor that ranks wrote together."""

    pieces: tuple[Piece, ...]
    """In order, each element in one of them; of a tensor without dimensions one rank's."""


@dataclass(frozen=True)
class Target:
    """Bytes of a shard file, and where they shall go."""

    rank: int
    start: int
    stop: int
    view: Callable[[], memoryview]
    """Called when their turn comes: as many bytes of memory."""
    done: Callable[[], None]
    """Called when they are there."""


class Shards:
    """A checkpoint's tensors. Raises CheckpointError where its files do not make up whole ones, or are of another step."""

    def __init__(self, folder: Path, state: TrainState) -> None:
        self.folder = folder
        self.entries = self._entries(state)
        self.own: list[dict[str, Stored]] = []
        """What each rank kept for itself: buffers `B/`, generators `R/`."""
        found: dict[str, list[tuple[Form, Piece]]] = {}
        for rank, entry in enumerate(self.entries):
            with Source(folder / entry.name) as source:
                entry.check_size(source.path, source.size)
                header = read_header(source)
            if (header.metadata.get(STEP), header.metadata.get(RANK)) != (str(state.step), str(rank)):
                raise CheckpointError(f"{folder / entry.name} was not written by rank {rank} at step {state.step}")
            own = dict(header.tensors)
            for name, (first, shape) in self._table(entry, header.metadata).items():
                stored = own.pop(name, None)
                if stored is None or len(stored.shape) != 1 or not name.startswith(("P/", "O/")):
                    raise CheckpointError(f"{folder / entry.name} is damaged: it has no piece {detail(repr(name))}")
                piece = Piece(rank, first, stored.numel, stored.start)
                found.setdefault(name, []).append((Form(stored.dtype, tuple(shape)), piece))
            self.own.append(own)
        self.tensors = {name: self._whole(name, pieces) for name, pieces in found.items()}
        self._kinds: dict[str, list[str]] = {}
        for name in self.tensors:
            match name.split("/", 2):
                case ["O", kind, parameter]:
                    self._kinds.setdefault(parameter, []).append(kind)

    def _entries(self, state: TrainState) -> list[Entry]:
        entries = {entry.name: entry for entry in read_manifest(self.folder)}
        names = [shard_name(rank) for rank in range(state.world_size)]
        if odd := {name for name in entries if name.startswith("rank_")} ^ set(names):
            raise CheckpointError(
                f"{self.folder} is of {state.world_size} ranks; its manifest names others' shards, or not all of "
                f"theirs: {', '.join(sorted(odd)[:3])}"
            )
        return [entries[name] for name in names]

    def _table(self, entry: Entry, metadata: dict[str, str]) -> dict[str, Any]:
        try:
            table = parse_json(metadata.get(PIECES, "").encode())
        except (ValueError, RecursionError):
            table = None
        if isinstance(table, dict) and all(map(_is_place, table.values())):
            return table
        raise CheckpointError(
            f"{self.folder / entry.name} is damaged: its {PIECES} are no first element and shape each"
        )

    def _whole(self, name: str, found: list[tuple[Form, Piece]]) -> Whole:
        form = found[0][0]
        if other := next((other for other, _ in found if other != form), None):
            raise CheckpointError(f"{self.folder} is damaged: {detail(repr(name))} is {form} and {other}")
        pieces = sorted((piece for _, piece in found if piece.numel), key=attrgetter("first"))
        if form.shape == ():
            pieces = pieces[:1]  # counters: each rank has its own, and they are the same
        edges = [0, *accumulate(piece.numel for piece in pieces)]
        if [piece.first for piece in pieces] != edges[:-1] or edges[-1] != form.numel:
            raise CheckpointError(
                f"{self.folder} is damaged: {detail(repr(name))} has {form.numel:,} elements, and its pieces are not "
                "each of them once"
            )
        return Whole(form.dtype, form.shape, tuple(pieces))

    def __getitem__(self, name: str) -> Whole:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no {name}")
        return self.tensors[name]

    def kinds(self, parameter: str) -> list[str]:
        """Which optimizer state there is of a parameter: `O/<kind>/<parameter>`."""
        return self._kinds.get(parameter, [])

    def targets(
        self,
        name: str,
        first: int,
        numel: int,
        view: Callable[[int, int], memoryview],
        done: Callable[[int], None],
    ) -> list[Target]:
        """What to read of a tensor's elements `first` to `first + numel`, flat.

        `view`: of these, from the nth to before the mth, as memory. `done`: told of how many elements have come.
        """
        whole, found = self[name], []
        for piece in whole.pieces:
            low, high = max(first, piece.first), min(first + numel, piece.first + piece.numel)
            if low < high:
                start, stop = (piece.at + (edge - piece.first) * whole.itemsize for edge in (low, high))
                found.append(
                    Target(
                        piece.rank,
                        start,
                        stop,
                        lambda low=low, high=high: view(low - first, high - first),  # type: ignore[misc]
                        lambda count=high - low: done(count),  # type: ignore[misc]
                    )
                )
        return found

    def read(self, targets: Iterable[Target], verify: Callable[[int], bool]) -> None:
        """Fill all targets. Files that `verify` names by their rank are read whole, once, and held against the manifest on
        the way; of the others what is wanted. Raises CheckpointError, by when targets may be filled with anything."""
        wanted: dict[int, list[Target]] = {}
        for target in targets:
            wanted.setdefault(target.rank, []).append(target)
        for rank, entry in enumerate(self.entries):
            here = sorted(wanted.get(rank, []), key=attrgetter("start"))
            if not here and not verify(rank):
                continue
            with Source(self.folder / entry.name) as source:
                if verify(rank):
                    entry.check_digest(source.path, _read_whole(source, here))
                else:
                    for target in here:
                        source.fill(target.start, target.view())
                        target.done()

    def read_own(self, rank: int, prefix: str) -> dict[str, tuple[Form, bytearray]]:
        """What a rank kept for itself; of one that there was not, what rank 0 did."""
        rank = rank if rank < len(self.own) else 0
        with Source(self.folder / self.entries[rank].name) as source:
            return {
                name.removeprefix(prefix): (stored, source.read(stored.start, stored.stop - stored.start))
                for name, stored in sorted(self.own[rank].items())
                if name.startswith(prefix)
            }


def _is_place(value: Any) -> bool:
    match value:
        case [first, shape]:
            return is_count(first) and is_shape(shape)
    return False


def _read_whole(source: Source, targets: list[Target]) -> str:
    """Read a file from its beginning to its end, what is wanted straight to where it shall go. Returns its digest."""
    digest, scratch, at = xxhash.xxh3_128(), memoryview(bytearray(CHUNK)), 0

    def skip_to(stop: int) -> None:
        for chunk in source.chunks(at, stop, scratch):
            digest.update(chunk)

    for target in targets:
        skip_to(target.start)
        at, view = target.start, target.view()
        for start in range(0, len(view), CHUNK):
            chunk = view[start : start + CHUNK]
            source.fill(at + start, chunk)
            digest.update(chunk)
        target.done()
        at = target.stop
    skip_to(source.size)
    return digest.hexdigest()
