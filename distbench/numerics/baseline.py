"""The baseline: one process plays rank 0 ... N-1 one after another on the same weights and samples, and adds up.

A correct distributed run equals it bit for bit with two ranks (two terms commute), and up to the order of one
summation, which has a proven bound, with more. Written straight down, apart from the trainer, so that a mistake in one
is not a mistake in both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from distbench.config import BatchShape, Config, Precision, batch_shape
from distbench.data.batches import Batch, SampleAddressedBatches, build_source, sample_digest, seed_random_state
from distbench.errors import BaselineError, UserModelError
from distbench.losses import LossFunction
from distbench.models.build import block_classes, build_model, weights_digest
from distbench.models.check import check_parameters
from distbench.numerics.bounds import Reduction
from distbench.numerics.buffers import set_buffers, stored_buffers
from distbench.numerics.digests import tensor_digest
from distbench.numerics.shards import Shard
from distbench.numerics.summary import Summary, summarize
from distbench.optim import build_optimizer, build_schedule
from distbench.precision import DTYPES, PrecisionPolicy, Scaler
from distbench.runs.files import write_json
from distbench.stand_ins import UNIT_CALLS, in_backward, pack
from distbench.strategies import strategy_class
from distbench.wrapping import unit_names

MAX_SKIPPED = 24
"""Steps that a loss scaler may skip before the gate gives up looking for one that is not skipped."""


@dataclass
class Replayed:
    """One optimizer step, replayed. Tensors are whole and named canonically; gradients are unscaled, before clipping."""

    step: int
    """1-based."""
    losses: list[float]
    """Each rank's unnormalised loss sum over its micro-batches."""
    count: int
    scale: float
    sample_digests: list[int]
    """Each rank's."""
    mean: dict[str, Tensor]
    """G, fp64: the exact-as-possible mean over ranks of each rank's own gradient."""
    magnitude: dict[str, Tensor]
    """A, fp32 rounded up: the mean over ranks of its magnitude."""
    reduced: dict[str, Tensor]
    """In run precision and rank order: what two ranks must equal bit for bit. Master dtype."""
    local_digests: list[dict[str, int]]
    """Each rank's own gradient, per parameter."""
    nones: list[str]
    """Parameters that no rank has a gradient for."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / self.count


class Replay:
    """Replays a run of `world_size` ranks of one strategy, step by step, in this process."""

    def __init__(self, config: Config, reduction: Reduction, device: torch.device) -> None:
        self.config, self.reduction, self.device = config, reduction, device
        self.shape: BatchShape = batch_shape(config)
        self.policy = PrecisionPolicy(config.precision, device)
        self._called: set[str] = set()
        """Units that the micro-batch at hand has called."""
        self.models = [self._build()]
        """Each rank's own, as a rank builds it: buffers and whatever else a module keeps. Weights are shared."""
        self.initial_weights = weights_digest(self.models[0])
        self.parameters = dict(self.models[0].named_parameters())
        for _ in range(1, self.shape.world_size):
            model = self._build()
            for name, parameter in model.named_parameters():
                parameter.data = self.parameters[name].data  # at once: there are never more than two of them
            self.models.append(model)
        self.modules = [self.policy.cast(model) for model in self.models]
        dims = {name: parameter.dim() for name, parameter in self.parameters.items()}
        self.optimizer = build_optimizer(config.optimizer, self.parameters.items(), dims)
        self.schedule = build_schedule(config.optimizer, self.optimizer, config.steps)
        self.scaler = Scaler(config.precision.scaler)
        self.loss = LossFunction(config.loss)
        source = build_source(config.data, config.seed)
        self.batches = [
            SampleAddressedBatches(source, self.shape, rank, device, self.policy.data_dtype)
            for rank in range(self.shape.world_size)
        ]
        self.steps_done = 0

    # --- one step

    def gradients(self) -> Replayed:
        """Play all ranks' forward and backward of the next step, and reduce."""
        ranks = range(self.shape.world_size)
        micro = [self.batches[rank].micro_batches(self.steps_done) for rank in ranks]
        count = self.loss.total(self.loss.local_count(batches) for batches in micro)
        losses = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in ranks]
        sums = GradientSums(self.reduction, list(self.parameters), self.scaler.scale)
        synced_before = True
        for index in range(self.shape.accumulation):
            if self.reduction.broadcast_buffers and synced_before:
                self.broadcast_buffers()
            for rank in ranks:
                factor = self.shape.world_size / count * self.scaler.scale
                losses[rank] += self.backward(rank, micro[rank][index], factor)
                sums.add(rank, self.take_gradients(rank))
            synced_before = self.reduction.synced or index == self.shape.accumulation - 1
            if synced_before:
                sums.sync()
        mean, magnitude, reduced = sums.result()
        return Replayed(
            step=self.steps_done + 1,
            losses=[float(loss) for loss in losses],
            count=count,
            scale=self.scaler.scale,
            sample_digests=[sample_digest(batches) for batches in micro],
            mean=mean,
            magnitude=magnitude,
            reduced=reduced,
            local_digests=sums.local_digests(),
            nones=[name for name in self.parameters if name not in reduced],
        )

    def update(self, replayed: Replayed) -> dict[str, float | bool]:
        """Clip and step the optimizer on the reduced gradients, as the trainer does."""
        for name, parameter in self.parameters.items():
            gradient = replayed.reduced.get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        square = sum(
            (torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in replayed.reduced.values()),
            torch.zeros((), dtype=torch.float64, device=self.device),
        )
        norm = float(square.sqrt())
        clip = 1.0 if self.config.clip_norm is None else min(1.0, self.config.clip_norm / (norm + 1e-6))
        if clip < 1.0:
            for gradient in (p.grad for p in self.parameters.values() if p.grad is not None):
                gradient.mul_(clip)
        lr = self.schedule.get_last_lr()[0]
        finite = norm < float("inf")
        skipped = self.scaler.enabled and not finite
        if not skipped:
            self.optimizer.step()
            self.schedule.step()
        self.scaler.update(finite=not skipped)
        self.take_gradients(0)
        self.steps_done += 1
        return {"grad_norm": norm, "clip": clip, "lr": lr, "skipped": skipped}

    def state(self) -> dict[str, Tensor]:
        """Parameters (`P/`), optimizer state (`O/<key>/`) and each rank's buffers (`B<rank>/`) as they are now."""
        tensors = {f"P/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"O/{key}/{name}"] = value
        for rank, buffers in enumerate(self.buffers):
            tensors.update({f"B{rank}/{name}": buffer for name, buffer in buffers.items()})
        return tensors

    def weights(self) -> Summary:
        """Summary of the parameters as they are now."""
        return summarize(Shard.whole(name, parameter.detach()) for name, parameter in self.parameters.items())

    @property
    def buffers(self) -> list[dict[str, Tensor]]:
        """Each rank's, as they are now: forward may have made new ones."""
        return [dict(model.named_buffers()) for model in self.models]

    @torch.no_grad()
    def load(self, baseline: Baseline, step: int) -> None:
        """Weights and buffers of a finished baseline after a step (0: initial)."""
        with baseline.tensors(step) as file:
            for name, parameter in self.parameters.items():
                parameter.copy_(file.get_tensor(f"P/{name}"))
            for rank, model in enumerate(self.models):
                set_buffers(model, stored_buffers(file, rank))

    # --- parts

    def _build(self) -> nn.Module:
        config = self.config
        model = build_model(config.model, config.seed.model)
        check_parameters(config, model)
        model = self.policy.prepare(model)
        packed, unit_calls = self.reduction.packed, self.reduction.unit_calls
        units = []
        if packed is not None or unit_calls is not None:
            units = unit_names(config.wrap_policy, model, block_classes(config.model, model))
        if packed is not None:
            pack(model, units, packed)
        if unit_calls is not None:
            UNIT_CALLS[unit_calls](model, units)
            self._refuse_second_calls(model, units)
        return model

    def _refuse_second_calls(self, model: nn.Module, units: list[str]) -> None:
        """Where a unit's second call in a micro-batch would change what is reduced when, in a way that is not replayed.

        Gradients that micro-batches left unreduced then meet the calls' one by one (FSDP1 with cast parameters: each call
        has its own accumulator), or are reduced by themselves as soon as the last call's backward is done (fully_shard).
        """
        casts = self.reduction.unit_calls == "inputs" or self.policy.casts_parameters
        if self.reduction.accumulation == 1 or self.reduction.synced or not casts:
            return

        def watch(name: str) -> Any:
            def before(module: nn.Module, args: Any) -> None:
                if not torch.is_grad_enabled() or in_backward():
                    return
                if name in self._called:
                    raise UserModelError(
                        f"{name} is called several times in one forward, and a unit of its own: strategy="
                        f"{self.config.strategy.name} then adds up unsynced micro-batches in an order that the gate does "
                        "not replay; set accumulation_sync=true or accumulation=1, or let its caller be the unit"
                    )
                self._called.add(name)

            return before

        for name in units:
            model.get_submodule(name).register_forward_pre_hook(watch(name), prepend=True)

    def backward(self, rank: int, batch: Batch, factor: float) -> Tensor:
        """One rank's forward and backward of a micro-batch; its loss sum."""
        self._called.clear()
        seed_random_state(self.config.seed.model, batch)
        loss = self.loss.sum(self.policy.forward(self.modules[rank], batch.inputs), batch.targets)
        (loss * factor).backward()
        return loss.detach().double()

    def take_gradients(self, rank: int) -> dict[str, Tensor | None]:
        """A rank's gradients, and none are left."""
        gradients = {name: parameter.grad for name, parameter in self.models[rank].named_parameters()}
        self.models[rank].zero_grad(set_to_none=True)
        return gradients

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        sent = self.buffers[0]
        for model in self.models[1:]:
            for name, buffer in model.named_buffers():
                buffer.copy_(sent[name])


class GradientSums:
    """Adds up each rank's micro-batch gradients and reduces them, as a strategy's `Reduction` says it does."""

    def __init__(self, reduction: Reduction, names: list[str], scale: float) -> None:
        self.reduction, self.scale = reduction, scale
        self.local: list[dict[str, Tensor]] = [{} for _ in range(reduction.world_size)]
        """Unreduced gradient of each rank, in the accumulation dtype."""
        self.names = names
        self.carried: dict[str, Tensor] = {}
        """The reduced gradient so far, in the master dtype."""
        self.mean: dict[str, Tensor] = {}
        self.magnitude: dict[str, Tensor] = {}
        self.whole: list[dict[str, Tensor]] = [{} for _ in range(reduction.world_size)]
        """Each rank's own gradient over the whole step."""

    def add(self, rank: int, gradients: dict[str, Tensor | None]) -> None:
        """One micro-batch's gradient of one rank (master dtype, values of the compute dtype)."""
        dtype = DTYPES[self.reduction.accumulate_dtype]
        single = self.reduction.accumulation == 1 or self.reduction.synced
        local = self.local[rank]
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if single:
                local[name] = gradient
            elif name in local:
                local[name] += gradient  # not cast first: added in the wider of the two dtypes, and rounded once
            else:
                local[name] = gradient.to(dtype, copy=True)

    def sync(self) -> None:
        """Reduce what has been added since the last sync."""
        ranks = len(self.local)
        for name in self.names:
            parts = [local.get(name) for local in self.local]
            present = [part for part in parts if part is not None]
            if not present:
                continue
            # A rank that did not use a parameter contributes zeros, as every wrapper has it do.
            filled = [torch.zeros_like(present[0]) if part is None else part for part in parts]
            mean = sum((part.double() for part in filled), torch.zeros_like(filled[0], dtype=torch.float64)) / ranks
            size = sum((part.double().abs() for part in filled), torch.zeros_like(mean)) / ranks
            self.mean[name] = self.mean[name] + mean if name in self.mean else mean
            self.magnitude[name] = self.magnitude[name] + size if name in self.magnitude else size
            self._reduce(name, filled)
            for rank, part in enumerate(filled):
                whole = self.whole[rank]
                whole[name] = whole[name] + part if name in whole else part
        self.local = [{} for _ in range(ranks)]

    def _reduce(self, name: str, parts: list[Tensor]) -> None:
        reduction, master = self.reduction, DTYPES[self.reduction.param_dtype]
        before = self.carried.get(name)
        if reduction.reduces:
            if before is not None and reduction.carries:
                parts = [before + part.to(master) for part in parts]
                before = None
            dtype = DTYPES[reduction.reduce_dtype]
            total = parts[0].to(dtype) / reduction.divide_before
            for part in parts[1:]:
                total = total + part.to(dtype) / reduction.divide_before
            reduced = (total / (reduction.world_size / reduction.divide_before)).to(master)
        else:
            reduced = parts[0].to(master)
        self.carried[name] = reduced if before is None else before + reduced

    def result(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """G (fp64), A (fp32, rounded up) and the reduced gradient (master dtype), all unscaled."""
        mean = {name: value / self.scale for name, value in self.mean.items()}
        size = {name: round_up(value / self.scale) for name, value in self.magnitude.items()}
        reduced = {name: value * (1.0 / self.scale) for name, value in self.carried.items()}
        return mean, size, reduced

    def local_digests(self) -> list[dict[str, int]]:
        """Digests of each rank's own gradient, scaled as it is before the reduction."""
        return [
            {part.name: part.digest for part in summarize(Shard.whole(name, g) for name, g in whole.items())}
            for whole in self.whole
        ]


def round_up(tensor: Tensor) -> Tensor:
    """The least fp32 at or above each fp64 element."""
    narrow = tensor.float()
    return torch.where(narrow.double() < tensor, torch.nextafter(narrow, torch.full_like(narrow, torch.inf)), narrow)


# --------------------------------------------------------------------------------------------------------------
# On disk
# --------------------------------------------------------------------------------------------------------------


def compute_baseline(config: Config, folder: Path, device: torch.device) -> None:
    """Replay `gate.steps` steps of a config and write the baseline into an existing, empty folder.

    Files: `baseline.json` (losses, digests, norms, per step), `step_<s>.safetensors` (`G/`, `A/`, and the state after the
    step: `P/`, `O/`, `B<rank>/`), `state_0.safetensors` (the state before step 1), `summary_<s>.safetensors` (of the
    reduced gradient).
    """
    started = time.perf_counter()
    reduction = strategy_class(config.strategy.name).reduction(config)
    replay = Replay(config, reduction, device)
    save_file(_owned(replay.state()), folder / "state_0.safetensors")
    replay.weights().save(folder / "weights_0.safetensors")
    initial_buffers = [_digests(buffers) for buffers in replay.buffers]
    steps: list[dict[str, Any]] = []
    while sum(not step["skipped"] for step in steps) < config.gate.steps and len(steps) < MAX_SKIPPED:
        replayed = replay.gradients()
        number = replayed.step
        tensors = {f"G/{name}": value for name, value in replayed.mean.items()}
        tensors |= {f"A/{name}": value for name, value in replayed.magnitude.items()}
        tensors |= {f"R/{name}": value for name, value in replayed.reduced.items()}
        summary = summarize(
            Shard.whole(name, replayed.reduced.get(name), tuple(parameter.shape))
            for name, parameter in replay.parameters.items()
        )
        summary.save(folder / f"summary_{number}.safetensors")
        update = replay.update(replayed)
        replay.weights().save(folder / f"weights_{number}.safetensors")
        save_file(_owned({**tensors, **replay.state()}), folder / f"step_{number}.safetensors")
        steps.append(
            {
                "step": number,
                "losses": replayed.losses,
                "loss": replayed.loss,
                "count": replayed.count,
                "scale": replayed.scale,
                "sample_digests": [str(digest) for digest in replayed.sample_digests],
                "local_digests": [
                    {name: str(digest) for name, digest in digests.items()} for digests in replayed.local_digests
                ],
                "nones": replayed.nones,
                "buffers": [_digests(buffers) for buffers in replay.buffers],
                "next_scale": replay.scaler.scale,
                "good_steps": replay.scaler.good_steps,
                **update,
            }
        )
        if number >= config.steps:
            break
    write_json(
        folder / "baseline.json",
        {
            "reduction": reduction.to_dict(),
            "initial_weights": replay.initial_weights,
            "initial_buffers": initial_buffers,
            "steps": steps,
            "seconds": time.perf_counter() - started,
            **_errors(config, device, folder),
        },
    )


REARRANGEMENTS = ("reversed samples", "halved micro-batches", "inputs one ulp away")
"""Of the replay; each is as legal as the replay itself."""


def noise_floor(config: Config, device: torch.device, exact: dict[str, Tensor]) -> dict[str, float]:
    """Per parameter, the worst relative L2 distance from `exact` (fp64) that a legal rearrangement of the first step has.

    What kernels that may add in another order than the replay's are allowed, times `gate.kappa`.
    """
    floor = dict.fromkeys(exact, 0.0)
    for kind in REARRANGEMENTS:
        arranged = config
        if kind == "halved micro-batches":
            if batch_shape(config).micro_batch % 2:
                continue
            arranged = replace(config, accumulation=2 * config.accumulation)
        replay = Replay(arranged, strategy_class(config.strategy.name).reduction(arranged), device)
        for batches in replay.batches:
            _rearrange(batches, kind)
        for name, mean in replay.gradients().mean.items():
            norm = float(exact[name].norm())
            if norm:
                floor[name] = max(floor[name], float((mean - exact[name]).norm()) / norm)
    return floor


def _rearrange(batches: SampleAddressedBatches, kind: str) -> None:
    plain = batches.micro_batches
    batches.micro_batches = lambda step: [_rearranged(batch, kind) for batch in plain(step)]  # type: ignore[method-assign]


def _rearranged(batch: Batch, kind: str) -> Batch:
    if kind == "reversed samples":
        return Batch(batch.ids[::-1], batch.inputs.flip(0), batch.targets.flip(0))
    if kind == "inputs one ulp away" and batch.inputs.is_floating_point():
        return replace(batch, inputs=torch.nextafter(batch.inputs, torch.full_like(batch.inputs, torch.inf)))
    return batch


def _errors(config: Config, device: torch.device, folder: Path) -> dict[str, Any]:
    """What the run's precision costs in the first step, against fp64; and the noise floor where kernels may differ."""
    gate = config.gate
    exact: dict[str, Tensor] | None = None
    facts: dict[str, Any] = {"precision_error": None, "precision_error_reason": "gate.fp64_reference=false"}
    if gate.fp64_reference:
        reference = replace(config, precision=fp64(config.precision))
        replayed = Replay(reference, strategy_class(config.strategy.name).reduction(reference), device).gradients()
        exact = replayed.mean
        facts = {"precision_error": _distance(folder, exact, device, replayed.loss), "precision_error_reason": None}
    facts["noise_floor"] = None
    if gate.noise and device.type == "cuda":
        if exact is None:
            with safe_open(folder / "step_1.safetensors", "pt", device=str(device)) as file:
                exact = {key[2:]: file.get_tensor(key) for key in file.keys() if key.startswith("G/")}  # noqa: SIM118
        facts["noise_floor"] = noise_floor(config, device, exact)
    return facts


def _distance(folder: Path, exact: dict[str, Tensor], device: torch.device, loss: float) -> dict[str, Any]:
    rows: dict[str, float | None] = {}
    difference = total = 0.0
    with safe_open(folder / "step_1.safetensors", "pt", device=str(device)) as file:
        for name, reference in exact.items():
            error = float((file.get_tensor(f"G/{name}") - reference).square().sum())
            norm = float(reference.square().sum())
            rows[name] = None if norm == 0 else (error / norm) ** 0.5
            difference, total = difference + error, total + norm
    return {"loss": loss, "relative_l2": None if total == 0 else (difference / total) ** 0.5, "parameters": rows}


def fp64(precision: Precision) -> Precision:
    """The same run, everything in fp64 and nothing scaled or cast."""
    return Precision(
        name="fp64",
        param_dtype="fp64",
        compute_dtype="fp64",
        reduce_dtype="fp64",
        scaler=replace(precision.scaler, enabled=False),
    )


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Bit-exact digests of whole tensors, as text (JSON readers lose 64-bit integers)."""
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}


def _owned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies where tensors share memory: safetensors refuses shared storage."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _numbers(step: dict[str, Any]) -> dict[str, Any]:
    """One step's facts with its numbers as numbers: JSON has none that are not finite, so they were written as text."""
    plain = {name: float(step[name]) for name in ("loss", "scale", "next_scale", "grad_norm", "clip", "lr")}
    return {**step, **plain, "losses": [float(loss) for loss in step["losses"]]}


class Baseline:
    """A finished baseline on disk, read in slices."""

    def __init__(self, folder: Path) -> None:
        """Raises BaselineError if it is damaged."""
        self.folder = folder
        try:
            self.facts: dict[str, Any] = json.loads((folder / "baseline.json").read_text())
            self.steps: list[dict[str, Any]] = [_numbers(step) for step in self.facts["steps"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BaselineError(f"baseline {folder} is damaged: {error}") from error

    def step(self, step: int) -> dict[str, Any]:
        return self.steps[step - 1]

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def weights(self, step: int) -> Summary:
        """Summary of the weights after a step (0: initial)."""
        return Summary.load(self.folder / f"weights_{step}.safetensors")

    def summary(self, step: int) -> Summary:
        """Summary of a step's reduced gradient."""
        return Summary.load(self.folder / f"summary_{step}.safetensors")

    @contextmanager
    def tensors(self, step: int) -> Iterator[Any]:
        """Open the tensors of a step (0: the state before the first), memory-mapped: only what is read is loaded."""
        name = "state_0.safetensors" if step == 0 else f"step_{step}.safetensors"
        with safe_open(self.folder / name, "pt") as file:
            yield file
