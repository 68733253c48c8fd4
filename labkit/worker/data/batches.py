"""Deals a dataset to ranks, so that the global batch does not depend on their number.

Each epoch has one order for all ranks, drawn from the seed and the epoch. Step k takes
the next `global_batch` samples of it, and rank r of W takes every W-th of these. So
one rank with a batch of 32 and four ranks with 8 each train on the same 32 samples at
step k. No sample is dealt twice in an epoch; the last ones, which fill no batch, are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from labkit.core.checks import positive_int
from labkit.worker.worker import Worker


def batches(
    dataset: Dataset, worker: Worker, *, global_batch: int, steps: int, seed: int = 0
) -> Iterator[list[Tensor]]:
    """This rank's part of each of `steps` global batches, on the rank's device.

    Args:
        dataset: a map-style dataset whose samples are tuples of tensors.
        worker: the rank that the batches are for.
        global_batch: samples per step over all ranks.
        steps: number of batches; epochs follow each other as needed.
        seed: of the order of samples.

    Yields:
        The sample's tensors, stacked: each (global_batch / world_size, ...).

    Raises:
        ValueError: the batch cannot be split over the ranks, or exceeds the dataset.
    """
    share = split(global_batch, worker.world_size)
    if global_batch > len(dataset):
        raise ValueError(
            f"global_batch {global_batch} is more than the dataset has: "
            f"{len(dataset)} samples"
        )
    sampler = DistributedSampler(
        dataset, worker.world_size, worker.rank, seed=seed, drop_last=True
    )
    loader = DataLoader(dataset, batch_size=share, sampler=sampler, drop_last=True)
    return deal(loader, sampler, positive_int("steps", steps), worker.device)


def deal(
    loader: DataLoader, sampler: DistributedSampler, steps: int, device: torch.device
) -> Iterator[list[Tensor]]:
    epoch = 0
    while steps > 0:
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        for batch in loader:
            yield [part.to(device) for part in batch]
            steps -= 1
            if steps == 0:
                return
        epoch += 1


def split(global_batch: int, world_size: int) -> int:
    """Samples per rank.

    Raises:
        ValueError: the batch is not a multiple of the number of ranks; names the
            nearest that are.
    """
    positive_int("global_batch", global_batch)
    if global_batch % world_size:
        below = global_batch // world_size * world_size
        valid = [size for size in (below, below + world_size) if size]
        raise ValueError(
            f"global_batch {global_batch} cannot be split over {world_size} ranks; "
            f"use {' or '.join(map(str, valid))}"
        )
    return global_batch // world_size
