"""Figures as PNG bytes: fast for a live view, sharp for a saved notebook.

Loading this loads matplotlib; the live view does so on its own thread.
"""

from __future__ import annotations

import io
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from PIL import Image, ImageDraw, ImageFont

from labkit.view.figure import COLOURS, DPI, Frame, draw
from labkit.view.series import Line, Panel, Table, span

SHADES = 14  # of each colour, for the edges of lines and letters
AHEAD_S = 6.0  # limits leave room for what comes in this time at least
MOST_ROOM = 20.0  # in ranges of what is drawn
EDGES = (0.0, 0.351, 0.674, 1.0)  # between panels, in parts of the width
SHARPNESS = 1.6  # pixels of the last picture for one of the page
LOWER, UPPER = 0.12, 0.91  # of the panels, above the legend and below the title


class LiveCanvas:
    """The figure as pixels: a kept background for each panel, lines and words on top.

    A panel's axes are drawn anew only when its lines need wider limits, and title and
    legend only once. Words are written by Pillow, in matplotlib's font: a tick label
    takes it a thirtieth of the time, and there are thirty of them.
    """

    def __init__(self, title: str, ranks: list[int]) -> None:
        self.frame = Frame(title, ranks)
        self.canvas = self.frame.figure.canvas
        self.first_drawn_at: float | None = None
        self.limits: list[tuple | None] = [None, None, None]
        self.artists: dict[tuple, Line2D] = {}
        self.places: list[Bbox] = []
        self.blank = self.draw_once()
        self.backgrounds = list(self.blank)
        self.words: list[list[Word]] = [[], [], []]

    def draw_once(self) -> list:
        """Title and legend; the pixels of each panel's place, still without axes."""
        for axes in self.frame.axes:
            axes.set_visible(False)
        self.canvas.draw()
        for axes in self.frame.axes:
            axes.set_visible(True)
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False, labelleft=False)
        width, height = self.frame.figure.bbox.size
        self.places = [
            Bbox.from_extents(
                left * width, LOWER * height, right * width, UPPER * height
            )
            for left, right in pairwise(EDGES)
        ]
        return [self.canvas.copy_from_bbox(place) for place in self.places]

    def render(self, found: list[Panel]) -> bytes:
        """The panels as a PNG."""
        picture = zip(self.frame.axes, found, strict=True)
        for index, (axes, panel) in enumerate(picture):
            if self.fit(index, panel):
                self.draw_background(index)
            self.canvas.restore_region(self.backgrounds[index])
            for line in panel.lines:
                artist = self.artist(axes, line)
                artist.set_data(line.x, line.y)
                axes.draw_artist(artist)
        image = as_image(self.canvas.buffer_rgba())
        self.write(image, [panel.label for panel in found])
        return encode(image)

    def draw_background(self, index: int) -> None:
        """A panel's axes, kept for the pictures to come, and where its words go."""
        axes = self.frame.axes[index]
        self.canvas.restore_region(self.blank[index])
        axes.draw(self.canvas.get_renderer())
        self.backgrounds[index] = self.canvas.copy_from_bbox(self.places[index])
        self.words[index] = tick_words(axes)

    def write(self, image: Image.Image, labels: list[str]) -> None:
        """Tick labels and the words above and below each panel."""
        pen = ImageDraw.Draw(image)
        for axes, label, words in zip(self.frame.axes, labels, self.words, strict=True):
            left, bottom, right, top = axes.bbox.extents
            titles = [
                Word(left, top + 7, label, "ls", TITLE_FONT),
                Word((left + right) / 2, bottom - 22, "step", "mt", TICK_FONT),
            ]
            for word in (*words, *titles):
                place = (word.x, image.height - word.y)
                pen.text(place, word.text, "black", word.font, word.anchor)

    def artist(self, axes: Axes, line: Line) -> Line2D:
        """This line's artist, made once; `animated` keeps it out of the background."""
        key = (axes, line.kind, line.rank)
        if key not in self.artists:
            self.artists[key] = self.frame.artist(line.kind, line.rank, animated=True)
            axes.add_line(self.artists[key])
        return self.artists[key]

    def fit(self, index: int, panel: Panel) -> bool:
        """Widen limits so that the panel fits; whether that was needed."""
        axes = self.frame.axes[index]
        x0, x1, y0, y1 = span(panel)
        old = self.limits[index]
        if old and old[0] <= x0 and x1 <= old[1] and old[2] <= y0 and y1 <= old[3]:
            return False
        width, height = x1 - x0, y1 - y0
        if panel.from_zero:
            low, high = y0, y1 + 0.6 * height
        else:
            low, high = max(min(0.0, y0), y0 - 0.5 * height), y1 + 0.2 * height
        self.limits[index] = (x0, x1 + self.room() * width, low, high)
        axes.set_xlim(*self.limits[index][:2])
        axes.set_ylim(*self.limits[index][2:])
        return True

    def room(self) -> float:
        """How many times the steps so far will come in the next AHEAD_S seconds."""
        now = time.monotonic()
        if self.first_drawn_at is None:
            self.first_drawn_at = now
        elapsed_s = now - self.first_drawn_at
        return min(MOST_ROOM, max(1.0, AHEAD_S / max(elapsed_s, 1e-9)))


def static_png(tables: dict[int, Table], title: str) -> bytes:
    """The figure in higher resolution, for a saved notebook."""
    figure = draw(tables, title)
    figure.set_dpi(SHARPNESS * DPI)
    figure.canvas.draw()
    return encode(as_image(figure.canvas.buffer_rgba()))


class Word(NamedTuple):
    """A text at a place in pixels from the lower left, with Pillow's anchor."""

    x: float
    y: float
    text: str
    anchor: str
    font: ImageFont.FreeTypeFont


def tick_words(axes: Axes) -> list[Word]:
    """The labels of the ticks that lie within the limits."""
    words = []
    left, bottom, right, top = axes.bbox.extents
    for axis, (low, high) in (
        (axes.xaxis, axes.get_xlim()),
        (axes.yaxis, axes.get_ylim()),
    ):
        ticks = [tick for tick in axis.get_majorticklocs() if low <= tick <= high]
        texts = axis.get_major_formatter().format_ticks(ticks)
        for tick, text in zip(ticks, texts, strict=True):
            part = (tick - low) / (high - low)
            if axis is axes.xaxis:
                x = left + part * (right - left)
                words.append(Word(x, bottom - 8, text, "mt", TICK_FONT))
            else:
                y = bottom + part * (top - bottom)
                words.append(Word(left - 9, y, text, "rm", TICK_FONT))
    return words


def as_image(rgba: memoryview) -> Image.Image:
    """Pixels (height, width, 4) as an RGB picture."""
    height, width = rgba.shape[:2]
    picture = Image.frombuffer("RGBA", (width, height), rgba, "raw", "RGBA", 0, 1)
    return picture.convert("RGB")


def encode(picture: Image.Image) -> bytes:
    """A PNG with a palette, a fifth of the size of one without."""
    reduced = picture.quantize(palette=PALETTE, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    reduced.save(buffer, "png", compress_level=3)
    return buffer.getvalue()


def font(points: float) -> ImageFont.FreeTypeFont:
    """matplotlib's own font, at the resolution of the live figure."""
    path = font_manager.findfont("DejaVu Sans")
    pixels = points * DPI / 72
    return ImageFont.truetype(path, pixels, layout_engine=ImageFont.Layout.BASIC)


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
TICK_FONT, TITLE_FONT = font(8), font(9)  # as in figure.py
