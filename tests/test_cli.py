"""The command line, run as a process: exit codes, what is said, what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from distbench import __version__
from distbench.__main__ import _flags_first
from distbench.sweep import read_duplicate
from tests.cli import (
    CUSTOM,
    REPOSITORY,
    SMALL,
    TIMEOUT_S,
    Command,
    Finished,
    distbench,
    environment,
    start,
    start_warm,
    target,
    torchrun,
)

OK, USAGE, GATE, CRASHED, INTERRUPTED = 0, 2, 3, 4, 5


# --------------------------------------------------------------------------------------------------------------
# Help and refusals, which need no torch
# --------------------------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
from distbench.__main__ import main
code = main(sys.argv[1:])
heavy = [name for name in ("torch", "numpy", "tensorboard", "rich") if name in sys.modules]
sys.exit(code if not heavy else 100)
"""


def without_torch(*words: str, cwd: Path) -> Command:
    """The command line, ending with 100 if it has imported torch."""
    return Command(sys.executable, "-c", WITHOUT_TORCH, *words, cwd=cwd)


def test_help_lists_every_group_without_torch(tmp_path: Path) -> None:
    helped = without_torch("--help", cwd=tmp_path).finish()
    assert helped.code == OK
    for words in (
        "strategy     ddp, fsdp, fsdp2, single",
        "wrap_policy  block, none, pattern, size",
        "python -m distbe",
    ):
        assert words in helped.out
    assert helped.left == []


def test_versions_without_torch(tmp_path: Path) -> None:
    asked = without_torch("--version", cwd=tmp_path).finish()
    assert asked.code == OK and asked.left == []
    assert asked.out == f"distbench {__version__}, torch {version('torch')}\n"


REFUSED = [
    (["stepz=3"], "Key 'stepz' not in 'Config'\nDid you mean steps?"),
    (["strategy=fdsp"], "Available options in 'strategy': ddp fsdp fsdp2 single\nDid you mean strategy=fsdp?"),
    (["steps=abc"], "steps=abc is not a whole number"),
    (["deterministic=perhaps"], "deterministic=perhaps is not true or false"),
    (["device=tpu"], "device=tpu is not one of auto, cpu, cuda"),
    (["model.hidden_dim=null"], "model.hidden_dim=null is not a value it can have"),
    (
        ["strategy=fsdp2", "strategy.reshard_after_forward=maybe"],
        "strategy.reshard_after_forward=maybe is not true, false or a whole number",
    ),
    (["model.hidden_dim=0"], "model.hidden_dim=0 is too small; it must be at least 1"),
    (["global_batch=7"], "global_batch=7 does not divide into 2 ranks x accumulation=1; use a multiple of 2"),
    (["--strategy=fsdp"], "--strategy=fsdp is not a flag; overrides have no dashes: strategy=fsdp"),
    (["--learning-rate", "0.1"], "--learning-rate is not a flag; overrides have no dashes: optimizer.lr=..."),
    (["recipes=ddp_vs_fsdp"], "Did you mean +recipes=ddp_vs_fsdp?"),
    (["data=text"], "not loss=mse; use model=simple_text loss=cross_entropy data=text data.path="),
    (
        ["data=text", "data.path=~/books"],
        "Quote such a value for Hydra inside the shell's quotes: \"data.path='~/books'\"",
    ),
    (["model=custom", "model._target_=a.b"], "such as model.input_shape=[64] model.target_shape=[64]"),
    (["launch.nproc=abc"], "launch.nproc='abc' must be a number of ranks or auto"),
    (
        ["model=simple_text", "data=text", "loss=cross_entropy", "data.path=/no/such"],
        "data.path=/no/such does not exist",
    ),
    (["device=cuda", "launch.nproc=64"], "use device=cpu"),
    (
        ["model=custom", "model._target_=a.b", "data=text", "loss=cross_entropy"],
        "data.seq_len: Interpolation key 'model.",
    ),
    (["sweeep"], "'sweeep' is not a command; overrides look like strategy=fsdp; see --help"),
    (["strategy=ddp", "oops"], "Error parsing override 'oops'"),
    (["-m", "strategy=ddp,fsdp2", "strategy.reshard_after_forward=3"], "reshard_after_forward is for strategy=fsdp2"),
    (
        ["-m", "strategy=single,ddp", "launch.nproc=2"],
        "in strategy=single launch.nproc=2: strategy=single is one proces",
    ),
    (
        ["-m", "stratgy=ddp,fsdp"],
        "in stratgy=ddp: Could not override 'stratgy'.\nKey 'stratgy' not in 'Config'\nDid you mean",
    ),
    (["-m", "strategy=ddp,fdsp"], "in strategy=fdsp: In 'config': Could not find 'strategy/fdsp'"),
    (["+step=50"], "Key 'step' not in 'Config'"),
    (["-m", "+foo=1,2"], "Key 'foo' not in 'Config'"),
    (["+model.width=3"], "Key 'width' not in 'SimpleModel'"),
    (["strategy=ddp", "+strategy.mixed_precision=bf16"], "Key 'mixed_precision' not in 'DDPStrategy'"),
    (["+seed.foo=1"], "Key 'foo' not in 'Seeds'"),
    (["+precision.scaler.foo=1"], "Key 'foo' not in 'LossScaler'"),
    (["steps"], "steps needs a value: steps=..."),
    (["++gate=3"], "++gate=3: gate is chosen by name, one of default, off, strict"),
    (["checkpoint=3"], "checkpoint=3: checkpoint is chosen by name, one of default, off"),
    (["gate=null"], "gate=null: gate is chosen by name, one of default, off, strict"),
    (["-m", "precision=[fp32],bf16"], "precision is chosen by name"),
    (["output_dir=/dev/null/runs"], "cannot write /dev/null/runs"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_refusals_are_one_message_and_leave_nothing(words: list[str], message: str, tmp_path: Path) -> None:
    refused = without_torch(*words, cwd=tmp_path).finish()
    assert refused.code == USAGE, refused.said
    assert message in refused.err
    assert refused.err.startswith("distbench: ") and refused.err.count("distbench: ") == 1
    assert "Traceback" not in refused.said and refused.out == ""
    assert refused.left == []


def test_what_only_the_model_tells_is_refused_as_well(tmp_path: Path) -> None:
    refused = start(*target("Nope"), cwd=tmp_path).finish()
    assert refused.code == USAGE, refused.said
    assert "tests.models_for_tests has no 'Nope'; it has Block, Plain" in refused.err
    assert "Traceback" not in refused.said and refused.left == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*target("Plain"), "model.input_shape=[7]"],
            "model.input_shape=[7]: the model does not take inputs of shape (4, 7), which are 4 samples; set "
            "model.input_shape to the shape of one sample, or change the model\nRuntimeError: ",
        ),
        (target("Narrow"), "outputs have shape (4, 3), but loss=mse has targets of shape (4, 6); set model.target_sh"),
    ],
    ids=["input", "output"],
)
def test_shapes_that_do_not_fit_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    refused = distbench(*words, cwd=tmp_path)
    assert refused.code == USAGE, refused.said
    assert message in refused.err and "Traceback" not in refused.said and refused.left == []


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = distbench(*SMALL, f"launch.master_port={port}", cwd=tmp_path)
    assert refused.code == USAGE and f"launch.master_port={port} cannot be used" in refused.err
    assert refused.left == []


def test_a_run_folder_is_not_used_twice(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "record.json").write_text('{"schema": 1, "status": "passed"}')
    refused = distbench(*SMALL, "hydra.run.dir=mine", cwd=tmp_path)
    assert refused.code == USAGE and "mine already holds a run; choose another hydra.run.dir" in refused.err
    assert json.loads((tmp_path / "mine" / "record.json").read_text())["status"] == "passed"
    assert refused.left == ["mine", "mine/record.json"]


@pytest.mark.parametrize(
    ("words", "sorted_words"),
    [
        (["a=1", "-m", "b=2"], ["-m", "a=1", "b=2"]),
        (["a=1", "--cfg", "job", "b=2"], ["--cfg", "job", "a=1", "b=2"]),
        (["--config-dir", "/x=y", "a=1"], ["--config-dir", "/x=y", "a=1"]),
        (["--config-dir=/x", "~a"], ["--config-dir=/x", "~a"]),
        (["a=1", "--cfg"], ["--cfg", "a=1"]),
    ],
)
def test_flags_may_stand_anywhere(words: list[str], sorted_words: list[str]) -> None:
    assert _flags_first(words) == sorted_words


# --------------------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------------------


def test_two_sweeps_at_once(tmp_path: Path) -> None:
    """Started in the same second, in one folder: no run takes another's folder, port or cell."""
    words = ["-m", "strategy=single,ddp", *SMALL]
    ended = [command.finish() for command in [start_warm(*words, cwd=tmp_path), start_warm(*words, cwd=tmp_path)]]
    assert [one.code for one in ended] == [OK, OK], [one.said for one in ended]
    assert all("2 of 2 runs passed" in one.out for one in ended)
    runs = ended[0].runs
    assert len(runs) == 4 and len({run.parent for run in runs}) == 2
    assert {json.loads((run / "record.json").read_text())["status"] for run in runs} == {"passed"}


def test_an_override_before_the_flag_makes_a_sweep_too(tmp_path: Path) -> None:
    composed = distbench(*SMALL, "strategy=fsdp", "--cfg", "job", "precision=bf16", cwd=tmp_path)
    assert composed.code == OK, composed.said
    assert "name: fsdp" in composed.out and "name: bf16" in composed.out
    assert composed.left == []


def test_a_user_model_beside_the_command_is_found(tmp_path: Path) -> None:
    """From its own working directory, by the console script as by `python -m`. A loss that is not finite is told."""
    (tmp_path / "my_model.py").write_text("from torch.nn import Linear\n\n\ndef build():\n    return Linear(6, 6)\n")
    words = [word for word in target("x") if "_target_" not in word]
    script = "import sys; from distbench.__main__ import entry; sys.path.pop(0); entry()"
    command = [sys.executable, "-c", script, *words, "model._target_=my_model.build", "optimizer=sgd"]
    own = ["optimizer.lr=1e30", "steps=5", "clip_norm=null", "on_nonfinite=record"]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    ended = Command(*command, *own, cwd=tmp_path, env=env).finish()
    assert ended.code == OK, ended.said
    assert "passed: loss" in ended.out and "-> nan in 5 steps" in ended.out
    assert ended.record["result"]["last_loss"] == "nan"


# --------------------------------------------------------------------------------------------------------------
# Sweeps
# --------------------------------------------------------------------------------------------------------------


def test_a_sweep_runs_the_same_experiment_once(tmp_path: Path) -> None:
    words = ["strategy=ddp,fsdp", "wrap_policy=size,block", "prefetch=backward_pre,backward_post,none"]
    ended = distbench("-m", *words, *SMALL, "wrap_policy.min_num_params=200", cwd=tmp_path)
    # min_num_params is not an option of block: refused before anything starts
    assert ended.code == USAGE and ended.left == []

    ended = distbench("-m", *words, *SMALL, cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert len(ended.runs) == 7, "one ddp, six fsdp"
    cells = sorted(path for path in ended.runs[0].parent.iterdir() if path.name[0].isdigit())
    assert len(cells) == 12
    first = next(cell for cell in cells if "strategy=ddp" in cell.name)
    twins = [read_duplicate(cell) for cell in cells if "strategy=ddp" in cell.name and cell != first]
    assert twins == [first.name] * 5
    assert not any(read_duplicate(cell) for cell in cells if "strategy=fsdp" in cell.name)
    assert ended.out.count(f"the same effective experiment as {first.name}: not run again") == 5
    assert (
        ended.out.count("same as 000") == 5
        and "7 of 7 runs passed; 5 more cells are the same experiment as one of them" in ended.out
    )


def test_repeats_take_turns_and_the_sweep_ends_with_a_decision(tmp_path: Path) -> None:
    ended = distbench("-m", "strategy=single,ddp", "sweep.repeats=2", *SMALL, cwd=tmp_path)
    assert ended.code == OK, ended.said
    assert [run.name.partition("_")[2] for run in ended.runs] == [
        *("strategy=single,repeat=1", "strategy=ddp,repeat=1", "strategy=ddp,repeat=2", "strategy=single,repeat=2")
    ]
    records = [json.loads((run / "record.json").read_text()) for run in ended.runs]
    assert [record["config"]["sweep"]["repeat"] for record in records] == [1, 1, 2, 2]
    assert records[0]["effective"] == records[3]["effective"] != records[1]["effective"]
    decision = json.loads((ended.runs[0].parent / "decision.json").read_text())
    assert decision["chosen"] is None and decision["why"] in ended.out
    assert "4 of 4 runs passed" in ended.out


FAILING = {
    "Raises": ("crashed", "ArithmeticError: the user's own mistake"),
    "KillsRank": ("crashed", "rank 1 died without an error: killed"),
    "OutOfMemory": ("oom", "can't allocate memory"),
    "RandomStart": ("crashed", "NonDeterministicStart: ranks built different initial weights (rank 0: "),
    "Plain": ("passed", None),
}
"""What becomes of a run of each model, and the reason in its record."""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A sweep over models of which all but the last fail on two ranks."""
    names = ",".join(f"tests.models_for_tests.{name}" for name in FAILING)
    return start("-m", *CUSTOM, f"model._target_={names}", cwd=tmp_path_factory.mktemp("failing")).finish()


def run_of(sweep: Finished, name: str) -> Path:
    (run,) = [run for run in sweep.runs if run.name.endswith(f".{name}")]
    return run


@pytest.mark.parametrize("name", FAILING)
def test_a_failed_run_says_what_became_of_it(failing: Finished, name: str) -> None:
    run = run_of(failing, name)
    record = json.loads((run / "record.json").read_text())
    status, reason = FAILING[name]
    assert record["status"] == status and record["finished"]
    assert (record["reason"] is None) if reason is None else (reason in record["reason"])
    assert (run / "checkpoints").exists() is (status == "passed"), "a failed run looks finished"
    assert {path.name for path in (run / "logs").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    if reason:
        failure = json.loads((run / "logs" / "failure.json").read_text())
        assert failure["first"]["reason"] == record["reason"]


def test_a_failing_cell_does_not_stop_the_sweep(failing: Finished) -> None:
    assert failing.code == CRASHED, failing.said
    assert "1 of 5 runs passed" in failing.out
    assert failing.err == "", "the launcher's own log lines are no help"


def test_a_models_own_error_is_told_once_and_first(failing: Finished) -> None:
    """One rank's traceback, from the user's first line on; nothing of ours before it."""
    told = [line for line in failing.said.splitlines() if line == "ArithmeticError: the user's own mistake"]
    assert len(told) == 1, "the table's reason aside, once"
    lines = failing.out[: failing.out.index("ArithmeticError: the user's own mistake")].splitlines()
    start = max(index for index, line in enumerate(lines) if line == "Traceback (most recent call last):")
    assert lines[start - 1].startswith("rank ") and lines[start - 1].endswith(" failed:")
    assert "models_for_tests.py" in lines[start + 1]
    assert failing.out.count("Traceback (most recent call last):") == 2, "Raises and OutOfMemory"


def test_other_failures_are_one_line(failing: Finished) -> None:
    assert "\ndistbench: rank 1 died without an error: killed" in failing.out
    assert "\ndistbench: ranks built different initial weights" in failing.out


# --------------------------------------------------------------------------------------------------------------
# Interrupted
# --------------------------------------------------------------------------------------------------------------


def wait_for(command: Command, files: list[Path]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not all(file.exists() for file in files):
        assert command.process.poll() is None, command.process.communicate()
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.05)


def documented_keys() -> set[str]:
    """Top-level keys of the record, as docs/run-folder.md names them."""
    text = (REPOSITORY / "docs" / "run-folder.md").read_text()
    table = text[text.index("## record.json") : text.index("## metrics.jsonl")]
    return {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    signs.mkdir()
    command = start("-m", "strategy=ddp,fsdp", *target("Waits", folder=signs), cwd=tmp_path)
    wait_for(command, [signs / "started0", signs / "started1"])
    for _ in range(2):  # once would be after the step, which takes ten minutes
        if number is signal.SIGINT:
            command.signal(number)
        else:
            os.kill(command.process.pid, number)
        time.sleep(0.2)
    ended = command.finish()
    assert ended.out.count("stopping after this step, with a checkpoint; once more: now") == 1
    assert ended.code == INTERRUPTED, ended.said
    assert "distbench: interrupted" in ended.err and "Traceback" not in ended.said
    record = ended.record
    assert record["status"] == "interrupted" and record["finished"] and record["reason"] == "stopped by the user"
    assert f"    interrupted: run folder {ended.run.relative_to(tmp_path)}\n" in ended.out
    assert documented_keys() <= set(record) and record["result"] is record["gate"] is None
    assert len(ended.runs) == 1, "the sweep went on"
    # Ranks ignore SIGINT. Were it passed on to them, they would be killed after half a minute.
    assert {path.name for path in signs.glob("ended*")} == {"ended0", "ended1"}


# --------------------------------------------------------------------------------------------------------------
# torchrun
# --------------------------------------------------------------------------------------------------------------


def test_torchrun_joins(tmp_path: Path) -> None:
    ended = torchrun(*SMALL, "strategy=fsdp2", cwd=tmp_path)
    assert ended.code == OK, ended.said
    record = ended.record
    assert record["status"] == "passed" and record["batch"]["world_size"] == 2
    assert record["topology"]["backend"] == "gloo" and len(record["topology"]["ranks"]) == 2
    assert ended.out.count("passed: loss") == 1 and "run folder outputs/" in ended.out
    assert (ended.run / record["checkpoint"]).is_file()


def test_torchrun_with_a_model_that_fails_ends(tmp_path: Path) -> None:
    ended = torchrun(*target("RaisesOnRank", rank=1), "strategy=ddp", cwd=tmp_path)
    assert ended.code != OK
    assert ended.out.count("ArithmeticError: one rank's mistake") == 1
    assert ended.record["status"] == "crashed"
    assert ended.record["reason"] == "rank 1: ArithmeticError: one rank's mistake"


@pytest.mark.parametrize(
    ("words", "code"),
    [(["fault=sum_not_mean", "gate=default", "gate.steps=1"], GATE), (["steps=0"], USAGE)],
    ids=["gate", "refused"],
)
def test_every_joined_rank_ends_with_our_code(words: list[str], code: int, tmp_path: Path) -> None:
    """torchrun itself ends with 1, whatever they end with, so they are started as it would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "distbench", *SMALL, "strategy=ddp", *words]
    ranks = [
        Command(*command, cwd=tmp_path, env={**environment(), **world, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    ended = [rank.finish() for rank in ranks]
    assert [one.code for one in ended] == [code, code], [one.said for one in ended]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-m", "strategy=ddp,fsdp", *SMALL], 1, "torchrun starts the ranks of one run, and a sweep starts its own"),
        (["--cfg", "job"], OK, "hidden_dim: 64"),
    ],
    ids=["refused", "shown"],
)
def test_torchrun_without_a_run_ends(words: list[str], code: int, message: str, tmp_path: Path) -> None:
    """The other ranks wait for rank 0's run, and must not when there is none."""
    ended = torchrun(*words, cwd=tmp_path)
    assert ended.code == code, ended.said  # torchrun itself ends with 1 for whatever its ranks end with
    assert ended.said.count(message) == 1
    assert ended.left == []


def test_the_exit_code_of_an_interrupt_that_came_in_native_code(tmp_path: Path) -> None:
    """Python would end by SIGINT itself, whatever it is told."""
    code = (
        "import atexit, ctypes\n"
        "from distbench import __main__ as command\n"
        "def main(argv):\n"
        "    ctypes.pythonapi.PyRun_SimpleString(b'raise KeyboardInterrupt')\n"
        "    return 5\n"
        "command.main = main\n"
        "atexit.register(print, 'tidied up')\n"
        "command.entry()\n"
    )
    ended = Command(sys.executable, "-c", code, cwd=tmp_path).finish()
    assert ended.code == 5 and ended.out == "tidied up\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_that_a_library_swallows_is_heeded(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import ctypes, os, sys\n"
        "from distbench import __main__ as command, preflight\n"
        "real = preflight.preflight\n"
        "def swallowing(*args):\n"
        f"    ctypes.pythonapi.PyRun_SimpleString(b'import os; os.kill(os.getpid(), {int(number)})')\n"
        "    return real(*args)\n"
        "preflight.preflight = swallowing\n"
        f"sys.argv = ['distbench', *{SMALL!r}]\n"
        "command.entry()\n"
    )
    ended = Command(sys.executable, "-c", code, cwd=tmp_path).finish()
    assert ended.code == 5 and "distbench: interrupted" in ended.err and not ended.runs
