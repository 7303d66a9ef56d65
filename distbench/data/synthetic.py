"""Samples drawn from (seed, id): the data set that is on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, index: int) -> int:
    """A well-spread 63-bit generator seed for (seed, index): the SplitMix64 finaliser (Steele et al., OOPSLA 2014)."""
    z = (seed * 0xD1342543DE82EF95 + (index + 1) * _GOLDEN) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


class SyntheticSamples:
    """Standard normal inputs and targets; token ids where there is a vocabulary."""

    def __init__(
        self,
        input_shape: list[int],
        target_shape: list[int],
        vocab_size: int | None,
        seed: int,
        padding: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        """`padding`: at most this share of a sample's trailing targets is `ignore_index` (token ids only)."""
        self.input_shape, self.target_shape = tuple(input_shape), tuple(target_shape)
        self.vocab_size, self.seed = vocab_size, seed
        self.padding, self.ignore_index = padding, ignore_index

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(mix(self.seed, index))
        if self.vocab_size is None:
            return (
                torch.randn(self.input_shape, generator=generator),
                torch.randn(self.target_shape, generator=generator),
            )
        inputs = torch.randint(self.vocab_size, self.input_shape, generator=generator)
        targets = torch.randint(self.vocab_size, self.target_shape, generator=generator)
        most = int(self.padding * targets.numel())
        if most:
            padded = int(torch.randint(most + 1, (), generator=generator))
            targets.view(-1)[targets.numel() - padded :] = self.ignore_index
        return inputs, targets
