"""Named errors, each with the exit code its failure ends with (docs/cli.md)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    """The run passed."""
    DIFFERENT = 1
    """`diff` found a difference beyond its tolerance, or `drill` an end that is not the promised one."""
    USAGE = 2
    """Bad usage or configuration; nothing was started."""
    GATE = 3
    """The numerics gate failed."""
    CRASHED = 4
    """A rank died or hung."""
    INTERRUPTED = 5
    """The run was interrupted and can be resumed."""


class DistbenchError(Exception):
    """Base of every error raised on purpose. The message says what is wrong, with which value, and what to do."""

    exit_code = ExitCode.CRASHED


class ConfigError(DistbenchError):
    """The configuration cannot be run as written."""

    exit_code = ExitCode.USAGE


class UserModelError(ConfigError):
    """A user's `_target_` could not be imported, called, or returned something that is not what it must be."""


class OutputError(ConfigError):
    """A run folder cannot be created or written."""


class RunFolderError(DistbenchError):
    """A run folder, or a file in it, is damaged, foreign, or of a newer schema."""

    exit_code = ExitCode.USAGE


class SummaryError(RunFolderError):
    """A gradient summary is damaged, foreign, of a newer schema, or cannot be combined or compared with another."""


class CheckpointError(DistbenchError):
    """A checkpoint is missing, damaged, foreign, of a newer schema, or does not fit what shall be trained on from it."""

    exit_code = ExitCode.USAGE


class NonDeterministicStart(DistbenchError):
    """Ranks would start from different weights."""


class NonFiniteError(DistbenchError):
    """A step's loss or gradient is not finite, and the run is not to go on (`on_nonfinite=stop`)."""


class TensorFileError(DistbenchError):
    """A tensor file, or a folder or index of them, is missing, damaged, truncated, or not what it should be."""

    exit_code = ExitCode.USAGE


class BaselineError(DistbenchError):
    """A baseline cannot be computed, or a cached one is damaged."""


class StaleBaseline(BaselineError):
    """A cached baseline was made from other weights or samples than this run has; it must be rebuilt."""
