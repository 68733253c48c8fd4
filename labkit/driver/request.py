"""A launch that has been checked and packed, before anything has started."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from labkit.core.checks import positive_int
from labkit.core.hardware import Hardware
from labkit.core.spec import LaunchSpec
from labkit.driver import backend as backends
from labkit.driver import machine, ship
from labkit.driver.call import check_call, run_name
from labkit.driver.engines.environment import stale_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A launch whose arguments have been checked and whose function is packed."""

    spec: LaunchSpec
    parcel: ship.Parcel
    hardware: Hardware
    directory: str
    cell: dict[str, Any] | None = None  # a `%%ranks` cell instead of a function


def prepare(
    function: Callable,
    ranks: int,
    args: tuple,
    kwargs: dict[str, Any] | None,
    backend: str,
    device: str,
    stall_s: float,
    timeout_s: float | None,
    name: str | None,
) -> Request:
    """Check everything that can be checked before a process starts."""
    kwargs = {} if kwargs is None else kwargs
    if stale := stale_names():
        warnings.warn(
            f"{', '.join(stale)} are set here, perhaps by another launcher; ranks get "
            "values of their own, so this does no harm",
            stacklevel=4,
        )
    check_call(function, args, kwargs)
    ranks = positive_int("ranks", ranks)
    hardware = machine.detect()
    choice = backends.choose(ranks, backend, device, hardware=hardware)
    backends.check_memory(ranks, hardware)
    spec = LaunchSpec(
        name=run_name(function, name),
        ranks=ranks,
        backend=choice.backend,
        device=choice.device,
        num_gpus=hardware.usable_gpus if choice.device == "cuda" else 0,
        threads=backends.threads_per_rank(ranks, hardware),
        stall_s=stall_s,
        timeout_s=timeout_s,
        started_at=time.time(),
        why=choice.why,
    )
    return Request(
        spec=spec,
        parcel=ship.pack(function, tuple(args), kwargs),
        hardware=hardware,
        directory=current_directory(),
    )


def current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "this notebook's current folder was deleted, and ranks start in it; go to "
            "one that exists with os.chdir"
        ) from None


@contextmanager
def job_file(header: dict[str, Any], payload: bytes) -> Iterator[BinaryIO]:
    """What the ranks read, in a file that has no name: a JSON line, then the pickle."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(header).encode() + b"\n")
        file.write(payload)
        file.flush()
        yield file
