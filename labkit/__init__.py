"""labkit: real distributed training from a notebook cell, and a look at every rank.

Importing this loads nothing else; each name is fetched from its module at first use.
`__init__.pyi` tells editors what they are.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

MODULES = {
    "GPT": "labkit.core.models",
    "MLP": "labkit.core.models",
    "setup": "labkit.driver.setup",
    "launch": "labkit.driver.launcher",
    "start": "labkit.driver.launcher",
    "Ranks": "labkit.driver.ranks",
    "Run": "labkit.driver.run",
    "open_run": "labkit.driver.run",
    "runs": "labkit.driver.run",
    "build": "labkit.worker.models.build",
    "batches": "labkit.worker.data.batches",
    "Text": "labkit.worker.data.text",
    "Digits": "labkit.worker.data.digits",
    "LabkitError": "labkit.core.errors",
    "CannotSend": "labkit.core.errors",
    "RankFailed": "labkit.core.errors",
    "ResultUnavailable": "labkit.core.errors",
    "RunDirectoryError": "labkit.core.errors",
    "RunInProgress": "labkit.core.errors",
    "RunStalled": "labkit.core.errors",
    "RunTimedOut": "labkit.core.errors",
    "StartFailed": "labkit.core.errors",
}
__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(
            f"labkit has no {name!r}; it has {', '.join(sorted(MODULES))}"
        )
    value = getattr(importlib.import_module(MODULES[name]), name)
    globals()[name] = value
    return value


def load_ipython_extension(ipython: Any) -> None:
    """Make the `%%ranks` cell magic known, for `%load_ext labkit`."""
    from labkit.driver import magic

    magic.register(ipython)


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULES])
