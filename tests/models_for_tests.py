"""Models that users bring, small: `model._target_=tests.models_for_tests.<name>`. Some of them fail on purpose."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

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
