"""Writes this rank's pulse: what its main thread does, and its last collectives.

Collectives come from PyTorch's flight recorder (`TORCH_FR_BUFFER_SIZE`, set before
torch is imported). It does not record send and receive on gloo; those are told from the
functions that the rank is in.
"""

from __future__ import annotations

import ctypes
import linecache
import os
import pickle
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from labkit.core.pulse import JOINING, PULSE_S, RUNNING, Call, Pulse
from labkit.worker.worker import Worker

# Code of these folders is not the learner's.
LIBRARIES = tuple(
    str(Path(folder)) + os.sep
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        Path(torch.__file__).parent.parent,
        Path(__file__).parent.parent,
    )
)
# What a rank waits for, told from the functions that it is in.
PURPOSES = {
    "_sync_buffers": "buffers",
    "_sync_module_states": "weights at the start",
    "backward": "gradients",
    "_get_state_dict": "state_dict",
    "get_model_state_dict": "state_dict",
    "get_optimizer_state_dict": "state_dict",
    "get_state_dict": "state_dict",
    "state_dict": "state_dict",
    "full_tensor": "full_tensor",
    "_save_state_dict": "saving",
    "destroy_process_group": "leaving the group",
}
PEERS = {"send": ("send to", "dst"), "recv": ("recv from", "src")}
ELEMENT_NAMES = {"Float": "float32", "Double": "float64", "Half": "float16",
                 "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
                 "Byte": "uint8"}  # fmt: skip
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
TERMINATE = ctypes.CFUNCTYPE(None)


class PulseWriter:
    """Writes `rank-N.pulse` from a thread of its own until the process ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.main = threading.main_thread().ident
        self.world: dist.ProcessGroup | None = None
        self.worker: Worker | None = None
        self.raised_in: FrameType | None = None  # the innermost frame of its error
        self.state = JOINING
        self.started_at = self.origin = self.began_at = 0.0
        self.fd: int | None = None
        self.begun = threading.Event()
        threading.Thread(target=self.beat, name="labkit pulse", daemon=True).start()
        self.write_at_abort()
        self.take().to_line()  # the first time costs the most, and is not a run's

    def begin(self, run_dir: Path, rank: int, started_at: float, origin: float) -> None:
        """Write for a run from now on.

        Args:
            run_dir: the run's directory.
            rank: this rank.
            started_at: when the run was started, seconds since the epoch.
            origin: the same on time.perf_counter.
        """
        before = self.fd
        with self.lock:
            self.started_at = started_at
            self.origin = origin
            self.began_at = time.time()  # older collectives are not this run's
            self.state = JOINING
            self.worker = self.raised_in = None
            path = run_dir / f"rank-{rank}.pulse"
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            first = Pulse(time_s=time.perf_counter() - origin, state=JOINING)
            os.pwrite(self.fd, first.to_line(), 0)
        self.begun.set()
        if before is not None:
            os.close(before)

    def beat(self) -> None:
        self.begun.wait()
        while True:
            time.sleep(PULSE_S)  # the period itself; nothing is waited for
            self.write()

    def follow(self, worker: Worker) -> None:
        """The rank has joined; its steps are this handle's. The next pulse tells."""
        self.worker = worker
        self.world = dist.group.WORLD
        self.state = RUNNING

    def change(self, state: str, error: BaseException | None = None) -> None:
        """Write at once that this rank is in another state, raised by `error`."""
        self.state = state
        if error is not None:
            for frame, _ in traceback.walk_tb(error.__traceback__):
                self.raised_in = frame
        self.write()

    def write(self) -> None:
        if self.fd is None:
            return
        with self.lock:
            try:
                os.pwrite(self.fd, self.take().to_line(), 0)
            except OSError:
                pass  # the disk is full, or the run deleted: telemetry tells of that

    def take(self) -> Pulse:
        frame = self.raised_in or sys._current_frames().get(self.main)
        worker = self.worker
        # Groups that were formed anew have the names of the old ones.
        again = dist.is_initialized() and self.world not in (None, dist.group.WORLD)
        prefix = "new " if again else ""
        calls = recorded_calls(prefix, self.started_at, self.began_at)
        numbers = last_numbers(prefix)
        return Pulse(
            time_s=time.perf_counter() - self.origin,
            state=self.state,
            step=worker.step if worker and worker.num_logs else None,
            num_logs=worker.num_logs if worker else 0,
            cpu_s=time.process_time() + children_cpu_s(),
            line=learners_line(frame),
            purpose=purpose(frame),
            calls=of_present_groups(calls, numbers),
            groups=groups_of(prefix),
            numbers=numbers,
        )

    def write_at_abort(self) -> None:
        """Write once more when C++ gives up, as gloo does at a size mismatch.

        Its thread then calls std::terminate. The handler that we set there goes on to
        the one before, which ends the process.
        """
        try:
            library = ctypes.CDLL("libstdc++.so.6")
            set_terminate = library._ZSt13set_terminatePFvvE
        except (OSError, AttributeError):  # another C++ library, as on macOS
            return
        set_terminate.restype = ctypes.c_void_p
        set_terminate.argtypes = [ctypes.c_void_p]

        def last_pulse() -> None:
            self.write()
            TERMINATE(self.terminate_before)()

        self.last_pulse = TERMINATE(last_pulse)  # kept for as long as it may be called
        address = ctypes.cast(self.last_pulse, ctypes.c_void_p)
        self.terminate_before = set_terminate(address)


def recorded_calls(prefix: str, started_at: float, began_at: float) -> list[Call]:
    """The collectives in the flight recorder since `began_at`, oldest first."""
    calls: dict[str, list[Call]] = {}
    for entry in flight_record():
        called_at = entry["time_created_ns"] / 1e9
        if called_at < began_at or entry.get("is_p2p"):
            continue
        name = prefix + entry["process_group"][0]
        call = Call(
            group=name,
            number=entry["collective_seq_id"],
            kind=entry["profiling_name"].partition(":")[2],
            elements=[elements(size) for size in entry["input_sizes"]],
            dtype=dtype_name(entry.get("input_dtypes")),
            waiting=not entry["retired"] and entry["state"] != "completed",
            time_s=called_at - started_at,
        )
        before = calls.setdefault(name, [])
        if before and call.number <= before[-1].number:
            before.clear()  # of a group of this name that was destroyed
        before.append(call)
    return sorted(
        (call for group in calls.values() for call in group),
        key=lambda call: call.time_s,
    )


def of_present_groups(calls: list[Call], numbers: dict[str, int]) -> list[Call]:
    """Without calls in groups that were destroyed, whose names are used again."""
    kept = []
    left = dict(numbers)
    for call in reversed(calls):
        if left.get(call.group, 1) > 0:
            kept.append(call)
            if call.group in left:
                left[call.group] -= 1
    return kept[::-1]


def flight_record() -> Iterator[dict[str, Any]]:
    """Entries of gloo's recorder, and of NCCL's where this build has one."""
    c10d = torch._C._distributed_c10d
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            # collectives, without stack traces (which take seconds), ended ones too
            yield from pickle.loads(dump(True, False, False)).get("entries", ())


def elements(size: list[int]) -> int:
    product = 1
    for length in size:
        product *= length
    return product


def dtype_name(names: list[str] | None) -> str:
    return ELEMENT_NAMES.get(names[0], names[0].lower()) if names else ""


def last_numbers(prefix: str) -> dict[str, int]:
    """How many collectives were called in each group, also before those recorded."""
    world = dist.distributed_c10d._world
    numbers = {}
    for group, name in list(world.pg_names.items()):
        try:
            numbers[prefix + name] = group._get_sequence_number_for_group()
        except RuntimeError:  # not every backend counts
            continue
    return numbers


def children_cpu_s() -> float:
    """Processor seconds of this process's children, where the system tells."""
    total = 0
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue  # it has just ended
            total += sum(map(int, stat.rpartition(")")[2].split()[11:13]))
    return total / CLOCK_TICKS


def groups_of(prefix: str) -> dict[str, list[int]]:
    """The global ranks of the groups that there are."""
    world = dist.distributed_c10d._world
    return {
        prefix + world.pg_names[group]: sorted(members)
        for group, members in list(world.pg_group_ranks.items())
        if group in world.pg_names
    }


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames from the innermost outward."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def learners_line(frame: FrameType | None) -> str:
    """`Cell In[3], line 4, in train: loss.backward()`, or nothing."""
    for found in stack(frame):
        code = found.f_code
        file = code.co_filename
        if file.startswith(LIBRARIES) or file.startswith("<"):
            continue
        source = linecache.getline(file, found.f_lineno).strip()
        shown = f"{Path(file).name}, line {found.f_lineno}, in {code.co_name}"
        return f"{shown}: {source}" if source else shown
    return ""


def purpose(frame: FrameType | None) -> str:
    """What the rank waits for or does, where a function that it is in tells."""
    for found in stack(frame):
        code = found.f_code
        if code.co_name in PEERS and code.co_filename == dist.distributed_c10d.__file__:
            toward, argument = PEERS[code.co_name]
            return f"{toward} rank {found.f_locals.get(argument)}"
        if code.co_name in PURPOSES:
            return PURPOSES[code.co_name]
    return ""
