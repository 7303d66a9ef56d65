"""From the model group to a module: the same weights on every rank, made once from the model seed."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distbench.config import CustomModel, SimpleModel
from distbench.errors import UserModelError
from distbench.models.simple import SimpleTransformer


def build_model(model: SimpleModel | CustomModel, seed: int) -> nn.Module:
    """Build on CPU with weights that depend on `seed` alone; the caller's random state is left as it was.

    Raises UserModelError if the user's `_target_` cannot be imported, or returns no module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(model, CustomModel):
            return _build_custom(model)
        return SimpleTransformer(model.num_layers, model.hidden_dim, model.vocab_size)


def _build_custom(model: CustomModel) -> nn.Module:
    factory = locate(model._target_, "model._target_")
    try:
        inspect.signature(factory).bind(**model.kwargs)
    except TypeError as error:
        raise UserModelError(f"model._target_={model._target_} does not take model.kwargs: {error}") from error
    except ValueError:
        pass  # a callable without a signature, such as one written in C
    module = factory(**model.kwargs)
    if not isinstance(module, nn.Module):
        raise UserModelError(
            f"model._target_={model._target_} returned {type(module).__name__}, not a torch.nn.Module; "
            "return the module from the factory"
        )
    if next(module.parameters(), None) is None:
        raise UserModelError(f"model._target_={model._target_} returned a module without parameters; nothing to train")
    return module


def locate(target: str, option: str) -> Callable[..., Any]:
    """Import the callable at a dotted path. Raises UserModelError naming the part that is missing."""
    module_name, _, attribute = target.rpartition(".")
    if not module_name:
        raise UserModelError(f"{option}={target!r} must be a dotted path, such as my_file.build_model")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module_name + ".").startswith(error.name + "."):
            raise UserModelError(f"{option}={target}: importing {module_name} failed: {error}") from error
        raise UserModelError(
            f"{option}={target}: no module named {error.name!r}; "
            "run from the folder it lies in, or put that on PYTHONPATH"
        ) from error
    except Exception as error:
        raise UserModelError(
            f"{option}={target}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        names = [
            name
            for name, value in vars(module).items()
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module_name
        ]
        raise UserModelError(
            f"{option}={target}: {module_name} has no {attribute!r}; it has {', '.join(names[:8]) or 'nothing'}"
        )
    if not callable(found):
        raise UserModelError(f"{option}={target} is a {type(found).__name__}, not something to call")
    return found


def block_classes(config: SimpleModel | CustomModel, model: nn.Module) -> list[str]:
    """Names of the classes that a model calls its blocks: the config's, else the module's own `block_classes`."""
    return list(getattr(config, "block_classes", [])) or list(getattr(model, "block_classes", ()))


def weights_digest(model: nn.Module) -> str:
    """SHA-256 (hex, 16 characters) over names, shapes, dtypes and bits of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(data.shape)}{data.dtype}".encode())
        if data.numel():
            digest.update(memoryview(data.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()[:16]
