"""Draw ten machines of the library and describe the plans of an all-reduce on each.

Output, in the given folder: an SVG of the links of each machine, and ``gallery.md``. Nothing is measured.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import crossreduce as cr
from crossreduce.export.pictures import draw_topology

MACHINES = ("dgx-1p", "dgx-1v", "dgx-2", "dgx-a100", "hgx-h100", "gb200-nvl72", "mi250", "mi300x", "ncv4", "pcie-8")
SIZES = {"8 KiB": 8 << 10, "1 MiB": 1 << 20, "1 GiB": 1 << 30}


def write(folder: Path) -> None:
    """Write the pictures and the text of all machines into ``folder``."""
    (folder / "gallery.md").write_text("\n".join(section(name, folder) for name in MACHINES))


def section(name: str, folder: Path) -> str:
    """Draw a machine and return its part of the page as Markdown."""
    machine = cr.Topology.machine(name)
    draw_topology(machine, folder / f"{name}.svg")
    about = json.loads((files("crossreduce.topology") / "data" / f"{name}.json").read_text())["description"]
    plans = {text: cr.plan(machine, "all_reduce", nbytes) for text, nbytes in SIZES.items()}
    limit = plans["1 GiB"].bound
    rows = [
        f"| {text} | `{plan.algorithm}` | {time(plan.seconds)} | {plan.algbw:.3g} GB/s |"
        for text, plan in plans.items()
    ]
    return "\n".join(
        [
            f"## {name}\n",
            f"{about[0].upper()}{about[1:]}: {len(machine.devices)} devices, {len(machine.links)} links.\n",
            f"```{{image}} _generated/{name}.svg\n:alt: The links of {name}\n:width: 420px\n```\n",
            f"The bound of an all-reduce is {float(limit.algbw):.4g} GB/s.\n",
            "| array per device | `auto` plans | time | rate |\n|---|---|---|---|",
            *rows,
            "",
        ]
    )


def time(seconds: float) -> str:
    """Return a time as text.

    >>> time(2.5e-5), time(0.0042)
    ('25 us', '4.2 ms')
    """
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
