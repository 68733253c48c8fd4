"""`python -m tests.bench NAME`: run one measurement and print it as a JSON line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import tempfile
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args().name
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # not among the user's own runs
        measured = importlib.import_module(f"tests.bench.{name}").measure()
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(json.dumps({"bench": name, **measured, "machine": machine}))


if __name__ == "__main__":
    main()
