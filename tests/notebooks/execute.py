"""Executes notebooks in place, each in a fresh kernel in its own folder.

python -m tests.notebooks.execute PATH...
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tests.notebooks.normalize import find

CELL_TIMEOUT_S = 180


def execute(path: Path) -> float:
    """Run every cell and save the outputs; the seconds it took."""
    notebook = nbformat.read(path, as_version=4)
    began = time.monotonic()
    NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    nbformat.write(notebook, path)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    for path in find(parser.parse_args().paths):
        print(f"{path}: {execute(path):.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
