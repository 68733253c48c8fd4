"""What every course notebook must look like. `problems` lists where one does not."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

SETUP = "import labkit as lk\n\nmachine = lk.setup()"
CHECKED = "nbval-check-output"
MAX_CODE_LINES = 25
MAX_PROSE_WORDS = 120
MAX_BYTES = 600_000


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a notebook, with the number of the cell."""
    cells = nbformat.read(path, as_version=4).cells
    found = [
        f"cell {i}: {what}" for i, cell in enumerate(cells) for what in wrong(cell)
    ]
    found += order(cells)
    found += parts(cells)
    if path.stat().st_size > MAX_BYTES:
        found.append(f"{path.stat().st_size} bytes, more than {MAX_BYTES}")
    return found


def wrong(cell: nbformat.NotebookNode) -> list[str]:
    """What is wrong with one cell by itself."""
    if cell.cell_type == "markdown":
        words = len(re.findall(r"\w+", cell.source))
        return [f"{words} words of prose"] if words > MAX_PROSE_WORDS else []
    found = []
    lines = cell.source.count("\n") + 1
    if lines > MAX_CODE_LINES:
        found.append(f"{lines} lines of code")
    if cell.execution_count is None:
        found.append("not executed, so nothing is compared")
    if any(output.output_type == "error" for output in cell.outputs):
        found.append("ends in an error")
    if any(output.get("name") == "stderr" for output in cell.outputs):
        found.append("writes to stderr")
    if CHECKED in cell.metadata.get("tags", []):
        text = "".join(output.get("text", "") for output in cell.outputs)
        if not text.strip():
            found.append("is checked but prints nothing")
        if re.search(r"\b\d+\.\d{3,}|0x[0-9a-f]{6,}", text):
            found.append("is checked but prints digits that will differ")
    return found


def order(cells: list) -> list[str]:
    """Never more than two code cells in a row; a title first."""
    found = []
    row = 0
    for index, cell in enumerate(cells):
        row = row + 1 if cell.cell_type == "code" else 0
        if row > 2:
            found.append(f"cell {index}: a third code cell in a row")
    if not cells or not cells[0].source.startswith("# "):
        found.append("cell 0: no title")
    return found


def parts(cells: list) -> list[str]:
    """The parts that every lesson has."""
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = [cell for cell in cells if cell.cell_type == "code"]
    wanted = {
        "what the reader will be able to do": "**You will be able to**",
        "needs": "**Needs**:",
        "a prediction": "**Predict**",
        "a summary": "## Summary",
        "what to try next": "**Try next**",
        "references": "**References**",
    }
    found = [f"lacks {what}" for what, words in wanted.items() if words not in prose]
    if not code or code[0].source != SETUP:
        found.append("the first code cell is not the set-up cell")
    if not any(CHECKED in cell.metadata.get("tags", []) for cell in code):
        found.append("no cell is checked")
    return found
