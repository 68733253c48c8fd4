"""Brings notebooks into the form in which they are committed, or checks that they are.

    python -m tests.notebooks.normalize [--check] PATH...

Two runs of a notebook then differ only where its results do: cells have fixed ids, one
kernel name, no widget state, no times of execution.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat

WIDGET = "application/vnd.jupyter.widget-view+json"
CELL_METADATA = ("tags",)  # everything else depends on who saved the notebook


def normalized(text: str) -> str:
    """The committed form of a notebook's JSON text."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.nbformat_minor = 5
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )
    count = 0
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index:02d}"
        cell.metadata = nbformat.from_dict(
            {key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata}
        )
        cell.pop("attachments", None)
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            count += 1
            cell.execution_count = count
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET, None)
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
        cell.outputs = joined_streams(cell.outputs)
    return nbformat.writes(notebook) + "\n"


def joined_streams(outputs: list) -> list:
    """Outputs with neighbouring pieces of one stream put together."""
    joined: list = []
    for output in outputs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and output.output_type == last.output_type == "stream"
            and output.name == last.name
        ):
            last.text += output.text
        else:
            joined.append(output)
    return joined


def find(paths: list[Path]) -> list[Path]:
    """The notebooks named, and those in the folders named."""
    found = []
    for path in paths:
        found += sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    changed = []
    for path in find(arguments.paths):
        text = path.read_text(encoding="utf-8")
        wanted = normalized(text)
        if wanted != text:
            changed.append(path)
            if not arguments.check:
                path.write_text(wanted, encoding="utf-8")
    for path in changed:
        print(f"{path}: {'is not' if arguments.check else 'brought'} in committed form")
    return 1 if changed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
