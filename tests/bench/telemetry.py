"""What `worker.log` costs a DDP step of about 5 ms.

The same ranks run the same loop in short blocks, with logging and without in turn, so
that whatever else the machine does hits both alike.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import labkit as lk

RANKS = 2
WIDTH = 256  # makes a step of about 5 ms
BLOCK_STEPS = 20
PAIRS = 120
TARGET = 0.01


def blocks(worker) -> list[tuple[float, float]]:
    """Seconds of neighbouring blocks without and with logging."""
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, WIDTH)

    def block(log: bool) -> float:
        began = time.perf_counter()
        for _ in range(BLOCK_STEPS):
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if log:
                worker.log(loss=loss, samples=32, tokens=32)
        return time.perf_counter() - began

    block(True), block(False)
    pairs = []
    for index in range(PAIRS):
        first = block(index % 2 == 0)  # which comes first must not matter
        second = block(index % 2 == 1)
        pairs.append((second, first) if index % 2 == 0 else (first, second))
    return pairs


def measure() -> dict:
    run = lk.launch(blocks, RANKS, live=False)
    pairs = run.results[0]
    step_s = statistics.median(without for without, _ in pairs) / BLOCK_STEPS
    overhead = statistics.median(with_log / without for without, with_log in pairs) - 1
    return {
        "step_ms": round(1000 * step_s, 2),
        "overhead": round(overhead, 4),
        "blocks": f"{PAIRS} pairs of {BLOCK_STEPS} steps",
        "target": TARGET,
        "met": overhead <= TARGET,
    }
