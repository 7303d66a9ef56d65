"""What a checkpoint says is checked before it is believed, also where its manifest agrees: each lie has its message, and
none of it reaches the trainer."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distbench.checkpoint.manifest import MANIFEST
from distbench.checkpoint.sharded import load_shards, save_shards
from distbench.checkpoint.shards import PIECES, RANK
from distbench.checkpoint.state import STATE
from distbench.config import Config
from distbench.errors import CheckpointError
from distbench.launching.world import World
from distbench.trainer import Trainer
from tests.checkpoint.fuzzing import sign
from tests.checkpoint.test_sharded import ADAMW, start
from tests.configs import custom
from tests.distributed import run_distributed
from tests.fuzz.mutations import split_tensors
from tests.steps import ONE_PROCESS

STEP = "step_00000002"
FIRST, SECOND = "rank_00000.safetensors", "rank_00001.safetensors"


def model(strategy: str = "single") -> Config:
    """Plain attributes, Python's and numpy's random state, and two steps' moments."""
    return custom("Hidden", strategy, optimizer=ADAMW, global_batch=12, steps=4)


def save_twice(world: World, config: Config, folder: Path) -> None:
    trainer, _ = start(world, config)
    for step in (1, 2):
        trainer.run(until=step)
        save_shards(trainer, folder, {})


@cache
def whole(root: Path) -> Path:
    """Of two ranks, and of steps 1 and 2."""
    run_distributed(save_twice, 2, model("fsdp2"), root)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    shutil.copytree(root, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / STEP


def trainer() -> Trainer:
    made, _ = start(ONE_PROCESS, model())
    made.run(until=1)
    return made


def refusal(folder: Path) -> str:
    """Of a folder whose manifest agrees with it; nothing but tensors' memory may have changed by then."""
    sign(folder)
    made = trainer()
    calls, drawn = made.module.calls, (random.getstate(), np.random.get_state()[2], torch.get_rng_state())
    with pytest.raises(CheckpointError) as caught:
        load_shards(made, folder)
    assert made.step == 1 and made.module.calls == calls
    assert drawn[:2] == (random.getstate(), np.random.get_state()[2]) and torch.equal(drawn[2], torch.get_rng_state())
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 1000
    return message


def test_it_is_read_where_nothing_is_wrong(folder: Path) -> None:
    sign(folder)
    made = trainer()
    load_shards(made, folder)
    assert made.step == 2 and made.module.calls == 2


# --- train_state.json


def rank_with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["ranks"][0].update(changes)


def attribute(value: Any, name: str = "calls", module: str = "") -> Callable[[dict[str, Any]], None]:
    return lambda state: state["ranks"][0]["attributes"].setdefault(module, {}).update({name: value})


def with_value(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({key: value})


def numpy_at(position: int) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["ranks"][0]["numpy_random"].__setitem__(2, position)


WORDS = [0] * 624
LIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no step": (lambda state: state.pop("step"), "step is None, not a whole number"),
    "step true": (with_value("step", True), "step is True, not"),
    "step nan": (with_value("step", float("nan")), "step is nan, not"),
    "step negative": (with_value("step", -1), "step is -1, not"),
    "step huge": (with_value("step", 10**30), "step is 1e+30, not"),
    "another step": (with_value("step", 3), "is of step 3, and not of its folder's"),
    "no ranks": (with_value("ranks", []), "ranks is [], not a list of 2, one a rank"),
    "ranks null": (with_value("ranks", None), "ranks is None, not"),
    "ranks a word": (with_value("ranks", "ab"), "ranks is 'ab', not"),
    "no rank": (with_value("ranks", [None, None]), "rank 0 is no object"),
    "many ranks": (with_value("world_size", 10**15), "ranks is [{"),
    "three ranks": (lambda state: state.update(world_size=3, ranks=state["ranks"][:1] * 3), "is of 3 ranks; its manifest"),
    "scaler": (with_value("scaler", 1.0), "scaler is 1.0, not an object"),
    "scale nan": (with_value("scaler", {"scale": float("nan"), "good_steps": 0}), "scale is nan, not a positive number"),
    "scale inf": (with_value("scaler", {"scale": "inf", "good_steps": 0}), "scale is 'inf', not"),
    "scale 0": (with_value("scaler", {"scale": 0.0, "good_steps": 0}), "scale is 0.0, not"),
    "good_steps": (with_value("scaler", {"scale": 1.0, "good_steps": "1"}), "good_steps is '1', not"),
    "parameters": (with_value("parameters", []), "parameters is [], not a shape and a dtype for each"),
    "a parameter": (with_value("parameters", {"a": [[1], ["float32"]]}), "parameters is {'a': "),
    "a shape": (with_value("parameters", {"a": [[-1], "float32"]}), "parameters is {'a': "),
    "a dtype": (with_value("parameters", {"a": [[1], "object"]}), "parameters is {'a': "),
    "no parameters": (with_value("parameters", {}), "is of another model: "),
    "optimizer": (with_value("optimizer", None), "optimizer is None, not a word"),
    "buffers": (with_value("buffers", [1]), "buffers is [1], not a list of names"),
    "aliases": (with_value("aliases", {"a": 1}), "aliases is {'a': 1}, not a name for each name"),
    "python": (rank_with(python_random=[3, [1, 2], None]), "python_random is [3, [1, 2], None], not what"),
    "python's place": (rank_with(python_random=[3, [*WORDS, 625], None]), "not what random.getstate() gives"),
    "python's words": (rank_with(python_random=[3, [*WORDS[1:], 2**32, 0], None]), "not what random.getstate() gives"),
    "python null": (rank_with(python_random=None), "python_random is None, not"),
    "numpy null": (rank_with(numpy_random=None), "numpy_random is None, not"),
    "numpy's generator": (rank_with(numpy_random=["PCG64", WORDS, 0, 0, 0.0]), "numpy_random is ['PCG64'"),
    "numpy's place": (numpy_at(625), "not what numpy.random.get_state() gives"),
    "numpy's place far away": (numpy_at(-(2**31)), "not what numpy.random.get_state() gives"),
    "attributes": (rank_with(attributes=[]), "attributes is [], not plain values for each module"),
    "an attribute": (attribute([1]), "attributes is {'': {'"),
    "an attribute there is not": (attribute("2", "calles"), "attribute 'calles' of module '' is '2', the model's is None"),
    "a method": (attribute("x", "forward"), "attribute 'forward' of module '' is 'x', the model's is None"),
    "what torch keeps": (attribute("x", "_modules"), "attribute '_modules' of module '' is 'x'"),
    "the class": (attribute("x", "__class__"), "attribute '__class__' of module '' is 'x'"),
    "a torch module's": (attribute(3, "in_features", "head"), "attribute 'in_features' of module 'head' is 3"),
    "another module": (attribute(1, "calls", "nothing"), "attribute 'calls' of module 'nothing' is 1"),
    "terminal": (with_value("optimizer", "\x1b[31mred"), r"has the state of \x1b[31mred, the run's optimizer is AdamW"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_state_is_believed_only_where_it_can_be(name: str, folder: Path) -> None:
    lie, message = LIES[name]
    state = json.loads((folder / STATE).read_text())
    lie(state)
    (folder / STATE).write_text(json.dumps(state))
    assert message in refusal(folder)


# --- shards


def edit(
    folder: Path, change: Callable[[dict[str, Any], dict[str, Any], dict[str, str]], Any], name: str = SECOND
) -> None:
    """Of a shard: its header, the pieces in its metadata, its metadata."""
    header, data = split_tensors((folder / name).read_bytes())
    metadata = header["__metadata__"]
    pieces = json.loads(metadata[PIECES])
    change(header, pieces, metadata)
    metadata[PIECES] = json.dumps(pieces)
    text = json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


WEIGHT = "P/head.weight"


def piece(*value: Any) -> Callable[..., None]:
    return lambda header, pieces, metadata: pieces.update({WEIGHT: list(value)})


NOT_ONCE = f"'{WEIGHT}' has 36 elements, and its pieces are not each of them once"
PIECE_LIES: dict[str, tuple[Callable[..., Any], str]] = {
    "overlap": (piece(17, [6, 6]), NOT_ONCE),
    "gap": (piece(19, [6, 6]), NOT_ONCE),
    "twice": (piece(0, [6, 6]), NOT_ONCE),
    "beyond": (piece(2**62, [6, 6]), NOT_ONCE),
    "negative": (piece(-18, [6, 6]), f"its {PIECES} are no first element and shape each"),
    "nan": (piece(float("nan"), [6, 6]), f"its {PIECES} are no"),
    "null": (piece(None, [6, 6]), f"its {PIECES} are no"),
    "words": (piece("18", [6, 6]), f"its {PIECES} are no"),
    "no shape": (piece(18), f"its {PIECES} are no"),
    "huge": (piece(18, [2**40, 2**40]), f"its {PIECES} are no"),
    "another shape": (piece(18, [36]), f"'{WEIGHT}' is (6, 6) float32 and (36,) float32"),
    "no pieces": (lambda header, pieces, metadata: pieces.clear(), "its pieces are not each of them once"),
    "unknown": (lambda header, pieces, metadata: pieces.update({"P/../x": [0, [1]]}), "it has no piece 'P/../x'"),
    "buffer": (lambda header, pieces, metadata: pieces.update({"R/torch": [0, [5056]]}), "R/torch"),
    "another rank": (
        lambda header, pieces, metadata: metadata.update({RANK: "0"}),
        "was not written by rank 1 at step 2",
    ),
    "matrix": (lambda header, *_: header[WEIGHT].update(shape=[3, 6]), f"it has no piece '{WEIGHT}'"),
    "dtype": (lambda header, *_: header[WEIGHT].update(dtype="I32"), f"'{WEIGHT}' is (6, 6) float32 and (6, 6) int32"),
}


@pytest.mark.parametrize("name", PIECE_LIES)
def test_pieces_make_up_each_tensor_once(name: str, folder: Path) -> None:
    lie, message = PIECE_LIES[name]
    edit(folder, lie)
    found = refusal(folder)
    assert message in found, found


def retyped(header: dict[str, Any], pieces: dict[str, Any], metadata: dict[str, str]) -> None:
    """Everywhere alike."""
    header[WEIGHT]["dtype"] = "I32"


def test_a_shard_of_another_type_is_not_converted(folder: Path) -> None:
    for name in (FIRST, SECOND):
        edit(folder, retyped, name)
    assert "P/head.weight is (6, 6) int32, the model's is (6, 6) float32" in refusal(folder)


def test_a_number_does_not_become_every_moment(folder: Path) -> None:
    def swap(header: dict[str, Any], pieces: dict[str, Any], metadata: dict[str, str]) -> None:
        """The counter's one number under the moments' name."""
        step, moments = "O/step/head.bias", "O/exp_avg/head.bias"
        header[step], header[moments] = header[moments], header[step]
        pieces[step], pieces[moments] = pieces[moments], pieces[step]

    for name in (FIRST, SECOND):
        edit(folder, swap, name)
    assert "the optimizer's has " in refusal(folder)


def test_a_generator_in_no_state_is_refused(folder: Path) -> None:
    for name in (FIRST, SECOND):
        header, data = split_tensors((folder / name).read_bytes())
        start, stop = header["R/torch"]["data_offsets"]
        text = json.dumps(header).encode()
        zeros = data[:start] + bytes(stop - start) + data[stop:]
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + zeros)
    assert "is damaged: random state: " in refusal(folder)


def test_a_buffer_that_is_missing_is_named(tmp_path: Path) -> None:
    made, _ = start(ONE_PROCESS, custom("Normed", "single", optimizer=ADAMW, steps=4))
    made.run(until=2)
    folder = save_shards(made, tmp_path, {})
    header, data = split_tensors((folder / FIRST).read_bytes())
    header["B/other"] = header.pop("B/norm.running_mean")
    text = json.dumps(header).encode()
    (folder / FIRST).write_bytes(struct.pack("<Q", len(text)) + text + data)
    sign(folder)
    with pytest.raises(CheckpointError, match=r"has no buffer norm.running_mean, which the model has"):
        load_shards(made, folder)


# --- files of elsewhere


def exchange(a: Path, b: Path) -> None:
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


SWAPS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ranks": (lambda folder: exchange(folder / FIRST, folder / SECOND), "was not written by rank 0 at step 2"),
    "a rank's of another step": (
        lambda folder: shutil.copy(folder.parent / "step_00000001" / SECOND, folder / SECOND),
        "was not written by rank 1 at step 2",
    ),
    "the state of another step": (
        lambda folder: shutil.copy(folder.parent / "step_00000001" / STATE, folder / STATE),
        "is of step 1, and not of its folder's",
    ),
    "a link": (
        lambda folder: ((folder / SECOND).unlink(), (folder / SECOND).symlink_to(folder / FIRST)),
        "rank_00001.safetensors is missing, or cannot be read",
    ),
    "a pipe": (lambda folder: ((folder / SECOND).unlink(), os.mkfifo(folder / SECOND)), "is not a plain file"),
}


@pytest.mark.parametrize("name", SWAPS)
@pytest.mark.parametrize("signed", [False, True])
def test_a_file_is_not_taken_for_another(name: str, signed: bool, folder: Path) -> None:
    swap, message = SWAPS[name]
    swap(folder)
    if signed and name not in ("a link", "a pipe"):
        assert message in refusal(folder)
    else:
        with pytest.raises(
            CheckpointError,
            match=message if name in ("a link", "a pipe") else r"is damaged|the manifest says|not written",
        ):
            load_shards(trainer(), folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "its manifest names no train_state.json"),
        ([{"name": "../x", "size": 1, "xxh3_128": ""}], "names '../x', which is no file of its folder"),
        ([{"name": "/etc/passwd", "size": 1, "xxh3_128": ""}], "names '/etc/passwd', which is no file"),
        ([{"name": "a", "size": -1, "xxh3_128": ""}], "is no name, size and digest"),
        ([{"name": "a", "size": 1.5, "xxh3_128": ""}], "is no name, size and digest"),
        ([{"name": "a", "size": None, "xxh3_128": ""}], "is no name, size and digest"),
        ([{"name": 1, "size": 1, "xxh3_128": ""}], "is no name, size and digest"),
        ([{"name": "a", "size": 1, "xxh3_128": 0}], "is no name, size and digest"),
        ([[]], "is no name, size and digest"),
        ([{"name": "a", "size": 1, "xxh3_128": ""}] * 2, "names a file twice"),
        ("ab", "no list of files"),
    ],
)
def test_a_manifest_names_files_of_its_folder(files: Any, message: str, folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"schema": 1, "files": files}))
    with pytest.raises(CheckpointError) as caught:
        load_shards(trainer(), folder)
    assert message in str(caught.value)


def test_a_manifest_that_lacks_a_shard(folder: Path) -> None:
    tree = json.loads((folder / MANIFEST).read_text())
    tree["files"] = [row for row in tree["files"] if row["name"] != SECOND]
    (folder / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=f"is of 2 ranks; its manifest .*: {SECOND}"):
        load_shards(trainer(), folder)


def test_numbers_that_json_lacks_are_kept(tmp_path: Path) -> None:
    made = trainer()
    made.module.best, made.module.worst = float("inf"), float("nan")
    folder = save_shards(made, tmp_path, {})
    made.module.best = made.module.worst = 0.0
    load_shards(made, folder)
    assert made.module.best == float("inf") and isinstance(made.module.worst, float) and made.module.worst != 0.0
