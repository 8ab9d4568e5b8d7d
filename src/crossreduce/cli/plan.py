"""``crossreduce plan``: plan a collective on a topology, and compare it with its bound.

Input: a machine, a file or ``this`` machine, a collective, a number of bytes. Output: an explanation or JSON, and the
steps. ``crossreduce export`` writes the same plan into files.
"""

from __future__ import annotations

import json as json_module
from typing import Annotated

from typer import Option

from .support.output import print_paged, progress
from .support.plans import (
    NBYTES,
    Algorithm,
    Collective,
    CostsOption,
    Nbytes,
    OperationUs,
    Packs,
    Participants,
    Root,
    plan_json,
    read_plan_request,
)
from .support.topologies import Devices, Hosts, InNetwork, Json, Machine, WithoutLink


def plan(
    machine: Machine,
    collective: Collective = "all_reduce",
    nbytes: Nbytes = NBYTES,
    algorithm: Algorithm = "auto",
    root: Root = None,
    packs: Packs = 1,
    participants: Participants = None,
    devices: Devices = None,
    without_link: WithoutLink = None,
    hosts: Hosts = 1,
    in_network: InNetwork = False,
    costs: CostsOption = None,
    operation_us: OperationUs = None,
    steps: Annotated[
        bool, Option("--steps", help="Also print the steps of the schedule; on a terminal in a pager.")
    ] = False,
    json: Json = False,
) -> None:
    """Plan a collective: its schedule, its predicted time and its bound.

    Times are simulated from the bandwidths and latencies of the links. The
    exit code is 2 if some devices have no path between them. crossreduce
    export writes the plan into a file; calibrate fits the links to results.
    """
    request = read_plan_request(
        machine,
        collective=collective,
        nbytes=nbytes,
        algorithm=algorithm,
        root=root,
        packs=packs,
        participants=participants,
        devices=devices,
        without_link=without_link,
        hosts=hosts,
        in_network=in_network,
        costs=costs,
        operation_us=operation_us,
    )
    with progress("planning", 2) as advance:
        result = request.plan()
        advance("comparing")
        text = json_module.dumps(plan_json(machine, result, with_steps=steps), indent=2) if json else result.explain()
    if steps:
        print_paged(text if json else f"{text}\n{result.schedule}")
    else:
        print(text)
