"""A short two-column table: HTML in a notebook, aligned text elsewhere."""

from __future__ import annotations

import html

from labkit.view.live import in_notebook


def show(rows: list[tuple[str, str]], caption: str) -> None:
    """Display or print the rows under a caption."""
    text = as_text(rows, caption)
    if in_notebook():
        from IPython.display import display

        display({"text/plain": text, "text/html": as_html(rows, caption)}, raw=True)
    else:
        print(text)


def as_text(rows: list[tuple[str, str]], caption: str) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [caption, *(f"  {name:<{width}}  {value}" for name, value in rows)]
    )


def as_html(rows: list[tuple[str, str]], caption: str) -> str:
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    title = html.escape(caption)
    return f"<table><caption style='text-align:left'>{title}</caption>{cells}</table>"
