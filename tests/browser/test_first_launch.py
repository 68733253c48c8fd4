"""Notebook 00 in the real JupyterLab: run from the menu, watched by a browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest

from tests.browser import lab

ROOT = Path(__file__).parents[2]
ARTIFACTS = ROOT / "artifacts"
RUN_LIMIT_S = 120
CELLS = "window.jupyterapp.shell.currentWidget.content.widgets"
# The source of the live picture in a cell, and whether any cell still runs.
LIVE_PICTURE = f"i => {CELLS}[i].outputArea.node.querySelector('img')?.src ?? null"
BUSY = (
    f"() => {CELLS}.some(cell => cell.promptNode?.textContent.includes('*'))"
    f" || {CELLS}.some(cell => cell.model.type === 'code' && !cell.prompt)"
)
TEXT = f"i => {CELLS}[i].outputArea?.node.innerText ?? ''"
SHOW = f"i => {CELLS}[i].node.scrollIntoView({{block: 'start'}})"


def cell_with(words: str) -> int:
    """The number of the code cell that contains the words."""
    notebook = nbformat.read(ROOT / "notebooks/00_first_launch.ipynb", as_version=4)
    (index,) = [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and words in cell.source
    ]
    return index


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.skipif(lab.CHROMIUM is None, reason="Chromium is not installed")
def test_notebook_00_runs_and_its_figure_lives(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(ROOT / "notebooks/00_first_launch.ipynb", folder)
    training, summary = cell_with("def train("), cell_with("run.summary")
    problems: list[str] = []
    pictures: list[str] = []
    ARTIFACTS.mkdir(exist_ok=True)
    with lab.server(folder, tmp_path / "state") as address, lab.browser() as page:
        page.on("pageerror", lambda error: problems.append(str(error)))
        lab.open_notebook(page, address.format("00_first_launch.ipynb"))
        page.evaluate("() => window.jupyterapp.commands.execute("
                      "'notebook:clear-all-cell-outputs')")  # fmt: skip
        lab.run_all_from_the_menu(page)
        watch(page, training, pictures)
        page.evaluate(SHOW, training)
        page.screenshot(path=ARTIFACTS / "00_first_launch.png")
        text = page.evaluate(TEXT, summary)
        outputs = [page.evaluate(TEXT, index) for index in range(summary + 3)]
        page.evaluate(SHOW, summary)
        page.screenshot(path=ARTIFACTS / "00_first_launch_summary.png")
    assert problems == []
    assert len(pictures) >= 4, "the blank picture, and at least three changes"
    assert {"steps", "loss", "memory_bytes"} <= set(text.split())
    assert text.split().count("150") == 4, "four ranks of 150 steps"
    assert any("the loss has fallen by more than 2: True" in out for out in outputs)
    assert any("status: finished" in out for out in outputs)
    assert not any("Traceback" in out for out in outputs)


def watch(page, training: int, pictures: list[str]) -> None:
    """Collect the different pictures that the cell shows until all cells have run."""
    for _ in range(RUN_LIMIT_S * 10):
        picture = page.evaluate(LIVE_PICTURE, training)
        if picture and picture not in pictures:
            pictures.append(picture)
            if len(pictures) == 3:
                page.evaluate(SHOW, training)
                page.screenshot(path=ARTIFACTS / "00_first_launch_live.png")
        if not page.evaluate(BUSY):
            return
        page.wait_for_timeout(100)
    raise TimeoutError(f"the notebook did not end within {RUN_LIMIT_S} s")
