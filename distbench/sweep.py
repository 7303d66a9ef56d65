"""One Hydra job is one cell: validated before anything starts, run once, and a row of the table at the end."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from distbench import experiment, hydra_edge
from distbench.config import GROUPS, Config, Decide, Objective, Order, digest, effective, from_container, joined_world
from distbench.errors import ConfigError, DistbenchError, ExitCode
from distbench.runs.files import write_json
from distbench.runs.folder import RunFolder, Status, read_record
from distbench.runs.text import complaint, counted
from distbench.sweep_folder import begin, claim
from distbench.validation import validate

_exit_codes: list[int] = []
_unfinished: list[tuple[Path, DictConfig]] = []
"""The sweep that is under way in this process, if one is."""

Split = Callable[[list[Override], int | None], list[list[list[str]]]]
WORST = 1e18
"""What a sweeper is told of a run that is never to be chosen: worse than any figure, and finite, as not all take others."""
BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
SLURM_LAUNCHER = "hydra_plugins.distbench.SlurmLauncher"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def exit_code() -> int:
    """Of everything run so far in this process: the first failure's exit code, else 0."""
    return next((code for code in _exit_codes if code), ExitCode.OK)


def report_interrupted() -> None:
    """The table of a sweep that was stopped on its way, as far as it came."""
    for folder, decide in _unfinished:
        if folder.exists():
            conclude(folder, decide)
            print(
                "go on        the same command with sweep.resume=true runs the cells that have not passed", flush=True
            )


def lost() -> None:
    """Of a cell that ran in another process nothing is left, not even a record to say so."""
    _exit_codes.append(ExitCode.CRASHED)


def conclude(folder: Path, decide: DictConfig, elsewhere: bool = False) -> None:
    """A sweep's end: its decision, as files and as the table. `elsewhere`: its cells ran in other processes, and what became
    of them is to be read."""
    from distbench.report.console import print_sweep
    from distbench.report.decision import write_decision
    from distbench.runs.rank import rank

    try:
        ranking = rank([folder], cast(Decide, OmegaConf.to_object(decide)))
        write_decision(ranking, folder)
        print_sweep(folder, ranking)
        if elsewhere:
            _exit_codes.extend(ExitCode.USAGE for _ in ranking.reading.refused)
            statuses = [Status(run.status) for run in ranking.reading.runs]
            _exit_codes.extend(experiment.EXIT_CODES.get(status, ExitCode.CRASHED) for status in statuses)
    except Exception as error:  # Hydra would make a warning of it, which nobody sees
        if not isinstance(error, DistbenchError):
            traceback.print_exc()
        print(f"distbench: no decision for {folder}: {error}", file=sys.stderr)
        _exit_codes.append(error.exit_code if isinstance(error, DistbenchError) else ExitCode.CRASHED)


def run_cell(cfg: DictConfig) -> dict[str, Any] | float:
    """Hydra's task function: run one composed configuration.

    Returns a small status object, or, to a sweeper that looks for the best cell, its figure. Never raises for a failed run,
    so that a sweep goes on with its next cell.
    """
    became = _run_cell(cfg)
    hydra = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN or hydra.sweeper._target_ == BASIC_SWEEPER:
        return became
    return _objective(cfg.sweep.objective, became, Path(hydra.sweep.dir))


def _objective(objective: Objective, became: dict[str, Any], sweep_dir: Path) -> float:
    """What a sweeper minimises: s or bytes of a run that passed its gate with an accepted window; `WORST` of any other."""
    from distbench.runs.candidates import Figure, row

    folder = sweep_dir / became["duplicate_of"] if "duplicate_of" in became else Path(became.get("folder", ""))
    if not (folder / "record.json").exists():
        return WORST
    run = row(folder, read_record(folder), "")
    figures = {
        Objective.step_time: run.step_time,
        Objective.exposed_comm: run.exposed,
        Objective.peak_memory: run.memory,
    }
    figure: Figure = figures[objective]
    return WORST if run.excluded or figure.value is None else figure.value


def _run_cell(cfg: DictConfig) -> dict[str, Any]:
    from distbench.launching.nodes import follow, here

    hydra = HydraConfig.get()
    path = Path(hydra.runtime.output_dir)
    try:
        config = typed(cfg)
        validate(config)
        if not (node := here(config)).leads:  # a task of a scheduler's job
            follow(node)
            return {"status": "followed"}
        if hydra.mode is RunMode.MULTIRUN and (twin := claim(Path(hydra.sweep.dir), config, path)):
            write_json(path / "duplicate_of.json", {"duplicate_of": twin})
            print(f"    the same effective experiment as {twin}: not run again", flush=True)
            return {"status": "duplicate", "duplicate_of": twin}
        config, folder, outcome = _as_it_was_left(config, path)
        gc.enable()  # off since the command line began
        try:
            outcome = outcome or experiment.run(config, folder)
        except KeyboardInterrupt:  # before there was a record to say so
            folder.discard_unused()
            raise
    except OmegaConfBaseException as error:
        return _refused(ConfigError(hydra_edge.explain(error)), path, hydra.mode)
    except DistbenchError as error:
        return _refused(error, path, hydra.mode)
    except OSError:
        raise  # a disk that is full is full for the next cell, too
    except Exception as error:
        traceback.print_exc()
        _exit_codes.append(ExitCode.CRASHED)
        return {"status": Status.crashed.value, "reason": f"{type(error).__name__}: {error}"}
    _exit_codes.append(outcome.exit_code)
    if outcome.status is Status.interrupted and "SUBMITIT_EXECUTOR" not in os.environ:
        raise KeyboardInterrupt  # the user stopped the sweep, not this cell
    return {"status": outcome.status.value, "folder": str(path)}


def _as_it_was_left(config: Config, path: Path) -> tuple[Config, RunFolder, experiment.Outcome | None]:
    """A cell's folder, for it to begin in or, in a sweep that goes on, to go on in; what became of it where it has ended.

    Raises ConfigError where the folder holds another experiment, OutputError where it still runs.
    """
    from distbench.checkpoint.manifest import complete
    from distbench.checkpoint.resuming import start_over

    resume = config.sweep.resume or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if not (resume and (path / "record.json").exists()):
        return config, RunFolder.create(path), None
    record, folder = read_record(path), RunFolder.reopen(path)
    if record.get("effective") != digest(effective(config)):
        raise ConfigError(
            f"{path} holds another experiment than this cell now is; start a new sweep, without sweep.resume"
        )
    status = Status(record["status"])
    if status in (Status.passed, Status.gate_failed):
        print(f"    {status.value} before: not run again", flush=True)
        return config, folder, experiment.Outcome(status, experiment.EXIT_CODES[status])
    print(f"    {status.value} before: {'resumed' if complete(folder.checkpoints) else 'run again'}", flush=True)
    if complete(folder.checkpoints):
        return replace(config, resume=str(path)), folder, None
    start_over(folder)
    return config, folder, None


def _refused(error: DistbenchError, path: Path, mode: RunMode | None) -> dict[str, Any]:
    """Say why nothing was run. A single run leaves no folder behind; a sweep's cell stays, as a row of its table."""
    print(complaint(error), file=sys.stderr, flush=True)
    _exit_codes.append(error.exit_code)
    if mode is RunMode.RUN:
        RunFolder(path).discard_unused()
    return {"status": "refused", "reason": str(error)}


def typed(cfg: DictConfig) -> Config:
    """The typed config of a composed tree; Hydra's own part is left out.

    Raises ConfigError, and InterpolationResolutionError for a value that only a started job has.
    """
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    if (config := _typed_already(own)) is not None:
        return config
    try:
        container = OmegaConf.to_container(own, resolve=True, enum_to_str=True)
    except InterpolationKeyError as error:
        raise ConfigError(f"{error.full_key}: {str(error.msg).splitlines()[0]}; set {error.full_key}=...") from error
    assert isinstance(container, dict)
    return from_container({str(key): value for key, value in container.items()})


def _typed_already(own: DictConfig) -> Config | None:
    """Hydra has merged everything into our schemas, so that its nodes know their dataclasses: a tenth of the time of
    building them again. None where they do not (an option of the user's own), or for `from_container` to say what is wrong.
    """
    try:
        values = OmegaConf.to_object(own)
    except OmegaConfBaseException:
        return None
    assert isinstance(values, dict)
    groups = {group: options.get(str(getattr(values.get(group), "name", None))) for group, options in GROUPS.items()}
    sections = groups | {f.name: type(f.default_factory()) for f in fields(Config) if f.default_factory is not MISSING}
    if any(kind is None or type(values.get(key)) is not kind for key, kind in sections.items()):
        return None
    if not all(_has_only_fields(own._get_node(key), values[key]) for key in sections) or values.keys() - _names(Config):
        return None
    return Config(**{str(key): value for key, value in values.items()})


def _names(kind: Any) -> set[str]:
    return {f.name for f in fields(kind)}


def _has_only_fields(node: Any, value: Any) -> bool:
    """Whether a section has no key of the user's (`+model.width=3`) beside its dataclass's."""
    if not is_dataclass(value):
        return True
    return set(node) <= _names(value) and all(_has_only_fields(node._get_node(k), getattr(value, k)) for k in node)


def read_duplicate(folder: Path) -> str | None:
    """The twin that a cell's folder names instead of holding a run of its own, if it does."""
    try:
        return str(json.loads((folder / "duplicate_of.json").read_text())["duplicate_of"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class SweepCallback(Callback):
    """Refuses an impossible run, or a sweep with an impossible cell, before a folder is made or a process started;
    prints the table at a sweep's end.

    Hydra turns exceptions of a callback into warnings, so a refusal here is printed and leaves through SystemExit.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.sweep.repeats > 1:
            _usage(f"sweep.repeats={config.sweep.repeats} repeats the cells of a sweep, and this is one run; add -m")
        if config.sweep.resume:
            _usage("sweep.resume=true goes on with a sweep, and this is one run; add -m, or resume=RUN for a run")
        _refuse(config, where="")
        folder = RunFolder(Path(config.hydra.run.dir))
        if folder.record_path.exists():  # before Hydra writes its own files beside it
            _usage(f"{folder.path} already holds a run; choose another hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser

        if config.hydra.launcher._target_ == SLURM_LAUNCHER:
            _register_slurm()
        if joined_world() is not None:
            _usage(
                "torchrun starts the ranks of one run, and a sweep starts its own for every cell; "
                "use `python -m distbench ...` without torchrun"
            )
        theirs = config.hydra.sweeper._target_ != BASIC_SWEEPER
        if theirs and config.sweep.repeats > 1:
            _usage(f"sweep.repeats={config.sweep.repeats} needs Hydra's own sweeper; use sweep.repeats=1")
        _add_repeats(config)
        loader = GlobalHydra.instance().config_loader()
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create(loader).parse_overrides([*params, *config.hydra.overrides.task])
        hydra_edge.pin(config, [o.key_or_group for o in overrides if not o.is_sweep_override()])
        if theirs:  # they choose their cells as they go; each is validated when it starts
            _begin(config)
            return
        # Hydra runs cells in the order in which this makes them.
        split = partial(_split, _split_by_hydra(BasicSweeper))
        BasicSweeper.split_arguments = staticmethod(split)
        (cells,) = split(overrides, None)
        composed = ComposedCells(loader)
        for cell in cells:
            where = f"in {' '.join(cell)}: "
            try:
                checked = composed.load_sweep_config(config, list(cell))
            except (HydraException, OmegaConfBaseException) as error:
                _usage(f"{where}{hydra_edge.explain(error)}")
            _refuse(checked, where, elsewhere=config.hydra.launcher._target_ == SLURM_LAUNCHER)
        earlier = _begin(config)
        if config.hydra.launcher._target_ == BASIC_LAUNCHER:
            loader.load_sweep_config = composed.load_sweep_config
        _unfinished.append((Path(config.hydra.sweep.dir), config.decide))
        again = ", which goes on" if earlier else ""
        print(f"sweep of {counted(len(cells), 'cell')} in {config.hydra.sweep.dir}{again}", flush=True)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.mode is RunMode.MULTIRUN:
            print(f"[{config.hydra.job.num}] {Path(config.hydra.sweep.subdir).name.partition('_')[2]}", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode is RunMode.MULTIRUN:
            job_return.cfg = job_return.hydra_cfg = (
                None  # Hydra keeps what a cell returns to the sweep's end: 0.2 MB each
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        elsewhere = config.hydra.launcher._target_ != BASIC_LAUNCHER
        conclude(Path(config.hydra.sweep.dir), config.decide, elsewhere)
        _unfinished.clear()


class ComposedCells:
    """Composes each cell of a sweep once: Hydra composes it to check it and again to run it, 0.2 s each time.

    Kept pickled, since who runs a cell writes into its config: 20 kB a cell, against about 1 MB as objects.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self.compose = loader.load_sweep_config
        self.cells: dict[tuple[str, ...], bytes] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """As ConfigLoader.load_sweep_config: the composed config of one cell, the caller's own."""
        key = tuple(sweep_overrides)
        if key not in self.cells:
            self.cells[key] = pickle.dumps(self.compose(master_config, sweep_overrides))
        config: DictConfig = pickle.loads(self.cells[key])
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config


def _register_slurm() -> None:
    try:
        from distbench.launching.slurm import register
    except ImportError as error:
        _usage(f"hydra/launcher=distbench_slurm needs {error.name}: pip install 'distbench[slurm]'")
    register(SLURM_LAUNCHER)


def _begin(config: DictConfig) -> bool:
    try:
        return begin(Path(config.hydra.sweep.dir), sys.argv[1:], config.sweep.resume)
    except DistbenchError as error:
        _usage(str(error))


def _add_repeats(config: DictConfig) -> None:
    """Make the repeats one more swept key: Hydra varies its first key slowest, its last fastest."""
    if config.sweep.repeats <= 1:
        return
    values = ",".join(str(number + 1) for number in range(config.sweep.repeats))
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        if config.sweep.order is Order.interleaved:
            config.hydra.sweeper.params = {"sweep.repeat": values, **(config.hydra.sweeper.params or {})}
        else:
            config.hydra.overrides.task.append(f"sweep.repeat={values}")


def _split_by_hydra(sweeper: type) -> Split:
    """Hydra's own `split_arguments`, also where it was replaced for a sweep before in this process."""
    current: Split = sweeper.split_arguments  # type: ignore[attr-defined]
    return current.args[0] if isinstance(current, partial) else current


def _split(hydras: Split, overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
    """Hydra's cells, in batches, with every other repeat backwards: A B, B A, A B. In A B, A B a machine that becomes slower
    bit by bit would have B slower in every repeat, for no fault of B's."""
    (cells,) = hydras(overrides, None)
    repeats = [list(same) for _, same in groupby(cells, key=_repeat_of)]
    ordered = [cell for number, same in enumerate(repeats) for cell in (same[::-1] if number % 2 else same)]
    size = max_batch_size or max(1, len(ordered))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _repeat_of(cell: list[str]) -> str | None:
    """Where repeats are the slowest to vary (`sweep.order=interleaved`); else all cells are one block."""
    first = cell[0] if cell else ""
    return first if first.startswith("sweep.repeat=") else None


def _usage(message: str) -> NoReturn:
    print(complaint(message), file=sys.stderr)
    raise SystemExit(ExitCode.USAGE)


def _refuse(composed: DictConfig, where: str, elsewhere: bool = False) -> None:
    try:
        validate(typed(composed), elsewhere)
    except InterpolationResolutionError:
        return  # uses a value that only a started job has, such as ${hydra:runtime.output_dir}; validated then
    except ConfigError as error:
        _usage(f"{where}{error}")


hydra_edge.register_resolvers()  # for processes that run cells without the command line: other launchers'
