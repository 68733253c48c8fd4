"""Faults at a chosen rank and step, and a process that launches runs which have them.

`train` is what the ranks do. `LaunchProcess` stands for a kernel: it can be killed and
interrupted like one, and all processes that come from it can be found by a mark in the
environment that they were started with, whoever their parent is by then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import labkit as lk
from labkit.driver.launcher import LAUNCHER
from tests.processes import MARK, marked

SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")
MISMATCHES = ("other kind", "other size", "returns early")
KERNEL_KILLED, INTERRUPTED = "kernel killed", "interrupted"
KINDS = ("raise", "exit", *SIGNALS, *MISMATCHES, "hang", KERNEL_KILLED, INTERRUPTED)
LAUNCH_LIMIT_S = 60  # of one launch, the import of torch included
WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens, to which of how many ranks, at which step.

    Attributes:
        kind: one of KINDS.
        exit_status: of a rank that leaves the process.
    """

    kind: str
    ranks: int
    rank: int
    step: int
    exit_status: int
    stall_s: float

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} of {self.ranks} at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the process that launched had of its launch.

    Attributes:
        error: the type of the error, empty for none.
        rank: the rank that the error names, None for none.
        text: the error as a cell shows it.
        printed: what the launch printed.
        status: of the run.
        pids: of the ranks' processes.
        descriptors: how many the process has open by now.
        ended_at: when the launch came back, seconds since the epoch.
    """

    error: str = ""
    rank: int | None = None
    text: str = ""
    printed: str
    status: str
    pids: list[int]
    descriptors: int
    ended_at: float

    @property
    def words(self) -> str:
        return f"{self.error} {self.text}\n{self.printed}"


# In the ranks


class Batches(IterableDataset):
    """Endless, read by a data loader's process as real ones are."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(WIDTH)


def train(worker: lk.Worker, fault: Fault, folder: str) -> None:
    """Data-parallel training without an end; one rank has its fault at its step."""
    batches = iter(DataLoader(Batches(), batch_size=2, num_workers=1))
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, 1))
    for step in itertools.count():
        model(next(batches)).sum().backward()
        metric = torch.ones(WIDTH)
        if (worker.rank, step) == (fault.rank, fault.step):
            Path(folder, "struck").write_text(repr(time.time()))
            if fault.kind == "returns early":
                return
            metric = suffer(fault, metric)
        dist.all_reduce(metric)
        worker.log(loss=1.0)


def suffer(fault: Fault, metric: torch.Tensor) -> torch.Tensor:
    """Have the fault; what to reduce next, if this rank goes on."""
    if fault.kind == "raise":
        raise RuntimeError(f"the fault of rank {fault.rank}")
    if fault.kind == "exit":
        os._exit(fault.exit_status)
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), signal.Signals[fault.kind])
    if fault.kind == "hang":
        threading.Event().wait()
    if fault.kind == "other kind":
        dist.broadcast(metric, fault.rank)
    if fault.kind == "other size":
        return torch.ones(2 * WIDTH)
    return metric  # the fault comes from outside


# In the process that launches


def serve() -> None:
    """Launch what each line asks for; one that does not end, ends this process."""
    for line in sys.stdin:
        request = json.loads(line)
        faulthandler.dump_traceback_later(request["limit_s"], exit=True)
        answer = launch(Fault(**request["fault"]), request["folder"])
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(dataclasses.asdict(answer)), flush=True)


def launch(fault: Fault, folder: str) -> Answer:
    """One launch, as a cell makes it."""
    told = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            lk.launch(train, fault.ranks, args=(fault, folder), stall_s=fault.stall_s)
        except lk.LabkitError as error:
            told = {"error": type(error).__name__, "text": str(error)}
            told["rank"] = getattr(error, "rank", None)
    run = LAUNCHER.current
    return Answer(
        ended_at=time.time(),
        printed=printed.getvalue(),
        status=run.status,
        pids=run.monitor.processes.pids,
        descriptors=psutil.Process().num_fds(),
        **told,
    )


# In the process that watches


class LaunchProcess:
    """A process that launches what it is sent, and what came from it.

    Attributes:
        mark: what it and all that comes from it have in their first environment.
        temporary: the folder that it and all its ranks use for temporary files.
        first_descriptors: how many it had open after its first launch.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = str(folder)
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self.stderr = folder / "stderr"
        self.first_descriptors: int | None = None
        environment = {MARK: self.mark, "TMPDIR": str(self.temporary)}
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from tests.faults import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | environment,
                cwd=Path(__file__).parents[1],
            )

    def __enter__(self) -> LaunchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Close its input, so that it ends, and wait for that."""
        with self.process:
            pass

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, fault: Fault, folder: Path, limit_s: float = LAUNCH_LIMIT_S) -> None:
        """Have it launch; it ends, and says where it is, when that takes too long."""
        request = {
            "fault": dataclasses.asdict(fault),
            "folder": str(folder),
            "limit_s": limit_s,
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    @property
    def answered(self) -> bool:
        """Whether an answer, or the end, can be read without waiting."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self) -> Answer | None:
        """What came of the launch; None when the process ended instead."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            return None
        return Answer(**json.loads(line))

    def new_descriptors(self, answer: Answer) -> int:
        """How many more it has open than after its first launch."""
        if self.first_descriptors is None:
            self.first_descriptors = answer.descriptors
        return answer.descriptors - self.first_descriptors

    def left_over(self, pids: list[int]) -> set[int]:
        """Processes that should be gone: all but itself, its nursery and idle ranks.

        Args:
            pids: the ranks of a launch that has ended, which are idle no more.
        """
        found = self.descendants()
        if self.alive:
            found -= {
                child.pid for child in psutil.Process(self.process.pid).children()
            }
        return found - (self.idle_ranks() - set(pids))

    def files_left(self) -> set[Path]:
        """Temporary files that should be gone: all but one folder for each idle rank.

        torch makes a folder for compiled code, the same for all of a user's processes.
        """
        found = set(self.temporary.glob("*"))
        found -= set(self.temporary.glob("torchinductor_*"))
        if not self.alive:
            return found
        of_ranks = set(self.temporary.glob("labkit-*/*"))
        found -= set(self.temporary.glob("labkit-*"))
        return found | of_ranks if len(of_ranks) > len(self.idle_ranks()) else found

    def idle_ranks(self) -> set[int]:
        """Processes that its nursery has forked."""
        return {rank.pid for nursery in self.nurseries() for rank in nursery.children()}

    def nurseries(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children() if self.alive else []

    def descendants(self) -> set[int]:
        """All running processes that come from it."""
        return marked(self.mark) - {self.process.pid}
