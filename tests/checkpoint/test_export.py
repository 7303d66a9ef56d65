"""`export` writes the file that the run itself would have written at its end, from the shards alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distbench.checkpoint.manifest import MANIFEST, MODEL
from distbench.checkpoint.save import save_model
from distbench.checkpoint.sharded import save_shards
from distbench.checkpoint.state import STATE
from distbench.config import Config
from distbench.errors import CheckpointError, ConfigError, OutputError
from distbench.export import export, find_checkpoint, main
from distbench.launching.world import World
from distbench.models.build import build_model
from distbench.runs.folder import RunFolder
from tests.checkpoint.fuzzing import sign
from tests.checkpoint.test_sharded import ADAMW, start
from tests.cli import distbench, environment
from tests.configs import STRATEGIES, custom, small
from tests.distributed import run_distributed
from tests.steps import ONE_PROCESS

MODELS = {
    "stack": lambda strategy: small(strategy, optimizer=ADAMW),
    "bf16": lambda strategy: small(strategy, precision="bf16", optimizer=ADAMW),
    **{
        name: lambda strategy, name=name: custom(name, strategy, optimizer=ADAMW)
        for name in ("Tied", "TiedBlocks", "Normed", "ManyBuffers", "Transposed", "Extra")
    },
}
NOT_FOR = {"Transposed": ("ddp", "fsdp"), "ManyBuffers": ("ddp",)}
"""Models that torch does not take so: one does not use its transposed parameter, one has an expanded buffer."""
WORLDS = {1: ["single"], 2: [name for name in STRATEGIES if name != "single"], 3: ["ddp", "fsdp", "fsdp-flat", "fsdp2"]}


def cases(ranks: int) -> dict[str, Config]:
    return {
        f"{strategy} {model}": build(strategy)
        for strategy in WORLDS[ranks]
        for model, build in MODELS.items()
        if not strategy.startswith(NOT_FOR.get(model, ()))
    }


def save_both(world: World, configs: dict[str, Config], root: Path) -> None:
    for name, config in configs.items():
        trainer, _ = start(world, config)
        trainer.run(until=2)
        save_shards(trainer, root / name, {"config": None})
        state = trainer.strategy.full_state(trainer.module)
        if world.rank == 0:
            save_model(RunFolder(root / name / "whole"), 2, state)


@cache
def saved(ranks: int, root: Path) -> Path:
    folder = root / str(ranks)
    if ranks == 1:
        save_both(ONE_PROCESS, cases(1), folder)
    else:
        run_distributed(save_both, ranks, cases(ranks), folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in WORLDS for case in cases(ranks)])
def test_it_is_the_file_that_the_run_writes(ranks: int, case: str, root: Path, tmp_path: Path) -> None:
    folder = saved(ranks, root) / case
    size = export(folder / "step_00000002", tmp_path / "exported")
    written = folder / "whole" / "checkpoints" / "step_00000002" / MODEL
    assert (tmp_path / "exported").read_bytes() == written.read_bytes() and size == written.stat().st_size
    plain = build_model(cases(ranks)[case].model, seed=99)
    loaded = load_file(tmp_path / "exported")
    missing = plain.load_state_dict(loaded, strict=not case.endswith("Extra")).missing_keys
    assert missing == (["_extra_state"] if case.endswith("Extra") else []), "what is no tensor"
    assert ("blocks.0._extra_state" in loaded) == case.endswith("Extra")
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


# --- the command


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 5."""
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(saved(1, root) / "single Normed" / "step_00000002", checkpoints / "step_00000002")
    trainer, _ = start(ONE_PROCESS, MODELS["Normed"]("single"))
    trainer.run(until=5)
    save_shards(trainer, checkpoints, {})
    return tmp_path / "run"


def test_the_newest_or_the_one_that_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    newest = run / "checkpoints" / "step_00000005" / MODEL
    assert capsys.readouterr().out == f"{newest}\n    model of step 5, {newest.stat().st_size:,} bytes\n"
    assert main([str(run), "--step", "2", "--output", str(tmp_path / "two")]) == 0
    assert main([str(run / "checkpoints" / "step_00000002"), "--output", str(tmp_path / "also")]) == 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "also").read_bytes() != newest.read_bytes()
    with pytest.raises(OutputError, match="is there already; --force replaces it, --output FILE writes elsewhere"):
        main([str(run)])
    newest.write_bytes(b"")
    assert main([str(run), "--force"]) == 0 and newest.stat().st_size


def test_refusals_name_what_there_is(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        find_checkpoint(tmp_path / "nowhere", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: there is no complete checkpoint; checkpoint.every=N writes one"):
        find_checkpoint(tmp_path / "empty", None)
    with pytest.raises(ConfigError, match=r"--step 3: .* has no such checkpoint; it has those of steps 2, 5"):
        find_checkpoint(run, 3)
    with pytest.raises(OutputError, match=r"cannot write .*: No such file or directory; use --output FILE"):
        main([str(run), "--output", str(tmp_path / "no" / "folder")])


def test_a_device_stays_a_device(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path / "link"), str(tmp_path)):
        with pytest.raises(OutputError, match=rf"--output {name} is there and is no regular file; name another file"):
            main([str(run), "--output", name, "--force"])
    assert Path("/dev/null").is_char_device() and (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


def test_from_the_command_line(run: Path, tmp_path: Path) -> None:
    ended = distbench("export", "run", "--step", "2", "--output", "model", cwd=tmp_path)
    assert ended.code == 0 and (tmp_path / "model").exists(), ended.said
    (run / "checkpoints" / "step_00000005" / "rank_00000.safetensors").write_bytes(b"")
    ended = distbench("export", "run", cwd=tmp_path)
    assert ended.code == 2 and "rank_00000.safetensors has 0 bytes, the manifest says" in ended.err, ended.said
    assert not (run / "checkpoints" / "step_00000005" / MODEL).exists()


def test_a_damaged_shard_leaves_no_file(run: Path, tmp_path: Path) -> None:
    shard = run / "checkpoints" / "step_00000005" / "rank_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its digest is not the manifest's"):
        export(shard.parent, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffers": ["norm.running_mean", "nothing"]}, "it has no buffer 'nothing'"),
        ({"aliases": {"norm.running_var": "x"}}, "it has no buffer 'x'"),
        (
            {"parameters": {"head.bias": [[7], "float32"]}},
            r"'head.bias' is \(6,\) float32, its state says \(7,\) float32",
        ),
        ({"parameters": {"../up": [[7], "float32"]}}, r"has no P/\.\./up"),
    ],
)
def test_a_state_that_does_not_fit_its_shards(
    changes: dict[str, object], message: str, run: Path, tmp_path: Path
) -> None:
    folder = run / "checkpoints" / "step_00000005"
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps(state | changes))
    sign(folder)
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "model")
    assert (folder / MANIFEST).exists() and not (tmp_path / "model").exists()


# --- memory

MEGABYTE = 1 << 20


def peak_of(*words: str) -> int:
    """Bytes that a command had resident at most."""
    with subprocess.Popen(
        [sys.executable, "-m", "distbench", *words], env=environment(), stdout=subprocess.PIPE
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_memory_is_no_more_than_one_tensor(tmp_path: Path) -> None:
    trainer, _ = start(ONE_PROCESS, small("single", hidden=768, layers=2, optimizer=ADAMW))
    trainer.run(until=1)
    folder = save_shards(trainer, tmp_path, {})
    tensor = max(parameter.nbytes for parameter in trainer.module.parameters())
    shard = (folder / "rank_00000.safetensors").stat().st_size
    assert shard > 12 * tensor and tensor == 9 * MEGABYTE
    without = peak_of("export", "--help")
    assert peak_of("export", str(folder), "--output", str(tmp_path / "model")) < without + tensor
    assert torch.equal(
        load_file(tmp_path / "model")["layers.0.attn.weight"], trainer.module.state_dict()["layers.0.attn.weight"]
    )
