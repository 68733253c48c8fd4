"""Cells run in a real kernel, one after the other, as JupyterLab would."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.manager import KernelManager

CELL_TIMEOUT_S = 90


@dataclass
class Cell:
    """What one cell brought: streams joined, bundles, updates of bundles, its error."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict] = field(default_factory=list)
    updates: list[dict] = field(default_factory=list)
    result: str | None = None
    error: list[str] | None = None


class Kernel:
    """A kernel and the cells that were sent to it."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def send(self, source: str) -> str:
        """Send a cell without waiting; the id of its request."""
        return self.client.execute(source)

    def run(self, source: str) -> Cell:
        """Run a cell to its end."""
        return self.collect(self.send(source))

    def collect(self, request: str, until: str | None = None) -> Cell:
        """What the cell brings, to its end or until it has printed `until`."""
        cell = Cell()
        deadline = time.monotonic() + CELL_TIMEOUT_S
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                return cell
            take(cell, kind, content)
            if until is not None and until in cell.stdout:
                return cell

    def interrupt(self) -> None:
        """What the stop button does: SIGINT to the kernel's process group."""
        self.manager.interrupt_kernel()


def take(cell: Cell, kind: str, content: dict) -> None:
    if kind == "stream":
        name = content["name"]
        setattr(cell, name, getattr(cell, name) + content["text"])
    elif kind == "display_data":
        cell.displays.append(content["data"])
    elif kind == "update_display_data":
        cell.updates.append(content["data"])
    elif kind == "execute_result":
        cell.result = content["data"]["text/plain"]
    elif kind == "error":
        cell.error = content["traceback"]


@contextmanager
def started(folder: Path) -> Iterator[Kernel]:
    """A kernel in a folder, shut down at the end."""
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel(cwd=str(folder))
    kernel = Kernel(manager)
    try:
        yield kernel
    finally:
        kernel.client.stop_channels()
        manager.shutdown_kernel(now=True)
