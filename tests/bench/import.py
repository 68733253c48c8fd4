"""How long `import labkit` takes in a fresh interpreter, and that it loads no torch."""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = """
import sys, time
began = time.perf_counter()
import labkit
print(time.perf_counter() - began, "torch" in sys.modules)
"""
REPEATS = 11
TARGET_S = 0.15


def measure() -> dict:
    times, torch_loaded = [], False
    for _ in range(REPEATS):
        output = subprocess.check_output([sys.executable, "-c", CODE], text=True)
        seconds, loaded = output.split()
        times.append(float(seconds))
        torch_loaded |= loaded == "True"
    median = statistics.median(times)
    return {
        "import_s": round(median, 4),
        "worst_s": round(max(times), 4),
        "torch_loaded": torch_loaded,
        "target_s": TARGET_S,
        "met": median <= TARGET_S and not torch_loaded,
    }
