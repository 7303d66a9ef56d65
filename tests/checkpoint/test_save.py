"""A checkpoint is the plain model's: its keys, its values, loadable without distbench, from every strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from distbench.checkpoint import save
from distbench.checkpoint.save import save_model
from distbench.config import SGD
from distbench.models.build import build_model
from distbench.runs.folder import RunFolder
from tests.configs import STRATEGIES, custom, small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS, Steps, gamma, train, train_each

WRAPPED = [name for name in STRATEGIES if name != "single"]
CASES = {
    "stack": lambda strategy: small(strategy, optimizer=SGD(lr=0.1)),
    "stack in bf16": lambda strategy: small(strategy, optimizer=SGD(lr=0.1), precision="bf16"),
    "tied": lambda strategy: custom("Tied", strategy, optimizer=SGD(lr=0.1)),
    "buffers": lambda strategy: custom("Normed", strategy, optimizer=SGD(lr=0.1)),
}


@cache
def trained(ranks: int) -> list[dict[str, Steps]]:
    configs = {f"{case} {strategy}": build(strategy) for case, build in CASES.items() for strategy in WRAPPED}
    return run_distributed(train_each, ranks, configs, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", WRAPPED)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_loads_into_the_unwrapped_model(case: str, strategy: str, ranks: int, tmp_path: Path) -> None:
    state = trained(ranks)[0][f"{case} {strategy}"].weights
    name = save_model(RunFolder(tmp_path), 2, dict(state))
    assert name == "checkpoints/step_00000002/model.safetensors"
    loaded = load_file(tmp_path / name)
    plain = build_model(CASES[case](strategy).model, seed=99)
    assert loaded.keys() == plain.state_dict().keys()
    plain.load_state_dict(loaded, strict=True)
    assert {tensor.dtype for key, tensor in loaded.items() if "num_batches" not in key} == {torch.float32}
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key


@pytest.mark.parametrize("strategy", WRAPPED)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_to_the_same_bits(case: str, strategy: str) -> None:
    expected = trained(2)[0][f"{case} ddp"].weights
    for key, tensor in trained(2)[0][f"{case} {strategy}"].weights.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("strategy", WRAPPED)
def test_and_so_does_one_process_within_rounding(strategy: str) -> None:
    expected = train(ONE_PROCESS, CASES["stack"]("single"), 2).weights
    for key, tensor in trained(2)[0][f"stack {strategy}"].weights.items():
        # Two steps of lr 0.1 along gradients of at most order one, each within 500 roundings of the other's.
        assert (tensor - expected[key]).abs().max() <= gamma(500, 2.0**-24), key


def test_only_rank_0_holds_the_model() -> None:
    first, *others = trained(3)
    assert all(not rank[key].weights for rank in others for key in first)


def test_a_file_that_cannot_be_finished_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, state = RunFolder(tmp_path), {"weight": torch.ones(3)}

    def interrupted(file: Path, *_: object) -> None:
        file.write_bytes(b"half of it")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, "write_tensors", interrupted)
        with pytest.raises(OSError, match="no space"):
            save_model(folder, 7, state)
    assert not [path for path in folder.checkpoints.iterdir() if not path.name.startswith(".")]

    save_model(folder, 7, state)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step_00000007"]


def test_the_file_says_its_step(tmp_path: Path) -> None:
    with safe_open(tmp_path / save_model(RunFolder(tmp_path), 7, {"w": torch.ones(2)}), "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "7"}


def test_views_of_one_storage_are_written_each(tmp_path: Path) -> None:
    storage = torch.arange(6.0)
    state = {"all": storage, "part": storage[2:4], "turned": storage.reshape(2, 3).t()}
    loaded = load_file(tmp_path / save_model(RunFolder(tmp_path), 1, dict(state)))
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key
