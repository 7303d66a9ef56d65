"""What only the built model, the data or the device can tell, told before any rank starts."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from distbench import preflight as module
from distbench.config import BlockWrap, Config, Fault, FSDPStrategy, NoWrap, PatternWrap, SizeWrap, TextData
from distbench.errors import ConfigError, UserModelError
from distbench.preflight import preflight, preset
from tests.configs import custom, small


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    return str(refused.value)


def test_nothing_is_built_for_real() -> None:
    config = small("fsdp", hidden=4096, layers=64, wrap=NoWrap())  # a hundred GB of parameters
    same, model, notes = preflight(config)
    assert same == config and notes == []
    assert isinstance(model, nn.Module) and {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small("fsdp", wrap=BlockWrap(classes=["Nope"])), "wrap_policy.classes=['Nope'] matches no module"),
        (small("fsdp2", wrap=PatternWrap(patterns=["nope"])), "wrap_policy.patterns=['nope'] matches no module name"),
        (custom("Nope"), "model._target_=tests.models_for_tests.Nope: tests.models_for_tests has no 'Nope'"),
        (custom("not_a_module"), "returned str, not a torch.nn.Module"),
        (custom("without_parameters"), "returned a module without parameters"),
        (
            small(fault=Fault("distbench.faults.clipping.ClipLocalShard", "mine", {"factr": 1})),
            "fault._target_=distbench.faults.clipping.ClipLocalShard does not take fault.kwargs: ",
        ),
        (small(data=TextData(path="/dev/null")), "data.path=/dev/null holds 0 bytes in 1 files"),
    ],
)
def test_refusals(config: Config, message: str) -> None:
    assert message in refusal(config)


def test_a_policy_that_the_strategy_does_not_use_is_not_checked() -> None:
    preflight(small("ddp", wrap=BlockWrap(classes=["Nope"])))


def test_a_flat_parameter_cannot_be_frozen_in_part() -> None:
    message = refusal(custom("Frozen", "fsdp-flat"))
    assert "flat parameter of unit (root), but head.bias is frozen" in message
    assert "set strategy.use_orig_params=true" in message
    preflight(custom("Frozen", "fsdp"))
    preflight(custom("FrozenBlock", "fsdp-flat"))
    assert "unit (root), but blocks.1" in refusal(custom("FrozenBlock", "fsdp-flat", wrap=NoWrap()))


def test_batch_norm_in_two_dtypes() -> None:
    config = custom("Normed", precision="bf16")
    message = refusal(config)
    assert "casts norm's weights to bf16 but not its running statistics" in message
    assert "set precision.buffer_dtype=bf16, or use precision=bf16_autocast" in message
    preflight(replace(config, precision=replace(preset("bf16"), buffer_dtype="bf16")))
    preflight(replace(config, precision=preset("bf16_autocast")))
    preflight(replace(config, precision=preset("fp32")))


def test_a_factory_that_needs_storage_is_left_to_the_ranks() -> None:
    """So are the checks that need its module."""
    _, model, notes = preflight(custom("needs_storage", "fsdp", wrap=BlockWrap(classes=["Nope"])))
    assert model is None and notes == []


def taking(input_shape: list[int]) -> Config:
    config = custom("Plain")
    return replace(
        config,
        model=replace(config.model, input_shape=input_shape),
        data=replace(config.data, input_shape=input_shape),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (taking([7]), "model.input_shape=[7]: the model does not take inputs of shape (6, 7)"),
        (custom("Narrow"), "the model's outputs have shape (6, 3), but loss=mse has targets of shape (6, 6)"),
        (custom("Pair"), "the model returned tuple, not a tensor"),
    ],
)
def test_a_micro_batch_that_the_model_does_not_take(config: Config, message: str) -> None:
    assert message in refusal(config)


def test_the_models_own_line_is_named() -> None:
    message = refusal(taking([7]))
    assert "RuntimeError: " in message and "models_for_tests.py, line" in message and "self.linear(x)" in message


@pytest.mark.parametrize("name", ["Raises", "OwnCheck", "Reads", "Unused", "Tied", "Normed"])
def test_what_else_a_forward_does_is_left_to_the_ranks(name: str) -> None:
    random = torch.get_rng_state()
    _, model, notes = preflight(custom(name))
    assert model is not None and notes == [] and torch.equal(random, torch.get_rng_state())


def test_a_small_model_under_the_size_policy_is_noted() -> None:
    _, _, notes = preflight(small("fsdp", wrap=SizeWrap()))
    (note,) = notes
    assert "no module holds 1,000,000 parameters" in note and "is one unit; lower wrap_policy.min_num_params" in note
    assert preflight(small("fsdp", wrap=SizeWrap(min_num_params=500)))[2] == []


# --------------------------------------------------------------------------------------------------------------
# Devices and speed
# --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "resolve_device", lambda config: "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old GPU")


@pytest.mark.usefixtures("old_gpu")
@pytest.mark.parametrize("name", ["bf16", "bf16_autocast"])
def test_bf16_without_hardware_is_refused_with_the_remedy(name: str) -> None:
    message = refusal(small(precision=name))
    assert message.startswith(f"precision={name} needs bf16, which Old GPU does not have; use precision=fp16, or ")
    assert "precision.fallback=fp16" in message


@pytest.mark.usefixtures("old_gpu")
@pytest.mark.parametrize("fallback", ["fp16", "fp32"])
def test_or_falls_back_and_says_so(fallback: str) -> None:
    config, _, notes = preflight(small(precision=replace(preset("bf16"), fallback=fallback)))
    assert config.precision == preset(fallback)
    assert f"precision=bf16 fell back to {fallback}: Old GPU has no bf16" in notes


@pytest.mark.usefixtures("old_gpu")
def test_other_precisions_do_not_ask() -> None:
    assert preflight(small(precision="fp16"))[0].precision == preset("fp16")


def test_presets_are_what_conf_says() -> None:
    fp16 = preset("fp16")
    assert (fp16.name, fp16.compute_dtype, fp16.reduce_dtype, fp16.scaler.enabled) == ("fp16", "fp16", "fp16", True)


def test_a_run_that_would_take_hours_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flops_per_second", lambda dtype: 1e9)
    config = small("fsdp", hidden=512, layers=4, precision="fp16", wrap=NoWrap(), steps=10_000)
    (note,) = preflight(config)[2]
    parameters = 4 * (9 * 512**2 + 8 * 512)
    cores = min(2, len(module.os.sched_getaffinity(0)))
    hours = 6 * parameters * 12 * 3 * 10_000 / (1e9 * cores) / 3600
    assert note.startswith(f"fp16 is emulated on this CPU: about {hours:.1f} hours for this run")
    assert "use a smaller model" in note
    monkeypatch.setattr(module, "flops_per_second", lambda dtype: 1e12)
    assert preflight(config)[2] == [], "it is fast here"


def test_a_short_run_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "flops_per_second", lambda dtype: pytest.fail("a short run was timed"))
    assert preflight(small(precision="fp16"))[2] == []
    assert preflight(small(hidden=512, layers=4, precision="fp32", steps=10_000))[2] == []


def test_the_rate_is_measured_on_one_thread() -> None:
    torch.set_num_threads(2)
    assert module.flops_per_second(torch.float32, size=64) > 1e6
    assert torch.get_num_threads() == 2


def test_the_users_own_error_is_left_to_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the meta device it may be torch's; only what is wrong with the target itself is certain."""
    (tmp_path / "user_model.py").write_text("def build():\n    raise KeyError('weights')\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = custom("Plain")
    assert preflight(replace(config, model=replace(config.model, _target_="user_model.build")))[1] is None
    with pytest.raises(UserModelError, match="user_model has no 'nope'; it has build"):
        preflight(replace(config, model=replace(config.model, _target_="user_model.nope")))


def test_flat_parameters_are_only_fsdps() -> None:
    assert FSDPStrategy().use_orig_params
    preflight(custom("Frozen", "fsdp2", wrap=NoWrap()))


@pytest.mark.parametrize(
    ("model", "message", "strategies"),
    [
        ("Sparse", "table is an embedding with sparse=True", {"single", "ddp", "fsdp", "fsdp2"}),
        ("Lazy", "linear.weight has no shape before the first forward", {"single", "ddp", "fsdp", "fsdp2"}),
        ("Complex", "phase is complex", {"single", "ddp", "fsdp", "fsdp2"}),
        ("Scalar", "cannot shard the scalar parameter gain", {"fsdp", "fsdp2"}),
        ("Empty", r"cannot shard the empty parameter nothing \(shape \(0, 6\)\)", {"fsdp2"}),
        ("Transposed", "cannot shard map, whose memory is not in the order of its dimensions", {"fsdp", "fsdp2"}),
    ],
)
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "fsdp2"])
def test_parameters_that_cannot_be_trained(model: str, message: str, strategies: set[str], strategy: str) -> None:
    config = custom(model, strategy)
    with pytest.raises(UserModelError, match=message) if strategy in strategies else nullcontext():
        preflight(replace(config, wrap_policy=NoWrap()))


@pytest.mark.parametrize(("shape", "taken"), [((0,), True), ((0, 4), True), ((4, 0), False)])
def test_empty_parameters_are_taken_frozen(shape: tuple[int, ...], taken: bool) -> None:
    config = custom("Empty", "fsdp2")
    config.model.kwargs = {"trained": False, "shape": shape}
    with nullcontext() if taken else pytest.raises(UserModelError, match="cannot shard the empty parameter"):
        preflight(config)


def test_a_flat_parameter_holds_something() -> None:
    idle = BlockWrap(classes=["Idle"])
    said = refusal(custom("Idling", "fsdp", wrap=idle))
    assert "one flat parameter of unit idle, and all that it holds is empty: idle.nothing; set a wrap_policy" in said
    preflight(custom("Idling", "fsdp"))
