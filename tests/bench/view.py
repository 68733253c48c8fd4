"""The share of one core that a kernel spends on a live run: 4 ranks, a log every 5 ms.

Measured in a real kernel, as its whole process time over the run's wall time: reading
telemetry, drawing, and sending pictures to the front end.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.kernel import started

RUN_S = 20
TARGET = 0.05
SETUP = """
import json, time
import labkit as lk

def train(worker, seconds):
    began = time.perf_counter()
    steps = 0
    while time.perf_counter() - began < seconds:
        steps += 1
        worker.log(loss=1 / steps, samples=8, tokens=512)
        time.sleep(max(0.0, began + 0.005 * steps - time.perf_counter()))
    return steps

lk.launch(train, ranks=4, kwargs={"seconds": 1})  # loads matplotlib, warms the nursery
"""
RUN = f"""
cpu, wall = time.process_time(), time.perf_counter()
run = lk.launch(train, ranks=4, kwargs={{"seconds": {RUN_S}}})
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
print(json.dumps([cpu, wall, sum(run.results.values()), run.view.redraws,
                  run.view.cpu_s]))
"""


def measure() -> dict:
    with tempfile.TemporaryDirectory() as folder, started(Path(folder)) as kernel:
        kernel.run(SETUP)
        cell = kernel.run(RUN)
        assert cell.error is None, "\n".join(cell.error)
        cpu_s, wall_s, logs, redraws, drawing_s = json.loads(cell.stdout)
    sent = sum(len(bundle["image/png"]) for bundle in cell.updates)
    return {
        "share_of_a_core": round(cpu_s / wall_s, 4),
        "drawing_alone": round(drawing_s / wall_s, 4),
        "redraws_per_s": round(redraws / wall_s, 2),
        "logs_per_s": round(logs / wall_s),
        "kib_per_redraw": round(sent / 1024 / max(1, len(cell.updates))),
        "target": TARGET,
        "met": cpu_s / wall_s <= TARGET,
    }
