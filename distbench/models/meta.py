"""One micro-batch through a user's model without storage: what only its forward tells, before any rank starts."""

from __future__ import annotations

import copy
import re
import traceback
from pathlib import Path

import torch
from torch import Tensor, nn

from distbench.config import Config, TextData, batch_shape
from distbench.errors import UserModelError
from distbench.losses import LossFunction

ABOUT_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?|dimensional|dims?|channels|[1-5]D)\b", re.IGNORECASE)
"""In a message of torch's: the model and its input do not fit together. Strides differ on the meta device."""


def check_forward(config: Config, model: nn.Module) -> None:
    """Send one micro-batch through a copy of `model`, which is on the meta device.

    Raises UserModelError where it does not take the input's shape, or returns no tensor of the targets' shape. Anything
    else that it raises may be the meta device's doing, or is the user's own to be shown with its traceback: the ranks
    will meet it.
    """
    inputs, targets = _meta_batch(config)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            outputs = copy.deepcopy(model)(inputs)
    except Exception as error:
        if _about_shapes(error):
            raise UserModelError(_refusal(config, inputs, error)) from error
        return
    if not isinstance(outputs, Tensor):
        raise UserModelError(
            f"the model returned {type(outputs).__name__}, not a tensor, for inputs of shape {tuple(inputs.shape)}; "
            "return what the loss is computed from, alone"
        )
    try:
        LossFunction(config.loss).sum(outputs, targets)
    except UserModelError:
        raise
    except Exception:
        return  # a loss that the meta device cannot compute


def _meta_batch(config: Config) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one micro-batch, without content."""
    data, size = config.data, batch_shape(config).micro_batch
    if isinstance(data, TextData):
        shapes, is_text = ([data.seq_len], [data.seq_len]), True
    else:
        shapes, is_text = (data.input_shape, data.target_shape), data.vocab_size is not None
    dtype = torch.int64 if is_text else torch.float32
    inputs, targets = (torch.empty(size, *shape, dtype=dtype, device="meta") for shape in shapes)
    return inputs, targets


def _about_shapes(error: Exception) -> bool:
    """Whether torch refused a shape. What the user's own code raises, whatever its words, is the user's."""
    if not isinstance(error, RuntimeError | ValueError | IndexError) or isinstance(error, NotImplementedError):
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    if not _is_torch(innermost.filename) and (innermost.line or "raise").startswith(("raise", "assert")):
        return False
    return ABOUT_SHAPES.search(str(error)) is not None and "stride" not in str(error)


def _refusal(config: Config, inputs: Tensor, error: Exception) -> str:
    data = config.data
    if isinstance(data, TextData):
        option, value = "data.seq_len", str(data.seq_len)
    else:
        follows = data.input_shape == config.model.input_shape
        option, value = ("model" if follows else "data") + ".input_shape", str(data.input_shape).replace(" ", "")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_torch(frame.filename)]
    where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line}"
    if frames[-1].filename == __file__:  # the model is a module of torch's own
        where = "torch's own module"
    return (
        f"{option}={value}: the model does not take inputs of shape {tuple(inputs.shape)}, which are "
        f"{inputs.shape[0]} samples; set {option} to the shape of one sample, or change the model\n"
        f"{type(error).__name__}: {error} ({where})"
    )


def _is_torch(filename: str) -> bool:
    return filename.startswith(str(Path(torch.__file__).parent))
