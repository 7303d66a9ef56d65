"""`python -m distbench resume=RUN [KEY=VALUE ...]`: train on, in the run's own folder, from its last complete checkpoint.

The config is the record's, so nothing that has changed in `conf/` since can make it another run.
"""

from __future__ import annotations

from pathlib import Path

from distbench.config import GROUPS, MONOMORPHIC, from_container
from distbench.errors import ConfigError
from distbench.runs.folder import RunFolder, read_record
from distbench.validation import validate

KEY = "resume="


def asked(argv: list[str]) -> bool:
    """Whether a command line is one to resume."""
    return any(word.startswith(KEY) and word != KEY + "null" for word in argv)


def main(argv: list[str]) -> int:
    """Resume, and return the exit code."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from distbench.experiment import run

    words = [word for word in argv if not word.startswith(KEY)]
    (path, *more) = [Path(word.removeprefix(KEY)).resolve() for word in argv if word.startswith(KEY)]
    if odd := next((word for word in words if word.startswith("-") or "=" not in word), None):
        raise ConfigError(f"{odd} does not go with resume={path}: one run is resumed, with KEY=VALUE beside it")
    if group := next((word for word in words if word.partition("=")[0] in {*GROUPS, *MONOMORPHIC}), None):
        raise ConfigError(
            f"{group} does not go with resume={path}: it takes single values, such as checkpoint.every=10"
        )
    if more:
        raise ConfigError("resume= is given twice; runs are resumed one at a time")
    if not (path / "record.json").is_file():
        raise ConfigError(f"resume={path} is no run folder: it has no record.json")
    try:
        stored = OmegaConf.create(read_record(path)["config"])
        changed = OmegaConf.merge(stored, OmegaConf.from_dotlist(words))
        tree = OmegaConf.to_container(changed)
    except (OmegaConfBaseException, KeyError) as error:
        raise ConfigError(f"resume={path}: {error}") from error
    assert isinstance(tree, dict)
    config = from_container({str(key): value for key, value in tree.items()} | {"resume": str(path)})
    validate(config)
    return run(config, RunFolder.reopen(path)).exit_code
