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
from .style import SETTINGS, with_dark_colours

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
def new_figure(
    path: str | os.PathLike[str], width: float, height: float, title: str, *, head: str | None = None, fit: bool = False
) -> Iterator[Any]:
    """Yield a figure of ``width`` x ``height`` inches, and write it to ``path`` if the block ends without an error.

    Args:
      path: a file that ends in .svg or .png; an existing file is replaced.
      width: in inches.
      height: in inches.
      title: the title, which the file has as a property, too.
      head: what is written at the top instead of the title; "" writes nothing.
      fit: whether matplotlib arranges axes, titles and legends so that they do not overlap.
    """
    kind = os.fspath(path).lower().rpartition(".")[2] if isinstance(path, (str, os.PathLike)) else ""
    if kind not in ("svg", "png"):
        raise ArgumentError.of("a picture must be a .svg or a .png file.", shown(path), '"topology.svg"')
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        problem = f"pictures need matplotlib, which cannot be imported: {error}"
        raise BackendError.of(problem, remedy="pip install matplotlib") from error
    target = writable_target(path)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        dpi = min(_DPI, _PIXELS / max(width, height))
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained" if fit else None)
        head = title if head is None else head
        if head and fit:
            figure.suptitle(head, fontsize=11, weight="bold", x=0.01, ha="left")
        elif head:
            figure.suptitle(head, fontsize=11, weight="bold", y=1 - 0.15 / height)
        yield figure
        drawn = io.BytesIO()
        about = {"Date": None, "Creator": "crossreduce"} if kind == "svg" else {"Software": None}
        figure.savefig(drawn, format=kind, metadata=about | {"Title": title})
    content = drawn.getvalue()
    replace_file(target, with_dark_colours(content.decode()).encode() if kind == "svg" else content)
