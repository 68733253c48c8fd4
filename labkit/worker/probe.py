"""Reads the memory of this rank: on CUDA the allocator's, on the CPU the process's."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time

import torch

SAMPLE_S = 0.5  # between two readings, which may cost a millisecond each
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tensor_bytes() -> int:
    """Bytes of the CPU storages that Python can reach in this rank, each counted once.

    Parameters, their gradients, optimizer state and the learner's own tensors. Not
    counted: activations that only autograd holds, temporaries inside an operator, and
    what existed before the rank was forked.
    """
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # by type, as isinstance would wake lazy proxies, and a fake tensor has no bytes
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            tensor = getattr(tensor, "_local_tensor", tensor)  # the shard of a DTensor
            if tensor is not None and tensor.device.type == "cpu":
                if tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def process_bytes() -> int:
    """Resident memory of this process, pages shared with the nursery included."""
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * PAGE_BYTES
    return peak_process_bytes()  # macOS offers no cheap current value, only the peak


def peak_process_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_memory() -> dict[str, int]:
    process = process_bytes()
    return {
        "memory_bytes": process,
        "process_bytes": process,
        "peak_process_bytes": peak_process_bytes(),
        "tensor_bytes": tensor_bytes(),
    }


def cuda_memory(device: torch.device) -> dict[str, int]:
    reserved = torch.cuda.memory_reserved(device)
    return {
        "memory_bytes": reserved,
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": reserved,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


class MemoryProbe:
    """Reads this rank's memory, and says when it is time to read it again.

    `memory_bytes` is what counts against the limit: memory that the CUDA allocator has
    reserved, or the resident memory of the process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.due_at = 0.0  # on the clock of time.perf_counter

    def read(self) -> dict[str, int]:
        on_cuda = self.device.type == "cuda"
        reading = cuda_memory(self.device) if on_cuda else cpu_memory()
        self.due_at = time.perf_counter() + SAMPLE_S
        return reading
