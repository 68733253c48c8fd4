"""The names that users rely on, and that `import labkit` costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import labkit as lk


def test_import_loads_nothing_heavy():
    code = "import sys, labkit; print(*sys.modules)"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    tops = {name.split(".")[0] for name in names}
    heavy = {"torch", "numpy", "pandas", "matplotlib", "ipywidgets", "IPython", "PIL"}
    assert tops & heavy == set()
    assert {name for name in names if name.startswith("labkit")} == {"labkit"}


def test_launching_loads_no_torch_in_the_kernel():
    code = (
        "import sys, labkit as lk\n"
        "run = lk.launch(lambda worker: worker.rank, ranks=2)\n"
        "assert run.results[1] == 1\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], text=True, capture_output=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
    assert done.stderr == ""


def test_every_public_name_can_be_fetched():
    for name in lk.__all__:
        assert getattr(lk, name).__name__ == name
    assert set(lk.__all__) <= set(dir(lk))


def test_editors_are_told_the_same_names():
    stub = Path(lk.__file__).with_suffix(".pyi").read_text()
    told = {
        (alias.asname, node.module)
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == set(lk.MODULES.items())


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(AttributeError, match=r"labkit has no 'lunch'; it has .*launch"):
        _ = lk.lunch


def test_public_things_say_what_they_are():
    assert [name for name in lk.__all__ if not getattr(lk, name).__doc__] == []
