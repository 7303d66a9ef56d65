"""Small models with what the catalogue's faults need: attention, tied weights, dropout, buffers of both kinds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout after each."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        scores_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / (width // self.num_heads) ** 0.5
        future = torch.ones(time, time, dtype=torch.bool, device=x_BTD.device).triu(1)
        mixed_BTD = (scores_BHTT.masked_fill(future, -1e4).softmax(-1) @ v_BHTK).transpose(1, 2).reshape(x_BTD.shape)
        h_BTD = x_BTD + self.dropout(self.projection(mixed_BTD))
        return h_BTD + self.dropout(self.mlp(self.mlp_norm(h_BTD)))


class LanguageModel(nn.Module):
    """Token ids (B, T) to logits (B, T, V): embedding, sinusoidal positions in a buffer that no checkpoint holds,
    causal blocks, and a head tied to the embedding."""

    def __init__(
        self,
        vocab_size: int = 19,
        width: int = 14,
        num_layers: int = 2,
        num_heads: int = 2,
        seq_len: int = 8,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("positions", sinusoids(seq_len, width), persistent=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions = self.get_buffer("positions")
        h_BTD = self.embedding(tokens_BT)
        h_BTD = h_BTD + positions[: tokens_BT.shape[1]].to(h_BTD.dtype)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(self.norm(h_BTD))


def sinusoids(seq_len: int, width: int) -> Tensor:
    """(T, D) sines and cosines of geometric frequencies (Vaswani et al., arXiv:1706.03762)."""
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(seq_len)[:, None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]


class NormedBlock(nn.Module):
    """Residual Linear, batch normalisation and ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + F.relu(self.norm(self.linear(x_BD)))


class Normed(nn.Module):
    """(B, D) to (B, D): blocks with batch normalisation, whose statistics forward changes."""

    def __init__(self, width: int = 13, num_layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock(width) for _ in range(num_layers))
        self.head = nn.Linear(width, width)

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


class Mixed(nn.Module):
    """(B, D) to (B, D): one frozen layer and one that forward never uses, between layers that train."""

    def __init__(self, width: int = 13, frozen: bool = True, unused: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.spare = nn.Linear(width, width) if unused else None
        self.dropout = nn.Dropout(dropout)
        self.blocks[1].requires_grad_(not frozen)

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = x_BD + self.dropout(F.gelu(block(x_BD)))
        return x_BD
