"""A launch of two ranks that shows whether they can add numbers over a backend."""

from __future__ import annotations

import shutil
import time
from typing import Any

from labkit.driver.launcher import launch

TIMEOUT_S = 180
NUM_VALUES = 250_000  # 1 MB of float32


def try_all_reduce(backend: str, device: str) -> tuple[str, str, str]:
    """Status, what was found, and a remedy; raises what `launch` raises."""
    started = time.perf_counter()
    run = launch(
        adder(NUM_VALUES), 2, backend=backend, device=device, live=False,
        timeout_s=TIMEOUT_S, name="doctor",
    )  # fmt: skip
    launch_s = time.perf_counter() - started
    results = [run.results[rank] for rank in range(2)]
    sums = sorted({value for low, high, _ in results for value in (low, high)})
    if sums != [3.0]:
        remedy = f"install PyTorch again: its {backend} delivers wrong numbers"
        return "failed", f"1 + 2 became {sums}", remedy
    shutil.rmtree(run.path, ignore_errors=True)  # else lk.runs() would list it
    took_ms = max(took_s for *_, took_s in results) * 1e3
    return "ok", f"sum right; {took_ms:.1f} ms for 1 MB, {launch_s:.1f} s to launch", ""


def adder(num_values: int) -> Any:
    """What ranks run. As an inner function it travels by value, and they need not
    import this module, which loads the kernel's side."""

    def add(worker: Any) -> tuple[float, float, float]:
        import time

        import torch

        values = torch.full((num_values,), worker.rank + 1.0, device=worker.device)
        torch.distributed.all_reduce(values)
        low, high = float(values.min()), float(values.max())
        started = time.perf_counter()
        torch.distributed.all_reduce(values)
        float(values[0])  # waits for the GPU
        return low, high, time.perf_counter() - started

    return add
