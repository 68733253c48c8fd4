"""How a rank finds its peers, and how it parts from them."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.core.spec import LaunchSpec
from labkit.worker.rendezvous import RunStore

# Of a collective, a send or a receive. The driver ends a stalled run long before, and
# says why; a receive may wait for a rank that computes.
LIMIT = datetime.timedelta(minutes=30)
JOIN_EXTRA_S = 10


def join(rank: int, spec: LaunchSpec, run_dir: Path) -> tuple[torch.device, dist.Store]:
    """Choose the device and form the process group."""
    torch.set_num_threads(spec.threads)
    if spec.device == "cuda":
        # Before the group forms: NCCL binds to the current device.
        device = torch.device("cuda", rank % spec.num_gpus)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    limit = datetime.timedelta(seconds=spec.stall_s + JOIN_EXTRA_S)
    store = RunStore(str(run_dir / "rendezvous"), spec.ranks, limit)
    dist.init_process_group(
        spec.backend,
        store=store,
        rank=rank,
        world_size=spec.ranks,
        timeout=LIMIT,
        device_id=device if spec.backend == "nccl" else None,
    )
    return device, store


def up(device: torch.device) -> dict[str, Any]:
    """What a rank says of itself when it has joined."""
    found = {"pid": os.getpid(), "device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(device)
    return found


def wait_for_peers(store: dist.Store, spec: LaunchSpec, rank: int) -> None:
    """Stay until every rank has finished: a peer could be hurt by this rank's end.

    With gloo, a peer that is still connecting (a new group forms on one side earlier
    than on the other) would fail with "connection closed". With NCCL, a peer may still
    read this rank's GPU memory. The store is the rank's own: the function may have
    destroyed the process group.
    """
    announce(store, "finished", rank)
    await_all(store, "finished", spec.ranks)


def announce(store: dist.Store, what: str, rank: int) -> None:
    store.set(f"labkit/{what}/{rank}", "1")


def await_all(store: dist.Store, what: str, ranks: int) -> None:
    """Wait until every rank has announced it; the driver ends us if one cannot."""
    keys = [f"labkit/{what}/{rank}" for rank in range(ranks)]
    store.wait(keys, datetime.timedelta(days=1))
