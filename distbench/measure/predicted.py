"""What the closed forms say a rank's memory should be, by kind: to be put beside what was tracked."""

from __future__ import annotations

from distbench.config import AdamW, Config, SimpleModel, batch_shape
from distbench.measure.flops import rows_per_sample
from distbench.precision import DTYPES
from distbench.trainer import Trainer


def predict_memory(config: Config, trainer: Trainer) -> dict[str, int | None]:
    """Bytes on this rank; None where there is no closed form.

    Parameters and gradients as this rank holds them between steps; AdamW keeps two more copies of what is trained, SGD
    with momentum one. Activations of the simple stack, eager: (11 L + 4) rows d elements in the compute dtype, for
    rows d >> d^2.
    """
    local = trainer.strategy.local
    parameters = [(local(p.detach()).nbytes, p.requires_grad) for p in trainer.module.parameters()]
    trained = sum(size for size, requires_grad in parameters if requires_grad)
    copies = 2 if isinstance(config.optimizer, AdamW) else int(config.optimizer.momentum > 0)
    activations = None
    if isinstance(model := config.model, SimpleModel) and model.vocab_size is None and not config.precision.autocast:
        rows = batch_shape(config).micro_batch * rows_per_sample(config)
        itemsize = DTYPES[config.precision.compute_dtype].itemsize
        activations = (11 * model.num_layers + 4) * rows * model.hidden_dim * itemsize
    return {
        "parameters": sum(size for size, _ in parameters),
        "gradients": trained,
        "optimizer_state": copies * trained,
        "activations": activations,
    }
