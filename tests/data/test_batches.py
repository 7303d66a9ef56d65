"""Any world size and any micro-batching see the same global batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distbench.config import BatchShape, Seeds, SyntheticData
from distbench.data.batches import Batch, SampleAddressedBatches, build_source, sample_digest, seed_random_state
from distbench.data.synthetic import SyntheticSamples, mix

CPU = torch.device("cpu")
SOURCE = SyntheticSamples([2, 3], [2], None, seed=7)


def batches(global_batch: int, ranks: int, accumulation: int, step: int) -> list[list[Batch]]:
    """Every rank's micro-batches of a step."""
    shape = BatchShape(global_batch, ranks, accumulation)
    return [
        SampleAddressedBatches(SOURCE, shape, rank, CPU, torch.float32).micro_batches(step) for rank in range(ranks)
    ]


@given(ranks=st.integers(1, 6), accumulation=st.integers(1, 4), micro=st.integers(1, 3), step=st.integers(0, 50))
def test_ids_are_divided_without_gap_or_overlap(ranks: int, accumulation: int, micro: int, step: int) -> None:
    size = ranks * accumulation * micro
    shape = BatchShape(size, ranks, accumulation)
    assert shape.micro_batch == micro and shape.per_rank == micro * accumulation
    ids = [
        index
        for rank in range(ranks)
        for index in SampleAddressedBatches(SOURCE, shape, rank, CPU, torch.float32).ids(step)
    ]
    assert ids == list(range(step * size, (step + 1) * size))


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 3), (2, 1), (2, 3), (4, 3), (12, 1)])
@pytest.mark.parametrize("step", [0, 5])
def test_the_global_batch_is_the_same_however_it_is_divided(ranks: int, accumulation: int, step: int) -> None:
    (whole,) = batches(12, 1, 1, step)[0]
    parts = [micro for rank in batches(12, ranks, accumulation, step) for micro in rank]
    assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert sum(sample_digest([part]) for part in parts) % 2**64 == sample_digest([whole])


def test_steps_and_seeds_differ() -> None:
    (first,), (second,) = batches(4, 1, 1, 0)[0], batches(4, 1, 1, 1)[0]
    assert not torch.equal(first.inputs, second.inputs)
    assert len({mix(seed, index) for seed in range(50) for index in range(50)}) == 2500


def test_the_digest_does_not_see_order_but_everything_else() -> None:
    inputs, targets = torch.arange(6.0).reshape(3, 2), torch.arange(3.0).reshape(3, 1)
    whole = sample_digest([Batch(range(3), inputs, targets)])
    apart = [Batch(range(i, i + 1), inputs[i : i + 1], targets[i : i + 1]) for i in (2, 0, 1)]
    assert sample_digest(apart) == whole
    assert sample_digest([Batch(range(1, 4), inputs, targets)]) != whole, "other ids"
    assert sample_digest([Batch(range(3), inputs.flip(0), targets)]) != whole, "inputs of other ids"
    assert sample_digest([Batch(range(3), inputs, targets + 1)]) != whole, "other targets"
    twice = [*apart[:2], apart[0]]
    assert sample_digest(twice) != whole, "a duplicate in place of a sample"


def test_samples_are_given_in_the_wanted_dtype() -> None:
    shape = BatchShape(2, 1, 1)
    (floats,) = SampleAddressedBatches(SOURCE, shape, 0, CPU, torch.float64).micro_batches(0)
    assert floats.inputs.dtype is torch.float64 and floats.targets.dtype is torch.float64
    tokens = build_source(SyntheticData(input_shape=[4], target_shape=[4], vocab_size=10), Seeds())
    (ids,) = SampleAddressedBatches(tokens, shape, 0, CPU, torch.float64).micro_batches(0)
    assert ids.inputs.dtype is torch.int64 and int(ids.inputs.max()) < 10 and ids.inputs.shape == (2, 4)


def test_forward_draws_the_same_for_the_same_sample() -> None:
    """Dropout depends on the micro-batch's first id, not on the rank or on what was drawn before."""
    drawn = []
    for before in (0, 3):
        torch.rand(before)
        seed_random_state(1, Batch(range(8, 10), torch.zeros(2), torch.zeros(2)))
        drawn.append(torch.rand(2).tolist())
    seed_random_state(1, Batch(range(9, 11), torch.zeros(2), torch.zeros(2)))
    assert drawn[0] == drawn[1] != torch.rand(2).tolist()
