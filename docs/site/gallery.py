"""Describe ten plans of the library's machines, with a picture of the links and a page of the plan explorer for each.

Output: in a folder, an SVG per plan and ``gallery.md``; in a second one, the plan explorer's pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import crossreduce as cr
from crossreduce.export.explorer import Beside, report_html
from crossreduce.export.pictures import draw_topology
from crossreduce.planning.explain import duration, percent, size


class Entry(NamedTuple):
    """A plan of the gallery."""

    name: str
    title: str
    machine: str
    hosts: int = 1
    devices: tuple[int, ...] = ()  # empty: all
    collective: str = "all_reduce"
    nbytes: str = "64M"


GALLERY: Final = (
    Entry("dgx-1v", "DGX-1V: six rings", "dgx-1v"),
    Entry("dgx-1v-part", "Five GPUs of a DGX-1V: two trees", "dgx-1v", 1, (0, 1, 2, 4, 6), nbytes="256M"),
    Entry("dgx-1v-broadcast", "DGX-1V: a broadcast", "dgx-1v", collective="broadcast"),
    Entry("dgx-2", "DGX-2: 16 GPUs around switches", "dgx-2"),
    Entry("pcie-8", "Eight GPUs on PCIe", "pcie-8"),
    Entry("mi250", "Eight MI250: 16 devices in a mesh", "mi250"),
    Entry("mi300x", "Eight MI300X: all linked", "mi300x"),
    Entry("tpu-v4", "TPU v4: a torus of 64 chips", "tpu-v4"),
    Entry("hgx-h100-4", "Four hosts with eight H100 each", "hgx-h100", 4),
    Entry("gb200-nvl72", "GB200 NVL72: 72 GPUs around one switch", "gb200-nvl72"),
)


def write(folder: Path, pages: Path) -> None:
    """Write the pictures and the text of all plans into ``folder``, and the plan explorer's pages into ``pages``."""
    pages.mkdir(parents=True, exist_ok=True)
    (folder / "gallery.md").write_text("\n".join(section(entry, folder, pages) for entry in GALLERY))


def planned(entry: Entry) -> cr.Plan:
    """Return the plan of an entry."""
    topology = cr.Topology.machine(entry.machine, entry.hosts)
    part = topology.subset(entry.devices) if entry.devices else topology
    return cr.plan(part, entry.collective, entry.nbytes)


def section(entry: Entry, folder: Path, pages: Path) -> str:
    """Draw the links of a plan, write its page, and return its part of the gallery as Markdown."""
    plan = planned(entry)
    draw_topology(plan.topology, folder / f"{entry.name}.svg")
    chosen = f" --devices {','.join(map(str, entry.devices))}" if entry.devices else ""
    hosts = f" --hosts {entry.hosts}" if entry.hosts > 1 else ""
    collective = f" --collective {entry.collective}" if entry.collective != "all_reduce" else ""
    command = f"crossreduce export {entry.machine} plan.html{hosts}{chosen}{collective} --nbytes {entry.nbytes}"
    machine = f"{entry.machine}, {entry.hosts} hosts" if entry.hosts > 1 else entry.machine
    page = report_html(plan, beside=Beside(machine=machine, command=command))
    (pages / f"{entry.name}.html").write_text(page, "utf-8")
    return "\n".join(
        [
            f"## {entry.title}\n",
            f"{plan.collective} of {size(plan.nbytes)} by `{plan.algorithm}`: {duration(plan.seconds)}, "
            f"{plan.algbw:.4g} GB/s. The bound is {float(plan.bound.algbw):.4g} GB/s; large arrays reach "
            f"{percent(plan.ratio)} of it.\n",
            f'<p><a href="{pages.name}/{entry.name}.html">Watch this plan in the plan explorer</a></p>\n',
            f"![The links of {entry.machine}](_generated/{entry.name}.svg)\n",
            f"```sh\n{command}\n```\n",
        ]
    )
