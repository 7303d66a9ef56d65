"""The command line: a word without `=` is a subcommand, everything else is a Hydra override.

Nothing here imports torch: help and refusals answer at once.
"""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from distbench import interrupts
from distbench.errors import ConfigError, DistbenchError, ExitCode
from distbench.runs.text import complaint

COMMANDS: dict[str, tuple[str, str]] = {
    "diff": ("distbench.diff", "what differs between two runs, where first, why"),
    "doctor": ("distbench.doctor.command", "what this machine, and the network between ranks, can do"),
    "drill": ("distbench.drill", "kill, freeze, damage: what goes wrong ends as promised"),
    "export": ("distbench.export", "the plain model of a checkpoint, as one safetensors file"),
    "import": ("distbench.import_rows", "rows of another tool as run folders"),
    "rank": ("distbench.rank", "decision table from the records of runs"),
    "report": ("distbench.report.command", "the decision and its plots as one HTML page"),
    "selftest": ("distbench.selftest", "inject known bugs, show that each is caught"),
}
"""Subcommand -> (module with `main(argv) -> exit code`, what it does)."""

READERS = {"diff", "export", "import", "rank", "report"}
"""Those that take files from others, as data (docs/security.md)."""

HELP = """\
distbench: choose between DDP, FSDP and their settings by experiment.

usage: python -m distbench [OVERRIDES...]           one run
       python -m distbench -m KEY=A,B,... [...]     a sweep over every combination
       python -m distbench COMMAND [--help]         a subcommand

commands
{commands}
groups: choose an option with GROUP=OPTION, set its values with GROUP.KEY=VALUE
{groups}
examples
  python -m distbench strategy=fsdp precision=bf16
  python -m distbench -m strategy=ddp,fsdp precision=fp32,bf16
  python -m distbench -m +recipes=ddp_vs_fsdp
  torchrun --nproc-per-node 2 -m distbench strategy=fsdp2

--cfg job [OVERRIDES...] shows the composed configuration, --version the versions of distbench and torch, --hydra-help
Hydra's own options (completion among them)."""


def entry() -> None:
    """Console script. Never returns."""
    # Composing makes many small objects that stay, and looking for garbage among them took a sixth of the time that a
    # refused configuration takes. What works for longer turns it on again.
    gc.disable()
    try:
        _set_path(sys.argv[1:])
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the rest of the buffer goes when Python ends
        code = ExitCode.OK  # `| head` has seen enough
        if error.errno == errno.ENOSPC:
            print(f"distbench: cannot write the output: {error.strerror}", file=sys.stderr)
            code = ExitCode.USAGE
    if code == ExitCode.INTERRUPTED:
        # Where the signal came while native code had Python's run (a library's import), the interpreter remembers an
        # interrupt that nobody handled, and ends itself by SIGINT whatever the code is (CPython 3.11, run_eval_code_obj).
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        if argv and argv[0] in COMMANDS:
            gc.enable()
            module, _ = COMMANDS[argv[0]]
            return int(import_module(module).main(argv[1:]))
        if {"-h", "--help"} & set(argv):
            print(_help())
            return ExitCode.OK
        if "--version" in argv:
            print(_versions())
            return ExitCode.OK
        _refuse_stray_words(argv)
        return _run(argv)
    except DistbenchError as error:
        print(complaint(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("distbench: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _set_path(argv: list[str]) -> None:
    """A run finds a user's `_target_` in the working directory, as with `python -m`.

    What only reads must find nothing there: others may have filled it, with a file that is called as somebody's module.
    """
    cwd = Path.cwd()
    if argv and argv[0] in READERS:
        sys.path[:] = [place for place in sys.path if Path(place).absolute() != cwd]
    elif str(cwd) not in sys.path:
        sys.path.insert(0, str(cwd))


def _help() -> str:
    """Our own page: Hydra's composes every group first, which takes seconds."""
    from distbench.hydra_edge import group_options

    commands = "".join(f"  {name:<12} {text}\n" for name, (_, text) in COMMANDS.items())
    groups = "".join(f"  {group:<12} {', '.join(options)}\n" for group, options in group_options().items())
    return HELP.format(commands=commands, groups=groups)


def _versions() -> str:
    from importlib.metadata import version

    from distbench import __version__

    return f"distbench {__version__}, torch {version('torch')}"


def _refuse_stray_words(argv: list[str]) -> None:
    """A first word that is neither a flag nor an override is a mistyped subcommand."""
    if argv and not argv[0].startswith(("-", "+", "~")) and "=" not in argv[0]:
        from distbench.hydra_edge import valid_keys

        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        if argv[0] in valid_keys():
            raise ConfigError(f"{argv[0]} needs a value: {argv[0]}=...")
        hint = f"did you mean `{near[0]}`?" if near else "overrides look like strategy=fsdp; see --help"
        raise ConfigError(f"{argv[0]!r} is not a command; {hint}")


def _run(argv: list[str]) -> int:
    """Compose with Hydra and run, once or as a sweep; a torchrun rank other than 0 only follows."""
    from distbench.config import joined_world

    if joined_world() is None:
        interrupts.listen(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        return ExitCode.OK if _followed() else _compose_and_run(argv)
    from distbench.launching import joined

    if os.environ["RANK"] != "0":
        return joined.follow()
    code: int = ExitCode.USAGE
    interrupts.listen(signal.SIGTERM)  # until it is a rank
    if (folder := joined.folder_to_go_on_in()) is not None:
        argv = [f"resume={folder}"]
    try:
        code = _compose_and_run(argv)
    finally:
        joined.release(code)
    return code


def _followed() -> bool:
    """Be another node than the first of several, to its end; False on the first one, and on one machine."""
    if not {"DISTBENCH_NODE", "SLURM_STEP_ID"} & os.environ.keys():
        return False
    from distbench.launching import nodes

    node = nodes.told()
    if node is None or node.leads:
        return False
    nodes.follow(node)
    return True


VALUED = {"--cfg", "--package", "--config-path", "--config-name", "--config-dir", "-c", "-p", "-cp", "-cn", "-cd"}
"""Hydra's flags that take a value in the next word."""


def _flags_first(argv: list[str]) -> list[str]:
    """Flags before overrides: argparse takes them in any order, but not overrides on both sides of a flag."""
    flags: list[str] = []
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        flags.append(word)
        if word in VALUED:
            flags += [value for value in [next(words, None)] if value is not None]
    return [*flags, *overrides]


def _compose_and_run(argv: list[str]) -> int:
    from distbench import resume
    from distbench.config import spelled

    argv = spelled(argv)
    if resume.asked(argv):
        gc.enable()
        return resume.main(argv)
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from distbench import sweep, sweep_folder
    from distbench.config import register_schemas
    from distbench.hydra_edge import (
        conf_dir,
        explain,
        refuse_flags,
        refuse_unnamed_options,
        register_resolvers,
        skip_mode_lookup,
    )

    refuse_flags(argv)
    refuse_unnamed_options(argv)
    if {"-m", "--multirun"} & set(argv):
        argv = sweep_folder.with_folder(argv)
    register_schemas()
    register_resolvers()
    skip_mode_lookup(argv)
    wants_traceback = "HYDRA_FULL_ERROR" in os.environ
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors to us instead of printing them and exiting with 1
    sys.argv = [sys.argv[0], *_flags_first(argv)]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(sweep.run_cell)()
    except KeyboardInterrupt:
        sweep.report_interrupted()
        raise
    except (HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        raise ConfigError(explain(error)) from error
    except OSError as error:
        if wants_traceback or error.filename is None:
            raise
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; set output_dir=...") from error
    finally:
        if not wants_traceback:
            del os.environ["HYDRA_FULL_ERROR"]
    return sweep.exit_code()


if __name__ == "__main__":
    entry()
