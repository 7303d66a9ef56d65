"""Models that users bring, small: `model._target_=tests.models_for_tests.<name>`. Some of them fail on purpose."""

from __future__ import annotations

import ctypes
import io
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

FEATURES = 6
"""Inputs and outputs of every model here, unless its factory says otherwise. Does not divide by 4 ranks."""


class Block(nn.Module):
    """Residual Linear and GELU."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.linear(x))


class Plain(nn.Module):
    """Two blocks and a head."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(features) for _ in range(2))
        self.head = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ByteModel(Plain):
    """Bytes to the logits of the next, with dropout."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.embedding = nn.Embedding(256, features)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(features, 256)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(self.embedding(x)))


class Tied(Plain):
    """The head's weight is the first layer's."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.stem = nn.Linear(features, features)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class TiedBlocks(Plain):
    """Both blocks share one weight, so neither can be a unit of its own."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


class Frozen(Plain):
    """The second block is frozen, whole; so is the head's bias."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class FrozenBlock(Plain):
    """The second block is frozen, whole, and nothing else: units stay uniform."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.blocks[1].requires_grad_(False)


class Unused(Plain):
    """Holds a layer that forward never calls."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.spare = nn.Linear(features, features)


class Normed(Plain):
    """Batch normalisation: buffers that forward changes."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.norm = nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Reused(Plain):
    """Calls each block twice, in turns, and each uses its weight three times."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        for block in self.blocks:
            block.register_forward_hook(lambda module, args, y: module.linear(torch.tanh(module.linear(y))))

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = x + torch.sin(block(x))
        return self.head(self.head(x))


class Checkpointed(Plain):
    """Each block's forward runs again in backward; what is tied is used in and outside of it."""

    def __init__(self, features: int = FEATURES, reentrant: bool = False) -> None:
        super().__init__(features)
        self.reentrant = reentrant
        self.drop = nn.Dropout(0.3)
        self.head.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: self.drop(block(x)), x, use_reentrant=self.reentrant)
        return self.head(x)


class SelfAttention(Plain):
    """Attention over one tensor that is query, key and value, and whose gradient meets a residual's outside of it."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.attention = nn.MultiheadAttention(features, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return super().forward(x + self.attention(x, x, x)[0])


class ManyBuffers(Plain):
    """One buffer is made in the first forward, one grows in it, one is expanded, one is two modules' in common."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        shared = torch.zeros(features)
        self.blocks[0].register_buffer("mean", shared)
        self.blocks[1].register_buffer("mean", shared)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.arange(x.shape[-1]).cos(), persistent=False)
        if len(self.grown) < x.shape[-1]:
            self.grown = torch.linspace(0.5, 1, x.shape[-1])
        with torch.no_grad():
            self.blocks[0].mean.mul_(0.5).add_(x.float().mean(0))
        scale = self.made * self.grown * self.expanded + self.blocks[1].mean
        return super().forward(x * scale.to(x.dtype))


class Hidden(Plain):
    """Keeps a counter in a plain attribute, and drops a layer as Python's and numpy's generators say."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * (self.calls / 4)
        for block in self.blocks:
            y = block(x)
            x = y if random.random() < 0.5 else x + 0.5 * y
        return self.head(x) * float(np.random.rand())


class Keeps(Plain):
    """Keeps state in plain attributes of every kind that checkpoints know, and makes some of it in its fourth forward."""

    best: float | None = None

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.calls, self.temperature, self.huge, self.odd = 0, 1, 2**70, "na\u00efve\udcff"
        self.mean = torch.zeros(features)
        self.history = [0.0]
        self.nested = {
            "a": [1, (2.5, None, self.mean)],
            3: torch.ones((), dtype=torch.float64),
            ("k", True): float("inf"),
        }
        self.generator = torch.Generator().manual_seed(3 + int(os.environ.get("RANK", 0)))
        self.turned = torch.randn(features, features, generator=self.generator).t()
        self.parts = [self.head, self.head.weight]
        self.weight_view = self.head.weight.detach()
        self.blocks[0].seen = self.history
        history = self.history
        self.blocks[1].register_forward_hook(lambda module, args, y: y * (1 + history[-1]))
        self.unseen = nn.functional.gelu

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return super().forward(x)
        self.calls += 1
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.float().mean(0)
            self.nested["a"][1][2].add_(self.mean)
            self.nested[3] += 0.125
            self.turned.mul_(1.01)
            noise = torch.randn(x.shape, generator=self.generator)
        self.blocks[0].seen.append(self.history[-1] * 0.5 + 0.1)
        if self.calls == 4:
            self.register_buffer("late", torch.full(x.shape[1:], 0.5))
            self.made, self.best, self.temperature = {"since": [self.calls]}, 8.0, 0.625
        if self.calls >= 4:
            self.late.mul_(0.9)
            self.made["since"][0] += 1
            x = x + self.late.to(x.dtype) + self.made["since"][0] / self.best
        own = self.mean + self.nested["a"][1][2] + self.nested[3].float() + 0.1 * noise
        x = (x + own.to(x.dtype)) @ self.turned.to(x.dtype)
        return self.parts[0](super().forward(x / x.norm())) * self.temperature


class Forgets(Plain):
    """Its state is an object that checkpoints do not know; beside it are some that do not change."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.constant, self.call, self.lock = random.Random(1), (lambda: None), threading.Lock()
        self.draws = random.Random(2)
        self.blocks[0].long = [0.0] * 100_001
        self.blocks[1].long = [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.blocks[1].long.extend([0.0] * 100_001)
        return super().forward(x) * self.draws.random()


class Extra(Plain):
    """One block has extra state that is a tensor, the model one of another kind."""

    def __init__(self, kind: str = "set", features: int = FEATURES) -> None:
        super().__init__(features)
        self.kind = kind
        self.blocks[0] = ExtraBlock(features)

    def get_extra_state(self) -> object:
        return {"none": None, "bytes": io.BytesIO(b"abc"), "dict": {"n": 1}, "set": {1, 2}, "object": self.head}[
            self.kind
        ]

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("nobody has kept it")


class ExtraBlock(Block):
    """Block, counting where nobody sees it."""

    __slots__ = ("count",)

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__(features)
        self.count = torch.arange(3, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + (not x.is_meta)
        return super().forward(x) * (1 + 1 / float(self.count[0] + 1))

    def get_extra_state(self) -> Tensor:
        return self.count

    def set_extra_state(self, state: Tensor) -> None:
        self.count = state


class Lopsided(nn.Module):
    """A linear map whose first row has gradients far larger than the others': one rank's shard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)
        self.gain: Tensor
        self.register_buffer("gain", torch.tensor([30.0] + [1.0] * (FEATURES - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain.to(x.dtype)


class Raises(Plain):
    """Raises in forward, on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("the user's own mistake")


class RaisesOnRank(Plain):
    """Raises in forward on one rank; the others go on into their collectives."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if int(os.environ.get("RANK", 0)) == self.rank:
            raise ArithmeticError("one rank's mistake")
        return super().forward(x)


class Narrow(Plain):
    """Returns half of its features: not what the targets are for."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : FEATURES // 2]


class Pair(Plain):
    """Returns more than its outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class OwnCheck(Plain):
    """Refuses its input in words of its own."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"my own words about the shape {tuple(x.shape)}")


class Reads(Plain):
    """Looks at a value, which the meta device does not have, and would refuse the shape after that."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x @ x


class KillsRank(Plain):
    """One rank is killed in forward, as the kernel's out-of-memory killer does it."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if int(os.environ.get("RANK", 0)) == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError


class GoesWrong(Plain):
    """One rank (-1: all) does not come back from its `at`-th forward as it should; only once, where `once` names a file to
    say so."""

    def __init__(self, how: str, at: int = 12, rank: int = 1, once: str | None = None) -> None:
        super().__init__()
        self.how, self.at, self.rank, self.once = how, at, rank, once
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        rank = int(os.environ.get("RANK", "-1"))
        here = rank >= 0 and self.rank in (rank, -1) and self.calls == self.at
        if here and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self.go_wrong()
        return super().forward(x)

    def go_wrong(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.how == "sleep":
            time.sleep(600)
        elif self.how == "native":  # holds the interpreter, as a native library that waits for something does
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # nobody unlocks it
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        elif self.how == "exit":
            os._exit(7)
        elif self.how == "exit well":
            os._exit(0)
        elif self.how == "exit from Python":
            sys.exit(0)
        elif self.how == "unspeakable":
            raise Unspeakable


class Dawdles(Plain):
    """Takes its time in every forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.0 if x.is_meta else self.seconds)
        return super().forward(x)


class OutOfMemory(Plain):
    """Asks for more memory than there is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.empty(2**60).sum()


class Waits(Plain):
    """Says in `folder`, on every rank, that it has started, then takes very long, and says if SIGTERM has ended it.

    Not where it is only tried, on the meta device.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return super().forward(x)
        rank = os.environ.get("RANK", 0)

        def end(number: int, frame: object) -> None:
            (self.folder / f"ended{rank}").touch()
            os._exit(1)

        signal.signal(signal.SIGTERM, end)
        (self.folder / f"started{rank}").touch()
        time.sleep(600)
        return super().forward(x)


class RandomStart(Plain):
    """Starts from weights that differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.bias.add_(int(os.environ.get("RANK", 0)))


def without_parameters() -> nn.Module:
    return nn.Identity()


def not_a_module() -> str:
    return "a string"


def needs_storage() -> nn.Module:
    """A factory that cannot run on the meta device."""
    model = Plain()
    assert model.head.weight.detach().sum().item() != 12345.0
    return model


not_callable = 3


class Sparse(nn.Module):
    """An embedding whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, FEATURES, sparse=True)


class Lazy(nn.Module):
    """A layer without a shape before its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(FEATURES)


class Complex(Plain):
    """One parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(FEATURES, dtype=torch.complex64))


class Scalar(Plain):
    """One parameter has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))


class Empty(Plain):
    """One parameter has no element."""

    def __init__(self, trained: bool = True, shape: tuple[int, ...] = (0, FEATURES)) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(shape), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class Idle(nn.Module):
    """All that it holds is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class Idling(Plain):
    """Begins with a layer that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = Idle()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.idle(x))


class Transposed(Plain):
    """One parameter's memory is not in the order of its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Parameter(torch.randn(2, FEATURES).t())
