"""Rounds of random faults: is the culprit named, soon, and is nothing left behind?

    python -m tests.bench faults --rounds 100 --seed 1

Most rounds go through one launching process, as cells of one kernel do; each round in
which the kernel is killed has a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults import (
    INTERRUPTED,
    KERNEL_KILLED,
    KINDS,
    LAUNCH_LIMIT_S,
    MISMATCHES,
    SIGNALS,
    WIDTH,
    Answer,
    Fault,
    LaunchProcess,
)
from tests.processes import wait_until

GONE_S = 2  # what has not gone by then is an orphan
MOST_STEPS = 12  # before a fault
STALL_S = {"hang": 2.0} | dict.fromkeys(MISMATCHES, 5.0)
LIMIT_S = {"raise": 2.0, "exit": 1.0, KERNEL_KILLED: 2.0, INTERRUPTED: 2.0}
LIMIT_S |= dict.fromkeys(SIGNALS, 1.0)  # those with a stall_s have no limit here
FROM_OUTSIDE = {KERNEL_KILLED: signal.SIGKILL, INTERRUPTED: signal.SIGINT}
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What became of one fault.

    Attributes:
        named: whether the launch said the right thing of the right rank.
        detection_s: from the fault to the end of the launch; for a killed kernel, until
            nothing of it runs. None when there was no end.
        orphans: processes that outlived it.
        files: that it left in the temporary folder and in shared memory.
        new_descriptors: of the launching process, compared with its first launch.
        words: what the launch said, or what hung.
    """

    fault: Fault
    named: bool
    detection_s: float | None
    orphans: list[int]
    files: list[str]
    new_descriptors: int
    words: str

    @property
    def right(self) -> bool:
        """Whether all but the time is as it should be."""
        left = self.orphans or self.files or self.new_descriptors
        return self.named and not left

    @property
    def in_time(self) -> bool:
        limit_s = LIMIT_S.get(self.fault.kind)
        if self.detection_s is None:
            return False
        return limit_s is None or self.detection_s <= limit_s


def choose(rounds: int, seed: int) -> list[Fault]:
    """Random faults; of each kind equally many, give or take one."""
    chance = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < rounds:
        kinds += chance.sample(KINDS, len(KINDS))
    return [choose_one(kind, chance) for kind in kinds[:rounds]]


def choose_one(kind: str, chance: random.Random) -> Fault:
    ranks = chance.randint(2, 4)
    return Fault(
        kind=kind,
        ranks=ranks,
        rank=chance.randrange(ranks),
        step=chance.randint(0, MOST_STEPS),
        exit_status=chance.choice([0, 1, 3]),
        stall_s=STALL_S.get(kind, 30.0),
    )


def play(faults: list[Fault], folder: Path) -> Iterator[Round]:
    """Play the rounds, each of them once the one before has been looked at."""
    process = LaunchProcess(folder / "launches")
    for number, fault in enumerate(faults):
        own = folder / f"round-{number}"
        own.mkdir()
        if fault.kind == KERNEL_KILLED:
            with LaunchProcess(own / "launches") as victim:
                yield play_one(victim, fault, own)
            continue
        if not process.alive:  # the round before hung
            process.end()
            process = LaunchProcess(own / "launches")
        yield play_one(process, fault, own)
    process.end()
    assert not outlive(lambda: process.left_over([])), "ranks outlived the kernel"
    assert not outlive(process.files_left), "files outlived the kernel"


def play_one(
    process: LaunchProcess, fault: Fault, folder: Path, limit_s: float = LAUNCH_LIMIT_S
) -> Round:
    """Launch, have the fault, and look at what was said and what is left."""
    shared = shared_memory()
    process.send(fault, folder, limit_s)
    if fault.kind in FROM_OUTSIDE:
        strike(process, fault, folder / "struck")
    answer = process.answer()
    pids = answer.pids if answer else []
    orphans = outlive(lambda: process.left_over(pids))
    gone_at = time.time()
    files = outlive(process.files_left)
    files |= abandoned(shared_memory() - shared)
    ended_at = gone_at if fault.kind == KERNEL_KILLED else answer and answer.ended_at
    return Round(
        fault=fault,
        named=names_culprit(fault, answer),
        detection_s=seconds_since(folder / "struck", ended_at),
        orphans=sorted(orphans),
        files=sorted(map(str, files)),
        new_descriptors=process.new_descriptors(answer) if answer else 0,
        words=answer.words if answer else process.stderr.read_text(),
    )


def strike(process: LaunchProcess, fault: Fault, struck: Path) -> None:
    """Have a fault that comes from outside, once its rank is at its step."""
    wait_until(lambda: struck.exists() or process.answered, 2 * LAUNCH_LIMIT_S)
    now = struck.with_name("now")
    now.write_text(repr(time.time()))
    now.replace(struck)  # whatever the rank may still write goes to its own file
    process.process.send_signal(FROM_OUTSIDE[fault.kind])


def seconds_since(struck: Path, ended_at: float | None) -> float | None:
    """From the fault to the end, None when one of them did not come."""
    if ended_at is None or not struck.exists():
        return None
    return ended_at - float(struck.read_text())


def names_culprit(fault: Fault, answer: Answer | None) -> bool:
    """Whether the launch said the right thing of the right rank."""
    if fault.kind == KERNEL_KILLED:
        return answer is None  # nobody is left who could say anything
    if answer is None:
        return False
    if fault.kind == INTERRUPTED:
        return answer.status == "stopped" and "stopped by you" in answer.printed
    by_itself = fault.kind not in (*MISMATCHES, "hang")
    if by_itself and (answer.error, answer.rank) != ("RankFailed", fault.rank):
        return False
    return re.search(expected(fault), answer.text, re.DOTALL) is not None


def expected(fault: Fault) -> str:
    """A pattern of what a launch must say of a fault that a rank has."""
    rank = f"rank {fault.rank}"
    if fault.kind in SIGNALS:
        return rf"{rank} was (ended|killed)[^.]* by signal \d+ \({fault.kind}\)"
    return {
        "raise": rf"^Traceback.*\nRuntimeError: the fault of {rank}\n\n{rank} failed",
        "exit": rf"{rank} ended without a result \(exit status {fault.exit_status}\)",
        "other kind": rf"different collectives: .*{rank} broadcast #\d+ of {WIDTH} ",
        "other size": rf"different collectives: .*{rank} all_reduce #\d+ of "
        f"{2 * WIDTH} ",
        "returns early": rf"{rank} finished after \d+ collectives, rank \d is waiting",
        "hang": rf"waits in all_reduce #\d+ of {WIDTH} float32, but {rank} has not",
    }[fault.kind]


def outlive(find: Callable[[], set]) -> set:
    """What is still found after the time that it has to go away."""
    found: set = set()

    def is_gone() -> bool:
        nonlocal found
        found = find()
        return not found

    with contextlib.suppress(AssertionError):
        wait_until(is_gone, GONE_S)
    return found


def shared_memory() -> set[Path]:
    return set(SHARED_MEMORY.glob("*"))


def abandoned(paths: set[Path]) -> set[Path]:
    """Those that no process has open or mapped; others belong to somebody else."""
    if not paths:
        return paths
    held = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            files = [*process.open_files(), *process.memory_maps()]
            held |= {Path(file.path) for file in files}
    return {path for path in paths - held if path.exists()}


# What is printed


def table(rounds: list[Round]) -> str:
    """A line per kind of fault."""
    lines = [f"{'fault':15}rounds  culprit  worst s  median s  limit"]
    for kind in KINDS:
        own = [one for one in rounds if one.fault.kind == kind]
        if own:
            lines.append(table_line(kind, own))
    return "\n".join(lines)


def table_line(kind: str, rounds: list[Round]) -> str:
    times = [one.detection_s for one in rounds if one.detection_s is not None]
    worst = f"{max(times):.2f}" if times else "-"
    median = f"{statistics.median(times):.2f}" if times else "-"
    named = sum(one.named for one in rounds)
    if kind in LIMIT_S:
        limit = f"{LIMIT_S[kind]:g} s"
    else:
        limit = f"none; stall_s is {STALL_S[kind]:g}"
    share = f"{named}/{len(rounds)}"
    return f"{kind:15}{len(rounds):6}{share:>9}{worst:>9}{median:>10}  {limit}"


def failure(one: Round) -> str:
    """What was not as it should be, and all that is known of it."""
    return (
        f"NOT AS IT SHOULD BE: {one.fault}: culprit "
        f"{'named' if one.named else 'not named'}, {one.detection_s} s, orphans "
        f"{one.orphans}, files {one.files}, {one.new_descriptors} more descriptors; "
        f"what was said:\n{one.words}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, help="repeats the faults of a run")


def measure(rounds: int, seed: int | None) -> dict:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"{rounds} rounds, --seed {seed}", flush=True)
    played = []
    with tempfile.TemporaryDirectory() as folder:
        for one in play(choose(rounds, seed), Path(folder)):
            played.append(one)
            if not (one.right and one.in_time):
                print(failure(one), flush=True)
    totals = {
        "culprits": sum(one.named for one in played),
        "in_time": sum(one.in_time for one in played),
        "orphans": sum(len(one.orphans) for one in played),
        "leaked_files": sum(len(one.files) for one in played),
        "leaked_descriptors": max((one.new_descriptors for one in played), default=0),
    }
    met = all(one.right and one.in_time for one in played)
    print(table(played))
    print(", ".join(f"{name} {number}" for name, number in totals.items()))
    print(
        f"target: {rounds}/{rounds} culprits in time, 0 orphans, 0 leaked files, "
        f"0 leaked descriptors: {'met' if met else 'not met'}"
    )
    return {"rounds": rounds, "seed": seed, **totals, "met": met}
