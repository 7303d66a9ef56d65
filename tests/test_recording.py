"""GradientRecorder: the same digests from one process and from every way of spreading a module over ranks."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distbench
from distbench.errors import SummaryError
from distbench.launching.world import World
from distbench.numerics.summary import Summary
from distbench.recording import naming
from tests.distributed import RankFailed, run_distributed


class Block(nn.Module):
    """Has a submodule called `module`, as a wrapper would."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.module = nn.Linear(features, features)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.module(x))


class Model(nn.Module):
    """Odd sizes, a tied weight, and parameters shorter than there are ranks."""

    def __init__(self, features: int = 7) -> None:
        super().__init__()
        self.stem = nn.Linear(5, features)
        self.blocks = nn.ModuleList(Block(features) for _ in range(2))
        self.embed = nn.Linear(features, 5, bias=False)
        self.head = nn.Linear(5, 1)
        self.back = nn.Linear(features, 5, bias=False)
        self.back.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.embed(h) + self.back(torch.sin(h)))


class ProbeBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + probe(self.scale, self.module.weight, self.module.bias)


class Probe(Model):
    """The same parameters with gradients that are multiples of 3: their mean over 2, 3 or 4 equal ranks is exact,
    whether a wrapper divides before or after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ProbeBlock(7) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = probe(self.stem.weight, self.stem.bias, self.head.weight, self.head.bias, self.embed.weight)
        for block in self.blocks:
            total = block(total)
        return total + probe(self.back.weight)


def probe(*parameters: Tensor) -> Tensor:
    return torch.stack([(p * (3.0 * torch.arange(p.numel()).reshape(p.shape) - 6)).sum() for p in parameters]).sum()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def frozen() -> Model:
    """Frozen as a whole block, so that every FSDP1 unit is uniform."""
    made = model()
    made.blocks[0].requires_grad_(False)
    return made


def backward(module: nn.Module) -> None:
    """The same samples on every rank, so that the mean over ranks is what one process has."""
    module(torch.linspace(-1, 1, 20).reshape(4, 5)).sum().backward()


def shared(module: nn.Module, world: World, kind: str) -> nn.Module:
    """The module, spread over the world's ranks."""
    blocks: Any = module.blocks
    policy = ModuleWrapPolicy({Block})
    if kind == "ddp":
        return DistributedDataParallel(module)
    if kind == "ddp-checkpoint":
        blocks[1] = checkpoint_wrapper(blocks[1])
        return DistributedDataParallel(module)
    if kind.startswith("fsdp1"):
        strategy = {"no": ShardingStrategy.NO_SHARD, "hybrid": ShardingStrategy.HYBRID_SHARD}.get(
            kind.rpartition("-")[2], ShardingStrategy.FULL_SHARD
        )
        mesh = init_device_mesh("cpu", (world.size // 2, 2)) if strategy is ShardingStrategy.HYBRID_SHARD else None
        return FullyShardedDataParallel(
            module,
            auto_wrap_policy=policy,
            sharding_strategy=strategy,
            use_orig_params="flat" not in kind,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
        )
    mesh = init_device_mesh("cpu", (world.size,))
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    if kind == "tp+fsdp2":
        mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
        plan = {"stem": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(module, mesh["tp"], {**plan, "head": RowwiseParallel(input_layouts=Replicate())})
        return fully_shard(module, mesh=mesh["dp"])
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def record(world: World, kind: str, folder: str, make: Any = model) -> dict[str, int]:
    module = shared(make(), world, kind)
    backward(module)
    summary = distbench.GradientRecorder(folder, module).record(1)
    return {parameter.name: parameter.digest for parameter in summary}


def single(folder: Path, make: Any = model) -> Summary:
    module = make()
    backward(module)
    return distbench.GradientRecorder(folder, module).record(1)


def test_writes_what_it_returns(tmp_path: Path) -> None:
    summary = single(tmp_path / "new" / "folder")
    loaded = Summary.load(tmp_path / "new" / "folder" / "step_00000001.safetensors")
    assert loaded.names == summary.names and (loaded.integers == summary.integers).all()
    assert list(loaded.names) == [name for name, _ in model().named_parameters()]
    assert loaded["embed.weight"].aliases == ("back.weight",)
    assert loaded.metadata["step"] == "1" and loaded.metadata["replicas"] == "agree"


def test_importing_distbench_does_not_import_torch() -> None:
    code = "import sys, distbench; assert 'torch' not in sys.modules; distbench.GradientRecorder.record"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute"):
        distbench.nothing  # noqa: B018


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["ddp", "ddp-checkpoint", "fsdp1", "fsdp1-flat", "fsdp1-no", "fsdp1-flat-no", "fsdp2"])
def test_same_digests_as_one_process(tmp_path: Path, kind: str, size: int) -> None:
    expected = single(tmp_path / "single", Probe)
    for digests in run_distributed(record, size, kind, str(tmp_path / "many"), Probe):
        assert digests == {parameter.name: parameter.digest for parameter in expected}
        assert list(digests) == list(expected.names)
    written = Summary.load(tmp_path / "many" / "step_00000001.safetensors")
    assert all(parameter.complete for parameter in written)
    assert written["embed.weight"].aliases == ("back.weight",)
    assert written.metadata["world_size"] == str(size) and written.metadata["replicas"] == "agree"
    for a, b in zip(written, expected, strict=True):
        assert (a.shape, a.dtype, a.elements, a.zeros, a.sum) == (b.shape, b.dtype, b.elements, b.zeros, b.sum)
        assert a.projections == pytest.approx(b.projections)


@pytest.mark.parametrize("kind", ["fsdp1-hybrid", "hsdp", "tp+fsdp2"])
def test_sums_over_shard_axes_only(tmp_path: Path, kind: str) -> None:
    expected = single(tmp_path / "single")
    (digests, *others) = run_distributed(record, 4, kind, str(tmp_path / "many"))
    assert all(other == digests for other in others)
    written = Summary.load(tmp_path / "many" / "step_00000001.safetensors")
    assert all(parameter.complete for parameter in written)
    for a, b in zip(written, expected, strict=True):
        assert a.shape == b.shape and a.norm == pytest.approx(b.norm, rel=1e-5)
        assert a.projections == pytest.approx(b.projections, rel=1e-5, abs=1e-6)
    if kind != "tp+fsdp2":  # its matrix products are cut otherwise
        assert digests == {parameter.name: parameter.digest for parameter in expected}


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"])
def test_frozen_parameters_have_no_gradient(tmp_path: Path, kind: str) -> None:
    expected = single(tmp_path / "single", frozen)
    digests = run_distributed(record, 2, kind, str(tmp_path / "many"), frozen)[0]
    written = Summary.load(tmp_path / "many" / "step_00000001.safetensors")
    assert digests == {parameter.name: parameter.digest for parameter in expected}
    assert [p.name for p in written if p.is_none] == [p.name for p in expected if p.is_none] != []


def own_samples(world: World, folder: str) -> str:
    """Every rank its own gradients, as if they had not been reduced."""
    module = model()
    (module(torch.full((1, 5), float(world.rank + 1))).sum()).backward()
    module.stem.weight.grad = torch.ones_like(module.stem.weight)
    distbench.GradientRecorder(folder, module).record(3)
    return ""


def test_says_when_replicas_differ(tmp_path: Path) -> None:
    run_distributed(own_samples, 3, str(tmp_path))
    metadata = Summary.load(tmp_path / "step_00000003.safetensors").metadata
    assert metadata["replicas"] == "2 of 3 ranks differ from the first (rank 1 on), from stem.bias on"


def partial_gradient(world: World, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world.size,))
    module = nn.Linear(3, 3, bias=False)
    module.weight = nn.Parameter(DTensor.from_local(module.weight.data, mesh, [Replicate()]))
    module.weight.grad = DTensor.from_local(torch.ones(3, 3), mesh, [Partial()])
    distbench.GradientRecorder(folder, module).record(1)


def unreduced_gradient(world: World, folder: str) -> None:
    module = FullyShardedDataParallel(model(), use_orig_params=False, device_id=torch.device("cpu"))
    with module.no_sync():
        backward(module)
    distbench.GradientRecorder(folder, module).record(1)


def different_parameters(world: World, folder: str) -> None:
    module = nn.Linear(3, 3 + world.rank)
    module(torch.ones(1, 3)).sum().backward()
    module.add_module(f"only_{world.rank}", nn.Linear(1, 1))
    distbench.GradientRecorder(folder, module).record(1)


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (partial_gradient, "weight is Partial over a mesh axis"),
        (unreduced_gradient, "is not reduced yet"),
        (different_parameters, "ranks hold different parameters"),
    ],
)
def test_refuses(tmp_path: Path, func: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_distributed(func, 2, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_group_is_a_stage(tmp_path: Path) -> None:
    run_distributed(staged, 4, str(tmp_path))
    for stage in range(2):
        summary = Summary.load(tmp_path / str(stage) / "step_00000001.safetensors")
        assert summary.metadata["world_size"] == "2" and summary["weight"].shape == (3 + stage, 3)


def staged(world: World, folder: str) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = world.rank // 2
    module = nn.Linear(3, 3 + stage)
    module(torch.ones(1, 3)).sum().backward()
    distbench.GradientRecorder(f"{folder}/{stage}", module, group=groups[stage]).record(1)


@pytest.mark.parametrize("make", [lambda p: p.grad.zero_(), lambda p: setattr(p, "grad", None)])
def test_zero_is_recorded_and_nothing_is_not(tmp_path: Path, make: Any) -> None:
    module = model()
    backward(module)
    for parameter in module.parameters():
        make(parameter)
    recorder = distbench.GradientRecorder(tmp_path, module)
    if module.head.bias.grad is None:
        with pytest.raises(SummaryError, match="no parameter has a gradient"):
            recorder.record(1)
    else:
        assert recorder.record(1)["head.bias"].zeros == 1


def test_other_gradients_are_named(tmp_path: Path) -> None:
    module = nn.Embedding(4, 3, sparse=True)
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(SummaryError, match="weight is sparse"):
        distbench.GradientRecorder(tmp_path, module).record(1)
    module = nn.Linear(2, 2).to(torch.complex64)
    module(torch.ones(1, 2, dtype=torch.complex64)).abs().sum().backward()
    with pytest.raises(SummaryError, match="complex64"):
        distbench.GradientRecorder(tmp_path, module).record(1)


def test_unscale_is_what_grad_scaler_does(tmp_path: Path) -> None:
    plain, scaled = model(), model()
    backward(plain)
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert a.grad is not None
        b.grad = a.grad * 1024
    before = copy.deepcopy([p.grad for p in scaled.parameters()])
    summary = distbench.GradientRecorder(tmp_path / "a", scaled).record(1, unscale=1024.0)
    assert [p.digest for p in summary] == [p.digest for p in single(tmp_path / "b")]
    for parameter, grad in zip(scaled.parameters(), before, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)


def test_names_inside_wrappers() -> None:
    plain = model()
    names = [name for name, _ in plain.named_parameters()]
    compiled = torch.compile(plain)
    assert isinstance(compiled, nn.Module)
    canonical = naming(compiled)
    assert [canonical(name) for name, _ in compiled.named_parameters()] == names
    assert "blocks.0.module.weight" in names  # not taken for a wrapper's


def test_shard_of_a_dim_in_the_middle(tmp_path: Path) -> None:
    run_distributed(sharded_along, 3, str(tmp_path))


def sharded_along(world: World, folder: str) -> None:
    """Every dim of a 3-D parameter, uneven; one with fewer rows than ranks."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(2.0 * 5 * 7).reshape(2, 5, 7)
    digests = []
    for dim in range(3):
        module = nn.Module()
        module.weight = nn.Parameter(dist.tensor.distribute_tensor(whole, mesh, [Shard(dim)]))
        module.weight.grad = dist.tensor.distribute_tensor(whole, mesh, [Shard(dim)])
        digests.append(distbench.GradientRecorder(f"{folder}/{dim}", module).record(1)["weight"].digest)
    plain = nn.Module()
    plain.weight = nn.Parameter(whole)
    plain.weight.grad = whole.clone()
    assert set(digests) == {distbench.GradientRecorder(f"{folder}/whole", plain).record(1)["weight"].digest}


# --- arguments and folders


def with_gradients(model: nn.Module) -> nn.Module:
    backward(model)
    return model


@pytest.mark.parametrize("step", ["a", 1.5, -1, None, 10**18])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    recorder = distbench.GradientRecorder(tmp_path, with_gradients(Model()))
    with pytest.raises(ValueError, match=rf"step={step!r} must be a whole number from 0 on"):
        recorder.record(step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unscale", [0, -2.0, float("nan"), float("inf")])
def test_a_loss_scale_is_positive(tmp_path: Path, unscale: float) -> None:
    recorder = distbench.GradientRecorder(tmp_path, with_gradients(Model()))
    with pytest.raises(ValueError, match="must be positive and finite: it is what the loss was multiplied by"):
        recorder.record(1, unscale=unscale)


def test_recordings_are_not_mixed(tmp_path: Path) -> None:
    model = with_gradients(Model())
    first = distbench.GradientRecorder(tmp_path, model)
    for step in (1, 2, 3):
        first.record(step)
    with pytest.raises(FileExistsError, match=r"holds 3 steps of an earlier recording .* overwrite=True"):
        distbench.GradientRecorder(tmp_path, model)
    (tmp_path / "notes.txt").touch()
    second = distbench.GradientRecorder(tmp_path, model, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4, "nothing is removed before there is something to write"
    second.record(1)
    second.record(7)
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "step_00000001.safetensors",
        "step_00000007.safetensors",
    }


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "step_00000100.safetensors").write_bytes(b"somebody's checkpoint")
    with pytest.raises(
        FileExistsError, match=r"step_00000100\.safetensors is named like a gradient summary and is none"
    ):
        distbench.GradientRecorder(tmp_path, Model(), overwrite=True)
    assert (tmp_path / "step_00000100.safetensors").exists()
