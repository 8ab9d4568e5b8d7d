"""Figures that are written to SVG or PNG files, atomically and with the same bytes each time."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ...errors import ArgumentError, BackendError, shown
from ..files import replace_file, writable_target

_DPI: Final = 150  # dots per inch of a PNG
_PIXELS: Final = 8000  # the most pixels of a side of a PNG: its bitmap takes at most 256 MB
_LETTER: Final = 0.095  # the usual width of a letter of a title, in inches


def wrap_title(title: str, width: float) -> str:
    """Return a title in lines that fit into a picture of ``width`` inches."""
    return "\n".join("\n".join(textwrap.wrap(line, max(20, int(width / _LETTER)))) for line in title.split("\n"))


def title_height(title: str) -> float:
    """Return the height of a title and of the space around it, in inches."""
    return 0.3 + 0.2 * (title.count("\n") + 1)


@contextmanager
def new_figure(path: str | os.PathLike[str], width: float, height: float, title: str) -> Iterator[Any]:
    """Yield a figure of ``width`` x ``height`` inches, and write it to ``path`` if the block ends without an error."""
    kind = os.fspath(path).lower().rpartition(".")[2] if isinstance(path, (str, os.PathLike)) else ""
    if kind not in ("svg", "png"):
        raise ArgumentError.of("a picture must be a .svg or a .png file.", shown(path), '"topology.svg"')
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        problem = f"pictures need matplotlib, which cannot be imported: {error}"
        raise BackendError.of(problem, remedy="pip install 'crossreduce[plot]'") from error
    target = writable_target(path)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Text in SVG can be searched, "$" in names does not start a formula, and identifiers in SVG are not random.
        matplotlib.rcParams.update({"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "crossreduce"})
        figure = Figure(figsize=(width, height), dpi=min(_DPI, _PIXELS / max(width, height)))
        figure.suptitle(title, fontsize=12, y=1 - 0.15 / height)
        yield figure
        drawn = io.BytesIO()
        about = {"Date": None, "Creator": "crossreduce"} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, metadata=about | {"Title": title})
    replace_file(target, drawn.getvalue())
