"""Overrides to a config, as the command line does it, for commands that are not runs."""

from __future__ import annotations

from collections.abc import Sequence

from distbench.config import Config


def compose(overrides: Sequence[str]) -> Config:
    """The validated config of some overrides. Raises ConfigError, as the command line refuses them."""
    from distbench.validation import validate

    config = compose_only(overrides)
    validate(config)
    return config


def compose_only(overrides: Sequence[str]) -> Config:
    """Typed, and not validated yet."""
    from hydra import compose as composed
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from distbench.config import register_schemas
    from distbench.errors import ConfigError
    from distbench.hydra_edge import conf_dir, explain, register_resolvers
    from distbench.sweep import typed

    register_schemas()
    register_resolvers()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return typed(composed("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
