"""`labkit doctor`: says whether this machine can run labkit, and what to do if not.

Each check measures one thing and gives its status, what was found, and a remedy where
there is something to do. What raises while it measures is a failed check.
"""

from __future__ import annotations

import functools
import os
import shutil
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit.core.checks import one_of
from labkit.core.errors import RankFailed
from labkit.core.hardware import GiB, Hardware
from labkit.driver import backend, directory, installed, machine, setup, trial
from labkit.driver.engines.environment import stale_names
from labkit.view import table

STATUSES = ("ok", "warning", "failed", "skipped")
LINE_WIDTH = 88
# (too little, little). Four ranks were seen to work with 32 open files and 5 threads
# each (2026-12-07); a kernel, its front end and data loaders come on top.
OPEN_FILES = (64, 256)
PROCESSES = (64, 256)
LOCKED_BYTES = (0, 2**20)  # a container's may be 64 KiB; NCCL's manual says to lift it
DISK_BYTES = (10**8, 10**9)
Found = tuple[str, str, str]  # status, what was found, remedy


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report; `remedy` is empty where there is nothing to do."""

    name: str
    status: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        one_of("status", self.status, STATUSES)
        assert self.remedy or self.status != "failed", f"{self.name} has no remedy"

    def __str__(self) -> str:
        lines = [f"{self.status:<8} {self.name}: {self.found}"]
        if self.remedy:
            lines.append(f"{'':8} Do: {self.remedy}")
        wrapper = textwrap.TextWrapper(
            LINE_WIDTH,
            subsequent_indent=" " * 9,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return "\n".join(map(wrapper.fill, lines))


def run() -> int:
    """Print the machine and every check; 1 if one failed, else 0."""
    try:
        hardware = machine.detect()
        print(table.as_text(setup.describe(hardware), setup.CAPTION), end="\n\n")
    except Exception as error:
        print(raised("machine", error))
        return 1
    failed = 0
    for check in examine(hardware):
        print(check, flush=True)  # the trials take seconds
        failed += check.status == "failed"
    print(f"\n{failed} failed" if failed else "\nThis machine can run labkit.")
    return 1 if failed else 0


def examine(hardware: Hardware) -> Iterator[Check]:
    """Every check, in the order of the report."""
    for name, measure in CHECKS.items():
        try:
            status, found, remedy = measure(hardware)
            yield Check(name=name, status=status, found=found, remedy=remedy)
        except Exception as error:  # whatever it is, the other checks go on
            yield raised(name, error)


def raised(name: str, error: Exception) -> Check:
    remedy = REMEDIES.get(name, "repair what is named here, then run this again")
    return Check(name=name, status="failed", found=shorten(error), remedy=remedy)


def shorten(error: Exception) -> str:
    """What happened, without the traceback that a message may carry."""
    if isinstance(error, RankFailed):
        return "; ".join(
            [error.verdict, *error.rank_traceback.strip().splitlines()[-1:]]
        )
    first, *more = str(error).strip().splitlines() or [""]
    first = first.removesuffix("Traceback (most recent call last):").rstrip()
    return " ".join([f"{type(error).__name__}: {first}", *more[-1:]])


def check_shm(hardware: Hardware) -> Found:
    small = setup.shm_is_small(hardware)
    remedy = setup.SHM_ADVICE + " (docker run --shm-size=1g)"
    return "warning" if small else "ok", setup.shm_amount(hardware), remedy * small


def check_memory(hardware: Hardware) -> Found:
    remedy = "give the container more memory, or launch fewer ranks"
    for ranks, status in (2, "failed"), (4, "warning"):
        try:
            backend.check_memory(ranks, hardware)
        except ValueError as error:
            return status, str(error), remedy
    each_mb, here = backend.RANK_BYTES / 1e6, hardware.memory_bytes / GiB
    found = f"{here:.1f} GiB; 2 ranks add {2 * each_mb:.0f} MB, 4 {4 * each_mb:.0f} MB"
    return "ok", found, ""


def grade(value: float, bounds: tuple[int, int], remedy: str, found: str = "") -> Found:
    """Failed below the first bound, a warning below the second."""
    found = found or ("no limit" if value == float("inf") else f"{value:.0f}")
    if value >= bounds[1]:
        return "ok", found, ""
    return "failed" if value < bounds[0] else "warning", found, remedy


def soft_limit(name: str) -> float:
    """A resource limit of this process, infinite if there is none."""
    import resource  # here, as Windows has no such module

    limit = resource.getrlimit(getattr(resource, name))[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def check_open_files(hardware: Hardware) -> Found:
    return grade(soft_limit("RLIMIT_NOFILE"), OPEN_FILES, "run `ulimit -n 1024` first")


def check_processes(hardware: Hardware) -> Found:
    """The user's limit and the containers'; both count threads too."""
    limits = [soft_limit("RLIMIT_NPROC")]
    for folder in machine.own_cgroups(machine.CGROUP_ROOT, "pids"):
        most = machine.read_words(folder / "pids.max", 1)[0]
        limits += [int(most)] if most and most.isdigit() else []
    remedy = "run `ulimit -u 4096` first; in a container, docker run --pids-limit=4096"
    return grade(min(limits), PROCESSES, remedy)


def check_locked_memory(hardware: Hardware) -> Found:
    if hardware.usable_gpus < 2:
        return "skipped", "not looked at: only NCCL needs it", ""
    remedy = "run `ulimit -l unlimited`; in a container, docker run --ulimit memlock=-1"
    limit = soft_limit("RLIMIT_MEMLOCK")
    found = "no limit" if limit == float("inf") else f"{limit / 2**10:.0f} KiB"
    return grade(limit, LOCKED_BYTES, remedy, found)


def foreign_owner() -> int | None:
    """The user that owns the folder of runs, if it is there and not ours."""
    try:
        owner = directory.state_path().stat().st_uid
    except FileNotFoundError:
        return None
    return None if owner == os.geteuid() else owner


def check_folder(hardware: Hardware) -> Found:
    path, owner = directory.state_path(), foreign_owner()
    remedy = "set XDG_STATE_HOME to a folder of your own, on a local disk"
    if owner is not None:
        found = f"{path} belongs to user {owner}, and you are user {os.geteuid()}"
        return "failed", found, remedy
    mode = directory.state_dir().stat().st_mode & 0o777
    if mode != 0o700:
        return "failed", f"{path} stays open to others (mode {mode:04o})", remedy
    return "ok", f"{path}, yours alone", ""


def check_disk(hardware: Hardware) -> Found:
    path = directory.state_path()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    remedy = "delete old runs there, or set XDG_STATE_HOME to a folder on another disk"
    return grade(free, DISK_BYTES, remedy, f"{free / 1e9:.1f} GB free in {there}")


def check_environment(hardware: Hardware) -> Found:
    names = ", ".join(stale_names())
    found = f"{names}: left over and harmless, as ranks do not get them"
    return "ok", found if names else "nothing left over from another launcher", ""


def check_all_reduce(name: str, device: str, hardware: Hardware) -> Found:
    if name == "nccl" and hardware.usable_gpus < 2:
        why = "two ranks need two GPUs, and there is one"
        if hardware.usable_gpus == 0:
            why = backend.no_gpu(hardware)
        return "skipped", f"not tried: {why}", ""
    if foreign_owner() is not None:  # a run there would get in its owner's way
        return "skipped", "not tried: the folder of runs is not yours", ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what there is to say has a row of its own
        return trial.try_all_reduce(name, device)


REMEDIES = {
    "gloo all-reduce": "see whether `import torch` works in this Python, and whether a "
    "firewall closes the loopback interface, over which ranks talk",
    "NCCL all-reduce": "run this again with NCCL_DEBUG=INFO; if NCCL_P2P_DISABLE=1 "
    "helps, the link between the GPUs is at fault (nvidia-smi topo -m)",
}
CHECKS: dict[str, Callable[[Hardware], Found]] = {
    "Python": lambda hardware: installed.compare_python(),
    "packages": lambda hardware: installed.compare_packages(),
    "notebook packages": lambda hardware: installed.compare_packages("notebooks"),
    "/dev/shm": check_shm,
    "memory": check_memory,
    "open files": check_open_files,
    "processes": check_processes,
    "locked memory": check_locked_memory,
    "folder of runs": check_folder,
    "disk space": check_disk,
    "environment": check_environment,
    "gloo all-reduce": functools.partial(check_all_reduce, "gloo", "cpu"),
    "NCCL all-reduce": functools.partial(check_all_reduce, "nccl", "cuda"),
}
