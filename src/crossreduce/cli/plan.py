"""``crossreduce plan``: the fastest schedule of a collective on a wiring, how good it is, and files that others run.

In: a machine, a file or ``this``, a collective, bytes.  Out: an explanation or JSON, the steps, a picture, an export.
"""

from __future__ import annotations

import json as json_module
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from .. import Plan, __version__
from .. import plan as planned
from ..errors import ArgumentError
from ..options import ALGORITHMS
from ..planning.bounds import COLLECTIVES
from ..planning.explain import shape
from .arguments import at_least, one_of, read_nbytes, read_node
from .output import progress, whole_file
from .topology import (
    MACHINE,
    Devices,
    Hosts,
    InNetwork,
    Nics,
    Picture,
    Speeds,
    WithoutLink,
    bounded,
    check_picture,
    exact,
    select,
)

FORMATS: Final = ("msccl", "mscclpp", "nccl-graph", "schedule", "trace")
SUFFIXES: Final = {".xml": "msccl", ".trace.json": "trace", ".json": "schedule"}


def plan(
    machine: Annotated[str, typer.Argument(metavar="MACHINE|FILE|this", help=f"{MACHINE}.")],
    collective: Annotated[str, typer.Option(help=", ".join(COLLECTIVES))] = "all_reduce",
    nbytes: Annotated[str, typer.Option(help="Of the whole buffer; K, M, G are powers of 1024.")] = "64M",
    algorithm: Annotated[str, typer.Option(help=", ".join(ALGORITHMS))] = "auto",
    root: Annotated[str | None, typer.Option(help="Position or name; none: the best one.")] = None,
    packs: Annotated[int, typer.Option(help="Trees of one_device and hierarchical_copy.")] = 1,
    devices: Devices = None,
    without_link: WithoutLink = None,
    hosts: Hosts = 1,
    speeds: Speeds = "raw",
    nics: Nics = None,
    in_network: InNetwork = False,
    picture: Picture = None,
    export: Annotated[Path | None, typer.Option(help="Write the schedule to this file.")] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str | None,
        typer.Option(help=f"Of the export: {', '.join(FORMATS)}. None: by its suffix, .xml, .json or .trace.json."),
    ] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Print the schedule too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a collective: who sends what to whom, how fast it is, and what limits it.

    Times are simulated, from the links' bandwidths and latencies. Exits
    with 2 where no way leads from some device to another.
    """
    one_of(COLLECTIVES, "--collective", collective)
    one_of(ALGORITHMS, "--algorithm", algorithm)
    size = read_nbytes("--nbytes", nbytes)
    at_least(1, "--packs", packs)
    check_picture(picture)
    kind = _format(export, format)
    chosen = select(machine, hosts, speeds, nics, in_network, devices, without_link)
    main = None if root is None else read_node("--root", root, chosen.whole)
    with ExitStack() as stack:
        drawing = stack.enter_context(whole_file("--picture", picture))
        exported = stack.enter_context(whole_file("--export", export))
        tick = stack.enter_context(progress("planning", 4))
        found = planned(chosen.topology, collective, size, algorithm, root=main, packs=packs)
        tick("comparing")
        text = json_module.dumps(_report(machine, found, with_steps=steps), indent=2) if json else found.explain()
        tick("exporting")
        if exported is not None:
            exported.write_text(_exported(found, kind), "utf-8")
        tick("drawing")
        if drawing is not None:
            from ..export.pictures import draw_schedule

            draw_schedule(found.schedule, found.topology, drawing)
    print(text)
    if steps and not json:
        print(found.schedule)


def _format(path: Path | None, given: str | None) -> str:
    """Return the export's format: the one that is given, or the one of the file's suffix."""
    if given is not None:
        if path is None:
            raise ArgumentError("--format is of a file: name it with --export.")
        return one_of(FORMATS, "--format", given)
    if path is None:
        return ""
    for suffix, kind in SUFFIXES.items():
        if path.name.lower().endswith(suffix):
            return kind
    raise ArgumentError(f"--export takes a file that ends in {', '.join(SUFFIXES)}, or a --format, not {path}.")


def _exported(found: Plan, kind: str) -> str:
    """Return a plan's schedule in a format."""
    if kind == "msccl":
        from ..export.msccl.writer import to_msccl_xml

        return to_msccl_xml(found.schedule)
    if kind == "mscclpp":
        from ..export.mscclpp import to_mscclpp_json

        return to_mscclpp_json(found.schedule)
    if kind == "nccl-graph":
        from ..export.nccl_graph import to_nccl_graph_xml

        return to_nccl_graph_xml(found.schedule, found.topology)
    if kind == "trace":
        from ..export.trace import to_chrome_trace

        return to_chrome_trace(found.schedule, found.topology, found.nbytes)
    return found.schedule.to_json()


def _report(machine: str, found: Plan, *, with_steps: bool) -> dict[str, Any]:
    schedule, limit, trees = found.schedule, found.bound, shape(found.schedule)
    report = {
        "crossreduce": __version__,
        "machine": machine,
        "collective": found.collective,
        "nbytes": found.nbytes,
        "devices": limit.devices,
        "algorithm": found.algorithm,
        "seconds": found.seconds,
        "algbw_gb_per_s": found.algbw,
        "rate": exact(found.rate),
        "bound": bounded(limit),
        "ratio": {"exact": str(found.ratio), "value": float(found.ratio)},
        "k": {"exact": str(trees.k), "value": float(trees.k)},
        "roots": trees.roots,
        "depth": trees.depth,
        "chunks": len(schedule.chunks),
        "rounds": schedule.round_count,
        "steps": schedule.steps,
        "pieces": schedule.pieces,
        "others": {name: {"seconds": seconds, "rate": exact(rate)} for name, (seconds, rate) in found.others().items()},
    }
    return report | ({"schedule": json_module.loads(schedule.to_json())} if with_steps else {})
