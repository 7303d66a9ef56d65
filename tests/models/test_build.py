"""From `model` to a module: the same weights from the same seed, and clear words about a user's factory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from distbench.config import CustomModel, SimpleModel
from distbench.errors import UserModelError
from distbench.models.build import block_classes, build_model, locate, weights_digest
from distbench.models.simple import SimpleTransformer, parameter_count
from tests.models_for_tests import Plain


def model(target: str, **kwargs: object) -> CustomModel:
    return CustomModel(_target_=f"tests.models_for_tests.{target}", kwargs=kwargs)


SIMPLE = SimpleModel(num_layers=2, hidden_dim=5)


@pytest.mark.parametrize("config", [SIMPLE, model("Plain")], ids=["simple", "custom"])
def test_weights_depend_on_the_seed_alone(config: SimpleModel | CustomModel) -> None:
    torch.manual_seed(1)
    first = weights_digest(build_model(config, seed=3))
    torch.rand(5)
    assert weights_digest(build_model(config, seed=3)) == first
    assert weights_digest(build_model(config, seed=4)) != first


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    build_model(SIMPLE, seed=3)
    assert torch.rand(3).tolist() == expected


def test_the_digest_sees_names_shapes_dtypes_and_bits() -> None:
    def digest(change: str) -> str:
        plain = build_model(model("Normed"), seed=0)
        assert isinstance(plain, nn.Module)
        if change == "bit":
            plain.head.bias.data.view(torch.int32)[0] ^= 1
        elif change == "buffer":
            plain.norm.running_mean[0] = 1
        elif change == "dtype":
            plain.head.double()
        elif change == "shape":
            plain.head.weight.data = plain.head.weight.data.reshape(4, 9)
        elif change == "name":
            plain.tail, plain.head = plain.head, None
        return weights_digest(plain)

    changes = ["", "bit", "buffer", "dtype", "shape", "name"]
    assert len({digest(change) for change in changes}) == len(changes)
    assert digest("") == digest("")


@pytest.mark.parametrize(("layers", "hidden", "vocab"), [(1, 4, None), (3, 7, None), (2, 4, 16)])
def test_the_stack_has_the_parameters_of_its_formula(layers: int, hidden: int, vocab: int | None) -> None:
    stack = SimpleTransformer(layers, hidden, vocab)
    assert sum(p.numel() for p in stack.parameters()) == parameter_count(layers, hidden, vocab)
    if vocab is None:
        assert stack(torch.ones(2, 3, hidden)).shape == (2, 3, hidden)
    else:
        assert stack(torch.ones(2, 3, dtype=torch.int64)).shape == (2, 3, vocab)


def test_the_layer_is_the_formula() -> None:
    """h = norm(x + attn(x)); return h + mlp(h)."""
    layer = SimpleTransformer(1, 4).layers[0]
    x = torch.randn(2, 3, 4)
    h = layer.norm(x + layer.attn(x))
    assert torch.equal(layer(x), h + layer.mlp[2](nn.functional.gelu(layer.mlp[0](h))))


def test_a_factory_gets_its_arguments() -> None:
    built = build_model(model("Plain", features=3), seed=0)
    assert isinstance(built, Plain) and built.head.in_features == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (model("nope"), r"tests.models_for_tests has no 'nope'; it has Block, Plain"),
        (model("not_callable"), r"is a int, not something to call"),
        (model("not_a_module"), r"returned str, not a torch.nn.Module; return the module from the factory"),
        (model("without_parameters"), r"returned a module without parameters"),
        (model("Plain", width=3), r"does not take model.kwargs: got an unexpected keyword argument 'width'"),
        (model("Waits"), r"does not take model.kwargs: missing a required argument: 'folder'"),
        (CustomModel(_target_="nope.build"), r"no module named 'nope'; run from the folder it lies in, or put that on"),
        (CustomModel(_target_="tests.nope.build"), r"no module named 'tests.nope'"),
        (CustomModel(_target_="build"), r"'build' must be a dotted path, such as my_file.build_model"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused(config: CustomModel, message: str) -> None:
    with pytest.raises(UserModelError, match=message) as refusal:
        build_model(config, seed=0)
    assert f"model._target_={config._target_}" in str(refusal.value).replace("'", "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_that_name", "importing broken_model failed: No module named 'nothing_of_that_name'"),
        ("1 / 0", "importing broken_model failed: ZeroDivisionError: division by zero"),
        ("def build(:", "importing broken_model failed: SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "broken_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserModelError, match=message):
        locate("broken_model.build", "model._target_")


def test_an_error_inside_the_factory_is_the_users() -> None:
    """It keeps its own type and traceback; only what is wrong with the target itself is turned into ours."""
    with pytest.raises(RuntimeError, match=r"normal_|std|negative"):
        build_model(CustomModel(_target_="torch.nn.Linear", kwargs={"in_features": -1, "out_features": 2}), seed=0)


def test_block_classes_are_the_configs_or_the_models() -> None:
    assert block_classes(SIMPLE, SimpleTransformer(1, 2)) == ["SimpleTransformerLayer"]
    assert block_classes(CustomModel(block_classes=["Mine"]), Plain()) == ["Mine"]
    assert block_classes(CustomModel(), Plain()) == []
