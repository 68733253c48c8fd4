"""Warm call to first all-reduce on four ranks: labkit against accelerate.

Both run in this one process, in turn. Accelerate's `notebook_launcher` forks the
kernel. labkit's nursery forks, which is why it also works after torch was used with
many threads here, and that is measured last.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import notebook_launcher

import labkit as lk

RANKS = 4
ROUNDS = 15
PAUSE_S = 0.3  # between two launches, as between two cells
TARGET_RATIO = 0.5


def make_task(folder: str) -> Callable[[int], None]:
    """What each rank does, as a cell would define it: it travels by value."""

    def reduce_once(rank: int) -> None:
        dist.all_reduce(torch.ones(1))
        Path(folder, str(rank)).write_text(repr(time.time()))

    return reduce_once


def with_labkit(folder: str) -> None:
    task = make_task(folder)
    lk.launch(lambda worker: task(worker.rank), RANKS, live=False)


def with_accelerate(folder: str) -> None:
    task = make_task(folder)

    def run() -> None:
        dist.init_process_group("gloo")
        task(dist.get_rank())
        dist.destroy_process_group()

    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(run, num_processes=RANKS, use_port=free_port())


def free_port() -> str:
    """A port that nobody listens on; `notebook_launcher` wants to be given one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def seconds(launch: Callable[[str], None]) -> float:
    """From the call to the moment at which the last rank had the sum."""
    with tempfile.TemporaryDirectory() as folder:
        called = time.time()
        launch(folder)
        done = [float(path.read_text()) for path in Path(folder).iterdir()]
    assert len(done) == RANKS
    return max(done) - called


def measure() -> dict:
    torch.set_num_threads(1)  # a forked kernel may hang when it used more
    with_labkit_once = seconds(with_labkit)
    seconds(with_accelerate)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S)  # the nursery forks ahead when it is idle
        ours.append(seconds(with_labkit))
        time.sleep(PAUSE_S)
        theirs.append(seconds(with_accelerate))
    torch.set_num_threads(2 * (os.cpu_count() or 1))
    torch.randn(2000, 2000) @ torch.randn(2000, 2000)
    after_threads = []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S)
        after_threads.append(seconds(with_labkit))
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(pairs)
    return {
        "labkit_s": round(statistics.median(ours), 3),
        "accelerate_s": round(statistics.median(theirs), 3),
        "ratio": round(ratio, 3),
        "labkit_after_threads_s": round(statistics.median(after_threads), 3),
        "labkit_cold_s": round(with_labkit_once, 1),
        "rounds": ROUNDS,
        "target_ratio": TARGET_RATIO,
        "met": ratio <= TARGET_RATIO,
    }
