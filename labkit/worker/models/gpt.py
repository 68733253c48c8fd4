"""A small GPT: token and position embeddings, blocks, a head tied to nothing.

The architecture is that of Radford et al. 2019 (GPT-2) with pre-normalisation and
without dropout, so that equal data and weights give equal gradients on any number of
ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.core.models import GPT as GPTSpec

INIT_STD = 0.02  # of GPT-2's weights


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x)  # (batch, length, 3 * width)
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in qkv.chunk(3, dim=-1)
        )  # each (batch, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a two-layer perceptron of four times the width; both residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Predicts the next token at every position.

    forward: tokens (batch, length) int64, length <= context
             -> logits (batch, length, vocab)
    """

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.spec = spec
        self.tokens = nn.Embedding(spec.vocab, spec.width)
        self.positions = nn.Embedding(spec.context, spec.width)
        self.blocks = nn.ModuleList(
            Block(spec.width, spec.heads) for _ in range(spec.layers)
        )
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False)
        self.apply(self.initialise)

    def initialise(self, module: nn.Module) -> None:
        """GPT-2's initialisation: residual projections shrink with depth."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):  # after its children
            residual_std = INIT_STD / math.sqrt(2 * self.spec.layers)
            for projection in (module.attention.out, module.down):
                nn.init.normal_(projection.weight, std=residual_std)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.spec.context:
            raise ValueError(
                f"a sequence of {length} tokens is longer than the model's context, "
                f"{self.spec.context}"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)  # (batch, length, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
