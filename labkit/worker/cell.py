"""Runs the source of a `%%ranks` cell in a rank.

Names that a cell defines live on in `worker.state`, where functions given to
`ranks.run` find them too.
"""

from __future__ import annotations

import ast
import linecache
import sys
from typing import Any

import torch
import torch.distributed as dist

from labkit.worker.worker import Worker


def run_cell(worker: Worker, cell: dict[str, Any]) -> str | None:
    """Run a cell on the ranks that it is meant for.

    Args:
        worker: this rank's handle, `worker` in the cell.
        cell: its `source`, the `name` that tracebacks show, and `ranks`.

    Returns:
        How its last expression shows itself; None when there is none, or it is None.
    """
    if worker.rank not in cell["ranks"]:
        return None
    source, name = cell["source"], cell["name"]
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names = vars(worker.state)
    names.update(worker=worker, torch=torch, dist=dist)
    names["__name__"] = "__main__"
    tree = ast.parse(source, name)
    last = (
        tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    )
    exec(compile(tree, name, "exec"), names)
    offer_to_pickle(names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval"), names)
    return None if value is None else repr(value)


def offer_to_pickle(names: dict[str, Any]) -> None:
    """Let pickle find classes and functions of the notebook, as in `gather_object`."""
    main = sys.modules["__main__"]
    for name, value in names.items():
        if getattr(value, "__module__", None) == "__main__" and not name.startswith(
            "_"
        ):
            setattr(main, name, value)
