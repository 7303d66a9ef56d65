"""Models with everything at its oddest: `model._target_=tests.numerics.odd_models.<name>`. Six numbers in, six out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FEATURES = 6


class Split(nn.Module):
    """Gives its halves by name."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = x.chunk(2, dim=-1)
        return {"left": left, "right": right}


class Odd(nn.Module):
    """A scalar parameter, a transposed one, one with dims of size one, one that is multiplied by zero, a
    channels-last convolution, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(FEATURES, FEATURES + 1).t()[:FEATURES])
        self.thin = nn.Parameter(torch.randn(3, 1, 2, 1))
        self.silent = nn.Parameter(torch.randn(7))
        self.convolution = nn.Conv2d(2, 2, kernel_size=(3, 3), padding=1).to(memory_format=torch.channels_last)
        self.split = Split()
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.register_buffer("sum", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.get_buffer("sum").add_(x.detach().sum(0).to(self.get_buffer("sum").dtype))
        halves = self.split(x @ self.transposed)
        y = torch.cat([halves["right"], halves["left"]], dim=-1) * self.gain
        y = y + self.thin.reshape(-1) + 0.0 * self.silent.sum()
        image = y.reshape(-1, 1, 2, 3).expand(-1, 2, -1, -1)
        y = self.convolution(image).mean(1).reshape(y.shape)
        return torch.where(self.get_buffer("mask"), y, -y)


class Scaled(nn.Module):
    """Two layers; the first one's output is scaled, so that gradients can be made as small or large as one likes."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(x) * self.scale


class FrozenBlocks(nn.Module):
    """Blocks of which the first and last hold nothing that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


class Empty(nn.Module):
    """Parameters without elements: two that are used, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.wide, self.used = nn.Parameter(torch.zeros(FEATURES, 0)), nn.Parameter(torch.zeros(0, 3))
        self.spare = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) + x[..., :0] @ self.wide.t() + self.used.sum()


class Sometimes(nn.Module):
    """Which expert a batch uses depends on the batch, so some ranks may leave a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(x.sum() > 0)](x)
