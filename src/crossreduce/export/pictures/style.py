"""The style of all charts and pictures: their fonts, their colours, and the axes and legends of charts.

Everything is drawn in light colours. ``with_dark_colours`` adds rules to an SVG by which viewers that prefer dark pages
show dark colours; other viewers ignore the rules. A contender of a benchmark has the same colour in all charts. Readers
who are colour-blind can tell the colours of lines apart. This module does not import matplotlib.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ...planning.explain import size

PAPER: Final = "#ffffff"
INK: Final = "#1f2328"
TEXT: Final = "#59636e"  # less important text
EDGE: Final = "#6b7683"
LINE: Final = "#9aa4ae"
GREY: Final = "#c3cad2"
FAINT: Final = "#d8dee4"
PALE: Final = "#eef1f4"
PANEL: Final = "#f6f8fa"
OURS: Final = "#007f5c"  # crossreduce
OTHER: Final = "#8c959f"  # algorithms beside the chosen one
REDUCE: Final = "#2166ac"  # partial results
COPY: Final = "#d9730d"  # results

# One colour per replica: Tol's bright scheme (personal.sron.nl/~pault).
REPLICAS: Final = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677")
# Bandwidths, from slow to fast: ColorBrewer's YlGnBu without its palest shades (colorbrewer2.org).
SHADES: Final = ("#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84")


def between(ends: Sequence[str], count: int) -> tuple[str, ...]:
    """Return ``count`` colours from the first to the last of ``ends``, which are at equal distances.

    >>> between(["#000000", "#808080", "#ff80ff"], 5)
    ('#000000', '#404040', '#808080', '#c080c0', '#ff80ff')
    """
    colours = []
    for k in range(count):
        at, part = divmod(k * (len(ends) - 1), count - 1)
        pairs = zip(*(bytes.fromhex(each[1:]) for each in (ends[at], ends[min(at + 1, len(ends) - 1)])), strict=True)
        colours.append("#" + bytes(round(a + (b - a) * part / (count - 1)) for a, b in pairs).hex())
    return tuple(colours)


USES: Final = between(["#f0d4e6", "#c2459d", "#4d004b"], 10)  # of links: tenths of the busiest link's time


class Look(NamedTuple):
    """The colour and the marker of a contender."""

    colour: str
    marker: str


# Okabe and Ito's colours (jfly.uni-koeln.de/color), and two more.
LOOKS: Final = {
    "crossreduce": Look(OURS, "o"),
    "JAX": Look("#0072b2", "P"),
    "TensorFlow": Look("#d55e00", "^"),
    "torch": Look("#cc79a7", "v"),
    "NumPy loop": Look(INK, "x"),
    "gloo": Look("#b58900", "s"),
    "MPI": Look("#56b4e9", "D"),  # Open MPI, and any other one without a look of its own
    "Intel MPI": Look("#6f4bb2", ">"),
    "MPICH": Look("#8a6d5a", "<"),
    "C loop": Look(EDGE, "*"),
    "sockets": Look(LINE, "_"),
}

# The colour on dark pages that replaces each colour.
DARK: Final = {
    PAPER: "#0d1117",
    INK: "#f0f6fc",
    TEXT: "#9198a1",
    EDGE: "#8b949e",
    LINE: "#7d8590",
    GREY: "#4d5561",
    FAINT: "#30363d",
    PALE: "#21262d",
    PANEL: "#161b22",
    OURS: "#3ecf9a",
    OTHER: "#656c76",
    REDUCE: "#58a6ff",
    COPY: "#f0883e",
    "#0072b2": "#4aa3df",
    "#d55e00": "#ff8c42",
    "#cc79a7": "#e39cc6",
    "#b58900": "#e6c229",
    "#56b4e9": "#7fd1ff",
    "#6f4bb2": "#b39ddb",
    "#8a6d5a": "#c9a58c",
    **dict(zip(REPLICAS, ("#5a8fc6", "#66ccee", "#34a34a", "#ccbb44", "#ee6677"), strict=True)),
    **dict(zip(SHADES, ("#27406b", "#2a5f96", "#2f86b5", "#45adc4", "#86d3b8", "#d4f0b9"), strict=True)),
    **dict(zip(USES, between(["#4a2343", "#c2459d", "#ffd6f2"], len(USES)), strict=True)),
}

# The widths of charts in inches. A page of 400 pixels shows wide charts in their size, with a bar to scroll them.
WIDTH: Final = 7.2
NARROW: Final = 4.0
FOOT: Final = 8.5  # the size of the letters of notes, in points
_LETTERS: Final = 92  # of a note in a line of a chart of WIDTH
_MOST_SIZES: Final = 11  # labels of an axis
_HEAD: Final = "</style>"

# Text in SVG can be searched, "$" in names does not start a formula, and identifiers in SVG are not random. A viewer
# takes a font of the list; texts have room for the widest one, DejaVu Sans.
SETTINGS: Final = {
    "svg.fonttype": "none",
    "svg.hashsalt": "crossreduce",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "Segoe UI", "Helvetica", "Arial"],
    "font.size": 10,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": GREY,
    "axes.labelcolor": TEXT,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}


def with_dark_colours(svg: str) -> str:
    """Return an SVG with rules for its colours on dark pages."""
    used = [colour for colour in DARK if colour in svg]
    rules = [
        f'[style*="{kind}: {colour}"]{{{kind}:{DARK[colour]}!important}}'
        for colour in used
        for kind in ("fill", "stroke")
        if f"{kind}: {colour}" in svg
    ]
    lines = "\n".join(["", "@media (prefers-color-scheme: dark) {", *rules, "}"])
    return svg.replace(_HEAD, lines + _HEAD, 1)


def look(name: str) -> Look:
    """Return the look of a contender, of which ``name`` may be a variant, such as "crossreduce, NumPy".

    >>> look("crossreduce, NumPy") == look("crossreduce"), look("Open MPI") == look("MPI")
    (True, True)
    """
    names = [known for known in LOOKS if name == known or name.startswith((f"{known},", f"{known}."))]
    return LOOKS[names[0] if names else "MPI" if "MPI" in name else "C loop"]


def line(axes: Any, points: dict[int, float], name: str, *, dashed: bool = False, **more: Any) -> None:
    """Draw a contender's values over sizes. ``dashed``: a variant, whose markers are open."""
    colour, marker = look(name)
    xs = sorted(points)
    style: dict[str, Any] = {"label": name, "linestyle": "--" if dashed else "-", "color": colour, "marker": marker}
    style |= {"markerfacecolor": PAPER if dashed else colour, "linewidth": 2.0 if colour == OURS else 1.4}
    axes.plot(xs, [points[x] for x in xs], **style | more)


def size_axis(axes: Any, sizes: Sequence[int], most: int = _MOST_SIZES) -> None:
    """Make the x axis logarithmic, with the texts of at most ``most`` sizes."""
    axes.set_xscale("log", base=2)
    labelled = sizes[:: math.ceil(len(sizes) / most)]
    axes.set_xticks(labelled, [size(nbytes) for nbytes in labelled])
    if most < len(sizes) or len(sizes) > _MOST_SIZES // 2:
        axes.tick_params(axis="x", rotation=35)
    axes.minorticks_off()


def value_axis(axes: Any, low: float, high: float, unit: str = "", steps: Sequence[int] = (1, 2, 5)) -> None:
    """Make the y axis logarithmic from ``low`` to ``high``, with plain numbers at 1, 2 and 5 times powers of ten."""
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    if high / low > 5_000:
        steps = (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [k * 10.0**power for power in powers for k in steps if low <= k * 10.0**power <= high]
    axes.set_yticks(ticks, [f"{tick:,.10g}{unit}" for tick in ticks])
    axes.minorticks_off()


def legend_below(figure: Any, axes: Any, columns: int = 3) -> None:
    """Put the legend of ``axes`` below all axes of a figure with a constrained layout."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(columns, len(labels)))


def note(axes: Any, *texts: str) -> None:
    """Write notes below the x axis, each in lines of their own."""
    letters = round(_LETTERS * axes.figure.get_figwidth() / WIDTH)
    lines = [part for text in texts for part in textwrap.wrap(text, letters)]
    axes.set_xlabel("\n".join(lines), fontsize=FOOT, loc="left")
