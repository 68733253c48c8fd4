"""A multi-layer perceptron."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from labkit.core.models import MLP as MLPSpec


class MLP(nn.Module):
    """Linear layers with ReLU between them.

    forward: x (batch, inputs) -> (batch, outputs)
    """

    def __init__(self, spec: MLPSpec) -> None:
        super().__init__()
        self.spec = spec
        hidden = [spec.width] * (spec.layers - 1)
        sizes = [spec.inputs, *hidden, spec.outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)
