"""Sample-addressed batches: a sample's content depends on (data seed, id) alone, so any world size, any
micro-batching and any resume see the same global batch.

Optimizer step s consumes ids [s G, (s+1) G); rank r takes the r-th contiguous slice of G / N ids.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distbench.config import BatchShape, Seeds, SyntheticData, TextData
from distbench.data.synthetic import SyntheticSamples, mix


@dataclass(frozen=True)
class Batch:
    """Some samples: their ids, inputs (B, *input_shape) and targets (B, *target_shape)."""

    ids: range
    inputs: Tensor
    targets: Tensor


class SampleSource(Protocol):
    """Anything that can say what sample `index` is."""

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Input and target of one sample, on CPU; floats in fp32. Must depend on `index` alone."""
        ...


def build_source(data: SyntheticData | TextData, seeds: Seeds) -> SampleSource:
    if isinstance(data, TextData):
        from distbench.data.text import TextWindows

        return TextWindows(data.path, data.glob, data.seq_len, data.max_bytes, seeds.data if data.shuffle else None)
    return SyntheticSamples(
        data.input_shape, data.target_shape, data.vocab_size, seeds.data, data.padding, data.ignore_index
    )


class SampleAddressedBatches:
    """One rank's share of every step's global batch, as micro-batches on its device."""

    def __init__(
        self, source: SampleSource, shape: BatchShape, rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`dtype`: what floating-point inputs and targets are given in (fp32, or fp64 for references)."""
        self.source, self.shape, self.rank, self.device, self.dtype = source, shape, rank, device, dtype

    def ids(self, step: int) -> range:
        """Global ids of this rank's samples in a step (0-based)."""
        first = step * self.shape.global_batch + self.rank * self.shape.per_rank
        return range(first, first + self.shape.per_rank)

    def micro_batches(self, step: int) -> list[Batch]:
        ids, size = self.ids(step), self.shape.micro_batch
        return [self._batch(ids[start : start + size]) for start in range(0, len(ids), size)]

    def _batch(self, ids: range) -> Batch:
        inputs, targets = zip(*(self.source.sample(index) for index in ids), strict=True)
        return Batch(ids, self._place(torch.stack(inputs)), self._place(torch.stack(targets)))

    def _place(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=self.device, dtype=dtype)


def seed_random_state(seed: int, batch: Batch) -> None:
    """Seed torch's, Python's and numpy's global generators for one micro-batch from the seed and the global id of its
    first sample, so that dropout is the same wherever and whenever the micro-batch is computed: on a rank, in the
    baseline, after a resume."""
    key = mix(seed, batch.ids[0])
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)


def sample_digest(batches: list[Batch]) -> int:
    """Order-independent 64-bit digest of ids and contents: the sum over samples of a hash of (id, bytes), mod 2^64.

    Digests of disjoint parts add up, so ranks' digests sum to the global batch's.
    """
    total = 0
    for batch in batches:
        for row, index in enumerate(batch.ids):
            content = hashlib.blake2b(index.to_bytes(8, "little", signed=True), digest_size=8)
            for tensor in (batch.inputs[row], batch.targets[row]):
                content.update(memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            total += int.from_bytes(content.digest(), "little")
    return total % 2**64
