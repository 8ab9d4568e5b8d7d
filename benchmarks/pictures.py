"""Draw the pictures of the README and of docs/pictures: a reduction from its arrays to its results, and all charts.

Input: a plan that is made here, and stored results. Output: docs/pictures/overview.svg and speed.svg, both
also narrow for telephones, and the charts of result_charts.py. The same input gives the same files. Nothing is measured
here. The pictures of docs/planning.md are drawn by the code of that page.
Run: python benchmarks/pictures.py [--results FOLDER] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import result_charts
from common import RESULTS
from matplotlib.patches import Circle, FancyBboxPatch, Polygon, Rectangle

import crossreduce as cr
from crossreduce.cli.bench.chart import draw_ratios
from crossreduce.export.pictures import style
from crossreduce.export.pictures.figure import new_figure
from crossreduce.export.pictures.graph_layout import graph_layout
from crossreduce.lowering import lower

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MACHINE, MEMBERS, NBYTES = "dgx-1v", (0, 1, 2, 4, 6), 256 << 20


class Sheet:
    """A page that fills a figure; its coordinates are inches from ``origin``, a place in the figure."""

    def __init__(self, figure: Any, origin: complex = 0):
        width, height = figure.get_size_inches()
        left, low = origin.real, origin.imag
        self.axes = figure.add_axes((0, 0, 1, 1), xlim=(-left, width - left), ylim=(-low, height - low))
        self.axes.set_axis_off()

    def text(self, x: float, y: float, words: str, size: float = 10, color: str = "", **more: Any) -> None:
        self.axes.text(x, y, words, fontsize=size, color=color or style.INK, **{"va": "center", **more})

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
        fill, ink = (style.INK, style.PAPER) if root else (style.PAPER, style.INK)
        self.axes.add_patch(
            Circle((at.real, at.imag), 0.17, facecolor=fill, edgecolor=style.INK, linewidth=1.2, zorder=4)
        )
        self.text(at.real, at.imag, str(number), 10, ink, ha="center", va="center_baseline", zorder=5)

    def card(self, at: complex, number: int, colors: Sequence[str]) -> None:
        """Draw a device, and one stripe for each replica that contributed to its array; no stripe: it has no array."""
        ink = style.INK if colors else style.LINE
        corner = (at.real - 0.22, at.imag - 0.17)
        box = FancyBboxPatch(corner, 0.44, 0.34, "round,pad=0.06", facecolor=style.PAPER, zorder=4)
        box.set(linewidth=1.2, edgecolor=ink if colors else style.FAINT)
        self.axes.add_patch(box)
        x, y = (at.real, at.imag + 0.1) if colors else (at.real, at.imag)
        self.text(x, y, str(number), 10, ink, ha="center", va="center_baseline", zorder=5)
        for k, color in enumerate(colors):
            height = 0.19 / len(colors)
            self.bar(at.real - 0.2, at.imag - 0.01 - (k + 1) * height, 0.4, height, color, zorder=5)


def overview(path: Path, *, narrow: bool = False) -> None:
    """Draw the arrays of some devices of a machine, a plan of their reduction with its proof, and the results.

    The three parts are beside each other, or with ``narrow`` one below the other, for a page of 400 pixels.
    """
    machine = cr.Topology.machine(MACHINE)
    members = [machine.devices[number] for number in MEMBERS]
    plan = cr.plan(machine.subset(members), "all_reduce", nbytes=NBYTES)
    title = f"Sum of one array per replica on {len(members)} of the {len(machine.devices)} GPUs of a DGX-1V"
    width, height, origins = (3.9, 12.55, (7.9j, 3.15j, -1.6j)) if narrow else (10.3, 4.7, (0j, 3.4 + 0j, 7.85 + 0j))
    heads = (
        ("1  Arrays", "of NumPy, PyTorch, JAX or TensorFlow"),
        ("2  Plan", "verified, for exactly these links"),
        ("3  Results", "the sum, on every device"),
    )
    with new_figure(path, width, height, title, head="") as figure:
        pages = [Sheet(figure, origin - 0.1 if narrow else origin) for origin in origins]
        for k, (page, (head, words)) in enumerate(zip(pages, heads, strict=True)):
            page.text(0.25, 4.42, head, 14, weight="bold")
            page.text(0.25, 4.13, words, 10, style.TEXT)
            if k and narrow:
                page.line(0.25 + 4.72j, 3.85 + 4.72j, style.FAINT, 1)
                page.arrow(2.05 + 4.83j, 2.05 + 4.63j, style.TEXT, head=0.2)
            elif k:
                page.line(0.2j, 4.5j, style.FAINT, 1)
                page.arrow(-0.05 + 2.6j, 0.15 + 2.6j, style.TEXT, head=0.2)
        inputs(pages[0], machine, members, 1.62 + 2.35j, 0.82)
        trees(pages[1], plan, machine, (0.55 + 3.6j, (2.35 if narrow else 2.75) + 3.6j))
        proof(pages[1], plan, 0.25, 1.05, 1.35 if narrow else 1.6)
        outputs(pages[2], plan, machine, 1.22 + 2.65j, 0.8, 2.35 + 3.2j if narrow else 0.25 + 1.31j)


def inputs(page: Sheet, machine: Any, members: list[str], centre: complex, scale: float) -> None:
    """Draw the machine, its links, and the arrays on the devices that take part."""
    places = graph_layout(machine).positions
    slow, fast = sorted({float(link.bandwidth) for link in machine.links})
    widths = {slow: 1.2, fast: 3.0}
    for link in machine.links:
        if link.src < link.dst:
            used = link.src in members and link.dst in members
            a, b = (centre + scale * places[node] for node in (link.src, link.dst))
            color = style.LINE if used else style.FAINT
            page.line(a, b, color, widths[float(link.bandwidth)], zorder=2 if used else 1)
    for number, device in enumerate(machine.devices):
        colors = [style.REPLICAS[members.index(device)]] if device in members else []
        page.card(centre + scale * places[device], number, colors)
    for k, (speed, width) in enumerate(widths.items()):
        x = 0.3 + 1.4 * k
        page.line(complex(x, 0.66), complex(x + 0.3, 0.66), style.LINE, width)
        page.text(x + 0.4, 0.66, f"{speed:g} GB/s", 10, style.TEXT)
    page.text(0.25, 0.33, f"one per replica, on {len(members)} GPUs of a DGX-1V", 10, style.TEXT)


def trees(page: Sheet, plan: Any, machine: Any, corners: Sequence[complex]) -> None:
    """Draw the tree of each chunk, with its root at the top: partial sums go to the root, the sum comes from it."""
    program = lower(plan.schedule)
    for c, (chunk, corner) in enumerate(zip(program.chunks, corners, strict=True)):
        transfers = [t for transfers in program.transfers for t in transfers if t.chunk == c]
        parent = {t.src: t.dst for t in transfers if not t.final}
        (root,) = set(parent.values()) - set(parent)
        at = tree_layout(root, parent, corner, 0.62, 0.78)
        for t in transfers:
            a, b = at[t.src], at[t.dst]
            along = (b - a) / abs(b - a)
            side = -0.055j * along
            page.arrow(a + 0.2 * along + side, b - 0.2 * along + side, style.COPY if t.final else style.REDUCE)
        for device, place in at.items():
            page.device(place, machine.devices.index(program.devices[device]), device == root)
        middle, low = (min(x.real for x in at.values()) + max(x.real for x in at.values())) / 2, corner.imag - 1.95
        page.text(middle, low, f"{chunk.share} of each array", 10, style.TEXT, ha="center")
    for y, color, words in ((3.62, style.REDUCE, "add"), (3.36, style.COPY, "copy the sum")):
        page.arrow(complex(1.4, y), complex(1.75, y), color)
        page.text(1.83, y, words, 10, style.TEXT)


def tree_layout(root: int, parent: dict[int, int], corner: complex, wide: float, high: float) -> dict[int, complex]:
    """Return the positions of a tree's nodes: from ``corner``, leaves go right by ``wide``, levels down by ``high``."""
    children = [child for child, above in parent.items() if above == root]
    at: dict[int, complex] = {}
    for child in sorted(children):
        left = max((place.real + wide for place in at.values()), default=corner.real)
        at |= tree_layout(child, parent, complex(left, corner.imag - high), wide, high)
    middle = (at[min(children)].real + at[max(children)].real) / 2 if children else corner.real
    return at | {root: complex(middle, corner.imag)}


def proof(page: Sheet, plan: Any, left: float, top: float, wide: float) -> None:
    """Draw the rate of the plan and of other algorithms beside the bound that no plan exceeds, ``wide`` inches."""
    limit = float(plan.bound.algbw)
    others = plan.others()
    names = {"ring": "ring", "TensorFlow's trees": "TensorFlow's trees", "one_device": "one device"}
    rows = [("this plan", float(plan.rate), style.OURS)]
    rows += [(text, float(others[name][1]), style.OTHER) for name, text in names.items()]
    start, scale = left + 1.42, wide / limit
    for k, (text, rate, color) in enumerate(rows):
        y = top - 0.23 * k
        page.text(start - 0.08, y, text, 10, ha="right")
        page.bar(start, y - 0.07, rate * scale, 0.14, color)
        page.text(start + rate * scale + 0.08, y, f"{rate:.4g}" if k else f"{rate:.4g} GB/s", 10, style.TEXT)
    x = start + limit * scale
    page.line(complex(x, top + 0.14), complex(x, top - 0.82), style.INK, 1.2)
    page.text(x, top + 0.26, f"proved limit: {limit:g} GB/s", 10, weight="bold", ha="center")


def outputs(page: Sheet, plan: Any, machine: Any, centre: complex, scale: float, listed: complex) -> None:
    """Draw each device's result, with one stripe per replica that it sums, and list the formats of exported plans."""
    places = graph_layout(plan.topology).positions
    for device in plan.topology.devices:
        page.card(centre + scale * places[device], machine.devices.index(device), style.REPLICAS)
    page.text(listed.real, listed.imag, "Export the plan:", 10)
    for k, words in enumerate(("MSCCL XML", "MSCCL++ JSON", "NCCL graph XML", "Chrome trace, SVG")):
        page.text(listed.real, listed.imag - 0.26 - 0.23 * k, words, 10, style.TEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measured times")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="the folder of the pictures")
    given = parser.parse_args()
    ratios, two = (json.loads((given.results / name).read_text()) for name in ("against.json", "against_2_ranks.json"))
    overview(given.folder / "overview.svg")
    overview(given.folder / "overview-narrow.svg", narrow=True)
    draw_ratios(ratios, given.folder / "speed.svg", two)
    draw_ratios(ratios, given.folder / "speed-narrow.svg", two, style.NARROW)
    for name in result_charts.CHARTS:
        result_charts.draw(name, given.folder, given.results)


if __name__ == "__main__":
    main()
