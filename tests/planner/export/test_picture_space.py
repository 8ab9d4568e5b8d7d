"""Pictures use their space: every part of the canvas has ink, texts are large enough, and no text covers another."""

from itertools import combinations

import numpy as np
import pytest

from crossreduce import Topology, plan
from crossreduce.export.pictures import draw_schedule, draw_topology

CASES = {
    "rings": lambda: plan("dgx-1v", "all_reduce", nbytes="256M", algorithm="ring"),
    "forest": lambda: plan("dgx-1v", "all_reduce", nbytes="256M", algorithm="forest"),
    "part": lambda: plan(Topology.machine("dgx-1v").subset([0, 1, 2, 4, 6]), "all_reduce", nbytes="256M"),
    "switch": lambda: plan("hgx-h100", "all_reduce", nbytes="256M"),
    "2 hosts": lambda: plan(Topology.machine("dgx-1v", hosts=2), "all_reduce", algorithm="ring"),
    "16 hosts": lambda: plan(Topology.machine("hgx-h100", hosts=16), "all_reduce", algorithm="one_device"),
    "72": lambda: plan("gb200-nvl72", "all_reduce", algorithm="direct"),
    "2 devices": lambda: plan(Topology.ring(2), "all_reduce", algorithm="ring"),
}


# Pictures of a plan's topology are alike for all its algorithms.
DRAWN = [(name, "schedule") for name in CASES]
DRAWN += [(name, "narrow schedule") for name in ("rings", "part", "16 hosts")]
DRAWN += [(name, "topology") for name in ("rings", "switch", "2 hosts", "16 hosts", "72")]


@pytest.fixture(params=DRAWN, ids=" ".join)
def drawn(request, tmp_path, monkeypatch):
    """Draw a case, and return the matplotlib figure and the darkness of its pixels, from 0 to 255."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept = []
    save = Figure.savefig

    def savefig(self, *args, **kwargs):
        kept.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    name, kind = request.param
    found = CASES[name]()
    if kind == "topology":
        draw_topology(found.topology, tmp_path / "a.svg")
    else:
        width = 5.4 if kind.startswith("narrow") else 14
        draw_schedule(found.schedule, found.topology, tmp_path / "a.svg", width=width)
        assert kept[0].get_size_inches()[0] <= width
    figure = kept[0]
    figure.set_dpi(100)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return figure, 255 - np.asarray(canvas.buffer_rgba())[..., :3].min(axis=2).astype(int)


def texts(figure):
    """Return the texts of a figure with their boxes, in pixels."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for ax in figure.axes:
        found += [*ax.texts, ax.title]
        if ax.axison:  # the scale of the colours
            found += [ax.xaxis.label, *ax.get_xticklabels()]
    return [(text, text.get_window_extent()) for text in found if text.get_text().strip()]


def test_the_canvas_is_filled_with_texts_that_can_be_read(drawn):
    """Ink reaches almost to the borders, and no field of a grid of 3 x 3 is empty. All texts are inside the canvas and
    at least 3.3 points high, and no text overlaps another."""
    figure, ink = drawn
    rows, columns = np.nonzero(ink.max(axis=1) > 40)[0], np.nonzero(ink.max(axis=0) > 40)[0]  # those with ink
    high, wide = ink.shape
    assert rows[-1] - rows[0] > 0.9 * high - 20
    assert columns[-1] - columns[0] > 0.8 * wide - 30
    for row in np.array_split(ink, 3):
        for field in np.array_split(row, 3, axis=1):
            assert (field > 40).mean() > 0.002, "a field of the canvas is empty"
    found = texts(figure)
    for text, box in found:
        assert text.get_fontsize() >= 3.3, text.get_text()
        assert -1 <= box.x0 <= box.x1 <= wide + 1, text.get_text()
        assert -1 <= box.y0 <= box.y1 <= high + 1, text.get_text()
    for (one, a), (other, b) in combinations(found, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one.get_text()!r} overlaps {other.get_text()!r}"
