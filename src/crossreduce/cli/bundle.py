"""``crossreduce bundle``: the files of a collective for all sizes, in a new folder.

Input: a topology and a collective. Output: a folder with files for MSCCL, RCCL and MSCCL++, a README and
``ranks.json``; see ``export/bundle.py``.
"""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from ..errors import ArgumentError
from ..planning.granularity import TOLERANCE
from .support.arguments import one_of
from .support.output import check_new_folder, progress, write_new_folder
from .support.plans import Collective, CostsOption, Granularity, OperationUs, Root, read_granularity, read_plan_request
from .support.topologies import Devices, Hosts, InNetwork, Json, Machine, WithoutLink

FORMATS: Final = ("msccl", "mscclpp")


def bundle(
    machine: Machine,
    folder: Annotated[Path, Argument(metavar="DIR", help="A new or an empty folder.")],
    format: Annotated[  # noqa: A002 - the option's name
        str | None, Option(help=f"Only this format: {' or '.join(FORMATS)}. Default: both.")
    ] = None,
    granularity: Granularity = None,
    collective: Collective = "all_reduce",
    root: Root = None,
    devices: Devices = None,
    without_link: WithoutLink = None,
    hosts: Hosts = 1,
    in_network: InNetwork = False,
    costs: CostsOption = None,
    operation_us: OperationUs = None,
    json: Json = False,
) -> None:
    """Write MSCCL and MSCCL++ files of the fastest plans for all sizes.

    Each file is for a range of sizes, and ranks.json lists them. crossreduce
    verify proves the folder.
    """
    if format is not None:
        one_of(FORMATS, "--format", format)
    if root is not None and collective not in ("broadcast", "reduce"):
        raise ArgumentError(f"--root: a bundle of {collective} has no root: its algorithms choose their own.")
    check_new_folder("DIR", folder)
    part = read_granularity(granularity, TOLERANCE)
    request = read_plan_request(
        machine,
        collective=collective,
        root=root,
        devices=devices,
        without_link=without_link,
        hosts=hosts,
        in_network=in_network,
        costs=costs,
        operation_us=operation_us,
    )
    if request.costs.operation_s is None:
        request = request._replace(costs=replace(request.costs, operation_s=0))  # an exported plan runs as one kernel
    label = f"{machine}, {hosts} hosts" if hosts > 1 else machine
    label += "" if request.topology == request.complete else ", with changes (only a part)"
    from ..export.bundle import STAGES
    from ..export.bundle import bundle as bundle_files

    with progress("planning", STAGES) as advance:
        files = bundle_files(
            request.topology,
            collective,
            request.root,
            formats=FORMATS if format is None else (format,),
            granularity=part,
            costs=request.costs,
            machine=label,
            advance=advance,
        )
    write_new_folder("DIR", folder, files.files)
    listed = json_module.loads(files.files["ranks.json"])
    if json:
        print(json_module.dumps(listed | {"left_out": files.left_out}, indent=2))
        return
    print(f"{collective} on {label}: {len(listed['files'])} files in {folder}")
    for entry in listed["files"]:
        most = f"to {entry['most_bytes']}" if entry["most_bytes"] else "and more"
        rate = f"{entry['gb_per_s']} GB/s at {entry['at_bytes']} bytes"
        print(f"  {entry['file']}: {entry['least_bytes']} {most} bytes, {entry['algorithm']}, {rate}")
    print("  ranks     " + ", ".join(f"{rank} {device}" for rank, device in enumerate(listed["ranks"])))
    for text in files.left_out:
        print(f"  left out  {text}")
    print(f"  check     crossreduce verify {folder}")
