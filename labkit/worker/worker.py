"""The handle that a cell's function gets as its first argument."""

from __future__ import annotations

import json
import math
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.core import events
from labkit.worker.emit import Emitter
from labkit.worker.probe import MemoryProbe

NUMBERS = (int, float)
TAKEN_COLUMNS = {
    *("kind", "rank", "attempt", "time_s", "step_s", "warmup"),
    *("samples_per_s", "tokens_per_s", *events.CARRIED_COLUMNS),
}
WARMUP_LOGS = 3  # the first logs pay for allocation, compilation and warming caches


class Worker:
    """One rank, seen from inside.

    Attributes:
        rank: this process's number, 0 to `world_size` - 1.
        world_size: number of processes in the run.
        local_rank: number of this process on its machine.
        state: yours to keep things in; with `lk.Ranks` it lasts from call to call.
        step: of the last log, -1 before the first.
        num_logs: how many logs there were.
        device: where this rank's tensors belong, `cuda:N` or `cpu`.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        emitter: Emitter,
        state: SimpleNamespace,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = rank
        self.device = device
        self.state = state
        self.step = -1
        self._emitter = emitter
        self._memory = MemoryProbe(device)
        self._on_cuda = device.type == "cuda"
        self.num_logs = 0
        self._names: set[str] = set()  # of further columns that were found valid
        self._logged_at = time.perf_counter()

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
        `step_s` is added, the seconds since the previous `log`, and memory, read at
        the first logs and then twice a second. Readers make throughput of these; the
        first logs are warm-up and have none.

        Args:
            loss: this rank's loss, a number or a tensor of one element.
            samples: samples that this rank processed since its previous log.
            tokens: tokens that this rank processed since its previous log.
            step: the step's number; by default one more than last time, from 0.
            values: further numbers, such as `lr`; each becomes a column.

        Raises:
            TypeError: a value is not a number.
            ValueError: a name cannot be a column.
        """
        if self._on_cuda:
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.step = self.step + 1 if step is None else int(step)
        fields = f'"step":{self.step},"step_s":{now - self._logged_at:.7f}'
        warm = self.num_logs >= WARMUP_LOGS
        self.num_logs += 1
        if not warm:
            fields += ',"warmup":1'
        if loss is not None:
            fields += f',"loss":{as_json("loss", loss)}'
        if samples is not None:
            fields += f',"samples":{as_json("samples", samples)}'
        if tokens is not None:
            fields += f',"tokens":{as_json("tokens", tokens)}'
        for name, value in values.items():
            if name not in self._names:
                self._names.add(column_name(name))
            fields += f',"{name}":{as_json(name, value)}'
        if now >= self._memory.due_at or not warm:
            for name, size in self._memory.read().items():
                fields += f',"{name}":{size}'
        self._emitter.emit_log(now, fields)
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


def column_name(name: str) -> str:
    """`name`, if it can name a column of its own.

    Raises:
        ValueError: it is no Python name, or labkit uses it; says which are taken.
    """
    if not name.isidentifier():
        raise ValueError(f"log(**{{{name!r}: ...}}): a column needs a Python name")
    if name in TAKEN_COLUMNS:
        taken = ", ".join(sorted(TAKEN_COLUMNS))
        raise ValueError(
            f"log({name}=...) would overwrite labkit's own; taken: {taken}"
        )
    return name


def as_json(name: str, value: Any) -> str:
    """A number, or a tensor of one element, as JSON text."""
    kind = type(value)
    if kind is int:
        return str(value)
    if kind is not float:  # NumPy's float64 is a float that shows itself differently
        value = as_number(name, value)
        if isinstance(value, complex):
            raise TypeError(f"log({name}=...) takes a number, not a complex one")
        value = int(value) if isinstance(value, int) else float(value)
    if value - value == 0:
        return repr(value)
    return json.dumps(value)  # NaN and Infinity


def as_number(name: str, value: Any) -> float | int:
    if isinstance(value, NUMBERS):
        return value
    try:
        return value.item()
    except AttributeError:
        kind = type(value).__name__
        raise TypeError(f"log({name}=...) takes a number, not a {kind}") from None
    except (RuntimeError, ValueError):  # several elements, in torch and in NumPy
        shape = tuple(value.shape)
        message = f"log({name}=...) takes one number, not a tensor of {shape}"
        raise TypeError(message) from None
