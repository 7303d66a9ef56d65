"""The SimpleTransformerLayer stack: a transformer block's shapes and cost with nothing that hides a difference.

Shape suffixes: B batch, T sequence, D hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn


class SimpleTransformerLayer(nn.Module):
    """`h = norm(x + attn(x)); return h + mlp(h)`, with `Linear(d, d)` standing in for attention.

    9 d^2 + 8 d parameters.
    """

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.attn = nn.Linear(hidden_dim, hidden_dim)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_dim, 4 * hidden_dim), nn.GELU(), nn.Linear(4 * hidden_dim, hidden_dim)
        )
        self.norm = nn.LayerNorm(hidden_dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.norm(x_BTD + self.attn(x_BTD))
        return h_BTD + self.mlp(h_BTD)


class SimpleTransformer(nn.Module):
    """A stack of layers over vectors or, given a vocabulary, between an embedding and a head."""

    block_classes = ("SimpleTransformerLayer",)
    """What `wrap_policy=block` wraps."""

    def __init__(self, num_layers: int, hidden_dim: int, vocab_size: int | None = None) -> None:
        super().__init__()
        self.embedding = None if vocab_size is None else nn.Embedding(vocab_size, hidden_dim)
        self.layers = nn.ModuleList(SimpleTransformerLayer(hidden_dim) for _ in range(num_layers))
        self.head = None if vocab_size is None else nn.Linear(hidden_dim, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) floats to (B, T, D); with a vocabulary, (B, T) token ids to (B, T, V) logits."""
        h_BTD = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            h_BTD = layer(h_BTD)
        return h_BTD if self.head is None else self.head(h_BTD)


def parameter_count(num_layers: int, hidden_dim: int, vocab_size: int | None) -> int:
    """Parameters of the stack in closed form: L (9 d^2 + 8 d), plus embedding and head."""
    ends = 0 if vocab_size is None else 2 * vocab_size * hidden_dim + vocab_size
    return num_layers * (9 * hidden_dim**2 + 8 * hidden_dim) + ends
