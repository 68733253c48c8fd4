"""What a rank does from its first to its last instruction.

 1. watch the nursery, so that the rank ends when the nursery does; wait for a job
 2. send stdout and stderr, those of C code too, to this rank's log file
 3. take over the kernel's present environment, directory and module path
 4. choose the device and join the process group
 5. run the function
 6. deliver the result, or the error; leave, or wait for the next job

A rank leaves with `os._exit`: freeing a DDP model after its process group is gone can
deadlock (its reducer joins gloo's thread, which waits for the GIL), and everything
that matters is on disk by then.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import mmap
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import numpy
import torch
import torch.distributed as dist

from labkit.core import events
from labkit.core.pulse import FAILED, FINISHED
from labkit.core.spec import LaunchSpec
from labkit.worker import deliver
from labkit.worker.cell import offer_to_pickle, run_cell
from labkit.worker.emit import Emitter
from labkit.worker.join import join, up, wait_for_peers
from labkit.worker.output import buffer_lines_of_c, flush_output, redirect_output
from labkit.worker.pulse import PulseWriter
from labkit.worker.worker import Worker

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# What PyTorch says when it lost a peer. It is the echo of a failure, not the failure.
LOST_PEER = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|by peer"
    r"|Timed out waiting|from the other ranks|communicator was aborted"
)
MAX_TEXT = 100_000  # characters of an error's text in its event
PACKAGE = str(Path(__file__).parent.parent) + os.sep


def get_ready(alive_fd: int, folder: str) -> PulseWriter:
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
    numpy.random.seed()  # else every rank would draw the nursery's numbers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    pulse = PulseWriter()
    dist.destroy_process_group()
    return pulse


def serve(channel: socket.socket, pulse: PulseWriter) -> None:
    """Wait for a job and do it; if this rank is to be kept, wait for the next one."""
    role, descriptors, _, _ = socket.recv_fds(channel, 64, 1)
    if not role:
        return  # the nursery is gone
    role = json.loads(role)
    if not role["keep"]:
        channel.close()
    rank = Rank(role["rank"], role["keep"], pulse)
    while descriptors:
        status = rank.run(descriptors[0])
        if not role["keep"] or rank.store is None:
            os._exit(status)
        channel.sendall(b"done")
        _, descriptors, _, _ = socket.recv_fds(channel, 64, 1)


class Rank:
    """This process as a rank: what stays when it does several jobs one after another.

    Attributes:
        number: its rank.
        keep: whether there may be further jobs.
        state: the learner's own; every job's handle has it.
        store: how it found its peers; None while it has not.
    """

    def __init__(self, number: int, keep: bool, pulse: PulseWriter) -> None:
        self.number = number
        self.keep = keep
        self.pid = os.getpid()
        self.state = SimpleNamespace()
        self.pulse = pulse
        self.store: dist.Store | None = None
        self.crash: TextIO | None = None

    def run(self, job_fd: int) -> int:
        """Do one job; its exit status."""
        with mmap.mmap(job_fd, 0, access=mmap.ACCESS_READ) as job:
            header_end = job.find(b"\n")
            header = json.loads(job[:header_end])
            payload = job[header_end + 1 :]
        os.close(job_fd)
        run_dir = Path(header["run_dir"])
        self.redirect(run_dir)
        spec = LaunchSpec(**header["spec"])
        try:
            emitter = Emitter(run_dir, self.number, spec.started_at)
            self.pulse.begin(run_dir, self.number, spec.started_at, emitter.origin)
        except OSError as error:
            print(f"rank {self.number} cannot write to {run_dir}: {error}")
            flush_output()
            return 1
        worker = None
        try:
            adopt_kernel(header, self.number, spec.ranks)
            if self.store is None or not dist.is_initialized():
                self.device, self.store = join(self.number, spec, run_dir)
            worker = Worker(self.number, spec.ranks, self.device, emitter, self.state)
            emitter.emit(events.START, up(self.device))
            self.pulse.follow(worker)
            value = self.call(worker, header["cell"], payload)
            self.leave_if_copy()
            del payload
            key = bytes.fromhex(header["key"])
            result = deliver.write(value, run_dir, self.number, key)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            emitter.emit(events.RESULT, result)
            self.pulse.change(FINISHED)
            if not self.keep:
                finish_threads()
                wait_for_peers(self.store, spec, self.number)
        except BaseException as error:  # the edge of the job: it becomes an event
            self.leave_if_copy(error)
            step = worker.step if worker and worker.num_logs else None
            self.pulse.change(FAILED, error)
            event = describe(error, step)
            try:
                emitter.emit(events.ERROR, event)
            except OSError as failure:  # the disk is full
                print(event["traceback"])
                print(f"rank {self.number} cannot write to {run_dir}: {failure}")
            return 1
        finally:
            emitter.close()
            flush_output()
        return 0

    def leave_if_copy(self, error: BaseException | None = None) -> None:
        """End a process that the function forked: only its parent is the rank."""
        if os.getpid() != self.pid:
            flush_output()
            os._exit(0 if error is None or exit_status(error) == 0 else 1)

    def redirect(self, run_dir: Path) -> None:
        """Send what this process prints, or says when it crashes, to the run."""
        redirect_output(run_dir / f"rank-{self.number}.log")
        before = self.crash
        # C code that crashes leaves the Python lines there
        self.crash = open(run_dir / f"rank-{self.number}.crash", "w", opener=private)
        faulthandler.enable(self.crash)
        if before is not None:
            before.close()

    def call(self, worker: Worker, cell: dict[str, Any] | None, payload: bytes) -> Any:
        """The learner's part, the only one that an interrupt reaches."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if cell is not None:
                return run_cell(worker, cell)
            function, args, kwargs = pickle.loads(payload)
            offer_to_pickle(getattr(function, "__globals__", {}))
            return function(worker, *args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def exit_status(error: BaseException) -> object:
    """What `sys.exit` was given, 0 for nothing; None for another error."""
    return (error.code or 0) if isinstance(error, SystemExit) else None


def finish_threads() -> None:
    """Wait for threads that are no daemons, as Python does at the end of a script."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()


def private(path: str, flags: int) -> int:
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


def describe(error: BaseException, step: int | None) -> events.Event:
    """The `error` event: the learner's own frames, labkit's left out."""
    lost_peer = any(map(tells_of_lost_peer, causes(error)))
    trace = traceback.TracebackException.from_exception(error)
    for part in chain(trace):
        kept = [frame for frame in part.stack if not frame.filename.startswith(PACKAGE)]
        part.stack = traceback.StackSummary.from_list(kept)
    return {
        "type": type(error).__name__,
        "message": shortened("".join(trace.format_exception_only()).strip()),
        "traceback": shortened("".join(trace.format())),
        "step": step,
        "lost_peer": lost_peer,
    }


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def tells_of_lost_peer(error: BaseException) -> bool:
    """Whether PyTorch says that another rank went away; an OSError is the learner's."""
    if isinstance(error, OSError):
        return False
    try:
        return LOST_PEER.search(str(error)) is not None
    except Exception:  # an exception that cannot show itself is nobody's echo
        return False


def shortened(text: str) -> str:
    """The beginning and the end of a very long text."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"


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
