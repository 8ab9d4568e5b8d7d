"""Draw the pictures of the README: one of a reduction from its arrays to its results, one of the measured speed.

Input: a plan that is made here, and results/against.json and against_2_ranks.json, from ``crossreduce bench
--against``. Output: docs/pictures/overview.svg and speed.svg, and the same in colours for a dark background
(-dark.svg). The same input gives the same files. Nothing is measured here.
Run: python benchmarks/pictures.py [--results FOLDER] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from common import RESULTS
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

import crossreduce as cr
from crossreduce.cli.bench.chart import draw_ratios
from crossreduce.export.pictures.graph_layout import graph_layout
from crossreduce.lowering import lower

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MACHINE, MEMBERS, NBYTES = "dgx-1v", (0, 1, 2, 4, 6), 256 << 20


class Theme(NamedTuple):
    """Colours for one background. The colours of arrows and replicas can be told apart by colour-blind readers."""

    suffix: str
    paper: str
    ink: str
    text: str  # the colour of less important text
    line: str  # the colour of links and axes
    faint: str
    good: str  # the colour of crossreduce's rates
    peer: str
    reduce: str
    copy: str
    replicas: tuple[str, ...]  # the colours of replicas: Tol's bright scheme (personal.sron.nl/~pault), adapted on dark


LIGHT = Theme(
    *("", "#ffffff", "#1f2328", "#59636e", "#9aa4ae", "#d8dee4", "#1a7f37", "#8c959f", "#2166ac", "#d9730d"),
    ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677"),
)
DARK = Theme(
    *("-dark", "#0d1117", "#f0f6fc", "#9198a1", "#7d8590", "#30363d", "#3fb950", "#656c76", "#58a6ff", "#f0883e"),
    ("#5a8fc6", "#66ccee", "#34a34a", "#ccbb44", "#ee6677"),
)


class Sheet:
    """A page that fills a figure; its coordinates are inches from the lower left corner."""

    def __init__(self, figure: Figure, theme: Theme):
        self.theme = theme
        width, height = figure.get_size_inches()
        self.axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(0, height))
        self.axes.set_axis_off()

    def text(self, x: float, y: float, words: str, size: float = 10, color: str = "", **more: Any) -> None:
        self.axes.text(x, y, words, fontsize=size, color=color or self.theme.ink, **{"va": "center", **more})

    def line(self, a: complex, b: complex, color: str, width: float, **more: Any) -> None:
        self.axes.plot([a.real, b.real], [a.imag, b.imag], color=color, linewidth=width, **more)

    def arrow(self, a: complex, b: complex, color: str, width: float = 1.8, head: float = 0.13) -> None:
        along = (b - a) / abs(b - a)
        back = b - along * head
        self.line(a, back, color, width, solid_capstyle="butt", zorder=3)
        corners = (b, back + along * 0.42j * head, back - along * 0.42j * head)
        self.axes.add_patch(Polygon([(c.real, c.imag) for c in corners], color=color, linewidth=0, zorder=3))

    def bar(self, x: float, y: float, width: float, height: float, color: str, **more: Any) -> None:
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=color, linewidth=0, **more))

    def device(self, at: complex, number: int, root: bool = False) -> None:
        """Draw a device of a tree."""
        fill, ink = (self.theme.ink, self.theme.paper) if root else (self.theme.paper, self.theme.ink)
        self.axes.add_patch(
            Circle((at.real, at.imag), 0.17, facecolor=fill, edgecolor=self.theme.ink, linewidth=1.2, zorder=4)
        )
        self.text(at.real, at.imag, str(number), 10, ink, ha="center", va="center_baseline", zorder=5)

    def card(self, at: complex, number: int, colors: Sequence[str]) -> None:
        """Draw a device, and one stripe for each replica that contributed to its array; no stripe: it has no array."""
        ink = self.theme.ink if colors else self.theme.line
        corner = (at.real - 0.22, at.imag - 0.17)
        box = FancyBboxPatch(corner, 0.44, 0.34, "round,pad=0.06", facecolor=self.theme.paper, zorder=4)
        box.set(linewidth=1.2, edgecolor=ink if colors else self.theme.faint)
        self.axes.add_patch(box)
        x, y = (at.real, at.imag + 0.1) if colors else (at.real, at.imag)
        self.text(x, y, str(number), 10, ink, ha="center", va="center_baseline", zorder=5)
        for k, color in enumerate(colors):
            height = 0.19 / len(colors)
            self.bar(at.real - 0.2, at.imag - 0.01 - (k + 1) * height, 0.4, height, color, zorder=5)


@contextmanager
def sheet(name: str, theme: Theme, size: tuple[float, float], title: str, folder: Path) -> Iterator[Sheet]:
    """Yield a page, and write it as an SVG when the block ends."""
    with mpl.rc_context():
        mpl.rcdefaults()
        # SVG files contain text, not outlines: a viewer takes a font of this list. Even the widest, DejaVu Sans, fits.
        fonts = ["DejaVu Sans", "Segoe UI", "Helvetica", "Arial"]
        mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "crossreduce", "font.sans-serif": fonts})
        figure = Figure(figsize=size, facecolor=theme.paper)
        yield Sheet(figure, theme)
        path = folder / f"{name}{theme.suffix}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": "crossreduce", "Title": title})
    print(f"drawn: {path.name}, {path.stat().st_size / 1000:.0f} kB")


# --- what the library does ---


def overview(theme: Theme, folder: Path) -> None:
    """Draw the arrays of some devices of a machine, a plan of their reduction with its proof, and the results."""
    machine = cr.Topology.machine(MACHINE)
    members = [machine.devices[number] for number in MEMBERS]
    plan = cr.plan(machine.subset(members), "all_reduce", nbytes=NBYTES)
    title = f"Sum of one array per replica on {len(members)} of the {len(machine.devices)} GPUs of a DGX-1V"
    with sheet("overview", theme, (10.3, 4.7), title, folder) as page:
        heads = {
            0.25: ("1  Arrays", "of NumPy, PyTorch, JAX or TensorFlow"),
            3.65: ("2  Plan", "verified, for exactly these links"),
            8.1: ("3  Results", "the sum, on every device"),
        }
        for x, (head, words) in heads.items():
            page.text(x, 4.42, head, 14, weight="bold")
            page.text(x, 4.13, words, 10, theme.text)
            if x > 1:
                page.line(complex(x - 0.25, 0.2), complex(x - 0.25, 4.5), theme.faint, 1)
                page.arrow(complex(x - 0.3, 2.6), complex(x - 0.1, 2.6), theme.text, head=0.2)
        inputs(page, machine, members, complex(1.62, 2.35), 0.82)
        trees(page, plan, machine, (complex(3.95, 3.6), complex(6.15, 3.6)))
        proof(page, plan, 3.65, 1.05)
        outputs(page, plan, machine, complex(9.07, 2.65), 0.8)


def inputs(page: Sheet, machine: Any, members: list[str], centre: complex, scale: float) -> None:
    """Draw the machine, its links, and the arrays on the devices that take part."""
    theme, places = page.theme, graph_layout(machine).positions
    slow, fast = sorted({float(link.bandwidth) for link in machine.links})
    widths = {slow: 1.2, fast: 3.0}
    for link in machine.links:
        if link.src < link.dst:
            used = link.src in members and link.dst in members
            a, b = (centre + scale * places[node] for node in (link.src, link.dst))
            color = theme.line if used else theme.faint
            page.line(a, b, color, widths[float(link.bandwidth)], zorder=2 if used else 1)
    for number, device in enumerate(machine.devices):
        colors = [theme.replicas[members.index(device)]] if device in members else []
        page.card(centre + scale * places[device], number, colors)
    for k, (speed, width) in enumerate(widths.items()):
        x = 0.3 + 1.4 * k
        page.line(complex(x, 0.66), complex(x + 0.3, 0.66), theme.line, width)
        page.text(x + 0.4, 0.66, f"{speed:g} GB/s", 10, theme.text)
    page.text(0.25, 0.33, f"one per replica, on {len(members)} GPUs of a DGX-1V", 10, theme.text)


def trees(page: Sheet, plan: Any, machine: Any, corners: Sequence[complex]) -> None:
    """Draw the tree of each chunk, with its root at the top: partial sums go to the root, the sum comes from it."""
    theme, program = page.theme, lower(plan.schedule)
    for c, (chunk, corner) in enumerate(zip(program.chunks, corners, strict=True)):
        transfers = [t for transfers in program.transfers for t in transfers if t.chunk == c]
        parent = {t.src: t.dst for t in transfers if not t.final}
        (root,) = set(parent.values()) - set(parent)
        at = tree_layout(root, parent, corner, 0.62, 0.78)
        for t in transfers:
            a, b = at[t.src], at[t.dst]
            along = (b - a) / abs(b - a)
            side = -0.055j * along
            page.arrow(a + 0.2 * along + side, b - 0.2 * along + side, theme.copy if t.final else theme.reduce)
        for device, place in at.items():
            page.device(place, machine.devices.index(program.devices[device]), device == root)
        middle, low = (min(x.real for x in at.values()) + max(x.real for x in at.values())) / 2, corner.imag - 1.95
        page.text(middle, low, f"{chunk.share} of each array", 10, theme.text, ha="center")
    for y, color, words in ((3.62, theme.reduce, "add"), (3.36, theme.copy, "copy the sum")):
        page.arrow(complex(4.8, y), complex(5.15, y), color)
        page.text(5.23, y, words, 10, theme.text)


def tree_layout(root: int, parent: dict[int, int], corner: complex, wide: float, high: float) -> dict[int, complex]:
    """Return the positions of a tree's nodes: from ``corner``, leaves go right by ``wide``, levels down by ``high``."""
    children = [child for child, above in parent.items() if above == root]
    at: dict[int, complex] = {}
    for child in sorted(children):
        left = max((place.real + wide for place in at.values()), default=corner.real)
        at |= tree_layout(child, parent, complex(left, corner.imag - high), wide, high)
    middle = (at[min(children)].real + at[max(children)].real) / 2 if children else corner.real
    return at | {root: complex(middle, corner.imag)}


def proof(page: Sheet, plan: Any, left: float, top: float) -> None:
    """Draw the rate of the plan and of other algorithms beside the bound that no plan exceeds."""
    theme, limit = page.theme, float(plan.bound.algbw)
    others = plan.others()
    names = {"ring": "ring", "TensorFlow's trees": "TensorFlow's trees", "one_device": "one device"}
    rows = [("this plan", float(plan.rate), theme.good)]
    rows += [(text, float(others[name][1]), theme.peer) for name, text in names.items()]
    start, scale = left + 1.42, 1.6 / limit
    for k, (text, rate, color) in enumerate(rows):
        y = top - 0.23 * k
        page.text(start - 0.08, y, text, 10, ha="right")
        page.bar(start, y - 0.07, rate * scale, 0.14, color)
        words = f"{rate:.4g}" if k else f"{rate:.4g} GB/s, {100 * float(plan.ratio):.4g} %"
        page.text(start + rate * scale + 0.08, y, words, 10, theme.text)
    x = start + limit * scale
    page.line(complex(x, top + 0.14), complex(x, top - 0.82), theme.ink, 1.2)
    page.text(x, top + 0.26, f"proved limit: {limit:g} GB/s", 10, weight="bold", ha="center")


def outputs(page: Sheet, plan: Any, machine: Any, centre: complex, scale: float) -> None:
    """Draw each device's result, with one stripe per replica that it sums, and list the formats of exported plans."""
    theme, places = page.theme, graph_layout(plan.topology).positions
    for device in plan.topology.devices:
        page.card(centre + scale * places[device], machine.devices.index(device), theme.replicas)
    page.text(8.1, 1.31, "The plan can be exported:", 10)
    for k, words in enumerate(("MSCCL XML", "MSCCL++ JSON", "NCCL graph XML", "Chrome trace, SVG")):
        page.text(8.1, 1.05 - 0.23 * k, words, 10, theme.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measured times")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="the folder of the pictures")
    given = parser.parse_args()
    ratios, two = (json.loads((given.results / name).read_text()) for name in ("against.json", "against_2_ranks.json"))
    for theme in (LIGHT, DARK):
        overview(theme, given.folder)
        draw_ratios(ratios, given.folder / f"speed{theme.suffix}.svg", two, dark=theme is DARK)


if __name__ == "__main__":
    main()
