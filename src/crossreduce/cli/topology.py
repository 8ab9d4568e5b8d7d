"""``crossreduce topology``: show the links of a topology and the bounds of the collectives on it.

Input: a machine of the library, a file or ``this`` machine; optionally only some of its devices and links. Output:
tables, JSON, a topology file, a picture.
"""

from __future__ import annotations

import json as json_module
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final

from rich.table import Table
from typer import Argument, Option

from .. import Topology, __version__, bound
from ..devices import parse
from ..errors import ArgumentError, PlanError
from ..planning.optimal.bounds import COLLECTIVES
from ..topology.discover import discover
from ..topology.machines import machine_names
from .support.arguments import read_machine
from .support.output import atomic_file, bound_json, draw, group_names, print_files, progress, terminal
from .support.topologies import (
    MACHINE,
    BetweenCpus,
    Devices,
    Gpu,
    Hosts,
    InNetwork,
    Json,
    Nics,
    Pcie,
    Picture,
    WithoutLink,
    check_picture,
    select,
)

MAX_LINES: Final = 200  # of the list of links; the JSON contains all links

Speeds = Annotated[
    str, Option("--speeds", help="raw: rates of the hardware; effective: rates that NCCL and RCCL assume.")
]


def topology(
    machine: Annotated[
        str | None, Argument(metavar="MACHINE|FILE|this", help=f"{MACHINE}. Without it: list the machines.")
    ] = None,
    hosts: Hosts = 1,
    speeds: Speeds = "raw",
    nics: Nics = None,
    in_network: InNetwork = False,
    gpu: Gpu = None,
    pcie: Pcie = None,
    between_cpus: BetweenCpus = None,
    devices: Devices = None,
    without_link: WithoutLink = None,
    picture: Picture = None,
    export: Annotated[Path | None, Option(help="Write the topology to this .json file.")] = None,
    json: Json = False,
) -> None:
    """Show the links of a topology and the bounds of the five collectives.

    Without an argument, list the machines of the library. A bound is a
    rate that no schedule can exceed: bytes of the buffer per time.
    """
    if machine is None:
        selected = devices or without_link or picture or export or nics or in_network or gpu or pcie or between_cpus
        if selected or (hosts, speeds) != (1, "raw"):
            raise ArgumentError("all options except --json require a machine such as dgx-1v, or a file.")
        _print_machines(as_json=json)
        return
    check_picture(picture)
    if export is not None and export.suffix.lower() != ".json":
        raise ArgumentError(f"--export must be a .json file, not {export}.")
    known = {"gpu": gpu, "pcie": pcie, "between_cpus": between_cpus}
    complete = read_machine(machine, hosts, speeds, nics, in_network, **known)
    chosen = select(complete, devices, without_link)
    with atomic_file("--picture", picture) as drawing:
        with atomic_file("--export", export) as exported:
            report = _report(machine, chosen)
            title = f"{machine}: {report['description']}" if report["description"] else machine
            if exported is not None:
                exported.write_text(chosen.to_json() + "\n", "utf-8")
        if json:
            print(json_module.dumps(report, indent=2))
        else:
            _print_tables(title, report, complete, chosen)
        draw("draw_topology", drawing, chosen, title=title)
    if not json:
        print_files(picture)


def _print_machines(*, as_json: bool) -> None:
    machines = [
        {"name": name, "devices": len(Topology.machine(name).devices), "description": description}
        for name, description in machine_names()
    ]
    if as_json:
        print(json_module.dumps({"crossreduce": __version__, "machines": machines}, indent=2))
        return
    table = Table("machine", "devices", "description")
    for entry in machines:
        table.add_row(*map(str, entry.values()))
    terminal(markup=False, emoji=False).print(table)


def _report(machine: str, topology: Topology) -> dict[str, Any]:
    """Return a topology, its islands, and the bound of each collective on it, as a dict for JSON."""
    hosts: defaultdict[str, list[str]] = defaultdict(list)
    for device in topology.devices:
        hosts[parse(device).host].append(device)
    bounds: dict[str, Any] = {}
    with progress(COLLECTIVES[0], len(COLLECTIVES)) as advance:
        for collective, next_collective in zip(COLLECTIVES, (*COLLECTIVES[1:], ""), strict=True):
            try:
                bounds[collective] = {**bound_json(bound(topology, collective)), "error": None}
            except PlanError as error:  # some devices have no path between them
                problem = str(error).partition("\n")[0]
                bounds[collective] = {"algbw": None, "limited_by": None, "tight_cut": [], "error": problem}
            advance(next_collective)
    return {
        "crossreduce": __version__,
        "machine": machine,
        "description": dict(machine_names()).get(machine),
        "notes": list(discover().notes) if machine == "this" else [],
        "assumed": list(topology.assumed),
        "hosts": hosts,
        "islands": topology.islands,
        "bounds": bounds,
        "topology": json_module.loads(topology.to_json()),
    }


def _print_tables(title: str, report: dict[str, Any], complete: Topology, topology: Topology) -> None:
    console = terminal(highlight=False, markup=False, emoji=False)
    console.print(title)
    about = Table.grid(padding=(0, 2))
    reducing = [switch.name for switch in topology.switches if switch.reduces]
    named = [host for host in report["hosts"] if host]
    about.add_row("devices", f"{len(topology.devices)}: {group_names(topology.devices)}")
    if topology.switches:
        names = group_names(switch.name for switch in topology.switches)
        about.add_row("switches", f"{len(topology.switches)}: {names}")
    if reducing:
        about.add_row("combining", f"{len(reducing)}: {group_names(reducing)}")
    cables = len({frozenset(link[:2]) for link in topology.links})
    both = f": {cables} cables, a link for each direction" if 2 * cables == len(topology.links) > 0 else ""
    about.add_row("links", f"{len(topology.links)}{both}")
    for what, texts in (("note", report["notes"]), ("assumed", report["assumed"])):
        for text in texts:
            about.add_row(what, text)
    about.add_row("hosts", f"{len(report['hosts'])}{': ' if named else ''}{group_names(named)}")
    islands = topology.islands
    fastest = "devices that the fastest links join"
    listed = f"{fastest}: {', '.join(map(group_names, islands))}" if len(islands) > 1 else "the fastest links join all"
    about.add_row("islands", f"{len(islands)}{': ' if len(islands) > 1 else ', '}{listed}")
    console.print(about)
    console.print()
    numbers = {node: str(number) for number, node in enumerate(complete.nodes)}
    # The first condition avoids the work for matrices whose columns, of 2 or more characters, are certainly too wide.
    matrix = _matrix(topology, numbers) if 2 * len(topology.nodes) < console.width else []
    fits = bool(matrix) and len(matrix[0]) <= console.width
    console.print("GB/s of each link, from row to column" if fits else "GB/s of each link")
    console.print(*(matrix if fits else _list_of_links(topology, numbers)), sep="\n", soft_wrap=True)
    console.print()
    exact = "exact, as assumed" if topology.assumed else "exact"
    table = Table("upper bound of", "GB/s", exact, "limited by")
    for collective, entry in report["bounds"].items():
        rate = entry["algbw"]
        rates = ("-", "-") if rate is None else (f"{rate['gb_per_s']:.2f}", rate["exact"])
        table.add_row(collective, *rates, entry["error"] or entry["limited_by"])
    console.print(table)


def _matrix(topology: Topology, numbers: dict[str, str]) -> list[str]:
    """Return the lines of a matrix of links: one row and one column per node, with the node's number as the head."""
    nodes = topology.nodes
    cells = [[_gb_per_s(link.bandwidth) if (link := topology.link(a, b)) else "." for b in nodes] for a in nodes]
    width = max(len(text) for row in [*cells, list(numbers.values())] for text in row)
    names = [f"{numbers[node]:>{len(numbers[nodes[-1]])}} {node}" for node in nodes]
    name_width = max(map(len, names))
    rows = [("", [numbers[node] for node in nodes]), *zip(names, cells, strict=True)]
    return [f"{name:{name_width}}  " + " ".join(f"{text:>{width}}" for text in row) for name, row in rows]


def _list_of_links(topology: Topology, numbers: dict[str, str]) -> list[str]:
    """Return lines with the links of each node. Nodes with the same links share a line."""
    nodes_by_links: defaultdict[str, list[str]] = defaultdict(list)
    for node in topology.nodes:
        speeds: defaultdict[Fraction, list[str]] = defaultdict(list)
        for link in topology.out_links(node):
            speeds[link.bandwidth].append(link.dst)
        links = "; ".join(
            f"{_gb_per_s(speed)} to {group_names(speeds[speed])}" for speed in sorted(speeds, reverse=True)
        )
        nodes_by_links[links or "nothing"].append(node)
    lines = [
        f"{group_names(numbers[node] for node in nodes)} {group_names(nodes)}: {links}"
        for links, nodes in nodes_by_links.items()
    ]
    more = len(lines) - MAX_LINES
    return lines[:MAX_LINES] + ([f"and {more} more lines; --json lists all links"] if more > 0 else [])


def _gb_per_s(bandwidth: Fraction) -> str:
    return str(bandwidth) if bandwidth.denominator == 1 else f"{float(bandwidth):.4g}"
