"""``crossreduce bundle``: write the files of a collective for all sizes into a new folder.

Input: a topology and a collective. Output: a folder with files for MSCCL, RCCL and MSCCL++, a README and
``ranks.json``; see ``export/bundle.py``.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from ..errors import ArgumentError
from ..planning.granularity import TOLERANCE
from .support.arguments import one_of
from .support.output import check_new_folder, progress, write_new_folder
from .support.plans import Granularity, PlanRequest, plan_options, read_granularity
from .support.topologies import Json

FORMATS: Final = ("msccl", "mscclpp")


@plan_options("nbytes", "algorithm", "packs", "participants")
def bundle(
    request: PlanRequest,
    folder: Annotated[Path, Argument(metavar="DIR", help="A new or an empty folder.")],
    format: Annotated[  # noqa: A002 - the option's name
        str | None, Option(help=f"Only this format: {' or '.join(FORMATS)}. Default: both.")
    ] = None,
    granularity: Granularity = None,
    json: Json = False,
) -> None:
    """Write MSCCL and MSCCL++ files of the fastest plans for all sizes.

    Each file is for a range of sizes, and ranks.json lists them. crossreduce
    verify proves the folder.
    """
    formats = FORMATS if format is None else (one_of(FORMATS, "--format", format),)
    collective = request.collective
    if request.root is not None and collective not in ("broadcast", "reduce"):
        raise ArgumentError(f"--root cannot be used with {collective}, whose algorithms choose their own roots.")
    check_new_folder("DIR", folder)
    share = read_granularity(granularity, TOLERANCE)
    request = request.for_one_kernel()
    from ..export.bundle import STAGES
    from ..export.bundle import bundle as bundle_files

    with progress("planning", STAGES) as advance:
        files = bundle_files(
            request.topology,
            collective,
            request.root,
            formats=formats,
            granularity=share,
            costs=request.costs,
            machine=request.label,
            advance=advance,
        )
    write_new_folder("DIR", folder, files.files)
    listed = json_module.loads(files.files["ranks.json"])
    if json:
        print(json_module.dumps(listed | {"left_out": files.left_out}, indent=2))
        return
    print(f"{collective} on {request.label}: {len(listed['files'])} files in {folder}")
    for entry in listed["files"]:
        most = f"to {entry['most_bytes']}" if entry["most_bytes"] else "and more"
        rate = f"{entry['gb_per_s']} GB/s at {entry['at_bytes']} bytes"
        print(f"  {entry['file']}: {entry['least_bytes']} {most} bytes, {entry['algorithm']}, {rate}")
    print("  ranks     " + ", ".join(f"{rank} {device}" for rank, device in enumerate(listed["ranks"])))
    for text in listed["assumed"]:
        print(f"  assumed   {text}")
    for text in files.left_out:
        print(f"  left out  {text}")
    print(f"  check     crossreduce verify {folder}")
