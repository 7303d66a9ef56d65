"""What a precision *means*, for every strategy alike.

Master parameters stay in `param_dtype`. Parameters and inputs are cast to `compute_dtype`; outputs come back in fp32
(fp64 for fp64). Gradients cross the network in `reduce_dtype`. FSDP casts parameters when it gathers them; `single`,
`ddp` and the baseline cast them with `CastParameters`. Everything else a wrapper could also do (inputs, outputs,
buffers) is done here, once, so that a difference between strategies is never "autocast against cast".
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from distbench.config import LossScaler, Precision
from distbench.errors import UserModelError
from distbench.stand_ins import Place, StandIns, cast, places

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32` for torch.float32 and so on; torch's own name for others."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


class CastParameters(nn.Module):
    """Runs a module with its parameters cast to a lower dtype; their gradients arrive in the parameters' own.

    What FSDP's mixed precision does at a unit boundary, without sharding. Tied parameters are cast once and stay tied.
    The cast ones stay in place until backward is done with them: activation checkpointing runs forward again in it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._cast_module = module
        self.dtype = dtype
        self._stand_ins = StandIns()
        self._backward = -1
        """The engine's number of the backward at hand."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        casts = {
            name: cast(parameter, self.dtype) if parameter.is_floating_point() else parameter
            for name, parameter in self._cast_module.named_parameters()
        }
        self._stand_ins.clear()
        held: dict[int, list[Place]] = {}
        for module, name in places(self._cast_module.modules()):
            held.setdefault(id(module._parameters[name]), []).append((module, name))
        for name, parameter in self._cast_module.named_parameters():
            for place in held[id(parameter)]:
                self._stand_ins.put(place, casts[name])
            if (node := casts[name].grad_fn) is not None:
                # The engine takes late nodes first, and these were the first: without this each gradient would wait for
                # the whole backward, and DDP would have nothing to hide its communication behind.
                node._set_sequence_nr(2**62)
                casts[name].register_hook(partial(self._drop, held[id(parameter)]))
        # Beside the stand-ins, so that in forward `parameters()` are the cast ones, too, as under FSDP.
        outputs = functional_call(self._cast_module, casts, args, kwargs)
        if isinstance(outputs, Tensor) and outputs.requires_grad:
            outputs.register_hook(self._begin_backward)
        return outputs

    def _begin_backward(self, _: Tensor) -> None:
        """Private, and what torch's DDP and FSDP end their backward with (seen in torch 2.13)."""
        self._backward = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._stand_ins.clear)

    def _drop(self, own: list[Place], _: Tensor) -> None:
        """Its gradient is complete, so nothing will use it again: memory goes as backward does. Not so within the backward
        of one checkpointed part (`use_reentrant=True`), where another part may use it still."""
        if torch._C._current_graph_task_id() == self._backward:
            self._stand_ins.drop(own)


class PrecisionPolicy:
    """A precision, applied to a device."""

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.config, self.device = precision, device
        self.param_dtype = DTYPES[precision.param_dtype]
        self.compute_dtype = DTYPES[precision.compute_dtype]
        self.reduce_dtype = DTYPES[precision.reduce_dtype]
        self.buffer_dtype = None if precision.buffer_dtype is None else DTYPES[precision.buffer_dtype]
        self.output_dtype = torch.float64 if self.compute_dtype is torch.float64 else torch.float32
        self.autocast = precision.autocast

    @property
    def casts_parameters(self) -> bool:
        """Whether compute sees other parameters than the optimizer does."""
        return not self.autocast and self.compute_dtype != self.param_dtype

    @property
    def data_dtype(self) -> torch.dtype:
        """Floating-point samples are drawn in fp32 and given in this."""
        return self.output_dtype

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move a freshly built model to the device with its master parameters' dtype (and buffers', where set)."""
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.device, self.param_dtype)
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    wanted = self.buffer_dtype if buffer.is_floating_point() else None
                    if wanted is None and buffer.dtype is torch.float32 and self.param_dtype is torch.float64:
                        wanted = torch.float64  # a reference is not rounded by its buffers
                    # One that several modules share stays one. (The original is kept: ids of dead tensors come again.)
                    _, module._buffers[name] = shared.setdefault(id(buffer), (buffer, buffer.to(self.device, wanted)))
        return model.to(self.device)

    def cast(self, model: nn.Module) -> nn.Module:
        """The model as an unsharded strategy computes with it."""
        return CastParameters(model, self.compute_dtype) if self.casts_parameters else model

    def forward(self, module: nn.Module, inputs: Tensor) -> Tensor:
        """Outputs in fp32 (fp64) from inputs cast to the compute dtype."""
        if inputs.is_floating_point() and not self.autocast:
            inputs = inputs.to(self.compute_dtype)
        with self._autocast():
            outputs = module(inputs)
        if not isinstance(outputs, Tensor):
            raise UserModelError(f"the model returned a {type(outputs).__name__}; it must return one tensor")
        return outputs.to(self.output_dtype)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast:
            return torch.autocast(self.device.type, dtype=self.compute_dtype)
        return nullcontext()


class Scaler:
    """Dynamic loss scaling with torch.amp.GradScaler's constants and rules (Micikevicius et al., ICLR 2018), for every
    strategy alike: the verdict is whether the *global* gradient norm is finite, so all ranks reach the same one."""

    def __init__(self, config: LossScaler) -> None:
        self.config = config
        self.enabled = config.enabled
        self.scale = config.init_scale if config.enabled else 1.0
        self.good_steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale in place. The scale is a power of two by default, so this is exact."""
        if self.enabled:
            for gradient in gradients:
                gradient.mul_(1.0 / self.scale)

    def update(self, finite: bool) -> None:
        """Back off after an overflow, grow after `growth_interval` steps without one."""
        if not self.enabled:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.config.backoff_factor
        elif self.good_steps == self.config.growth_interval:
            self.scale *= self.config.growth_factor
            self.good_steps = 0
