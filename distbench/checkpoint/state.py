"""`train_state.json`: what a checkpoint says beside its tensors. Read as if anyone had written it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distbench.checkpoint.format import CODES, Form, is_count, is_shape
from distbench.checkpoint.manifest import read_manifest, read_small, step_of
from distbench.errors import CheckpointError
from distbench.runs.text import detail, plain

STATE = "train_state.json"
SCHEMA = 1

Plain = int | float | bool | str
"""What an attribute of a module may be to be kept."""

TWISTER = 624
"""Words of a Mersenne Twister's state."""


@dataclass(frozen=True)
class RankState:
    """What one rank keeps outside of tensors."""

    attributes: dict[str, dict[str, Plain]]
    """Module -> attribute -> value."""
    python_random: tuple[int, tuple[int, ...], float | None]
    """As `random.setstate` takes it."""
    numpy_random: tuple[str, tuple[int, ...], int, int, float]
    """As `numpy.random.set_state` takes it."""


@dataclass(frozen=True)
class TrainState:
    """Where a run was."""

    step: int
    world_size: int
    updates: int
    """Steps in which the optimizer moved."""
    scale: float
    good_steps: int
    optimizer: str
    """Name of its class."""
    parameters: dict[str, Form]
    """Whole shape and dtype of each."""
    buffers: list[str]
    """Those that the plain model's state dict has, by every name that it has them under."""
    aliases: dict[str, str]
    """Other names of tied parameters and of buffers that modules share -> the name of the stored tensor."""
    ranks: list[RankState]

    def check_fits(self, parameters: Mapping[str, Form], optimizer: str, folder: Path) -> None:
        """Raises CheckpointError where it is not of a model with these parameters, trained by an optimizer of this class."""
        differing = [
            f"{plain(name)} is {self.parameters.get(name, 'missing')}, the model's is {parameters.get(name, 'missing')}"
            for name in sorted(parameters.keys() | self.parameters.keys())
            if parameters.get(name) != self.parameters.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise CheckpointError(f"{folder} is of another model: {detail('; '.join(differing[:3]))}{more}")
        if self.optimizer != optimizer:
            raise CheckpointError(
                f"{folder} has the state of {detail(plain(self.optimizer))}, the run's optimizer is {optimizer}"
            )


def read_state(folder: Path) -> TrainState:
    """Of a checkpoint, as its manifest says it was written. Raises CheckpointError for anything that distbench would not
    write."""
    file = folder / STATE
    entry = next((entry for entry in read_manifest(folder) if entry.name == STATE), None)
    if entry is None:
        raise CheckpointError(f"{folder} is damaged: its manifest names no {STATE}")
    entry.verify(folder)
    tree = read_small(file)
    given = _Given(tree, str(file))
    schema = given("schema", "a whole number", is_count)
    if schema > SCHEMA:
        raise CheckpointError(f"{file} has schema {schema}, this distbench reads up to {SCHEMA}; upgrade distbench")
    size = given("world_size", "a number of ranks", lambda value: is_count(value) and value > 0)
    ranks = given(
        "ranks", f"a list of {size}, one a rank", lambda value: isinstance(value, list) and len(value) == size
    )
    scaler = _Given(given("scaler", "an object", _is_object), f"{file}: scaler")
    state = TrainState(
        step=given("step", "a whole number", is_count),
        world_size=size,
        updates=given("updates", "a whole number", is_count),
        scale=float(scaler("scale", "a positive number", lambda value: _is_number(value) and value > 0)),
        good_steps=scaler("good_steps", "a whole number", is_count),
        optimizer=given("optimizer", "a word", _is_word),
        parameters={
            name: Form(CODES[dtype], tuple(shape))
            for name, (shape, dtype) in given(
                "parameters", "a shape and a dtype for each", lambda value: _is_table(value, _is_parameter)
            ).items()
        },
        buffers=given("buffers", "a list of names", _is_names),
        aliases=given("aliases", "a name for each name", lambda value: _is_table(value, _is_word)),
        ranks=[_rank(_Given(row, f"{file}: rank {rank}")) for rank, row in enumerate(ranks)],
    )
    if state.step != step_of(folder):
        raise CheckpointError(f"{file} is of step {state.step}, and not of its folder's")
    return state


def _rank(given: _Given) -> RankState:
    version, internal, gauss = given("python_random", "what random.getstate() gives", _is_python_random)
    name, keys, *rest = given("numpy_random", "what numpy.random.get_state() gives", _is_numpy_random)
    attributes = given(
        "attributes",
        "plain values for each module",
        lambda value: _is_table(value, lambda module: _is_table(module, lambda inner: isinstance(inner, Plain))),
    )
    return RankState(attributes, (version, tuple(internal), gauss), (name, tuple(keys), *rest))


class _Given:
    """A JSON object whose values are taken one by one, each only if it is right."""

    def __init__(self, tree: Any, where: str) -> None:
        self.where = where
        if not _is_object(tree):
            raise CheckpointError(f"{where} is no object")
        self._tree = tree

    def __call__(self, key: str, what: str, right: Callable[[Any], bool]) -> Any:
        value = self._tree.get(key)
        if not right(value):
            raise CheckpointError(f"{self.where} is damaged: {key} is {detail(repr(value)[:400])}, not {what}")
        return value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_table(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(right(inner) for inner in value.values())


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: Any) -> bool:
    return is_count(value) or (type(value) is float and math.isfinite(value))


def _is_parameter(value: Any) -> bool:
    match value:
        case [shape, str(dtype)]:
            return is_shape(shape) and dtype in CODES
    return False


def _are_words(value: Any) -> bool:
    """Whether a Mersenne Twister could be in such a state."""
    return isinstance(value, list) and len(value) == TWISTER and all(is_count(word) and word < 2**32 for word in value)


def _is_position(value: Any) -> bool:
    """Where in its state a Mersenne Twister reads next. numpy does not look at it, and would read elsewhere."""
    return is_count(value) and value <= TWISTER


def _is_python_random(value: Any) -> bool:
    match value:
        case [3, [*words, position], gauss]:
            return _are_words(words) and _is_position(position) and (gauss is None or _is_number(gauss))
    return False


def _is_numpy_random(value: Any) -> bool:
    match value:
        case ["MT19937", words, position, has_gauss, gauss]:
            return _are_words(words) and _is_position(position) and is_count(has_gauss) and _is_number(gauss)
    return False
