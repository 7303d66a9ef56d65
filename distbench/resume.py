"""`python -m distbench resume=RUN [KEY=VALUE ...]`: train on, in the run's own folder, from its last complete checkpoint.

The config is the record's, so nothing that has changed in `conf/` since can make it another run. It is run as it stands
there, the code that its `_target_` names included: for runs of your own (docs/security.md).
"""

from __future__ import annotations

from pathlib import Path

from distbench.config import GROUPS, MONOMORPHIC, Config, from_container
from distbench.errors import ConfigError
from distbench.runs.folder import RunFolder, read_record
from distbench.runs.text import detail
from distbench.validation import validate

KEY = "resume="


def asked(argv: list[str]) -> bool:
    """Whether a command line is one to resume."""
    return any(word.startswith(KEY) and word != KEY + "null" for word in argv)


def main(argv: list[str]) -> int:
    """Resume, and return the exit code."""
    from distbench.experiment import run

    words = [word for word in argv if not word.startswith(KEY)]
    (path, *more) = [Path(word.removeprefix(KEY)).resolve() for word in argv if word.startswith(KEY)]
    if odd := next((word for word in words if word.startswith("-") or "=" not in word), None):
        raise ConfigError(f"{odd} does not go with resume={path}: one run is resumed, with KEY=VALUE beside it")
    if group := next((word for word in words if word.partition("=")[0] in {*GROUPS, *MONOMORPHIC}), None):
        raise ConfigError(
            f"{group} does not go with resume={path}: a run goes on with the groups it has, and takes keys such as "
            f"checkpoint.every=10 anew; a new run may start from it with start_from={path} {group}"
        )
    if more:
        raise ConfigError("resume= is given twice; runs are resumed one at a time")
    if not (path / "record.json").is_file():
        raise ConfigError(f"resume={path} is no run folder: it has no record.json")
    return run(resumed_config(path, words), RunFolder.reopen(path)).exit_code


def resumed_config(path: Path, words: list[str]) -> Config:
    """The record's config with what the command line changes. Raises ConfigError and RunFolderError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    stored = read_record(path).get("config")
    if not isinstance(stored, dict):
        raise ConfigError(f"resume={path}: its record.json holds no config")
    try:
        tree = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(stored), OmegaConf.from_dotlist(words)))
        assert isinstance(tree, dict)
        config = from_container({str(key): value for key, value in tree.items()} | {"resume": str(path)})
        validate(config)
    except (ConfigError, OmegaConfBaseException) as error:
        lines = [line for line in str(error).splitlines() if "$VALUE" not in line]  # those are OmegaConf's templates
        raise ConfigError(f"resume={path}: {detail(' '.join(lines))}") from error
    except (AttributeError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"resume={path}: the config in its record.json is damaged: {detail(error)}") from error
    return config
