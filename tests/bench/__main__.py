"""`python -m tests.bench NAME`: run one measurement and print it as a JSON line."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("name", choices=NAMES)
    name = parser.parse_args(sys.argv[1:2]).name
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state  # not among the user's own runs
        bench = importlib.import_module(f"tests.bench.{name}")
        measured = bench.measure(**options(bench, name))
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    print(json.dumps({"bench": name, **measured, "machine": machine}))
    sys.exit(0 if measured["met"] else 1)


def options(bench: ModuleType, name: str) -> dict[str, Any]:
    """What the command line says to a bench that has options."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench {name}")
    if hasattr(bench, "add_options"):
        bench.add_options(parser)
    return vars(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    main()
