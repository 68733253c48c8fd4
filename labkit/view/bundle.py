"""Shows something in a cell that can be replaced there later, from any thread."""

from __future__ import annotations

from typing import Any


def show(bundle: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """Show a bundle in the cell that runs now; the handle that updates it there."""
    from IPython.display import display

    return display(bundle, raw=True, metadata=metadata, display_id=True)
