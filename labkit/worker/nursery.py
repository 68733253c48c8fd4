"""The nursery: a process that has imported torch and forks a rank in milliseconds.

It is started once per kernel as a fresh interpreter, so it shares nothing with what
the kernel did (threads, CUDA, a running event loop), and it never touches CUDA, so
that the ranks forked from it may. It reads requests from a socket whose other end
only the kernel holds:

    {"fork": 4, "job": 7, "keep": false} with a descriptor    ranks for a job
    {"again": 7} with a descriptor     the next job for ranks that were kept
    {"look": 7}                        reports ends, then `{"job": 7, "looked": true}`
    {"interrupt": 7}                   SIGINT to each rank of job 7
    {"kill": 7}                        SIGKILL to the session of each

What it says in turn names the job: `{"job": 7, "pids": [...], "error": null}` when
they are forked, `{"job": 7, "done": pid}` when a kept rank is ready for more, and
`{"job": 7, "exit": pid, "status": s, "peak_bytes": b}` at every end, `s` as in
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
import selectors
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


def main(control_fd: int, kernel_pid: int) -> None:
    """Import, then serve until the kernel closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that waits is dropped with this
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the kernel's mask is inherited
    Nursery(socket.socket(fileno=control_fd), kernel_pid).serve()


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

    def __init__(self, control: socket.socket, kernel_pid: int) -> None:
        self.control = control
        self.kernel_pid = kernel_pid
        self.ranks: dict[int, int] = {}  # the job of each, by process id
        self.kept: dict[int, socket.socket] = {}  # channels of ranks that get more jobs
        self.idle: set[int] = set()  # those of them that wait for it
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
            lacks_spares = len(self.spares) < self.wanted_spares and not self.busy
            self.serve_pending(timeout=0 if lacks_spares else PARENT_CHECK_S)
            if lacks_spares and not self.busy:
                self.fork_spare()

    @property
    def busy(self) -> bool:
        """Whether a rank works."""
        return len(self.ranks) > len(self.idle)

    def serve_pending(self, timeout: float) -> None:
        """Handle everything that has arrived, waiting at most `timeout` seconds."""
        while True:
            channels = [self.control, self.child_read, *self.kept.values()]
            ready = wait_for(channels, timeout)
            self.close_if_orphan()
            if not ready:
                return
            timeout = 0
            if self.child_read in ready:
                os.read(self.child_read, 4096)
                self.reap()
            for pid, channel in list(self.kept.items()):
                if channel in ready:
                    self.hear(pid, channel)
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
                self.start(**request, job_fd=self.descriptors.pop(0))
            elif "again" in request:
                self.start_again(request["again"], self.descriptors.pop(0))
            elif "look" in request:
                self.reap()
                self.send({"job": request["look"], "looked": True})
            elif "interrupt" in request:
                for pid in self.ranks_of(request["interrupt"]):
                    os.kill(pid, signal.SIGINT)
            else:
                for pid in self.ranks_of(request["kill"]):
                    end_session(pid)

    def hear(self, pid: int, channel: socket.socket) -> None:
        """A kept rank says that it is ready for more, or it has ended."""
        try:
            ready = channel.recv(16)
        except ConnectionResetError:  # it had not read what it was sent
            ready = b""
        if ready:
            self.idle.add(pid)
            self.send({"job": self.ranks[pid], "done": pid})
        else:
            channel.close()
            del self.kept[pid]

    def ranks_of(self, job: int) -> list[int]:
        """Ranks that are not yet reaped, so that their ids are still theirs."""
        return [pid for pid, its_job in self.ranks.items() if its_job == job]

    def start(self, fork: int, job: int, keep: bool, job_fd: int) -> None:
        """Make `fork` ranks of the job in `job_fd`, from spares if there are."""
        pids: list[int] = []
        error = None
        while len(pids) < fork and error is None:
            if not self.spares:
                error = self.fork_spare(job_fd)
                continue
            spare = self.spares.pop(0)
            role = json.dumps({"rank": len(pids), "keep": keep}).encode()
            try:
                socket.send_fds(spare.channel, [role], [job_fd])
            except OSError:
                spare.channel.close()
                continue  # it was killed while it waited, and will be reaped
            self.ranks[spare.pid] = job
            pids.append(spare.pid)
            if keep:
                self.kept[spare.pid] = spare.channel
            else:
                spare.channel.close()
        os.close(job_fd)
        self.wanted_spares = min(fork, MAX_SPARES)
        self.send({"job": job, "pids": pids, "error": error})

    def start_again(self, job: int, job_fd: int) -> None:
        """Hand the next job to ranks that were kept."""
        for pid in self.ranks_of(job):
            try:
                socket.send_fds(self.kept[pid], [b"again"], [job_fd])
            except (OSError, KeyError):
                continue  # it has ended, and will be reported
            self.idle.discard(pid)
        os.close(job_fd)

    def fork_spare(self, job_fd: int | None = None) -> str | None:
        """Fork a process that waits for its job; what went wrong, if it did.

        `job_fd` is open here and not the child's, which is sent its own.
        """
        nursery_pid = os.getpid()
        ours = theirs = None
        try:
            ours, theirs = socket.socketpair()
            folder = self.make_folder()
            with warnings.catch_warnings():
                # From Python 3.12 fork warns about threads. The only ones here are
                # those of math libraries, which take care of themselves at a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError as failure:  # a limit on processes or memory
            if theirs is not None:
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it does the learner's part
        self.control.close()
        for other in (*(spare.channel for spare in self.spares), *self.kept.values()):
            other.close()
        for fd in (self.alive_write, self.child_read, self.child_write):
            os.close(fd)
        entry = sys.modules["labkit.worker.entry"]
        entry.serve(channel, entry.get_ready(self.alive_read, folder))

    def reap(self) -> None:
        """Report ranks that ended, after ending what they left behind."""
        for pid in [*self.ranks, *(spare.pid for spare in self.spares)]:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            end_session(pid)
            _, status, used = os.wait4(pid, 0)
            shutil.rmtree(self.folders.pop(pid), ignore_errors=True)
            if pid in self.ranks:
                job = self.ranks.pop(pid)
                self.idle.discard(pid)
                if pid in self.kept:
                    self.kept.pop(pid).close()
                self.send(
                    {
                        "job": job,
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


def wait_for(readable: list, timeout: float) -> list:
    """Those that can be read, waiting `timeout` seconds for one.

    Not `select`, which knows no descriptor beyond 1023.
    """
    with selectors.DefaultSelector() as selector:
        for one in readable:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


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
