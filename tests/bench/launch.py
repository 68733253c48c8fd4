"""Launching four ranks: labkit against accelerate, torchrun and ipyparallel.

The ratio is that of a warm call to its first all-reduce against accelerate's: both run
in one process, in turn. Accelerate's `notebook_launcher` forks the kernel. labkit's
nursery forks, which is why it also works after torch was used with many threads there,
and that is measured last.

Then each launcher has a process of its own for three questions: how long does a call
take to its first all-reduce; how long until the caller has the error of a rank, and
what does it say; and how many ranks outlive the process that launched them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import labkit as lk
from tests.launchers import (
    CALL_LIMIT_S,
    CALLER,
    FAILING_RANK,
    FAULT,
    LAUNCHERS,
    OUTPUT,
    RANKS,
    calling,
    free_port,
    is_installed,
    limited,
)
from tests.processes import wait_until, wait_until_gone

ROUNDS = 15
ATTEMPTS = 3  # processes that may hang before the rounds are given up
CALLS = 4  # of each launcher, the first of which is cold
PAUSE_S = 0.3  # between two launches, as between two cells
GONE_S = 2  # a rank that runs for longer than its launcher is an orphan
TARGET_RATIO = 0.5
HANGS = f"did not end within {CALL_LIMIT_S} s"
IN_TURN = "from tests.bench.launch import take_turns; take_turns()"


# In turn, in one process


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
    from accelerate import notebook_launcher

    task = make_task(folder)

    def run() -> None:
        dist.init_process_group("gloo")
        task(dist.get_rank())
        dist.destroy_process_group()

    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(run, num_processes=RANKS, use_port=free_port())


def seconds(launch: Callable[[str], None]) -> float:
    """From the call to the moment at which the last rank had the sum."""
    with tempfile.TemporaryDirectory() as folder:
        called = time.time()
        with limited():
            launch(folder)
        done = [float(path.read_text()) for path in Path(folder).iterdir()]
    assert len(done) == RANKS
    return max(done) - called


def take_turns() -> None:
    """The process that launches: a line of JSON for each thing that it measures."""
    path, rounds = sys.argv[1:]
    with open(path, "a", buffering=1) as file:
        for kind, *times in timed_turns(int(rounds)):
            file.write(json.dumps([kind, *times]) + "\n")


def timed_turns(rounds: int) -> Iterator[tuple]:
    torch.set_num_threads(1)  # a forked kernel may hang when it used more
    yield "cold", seconds(with_labkit)
    seconds(with_accelerate)
    for _ in range(rounds):
        time.sleep(PAUSE_S)  # the nursery forks ahead when it is idle
        ours = seconds(with_labkit)
        time.sleep(PAUSE_S)
        yield "pair", ours, seconds(with_accelerate)
    torch.set_num_threads(2 * (os.cpu_count() or 1))
    torch.randn(2000, 2000) @ torch.randn(2000, 2000)
    for _ in range(ROUNDS):
        time.sleep(PAUSE_S)
        yield "after threads", seconds(with_labkit)


def compare() -> dict:
    """The ratio, from a process that may hang: then another goes on."""
    if not is_installed("accelerate"):
        return {"accelerate": "absent", "met": False}
    times: dict[str, list] = {"cold": [], "pair": [], "after threads": []}
    hung = []
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            missing = ROUNDS - len(times["pair"])
            words = await_turns(Path(folder), missing)
            for line in Path(folder, "times").read_text().splitlines():
                kind, *measured = json.loads(line)
                times[kind].append(measured)
        if words is None:
            break
        hung.append("accelerate" if "with_accelerate" in words else "labkit")
        print(f"a launch {HANGS}, in {hung[-1]}:\n{words}", flush=True)
    return ratio(times, hung)


def await_turns(folder: Path, rounds: int) -> str | None:
    """None when the turns came to their end, else the stacks of the one that hung."""
    (folder / "times").touch()
    arguments = [str(folder / "times"), str(rounds)]
    with calling(IN_TURN, arguments, folder) as process:
        status = process.wait()
    words = (folder / OUTPUT).read_text(errors="replace")
    if status == 0:
        return None
    assert "Timeout (" in words, words
    return words


def ratio(times: dict[str, list], hung: list[str]) -> dict:
    pairs = times["pair"]
    found = median(ours / theirs for ours, theirs in pairs)
    return {
        "labkit_s": median(ours for ours, _ in pairs),
        "accelerate_s": median(theirs for _, theirs in pairs),
        "ratio": found,
        "labkit_after_threads_s": median(own for (own,) in times["after threads"]),
        "labkit_cold_s": median(own for (own,) in times["cold"]),
        "rounds": len(pairs),
        "hung": hung,
        "target_ratio": TARGET_RATIO,
        "met": found is not None and found <= TARGET_RATIO,
    }


def median(values: Iterator[float]) -> float | None:
    found = list(values)
    return round(statistics.median(found), 3) if found else None


# Each launcher in a process of its own


def row(name: str) -> dict[str, object]:
    """What was found of a launcher; a word where there is no number."""
    if not is_installed(name):
        return {"launcher": name, "first_s": "absent"}
    return {"launcher": name, **to_reduce(name), **to_error(name), **orphans(name)}


def calls_of(name: str, task: str) -> list[dict]:
    """The calls that came back, each with what its ranks wrote, by file."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [name, task, folder, str(CALLS)]
        with (
            calling(CALLER, arguments, Path(folder)) as process,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            process.wait(CALLS * CALL_LIMIT_S)
        return [
            json.loads(path.read_text())
            | {own.name: own.read_text() for own in path.parent.glob("*-*")}
            for path in sorted(Path(folder).glob("*/call.json"))
        ]


def to_reduce(name: str) -> dict[str, object]:
    """Seconds from a call to its first all-reduce, on the last rank."""
    times = []
    for call in calls_of(name, "reduce_once"):
        reduced = [float(call[f"reduced-{rank}"]) for rank in range(RANKS)]
        times.append(max(reduced) - call["called_at"])
    return {
        "first_s": round(times[0], 2) if times else HANGS,
        "again_s": median(times[1:]) if len(times) == CALLS else HANGS,
    }


def to_error(name: str) -> dict[str, object]:
    """Seconds from a rank's exception to the caller's, and what the caller reads."""
    calls = calls_of(name, "fail")
    culprits = sum(named_rank(call["text"]) == FAILING_RANK for call in calls)
    leading = sum(FAULT in leading_exception(call["text"]) for call in calls)
    times = [call["ended_at"] - float(call["failed-at"]) for call in calls]
    return {
        "error_s": median(times) if len(calls) == CALLS else HANGS,
        "names_rank": f"{culprits}/{CALLS}",
        "own_exception_first": f"{leading}/{CALLS}",
    }


def named_rank(text: str) -> int | None:
    """The rank that a launcher says is the one that failed, in its own words."""
    for pattern in (
        r"rank (\d+) failed first",  # labkit
        r"Root Cause.*?rank\s*: (\d+)",  # torchrun, and accelerate which uses it
        r"\[(\d+):apply\]",  # ipyparallel
    ):
        if found := re.search(pattern, text, re.DOTALL):
            return int(found[1])
    return None


def leading_exception(text: str) -> str:
    """The first line that tells of an exception."""
    found = re.search(r"^.*\w(Error|Exception): .*$", text, re.MULTILINE)
    return found[0] if found else ""


def orphans(name: str) -> dict[str, object]:
    """How many ranks run after their launching process has been killed."""
    with tempfile.TemporaryDirectory() as folder:

        def pids() -> list[int]:
            words = [path.read_text() for path in Path(folder).rglob("pid-*")]
            return [int(word) for word in words if word]

        with calling(CALLER, [name, "wait", folder, "1"], Path(folder)) as process:
            try:
                wait_until(lambda: len(pids()) == RANKS, CALL_LIMIT_S)
            except AssertionError:
                return {"orphans": f"no {RANKS} ranks within {CALL_LIMIT_S} s"}
            process.send_signal(signal.SIGKILL)
            process.wait()
            return {"orphans": len(wait_until_gone(pids(), GONE_S))}


def table(rows: list[dict[str, object]]) -> str:
    columns = list(max(rows, key=len))
    cells = [columns, *([str(row.get(name, "")) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def measure() -> dict:
    compared = compare()
    rows = [row(name) for name in LAUNCHERS]
    print(table(rows), flush=True)
    return {**compared, "launchers": rows}
