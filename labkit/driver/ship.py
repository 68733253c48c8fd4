"""Packs a function and its arguments so that a fresh process can run them.

cloudpickle carries what lives in cells by value. Added here: the cells' source, so
that a traceback in a rank shows the cell's own lines, and, when something cannot
travel, the name of that thing and the path on which it was reached.
"""

from __future__ import annotations

import dis
import io
import linecache
import os
import sys
import types
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle

from labkit.core.errors import CannotSend

RENAMED = "<dynamic-code>"  # what cloudpickle puts in place of a code's file name
MAX_DEPTH = 12  # of the search for what cannot travel


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """`payload` unpickles to (function, args, kwargs); `sources` by file name."""

    payload: bytes
    sources: dict[str, str]


def pack(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Parcel:
    """Pickle a call for the ranks.

    Raises:
        CannotSend: an object cannot be pickled; names it, its type and the path to it.
    """
    pickler = CellPickler(io.BytesIO())
    try:
        pickler.dump((function, args, kwargs))
    except Exception as error:  # any class's own __reduce__ may raise anything
        raise explain(function, args, kwargs, error) from None
    return Parcel(payload=pickler.file.getvalue(), sources=pickler.sources)


class CellPickler(cloudpickle.Pickler):
    """cloudpickle that keeps the names of code files and collects their sources."""

    def __init__(self, file: io.BytesIO) -> None:
        self.file = file
        self.sources: dict[str, str] = {}
        # before the base's __init__, which reads it once
        self.dispatch_table = ChainMap(
            {types.CodeType: self.reduce_code, io.TextIOWrapper: refuse_file},
            cloudpickle.Pickler.dispatch_table,
        )
        super().__init__(file, protocol=5)

    def reducer_override(self, thing: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(thing, torch.Tensor) and thing.is_cuda:
            raise TypeError(
                "a tensor on a GPU belongs to the kernel's own CUDA context"
            )
        return super().reducer_override(thing)

    def reduce_code(self, code: types.CodeType) -> tuple:
        name = self.source_name(code.co_filename)
        make, values = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
        return make, tuple(
            name if isinstance(value, str) and value == RENAMED else value
            for value in values
        )

    def source_name(self, filename: str) -> str:
        """The name that tracebacks show; the source is kept unless it is on disk."""
        shown = cell_name(filename)
        if shown not in self.sources and not os.path.exists(filename):
            lines = linecache.getlines(filename)
            if lines:
                self.sources[shown] = "".join(lines)
        return shown


def refuse_file(file: io.TextIOWrapper) -> tuple:
    for name in ("stdout", "stderr"):
        if file in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return getattr, (sys, name)  # a rank has its own
    raise TypeError("an open file belongs to the process that opened it")


def cell_name(filename: str) -> str:
    """`Cell In[3]` for the file name under which IPython compiled that cell."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    label = shell and shell.compile.format_code_name(filename)
    return " ".join(label) if label else filename


def explain(
    function: Callable, args: tuple, kwargs: dict[str, Any], error: Exception
) -> CannotSend:
    """The error for the smallest thing that cannot travel."""
    name = getattr(function, "__name__", type(function).__name__)
    roots = [(name, function)]
    roots += [(f"args[{index}]", value) for index, value in enumerate(args)]
    roots += [(f"kwargs[{key!r}]", value) for key, value in kwargs.items()]
    for path, root in roots:
        if not travels(root):
            path, thing, last = smallest(path, root, MAX_DEPTH, {id(root)})
            kind = type(thing).__name__
            reason = failure(thing) or error
            return CannotSend(
                f"cannot send {last} (a {kind}) to the ranks; it is reached from "
                f"{name} through {path}: {reason}. Create it inside {name} instead"
            )
    return CannotSend(f"cannot send {name} to the ranks: {error}")


def travels(thing: Any) -> bool:
    return failure(thing) is None


def failure(thing: Any) -> Exception | None:
    try:
        CellPickler(io.BytesIO()).dump(thing)
    except Exception as error:
        return error
    return None


def smallest(path: str, thing: Any, depth: int, seen: set[int]) -> tuple[str, Any, str]:
    """The deepest part of `thing` that does not travel: its path, itself, its name."""
    for name, step, part in parts(thing):
        if depth and id(part) not in seen and not travels(part):
            seen.add(id(part))
            deeper, found, last = smallest(path + step, part, depth - 1, seen)
            return deeper, found, last if found is not part else name
    return path, thing, path


def parts(thing: Any) -> Iterator[tuple[str, str, Any]]:
    """What `thing` is pickled with: (name, step on the path, part)."""
    if isinstance(thing, types.FunctionType):
        for name, value in reached(thing).items():
            yield name, f" -> {name}", value
    elif isinstance(thing, types.MethodType):
        yield "self", ".__self__", thing.__self__
    elif isinstance(thing, dict):
        for key, value in list(thing.items()):
            yield f"item {key!r}", f"[{key!r}]", value
    elif isinstance(thing, list | tuple | set | frozenset):
        for index, value in enumerate(thing):
            yield f"item {index}", f"[{index}]", value
    elif isinstance(thing, type):
        for name, value in vars(thing).items():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if not name.startswith("__") or isinstance(value, types.FunctionType):
                yield name, f".{name}", value
    else:
        for name, value in getattr(thing, "__dict__", {}).items():
            yield name, f".{name}", value
        yield type(thing).__name__, " -> its class", type(thing)


def reached(function: types.FunctionType) -> dict[str, Any]:
    """Closure variables, globals and defaults that a function carries, by name."""
    found: dict[str, Any] = {}
    for name, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name in global_names(function.__code__):
        if name in function.__globals__:
            found[name] = function.__globals__[name]
    for index, value in enumerate(function.__defaults__ or ()):
        found[f"default {index}"] = value
    return found | (function.__kwdefaults__ or {})


def global_names(code: types.CodeType) -> set[str]:
    """Globals that the code loads, those of functions defined inside it too."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names
