"""Imports go down only. The last test proves that this one can fail."""

from __future__ import annotations

import ast
from pathlib import Path

import labkit

PACKAGE = Path(labkit.__file__).parent
# What each package may import of labkit and of the heavy libraries. A star marks what
# a package may import inside a function only, to be loaded when it is first used.
ALLOWED = {
    "core": {"core", "orjson"},
    "worker": {"core", "worker", "torch", "numpy", "cloudpickle", "sklearn"},
    "view": {
        "core", "view", "matplotlib", "PIL", "numpy", "IPython", "ipywidgets",
    },
    "driver": {
        "core", "driver", "view", "cloudpickle", "numpy", "pandas", "pynvml", "IPython",
        "packaging", "__version__",
    },
}  # fmt: skip
WATCHED = {
    "torch", "matplotlib", "PIL", "numpy", "pandas", "pynvml", "IPython", "ipywidgets",
    "cloudpickle", "sklearn", "orjson", "packaging",
}  # fmt: skip
# What a file holds for ranks only: a function that is sent to them imports it there.
IN_RANKS = {"driver/trial.py": {"torch"}}


def imports(source: str) -> set[str]:
    """Names of imported modules, those under TYPE_CHECKING left out."""
    tree = ast.parse(source)
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(package: str, source: str, file: str = "") -> list[str]:
    """Imports that the package, or this file of it, may not make."""
    allowed = ALLOWED[package] | IN_RANKS.get(file, set())
    wrong = []
    for name in sorted(imports(source)):
        top, *rest = name.split(".")
        target = rest[0] if top == "labkit" and rest else top
        watched = top == "labkit" or target in WATCHED
        if watched and target not in allowed:
            wrong.append(name)
    return wrong


def test_imports_go_down_only():
    wrong = {
        file: bad
        for package in ALLOWED
        for path in (PACKAGE / package).rglob("*.py")
        if (file := path.relative_to(PACKAGE).as_posix())
        if (bad := violations(package, path.read_text(), file))
    }
    assert wrong == {}


def test_every_package_has_a_floor():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(ALLOWED)


def test_a_violation_is_found():
    assert violations("core", "import torch") == ["torch"]
    assert violations("driver", "import torch", "driver/run.py") == ["torch"]
    assert violations("driver", "from labkit.worker import entry") == [
        "labkit.worker.entry"
    ]
    assert violations("worker", "def f():\n    import labkit.driver.run") == [
        "labkit.driver.run"
    ]
    assert violations("view", "from labkit.core import events\nimport numpy") == []
