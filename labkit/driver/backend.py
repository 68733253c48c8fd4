"""Decides backend and device for a number of ranks, and says why in one sentence."""

from __future__ import annotations

import os
from dataclasses import dataclass

from labkit.core.checks import one_of
from labkit.core.hardware import Hardware
from labkit.core.spec import BACKENDS, DEVICES

RANK_BYTES = 64 * 10**6  # what one more rank was seen to add; see labkit/README.md


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`backend` and `device` for the ranks, with the reason as a sentence."""

    backend: str
    device: str
    why: str


def choose(
    ranks: int, backend: str = "auto", device: str = "auto", *, hardware: Hardware
) -> Choice:
    """Backend and device for `ranks` processes on `hardware`.

    NCCL is taken when there is a GPU for every rank, else gloo. What the caller asks
    for by name is never replaced by something else.

    Raises:
        ValueError: what was asked for cannot work here; says what can.
    """
    one_of("backend", backend, BACKENDS)
    one_of("device", device, DEVICES)
    gpus = hardware.usable_gpus
    if backend == "nccl":
        refuse_nccl(ranks, device, hardware)
        return nccl(ranks, gpus)
    if device == "cuda":
        if gpus == 0:
            raise ValueError(
                f"device='cuda' was asked for, but {no_gpu(hardware)}. Use device='cpu'"
            )
        if backend == "auto" and gpus >= ranks:
            return nccl(ranks, gpus)
        why = f"gloo on CUDA: {ranks} ranks share {count(gpus, 'GPU')}."
        return Choice(backend="gloo", device="cuda", why=why)
    if backend == "auto" and device == "auto" and gpus >= ranks:
        return nccl(ranks, gpus)
    why = why_cpu(ranks, backend, device, hardware)
    return Choice(backend="gloo", device="cpu", why=why)


def nccl(ranks: int, gpus: int) -> Choice:
    why = f"NCCL: {count(gpus, 'GPU')} for {count(ranks, 'rank')}."
    return Choice(backend="nccl", device="cuda", why=why)


def refuse_nccl(ranks: int, device: str, hardware: Hardware) -> None:
    """Raise if NCCL, which was asked for by name, cannot serve these ranks."""
    gpus = hardware.usable_gpus
    if device == "cpu":
        raise ValueError(
            "backend='nccl' works on GPUs only, but device='cpu' was asked for. "
            "Use backend='gloo' for ranks on the CPU"
        )
    if gpus == 0:
        raise ValueError(
            f"backend='nccl' was asked for, but {no_gpu(hardware)}. "
            f"Use backend='gloo' to run {ranks} ranks on the CPU"
        )
    if ranks > gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise ValueError(
            f"you asked for {ranks} ranks but {count(gpus, 'GPU')} "
            f"{'is' if gpus == 1 else 'are'} visible{because}. NCCL needs one GPU per "
            f"rank. Use ranks={gpus}, or backend='gloo' to keep {ranks} ranks"
        )


def check_memory(ranks: int, hardware: Hardware) -> None:
    """Refuse a number of ranks whose processes alone exceed the memory here."""
    need = ranks * RANK_BYTES
    if need > hardware.memory_bytes:
        fit = max(1, hardware.memory_bytes // RANK_BYTES)
        raise ValueError(
            f"{ranks} ranks need about {need / 1e9:.1f} GB before they hold any data, "
            f"and {hardware.memory_bytes / 1e9:.1f} GB may be used here; "
            f"at most {fit} ranks fit"
        )


def threads_per_rank(ranks: int, hardware: Hardware) -> int:
    """Compute threads for each rank, so that all ranks together fill the cores."""
    return max(1, int(hardware.cores) // ranks)


def why_cpu(ranks: int, backend: str, device: str, hardware: Hardware) -> str:
    if backend == "gloo" or device == "cpu":
        asked = "backend='gloo'" if backend == "gloo" else "device='cpu'"
        return f"gloo on the CPU: {asked} was asked for."
    gpus = hardware.usable_gpus
    if gpus == 0:
        return f"gloo on the CPU: {no_gpu(hardware)}."
    return (
        f"gloo on the CPU: NCCL needs one GPU per rank, and there "
        f"{'is' if gpus == 1 else 'are'} {count(gpus, 'GPU')} for {ranks} ranks. "
        "device='cuda' lets ranks share a GPU."
    )


def no_gpu(hardware: Hardware) -> str:
    """Why no GPU can be used."""
    if hardware.gpus and not hardware.torch_cuda:
        return (
            f"{count(len(hardware.gpus), 'GPU')} cannot be used, as this PyTorch "
            f"({hardware.torch_version}) is built for the CPU"
        )
    return "no GPU is visible"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
