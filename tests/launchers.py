"""labkit and what else launches ranks, each given the same tasks.

`calling` has a process of its own call a launcher, as cells of one kernel would. A call
that does not end, ends that process, and the stacks of its threads say where it was.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import labkit as lk
from tests.processes import MARK, marked

RANKS = 4
CALL_LIMIT_S = 40  # the longest start, of ipyparallel's engines, takes ten seconds
FAILING_RANK = 1
FAULT = "the learner's own mistake"
OUTPUT = "output"  # what the calling process and its ranks print
CALLER = "from tests.launchers import call; call()"
Launch = Callable[[str, str], None]  # with the name of a task and a folder

# What ranks do, in a process group that has formed


def reduce_once(rank: int, folder: str) -> None:
    dist.all_reduce(torch.ones(1))
    Path(folder, f"reduced-{rank}").write_text(repr(time.time()))


def fail(rank: int, folder: str) -> None:
    """One rank raises while the others wait for it."""
    dist.all_reduce(torch.ones(1))
    if rank == FAILING_RANK:
        Path(folder, "failed-at").write_text(repr(time.time()))
        raise RuntimeError(FAULT)
    dist.all_reduce(torch.ones(1))


def wait(rank: int, folder: str) -> None:
    """Tell the process id and wait for ever."""
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    threading.Event().wait()


TASKS = {task.__name__: task for task in (reduce_once, fail, wait)}


def join_and_do(task: str, folder: str) -> None:
    """For launchers that leave the process group to the function."""
    dist.init_process_group("gloo")
    TASKS[task](dist.get_rank(), folder)
    dist.destroy_process_group()


# The launchers, each ready for calls


@contextmanager
def labkit() -> Iterator[Launch]:
    def launch(task: str, folder: str) -> None:
        do = TASKS[task]
        lk.launch(lambda worker: do(worker.rank, folder), RANKS, live=False)

    yield launch


@contextmanager
def accelerate() -> Iterator[Launch]:
    """Its `notebook_launcher` forks this process."""
    from accelerate import notebook_launcher

    torch.set_num_threads(1)  # a forked kernel may hang when it used more

    def launch(task: str, folder: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            notebook_launcher(
                join_and_do, (task, folder), num_processes=RANKS, use_port=free_port()
            )

    yield launch


@contextmanager
def torchrun() -> Iterator[Launch]:
    """A command, as `!torchrun script.py` in a cell is."""

    def launch(task: str, folder: str) -> None:
        subprocess.run(torchrun_command(task, folder), check=True)

    yield launch


def torchrun_command(task: str, folder: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
        "--master-addr", "127.0.0.1", "--master-port", free_port(),
        "-m", "tests.launchers", task, folder,
    ]  # fmt: skip


@contextmanager
def ipyparallel() -> Iterator[Launch]:
    """Engines that stay; the first call starts them."""
    import ipyparallel as ipp

    clusters: list[ipp.Client] = []
    with contextlib.ExitStack() as stack:

        def launch(task: str, folder: str) -> None:
            if not clusters:
                cluster = ipp.Cluster(n=RANKS, log_level=40)
                clusters.append(stack.enter_context(cluster))
            port = free_port()
            ranks = [(rank, port, task, folder) for rank in range(RANKS)]
            clusters[0][:].map_sync(do_in_engine, ranks)

        yield launch


def do_in_engine(job: tuple[int, str, str, str]) -> None:
    rank, port, task, folder = job
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(address, RANK=str(rank), WORLD_SIZE=str(RANKS))
    join_and_do(task, folder)


LAUNCHERS = {
    launcher.__name__: launcher
    for launcher in (labkit, accelerate, torchrun, ipyparallel)
}


def free_port() -> str:
    """A port that nobody listens on; only labkit needs none."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


# The process that calls


def call() -> None:
    """Call the launcher; each call writes `call.json` when it has come back."""
    name, task, folder, number_of_calls = sys.argv[1:]
    if (name, task) == ("torchrun", "wait"):  # the command itself shall be killed
        command = torchrun_command(task, folder)
        os.execv(command[0], command)
    with LAUNCHERS[name]() as launch:
        for number in range(int(number_of_calls)):
            call_once(launch, task, Path(folder), number)


def call_once(launch: Launch, task: str, folder: Path, number: int) -> None:
    own, output = folder / str(number), folder / OUTPUT
    own.mkdir()
    printed = output.stat().st_size
    called_at, text = time.time(), ""
    with limited():
        try:
            launch(task, str(own))
        except Exception as error:  # whatever it is, the cell would show it
            text = shown(error)
    ended_at = time.time()
    text = output.read_bytes()[printed:].decode(errors="replace") + text
    written = {"called_at": called_at, "ended_at": ended_at, "text": text}
    (own / "call.json").write_text(json.dumps(written))


@contextmanager
def limited() -> Iterator[None]:
    """End this process when the block does not end, and say where it was.

    A rank that is forked meanwhile must not do the same: it would wait for the thread
    that watches the time, which it does not have.
    """
    faulthandler.dump_traceback_later(CALL_LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def shown(error: Exception) -> str:
    """What a cell shows of an error, without colours."""
    render = getattr(error, "_render_traceback_", None)
    lines = render() if render else traceback.format_exception(error)
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))


# The process that measures


@contextmanager
def calling(
    code: str, arguments: list[str], folder: Path
) -> Iterator[subprocess.Popen]:
    """A process that calls launchers; at the end nothing that came from it is left."""
    with (folder / OUTPUT).open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {MARK: str(folder)},
            cwd=Path(__file__).parents[1],
        )
    with process:
        try:
            yield process
        finally:
            for pid in marked(str(folder)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def is_installed(name: str) -> bool:
    return name == "torchrun" or importlib.util.find_spec(name) is not None


if __name__ == "__main__":  # torchrun has started this process as a rank
    join_and_do(*sys.argv[1:])
