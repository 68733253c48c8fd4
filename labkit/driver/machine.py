"""Looks at this machine, without importing torch and without touching CUDA.

Cores and memory are read as the container limits them: a pod with one core and 2 GB
still shows its host's size everywhere else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pynvml

from labkit.core.hardware import GPU, GPULink, Hardware

CGROUP_ROOT = Path("/sys/fs/cgroup")
NO_LIMIT = 2**60  # cgroup v1 writes a number near 2^63 for "no limit"


def detect() -> Hardware:
    """This machine now; reads files and asks the NVIDIA driver, some milliseconds."""
    gpus, links = known_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    version, cuda = known_torch()
    return Hardware(
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        shm_bytes=shm_size(),
        gpus=gpus,
        links=links,
        torch_version=version,
        torch_cuda=cuda,
    )


def usable_cores(root: Path = CGROUP_ROOT) -> float:
    """Processors of this process's affinity mask, or its cgroup's quota if smaller."""
    if hasattr(os, "sched_getaffinity"):
        cores: float = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min([cores, *cgroup_core_limits(root)])


def usable_memory(root: Path = CGROUP_ROOT) -> int:
    """Physical memory, or the cgroup's limit if smaller, in bytes."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_memory_limits(root)])


def cgroup_core_limits(root: Path) -> Iterator[float]:
    """CPU quotas of this process's cgroup and of those above it, in cores."""
    for folder in own_cgroups(root, "cpu"):
        quota, period = read_words(folder / "cpu.max", 2)  # version 2
        if quota is None:
            quota, period = (
                read_words(folder / f"cpu.cfs_{name}_us", 1)[0]
                for name in ("quota", "period")
            )
        if quota and period and quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def cgroup_memory_limits(root: Path) -> Iterator[int]:
    """Memory limits of this process's cgroup and of those above it, in bytes."""
    for folder in own_cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_words(folder / name, 1)[0]
            if limit and limit.isdigit() and int(limit) < NO_LIMIT:
                yield int(limit)


def own_cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its ancestors, for version 2 and 1.

    In a container the namespace hides what is above, so that the root is our own.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def oom_kills(root: Path = CGROUP_ROOT, vmstat: str = "/proc/vmstat") -> Counter[str]:
    """How many processes the out-of-memory killer has ended, by the file that counts.

    Of this process's cgroups, and of the whole machine.
    """
    files = [
        folder / name
        for folder in own_cgroups(root, "memory")
        for name in ("memory.events", "memory.oom_control")
    ]
    counts: Counter[str] = Counter()
    for file in [*files, Path(vmstat)]:
        try:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            counts[str(file)] = int(found[1])
    return counts


def read_words(path: Path, count: int) -> list[str | None]:
    """The first words of a file; None for each that is not there."""
    try:
        words: list[str | None] = list(path.read_text().split())
    except OSError:
        words = []
    return (words + [None] * count)[:count]


def shm_size(path: str = "/dev/shm") -> int | None:
    """Size of the shared-memory mount in bytes, None where there is none."""
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def installed_torch() -> tuple[str | None, str | None]:
    """Version of the installed PyTorch and the CUDA it was built for, unimported."""
    try:
        version = importlib.metadata.version("torch")
        spec = importlib.util.find_spec("torch")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None, None
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:  # some other file of that name, as the nursery will tell
        return version, None
    built = re.search(r"^cuda\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return version, built and built[1]


def visible_gpus(visible: str | None) -> tuple[tuple[GPU, ...], tuple[GPULink, ...]]:
    """The GPUs that a rank would see, in its order, and how they are linked.

    `visible` is the value of CUDA_VISIBLE_DEVICES, None when it is not set.
    """
    if sys.platform == "darwin":
        return (), ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no NVIDIA driver: no GPU that NCCL could use
        return (), ()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        uuids = [as_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        handles = [handles[index] for index in select_devices(uuids, visible)]
        gpus = tuple(read_gpu(index, handle) for index, handle in enumerate(handles))
        return gpus, read_links(handles)
    finally:
        pynvml.nvmlShutdown()


def select_devices(uuids: list[str], visible: str | None) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: a list of indices or of unique beginnings of identifiers; the
    first entry that names no device ends the list, and a device named twice empties it.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in visible.split(","):
        index = match_device(entry.strip(), uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def match_device(entry: str, uuids: list[str]) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    found = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def read_gpu(index: int, handle: object) -> GPU:
    return GPU(
        index=index,
        name=as_text(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def read_links(handles: list) -> tuple[GPULink, ...]:
    """How each pair of GPUs is connected, left out where the driver does not say."""
    links = []
    for second in range(len(handles)):
        for first in range(second):
            kind = link_kind(handles[first], handles[second])
            if kind:
                links.append(GPULink(first=first, second=second, kind=kind))
    return tuple(links)


def link_kind(first: object, second: object) -> str | None:
    try:
        nvlink = pynvml.nvmlDeviceGetP2PStatus(
            first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        )
        if nvlink == pynvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    except pynvml.NVMLError:
        return None
    same_node = level <= pynvml.NVML_TOPOLOGY_NODE
    return "PCIe" if same_node else "PCIe across sockets"


def as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# Neither changes while a kernel lives, and a launch should not wait for them.
known_gpus = functools.cache(visible_gpus)
known_torch = functools.cache(installed_torch)
