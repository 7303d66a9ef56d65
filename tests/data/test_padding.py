"""Padded synthetic targets."""

from __future__ import annotations

import pytest

from distbench.composing import compose
from distbench.data.synthetic import SyntheticSamples
from distbench.errors import ConfigError

PADDED = SyntheticSamples([8], [8], 19, seed=3, padding=0.5, ignore_index=-7)


def test_padding_trails_and_its_length_depends_on_the_id() -> None:
    lengths = set()
    for index in range(40):
        _, targets = PADDED.sample(index)
        real = [int(token) for token in targets if int(token) != -7]
        lengths.add(len(real))
        assert targets[: len(real)].tolist() == real, "padding comes last"
        assert len(real) >= 4
    assert lengths == {4, 5, 6, 7, 8}


def test_padding_changes_nothing_else() -> None:
    plain = SyntheticSamples([8], [8], 19, seed=3)
    for index in range(5):
        inputs, targets = PADDED.sample(index)
        expected_inputs, expected = plain.sample(index)
        assert inputs.equal(expected_inputs)
        kept = targets != -7
        assert targets[kept].equal(expected[kept])


@pytest.mark.parametrize("padding", ["1.0", "-0.1"])
def test_all_padding_is_refused(padding: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.padding"):
        compose(["model=simple_text", "loss=cross_entropy", f"data.padding={padding}"])


def test_padding_needs_tokens() -> None:
    with pytest.raises(ConfigError, match=r"data\.padding.*token ids"):
        compose(["data.padding=0.5"])
