"""A warm `ranks.run` of an empty function on four ranks, beside a warm `lk.launch`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import labkit as lk

RANKS = 4
ROUNDS = 50
TARGET_S = 0.020


def empty(worker: object) -> None:
    """What both run."""


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure() -> dict:
    kept, fresh = [], []
    with lk.Ranks(RANKS) as ranks:
        ranks.run(empty)
        lk.launch(empty, RANKS)
        for _ in range(ROUNDS):
            kept.append(timed(lambda: ranks.run(empty)))
            fresh.append(timed(lambda: lk.launch(empty, RANKS)))
    return {
        "ranks_run_s": round(statistics.median(kept), 4),
        "longest_s": round(max(kept), 4),
        "launch_s": round(statistics.median(fresh), 4),
        "rounds": ROUNDS,
        "target_s": TARGET_S,
        "met": statistics.median(kept) <= TARGET_S,
    }
