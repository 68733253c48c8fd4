"""The kernel's end of the socket to a nursery (`labkit.worker.nursery`)."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from labkit.core.errors import StartFailed
from labkit.driver.engines.environment import rank_environment

NURSERY_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from labkit.worker.nursery import main; main(int(sys.argv[1]), int(sys.argv[3]))"
)


class Job(Protocol):
    """Whoever wants to hear what the nursery says of a job."""

    def take(self, message: dict[str, Any]) -> None: ...


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Keep SIGINT waiting, in this thread and in a process that it starts.

    Until that process has a session of its own, the stop button would hit it too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Nursery:
    """The kernel's end of the socket to one nursery process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.control = ours
        self.owner_pid = os.getpid()
        self.stderr = tempfile.TemporaryFile()
        self.buffer = b""
        self.lock = threading.Lock()
        self.num_jobs = 0
        # those that somebody still holds
        self.jobs: weakref.WeakValueDictionary[int, Job] = weakref.WeakValueDictionary()
        # Each launch brings the environment of its own time; this one is for imports.
        environment = rank_environment()
        with theirs, interrupts_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-c", NURSERY_CODE, str(theirs.fileno()),
                 json.dumps([entry for entry in sys.path if isinstance(entry, str)]),
                 str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.stderr,
                stderr=self.stderr,
                env=environment,
                start_new_session=True,  # the kernel's interrupt must not reach it
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether it runs and belongs to this process, not to one that forked us."""
        return self.owner_pid == os.getpid() and self.process.poll() is None

    def send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self.lock:
            try:
                if descriptors:
                    socket.send_fds(self.control, [data], list(descriptors))
                else:
                    self.control.sendall(data)
            except OSError as error:
                raise self.lost() from error

    def receive(self, timeout: float) -> None:
        """Hand out the messages that have come, waiting `timeout` seconds for one.

        Raises:
            StartFailed: the nursery has ended.
        """
        with selectors.DefaultSelector() as selector:  # select stops at 1023 files
            selector.register(self.control, selectors.EVENT_READ)
            if not selector.select(timeout):
                return
        try:
            data = self.control.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self.lost()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            job = self.jobs.get(message.get("job"))
            if job is not None:  # else it has been given up
                job.take(message)

    def lost(self) -> StartFailed:
        """The error for a nursery that has ended, with its last words."""
        try:
            status = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = "unknown"
        if self.stderr.closed:
            return StartFailed("the run was ended, as this process ends")
        self.stderr.seek(max(0, self.stderr.seek(0, os.SEEK_END) - 2000))
        words = self.stderr.read().decode(errors="replace").strip()
        return StartFailed(
            f"the nursery, from which ranks are forked, ended (exit status {status}). "
            f"The next launch starts a new one. Its last output: {words or 'none'}"
        )

    def close(self) -> None:
        """Close our end; the nursery ends what it started, then itself."""
        self.control.close()
        self.stderr.close()
        if self.owner_pid == os.getpid():  # else it is the nursery of our parent
            self.process.terminate()  # it may be in the middle of its imports
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
