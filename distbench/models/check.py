"""Parameters that cannot be trained here, or not by the chosen strategy: refused with the remedy, before any step."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import UninitializedParameter

from distbench.config import Config
from distbench.errors import UserModelError

SHARDED = ("fsdp", "fsdp2")


def check_parameters(config: Config, model: nn.Module) -> None:
    """Raises UserModelError. Values are not read: the model may be on the meta device."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserModelError(
                f"{name or type(module).__name__} is an embedding with sparse=True; neither the wrappers that shard nor the "
                "gradient norm take sparse gradients: build it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UserModelError(
                f"{name} has no shape before the first forward (a Lazy module); give its layer the input size, or call the "
                "model once in its factory"
            )
        if parameter.is_complex():
            raise UserModelError(
                f"{name} is complex ({parameter.dtype}), and a precision here is a real number's; keep it as two real "
                "numbers and use torch.view_as_complex(self.weight) in forward"
            )
        if config.strategy.name in SHARDED:
            _check_sharded(config.strategy.name, name, parameter)


def _check_sharded(strategy: str, name: str, parameter: nn.Parameter) -> None:
    """What the wrappers that shard refuse or fail with, or keep in an order of memory that has no place in a named slice."""
    if parameter.dim() == 0:
        raise UserModelError(
            f"strategy={strategy} cannot shard the scalar parameter {name}; make it one-dimensional: torch.ones(1)"
        )
    if strategy == "fsdp2" and parameter.numel() == 0 and (parameter.requires_grad or parameter.shape[0] > 0):
        raise UserModelError(
            f"strategy=fsdp2 cannot shard the empty parameter {name} (shape {tuple(parameter.shape)}): torch fails where it "
            "reduces its gradient, or gathers it; leave it out, make it a buffer, or use strategy=ddp"
        )
    if not parameter.is_contiguous():
        raise UserModelError(
            f"strategy={strategy} cannot shard {name}, whose memory is not in the order of its dimensions (transposed, or "
            f"channels_last; shape {tuple(parameter.shape)}, strides {parameter.stride()}); make it contiguous in the "
            "factory, or use strategy=ddp"
        )
