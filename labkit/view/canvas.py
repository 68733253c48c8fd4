"""Figures as PNG bytes: fast for a live view, sharp for a saved notebook.

Loading this loads matplotlib; the live view does so on its own thread.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from PIL import Image

from labkit.view.figure import COLOURS, DPI, Frame, draw
from labkit.view.series import Line, Panel, Table, span

SHADES = 14  # of each colour, for the edges of lines and letters
ROOM = 0.5  # of the steps drawn so far, left free for those to come


class LiveCanvas:
    """The figure as pixels: a kept background, and lines drawn on top.

    Axes, ticks and words take four fifths of the drawing time, so they are drawn anew
    only when the lines need wider limits or other words.
    """

    def __init__(self, title: str, ranks: list[int]) -> None:
        self.frame = Frame(title, ranks)
        self.limits: list[tuple | None] = [None, None, None]
        self.labels: list[str | None] = [None, None, None]
        self.artists: dict[tuple, Line2D] = {}
        self.background: Any = None

    def render(self, found: list[Panel]) -> bytes:
        """The panels as a PNG."""
        canvas = self.frame.figure.canvas
        fresh = [self.fit(index, panel) for index, panel in enumerate(found)]
        if any(fresh):
            canvas.draw()
            self.background = canvas.copy_from_bbox(self.frame.figure.bbox)
        canvas.restore_region(self.background)
        for axes, panel in zip(self.frame.axes, found, strict=True):
            for line in panel.lines:
                artist = self.artist(axes, line)
                artist.set_data(line.x, line.y)
                axes.draw_artist(artist)
        return encode(canvas.buffer_rgba())

    def artist(self, axes: Axes, line: Line) -> Line2D:
        """This line's artist, made once; `animated` keeps it out of the background."""
        key = (axes, line.kind, line.rank)
        if key not in self.artists:
            self.artists[key] = self.frame.artist(line.kind, line.rank, animated=True)
            axes.add_line(self.artists[key])
        return self.artists[key]

    def fit(self, index: int, panel: Panel) -> bool:
        """Widen limits so that the panel fits; whether anything changed."""
        axes = self.frame.axes[index]
        changed = panel.label != self.labels[index]
        if changed:
            self.labels[index] = panel.label
            self.limits[index] = None
            self.frame.label(axes, panel)
        x0, x1, y0, y1 = span(panel)
        old = self.limits[index]
        if old and old[0] <= x0 and x1 <= old[1] and old[2] <= y0 and y1 <= old[3]:
            return changed
        room_y = 0.15 * (y1 - y0)
        low = y0 if panel.from_zero else y0 - room_y
        self.limits[index] = (x0, x1 + ROOM * (x1 - x0), low, y1 + room_y)
        axes.set_xlim(*self.limits[index][:2])
        axes.set_ylim(*self.limits[index][2:])
        return True


def static_png(tables: dict[int, Table], title: str) -> bytes:
    """The figure at twice the resolution, for a saved notebook."""
    figure = draw(tables, title)
    figure.set_dpi(2 * DPI)
    figure.canvas.draw()
    return encode(figure.canvas.buffer_rgba())


def encode(rgba: memoryview) -> bytes:
    """Pixels (height, width, 4) as a PNG with a palette, a fifth of the size."""
    height, width = rgba.shape[:2]
    picture = Image.frombuffer("RGBA", (width, height), rgba, "raw", "RGBA", 0, 1)
    colours = picture.convert("RGB")
    reduced = colours.quantize(palette=PALETTE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    reduced.save(buffer, "png", compress_level=3)
    return buffer.getvalue()


def make_palette() -> Image.Image:
    """Every colour that figures use, in shades towards white."""
    shades = np.linspace(1, 0, SHADES)[:, None]
    full = [np.array(to_rgb(name)) for name in ("black", *COLOURS)]
    colours = [1 - shades * (1 - colour) for colour in full]
    entries = np.rint(255 * np.concatenate(colours)).astype(int).ravel().tolist()
    palette = Image.new("P", (1, 1))
    palette.putpalette(entries)
    return palette


PALETTE = make_palette()
