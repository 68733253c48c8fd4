"""Models as sizes only, so that both a rank and a planner can read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from labkit.core.checks import positive_int


@dataclass(frozen=True, kw_only=True)
class GPT:
    """A decoder-only transformer in the manner of GPT-2, sized to run anywhere.

    Attributes:
        layers: transformer blocks.
        width: size of the residual stream; a multiple of `heads`.
        heads: attention heads per block.
        context: longest sequence, in tokens.
        vocab: number of token ids; 256 reads text as bytes.
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64
    vocab: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            positive_int(field.name, getattr(self, field.name))
        if self.width % self.heads:
            valid = [n for n in range(1, self.width + 1) if self.width % n == 0]
            raise ValueError(
                f"width {self.width} cannot be shared by {self.heads} heads; "
                f"heads that divide it: {', '.join(map(str, valid))}"
            )


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Fully connected layers with ReLU between them.

    Attributes:
        inputs: size of the input vector.
        width: size of each hidden layer.
        layers: linear layers in all, the output layer included.
        outputs: size of the output vector.
    """

    inputs: int = 64
    width: int = 128
    layers: int = 3
    outputs: int = 10

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            positive_int(field.name, getattr(self, field.name))


ModelSpec = GPT | MLP
