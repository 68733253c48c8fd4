"""What a learner sees when ranks fail, wait for each other, are stopped, or stay."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.browser import lab
from tests.browser.test_first_launch import ARTIFACTS, CELLS, SHOW, TEXT

SETUP = """import time
import torch
import torch.distributed as dist
import labkit as lk"""
RAISE = """def train(worker):
    for step in range(4):
        worker.log(loss=1 / (1 + step))
    if worker.rank == 1:
        raise ValueError("the batch is empty")
    dist.barrier()

lk.launch(train, ranks=3)"""
STALL = """def train(worker):
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    for step in range(3):
        model(torch.randn(8, 4)).sum().backward()
        worker.log(loss=1 / (1 + step))
    if worker.rank == 0:
        model(torch.randn(8, 4))  # an evaluation on rank 0 only
    model(torch.randn(8, 4)).sum().backward()

lk.launch(train, ranks=2)"""
START = """def endless(worker):
    for step in range(10**6):
        worker.log(loss=1 / (1 + step), samples=8)
        time.sleep(0.01)

run = lk.start(endless, ranks=2)"""
RANKS = """%%ranks
x = torch.full((2,), float(worker.rank))
print("before", x)
dist.all_reduce(x)
x"""
SOURCES = [
    SETUP,
    RAISE,
    STALL,
    START,
    "run.wait().status",
    "ranks = lk.Ranks(3)",
    RANKS,
]
RUN_ONE = """async i => {
  window.jupyterapp.shell.currentWidget.content.activeCellIndex = i;
  window.jupyterapp.commands.execute('notebook:run-cell');
}"""
IS_BUSY = f"i => {CELLS}[i].promptNode.textContent.includes('*')"


def run_cell(page, index: int) -> str:
    """Run one cell as a person would; what stands below it at its end."""
    page.evaluate(RUN_ONE, index)
    page.wait_for_timeout(200)
    page.wait_for_function(f"() => !({IS_BUSY})({index})")
    page.evaluate(SHOW, index)
    return page.evaluate(TEXT, index)


@pytest.mark.browser
@pytest.mark.timeout(300)
@pytest.mark.skipif(lab.CHROMIUM is None, reason="Chromium is not installed")
def test_failures_the_stop_button_and_ranks_that_stay(tmp_path: Path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    book = nbformat.v4.new_notebook()
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book.metadata["kernelspec"] = kernel
    book.cells = [nbformat.v4.new_code_cell(source) for source in SOURCES]
    nbformat.write(book, folder / "failures.ipynb")
    ARTIFACTS.mkdir(exist_ok=True)
    with lab.server(folder, tmp_path / "state") as address, lab.browser() as page:
        lab.open_notebook(page, address.format("failures.ipynb"))
        shown = []
        for index, name in enumerate(["", "raise", "stall", "start"]):
            shown.append(run_cell(page, index))
            if name:
                page.wait_for_timeout(500)
                page.screenshot(path=ARTIFACTS / f"failures_{name}.png")
        page.locator(".jupyter-button", has_text="Stop").click()
        waited = run_cell(page, 4)
        page.wait_for_function(
            f"() => !{CELLS}[3].node.querySelector('.jupyter-button')"
        )
        page.evaluate(SHOW, 3)
        page.screenshot(path=ARTIFACTS / "failures_stopped.png")
        run_cell(page, 5)
        ranks = run_cell(page, 6)
        page.screenshot(path=ARTIFACTS / "failures_ranks.png")
    assert "ValueError: the batch is empty" in shown[1]
    assert "rank 1 failed first (after step 3); ranks 0, 2 were stopped" in shown[1]
    assert "(buffers); rank 1 all_reduce #" in " ".join(shown[2].split())
    assert "stopped by you at step" in waited
    assert "'stopped'" in waited
    assert "rank 2\n  before tensor([2., 2.])\n  Out: tensor([3., 3.])" in ranks
