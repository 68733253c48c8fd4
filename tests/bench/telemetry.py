"""What `worker.log` costs a DDP step of about 5 ms.

The same ranks run the same loop in short blocks, with logging and without in turn, so
that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import labkit as lk

RANKS = 2
WIDTH = 256
STEP_S = 0.005  # the batch is chosen to make a step of this length
BLOCK_STEPS = 4  # short, as a slow spell of the machine lasts longer than a block
PAIRS = 1500
TARGET = 0.01


def blocks(worker) -> tuple[list[tuple[float, float]], float]:
    """Seconds of neighbouring blocks without and with logging; median of one call."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, WIDTH)

    calls = []

    def block(log: bool) -> float:
        began = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if log:
                stepped = time.perf_counter()
                worker.log(loss=loss, samples=32, tokens=32)
                calls.append(time.perf_counter() - stepped)
        return time.perf_counter() - began

    block(True)
    while block_s(block) < BLOCK_STEPS * STEP_S:
        inputs = torch.cat([inputs, inputs[: max(8, len(inputs) // 4)]])
    pairs = []
    for index in range(PAIRS):
        first = block(index % 2 == 0)  # which comes first must not matter
        second = block(index % 2 == 1)
        pairs.append((second, first) if index % 2 == 0 else (first, second))
    return pairs, statistics.median(calls)


def block_s(block) -> float:
    """Median seconds of a block without logging, the same number on all ranks."""
    seconds = torch.tensor(statistics.median(block(False) for _ in range(5)))
    torch.distributed.broadcast(seconds, src=0)
    return seconds.item()


def measure() -> dict:
    run = lk.launch(blocks, RANKS, live=False)
    pairs, call_s = run.results[0]
    step_s = statistics.median(without for without, _ in pairs) / BLOCK_STEPS
    ratios = [with_log / without for without, with_log in pairs]
    overhead = statistics.median(ratios) - 1
    # of the median, from the quartiles; Gaussian noise has 1.35 deviations between them
    lower, _, upper = statistics.quantiles(ratios, n=4)
    error = 1.25 * (upper - lower) / 1.35 / math.sqrt(PAIRS)
    return {
        "step_ms": round(1000 * step_s, 2),
        "overhead": round(overhead, 4),
        "standard_error": round(error, 4),
        "call_us": round(1e6 * call_s, 1),
        "blocks": f"{PAIRS} pairs of {BLOCK_STEPS} steps",
        "target": TARGET,
        "met": overhead <= TARGET,
    }
