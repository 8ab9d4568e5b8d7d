"""``crossreduce plan``: plan a collective on a topology, and compare it with its bound.

Input: a topology, a collective and a number of bytes. Output: an explanation or JSON, on request with the steps of the
schedule. ``crossreduce export`` writes the same plan into files.
"""

from __future__ import annotations

import json as json_module
from typing import Annotated

from typer import Option

from .support.output import print_paged, progress
from .support.plans import PlanRequest, plan_json, plan_options, plan_text
from .support.topologies import Json


@plan_options()
def plan(
    request: PlanRequest,
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
    with progress("planning", 2) as advance:
        result = request.plan()
        advance("comparing")
        text = (
            json_module.dumps(plan_json(request.machine, result, with_steps=steps), indent=2)
            if json
            else plan_text(request, result, {})
        )
    if steps:
        print_paged(text if json else f"{text}\n{result.schedule}")
    else:
        print(text)
