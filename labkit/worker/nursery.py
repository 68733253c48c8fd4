"""The nursery: a process that has imported torch and forks a rank in milliseconds.

It is started once per kernel as a fresh interpreter, so it shares nothing with what
the kernel did (threads, CUDA, a running event loop), and it never touches CUDA, so
that the ranks forked from it may. It reads requests from a socket whose other end
only the kernel holds:

    {"fork": 4, "job": 7} with a file descriptor   answered by {"job": 7, "pids": [...]}
    {"kill": 7}                                    SIGKILL to the session of each rank

and it reports `{"exit": pid, "status": s, "peak_bytes": b}` for every rank, `s` as in
`os.waitstatus_to_exitcode`. It is the ranks' parent, so no process id can be reused
before it has swept what the rank left behind: a rank leads its own session, and what
it forked (data loaders) ends with it. When the kernel goes, the nursery ends the
ranks and itself; when the nursery goes, the ranks end themselves.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass

# In this order; requests are served between two imports. torch alone is needed
# first; optimizers and DDP pull in dynamo on first use, and without the rest a rank's
# first FSDP, tensor-parallel or pipeline step would wait for seconds.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "labkit.worker.entry",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
)
FLIGHT_RECORDS = "128"  # last collectives that PyTorch's flight recorder keeps
PARENT_CHECK_S = 0.5  # how often to look whether the kernel is still the parent
FIRST_SPARES = 4  # ranks that are forked before the first launch asks for some
MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss
MAX_SPARES = 8  # ranks that are ever kept waiting
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(control_fd: int) -> None:
    """Import, then serve until the kernel closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Nursery(socket.socket(fileno=control_fd)).serve()


@dataclass(frozen=True)
class Spare:
    """A forked process that waits to be told which rank of which job it is."""

    pid: int
    channel: socket.socket


class Nursery:
    """Forks ranks on request and reports how they ended.

    A fork of a process of this size takes 15 ms. So while nothing runs, as many ranks
    as the last launch had are forked in advance, and the next launch only tells them
    what to do.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.kernel_pid = os.getppid()
        self.ranks: dict[int, int] = {}  # the job of each, by process id
        self.spares: list[Spare] = []
        self.home = tempfile.mkdtemp(prefix="labkit-")
        self.num_folders = 0  # ever made in it, one for each fork
        self.folders: dict[int, str] = {}  # of ranks and spares, by process id
        self.wanted_spares = FIRST_SPARES
        self.buffer = b""
        self.descriptors: list[int] = []
        # Ranks wait for the end of file of this pipe; only the nursery can write to it.
        self.alive_read, self.alive_write = os.pipe()
        self.child_read, self.child_write = os.pipe()
        os.set_blocking(self.child_write, False)
        signal.set_wakeup_fd(self.child_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        # While a long import runs, look from time to time whether the kernel is there.
        signal.signal(signal.SIGTERM, lambda *_: self.close())
        signal.signal(signal.SIGALRM, lambda *_: self.close_if_orphan())
        signal.setitimer(signal.ITIMER_REAL, PARENT_CHECK_S, PARENT_CHECK_S)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", FLIGHT_RECORDS)
        for module in PRELOAD:
            importlib.import_module(module)
            if module in ("torch._dynamo", PRELOAD[-1]):
                # Ranks then share these pages for longer, and a rank's garbage
                # collector sees only what the rank itself made.
                gc.collect()
                gc.freeze()
            if sys.modules.get("labkit.worker.entry"):
                self.serve_pending(timeout=0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.send({"ready": True})
        while True:
            lacks_spares = len(self.spares) < self.wanted_spares and not self.ranks
            self.serve_pending(timeout=0 if lacks_spares else PARENT_CHECK_S)
            if lacks_spares and not self.ranks:
                self.fork_spare()

    def serve_pending(self, timeout: float) -> None:
        """Handle everything that has arrived, waiting at most `timeout` seconds."""
        while True:
            ready, _, _ = select.select(
                [self.control, self.child_read], [], [], timeout
            )
            self.close_if_orphan()
            if not ready:
                return
            timeout = 0
            if self.child_read in ready:
                os.read(self.child_read, 4096)
                self.reap()
            if self.control in ready:
                self.read_requests()

    def read_requests(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self.control, 65536, 8)
        if not data:
            self.close()
        self.descriptors += descriptors
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "fork" in request:
                self.start(request["fork"], request["job"], self.descriptors.pop(0))
            else:
                self.kill(request["kill"])

    def start(self, num_ranks: int, job: int, job_fd: int) -> None:
        """Make `num_ranks` ranks of the job in `job_fd`, from spares if there are."""
        pids: list[int] = []
        error = None
        while len(pids) < num_ranks and error is None:
            if not self.spares:
                error = self.fork_spare(job_fd)
                continue
            spare = self.spares.pop(0)
            rank = str(len(pids)).encode()
            with spare.channel:
                try:
                    socket.send_fds(spare.channel, [rank], [job_fd])
                except OSError:
                    continue  # it was killed while it waited, and will be reaped
            self.ranks[spare.pid] = job
            pids.append(spare.pid)
        os.close(job_fd)
        self.wanted_spares = min(num_ranks, MAX_SPARES)
        self.send({"job": job, "pids": pids, "error": error})

    def fork_spare(self, job_fd: int | None = None) -> str | None:
        """Fork a process that waits for its job; what went wrong, if it did.

        `job_fd` is open here and not the child's, which is sent its own.
        """
        nursery_pid = os.getpid()
        ours, theirs = socket.socketpair()
        try:
            folder = self.make_folder()
            with warnings.catch_warnings():
                # From Python 3.12 fork warns about threads. The only ones here are
                # those of math libraries, which take care of themselves at a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as failure:  # a limit on processes or memory
            ours.close()
            theirs.close()
            self.wanted_spares = 0
            return f"rank {len(self.ranks)} could not be forked: {failure}"
        if pid == 0:
            try:
                ours.close()
                if job_fd is not None:
                    os.close(job_fd)
                self.become_rank(nursery_pid, theirs, folder)
            except BaseException:
                traceback.print_exc()  # to the nursery's file, which launches quote
            finally:
                os._exit(70)  # a rank ends by itself; EX_SOFTWARE if it ever does not
        theirs.close()
        self.folders[pid] = folder
        self.spares.append(Spare(pid, ours))
        return None

    def make_folder(self) -> str:
        """A temporary folder for a process that is about to be forked."""
        self.num_folders += 1
        path = os.path.join(self.home, str(self.num_folders))
        os.makedirs(path, mode=0o700)  # home too, should it have been tidied away
        return path

    def become_rank(
        self, nursery_pid: int, channel: socket.socket, folder: str
    ) -> None:
        """In the child: undo what belongs to the nursery, wait for the job, do it."""
        os.setsid()
        end_with_parent(nursery_pid)
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.control.close()
        for spare in self.spares:
            spare.channel.close()
        for fd in (self.alive_write, self.child_read, self.child_write):
            os.close(fd)
        entry = sys.modules["labkit.worker.entry"]
        entry.get_ready(self.alive_read, folder)
        rank, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
        channel.close()
        if rank:  # else the nursery is gone
            entry.run_rank(int(rank), descriptors[0])

    def kill(self, job: int) -> None:
        for pid, its_job in self.ranks.items():
            if its_job == job:  # not yet reaped, so the id is still this rank's
                end_session(pid)

    def reap(self) -> None:
        """Report ranks that ended, after ending what they left behind."""
        for pid in [*self.ranks, *(spare.pid for spare in self.spares)]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            end_session(pid)
            _, status, used = os.wait4(pid, 0)
            shutil.rmtree(self.folders.pop(pid), ignore_errors=True)
            if pid in self.ranks:
                del self.ranks[pid]
                self.send(
                    {
                        "exit": pid,
                        "status": os.waitstatus_to_exitcode(status),
                        "peak_bytes": used.ru_maxrss * MAXRSS_BYTES,
                    }
                )
            elif status > 0:  # it could not get ready, and another could not either
                self.wanted_spares = 0
            self.spares = [spare for spare in self.spares if spare.pid != pid]

    def send(self, message: dict) -> None:
        try:
            self.control.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            self.close()

    def close_if_orphan(self) -> None:
        """The socket is no proof: a process that the kernel forked may hold it."""
        if os.getppid() != self.kernel_pid:
            self.close()

    def close(self) -> None:
        """The kernel is gone: end every rank, then the nursery."""
        for pid in [*self.ranks, *(spare.pid for spare in self.spares)]:
            end_session(pid)
        shutil.rmtree(self.home, ignore_errors=True)
        os._exit(0)


def end_session(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads, and to `pid` itself."""
    for kill in (os.killpg, os.kill):  # a rank just forked may not lead a group yet
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has ended already; macOS says EPERM for a zombie's group


def end_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died between the fork and the request
            os._exit(1)
