"""Builds a model from its spec, with weights that depend on the seed alone."""

from __future__ import annotations

import torch
from torch import nn

from labkit.core.models import GPT, MLP, ModelSpec
from labkit.worker.models import gpt, mlp


def build(spec: ModelSpec, seed: int = 0) -> nn.Module:
    """The model on the CPU, in float32.

    Every rank that builds the same spec with the same seed gets the same weights. The
    random state of the caller is left as it was.

    Raises:
        TypeError: `spec` describes no model.
    """
    classes = {GPT: gpt.GPT, MLP: mlp.MLP}
    if type(spec) not in classes:
        raise TypeError(
            f"build takes lk.GPT(...) or lk.MLP(...), not a {type(spec).__name__}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return classes[type(spec)](spec)
