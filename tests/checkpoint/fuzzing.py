"""`python -m tests.checkpoint.fuzzing [NUMBER] [SEED]`: damaged checkpoints, NUMBER for each file and way; JSON of what came
of them. A process of its own, which has no threads that its children would lack."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from distbench.checkpoint.manifest import MANIFEST, Entry, write_manifest
from distbench.checkpoint.sharded import load_shards
from distbench.checkpoint.shards import PIECES
from distbench.checkpoint.state import STATE
from distbench.export import export
from distbench.trainer import Trainer
from tests.checkpoint.test_sharded import language, save_after, start
from tests.distributed import run_distributed
from tests.fuzz.harness import Target, fuzz
from tests.fuzz.mutations import (
    Damage,
    bytes_damaged,
    json_damaged,
    split_tensors,
    tensors_damaged,
    with_header,
)
from tests.steps import ONE_PROCESS

STEP = "step_00000002"
SHARD = f"{STEP}/rank_00001.safetensors"


@cache
def trainer() -> Trainer:
    """One for all cases: what a refused checkpoint leaves in it is overwritten by the next."""
    return start(ONE_PROCESS, language("single"))[0]


def read(folder: Path) -> None:
    load_shards(trainer(), folder / STEP)
    export(folder / STEP, folder / "model.safetensors")


def signed(folder: Path) -> None:
    """As one would who wants to do harm: the manifest says of the damaged file what it is."""
    sign(folder / STEP)
    read(folder)


def sign(folder: Path) -> None:
    names = [row["name"] for row in json.loads((folder / MANIFEST).read_text())["files"]]
    write_manifest(folder, [Entry.of(folder / name) for name in names])


def pieces_damaged(content: bytes, random: Random) -> bytes:
    """What a shard's metadata says of where its pieces belong."""
    header, data = split_tensors(content)
    metadata = header["__metadata__"]
    metadata[PIECES] = json_damaged(metadata[PIECES].encode(), random).decode(errors="surrogateescape")
    return with_header(json.dumps(header).encode(errors="replace"), data, random)


WAYS: dict[str, tuple[str, Damage, Callable[[Path], Any]]] = {
    "shard": (SHARD, bytes_damaged, read),
    "shard, signed": (SHARD, bytes_damaged, signed),
    "header, signed": (SHARD, tensors_damaged, signed),
    "pieces, signed": (SHARD, pieces_damaged, signed),
    "manifest": (f"{STEP}/{MANIFEST}", json_damaged, read),
    "state": (f"{STEP}/{STATE}", json_damaged, read),
    "state, signed": (f"{STEP}/{STATE}", json_damaged, signed),
}


def main(number: int, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as whole:
        run_distributed(save_after, 2, language("fsdp2"), Path(whole))
        copy = lambda folder: shutil.copytree(whole, folder, dirs_exist_ok=True)  # noqa: E731
        return [asdict(fuzz(Target(name, *way[:2], copy, way[2]), number, seed)) for name, way in WAYS.items()]


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]]
    print(json.dumps(main(*(arguments + [100, 0][len(arguments) :])), indent=1))
