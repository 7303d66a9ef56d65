"""`compose(*overrides)`: the typed config as the command line composes it, in this process."""

from __future__ import annotations

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from distbench.composing import compose_only
from distbench.config import Config, register_schemas
from distbench.hydra_edge import conf_dir, register_resolvers


def compose(*overrides: str) -> Config:
    """Raises ConfigError with the message that the command line prints."""
    return compose_only(overrides)


def compose_tree(*overrides: str, hydra: bool = False) -> DictConfig:
    """The composed tree; with `hydra`, Hydra's own part is in it."""
    register_schemas()
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra_compose("config", list(overrides), return_hydra_config=hydra)
