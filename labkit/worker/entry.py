"""What a rank does from its first to its last instruction.

 1. watch the nursery, so that the rank ends when the nursery does; wait for a job
 2. send stdout and stderr, those of C code too, to this rank's log file
 3. take over the kernel's present environment, directory and module path
 4. choose the device and join the process group
 5. run the function
 6. deliver the result, or the error, and leave

A rank leaves with `os._exit`: freeing a DDP model after its process group is gone can
deadlock (its reducer joins gloo's thread, which waits for the GIL), and everything
that matters is on disk by then.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import json
import linecache
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.core import events
from labkit.core.pulse import FAILED, FINISHED
from labkit.core.spec import LaunchSpec
from labkit.worker import deliver
from labkit.worker.emit import Emitter
from labkit.worker.pulse import PulseWriter
from labkit.worker.rendezvous import RunStore
from labkit.worker.worker import Worker

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LINE_BUFFERED = 1  # _IOLBF of stdio.h
BACKSTOP_S = 10
PACKAGE = str(Path(__file__).parent.parent) + os.sep


def get_ready(alive_fd: int, folder: str) -> None:
    """What can be done before the job is known.

    A forked process shares its parent's memory page by page until it writes to it, and
    each first write costs a fault, 700 of them while joining a group. So the rank does
    once for itself what it will do again for its job: two thirds of the time that it
    takes from the job to the first collective are then spent already.
    """
    threading.Thread(target=end_with_nursery, args=[alive_fd], daemon=True).start()
    keep_sockets_in(folder)
    buffer_lines_of_c()
    replace_environment(dict(os.environ, GLOO_SOCKET_IFNAME=LOOPBACK))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def run_rank(rank: int, job_fd: int) -> None:
    """Run one rank of the job and leave the process."""
    with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as job:
        header_end = job.find(b"\n")
        header = json.loads(job[:header_end])
        payload = job[header_end + 1 :]
    os.close(job_fd)
    run_dir = Path(header["run_dir"])
    redirect_output(run_dir / f"rank-{rank}.log")
    spec = LaunchSpec(**header["spec"])
    crash = open(run_dir / f"rank-{rank}.crash", "w", opener=for_this_user)
    faulthandler.enable(crash)  # C code that crashes leaves the Python lines there
    emitter = Emitter(run_dir, rank, spec.started_at)
    pulse = PulseWriter(run_dir, rank, spec.started_at, emitter.origin)
    status = 1
    worker = None
    try:
        adopt_kernel(header, rank, spec.ranks)
        worker, store = join(rank, spec, run_dir, emitter)
        pulse.follow(worker)
        function, args, kwargs = pickle.loads(payload)
        del payload
        value = function(worker, *args, **kwargs)
        result = deliver.write(value, run_dir, rank, bytes.fromhex(header["key"]))
        emitter.emit(events.RESULT, result)
        pulse.change(FINISHED)
        wait_for_peers(store, spec, rank)
        status = 0
    except BaseException as error:  # the edge of the process: it becomes an event
        step = worker.step if worker and worker.step >= 0 else None
        pulse.change(FAILED, error)
        emitter.emit(events.ERROR, describe(error, step))
    finally:
        emitter.close()
        flush_output()
        os._exit(status)


def for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def end_with_nursery(alive_fd: int) -> None:
    """Wait for the end of file that the nursery's death brings, then end everything."""
    os.read(alive_fd, 1)
    os.killpg(0, signal.SIGKILL)


def keep_sockets_in(folder: str) -> None:
    """Have multiprocessing use a folder that the nursery removes after this rank.

    Its own would stay among the temporary files for good, one for each data-loader
    process: it is removed at an orderly exit only, and a rank's end is none.
    """
    multiprocessing.current_process()._config["tempdir"] = folder


def redirect_output(path: Path) -> None:
    """Point descriptors 0 at nothing, 1 and 2 at the log, written line by line."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    text = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    sys.stdout, sys.stderr = open(1, "w", **text), open(2, "w", **text)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def buffer_lines_of_c() -> None:
    """C's own stdout would keep what it prints to a file until there is much of it."""
    libc = ctypes.CDLL(None)
    stdout = "__stdoutp" if sys.platform == "darwin" else "stdout"
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, stdout), None, LINE_BUFFERED, 0)


def flush_output() -> None:
    """Write out whatever Python and C still hold in their buffers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # the function closed or replaced it; its own flush was its own
    ctypes.CDLL(None).fflush(None)


def adopt_kernel(header: dict[str, Any], rank: int, ranks: int) -> None:
    """Take over environment, directory, module path and cell sources of the kernel."""
    numbers = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    replace_environment(header["environment"] | numbers)
    sys.path[:] = header["module_path"]
    sys.argv = header["argv"]
    os.chdir(header["directory"])
    for name, source in header["sources"].items():
        # without a modification time linecache never looks for such a file
        lines = source.splitlines(keepends=True)
        linecache.cache[name] = (len(source), None, lines, name)


def replace_environment(environment: dict[str, str]) -> None:
    """Make `environment` this process's own; untouched where it is so already."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def join(
    rank: int, spec: LaunchSpec, run_dir: Path, emitter: Emitter
) -> tuple[Worker, dist.Store]:
    """Choose the device, form the process group, report that the rank is up."""
    torch.set_num_threads(spec.threads)
    if spec.device == "cuda":
        # Before the group forms: NCCL binds to the current device.
        device = torch.device("cuda", rank % spec.num_gpus)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    # The driver ends a run that is stalled, and says why; this limit is behind that.
    limit = datetime.timedelta(seconds=spec.stall_s + BACKSTOP_S)
    store = RunStore(str(run_dir / "rendezvous"), spec.ranks, limit)
    dist.init_process_group(
        spec.backend,
        store=store,
        rank=rank,
        world_size=spec.ranks,
        timeout=limit,
        device_id=device if spec.backend == "nccl" else None,
    )
    up = {"pid": os.getpid(), "device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        up["device_name"] = torch.cuda.get_device_name(device)
    emitter.emit(events.START, up)
    return Worker(rank, spec.ranks, device, emitter), store


def wait_for_peers(store: dist.Store, spec: LaunchSpec, rank: int) -> None:
    """Stay until every rank has finished: a peer could be hurt by this rank's end.

    With gloo, a peer that is still connecting (a new group forms on one side earlier
    than on the other) would fail with "connection closed". With NCCL, a peer may still
    read this rank's GPU memory. The store is the rank's own: the function may have
    destroyed the process group.
    """
    if spec.backend == "nccl":
        torch.cuda.synchronize()
    announce(store, "finished", rank)
    await_all(store, "finished", spec.ranks)


def announce(store: dist.Store, what: str, rank: int) -> None:
    store.set(f"labkit/{what}/{rank}", "1")


def await_all(store: dist.Store, what: str, ranks: int) -> None:
    """Wait until every rank has announced it; the driver ends us if one cannot."""
    keys = [f"labkit/{what}/{rank}" for rank in range(ranks)]
    store.wait(keys, datetime.timedelta(days=1))


def describe(error: BaseException, step: int | None) -> events.Event:
    """The `error` event: the learner's own frames, labkit's left out."""
    trace = traceback.TracebackException.from_exception(error)
    for part in chain(trace):
        kept = [frame for frame in part.stack if not frame.filename.startswith(PACKAGE)]
        part.stack = traceback.StackSummary.from_list(kept)
    return {
        "type": type(error).__name__,
        "message": "".join(trace.format_exception_only()).strip(),
        "traceback": "".join(trace.format()),
        "step": step,
    }


def chain(trace: traceback.TracebackException) -> list[traceback.TracebackException]:
    """A traceback with everything that it was raised from or during."""
    parts, found = [trace], []
    while parts:
        part = parts.pop()
        found.append(part)
        group = getattr(part, "exceptions", None) or ()  # from Python 3.11
        linked = (part.__cause__, part.__context__, *group)
        parts += [other for other in linked if other is not None]
    return found
