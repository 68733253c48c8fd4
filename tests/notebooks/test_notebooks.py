"""Course notebooks are in committed form, well built, and really compared by nbval."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks import structure
from tests.notebooks.normalize import normalized

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request) -> Path:
    return request.param


def test_there_are_notebooks():
    names = [path.stem for path in NOTEBOOKS]
    assert names == sorted(names)
    assert {"00_first_launch", "02_data_parallel"} <= set(names)


def test_a_notebook_is_in_committed_form(path):
    text = path.read_text(encoding="utf-8")
    assert normalized(text) == text


def test_a_notebook_is_valid_and_well_built(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    assert structure.problems(path) == []


def test_live_figures_are_kept_as_pictures(path):
    outputs = [
        output
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "labkit: loss" in output.get("data", {}).get("text/plain", "")
    ]
    assert outputs
    assert all(len(output.data["image/png"]) > 10_000 for output in outputs)


def good() -> list:
    """Cells of a lesson that has every part."""
    setup = new_code_cell(structure.SETUP, execution_count=1)
    checked = new_code_cell("print('sum:', 1 + 1)", execution_count=2)
    checked.outputs = [new_output("stream", name="stdout", text="sum: 2\n")]
    checked.metadata["tags"] = [structure.CHECKED]
    opening = "# Title\n**You will be able to**\n**Needs**: 1 rank\n**Predict**: it"
    closing = "## Summary\n**Try next**\n**References**"
    return [
        new_markdown_cell(opening),
        setup,
        new_markdown_cell("Prose."),
        checked,
        new_markdown_cell(closing),
    ]


def save(folder: Path, cells: list) -> Path:
    path = folder / "lesson.ipynb"
    path.write_text(normalized(nbformat.writes(new_notebook(cells=cells))))
    return path


def test_a_good_lesson_has_no_problems(tmp_path):
    assert structure.problems(save(tmp_path, good())) == []


def long_code(cells):
    cells[3].source = "x = 1\n" * 30


def never_run(cells):
    cells[3].execution_count = None


def three_in_a_row(cells):
    cells[2:2] = [new_code_cell("1", execution_count=1) for _ in range(2)]


def an_error(cells):
    cells[3].outputs.append(
        new_output("error", ename="E", evalue="", traceback=["E"]),
    )


def unstable_digits(cells):
    cells[3].outputs[0].text = "loss: 2.50048\n"


def nothing_printed(cells):
    cells[3].outputs = []


def no_prediction(cells):
    cells[0].source = cells[0].source.replace("**Predict**", "")


def another_setup(cells):
    cells[1].source = "import labkit"


def nothing_checked(cells):
    cells[3].metadata["tags"] = []


def long_prose(cells):
    cells[2].source = "word " * 200


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (long_code, "lines of code"),
        (never_run, "not executed"),
        (three_in_a_row, "a third code cell in a row"),
        (an_error, "ends in an error"),
        (unstable_digits, "digits that will differ"),
        (nothing_printed, "is checked but prints nothing"),
        (no_prediction, "lacks a prediction"),
        (another_setup, "not the set-up cell"),
        (nothing_checked, "no cell is checked"),
        (long_prose, "200 words of prose"),
    ],
)
def test_each_problem_is_found(tmp_path, damage, said):
    cells = good()
    damage(cells)
    assert said in "\n".join(structure.problems(save(tmp_path, cells)))


def test_normalizing_twice_changes_nothing_and_drops_what_differs(tmp_path):
    cells = good()
    cells[3].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00"}
    cells[3].execution_count = 17
    bundle = {"text/plain": "Button()", "application/vnd.jupyter.widget-view+json": {}}
    cells[3].outputs = [
        new_output("display_data", bundle),
        new_output("stream", name="stdout", text="a\n"),
        new_output("stream", name="stdout", text="b\n"),
    ]
    notebook = new_notebook(cells=cells, metadata={"widgets": {"state": {}}})
    text = normalized(nbformat.writes(notebook))
    assert normalized(text) == text
    again = nbformat.reads(text, as_version=4)
    assert "widgets" not in again.metadata
    assert again.cells[3].metadata == {"tags": [structure.CHECKED]}
    assert again.cells[3].execution_count == 2
    assert again.cells[3].outputs[0].data == {"text/plain": "Button()"}
    assert again.cells[3].outputs[1].text == "a\nb\n"
    assert [cell.id for cell in again.cells[:2]] == ["cell-00", "cell-01"]


def nbval(path: Path) -> subprocess.CompletedProcess:
    """nbval as `make test` calls it."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert "--nbval-lax --nbval-current-env" in makefile
    assert "--nbval-cell-timeout=" in makefile
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env",
         "--nbval-cell-timeout=60", "-p", "no:cacheprovider", path],
        capture_output=True, text=True, cwd=path.parent, check=False,
    )  # fmt: skip


def test_a_changed_result_fails_and_an_unchanged_one_passes(tmp_path):
    cells = good()
    cells[3].source = (
        "run = lk.launch(lambda worker: worker.rank, ranks=2, live=False)\n"
        "print('sum:', sum(run.results.values()))"
    )
    cells[3].outputs[0].text = "sum: 1\n"
    passed = nbval(save(tmp_path, cells))
    assert passed.returncode == 0, passed.stdout
    cells[3].outputs[0].text = "sum: 3\n"
    failed = nbval(save(tmp_path, cells))
    assert failed.returncode == 1
    assert "1 failed, 1 passed" in failed.stdout
    assert "sum: 3" in failed.stdout
