"""``crossreduce plan --bundle``: the files of a collective for all sizes, in a new folder.

Input: a topology and a collective. Output: a folder with files for MSCCL, RCCL and MSCCL++, a README and
``ranks.json``; see ``export/bundle.py``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..errors import ArgumentError
from ..schedule import Costs
from ..topology import Topology
from .arguments import one_of
from .output import check_new_folder, progress, write_new_folder

FORMATS: Final = ("msccl", "mscclpp")


def check_bundle(folder: Path, form: str | None, given: list[str]) -> None:
    """Raise unless the folder can be written, and the options suit a bundle; ``given`` are those that do not."""
    if given:
        raise ArgumentError(f"--bundle writes the fastest plans for all sizes, so {given[0]} cannot be given with it.")
    if form is not None:
        one_of(FORMATS, "--format with --bundle", form)
    check_new_folder("--bundle", folder)


def write_bundle(
    folder: Path,
    form: str | None,
    topology: Topology,
    collective: str,
    root: str | None,
    granularity: float,
    costs: Costs,
    machine: str,
    *,
    as_json: bool,
) -> None:
    """Plan all sizes, write the folder, and print its files and ranks."""
    from ..export.bundle import STAGES, bundle

    if costs.operation_s is None:
        costs = replace(costs, operation_s=0)  # an exported plan runs as one kernel
    with progress("planning", STAGES) as advance:
        made = bundle(
            topology,
            collective,
            root,
            formats=FORMATS if form is None else (form,),
            granularity=granularity,
            costs=costs,
            machine=machine,
            advance=advance,
        )
    write_new_folder("--bundle", folder, made.files)
    if as_json:
        print(json.dumps(json.loads(made.files["ranks.json"]) | {"left_out": made.left_out}, indent=2))
        return
    listed = json.loads(made.files["ranks.json"])
    print(f"{collective} on {machine}: {len(listed['files'])} files in {folder}")
    for entry in listed["files"]:
        most = f"to {entry['most_bytes']}" if entry["most_bytes"] else "and more"
        rate = f"{entry['gb_per_s']} GB/s at {entry['at_bytes']} bytes"
        print(f"  {entry['file']}: {entry['least_bytes']} {most} bytes, {entry['algorithm']}, {rate}")
    print("  ranks     " + ", ".join(f"{rank} {device}" for rank, device in enumerate(listed["ranks"])))
    for text in made.left_out:
        print(f"  left out  {text}")
    print(f"  check     crossreduce verify {folder}")
