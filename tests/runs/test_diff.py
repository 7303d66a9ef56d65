"""The engine of `distbench diff`: what it finds, what it calls it, and what it makes of damaged files."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from distbench.config import Seeds
from distbench.errors import DistbenchError, RunFolderError, SummaryError, TensorFileError
from distbench.export import export
from distbench.numerics.shards import Shard
from distbench.numerics.summary import Summary, summarize
from distbench.runs.diff import Diff, diff, to_json
from distbench.runs.diff_rows import Row, estimated_rows
from distbench.runs.files import strict
from distbench.runs.sides import read_gate, read_losses, settings
from tests.checkpoint.test_sharded import ADAMW, save_after
from tests.configs import small
from tests.distributed import run_distributed
from tests.runs.folders import NAMES, gradients, make_run, summary, usual_run
from tests.steps import ONE_PROCESS

Change = Callable[[dict[str, Tensor]], Any]


def changed(change: Change, seed: int = 1) -> dict[str, Any]:
    tensors = gradients(seed)
    change(tensors)
    return tensors


def rows(found: Diff, step: int = 0) -> dict[str, Row]:
    return {row.name: row for row in found.gradients[step].rows}


# --- whole runs


def test_equal_runs(tmp_path: Path) -> None:
    found = diff(usual_run(tmp_path / "a"), usual_run(tmp_path / "b", config={"name": "b"}))
    assert not found.differs and not found.settings and not found.notes and not found.reading
    assert found.verdict() == "EQUAL bit for bit: losses, gradients, weights"
    assert [part.step_a for part in found.gradients] == [1, 2]
    assert found.gradients[0].order == list(NAMES)


def test_settings_never_count(tmp_path: Path) -> None:
    """Two strategies with the same numbers are equal; only what differs is listed, by section."""
    config = {"strategy": {"name": "fsdp2"}, "prefetch.backward": "none", "optimizer.betas": [0.9, 0.99]}
    batch = {"world_size": 4, "text": "2 x 1 x 4 = 8"}
    found = diff(usual_run(tmp_path / "a", config=config, batch=batch), usual_run(tmp_path / "b"))
    assert not found.differs
    assert {(s.section, s.key, s.missing): (s.a, s.b) for s in found.settings} == {
        ("environment", "batch.world_size", ""): (4, 2),
        ("config", "strategy.name", ""): ("fsdp2", "ddp"),
        ("config", "strategy.bucket_cap_mb", "a"): (None, 25.0),
        ("config", "prefetch.backward", ""): ("none", "pre"),
        ("config", "optimizer.betas", ""): ([0.9, 0.99], [0.9, 0.95]),
    }
    (unused,) = [s for s in found.settings if s.unused]
    assert unused.key == "prefetch.backward" and "gathers no parameters" in unused.unused


def test_one_is_not_true(tmp_path: Path) -> None:
    a, b = (usual_run(tmp_path / str(i), config={"x": value}) for i, value in enumerate((1, True)))
    assert [s.key for s in diff(a, b).settings] == ["x"]


def test_first_difference_is_named(tmp_path: Path) -> None:
    grads = {1: gradients(1), 2: gradients(5)}
    a = usual_run(tmp_path / "a", losses=[2.0, 1.5, 1.0], grads=grads, weights={3: gradients(6)})
    found = diff(a, usual_run(tmp_path / "b"))
    assert found.first_gradients is found.gradients[1]
    assert found.losses is not None and found.losses.first_step == 3 and found.losses.largest == 0.2
    assert found.verdict().startswith("DIFFERENT: losses (first at step 3); gradients at step 2 (4 of 4, worst")
    assert "agree up to step 1 and first differ at step 2" in found.reading[0]
    assert "losses of step 2 are equal" in found.reading[1]


def test_scale_is_recognised(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a", grads={1: gradients(1, 0.5)})
    found = diff(a, usual_run(tmp_path / "b"))
    assert any("A is 0.5 times B, with cosine 1: a scale" in sentence for sentence in found.reading)
    row = rows(found)["head.bias"]
    assert row.alpha == pytest.approx(0.5, rel=1e-12) and row.relative == pytest.approx(0.5, rel=1e-12)
    assert not row.exact and row.relative_error is not None and row.relative_error < 1e-12
    (part,) = found.gradients
    assert part.relative == pytest.approx(0.5, rel=1e-12) and part.relative_error < 1e-12


def test_few_parameters_are_named(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a", grads={1: changed(lambda t: t["head.bias"].mul_(1.5))})
    assert any("Only 1 of 4 parameters differ (head.bias)" in s for s in diff(a, usual_run(tmp_path / "b")).reading)


def test_other_work_is_said(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a", config={"seed.data": 3, "optimizer.lr": 1.0}, dtypes={"compute": "bf16"})
    said = " ".join(diff(a, usual_run(tmp_path / "b")).reading)
    assert (
        "different things (seed.data)" in said
        and "otherwise (optimizer.lr)" in said
        and "compute bf16 and fp32" in said
    )


def test_a_run_that_failed(tmp_path: Path) -> None:
    """Whatever is there is compared; a record that was never written is no obstacle."""
    a = usual_run(
        tmp_path / "a", weights={}, grads={1: gradients(1)}, status="gate_failed", gate={"text": "gate FAILED: x"}
    )
    b = usual_run(tmp_path / "b")
    found = diff(a, b)
    assert not found.differs and found.a.status == "gate_failed" and found.a.gate == "gate FAILED: x"
    assert any("weights: only B" in note for note in found.notes)
    (a / "record.json").unlink()
    (a / "metrics.jsonl").write_text((a / "metrics.jsonl").read_text() + '{"step": 4, "lo')
    found = diff(a, b)
    assert found.losses is not None and found.losses.steps == [1, 2, 3]
    assert any("no record.json" in note for note in found.notes) and any("cut short" in note for note in found.notes)
    assert found.a.config == found.b.config


def test_different_models(tmp_path: Path) -> None:
    grads = {1: {**gradients(1), "extra.weight": torch.ones(5, 7)}}
    b = usual_run(tmp_path / "b", grads={1: {k: v for k, v in gradients(1).items() if k != "head.bias"}})
    found = diff(usual_run(tmp_path / "a", grads=grads), b)
    assert found.differs
    assert found.gradients[0].only_a == ["head.bias", "extra.weight"] and found.gradients[0].only_b == []


def test_step(tmp_path: Path) -> None:
    grads = {1: gradients(9), 2: gradients(2)}
    a, b = usual_run(tmp_path / "a", losses=[9.0, 1.5], grads=grads), usual_run(tmp_path / "b")
    assert diff(a, b).differs and not diff(a, b, step=2).differs and diff(a, b, step=1).differs
    with pytest.raises(RunFolderError, match=r"no losses, gradients or weights of step 7 .* gradients of steps 1, 2"):
        diff(a, b, step=7)


# --- losses


@pytest.mark.parametrize(("tolerance", "beyond"), [(0.0, 2), (1e-9, 1), (0.2, 0)])
def test_losses(tmp_path: Path, tolerance: float, beyond: int) -> None:
    a = make_run(tmp_path / "a", losses=[2.0, 1.5 * (1 + 1e-10), 1.1, 7.0])
    losses = diff(a, make_run(tmp_path / "b", losses=[2.0, 1.5, 1.0]), tolerance=tolerance).losses
    assert losses is not None and losses.steps == [1, 2, 3] and losses.num_beyond == beyond
    assert losses.first_step == 2 and losses.largest_step == 3 and losses.largest == pytest.approx(0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_equals_nothing(tmp_path: Path, value: float) -> None:
    a, b = (make_run(tmp_path / name, losses=[2.0, value]) for name in "ab")
    found = diff(a, b, tolerance=10.0)
    assert found.differs and found.losses is not None and found.losses.num_nonfinite == 1
    json.dumps(strict(to_json(found)), allow_nan=False)


def test_a_loss_of_zero_has_no_relative_difference(tmp_path: Path) -> None:
    found = diff(make_run(tmp_path / "a", losses=[1e-30]), make_run(tmp_path / "b", losses=[0.0]), tolerance=0.5)
    assert (
        found.differs and found.losses is not None and found.losses.num_absolute == 1 and found.losses.largest is None
    )


# --- gradients


@pytest.mark.parametrize(
    ("change", "relation", "differs", "detail"),
    [
        (lambda t: t["head.bias"].zero_(), "different", True, "A is all zero"),
        (lambda t: t["head.bias"].view(-1)[:1].fill_(math.nan), "nonfinite", True, "A has 1 NaN, B has none"),
        (lambda t: t["head.bias"].view(-1)[:2].fill_(math.inf), "nonfinite", True, "A has 2 inf"),
        (lambda t: t.update({"head.bias": None}), "none", True, "None in A, not zero in B"),
        (lambda t: t.update({"head.bias": t["head.bias"].double()}), "equal", False, "dtypes float64 and float32"),
        (lambda t: t.update({"head.bias": t["head.bias"].bfloat16()}), "different", True, "dtypes bfloat16"),
        (lambda t: t.update({"head.bias": torch.ones(3)}), "shape", True, "shape [3] in A, [5, 7] in B"),
    ],
)
def test_kinds_of_difference(tmp_path: Path, change: Change, relation: str, differs: bool, detail: str) -> None:
    a = make_run(tmp_path / "a", grads={1: changed(change)})
    found = diff(a, make_run(tmp_path / "b", grads={1: gradients(1)}))
    row = rows(found)["head.bias"]
    assert (row.relation, row.differs) == (relation, differs) and detail in row.detail
    assert found.differs == differs
    assert found.gradients[0].rows[0] is row or not differs
    assert not any(row.differs for name, row in rows(found).items() if name != "head.bias")


def test_nan_is_never_equal(tmp_path: Path) -> None:
    grads = {1: changed(lambda t: t["head.bias"].fill_(math.nan))}
    found = diff(make_run(tmp_path / "a", grads=grads), make_run(tmp_path / "b", grads=grads), tolerance=1e9)
    row = rows(found)["head.bias"]
    assert found.differs and row.relation == "nonfinite" and row.nonfinite_a == 35 and "same bits" in row.detail


def test_zero_reference_is_absolute(tmp_path: Path) -> None:
    b = make_run(tmp_path / "b", grads={1: changed(lambda t: t["head.bias"].zero_())})
    a = make_run(tmp_path / "a", grads={1: changed(lambda t: t["head.bias"].fill_(1e-3))})
    row = rows(diff(a, b, tolerance=0.5))["head.bias"]
    assert row.differs and row.exact and row.relative is None
    assert row.distance == pytest.approx(1e-3 * math.sqrt(35)) and "B is all zero" in row.detail
    tiny = make_run(tmp_path / "tiny", grads={1: changed(lambda t: t["head.bias"].fill_(2.0**-149))})
    assert rows(diff(tiny, b))["head.bias"].differs and not rows(diff(tiny, b, tolerance=1e-6))["head.bias"].differs
    none = make_run(tmp_path / "none", grads={1: changed(lambda t: t.update({"head.bias": None}))})
    row = rows(diff(none, b))["head.bias"]
    assert row.relation == "none" and not row.differs and "all zero in B" in row.detail


def test_minus_zero_is_zero(tmp_path: Path) -> None:
    a, b = ({1: changed(lambda t, z=z: t["head.bias"].fill_(z))} for z in (0.0, -0.0))
    row = rows(diff(make_run(tmp_path / "a", grads=a), make_run(tmp_path / "b", grads=b)))["head.bias"]
    assert row.relation == "equal" and not row.differs


def test_tolerance_and_its_uncertainty(tmp_path: Path) -> None:
    noise = gradients(2, 0.01)
    a = make_run(tmp_path / "a", grads={1: {name: g + noise[name] for name, g in gradients(1).items()}})
    b = make_run(tmp_path / "b", grads={1: gradients(1)})
    assert not diff(a, b, tolerance=0.05).differs and diff(a, b, tolerance=1e-3).differs
    for row in rows(diff(a, b, tolerance=0.011)).values():
        assert row.relative is not None and row.differs == (row.relative > 0.011)
        assert row.distance and row.distance_low and row.distance_high
        assert 0.74 < row.distance_low / row.distance < 0.8 and 1.4 < row.distance_high / row.distance < 1.53
        allowed = 0.011 * row.distance / row.relative
        assert row.uncertain == (row.distance_low <= allowed < row.distance_high)
    scaled = make_run(tmp_path / "scaled", grads={1: gradients(1, 1.01)})
    for tolerance, differs in ((0.00999, True), (0.01001, False)):
        found = diff(scaled, b, tolerance=tolerance)
        assert found.differs == differs and not any(row.uncertain for row in rows(found).values())


def test_a_difference_below_rounding_is_still_seen(tmp_path: Path) -> None:
    """The digest says that one bit differs, whatever the projections can resolve."""
    a = changed(lambda t: t["head.bias"].view(torch.int32).view(-1)[3:4].bitwise_xor_(1))
    found = diff(make_run(tmp_path / "a", grads={1: a}), make_run(tmp_path / "b", grads={1: gradients(1)}))
    assert found.differs and rows(found)["head.bias"].relation == "different"


def test_other_seeds_are_said(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    summary(changed(lambda t: t["head.bias"].mul_(2)), seed=1).save(a)
    summary(gradients(1)).save(b)
    found = diff(a, b)
    row = rows(found)["head.bias"]
    assert row.relation == "different" and row.distance is None and row.cosine is None and row.norm_a == 2 * row.norm_b
    assert [r.relation for r in found.gradients[0].rows[1:]] == ["bitwise"] * 3
    assert "seeds 1 (A) and 0 (B)" in found.gradients[0].notes[0]


def test_incomplete_gradients_are_not_compared(tmp_path: Path) -> None:
    tensors = gradients(1)
    twice = summary(tensors).merge(summary(tensors))
    for step, one in ((1, summary(tensors)), (2, twice)):
        one.save(tmp_path / f"{step}.safetensors")
    (row, *_) = diff(tmp_path / "2.safetensors", tmp_path / "1.safetensors").gradients[0].rows
    assert row.relation == "incomplete" and row.differs and "70 of 35 elements in A" in row.detail


def test_full_gradients_are_exact(tmp_path: Path) -> None:
    sides = []
    for name, tensors in (("a", gradients(1, 1.25)), ("b", gradients(1))):
        run = make_run(tmp_path / name, grads={1: tensors})
        save_file(tensors, run / "gradients" / "step_00000001.full.safetensors")
        sides.append(run)
    found = diff(*sides)
    assert found.gradients[0].method == "exact" and found.gradients[0].order == list(NAMES)
    assert all(row.relative == pytest.approx(0.25, rel=1e-6) and row.exact for row in found.gradients[0].rows)
    assert found.gradients[0].relative == pytest.approx(0.25, rel=1e-6) and found.gradients[0].relative_error == 0


def test_all_together(tmp_path: Path) -> None:
    """The estimate over all parameters, and its error, against the truth."""
    a, b = gradients(1), gradients(2)
    part = estimated_rows(summary(a), summary(b), (1, 1), 0.0)
    truth = math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in NAMES))
    truth /= math.sqrt(sum(float(b[n].double().square().sum()) for n in NAMES))
    assert part.relative is not None and part.relative_error is not None
    assert abs(part.relative - truth) < 4 * part.relative_error
    assert 0.04 < part.relative_error / part.relative < 0.177 / 2 * 1.1  # four parameters alike


# --- what is not a run, or is another one


def test_a_duplicate_cell_is_the_run_that_it_names(tmp_path: Path) -> None:
    first, twin = usual_run(tmp_path / "000_a"), tmp_path / "001_b"
    twin.mkdir()
    (twin / "duplicate_of.json").write_text('{"duplicate_of": "000_a"}')
    found = diff(twin, first)
    assert not found.differs and found.a.path == first
    assert "is the same experiment as 000_a: that one is compared" in found.notes[0]
    for content, message in (
        ('{"duplicate_of": "../000_a"}', "not the name of a cell"),
        ('{"duplicate_of": "001_b"}', "no run folder beside it"),
        ("{}", "no 'duplicate_of' in it"),
    ):
        (twin / "duplicate_of.json").write_text(content)
        with pytest.raises(RunFolderError, match=message):
            diff(twin, first)


def test_a_folder_of_runs_or_checkpoints_names_them(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "outputs" / "sweep" / "000_a")
    (tmp_path / "outputs" / "sweep" / "multirun.yaml").write_text("")
    usual_run(tmp_path / "outputs" / "single")
    with pytest.raises(RunFolderError, match=r"outputs holds nothing .* name a folder in it: single, sweep/000_a$"):
        diff(tmp_path / "outputs", run)
    with pytest.raises(RunFolderError, match=r"name a folder in it: step_00000003$"):
        diff(run, run / "checkpoints")


def test_recorded_gradients_against_a_run(tmp_path: Path) -> None:
    """Their settings have nothing in common, which is said once; with no parameter in common there is nothing to say."""
    (tmp_path / "grads").mkdir()
    metadata = {"world_size": "1", "step": "1", "replicas": "agree", "torch": "2.13.0"}
    summary(gradients(1)).save(tmp_path / "grads" / "step_00000001.safetensors", metadata)
    run = usual_run(tmp_path / "run")
    found = diff(tmp_path / "grads", run)
    assert not found.differs and found.settings == [] and found.reading == []
    assert "settings: only B has any" in found.notes
    other = {f"other.{name}": g for name, g in gradients(1).items()}
    summary(other).save(tmp_path / "grads" / "step_00000001.safetensors", metadata)
    with pytest.raises(RunFolderError, match=r"no parameter has the same name on both sides; .*grads has other\.embed"):
        diff(tmp_path / "grads", run)


def test_no_evidence_of_other_initial_weights(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a", initial_weights=None)
    assert diff(a, usual_run(tmp_path / "b")).reading == []
    a = usual_run(tmp_path / "c", initial_weights="other")
    assert diff(a, usual_run(tmp_path / "d")).reading == ["A and B started from different weights."]


def test_recorded_folders(tmp_path: Path) -> None:
    for name, world in (("a", "2"), ("b", "1")):
        (tmp_path / name).mkdir()
        metadata = {"world_size": world, "step": "1", "replicas": "agree"}
        summary(gradients(1)).save(tmp_path / name / "step_00000001.safetensors", metadata)
    bad = {"world_size": "2", "replicas": "1 of 2 ranks differ from the first (rank 1 on), from head.bias on"}
    summary(gradients(2)).save(tmp_path / "a" / "step_00000002.safetensors", bad)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found.differs and [(s.key, s.a, s.b) for s in found.settings] == [("world_size", "2", "1")]
    assert any("1 steps are on one side only" in note for note in found.notes)
    summary(gradients(2)).save(tmp_path / "b" / "step_00000002.safetensors", {})
    assert "ranks that should hold the same gradients do not" in diff(tmp_path / "a", tmp_path / "b").reading[0]


def test_two_files_of_tensors(tmp_path: Path) -> None:
    save_file(gradients(1), tmp_path / "a.safetensors")
    save_file(gradients(1, 1.5), tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.weights is not None and found.weights.differs and found.losses is None and not found.settings
    assert found.weights.order == ["embed.weight", "head.bias", "layers.2.weight", "layers.10.weight"]
    assert found.verdict().startswith("DIFFERENT: weights (4 of 4")


def test_a_run_against_a_checkpoint_folder(tmp_path: Path) -> None:
    tensors = list(gradients(3).items())
    (tmp_path / "hub").mkdir()
    save_file(dict(tensors[:1]), tmp_path / "hub" / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[1:]), tmp_path / "hub" / "model-00002-of-00002.safetensors")
    found = diff(usual_run(tmp_path / "a"), tmp_path / "hub")
    assert not found.differs and found.verdict() == "EQUAL bit for bit: weights" and found.settings == []


def test_weights_of_other_steps(tmp_path: Path) -> None:
    a = usual_run(tmp_path / "a", weights={3: gradients(3), 4: gradients(4)})
    assert not diff(a, usual_run(tmp_path / "b")).differs
    found = diff(a, usual_run(tmp_path / "c", losses=[2.0, 1.5, 1.25, 0.5, 0.4], weights={5: gradients(9)}))
    assert not found.differs and found.weights is None and not any("optimizer" in said for said in found.reading)
    assert any("weights: A's last are of step 4, B's of step 5: not compared" in note for note in found.notes)
    assert found.verdict() == "EQUAL bit for bit: losses, gradients"
    with pytest.raises(RunFolderError, match="name two checkpoint folders"):
        diff(make_run(tmp_path / "d", weights={1: gradients(1)}), make_run(tmp_path / "e", weights={2: gradients(2)}))
    folder = a / "checkpoints" / "step_00000003"
    assert diff(folder, a, step=3).weights is not None and diff(folder, a).differs


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_reported(tmp_path: Path, value: float) -> None:
    """A mask's -inf in a buffer is no difference; its presence is said."""
    tensors = gradients(1)
    tensors["head.bias"][0, 0] = value
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert found.weights is not None
    (row,) = [row for row in found.weights.rows if row.name == "head.bias"]
    assert row.relation == "bitwise" and row.nonfinite_a == 1 and "same on both sides" in row.detail
    tensors["head.bias"][0, 0] = 1.0
    save_file(tensors, tmp_path / "b.safetensors")
    found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tolerance=1e9)
    assert found.differs and found.weights is not None and found.weights.rows[0].relation == "nonfinite"


# --- bad input


def test_nothing_in_common(tmp_path: Path) -> None:
    save_file(gradients(1), tmp_path / "a.safetensors")
    summary(gradients(1)).save(tmp_path / "b.safetensors")
    with pytest.raises(RunFolderError, match="nothing to compare"):
        diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    with pytest.raises(RunFolderError, match="nothing to compare"):
        diff(make_run(tmp_path / "a"), make_run(tmp_path / "b"))


def newer_record(run: Path) -> None:
    tree = json.loads((run / "record.json").read_text())
    (run / "record.json").write_text(json.dumps({**tree, "schema": 99}))


def newer_gate(run: Path) -> None:
    (run / "gate.json").write_text(json.dumps({"schema": 99, "text": "?"}))


def pipe(run: Path) -> None:
    import os

    (run / "record.json").unlink()
    os.mkfifo(run / "record.json")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (newer_record, RunFolderError, "record.json has schema 99"),
        (newer_gate, RunFolderError, "gate.json has schema 99"),
        (pipe, RunFolderError, "not a regular file"),
        (lambda run: (run / "record.json").write_bytes(b"\xff\xfe"), RunFolderError, "record.json is damaged"),
        (
            lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n'),
            RunFolderError,
            "line 1, is damaged: no 'loss'",
        ),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "loss": "x"}\n'), RunFolderError, "line 1"),
        (lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n"), RunFolderError, "line 1"),
        (lambda run: (run / "gate.json").write_text("[]"), RunFolderError, "gate.json is damaged"),
        (
            lambda run: (run / "gradients" / "step_00000002.safetensors").write_bytes(b"x" * 50),
            SummaryError,
            "step_00000002.safetensors",
        ),
        (
            lambda run: (run / "checkpoints" / "step_00000003" / "model.safetensors").write_bytes(
                b"PK\x03\x04" + b"0" * 99
            ),
            TensorFileError,
            "never unpickles",
        ),
        (shutil.rmtree, RunFolderError, "no such file or folder"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], Any], error: type, message: str) -> None:
    a, b = usual_run(tmp_path / "a"), usual_run(tmp_path / "b")
    damage(a)
    for pair in ((a, b), (b, a)):
        with pytest.raises(error, match=message):
            diff(*pair)


def test_aliases_in_yaml_cannot_explode(tmp_path: Path) -> None:
    run = usual_run(tmp_path / "a")
    (run / "record.json").unlink()
    for kind in ("[{0}, {0}, {0}, {0}, {0}, {0}, {0}, {0}]", "{{x: {0}, y: {0}, z: {0}}}", "!!pairs [a: {0}, b: {0}]"):
        lines = ["a0: &a0 [1, 2]"]
        lines += [f"a{i}: &a{i} " + kind.format(f"*a{i - 1}") for i in range(1, 30)]
        (run / "resolved.yaml").write_text("\n".join(lines))
        with pytest.raises(RunFolderError, match="too large or too deeply nested"):
            diff(run, usual_run(tmp_path / f"b{len(kind)}"))
    (run / "resolved.yaml").write_text("a: &a [*a]")
    with pytest.raises(RunFolderError, match="too deeply nested"):
        diff(run, usual_run(tmp_path / "c"))
    (run / "resolved.yaml").write_text("a: !!python/object/apply:os.system ['touch /tmp/executed']")
    with pytest.raises(RunFolderError, match="could not determine a constructor"):
        diff(run, usual_run(tmp_path / "d"))


def test_sums_that_no_gradient_has(tmp_path: Path) -> None:
    made = summary(gradients(1))
    made.floats[:, 2] = -1.0
    made.save(tmp_path / "a.safetensors")
    summary(gradients(2)).save(tmp_path / "b.safetensors")
    with pytest.raises(SummaryError, match="no gradient has such sums"):
        diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to three small damages of the kinds that disks, editors and crashes make."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 3:
            data[at:at] = rng.choice(
                [b"null", b"-1", b"1e999", b"[", b"{}", b'"', b"NaN", b"9" * 5000, b"\x00", b"true"]
            )
        else:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[other : other + rng.randint(1, 40)]
    return bytes(data)


@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl", "gate.json", "resolved.yaml"])
def test_fuzzed_readers(tmp_path: Path, name: str) -> None:
    """A damaged small file is either read, where the damage made no difference to its form, or a named error."""
    b = usual_run(tmp_path / "b")
    a = usual_run(tmp_path / "a")
    (a / "gate.json").write_text(json.dumps({"schema": 1, "passed": True, "text": "gate PASSED", "checks": []}))
    if name == "resolved.yaml":
        (a / "record.json").unlink()
    original, rng, refused = (a / name).read_bytes(), random.Random(name), 0
    for _ in range(300):
        (a / name).write_bytes(mutated(original, rng))
        try:
            json.dumps(strict(to_json(diff(a, b))), allow_nan=False)
        except DistbenchError as error:
            assert "\n" not in str(error) and str(a) in str(error), error
            refused += 1
    assert refused > 20


def test_fuzzed_summaries(tmp_path: Path) -> None:
    summary(gradients(1)).save(tmp_path / "b.safetensors")
    original, rng = (tmp_path / "b.safetensors").read_bytes(), random.Random(0)
    for _ in range(300):
        (tmp_path / "a.safetensors").write_bytes(data := mutated(original, rng))
        if data == original:
            continue
        with pytest.raises(DistbenchError):
            diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


# --- readers on their own


def test_losses_of_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"loss":2}\n{"step":2,"loss":"nan"}\n\n{"step":2,"loss":1.5}\n')
    losses = read_losses(tmp_path / "metrics.jsonl")
    assert losses.by_step == {1: 2.0, 2: 1.5} and "more than once" in losses.notes[0]


def test_gate_text(tmp_path: Path) -> None:
    (tmp_path / "gate.json").write_text('{"schema": 1, "text": "gate PASSED"}')
    assert read_gate(tmp_path / "gate.json") == "gate PASSED"


def test_settings_of_a_tree() -> None:
    tree = {"a": {"b": 1, "c": []}, "d": [1, {"e": math.inf}], "f": [1, 2], "g": {}}
    assert settings(tree, Path("x")) == {"a.b": 1, "a.c": [], "d.0": 1, "d.1.e": "inf", "f": [1, 2], "g": "{}"}


def test_selected_parameters() -> None:
    whole = summary(gradients(1))
    part = whole.select(["head.bias", "embed.weight"])
    assert part.names == ("head.bias", "embed.weight")
    assert part["embed.weight"].digest == whole["embed.weight"].digest
    assert np.array_equal(part["head.bias"].projections, whole["head.bias"].projections)
    with pytest.raises(KeyError):
        whole.select(["nothing"])


def test_empty_parameters(tmp_path: Path) -> None:
    empty = summarize([Shard.whole("w", torch.zeros(0, 3))])
    empty.save(tmp_path / "a.safetensors")
    replace(empty).save(tmp_path / "b.safetensors")
    assert not diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differs
    assert Summary.load(tmp_path / "a.safetensors")["w"].complete


# --- checkpoints of which there is no plain model


def sharded(root: Path, strategy: str, ranks: int, seed: int = 1) -> Path:
    """A run with losses, gradients and a checkpoint that its ranks wrote, and no `model.safetensors`."""
    config = small(strategy, optimizer=ADAMW, steps=4, global_batch=12, seed=Seeds(model=seed, data=2))
    run = make_run(root, losses=[2.0, 1.5], grads={1: gradients(1)})
    if ranks == 1:
        save_after(ONE_PROCESS, config, root / "checkpoints")
    else:
        run_distributed(save_after, ranks, config, root / "checkpoints")
    return run


def test_weights_are_gathered_from_shards(tmp_path: Path) -> None:
    a, b = sharded(tmp_path / "a", "fsdp2", 2), sharded(tmp_path / "b", "fsdp", 2)
    found = diff(a, b)
    assert found.verdict() == "EQUAL bit for bit: losses, gradients, weights" and found.weights is not None
    assert {row.name for row in found.weights.rows} >= {"layers.0.attn.weight"} and not found.weights.only_a
    other = sharded(tmp_path / "c", "single", 1, seed=3)
    assert diff(other, b).weights.differs
    checkpoints = [path / "checkpoints" / "step_00000002" for path in (a, b)]
    assert diff(*checkpoints).verdict() == "EQUAL bit for bit: weights", "named themselves, too"
    export(checkpoints[0], checkpoints[0] / "model.safetensors")
    assert diff(a, b).verdict() == "EQUAL bit for bit: losses, gradients, weights"
    assert diff(*checkpoints).verdict() == "EQUAL bit for bit: weights"


@pytest.mark.parametrize("damage", ["manifest.json", "rank_00001.safetensors"])
def test_the_rest_is_compared_where_they_cannot_be(tmp_path: Path, damage: str) -> None:
    a, b = sharded(tmp_path / "a", "fsdp2", 2), sharded(tmp_path / "b", "ddp", 2)
    (a / "checkpoints" / "step_00000002" / damage).unlink()
    found = diff(a, b)
    assert found.verdict() == "EQUAL bit for bit: losses, gradients" and found.weights is None
    assert any("weights: not compared" in note and f"{damage} is missing" in note for note in found.notes)
