"""State that the user's modules keep outside of parameters and buffers comes back, bit for bit, or the run says that it does
not."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distbench.checkpoint.attributes import MAX_DEPTH, attributes_of, is_dense
from distbench.checkpoint.keeping import Keeper
from distbench.checkpoint.sharded import TREE, load_shards, save_shards
from distbench.checkpoint.state import STATE
from distbench.config import Checkpoint, Config
from distbench.errors import CheckpointError
from distbench.numerics.state import restore, snapshot
from distbench.runs.folder import RunFolder, read_record
from distbench.trainer import Trainer
from tests.checkpoint.fuzzing import sign
from tests.checkpoint.test_sharded import ADAMW, HALF, WHOLE, everything, start, straight_and_resumed
from tests.configs import STRATEGIES, custom, small
from tests.distributed import run_distributed
from tests.fuzz.mutations import split_tensors
from tests.steps import ONE_PROCESS

SHARD = "rank_00000.safetensors"


def model(strategy: str = "single", target: str = "Keeps", **changes: Any) -> Config:
    return custom(target, strategy, optimizer=ADAMW, accumulation=2, global_batch=12, steps=WHOLE, **changes)


def configs(ranks: int) -> dict[str, Config]:
    if ranks == 1:
        return {"single": model(), "single bf16": model(precision="bf16")}
    names = [name for name in STRATEGIES if name != "single"]
    return {name: model(name) for name in names} | {"ddp bf16": model("ddp", precision="bf16")}


@cache
def resumed(ranks: int, root: Path) -> list[dict[str, Any]]:
    if ranks == 1:
        return [straight_and_resumed(ONE_PROCESS, configs(1), root)]
    return run_distributed(straight_and_resumed, ranks, configs(ranks), root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attributes")


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (1, 2) for name in configs(ranks)])
def test_a_resumed_run_goes_on_with_all_of_it(ranks: int, name: str, root: Path) -> None:
    """The state takes part in the loss, and each rank has its own."""
    for rank in resumed(ranks, root / str(ranks)):
        straight, after = rank[name]
        assert after == straight and len(after) == WHOLE - HALF
    first, second = (
        everything(root / str(ranks) / name / side / f"step_{WHOLE:08d}") for side in ("straight", "resumed")
    )
    assert first.keys() == second.keys() and "B/late" in first
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


def tree_of(folder: Path) -> dict[str, Any]:
    header, data = split_tensors((folder / SHARD).read_bytes())
    begin, end = header[f"A/{TREE}"]["data_offsets"]
    return json.loads(data[begin:end])


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp-flat", "fsdp2", "ddp", "ddp bf16"])
def test_wrappers_own_are_not_the_users(strategy: str, root: Path) -> None:
    """Under each strategy a shard keeps what the plain model keeps, of the plain model's modules."""
    resumed(1, root / "1")
    resumed(2, root / "2")
    folders = (root / "1" / "single", root / "2" / strategy)
    plain, wrapped = (tree_of(folder / "straight" / f"step_{HALF:08d}") for folder in folders)
    assert plain["made"] == wrapped["made"] == {"attributes": {"": ["best", "made"]}, "buffers": ["late"]}
    # A wrapper that replaces parameters leaves the model with a copy where it had a view.
    names = [
        {name: set(tree["values"][name]) - {"parts", "weight_view"} for name in tree["values"]}
        for tree in (plain, wrapped)
    ]
    assert names[0] == names[1]


def test_a_model_without_such_state_has_none_in_its_shard(tmp_path: Path) -> None:
    for index, config in enumerate((small("single", optimizer=ADAMW), custom("Hidden", "single", optimizer=ADAMW))):
        trainer, _ = start(ONE_PROCESS, config)
        trainer.run(until=1)
        header, _ = split_tensors((save_shards(trainer, tmp_path / str(index), {}) / SHARD).read_bytes())
        assert not [name for name in header if name.startswith("A/")]


def state_of(trainer: Trainer) -> Any:
    kept = attributes_of(trainer).collect()
    return kept.plain, kept.trees, {key: tensor.tolist() for key, tensor in kept.tensors.items()}


def test_what_was_made_since_is_taken_away(tmp_path: Path) -> None:
    """A run that starts from another has been through its gate before."""
    early, _ = start(ONE_PROCESS, model())
    early.run(until=1)
    folder, before = save_shards(early, tmp_path, {}), state_of(early)
    late, _ = start(ONE_PROCESS, model())
    late.run(until=4)
    assert late.module.best == 8.0
    load_shards(late, folder)
    assert state_of(late) == before
    assert late.module.best is None and not hasattr(late.module, "late") and not hasattr(late.module, "made")


def test_a_snapshot_of_the_gate_holds_all_of_it() -> None:
    trainer, _ = start(ONE_PROCESS, model())
    trainer.run(until=1)
    saved, before = snapshot(trainer), state_of(trainer)
    trainer.run(until=4)
    restore(trainer, saved)
    assert state_of(trainer) == before
    assert trainer.module.blocks[0].seen is trainer.module.history, "still one list"


# --- what is not kept


def told(target: str, root: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    config = model(target=target, checkpoint=Checkpoint(every=1, keep_last=9))
    trainer, _ = start(ONE_PROCESS, config)
    folder = RunFolder.create(root)
    Keeper(config, folder, trainer).run(until=3, since=0)
    found = read_record(root)["saving"]["not_kept"]
    assert capsys.readouterr().err == "".join(f"distbench: note: {sentence}\n" for sentence in found)
    return found


def test_what_changes_and_is_not_kept_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told("Forgets", tmp_path, capsys) == [
        "draws of the model changes and is not kept in checkpoints: a resumed run may differ",
        "long of module blocks.1 has more than 100,000 values and is not kept in checkpoints: a resumed run may differ",
    ]
    header, _ = split_tensors((tmp_path / "checkpoints" / "step_00000003" / SHARD).read_bytes())
    assert not [name for name in header if name.startswith("A/")]


@pytest.mark.parametrize("target", ["Keeps", "Hidden", "Normed", "Tied"])
def test_and_nothing_where_all_is(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(target, tmp_path, capsys) == []


@pytest.mark.parametrize("kind", ["none", "bytes", "dict", "set", "object"])
def test_extra_state_that_is_no_tensor_is_told(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model(target="Extra", checkpoint=Checkpoint(every=1))
    config = replace(config, model=replace(config.model, kwargs={"kind": kind}))
    trainer, _ = start(ONE_PROCESS, config)
    keeper = Keeper(config, RunFolder.create(tmp_path), trainer)
    keeper.run(until=2, since=0)
    keeper.tell_what_is_not_kept()
    sentence = "_extra_state is no tensor and is not kept, nor is it in model.safetensors"
    assert capsys.readouterr().err == f"distbench: note: {sentence}\n"
    assert read_record(tmp_path)["saving"]["not_kept"] == [sentence]
    assert set(trainer.strategy.full_state(trainer.module)) >= {"blocks.0._extra_state", "head.weight"}
    assert "get_extra_state" not in vars(trainer.module)
    trainer.module.blocks[0].count = None
    load_shards(trainer, tmp_path / "checkpoints" / "step_00000001")
    assert trainer.module.blocks[0].count.tolist() == [2, 3, 4], "micro-batches of one step"


# --- what is believed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    trainer, _ = start(ONE_PROCESS, model())
    trainer.run(until=HALF)
    return save_shards(trainer, tmp_path, {})


def refusal(folder: Path) -> str:
    sign(folder)
    trainer, _ = start(ONE_PROCESS, model())
    trainer.run(until=1)
    before = state_of(trainer)
    with pytest.raises(CheckpointError) as caught:
        load_shards(trainer, folder)
    assert state_of(trainer) == before
    return str(caught.value)


def with_tree(folder: Path, change: Any) -> None:
    """The same tensors, and another tree."""
    header, data = split_tensors((folder / SHARD).read_bytes())
    begin, end = header[f"A/{TREE}"]["data_offsets"]
    tree = json.loads(data[begin:end])
    change(tree)
    text = json.dumps(tree).encode()
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [at + (len(text) - (end - begin)) * (at >= end) for at in entry["data_offsets"]]
    header[f"A/{TREE}"] |= {"shape": [len(text)], "data_offsets": [begin, begin + len(text)]}
    head = json.dumps(header).encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(head)) + head + data[:begin] + text + data[end:])


def deep(depth: int) -> Any:
    return ["list", [deep(depth - 1)]] if depth else 1


def own(**values: Any) -> Any:
    return lambda tree: tree["values"][""].update(values)


LIES: dict[str, tuple[Any, str]] = {
    "no tree": (lambda t: t.clear(), "its attributes are no tree"),
    "a method": (own(forward=["list", []]), "attribute 'forward' of module '' is"),
    "a method, made": (
        lambda t: (t["values"][""].update(forward=1), t["made"]["attributes"][""].append("forward")),
        "attribute 'forward' of module '' is 1",
    ),
    "a property, made": (
        lambda t: (t["values"][""].update(__dict__=1), t["made"]["attributes"][""].append("__dict__")),
        "attribute '__dict__' of module ''",
    ),
    "torch's": (own(_parameters=["dict", []]), "attribute '_parameters' of module ''"),
    "a module's name": (own(head=1), "attribute 'head' of module ''"),
    "unknown": (own(another=1), "attribute 'another' of module '' is 1, the model's is None"),
    "a module of torch": (lambda t: t["values"].update(head={"bias": 1}), "attribute 'bias' of module 'head' is 1"),
    "no kind": (own(mean=["object", "os.system"]), "is nothing that is kept"),
    "an object": (own(mean={"a": 1}), "is nothing that is kept"),
    "no such tensor": (own(mean=["tensor", "99", "cpu", None, False]), "is nothing that"),
    "strides": (lambda t: t["values"][""]["turned"].__setitem__(3, [10**9, 1]), "are no strides of (6, 6)"),
    "no strides": (lambda t: t["values"][""]["turned"].__setitem__(3, [1, "6"]), "are no strides"),
    "a generator": (lambda t: t["values"][""]["generator"].__setitem__(1, "0"), "a generator's state"),
    "later": (own(mean=["same", 99]), "is nothing that is kept"),
    "a key": (own(nested=["dict", [[["list", []], 1]]]), "is no key of a dict"),
    "a key in a key": (own(nested=["dict", [[["tuple", [["list", []]]], 1]]]), "is no key of a dict"),
    "no entry": (own(nested=["dict", [1]]), "is no entry of a dict"),
    "no module": (own(parts=["module", "nowhere"]), "is nothing that is kept"),
    "deep": (own(history=deep(MAX_DEPTH + 3)), "it is too deep"),
    "very deep": (own(history=deep(300)), "it is too deep"),
    "huge number": (own(huge=["int", "0x" + "f" * 6000]), "is nothing that is kept"),
    "a buffer that nobody made": (lambda t: t["made"].update(buffers=[]), "has buffer late, which the model has not"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_tree_is_believed_only_where_it_can_be(name: str, folder: Path) -> None:
    lie, message = LIES[name]
    with_tree(folder, lie)
    assert message in refusal(folder)


def test_another_type_is_taken(folder: Path) -> None:
    """It may have been another when the model was new."""
    state = json.loads((folder / STATE).read_text())
    state["ranks"][0]["attributes"][""]["calls"] = "seven"
    (folder / STATE).write_text(json.dumps(state))
    sign(folder)
    trainer, _ = start(ONE_PROCESS, model())
    load_shards(trainer, folder)
    assert trainer.module.calls == "seven"


def test_strides() -> None:
    assert is_dense((2, 3), [3, 1]) and is_dense((2, 3), [1, 2]) and is_dense((2, 1, 3), [1, 99, 2])
    assert not is_dense((2, 3), [0, 1]) and not is_dense((2, 3), [4, 1]) and not is_dense((2, 3), [1, 1])
