"""The gate: a run's first steps against the baseline's, check by check, and the verdict.

An observer of the trainer, on every rank. It compares what this rank holds with its own slice of the baseline; no rank
gathers the model. The order of the checks is the order in which a difference would first show.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distbench.build import EffectiveDtypes
from distbench.config import Config
from distbench.data.batches import sample_digest
from distbench.errors import StaleBaseline
from distbench.numerics.baseline import Baseline
from distbench.numerics.bounds import Reduction, unit_roundoff
from distbench.numerics.digests import tensor_digest
from distbench.numerics.shadow import ShadowOptimizer
from distbench.numerics.state import load_state, restore, snapshot
from distbench.numerics.summary import ParameterSummary, Summary, summarize
from distbench.precision import DTYPES
from distbench.strategies.slots import Slot
from distbench.trainer import Backward, Observer, StepMetrics, Trainer

MASK64 = 2**64 - 1


class Tier(StrEnum):
    """How strong the evidence is, strongest first."""

    bitwise = "bitwise"
    bound = "bound"
    noise = "noise"
    tolerance = "tolerance"
    """The user's own tolerance, not a derived one."""
    fail = "fail"


ORDER = list(Tier)


@dataclass
class Check:
    """One row of gate.json."""

    name: str
    step: int
    mode: str
    """`free`: as the run goes; `forced`: the step started from the baseline's own state."""
    passed: bool
    tier: str | None = None
    detail: str = ""
    ranks: list[int] = field(default_factory=list)
    """Ranks that disagree, where that is known."""
    parameter: str | None = None
    """The worst one."""


@dataclass
class GradientCheck:
    """One parameter's reduced gradient against the baseline's."""

    name: str
    step: int
    mode: str
    tier: str
    relative_l2: float | None
    """|g - G| / |G|; None where G is all zero."""
    cosine: float | None
    alpha: float | None
    """<g, G> / |G|^2: 1 where the scale is right."""
    margin: float
    """Largest error over its bound; at most 1 within the bound."""
    violations: int
    """Elements outside the bound."""
    nonfinite: int
    """Infinities and NaNs of the run's gradient, legal ones too."""
    power_scale: float
    """Smallest relative scale error that this check was sure to catch."""
    power_element: float
    """Smallest change of any single element that it was sure to catch, over the gradient's root mean square."""


@dataclass
class Verdict:
    passed: bool
    tier: Tier
    checks: list[Check]
    gradients: list[GradientCheck]
    num_parameters: int

    @property
    def first_failure(self) -> Check | None:
        """What explains the others: a dtype that is not the declared one is read back after the gradients it spoils."""
        failed = [check for check in self.checks if not check.passed]
        return next((check for check in failed if check.name == "dtypes"), failed[0] if failed else None)

    def _nonfinite(self) -> str:
        """Infinities and NaNs that the baseline has, too: equal, but not to be passed over."""
        found = [g for g in self.gradients if g.nonfinite]
        if not found:
            return ""
        first = found[0]
        count = len({g.name for g in found})
        where = f"first {first.name} at step {first.step}"
        return f"; non-finite gradients in {count} parameters, as in the baseline, {where}"

    def worst_gradient(self) -> GradientCheck | None:
        """Of the earliest failing step, the parameter that is furthest off."""
        failed = [g for g in self.gradients if g.tier == Tier.fail]
        if not failed:
            return None
        step = min(g.step for g in failed)

        def size(g: GradientCheck) -> float:
            return math.inf if g.nonfinite or g.relative_l2 is None else g.relative_l2

        return max((g for g in failed if g.step == step), key=size)

    def text(self) -> str:
        if self.passed:
            compared = [g for g in self.gradients if g.step == 1]
            bitwise = sum(g.tier == Tier.bitwise for g in compared)
            parameters = f"{len(compared)} of {self.num_parameters} parameters"
            if self.tier is Tier.bitwise:
                return f"gate PASSED (bitwise, {parameters}{self._nonfinite()})"
            worst = max(g.margin for g in self.gradients if g.tier == self.tier)
            evidence = f"{bitwise} of them bitwise, worst margin {worst:.2g}"
            return f"gate PASSED ({self.tier.value}, {parameters}, {evidence}{self._nonfinite()})"
        check = self.first_failure
        assert check is not None
        worst_gradient = self.worst_gradient()
        if check.name == "gradients" and worst_gradient is not None:
            g = worst_gradient
            alpha = "n/a" if g.alpha is None else f"{g.alpha:.6g}"
            cosine = "n/a" if g.cosine is None else f"{g.cosine:.6g}"
            return f"gate FAILED: gradient of {g.name}, alpha {alpha} cosine {cosine} (step {g.step})"
        return f"gate FAILED: {check.name} at step {check.step}: {check.detail}"


class StopGate(Exception):
    """A step failed: what follows would only repeat it. Raised on every rank at the same place."""


class Gate(Observer):
    """Holds each of the baseline's steps against the run's."""

    def __init__(
        self,
        baseline: Baseline,
        config: Config,
        reduction: Reduction,
        trainer: Trainer,
        dtypes: EffectiveDtypes,
        reused: bool,
    ) -> None:
        """`dtypes`: an observer that comes before this one. `reused`: the baseline came from the cache, so other
        initial weights mean a stale entry, not a fault."""
        self.baseline, self.config, self.reduction = baseline, config, reduction
        self.world, self.strategy, self.dtypes = trainer.world, trainer.strategy, dtypes
        self.checks: list[Check] = []
        self.gradients: list[GradientCheck] = []
        self.summaries: dict[int, Summary] = {}
        """Of the free steps' reduced gradients, whole, on every rank."""
        self.mode = "free"
        self.exact_state = True
        """The state that the next step starts from is bitwise the baseline's."""
        self.names = list(dict.fromkeys(slot.name for slot in trainer.strategy.slots(trainer.module)))
        self.shadow = ShadowOptimizer(config, trainer)
        self._norm_squared = math.nan
        self._stepped = False
        self._structure(trainer)
        self._initial(trainer, reused)

    @property
    def num_steps(self) -> int:
        return min(self.baseline.num_steps, self.config.steps)

    # --- before the first step

    def _structure(self, trainer: Trainer) -> None:
        """The wrapped module has the plain model's parameters: no more, no fewer, none untied or tied anew."""
        weights = self.baseline.weights(0)
        expected = {p.name: p.shape for p in weights}
        found = {slot.name: slot.shape for slot in trainer.strategy.slots(trainer.module)}
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        shapes = sorted(name for name in set(expected) & set(found) if expected[name] != found[name])
        wrong = [
            *(f"{n} is missing" for n in missing),
            *(f"{n} is new" for n in extra),
            *(f"{n} has another shape" for n in shapes),
        ]
        self._add("structure", 1, not wrong, "; ".join(wrong[:5]), parameter=(missing + extra + shapes + [None])[0])

    def _initial(self, trainer: Trainer, reused: bool) -> None:
        """Weights and buffers, as the wrapped module holds them before step 1, on every rank."""
        weights = self._summary(trainer, gradients=False)
        expected = self.baseline.weights(0)
        different = [p.name for p in expected if p.name in weights and weights[p.name].digest != p.digest]
        agree, ranks = self._replicas_agree(weights)
        buffers = self._buffers_differ(trainer, self.baseline.facts["initial_buffers"])
        if (different or buffers) and reused and agree:
            # Some weights may be equal all the same: biases start as zeros. A fault is found again with a fresh one.
            raise StaleBaseline(f"baseline {self.baseline.folder.name} was made from other initial weights")
        detail = f"{len(different)} of {len(expected)} parameters differ, first {different[0]}" if different else ""
        if not agree:
            detail = f"ranks hold different weights: {ranks}"
        self._add(
            "initial_weights", 1, not different and agree, detail, ranks=ranks, parameter=next(iter(different), None)
        )
        self._add("initial_buffers", 1, not buffers, _listed(buffers), ranks=sorted({rank for rank, _ in buffers}))
        self.exact_state = not different and agree and not buffers
        self._held = {p.name: p.digest for p in weights}

    # --- a step's gradients

    def on_gradients(self, backward: Backward, trainer: Trainer) -> None:
        if backward.step > self.num_steps:
            return
        step, expected = backward.step, self.baseline.step(backward.step)
        self._samples(backward, expected)
        self._shapes(step, trainer)
        self._weights_held(step, trainer)
        summary = self._summary(trainer, gradients=True)
        local = self._local_summary
        self._norm_squared = sum(p.sum_squares for p in summary) if not any(p.nonfinite for p in summary) else math.inf
        if self.mode == "free":
            self.summaries[step] = summary
        self.shares = self.world.gather((backward.loss_sum, backward.count, backward.scale))
        near = self.mode == "free" and not self.exact_state  # the forced step has decided; this one starts beside it
        if near:
            self._trajectory(backward, summary, expected)
        else:
            self._loss(backward, expected)
            self._scale(backward, expected)
            self._nones(step, summary, expected)
        agree, ranks = self._replicas_agree(local)
        self._add("replicas", step, agree, "" if agree else f"ranks hold different gradients: {ranks}", ranks=ranks)
        if not near:
            self._compare_gradients(step, summary, expected, trainer)
        self._representable(step, trainer, backward.scale)
        if step == 1 and self.mode == "free":
            self._plain_sgd_step(trainer)
        self.shadow.take_gradients(trainer)

    def _shapes(self, step: int, trainer: Trainer) -> None:
        """Each gradient has its own parameter's local shape: a sharded parameter with a whole gradient was never
        reduced, and neither an optimizer nor a comparison can use it."""
        local = self.strategy.local
        wrong = [
            slot.name
            for slot in self.strategy.slots(trainer.module)
            if slot.parameter.grad is not None
            and local(slot.parameter.grad).numel() != local(slot.parameter.detach()).numel()
        ]
        everywhere = self.world.gather(wrong)
        names = sorted({name for names in everywhere for name in names})
        if names:
            ranks = [rank for rank, found in enumerate(everywhere) if found]
            detail = f"gradients of {len(names)} sharded parameters are still whole, first {names[0]}: never reduced"
            self._add("replicas", step, False, detail, ranks=ranks, parameter=names[0])
            raise StopGate

    def _weights_held(self, step: int, trainer: Trainer) -> None:
        """The weights that this step computed with are those that the last one ended with, to the bit."""
        now = self._summary(trainer, gradients=False)
        wrong = [p.name for p in now if self._held.get(p.name, p.digest) != p.digest]
        everywhere = self.world.gather(wrong)
        names = list(dict.fromkeys(name for found in everywhere for name in found))
        detail = f"{len(names)} parameters were changed between steps, first {names[0]}" if names else ""
        ranks = [rank for rank, found in enumerate(everywhere) if found]
        self._add("weights_held", step, not names, detail, ranks=ranks, parameter=names[0] if names else None)

    def _samples(self, backward: Backward, expected: dict[str, Any]) -> None:
        digests = self.world.gather(str(sample_digest(backward.batches)))
        wrong = [rank for rank, (a, b) in enumerate(zip(digests, expected["sample_digests"], strict=True)) if a != b]
        same_set = sum(map(int, digests)) & MASK64 == sum(map(int, expected["sample_digests"])) & MASK64
        detail = ""
        if wrong:
            what = "the same samples in another order" if same_set else "other samples"
            detail = f"ranks {wrong} saw {what} than the baseline's"
        self._add("samples", backward.step, not wrong, detail, ranks=wrong)

    def _loss(self, backward: Backward, expected: dict[str, Any]) -> None:
        """Before any communication, so every rank's own loss must be the replay's to the bit."""
        wrong = [
            rank
            for rank, (loss, _, _) in enumerate(self.shares)
            if not _same_number(loss, expected["losses"][rank]) and not self._near(loss, expected["losses"][rank])
        ]
        counts = sorted({count for _, count, _ in self.shares})
        detail = ""
        if wrong:
            rank = wrong[0]
            detail = f"rank {rank} has loss sum {self.shares[rank][0]!r}, the baseline {expected['losses'][rank]!r}"
        if counts != [expected["count"]]:
            detail = f"normalised by {counts}, the baseline by {expected['count']}"
        self._add("loss", backward.step, not detail, detail, ranks=wrong)

    def _scale(self, backward: Backward, expected: dict[str, Any]) -> None:
        """Every rank's loss scale is the baseline's: gradients hide it as long as nothing over- or underflows."""
        details = [
            f"loss scale {scale:g}, the baseline's is {expected['scale']:g}" if scale != expected["scale"] else ""
            for _, _, scale in self.shares
        ]
        self._add_by_rank("scale", backward.step, details)

    def _representable(self, step: int, trainer: Trainer, scale: float) -> None:
        """A gradient that was reduced in a narrower dtype than it is kept in has that dtype's values. So anything that
        was done to it afterwards shows, however small beside the bound."""
        reduction = self.reduction
        dtype, master = DTYPES[reduction.reduce_dtype], DTYPES[reduction.param_dtype]
        added_up = reduction.synced and reduction.accumulation > 1
        exact_scale = math.frexp(scale)[0] == 0.5
        narrower = unit_roundoff(dtype) > unit_roundoff(master)
        if not reduction.reduces or reduction.world_size == 1 or added_up or not exact_scale or not narrower:
            return
        wrong = []
        for slot in self.strategy.slots(trainer.module):
            if slot.parameter.grad is not None:
                scaled = slot.cut(self.strategy.local(slot.parameter.grad)) * scale
                if not torch.equal(scaled.nan_to_num(), scaled.to(dtype).to(scaled.dtype).nan_to_num()):
                    wrong.append(slot.name)
        names = sorted({name for names in self.world.gather(wrong) for name in names})
        detail = f"{len(names)} gradients are not values of {reduction.reduce_dtype}, in which they were reduced"
        self._add("representable", step, not names, detail if names else "", parameter=names[0] if names else None)

    def _near(self, a: float, b: float) -> bool:
        """Where local arithmetic may differ legitimately, a loss within the noise allowance."""
        if not self._noise_allowed():
            return False
        u = unit_roundoff(torch.float32 if self.config.precision.compute_dtype == "fp32" else torch.bfloat16)
        return abs(a - b) <= 64 * u * max(abs(a), abs(b))

    def _trajectory(self, backward: Backward, summary: Summary, expected: dict[str, Any]) -> None:
        """A free step from weights that differ by earlier steps' rounding: told, not judged. There is no bound for what
        that rounding grows to: with batch normalisation over two samples in bf16 the gradient's norm was seen to change
        by two thirds."""
        total = sum(loss for loss, _, _ in self.shares) / backward.count
        reference = self.baseline.summary(backward.step)
        norms = [math.sqrt(sum(p.sum_squares for p in found)) for found in (summary, reference)]
        loss, norm = _relative(total, expected["loss"]), _relative(*norms)
        detail = f"beside the baseline's, loss is off by {loss:.3g} and the gradients' norm by {norm:.3g}, relative"
        self._add("trajectory", backward.step, True, detail)

    def _nones(self, step: int, summary: Summary, expected: dict[str, Any]) -> None:
        """A gradient that is None where the baseline has one, or the other way round (all zeros count as None)."""
        absent = set(expected["nones"])
        lost, new = [], []
        for parameter in summary:
            if parameter.numel == 0:
                continue  # FSDP1 gives an empty one none, or one where nothing used it: no difference to anyone
            here = parameter.is_none
            zero = parameter.elements and parameter.zeros == parameter.elements
            if here and parameter.name not in absent:
                lost.append(parameter.name)
            elif not here and parameter.name in absent and not zero:
                new.append(parameter.name)
        detail = "; ".join(
            f"{len(names)} parameters {what}, first {names[0]}"
            for names, what in ((lost, "have no gradient"), (new, "have a gradient and the baseline none"))
            if names
        )
        self._add("none_gradients", step, not detail, detail, parameter=(lost + new)[0] if lost or new else None)

    def _compare_gradients(self, step: int, summary: Summary, expected: dict[str, Any], trainer: Trainer) -> None:
        reference = self.baseline.summary(step)
        absent = set(expected["nones"])
        rest = [
            p.name
            for p in reference
            if p.name not in absent and p.name in summary and summary[p.name].digest != p.digest
        ]
        found = {p.name for p in summary if not p.is_none}
        rows = []
        for parameter in reference:
            if parameter.name in absent or parameter.name in rest or parameter.name not in found:
                continue
            u = unit_roundoff(DTYPES[self.config.precision.param_dtype])
            rows.append(
                GradientCheck(
                    parameter.name,
                    step,
                    self.mode,
                    Tier.bitwise,
                    0.0,
                    1.0,
                    1.0,
                    0.0,
                    0,
                    parameter.nonfinite,
                    2 * u,
                    0.0,
                )
            )
        rows += self._within_bound(step, [name for name in rest if name in found], summary, expected, trainer)
        order = {name: index for index, name in enumerate(self.names)}
        rows.sort(key=lambda row: order[row.name])
        self.gradients += rows
        failed = [row for row in rows if row.tier == Tier.fail]
        worst = max(failed, key=lambda row: row.relative_l2 if row.relative_l2 is not None else math.inf, default=None)
        tier = max((ORDER.index(Tier(row.tier)) for row in rows), default=0)
        self._add(
            "gradients",
            step,
            not failed,
            "" if worst is None else f"{len(failed)} of {len(rows)} parameters outside the bound, worst {worst.name}",
            tier=ORDER[tier].value,
            parameter=None if worst is None else worst.name,
        )

    def _within_bound(
        self, step: int, names: list[str], summary: Summary, expected: dict[str, Any], trainer: Trainer
    ) -> list[GradientCheck]:
        """Elementwise against the bound, each rank on its own slice; two small all-reduces for all parameters."""
        if not names:
            return []
        slots: dict[str, list[Slot]] = {name: [] for name in names}
        for slot in trainer.strategy.slots(trainer.module):
            if slot.name in slots:
                slots[slot.name].append(slot)
        sums = torch.zeros(len(names), 6, dtype=torch.float64)
        maxima = torch.zeros(len(names), 3, dtype=torch.float64)
        scale = float(expected["scale"])
        with self.baseline.tensors(step) as file:
            for row, name in enumerate(names):
                mean, size = file.get_tensor(f"G/{name}"), file.get_tensor(f"A/{name}")
                for slot in slots[name]:
                    gradient = slot.parameter.grad
                    local = (
                        slot.cut(trainer.strategy.local(gradient)).cpu()
                        if gradient is not None
                        else torch.zeros(slot.numel)
                    )
                    part = compare(local, slot.slice_of(mean), slot.slice_of(size), self.reduction, scale)
                    sums[row] += part[0]
                    maxima[row] = torch.maximum(maxima[row], part[1])
        group = self.strategy.shard_group
        if group is not None:
            sums, maxima = sums.to(self.world.device), maxima.to(self.world.device)
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return [
            self._judge(step, summary[name], row, top)
            for name, row, top in zip(names, sums.tolist(), maxima.tolist(), strict=True)
        ]

    def _judge(self, step: int, found: ParameterSummary, sums: list[float], maxima: list[float]) -> GradientCheck:
        name, numel = found.name, found.numel
        error, mean_square, product, own_square, violations, illegal = sums
        margin, power_scale, power_element = maxima
        relative = None if mean_square == 0 else math.sqrt(error / mean_square)
        tolerance = self.config.gate.tolerance
        if tolerance is not None:
            off = math.sqrt(error) if relative is None else relative  # where G is all zero, so must the gradient be
            inside = off == 0 if relative is None else off <= tolerance
            tier = Tier.tolerance if inside and not illegal else Tier.fail
            margin = off / tolerance
            power_scale, power_element = 1 / tolerance, tolerance * math.sqrt(mean_square)
        elif violations == 0 and self.reduction.reduces:
            tier = Tier.bound
        elif self._noise_allowed() and self._within_noise(name, relative) and not illegal:
            tier = Tier.noise
        else:
            tier = Tier.fail
        rms = math.sqrt(mean_square / numel) if numel else 0.0
        return GradientCheck(
            name=name,
            step=step,
            mode=self.mode,
            tier=tier.value,
            relative_l2=relative,
            cosine=None if own_square == 0 or mean_square == 0 else product / math.sqrt(own_square * mean_square),
            alpha=None if mean_square == 0 else product / mean_square,
            margin=margin,
            violations=int(violations),
            nonfinite=found.nonfinite,
            power_scale=1 / power_scale if power_scale else math.inf,
            power_element=math.inf if rms == 0 else power_element / rms,
        )

    def _noise_allowed(self) -> bool:
        """On CPU every kernel here is deterministic and the replay's own, so nothing is owed to noise."""
        return self.config.gate.noise and self.world.device.type == "cuda"

    def _within_noise(self, name: str, relative: float | None) -> bool:
        floor = (self.baseline.facts.get("noise_floor") or {}).get(name)
        return floor is not None and relative is not None and relative <= self.config.gate.kappa * floor

    # --- a step's update

    def _plain_sgd_step(self, trainer: Trainer) -> None:
        """One plain SGD step of size 1 through the optimizer's own parameters must move the module's own: an optimizer
        that holds dead parameters, or gradients that are not its parameters', shows here whatever the learning rate."""
        moved = self.shadow.plain_sgd_moves(trainer)
        stuck = sorted({name for names in self.world.gather(moved) for name in names})
        self._add(
            "plain_sgd",
            1,
            not stuck,
            f"a step of plain SGD through the optimizer does not move {', '.join(stuck[:5])}" if stuck else "",
            parameter=stuck[0] if stuck else None,
        )

    def on_step(self, metrics: StepMetrics, trainer: Trainer) -> None:
        if metrics.step > self.num_steps:
            return
        step, expected = metrics.step, self.baseline.step(metrics.step)
        if step == 1:
            self._dtypes(trainer)
        self._norm_and_clip(metrics)
        self._update(step, metrics, trainer)
        self._reported(metrics)
        if self.exact_state:
            self._next_scale(step, expected, metrics, trainer)
        weights = self._summary(trainer, gradients=False)
        self._held = {p.name: p.digest for p in weights}
        self._stepped = self._stepped or not metrics.skipped
        agree, ranks = self._replicas_agree(self._local_summary)
        self._add("replicas_after", step, agree, "" if agree else f"ranks hold different weights: {ranks}", ranks=ranks)
        buffers = self._buffers_differ(trainer, expected["buffers"])
        exact = all(p.name in weights and weights[p.name].digest == p.digest for p in self.baseline.weights(step))
        if self.exact_state:  # every forced step starts from the baseline's
            self._add("buffers", step, not buffers, _listed(buffers), ranks=sorted({rank for rank, _ in buffers}))
            if not self.strategy.zeros_for_unused:
                self._unused_weights(step, weights, expected["nones"])
        if self.mode == "free":
            self.exact_state = self.exact_state and exact and agree and not buffers
        if any(not check.passed for check in self.checks):
            raise StopGate

    def _unused_weights(self, step: int, weights: Summary, unused: list[str]) -> None:
        """Parameters without a gradient stay as the baseline's do: a gradient of zeros lets weight decay move them."""
        after = self.baseline.weights(step)
        moved = [name for name in unused if name in weights and weights[name].digest != after[name].digest]
        detail = f"{len(moved)} parameters without a gradient moved, first {moved[0]}" if moved else ""
        self._add("unused_weights", step, not moved, detail, parameter=moved[0] if moved else None)

    def _dtypes(self, trainer: Trainer) -> None:
        """What was read back from the built objects is what the precision declares."""
        precision, seen = self.config.precision, self.dtypes.seen
        declared = {"parameters": precision.param_dtype, "gradients": precision.param_dtype}
        if seen.get("reduce") is not None:
            declared["reduce"] = precision.reduce_dtype
        if seen.get("compute") is not None and not precision.autocast:
            declared["compute"] = precision.compute_dtype
        wrong = [
            f"{what} in {seen[what]}, declared {dtype}"
            for what, dtype in declared.items()
            if seen.get(what) not in (None, dtype)
        ]
        self._add("dtypes", 1, not wrong, "; ".join(wrong))

    def _reported(self, metrics: StepMetrics) -> None:
        """What is logged is the global loss and the learning rate in use, on every rank: what people compare."""
        total, size = sum(loss for loss, _, _ in self.shares), sum(abs(loss) for loss, _, _ in self.shares)
        details = []
        for (loss, lr), (_, count, _) in zip(self.world.gather((metrics.loss, metrics.lr)), self.shares, strict=True):
            detail = ""
            if not (_same_number(loss, total / count) or abs(loss - total / count) <= 1e-9 * size / count):
                detail = f"reports loss {loss!r}, the global one is {total / count!r}"
            elif lr != self.shadow.learning_rate:
                detail = f"reports learning rate {lr!r}, the configured one is {self.shadow.learning_rate!r}"
            details.append(detail)
        self._add_by_rank("reported", metrics.step, details)

    def _next_scale(self, step: int, expected: dict[str, Any], metrics: StepMetrics, trainer: Trainer) -> None:
        """The loss scale after the step; forced steps start from the baseline's, so its course shows only here."""
        wanted, details = expected["next_scale"], []
        # Gathered whatever this rank did: where ranks do not skip alike, they must still meet here.
        for scale, skipped in self.world.gather((trainer.scaler.scale, metrics.skipped)):
            right = scale == wanted or skipped != expected["skipped"]
            details.append("" if right else f"next loss scale {scale:g}, the baseline's {wanted:g}")
        self._add_by_rank("next_scale", step, details)

    def _norm_and_clip(self, metrics: StepMetrics) -> None:
        """The norm each rank clipped by against its gradients' own, and the coefficient it used."""
        own = math.sqrt(self._norm_squared) if math.isfinite(self._norm_squared) else math.inf
        shares = self.world.gather((metrics.grad_norm, metrics.grad_norm_clipped, own))
        self._add_by_rank("norm", metrics.step, [_norm_wrong(used, norm) for used, _, norm in shares])
        limit = self.config.clip_norm
        self._add_by_rank("clip", metrics.step, [_clip_wrong(clipped, norm, limit) for _, clipped, norm in shares])

    def _update(self, step: int, metrics: StepMetrics, trainer: Trainer) -> None:
        """Parameters after the run's optimizer, against a plain optimizer fed the same gradients."""
        norm = metrics.grad_norm  # what this rank clipped by; `norm` has judged it
        wrong = self.shadow.check_update(trainer, norm)
        everywhere: dict[str, float] = {}
        for share in self.world.gather(wrong):
            for name, size in share.items():
                everywhere[name] = max(size, everywhere.get(name, 0.0))
        worst = max(everywhere, key=lambda name: everywhere[name], default=None)
        lr = self.shadow.learning_rate
        rule = f"{self.config.optimizer.name} with lr {lr:.6g}"
        detail = f"{len(everywhere)} parameters moved otherwise than {rule} moves them, worst {worst}"
        self._add("update", step, not everywhere, detail if everywhere else "", parameter=worst)
        other = sorted({name for names in self.world.gather(self.shadow.other_settings(trainer)) for name in names})
        detail = f"{len(other)} parameters in no optimizer group or in one with other settings, first {other[:1]}"
        self._add("optimizer_groups", step, not other, detail if other else "", parameter=other[0] if other else None)

    # --- forced steps and the verdict

    def run(self, trainer: Trainer) -> None:
        """Run the gate's steps. Raises StopGate after the first that fails.

        As soon as rounding makes the next step start from other weights than the baseline's, the steps that are left
        run from the baseline's own state first, and freely after that: a fault that comes once and not again must meet
        the step that is held against the bound.
        """
        forced = False
        while trainer.step < self.num_steps:
            trainer.run(until=trainer.step + 1)
            if not self.exact_state and not forced:
                forced = True
                self._forced_steps(trainer, range(trainer.step + 1, self.num_steps + 1))
        self._coverage()

    def _coverage(self) -> None:
        """Every step was held against the baseline: a run that starts elsewhere has passed nothing."""
        compared = {check.step for check in self.checks if check.name == "gradients"}
        left_out = [step for step in range(1, self.num_steps + 1) if step not in compared]
        detail = f"steps {left_out} were never run: the step counter did not start at 0" if left_out else ""
        if not self._stepped and not detail:
            detail = (
                f"the loss scaler skipped all {self.num_steps} steps, so no update was compared: use more steps or a "
                "smaller precision.scaler.init_scale"
            )
        self._add("coverage", left_out[0] if left_out else self.num_steps, not detail, detail)

    def _forced_steps(self, trainer: Trainer, steps: range) -> None:
        """Run steps each from the baseline's own state; the trainer is left as it was."""
        saved = snapshot(trainer)
        shadow, held, self.mode = self.shadow, self._held, "forced"
        observers, trainer.observers = trainer.observers, [self]
        try:
            for step in steps:
                load_state(trainer, self.baseline, step - 1)
                self._held = {p.name: p.digest for p in self.baseline.weights(step - 1)}
                self.exact_state = True
                self.shadow = ShadowOptimizer(self.config, trainer, from_optimizer=trainer.optimizer)
                self.on_step(trainer.train_step(), trainer)
        finally:
            restore(trainer, saved)
            self.shadow, self._held, self.mode = shadow, held, "free"
            self.exact_state, trainer.observers = False, observers

    def verdict(self) -> Verdict:
        passed = all(check.passed for check in self.checks)
        tier = max((ORDER.index(Tier(g.tier)) for g in self.gradients), default=0)
        return Verdict(passed, ORDER[tier] if passed else Tier.fail, self.checks, self.gradients, len(self.names))

    # --- helpers

    def _add(self, name: str, step: int, passed: bool, detail: str = "", **more: Any) -> None:
        self.checks.append(Check(name, step, self.mode, passed, detail=detail, **more))

    def _add_by_rank(self, name: str, step: int, details: list[str]) -> None:
        """A check that each rank fails for itself, with its own reason; an empty reason passes."""
        ranks = [rank for rank, detail in enumerate(details) if detail]
        first = f"rank {ranks[0]}: {details[ranks[0]]}" if ranks else ""
        self._add(name, step, not ranks, first, ranks=ranks)

    def _summary(self, trainer: Trainer, gradients: bool) -> Summary:
        """Whole summary of gradients or weights; this rank's own part is kept for the comparison of replicas."""
        shards = []
        for slot in trainer.strategy.slots(trainer.module):
            source: Tensor | None = slot.parameter.grad if gradients else slot.parameter
            shards.append(slot.shard(None if source is None else trainer.strategy.local(source.detach())))
        self._local_summary = summarize(shards)
        return self._local_summary.reduce(self.strategy.shard_group)

    def _replicas_agree(self, local: Summary) -> tuple[bool, list[int]]:
        """Whether ranks that hold the same elements hold the same bits; the ranks in the minority."""
        if self.strategy.num_replicas == 1 or self.world.size == 1:
            return True, []
        digests = self.world.gather(tuple((p.name, p.digest) for p in local))
        common = max(set(digests), key=digests.count)
        ranks = [rank for rank, digest in enumerate(digests) if digest != common]
        return not ranks, ranks

    def _buffers_differ(self, trainer: Trainer, expected: list[dict[str, str]]) -> list[tuple[int, str]]:
        """(rank, buffer) pairs that differ from the baseline's buffers of that rank."""
        own = {trainer.strategy.canonical_name(name): tensor_digest(b) for name, b in trainer.module.named_buffers()}
        return [
            (rank, name)
            for rank, found in enumerate(self.world.gather(own))
            for name, digest in expected[rank].items()
            if found.get(name) != digest
        ]


def compare(
    gradient: Tensor, mean: Tensor, magnitude: Tensor, reduction: Reduction, scale: float
) -> tuple[Tensor, Tensor]:
    """One slice of a reduced gradient against G and A.

    Returns fp64 sums [|g-G|^2, |G|^2, <g,G>, |g|^2, elements outside the bound, illegal non-finite elements] and maxima
    [error / bound, (|G| - bound) / (2 bound), 2 bound]. The second is 1 / s for the least scale error s that no legal
    error hides: with a legal e, |(1 + s)(G + e) - G| >= s |G| - (1 + s) bound, which is above the bound.
    """
    g, exact = gradient.double(), mean.double()
    bound = reduction.elementwise(magnitude, scale)
    finite = g.isfinite() & exact.isfinite()
    # A sum with an infinite or NaN term is never finite, and its sign is the term's.
    legal = torch.where(exact.isfinite(), reduction.may_overflow(magnitude, scale), g.isnan() | (g == exact))
    error = torch.where(finite, (g - exact).abs(), torch.zeros_like(g))
    illegal = ~finite & ~legal
    outside = (error > bound) | illegal
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound)  # 0 / 0 where both are exactly zero
    clean_g, clean_mean = torch.where(finite, g, 0.0), torch.where(finite, exact, 0.0)
    sums = [
        error.square().sum(),
        clean_mean.square().sum(),
        (clean_g * clean_mean).sum(),
        clean_g.square().sum(),
        outside.sum(),
        illegal.sum(),
    ]
    if g.numel() == 0:
        return torch.zeros(6, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    most = torch.where(illegal.any(), torch.tensor(math.inf, dtype=torch.float64), ratio.max())
    usable = finite & (bound > 0)
    power = torch.where(usable, (clean_mean.abs() - bound).clamp_min(0) / (2 * bound), 0.0)
    allowed = torch.where(finite, 2 * bound, 0.0)
    return torch.stack([s.double() for s in sums]), torch.stack([most, power.max(), allowed.max()])


def _norm_wrong(used: float, norm: float) -> str:
    """What is wrong with the norm a rank used, where the gradients' own is `norm`; empty: nothing."""
    if not math.isfinite(norm):
        return f"norm {used!r}, but gradients are not finite" if math.isfinite(used) else ""
    right = abs(used - norm) <= 1e-9 * norm  # a NaN is wrong, too
    return "" if right else f"norm {used!r}, the gradients' own is {norm!r}"


def _clip_wrong(clipped: float, norm: float, limit: float | None) -> str:
    """What is wrong with the norm a rank says it clipped to."""
    if not math.isfinite(norm):
        return ""
    wanted = norm if limit is None else norm * min(1.0, limit / (norm + 1e-6))
    right = abs(clipped - wanted) <= 1e-6 * max(wanted, 1e-300)
    return "" if right else f"clipped to norm {clipped!r}, should be {wanted!r}"


def _relative(value: float, reference: float) -> float:
    """|value - reference| over |reference|; infinite where only one of them is finite, 0 where neither is."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return 0.0 if math.isfinite(value) == math.isfinite(reference) else math.inf
    return 0.0 if value == reference else abs(value - reference) / max(abs(reference), 1e-300)


def _same_number(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _listed(buffers: list[tuple[int, str]]) -> str:
    return ", ".join(f"{name} on rank {rank}" for rank, name in buffers[:5])


def verdict_tree(verdict: Verdict, baseline: Baseline, reused: bool) -> dict[str, Any]:
    """gate.json's content (docs/run-folder.md)."""
    first = [g for g in verdict.gradients if g.step == 1]
    power = max((g.power_scale for g in first), default=None)
    element = max((g.power_element for g in first), default=None)
    squares = [g.relative_l2 for g in first if g.relative_l2 is not None]
    return {
        "schema": 1,
        "passed": verdict.passed,
        "tier": verdict.tier.value,
        "text": verdict.text(),
        "num_parameters": verdict.num_parameters,
        "power": {
            "relative_scale_error": power,
            "single_element_over_rms": element,
            "meaning": "the smallest errors this gate was sure to catch in any parameter of step 1",
        },
        "parallel_error": max(squares, default=None),
        "precision_error": baseline.facts["precision_error"],
        "precision_error_reason": baseline.facts["precision_error_reason"],
        "baseline": {"folder": baseline.folder.name, "reused": reused, "seconds": baseline.facts["seconds"]},
        "checks": [asdict(check) for check in verdict.checks],
        "gradients": [asdict(gradient) for gradient in verdict.gradients],
    }
