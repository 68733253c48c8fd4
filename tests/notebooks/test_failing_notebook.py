"""A notebook whose ranks deadlock, under nbval: it ends soon and says why."""

from __future__ import annotations

import subprocess
import sys

import nbformat
import psutil

DEADLOCK = """import labkit as lk
import torch, torch.distributed as dist

def train(worker):
    if worker.rank == 0:
        dist.all_reduce(torch.ones(1))

lk.launch(train, ranks=2, live=False)"""
KILLED = """import os
lk.launch(lambda worker: os.kill(os.getpid(), 9), ranks=1, live=False)"""


def test_a_deadlock_and_a_killed_rank_fail_their_cells_with_labkits_words(tmp_path):
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(source) for source in (DEADLOCK, KILLED, "print(1)")
    ]
    path = tmp_path / "deadlock.ipynb"
    nbformat.write(book, path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env",
         "-p", "no:cacheprovider", "--timeout=100", str(path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 finished after 0 collectives, rank 0 is waiting" in done.stdout
    assert "rank 0 was killed from outside, by signal 9" in done.stdout
    assert "2 failed, 1 passed" in done.stdout
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before
