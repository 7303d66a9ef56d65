"""Names of folders, and Hydra's errors in words that say what to set instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException

from distbench.config import GROUPS
from distbench.errors import ConfigError
from distbench.hydra_edge import FOREIGN, cell, conf_dir, explain, label, refuse_flags, stamp, valid_keys
from tests.composing import compose


def test_conf_is_found_beside_or_inside_the_package() -> None:
    assert (conf_dir() / "config.yaml").is_file()
    assert {path.name for path in (conf_dir() / "recipes").iterdir()} >= {"article.yaml", "ddp_vs_fsdp.yaml"}


def test_a_process_has_one_stamp_and_another_process_another() -> None:
    assert stamp() == stamp()
    stamp.cache_clear()
    first = stamp()
    stamp.cache_clear()
    assert stamp() != first, "two processes of the same second would collide"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{4}", first)


def test_labels_are_safe_folder_names() -> None:
    assert label(None, "fsdp", "bf16") == "fsdp_bf16"
    assert label("my run/../../etc", "x") == "my-run-..-..-etc_x"
    assert "/" not in label("a/b") and not label("../..").startswith(".")


def test_cells_are_numbered_and_named_by_what_varies() -> None:
    assert cell(7, "strategy=fsdp,steps=3", "fsdp", "fp32") == "007_strategy=fsdp,steps=3"
    assert cell(7, "", "fsdp", "fp32") == "007_fsdp_fp32"
    assert cell(12, "sweep.repeat=2,strategy=fsdp") == "012_strategy=fsdp,repeat=2"


def test_long_names_are_cut_and_stay_apart() -> None:
    long = ",".join(f"model.kwargs.option{i}=value" for i in range(20))
    first, second = cell(0, f"{long},a=1"), cell(0, f"{long},a=2")
    assert first != second and len(first) < 130 and first.startswith("000_model.kwargs.option0=value,")


def test_valid_keys_cover_every_option() -> None:
    keys = set(valid_keys())
    assert {"steps", "seed.model", "precision.scaler.init_scale", "launch.master_port"} <= keys
    for group, options in GROUPS.items():
        for option in options.values():
            assert {f"{group}.{name}" for name in option.__dataclass_fields__} <= keys


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ("stepz", "Did you mean steps?"),
        ("modle", "Did you mean model?"),
        ("model.hiden_dim", "Did you mean model.hidden_dim?"),
        ("optimizer.momentun", "Did you mean optimizer.momentum?"),
        ("lr", "Did you mean optimizer.lr?"),
        ("learning_rate", "Did you mean optimizer.lr?"),
        ("nproc", "Did you mean launch.nproc?"),
        ("batch_size", "Did you mean global_batch?"),
        ("epochs", "Did you mean steps?"),
        ("max_steps", "Did you mean steps?"),
        ("seq_len", "Did you mean model.seq_len or data.seq_len?"),
        ("bucket_cap_mb", "Did you mean strategy.bucket_cap_mb?"),
        ("launch.nprocs", "Did you mean launch.nproc?"),
        ("precision.scaler.init", "Did you mean precision.scaler.init_scale?"),
        ("strategy.reshard_after_forward", "strategy.reshard_after_forward is for strategy=fsdp2"),
        ("wrap_policy.min_num_params", "wrap_policy.min_num_params is for wrap_policy=size"),
        ("model.kwargs.width", "Arguments of your own are added with a plus: +model.kwargs.width=..."),
        ("qqqq", None),
    ],
)
def test_the_nearest_valid_key_is_named(wanted: str, hint: str | None) -> None:
    text = f"Could not override '{wanted}'.\nTo append to your config use +{wanted}=3\nKey 'x' is not in struct"
    message = explain(ConfigCompositionException(text))
    assert wanted in message.splitlines()[0]
    if hint:
        assert message.splitlines()[-1].startswith(hint)
        assert "To append to your config" not in message, "which would be refused as well"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("stepz=3", "Did you mean steps?"),
        ("+stepz=3", "Did you mean steps?"),
        ("strategy=fdsp", "Did you mean strategy=fsdp?"),
        ("+lr=0.1", "Did you mean optimizer.lr?"),
        ("+recipes=ddp_fsdp", "Did you mean +recipes=ddp_vs_fsdp?"),
        ("seed=1", "seed=1 is a value for several; set seed.model or seed.data"),
        ("model.input_shape=64", "model.input_shape=64 is not a list; write model.input_shape=[64]"),
        ("strategy.reshard_after_forward=2", "strategy.reshard_after_forward is for strategy=fsdp2"),
    ],
)
def test_hydras_messages_are_the_ones_we_read(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        compose(override)
    assert hint in str(refusal.value)


def test_foreign_names_lead_to_our_own() -> None:
    for name, ours in FOREIGN.items():
        assert set(ours.split(" or ")) <= set(valid_keys()), name
        assert name not in valid_keys()


def test_hydras_own_flags_are_left_to_it() -> None:
    refuse_flags(["--cfg", "job", "--config-dir=/x", "--multirun", "-m", "--info", "steps=3"])


def test_the_repository_keeps_recipes_where_people_look() -> None:
    root = Path(__file__).parents[1]
    assert (root / "recipes" / "ddp_vs_fsdp.yaml").samefile(conf_dir() / "recipes" / "ddp_vs_fsdp.yaml")
