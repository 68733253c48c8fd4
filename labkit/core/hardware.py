"""What a machine offers to ranks: cores, memory, GPUs and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One visible GPU.

    `index` counts among the visible ones, as `cuda:index` does in a rank.
    """

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class GPULink:
    """How two visible GPUs reach each other: NVLink, or the PCIe they share."""

    first: int
    second: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """This machine as the container limits it, not as the host is.

    Attributes:
        cores: processors that may be used at once; a fraction under a CPU quota.
        memory_bytes: memory that may be used before the system kills.
        shm_bytes: size of /dev/shm, which NCCL and data loaders use; None if absent.
        gpus: the visible GPUs, after CUDA_VISIBLE_DEVICES.
        links: the known links between visible GPUs.
        torch_version: installed PyTorch, None when it is not installed.
        torch_cuda: the CUDA that this PyTorch was built for, None for a CPU build.
    """

    cores: float
    memory_bytes: int
    shm_bytes: int | None = None
    gpus: tuple[GPU, ...] = ()
    links: tuple[GPULink, ...] = ()
    torch_version: str | None = None
    torch_cuda: str | None = None

    @property
    def usable_gpus(self) -> int:
        """GPUs that ranks can use: none when PyTorch is a CPU build."""
        return len(self.gpus) if self.torch_cuda else 0

    def __str__(self) -> str:
        gpus = ", ".join(gpu.name for gpu in self.gpus) or "no GPU"
        return f"{self.cores:g} cores, {self.memory_bytes / GiB:.1f} GiB, {gpus}"
