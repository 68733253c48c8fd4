"""`lk.setup()`: looks at this machine, says what will be used, warms the nursery."""

from __future__ import annotations

from labkit.core.hardware import GiB, Hardware
from labkit.driver import backend, machine
from labkit.driver.launcher import LAUNCHER
from labkit.view import table

CAPTION = "labkit: what this machine offers"
SMALL_SHM_BYTES = GiB
SHM_ADVICE = (
    "NCCL and data-loader workers usually need 1 GiB or more: start the container "
    "with a larger shared-memory size"
)


def setup() -> Hardware:
    """Print what this machine has and what launches will use; return it.

    The first launch needs a process that has imported torch. It is started here, in
    the background, so that the launch finds it ready.
    """
    hardware = machine.detect()
    if hardware.torch_version is not None:
        LAUNCHER.engine.warm()
    table.show(describe(hardware), caption=CAPTION)
    return hardware


def describe(hardware: Hardware) -> list[tuple[str, str]]:
    """The rows of the table: what, and how much of it."""
    rows = [
        ("cores", f"{hardware.cores:g}"),
        ("memory", f"{hardware.memory_bytes / GiB:.1f} GiB"),
        ("/dev/shm", describe_shm(hardware)),
        ("GPUs", describe_gpus(hardware)),
    ]
    if hardware.links:
        links = (f"{link.first}-{link.second} {link.kind}" for link in hardware.links)
        rows.append(("GPU links", ", ".join(links)))
    rows.append(("PyTorch", describe_torch(hardware)))
    most = max(1, hardware.usable_gpus)
    rows.append(("backend", backend.choose(most, hardware=hardware).why))
    return rows


def describe_shm(hardware: Hardware) -> str:
    size = shm_amount(hardware)
    return f"{size}; {SHM_ADVICE}" if shm_is_small(hardware) else size


def shm_amount(hardware: Hardware) -> str:
    if hardware.shm_bytes is None:
        return "none"
    if hardware.shm_bytes < GiB:
        return f"{hardware.shm_bytes / 2**20:.0f} MiB"
    return f"{hardware.shm_bytes / GiB:.1f} GiB"


def shm_is_small(hardware: Hardware) -> bool:
    return hardware.shm_bytes is not None and hardware.shm_bytes < SMALL_SHM_BYTES


def describe_gpus(hardware: Hardware) -> str:
    named = (
        f"{gpu.index}: {gpu.name}, {gpu.memory_bytes / GiB:.0f} GiB"
        for gpu in hardware.gpus
    )
    return "; ".join(named) or "none"


def describe_torch(hardware: Hardware) -> str:
    if hardware.torch_version is None:
        return "not installed: pip install torch"
    built = f"CUDA {hardware.torch_cuda}" if hardware.torch_cuda else "the CPU"
    return f"{hardware.torch_version}, built for {built}"
