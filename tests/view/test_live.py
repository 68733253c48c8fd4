"""The live view: one figure, few redraws, a last state that stays."""

from __future__ import annotations

import gc
import io
import queue
import threading

import numpy as np
import psutil
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from labkit.view import HEIGHT_PX, WIDTH_PX, live, table
from labkit.view.canvas import LiveCanvas, static_png
from labkit.view.figure import COLOURS, Frame, draw
from labkit.view.series import panels


def tables(steps: int, ranks: int = 4) -> dict[int, dict[str, np.ndarray]]:
    step = np.arange(steps, dtype=float)
    return {
        rank: {
            "step": step,
            "loss": 5 / (1 + step / 50) + 0.1 * rank,
            "tokens_per_s": 7000 + 100 * rank + 50 * np.sin(step),
            "memory_bytes": np.full(steps, 3e8),
            "tensor_bytes": np.full(steps, 5e6),
        }
        for rank in range(ranks)
    }


def picture(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png)).convert("RGB")


def figure_of(handles: list[Handle]) -> list[dict]:
    """Bundles that the figure was given; one more with each redraw."""
    return handles[0].bundles


class Handle:
    """A display handle that keeps what it is given."""

    def __init__(self) -> None:
        self.bundles: list[dict] = []

    def update(self, bundle, **_options) -> None:
        self.bundles.append(bundle)


@pytest.fixture
def handles(monkeypatch) -> list[Handle]:
    made: list[Handle] = []

    def show(bundle, metadata):
        made.append(Handle())
        made[-1].update(bundle)
        return made[-1]

    monkeypatch.setattr(live, "show", show)
    return made


def test_the_figure_keeps_its_place():
    canvas = LiveCanvas("run", [0, 1, 2, 3])
    sizes = {picture(canvas.render(panels(tables(n)))).size for n in (2, 50, 3000)}
    assert sizes == {(WIDTH_PX, HEIGHT_PX)}
    assert picture(static_png(tables(50), "run")).size == (1440, 432)


def test_every_rank_has_its_colour_in_the_live_picture():
    png = LiveCanvas("run", [0, 1, 2, 3]).render(panels(tables(60)))
    pixels = np.asarray(picture(png), dtype=float).reshape(-1, 3) / 255
    for colour in COLOURS[:4]:
        nearest = np.abs(pixels - to_rgb(colour)).max(axis=1).min()
        assert nearest < 0.1, colour


def test_live_and_static_pictures_agree():
    """Drawn over a kept background, the lines stand where a full drawing puts them."""
    shown = tables(100)
    canvas = LiveCanvas("run", sorted(shown))
    for steps in (5, 40, 70, 100):
        fast = canvas.render(panels(tables(steps)))
    figure = canvas.frame.figure
    for artist in canvas.artists.values():
        artist.set_animated(False)
    figure.canvas.draw()
    full = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    for axes in figure.axes:  # inside the axes, where no words are
        left, bottom, right, top = (round(edge) for edge in axes.bbox.extents)
        box = (left + 2, HEIGHT_PX - top + 2, right - 2, HEIGHT_PX - bottom - 2)
        inside = [np.asarray(one.crop(box), float) for one in (picture(fast), full)]
        assert (np.abs(inside[0] - inside[1]).max(axis=2) > 64).mean() < 0.002


def test_live_words_stand_where_matplotlib_puts_them():
    """Pillow writes the ticks of the live figure; compare with matplotlib's own."""
    shown = tables(100)
    canvas = LiveCanvas("run", sorted(shown))
    canvas.render(panels(shown))
    for axes, words in zip(canvas.frame.axes, canvas.words, strict=True):
        axes.tick_params(labelbottom=True, labelleft=True)
        canvas.canvas.draw()
        theirs = {
            (anchor, text.get_text()): text.get_window_extent()
            for axis, anchor in ((axes.xaxis, "mt"), (axes.yaxis, "rm"))
            for text in axis.get_ticklabels()
        }
        for word in words:
            left, top, right, bottom = word.font.getbbox(word.text, anchor=word.anchor)
            middle_x = word.x + (left + right) / 2
            middle_y = word.y - (top + bottom) / 2
            box = theirs[word.anchor, word.text]
            assert abs(middle_x - (box.x0 + box.x1) / 2) < 4
            assert abs(middle_y - (box.y0 + box.y1) / 2) < 4


def test_hundreds_of_updates_leave_one_figure_and_no_memory():
    import matplotlib.pyplot as plt

    canvas = LiveCanvas("run", [0, 1, 2, 3])
    large = tables(100_000)
    canvas.render(panels(large))
    gc.collect()
    before = psutil.Process().memory_info().rss
    for steps in range(2, 502):
        canvas.render(panels({r: {k: v[:steps] for k, v in t.items()} for r, t in large.items()}))  # fmt: skip  # noqa: E501
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 20e6
    assert plt.get_fignums() == []
    assert sum(len(axes.lines) for axes in canvas.frame.axes) == 5 + 4 + 8


def test_a_background_is_drawn_again_only_now_and_then(monkeypatch):
    canvas = LiveCanvas("run", [0])
    drawn = []
    monkeypatch.setattr(canvas, "draw_background", drawn.append)
    for steps in range(2, 400):
        canvas.render(panels(tables(steps, ranks=1)))
    assert len(drawn) < 40


def test_the_view_draws_what_is_new_and_ends_with_the_last_state(handles):
    ended, lines = threading.Event(), queue.SimpleQueue()
    rows = iter([3, 10, 100, 400])
    state = {"steps": 1}

    def current():
        state["steps"] = next(rows, 400)
        if state["steps"] == 400:
            ended.set()
        return tables(state["steps"])

    view = live.LiveView(
        current, lambda: len(figure_of(handles)), "run", ended, lines, None
    )
    for index in range(300):
        lines.put(f"[rank 0] line {index}")
    view.start()
    view.finish()
    figure, text = handles
    assert figure.bundles[0]["image/png"] == live.BLANK_PNG
    assert len(figure.bundles) >= 3
    assert {bundle["text/plain"] for bundle in figure.bundles} == {live.TEXT}
    assert figure.bundles[-1]["image/png"] == static_png(tables(400), "run")
    shown = text.bundles[-1]["text/plain"].splitlines()
    assert shown[0] == "(100 earlier lines: run.logs(rank))"
    assert shown[-1] == "[rank 0] line 299"


def test_nothing_new_is_not_drawn_again(handles):
    ended = threading.Event()
    calls = []

    def num_rows():
        calls.append(1)
        if len(calls) == 6:
            ended.set()
        return 5

    view = live.LiveView(lambda: tables(5), num_rows, "run", ended, None, None)
    view.start()
    view.finish()
    assert view.redraws == 1


def test_drawing_stops_when_its_share_of_the_core_is_used(handles):
    view = live.LiveView(lambda: {}, lambda: 0, "run", threading.Event(), None, None)
    import time

    view.began = time.monotonic()
    assert view.may_draw()
    view.cpu_s = 10.0
    assert not view.may_draw()


def test_the_blank_picture_is_one():
    assert picture(live.BLANK_PNG).size == (1, 1)


def test_outside_a_notebook_nothing_is_drawn():
    assert not live.in_notebook()


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 64])
def test_any_number_of_ranks_can_be_drawn(ranks):
    figure = draw(tables(20, ranks=ranks), f"{ranks} ranks")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(legend) <= 9
    assert (legend[-1] == "mean loss over ranks") == (ranks > 1)
    figure.canvas.draw()
    width = figure.legends[0].get_window_extent().width
    assert width <= figure.bbox.width


def test_words_of_the_panels_do_not_overlap():
    figure = draw(tables(50), "run")
    figure.canvas.draw()
    boxes = [axes.title.get_window_extent() for axes in figure.axes]
    boxes += [axes._left_title.get_window_extent() for axes in figure.axes]
    boxes = [box for box in boxes if box.width > 0]
    for index, box in enumerate(boxes):
        assert box.x1 <= figure.bbox.width
        assert not any(box.overlaps(other) for other in boxes[:index])


def test_ranks_beyond_the_palette_differ_by_dashes():
    frame = Frame("run", list(range(12)))
    looks = {
        (artist.get_color(), str(artist._unscaled_dash_pattern))
        for artist in (frame.artist("rank", rank) for rank in range(12))
    }
    assert len(looks) == 12


def test_a_table_in_a_notebook_escapes_what_it_shows():
    assert "<script>" not in table.as_html([("name", "<script>")], "caption")
    assert table.as_text([("a", "1"), ("long", "2")], "caption").splitlines() == [
        "caption",
        "  a     1",
        "  long  2",
    ]
