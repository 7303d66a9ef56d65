"""The cache of baselines: reused where it may be, rebuilt where it must be, whole or not there at all."""

from __future__ import annotations

import copy
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distbench import experiment
from distbench.config import SGD, AdamW, BlockWrap, Config, Fault, Gate, LossScaler, NoWrap, Prefetch, Schedule
from distbench.errors import BaselineError
from distbench.launching.local import RanksFailed
from distbench.numerics import cache
from distbench.numerics.baseline import Baseline
from distbench.numerics.cache import GIB, BaselineEntry, ensure_baseline, key
from distbench.preflight import preset
from distbench.runs.folder import RunFolder, Status, read_record
from tests.configs import STRATEGIES, custom, small
from tests.gates import in_world


@pytest.fixture(autouse=True)
def release() -> Iterator[None]:
    """Each test is a process of its own as far as locks and memories go."""
    cache._verified.clear()
    yield
    while cache._used:
        cache._used.pop().close()


def config_of(root: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {"gate": Gate(steps=1, fp64_reference=False), "hidden": 5, "layers": 1}
    strategy = changes.pop("strategy", STRATEGIES["ddp"])
    config = small("ddp", **{**settings, **changes, "output_dir": str(root)})
    return in_world(replace(config, strategy=strategy), 2)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Compute here instead of in a process of its own; returns the folders computed into, as they come."""
    from distbench.numerics.baseline import compute_baseline
    from tests.gates import CPU

    computed: list[Path] = []

    def compute(config: Config, folder: Path, run: RunFolder, local_world_size: int) -> None:
        computed.append(folder)
        compute_baseline(config, folder, CPU)

    monkeypatch.setattr(cache, "_compute", compute)
    return computed


def ensure(config: Config, run: RunFolder) -> BaselineEntry:
    return ensure_baseline(config, None, run, 2)


def entries(root: Path) -> list[Path]:
    return sorted(path for path in (root / ".baselines").iterdir() if path.is_dir())


# --------------------------------------------------------------------------------------------------------------
# Reuse
# --------------------------------------------------------------------------------------------------------------


def test_computed_once_then_reused(tmp_path: Path, run: RunFolder, in_process: list[Path]) -> None:
    first, second = ensure(config_of(tmp_path), run), ensure(config_of(tmp_path), run)
    assert (first.reused, second.reused) == (False, True) and first.path == second.path
    assert len(in_process) == 1 and Baseline(Path(first.path)).num_steps == 1
    assert entries(tmp_path) == [Path(first.path)], "nothing temporary is left"


def test_a_process_of_its_own_computes_the_same(tmp_path: Path, run: RunFolder, in_process: list[Path]) -> None:
    """Same threads, same kernels: the same bits."""
    config = config_of(tmp_path)
    here = Path(ensure(config, run).path)
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        patch.setattr(cache, "_compute", ORIGINAL)
        there = Path(ensure(replace(config, output_dir=str(tmp_path / "other")), run).path)
    for file in ("step_1.safetensors", "state_0.safetensors"):
        assert (here / file).read_bytes() == (there / file).read_bytes(), file


ORIGINAL = cache._compute

SAME: dict[str, dict[str, Any]] = {
    "name": {"name": "another"},
    "fault": {"fault": Fault(_target_="tests.nothing.Here", name="x")},
    "wrapping": {"wrap_policy": NoWrap()},
    "block classes": {"wrap_policy": BlockWrap(classes=["Linear"])},
    "prefetch": {"prefetch": Prefetch(forward=True)},
    "more steps, constant schedule": {"steps": 50},
    "tolerance, location, cache": {
        "gate": Gate(steps=1, fp64_reference=False, tolerance=0.1, locate=False, cache_gib=1.0, keep_gradients=True)
    },
    "ddp's buckets": {"strategy": replace(STRATEGIES["ddp"], bucket_cap_mb=1.0, gradient_as_bucket_view=True)},
    "synced, one micro-batch": {"accumulation_sync": True},
}

OTHER: dict[str, dict[str, Any]] = {
    "model": {"hidden": 7},
    "precision": {"precision": preset("bf16")},
    "reduction": {"precision": replace(preset("fp32"), reduce_dtype="bf16")},
    "seed": {"seed": replace(small().seed, model=9)},
    "data seed": {"seed": replace(small().seed, data=9)},
    "batch": {"global_batch": 24},
    "micro-batches": {"accumulation": 2},
    "synced": {"accumulation": 2, "accumulation_sync": True},
    "optimizer": {"optimizer": AdamW()},
    "learning rate": {"optimizer": SGD(lr=1.0)},
    "clipping": {"clip_norm": 0.5},
    "gate steps": {"gate": Gate(steps=2, fp64_reference=False), "steps": 2},
    "fp64 reference": {"gate": Gate(steps=1)},
    "schedule's end": {"optimizer": SGD(schedule=Schedule.linear), "steps": 7},
    "determinism": {"deterministic": False},
    "buffers": {"strategy": replace(STRATEGIES["ddp"], broadcast_buffers=False)},
    "strategy's way to add up": {"strategy": STRATEGIES["fsdp"], "accumulation": 2, "precision": preset("bf16")},
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_no_bit_changes_no_key(what: str, tmp_path: Path) -> None:
    assert key(config_of(tmp_path, **SAME[what]), None, 2) == key(config_of(tmp_path), None, 2)


@pytest.mark.parametrize("what", OTHER)
def test_what_matters_changes_the_key(what: str, tmp_path: Path) -> None:
    keys = {key(config_of(tmp_path, **changes), None, 2) for changes in (OTHER[what], {})}
    assert len(keys) == 2


def test_ranks_and_threads_change_the_key(tmp_path: Path) -> None:
    config = config_of(tmp_path, global_batch=24)
    more = replace(config, launch=replace(config.launch, threads_per_rank=2))
    assert len({key(c, None, 2) for c in (config, in_world(config, 3), more)}) == 3


def test_strategies_share_a_baseline(tmp_path: Path) -> None:
    """What a sweep of strategies counts on, as long as there are no buffers that only DDP sends around."""
    for name in ("fp32", "bf16", "fp16"):
        chosen = [strategy for short, strategy in STRATEGIES.items() if short != "single"]
        # Wide enough for cache lines: of narrower models FSDP1 packs weights in a way that products round by.
        configs = [config_of(tmp_path, hidden=32, strategy=s, precision=preset(name)) for s in chosen]
        assert len({key(config, nn.Linear(2, 2), 2) for config in configs}) == 1
        assert len({key(config, nn.BatchNorm1d(2), 2) for config in configs}) == 2


def test_units_matter_where_a_wrapper_does_something_at_their_calls(tmp_path: Path) -> None:
    for name, differ in (("ddp", False), ("fsdp", True), ("fsdp2", True)):
        config = custom("Plain", name, output_dir=str(tmp_path))
        keys = {key(replace(config, wrap_policy=wrap), None, 2) for wrap in (NoWrap(), BlockWrap())}
        assert len(keys) == 1 + differ, name
    assert len({key(custom("Plain", name), None, 2) for name in ("ddp", "fsdp", "fsdp2")}) == 3


def test_steps_matter_where_a_scaler_may_skip_some(tmp_path: Path) -> None:
    """A short run's baseline may end before enough steps were taken."""
    scaler = LossScaler(enabled=True)
    short = config_of(tmp_path, precision=replace(preset("fp16"), scaler=scaler), steps=3)
    assert key(short, None, 2) != key(replace(short, steps=9), None, 2)
    assert key(replace(short, steps=100), None, 2) == key(replace(short, steps=200), None, 2)


def test_the_users_source_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own file, and what it imported from beside it."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("WIDTH = 6\n")
    (package / "model.py").write_text(
        "from torch import nn\nfrom mine import layers\n\n\nclass Model(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(layers.WIDTH, layers.WIDTH)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    model = importlib.import_module("mine.model").Model()
    config = in_world(custom("Plain", "ddp", output_dir=str(tmp_path)), 2)
    config.model._target_ = "mine.model.Model"
    before = key(config, model, 2)
    assert cache._code(config, None) == cache._code(config, model), "without a model its target's module stands for it"
    (package / "layers.py").write_text("WIDTH = 6  # another initialisation, say\n")
    changed = key(config, model, 2)
    assert changed != before
    (package / "unrelated.py").write_text("")
    assert key(config, model, 2) == changed
    for name in ("mine.model", "mine.layers", "mine"):
        sys.modules.pop(name)


# --------------------------------------------------------------------------------------------------------------
# Damage
# --------------------------------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Any] = {
    "a flipped bit": lambda entry: _flip(entry / "step_1.safetensors"),
    "a flipped bit in the facts": lambda entry: _flip(entry / "baseline.json"),
    "truncated": lambda entry: os.truncate(entry / "step_1.safetensors", 100),
    "empty": lambda entry: os.truncate(entry / "weights_0.safetensors", 0),
    "missing": lambda entry: (entry / "summary_1.safetensors").unlink(),
    "a file too many": lambda entry: (entry / "stray").write_text("x"),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "foreign manifest": lambda entry: (entry / "manifest.json").write_text("[]"),
    "half a manifest": lambda entry: os.truncate(entry / "manifest.json", 20),
    "another format": lambda entry: _edit(entry / "manifest.json", format=0),
    "no files in the manifest": lambda entry: _edit(entry / "manifest.json", files={}),
}


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_rebuilt(how: str, tmp_path: Path, run: RunFolder, in_process: list[Path]) -> None:
    entry = Path(ensure(config_of(tmp_path), run).path)
    whole = {file.name: file.read_bytes() for file in entry.iterdir() if file.name.startswith(("step", "state"))}
    DAMAGE[how](entry)
    again = ensure(config_of(tmp_path), run)
    assert not again.reused and len(in_process) == 2 and Path(again.path) == entry
    assert {name: (entry / name).read_bytes() for name in whole} == whole
    assert ensure(config_of(tmp_path), run).reused


def test_damage_of_the_same_size_and_time_is_found_by_a_new_process(
    tmp_path: Path, run: RunFolder, in_process: list[Path]
) -> None:
    file = Path(ensure(config_of(tmp_path), run).path) / "step_1.safetensors"
    times = file.stat()
    _flip(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    cache._verified.clear()
    assert not ensure(config_of(tmp_path), run).reused


# --------------------------------------------------------------------------------------------------------------
# Failures
# --------------------------------------------------------------------------------------------------------------


def test_a_failing_model_leaves_its_traceback_and_no_entry(tmp_path: Path, run: RunFolder) -> None:
    config = in_world(custom("Raises", "ddp", output_dir=str(tmp_path), gate=Gate(steps=1)), 2)
    with pytest.raises(RanksFailed) as failed:
        ensure(config, run)
    assert failed.value.ranks == [(-1, 1)]
    failure = json.loads((run.logs / "failure_baseline.json").read_text())
    assert failure["reason"] == "the baseline: ArithmeticError: the user's own mistake" and failure["exit_code"] == 4
    assert failure["traceback"].count("ArithmeticError: the user's own mistake") == 1
    assert "models_for_tests.py" in failure["traceback"] and "numerics/baseline.py" not in failure["traceback"]
    assert entries(tmp_path) == []


def test_an_interrupted_computation_leaves_nothing_that_looks_finished(
    tmp_path: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: Config, folder: Path, *rest: Any) -> None:
        (folder / "state_0.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_compute", stop)
    with pytest.raises(KeyboardInterrupt):
        ensure(config_of(tmp_path), run)
    assert entries(tmp_path) == []


def _killed(config: Config, run: RunFolder, started: str) -> None:
    def wait(config: Config, folder: Path, *rest: Any) -> None:
        (folder / "state_0.safetensors").write_bytes(b"half")
        Path(started).write_text(str(folder))
        time.sleep(600)

    cache._compute = wait  # type: ignore[assignment]
    ensure_baseline(config, None, run, 2)


def test_a_killed_run_frees_the_lock_and_its_leavings_are_removed(
    tmp_path: Path, run: RunFolder, in_process: list[Path]
) -> None:
    config, started = config_of(tmp_path), tmp_path / "started"
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_killed, args=(config, run, str(started)), daemon=True)
    process.start()
    _wait_for(started.exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = Path(started.read_text())
    assert left.exists() and left.name.startswith(".")
    entry = ensure(config, run)
    assert not entry.reused and not left.exists() and entries(tmp_path) == [Path(entry.path)]
    assert in_process[0] != left, "the killed run's replay may still be writing there"


def _wait_for(condition: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_where_nothing_can_be_written_the_message_says_so(tmp_path: Path, run: RunFolder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match=r"cannot write baselines in .*file/\.baselines: .*set output_dir"):
        ensure(config_of(tmp_path / "file"), run)


def test_a_full_disk_is_named(
    tmp_path: Path, run: RunFolder, in_process: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tree: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write_json", full)
    with pytest.raises(BaselineError, match="No space left on device"):
        ensure(config_of(tmp_path), run)
    assert entries(tmp_path) == []


def test_a_model_too_large_for_memory_is_refused_with_what_it_needs(
    tmp_path: Path, run: RunFolder, in_process: list[Path]
) -> None:
    huge = nn.Linear(2**22, 2**20, device="meta")
    with pytest.raises(BaselineError, match=r"needs about [\d.]+ GiB of memory, [\d.]+ GiB are available; use gate"):
        ensure_baseline(config_of(tmp_path), huge, run, 2)
    assert in_process == []


# --------------------------------------------------------------------------------------------------------------
# Several at once
# --------------------------------------------------------------------------------------------------------------


def _ensure_into(config: Config, run: RunFolder, results: Any) -> None:
    entry = ensure_baseline(config, None, run, 2)
    results.put(entry.reused)


def test_processes_at_once_compute_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distbench.launching.preload", "pytest", "tests.distributed"])
    results = context.Queue()
    processes = []
    for index in range(3):
        run = RunFolder.create(tmp_path / f"run{index}")
        processes.append(context.Process(target=_ensure_into, args=(config, run, results)))
        processes[-1].start()
    reused = sorted(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    assert reused == [False, True, True]
    assert len(entries(tmp_path)) == 1


def test_the_least_recently_used_go_first(
    tmp_path: Path, run: RunFolder, in_process: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [config_of(tmp_path, clip_norm=float(i)) for i in (1, 2, 3)]
    made = [Path(ensure(config, run).path) for config in configs]
    for age, entry in enumerate(made):
        os.utime(entry / "manifest.json", (1000 + age, 1000 + age))
    assert ensure(configs[0], run).reused, "now the most recently used"
    size = sum(file.stat().st_size for file in made[0].iterdir())
    last = config_of(tmp_path, clip_norm=4.0)
    last.gate.cache_gib = 2.5 * size / GIB
    newest = Path(ensure(last, run).path)
    assert entries(tmp_path) == sorted([made[0], newest])
    last.gate.cache_gib = 0.0
    last.clip_norm = 5.0
    newest = Path(ensure(last, run).path)
    assert entries(tmp_path) == [newest], "the one in use stays whatever the limit"


def test_an_entry_that_another_run_uses_is_not_removed(tmp_path: Path, run: RunFolder, in_process: list[Path]) -> None:
    """Its ranks read it long after it was found."""
    used = Path(ensure(config_of(tmp_path), run).path)
    other = config_of(tmp_path, clip_norm=2.0)
    other.gate.cache_gib = 0.0
    with (used.parent / f"{used.name}.use").open("a") as handle:  # as the other process holds it
        fcntl.flock(handle, fcntl.LOCK_SH)
        ensure(other, run)
        assert used.exists()
    third = copy.deepcopy(other)
    third.clip_norm = 3.0
    ensure(third, run)
    assert not used.exists()


def test_eviction_bears_entries_that_vanish(
    tmp_path: Path, run: RunFolder, in_process: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure(config_of(tmp_path), run)
    root = tmp_path / ".baselines"
    gone = root / "gone"
    real = Path.iterdir

    def listing(self: Path) -> Iterator[Path]:
        if self == gone:
            raise FileNotFoundError(self)
        yield from real(self)
        if self == root:
            yield gone

    monkeypatch.setattr(Path, "iterdir", listing)
    monkeypatch.setattr(Path, "is_dir", lambda self, real=Path.is_dir: self == gone or real(self))
    cache._evict(root, 0.0, keep="nothing")


def test_a_run_whose_baseline_fails_says_so_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = in_world(custom("Raises", "ddp", output_dir=str(tmp_path), gate=Gate(steps=1), name="fails"), 2)
    folder = RunFolder.create(tmp_path / "fails")
    outcome = experiment.run(config, folder)
    assert (outcome.status, outcome.exit_code) == (Status.crashed, 4)
    assert read_record(folder.path)["reason"] == "the baseline: ArithmeticError: the user's own mistake"
    printed = "".join(capfd.readouterr())
    assert printed.count("Traceback (most recent call last)") == 1
    assert printed.count("ArithmeticError: the user's own mistake") <= 2, "in the traceback, and as the reason"
