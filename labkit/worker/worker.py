"""The handle that a cell's function gets as its first argument."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.core import events
from labkit.worker.emit import Emitter
from labkit.worker.probe import MemoryProbe

WARMUP_LOGS = 3  # the first logs pay for allocation, compilation and warming caches


class Worker:
    """One rank, seen from inside.

    Attributes:
        rank: this process's number, 0 to `world_size` - 1.
        world_size: number of processes in the run.
        local_rank: number of this process on its machine.
        device: where this rank's tensors belong, `cuda:N` or `cpu`.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, emitter: Emitter
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank
        self.device = device
        self.step: int | None = None  # of the last log
        self._emitter = emitter
        self._memory = MemoryProbe(device)
        self._num_logs = 0
        self._logged_at = math.nan

    def __repr__(self) -> str:
        return f"<Worker rank {self.rank} of {self.world_size} on {self.device}>"

    def log(
        self,
        *,
        loss: Any = None,
        samples: int | None = None,
        tokens: int | None = None,
        step: int | None = None,
        **values: float,
    ) -> None:
        """Record one training step of this rank.

        On a GPU the device is synchronised first, so that the time ends with the work.
        Throughput is what this rank did since its previous `log`, divided by the
        seconds in between; it is left out for the first logs, which are warm-up.

        Args:
            loss: this rank's loss, a number or a tensor of one element.
            samples: samples that this rank processed since its previous log.
            tokens: tokens that this rank processed since its previous log.
            step: the step's number; by default one more than last time, from 0.
            values: further numbers, such as `lr`; each becomes a column.

        Raises:
            TypeError: a value is not a number.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        step_s = now - self._logged_at
        self.step = next_step(self.step) if step is None else int(step)
        warm = self._num_logs >= WARMUP_LOGS
        self._num_logs += 1
        event: dict[str, Any] = {"step": self.step}
        if loss is not None:
            event["loss"] = as_number("loss", loss)
        for name, count in (("samples", samples), ("tokens", tokens)):
            if count is not None:
                event[name] = as_number(name, count)
                if warm:
                    event[f"{name}_per_s"] = round(event[name] / step_s, 3)
        if not math.isnan(step_s):
            event["step_s"] = round(step_s, 7)
        if not warm:
            event["warmup"] = True
        for name, value in values.items():
            event[name] = as_number(name, value)
        event |= self._memory.read()
        self._emitter.emit(events.LOG, event, time_s=now - self._emitter.origin)
        # What labkit itself spent here is part of no step.
        self._logged_at = time.perf_counter()

    def mesh(self, **axes: int) -> DeviceMesh:
        """A device mesh over all ranks with named axes, as in `mesh(dp=2, pp=2)`.

        The last axis varies fastest: with `dp=2, pp=2` ranks 0 and 1 differ in `pp`.

        Raises:
            ValueError: the product of the axes is not the number of ranks.
        """
        product = math.prod(axes.values())
        if product != self.world_size:
            shown = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise ValueError(
                f"mesh {shown} has {product} places, but there are "
                f"{self.world_size} ranks; the product must be {self.world_size}"
            )
        return init_device_mesh(
            self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
        )


def next_step(step: int | None) -> int:
    return 0 if step is None else step + 1


def as_number(name: str, value: Any) -> float | int:
    """A plain number from a number or a one-element tensor."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        shape = tuple(value.shape)
        raise TypeError(f"log({name}=...) takes one number, not a tensor of {shape}")
    try:
        return value.item()
    except AttributeError:
        kind = type(value).__name__
        raise TypeError(f"log({name}=...) takes a number, not a {kind}") from None
