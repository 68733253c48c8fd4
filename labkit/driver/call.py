"""Checks the call that ranks are to make, before anything starts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

SYSTEMS = ("linux", "darwin")
NOT_RUN = {
    "an async function": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "an async generator function": inspect.isasyncgenfunction,
}


def check_call(function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse what could not be called in a rank, before anything starts."""
    if sys.platform not in SYSTEMS:
        raise OSError(
            "labkit's ranks need Linux or macOS; on Windows use WSL2, or a hosted "
            "notebook"
        )
    if not callable(function):
        raise TypeError(
            "launch takes a function whose first argument is the worker, not "
            f"{function!r}"
        )
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise TypeError(
            f"args is a tuple and kwargs a dict, not {args!r} and {kwargs!r}"
        )
    for kind, is_kind in NOT_RUN.items():
        if is_kind(function):
            raise TypeError(
                f"{getattr(function, '__name__', function)} is {kind}: a rank would "
                "call it and nothing would run. Write an ordinary function, and run "
                "it from there"
            )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise TypeError(
            f"{name}{signature} cannot be called as {name}(worker, "
            f"{shown_arguments(args, kwargs)}): {error}. Pass arguments with "
            "args=(...) and kwargs={...}; the first one is always the worker"
        ) from None


def shown_arguments(args: tuple, kwargs: dict[str, Any]) -> str:
    return ", ".join(["..." for _ in args] + [f"{name}=..." for name in kwargs])


def run_name(function: Callable, name: str | None) -> str:
    if name is None:
        name = getattr(function, "__name__", type(function).__name__).strip("<>")
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"name must be a text, not {name!r}")
    return " ".join(name.split())
