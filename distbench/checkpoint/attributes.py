"""What the user's modules keep outside of parameters and buffers, as data: plain values, lists, dicts, tuples, tensors,
generators. What is of any other kind is not kept; `Watch` finds out whether it changes.

A value is a JSON scalar or a list that begins with a word:

    ["float", "nan"]  ["int", "0x..."]  ["str", "nan"]      what JSON has not, or `runs.files.strict` would confuse
    ["list", [...]]  ["tuple", [...]]  ["dict", [[k, v], ...]]
    ["tensor", key, device type, strides or null, requires_grad]    `A/<key>` of the rank's shard
    ["generator", key, device type]                         `A/<key>` is its state
    ["same", n]                                             the nth list, dict, tensor or generator before it, itself
    ["module" | "parameter" | "buffer", name]               the model's own
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from distbench.checkpoint.plain import FSDP1_MARKS, aliases

if TYPE_CHECKING:
    from distbench.trainer import Trainer

PLAIN = (int, float, bool, str)
KEPT = (*PLAIN, type(None), list, tuple, dict, Tensor, torch.Generator)
"""Kinds that are kept, if what is in them is."""
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has, but for the one that users set."""
MARKS = (*FSDP1_MARKS, "__composable_api_", "__")
"""How the attributes begin that torch leaves on the user's modules (`contract` of torch.distributed._composable, 2.13)."""
MAX_VALUES = 100_000
"""Of one attribute: more would hold up every save."""
MAX_DEPTH = 50
MAX_PICKLED, MAX_HASHED = 1 << 22, 1 << 26
"""Bytes of an object, and of tensors in it, beyond which nobody looks whether it has changed."""
NOT_KEPT = "is not kept"
ODD_WORDS = ("nan", "inf", "-inf")

Tree = dict[str, dict[str, Any]]
"""Module -> attribute -> value."""


class NotKept(Exception):
    """Why a value is not kept; empty where that is nobody's business."""


@dataclass
class Kept:
    """Attributes at one moment. Tensors share the model's memory until they are copied."""

    plain: Tree = field(default_factory=dict)
    """What JSON says as it is."""
    trees: Tree = field(default_factory=dict)
    """All else, as above."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By key."""
    names: dict[str, frozenset[str]] = field(default_factory=dict)
    """Module -> all that there was, kept or not."""

    def copy(self) -> Kept:
        """One that shares no memory with the model."""
        return Kept(self.plain, self.trees, {key: t.detach().clone() for key, t in self.tensors.items()}, self.names)


@dataclass(frozen=True)
class Initial:
    """What there was when a trainer was built: what is there later and was not then, training has made."""

    names: dict[str, frozenset[str]]
    nones: dict[str, frozenset[str]]
    """Attributes that were None."""
    buffers: frozenset[str]


class Attributes:
    """Of the user's modules in a model, wrapped or not, by the names that `canonical` makes of theirs.

    Wrappers' own are left alone, and so is what is a parameter, a buffer or a module under another guise.
    """

    def __init__(
        self,
        model: nn.Module,
        canonical: Callable[[str], str],
        local: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        # Of a wrapper and what it wraps, the wrapped.
        everything = {canonical(f"{name}.").rstrip("."): module for name, module in model.named_modules()}
        self.everything: dict[str, nn.Module] = everything
        self.modules = {name: module for name, module in everything.items() if is_users(module)}
        parameters = {canonical(name): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
        buffers = {canonical(name): tensor for name, tensor in model.named_buffers(remove_duplicate=False)}
        self._live: dict[str, Mapping[str, Any]] = {"module": everything, "parameter": parameters, "buffer": buffers}
        self._named = {id(it): [kind, name] for kind, its in self._live.items() for name, it in its.items()}
        self._memory = {_storage(local(tensor.detach())) for its in (parameters, buffers) for tensor in its.values()}
        self._memory.discard(0)
        self._taken: dict[str, set[str]] = {}

    def without(self, parameters: Iterable[str]) -> Attributes:
        """Leave out attributes of these names: FSDP1 puts views of its flat parameter where the module had its own."""
        for name in parameters:
            owner, _, key = name.rpartition(".")
            self._taken.setdefault(owner, set()).add(key)
        return self

    def of(self, name: str) -> dict[str, Any]:
        """A module's own, as they are."""
        module = self.modules[name]
        return {key: value for key, value in vars(module).items() if self._is_free(name, module, key)}

    def _is_free(self, name: str, module: nn.Module, key: str) -> bool:
        return not (
            key in INTERNAL
            or key.startswith(MARKS)
            or key in self._taken.get(name, ())
            or any(key in held for held in (module._parameters, module._buffers, module._modules))
        )

    # --- from the model

    def initial(self) -> Initial:
        own = {name: self.of(name) for name in self.modules}
        return Initial(
            names={name: frozenset(values) for name, values in own.items()},
            nones={
                name: frozenset(key for key, value in values.items() if value is None) for name, values in own.items()
            },
            buffers=frozenset(self._live["buffer"]),
        )

    def collect(self, initial: Initial | None = None) -> Kept:
        """What is there now. `initial`: leave out what was None then and still is."""
        kept, writer = Kept(), _Writer(self._named, self._memory)
        for name in self.modules:
            values = self.of(name)
            kept.names[name] = frozenset(values)
            nones = initial.nones.get(name, frozenset()) if initial is not None else frozenset()
            for key, value in values.items():
                if value is None and key in nones:
                    continue
                try:
                    tree = writer.attribute(value)
                except NotKept:
                    continue
                table = kept.plain if type(tree) in PLAIN else kept.trees
                table.setdefault(name, {})[key] = tree
            kept.plain.setdefault(name, {})
        kept.tensors = writer.tensors
        return kept

    def not_kept(self) -> Iterator[tuple[str, str, Any, str]]:
        """(module, attribute, value, why) of each that is not."""
        writer = _Writer(self._named, self._memory)
        for name in self.modules:
            for key, value in self.of(name).items():
                try:
                    writer.attribute(value)
                except NotKept as reason:
                    yield name, key, value, str(reason)

    def digest(self, value: Any) -> str | None:
        """Of a value of any kind, pickled; None for what cannot be, or is too large."""
        sink = _Sink()
        try:
            _Pickler(sink, self._named, self._memory).dump(value)
        except Exception:  # the user's own code, of any kind
            return None
        return str(sink.digest.hexdigest())

    # --- into the model

    def check(self, kept: Kept, created: Mapping[str, list[str]]) -> None:
        """Raises ValueError for what does not fit the model, or cannot be. `created`: what training has made."""
        reader = _Reader(self._live, kept.tensors)
        for table in (kept.plain, kept.trees):
            for name, values in table.items():
                for key, tree in values.items():
                    if not self._may_set(name, key, created):
                        known = repr(self.of(name).get(key)) if name in self.modules else "None"
                        raise ValueError(
                            f"attribute {key!r} of module {name!r} is {_short(tree)}, the model's is {known[:200]}"
                        )
                    reader.value(tree, None)

    def _may_set(self, name: str, key: str, created: Mapping[str, list[str]]) -> bool:
        module = self.modules.get(name)
        if module is None or not self._is_free(name, module, key):
            return False
        if key in vars(module):
            return True
        default = getattr_static(type(module), key, None)  # a class may give a value to begin with
        return key in created.get(name, ()) and isinstance(default, KEPT)

    def put(self, kept: Kept, initial: Initial | None = None, device: torch.device | None = None) -> None:
        """Make the attributes what they were: lists, dicts and generators in place, since others may hold them, too. What
        has been made since is taken away. `initial`: `kept` is a checkpoint's, which leaves out what it says nothing of."""
        names = kept.names if initial is None else initial.names
        reader = _Reader(self._live, kept.tensors, device)
        for name, module in self.modules.items():
            own = {**kept.plain.get(name, {}), **kept.trees.get(name, {})}
            for key, value in self.of(name).items():
                if key in own or not isinstance(value, KEPT):
                    continue
                if key not in names.get(name, (key,)):
                    del vars(module)[key]
                elif initial is not None and key in initial.nones.get(name, ()):
                    vars(module)[key] = None
        for table in (kept.plain, kept.trees):
            for name, values in table.items():
                there = vars(self.modules[name])
                for key, tree in values.items():
                    there[key] = reader.value(tree, there.get(key))


def attributes_of(trainer: Trainer) -> Attributes:
    """Of the user's modules, by the plain model's names."""
    strategy, module = trainer.strategy, trainer.module
    names = [slot.name for slot in strategy.slots(module)]
    found = Attributes(module, strategy.canonical_name, strategy.local)
    return found.without([*names, *aliases(module, strategy.canonical_name)])


def is_users(module: nn.Module) -> bool:
    return not all(kind.__module__.startswith("torch.") for kind in type(module).__mro__[:-1])


def _storage(tensor: Tensor) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


class _Writer:
    """Values to trees and tensors. Each mutable object once, in the order in which it is met."""

    def __init__(self, named: Mapping[int, list[str]], memory: set[int]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._named, self._memory = named, memory
        self._met: dict[int, int] = {}
        self._left = 0

    def attribute(self, value: Any) -> Any:
        """Raises NotKept, and forgets what was met on the way."""
        if type(value) in (bool, type(None)):
            return value
        self._left = MAX_VALUES
        met, tensors = len(self._met), len(self.tensors)
        try:
            return self._tree(value, 0)
        except NotKept:
            for table, count in ((self._met, met), (self.tensors, tensors)):
                while len(table) > count:
                    table.popitem()
            raise

    def _tree(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise NotKept(f"has more than {MAX_VALUES:,} values")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else ["int", hex(value)]
        if kind is float or kind is np.float64:
            return float(value) if math.isfinite(value) else ["float", str(float(value))]
        if kind is str:
            return ["str", value] if value in ODD_WORDS else value
        if (name := self._named.get(id(value))) is not None:
            return name
        if depth == MAX_DEPTH:
            raise NotKept(f"is more than {MAX_DEPTH} deep")
        if kind is tuple:
            return ["tuple", [self._tree(item, depth + 1) for item in value]]
        if id(value) in self._met:
            return ["same", self._met[id(value)]]
        if kind not in (list, dict, Tensor, torch.Generator):
            raise NotKept(NOT_KEPT)
        self._met[id(value)] = len(self._met)
        if kind is list:
            return ["list", [self._tree(item, depth + 1) for item in value]]
        if kind is dict:
            return ["dict", [[self._key(key), self._tree(item, depth + 1)] for key, item in value.items()]]
        return self._tensor(value) if kind is Tensor else self._generator(value)

    def _key(self, key: Any) -> Any:
        if type(key) not in (*PLAIN, type(None), tuple) or (type(key) is float and key != key):
            raise NotKept(NOT_KEPT)
        return ["tuple", [self._key(item) for item in key]] if type(key) is tuple else self._tree(key, MAX_DEPTH)

    def _tensor(self, tensor: Tensor) -> Any:
        if _storage(tensor) in self._memory:
            raise NotKept  # a view of a parameter or a buffer, which the model makes anew
        if not _can_be_stored(tensor):
            raise NotKept(NOT_KEPT)
        strides = None if tensor.is_contiguous() else list(tensor.stride())
        if strides is not None and not is_dense(tensor.shape, strides):
            strides = None
        return ["tensor", self._add(tensor.detach()), tensor.device.type, strides, tensor.requires_grad]

    def _generator(self, generator: torch.Generator) -> Any:
        if generator.device.type not in ("cpu", "cuda"):
            raise NotKept(NOT_KEPT)
        return ["generator", self._add(generator.get_state()), generator.device.type]

    def _add(self, tensor: Tensor) -> str:
        key = str(len(self.tensors))
        self.tensors[key] = tensor
        return key


def _can_be_stored(tensor: Tensor) -> bool:
    from distbench.checkpoint.format import CODES

    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and str(tensor.dtype).removeprefix("torch.") in CODES
        and not (tensor.is_conj() or tensor.is_neg())
        # Some wrappers give memory back while the tensor stays.
        and (tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0)
    )


def is_dense(shape: Any, strides: Any) -> bool:
    """Whether these strides give each element of a shape its place, and no more places: dimensions in another order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected or size == 0:
            return False
        expected *= size
    return True


class _Reader:
    """Trees to values. Raises ValueError for what `_Writer` does not write."""

    def __init__(
        self, live: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor], device: torch.device | None = None
    ) -> None:
        self._live, self._tensors, self._device = live, tensors, device
        self._met: list[Any] = []
        self._used: set[int] = set()

    def value(self, tree: Any, old: Any, depth: int = 0) -> Any:
        """`old`: what is there now, to be filled where it can be."""
        if depth > MAX_DEPTH + 1:
            raise ValueError("it is too deep")
        if tree is None or type(tree) in PLAIN:
            return tree
        match tree:
            case ["float", str(word)] if word in ODD_WORDS:
                return float(word)
            case ["int", str(word)] if word.lstrip("-").startswith("0x") and len(word) < 5000:
                return int(word, 16)
            case ["str", str(word)]:
                return word
            case ["tuple", list(items)]:
                olds = old if type(old) is tuple else ()
                return tuple(self._items(items, olds, depth))
            case ["list", list(items)]:
                filled: list[Any] = self._place(old, list)
                filled[:] = self._items(items, list(filled), depth)
                return filled
            case ["dict", list(items)]:
                return self._dict(items, old, depth)
            case ["same", int(number)] if 0 <= number < len(self._met):
                return self._met[number]
            case [("module" | "parameter" | "buffer") as kind, str(name)] if name in self._live[kind]:
                return self._live[kind][name]
            case ["tensor", str(key), ("cpu" | "cuda") as kind, strides, bool(grad)] if key in self._tensors:
                made = self._tensor(self._tensors[key], kind, strides, grad)
                self._met.append(made)
                return made
            case ["generator", str(key), ("cpu" | "cuda") as kind] if key in self._tensors:
                return self._generator(self._tensors[key], kind, old)
        raise ValueError(f"{_short(tree)} is nothing that is kept")

    def _items(self, trees: list[Any], olds: Any, depth: int) -> list[Any]:
        return [self.value(tree, olds[i] if i < len(olds) else None, depth + 1) for i, tree in enumerate(trees)]

    def _dict(self, items: list[Any], old: Any, depth: int) -> dict[Any, Any]:
        filled: dict[Any, Any] = self._place(old, dict)
        olds, found = dict(filled), {}
        for item in items:
            match item:
                case [key, tree]:
                    key = self.value(key, None, depth + 1)
                    if type(key) not in (*PLAIN, type(None), tuple):
                        raise ValueError(f"{_short(key)} is no key of a dict")
                    try:
                        found[key] = self.value(tree, olds.get(key), depth + 1)
                    except TypeError as error:
                        raise ValueError(f"{_short(key)} is no key of a dict") from error
                case _:
                    raise ValueError(f"{_short(item)} is no entry of a dict")
        filled.clear()
        filled.update(found)
        return filled

    def _place(self, old: Any, kind: type) -> Any:
        """What is there, if it is of this kind and nothing else has been put into it."""
        place = old if type(old) is kind and id(old) not in self._used else kind()
        self._used.add(id(place))
        self._met.append(place)
        return place

    def _tensor(self, stored: Tensor, kind: str, strides: Any, requires_grad: bool) -> Tensor:
        device = stored.device if kind == "cpu" or self._device is None else self._device
        if strides is None:
            made = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        else:
            if not isinstance(strides, list) or not all(type(stride) is int for stride in strides):
                raise ValueError(f"{_short(strides)} are no strides")
            if len(strides) != stored.dim() or not is_dense(stored.shape, strides):
                raise ValueError(f"{_short(strides)} are no strides of {tuple(stored.shape)}")
            made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=device)
        if requires_grad and not (made.is_floating_point() or made.is_complex()):
            raise ValueError(f"a tensor of {made.dtype} has no gradient")
        return made.copy_(stored.detach()).requires_grad_(requires_grad)

    def _generator(self, state: Tensor, kind: str, old: Any) -> torch.Generator:
        fits = type(old) is torch.Generator and old.device.type == kind and id(old) not in self._used
        try:
            made = old if fits else torch.Generator(self._device if kind == "cuda" and self._device else kind)
            made.set_state(state.cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a generator's state: {error}") from error
        self._used.add(id(made))
        self._met.append(made)
        return made


def _short(value: Any) -> str:
    return repr(value)[:200]


# --- what changes and is not kept


class Watch:
    """Attributes that are not kept, and what they were when this was made: nothing of it is ever read back."""

    def __init__(self, attributes: Attributes) -> None:
        self._told: set[tuple[str, str]] = set()
        self._digests = {(name, key): digest for name, key, _, digest in self._look(attributes)}

    def changed(self, attributes: Attributes) -> list[str]:
        """Sentences, each only once."""
        found = []
        for name, key, reason, digest in self._look(attributes):
            # Of what was of a kind that is kept, or was not there, there is no digest: it has changed.
            before = self._digests.get((name, key), "")
            unknown = before is None or (digest is None and (before or reason == NOT_KEPT))
            if unknown or digest == before:
                continue
            self._told.add((name, key))
            place = f"module {name}" if name else "the model"
            what = "changes and is not kept" if reason == NOT_KEPT else f"{reason} and is not kept"
            found.append(f"{key} of {place} {what} in checkpoints: a resumed run may differ")
        return found

    def _look(self, attributes: Attributes) -> Iterator[tuple[str, str, str, str | None]]:
        known: dict[int, str | None] = {}
        for name, key, value, reason in attributes.not_kept():
            if reason and (name, key) not in self._told:
                if id(value) not in known:
                    known[id(value)] = attributes.digest(value)
                yield name, key, reason, known[id(value)]


class _TooLarge(Exception):
    pass


class _Sink(io.RawIOBase):
    """Hashes what is written into it, up to a limit."""

    def __init__(self) -> None:
        self.digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        if self.size > MAX_PICKLED:
            raise _TooLarge
        self.digest.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    """The model's own modules, parameters and buffers are names; other tensors are digests."""

    def __init__(self, sink: _Sink, named: Mapping[int, list[str]], memory: set[int]) -> None:
        super().__init__(sink, protocol=5)
        self._named, self._memory, self._hashed = named, memory, 0

    def persistent_id(self, value: Any) -> Any:
        if (name := self._named.get(id(value))) is not None:
            return "/".join(name)
        if isinstance(value, torch.Generator):
            return self._of(value.get_state())
        if isinstance(value, Tensor):
            return "a view" if _storage(value) in self._memory else self._of(value)
        return None

    def _of(self, tensor: Tensor) -> str:
        self._hashed += tensor.numel() * tensor.element_size()
        if self._hashed > MAX_HASHED:
            raise _TooLarge
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_128(data).hexdigest()}"
