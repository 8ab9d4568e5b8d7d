"""``crossreduce groups``: plan collectives of several groups that run at the same time on shared links.

Input: a machine, and groups of its devices. Output: the groups' rates, also of separate plans, as text or JSON.
"""

from __future__ import annotations

import json as json_module
import re
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .. import GroupsPlan, Topology, __version__, mesh_groups, plan_groups
from ..errors import ArgumentError
from .support.arguments import read_subset
from .support.output import check_new_folder, progress, rate_json, write_new_folder
from .support.plans import PlanRequest, plan_options, plan_text
from .support.topologies import Json

_GROUPS = 'Groups such as "0-3;4-7", or a mesh such as 2x8: the lines along each dimension, as in a DeviceMesh.'


@plan_options("algorithm", "root", "packs", "participants")
def groups(
    request: PlanRequest,
    listed: Annotated[str, Argument(metavar="GROUPS|MESH", help=_GROUPS)],
    weights: Annotated[
        str | None, Option(help="A number per group, such as 1,2.5; rates are in proportion. Default: 1.")
    ] = None,
    export: Annotated[
        Path | None, Option(metavar="DIR", help="Write an MSCCL++ file for each group into a new or an empty folder.")
    ] = None,
    json: Json = False,
) -> None:
    """Plan groups that run at the same time: one plan for all on their links."""
    if export is not None:
        check_new_folder("--export", export)
        request = request.for_one_kernel()
    chosen = read_groups(listed, request.topology)
    shares = read_weights(weights, len(chosen))
    with progress("planning", 2) as advance:
        plans = plan_groups(
            request.topology, chosen, shares, collective=request.collective, nbytes=request.nbytes, costs=request.costs
        )
        advance("comparing")
        text = json_module.dumps(_json(request, plans), indent=2) if json else plan_text(request, plans, {})
    if export is not None:
        from ..export.groups import group_files

        files = group_files(plans)
        write_new_folder("--export", export, files)
        if not json:
            text += f"\n{export}: {', '.join(files)}, planned {json_module.loads(files['groups.json'])['planned']}"
    print(text)


def read_groups(text: str, topology: Topology) -> tuple[tuple[str, ...], ...]:
    """Return the groups in a list such as "0-1;2,3", or the groups of a mesh such as "2x2".

    >>> read_groups("0-1;2,3", Topology.ring(4))
    (('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
    >>> read_groups("2x2", Topology.ring(4))
    (('cpu:0', 'cpu:2'), ('cpu:1', 'cpu:3'), ('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
    """
    if re.fullmatch("[0-9]{1,9}( *x *[0-9]{1,9})+", text.strip()):
        return mesh_groups(topology.devices, [int(size) for size in text.split("x")])
    return tuple(read_subset("GROUPS", part, topology) for part in text.split(";"))


def read_weights(text: str | None, count: int) -> list[Fraction] | None:
    """Return the weights in a list, which must have ``count`` of them, or ``None`` without a list.

    >>> read_weights("1,2.5", 2)
    [Fraction(1, 1), Fraction(5, 2)]
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) and Fraction(part) for part in parts):
        raise ArgumentError(f'--weights must be numbers above 0 and below 10**9, such as 1,2.5, not "{text}".')
    if len(parts) != count:
        raise ArgumentError(f"--weights must have one number per group, but there are {len(parts)} for {count} groups.")
    return [Fraction(part) for part in parts]


def _json(request: PlanRequest, together: GroupsPlan) -> dict[str, Any]:
    """Return the common plan, the rates with separate plans, and the bound on the rates, as a dict for JSON."""
    separate, without_helpers = together.separate, together.separate_without_helpers
    groups = [
        {
            "devices": plan.request.members,
            "root": plan.root,
            "helpers": plan.helpers,
            "weight": {"exact": str(weight), "value": float(weight)},
            "rate": rate_json(rate),
            "seconds": plan.seconds,
            "chunks": len(plan.schedule.chunks),
            "rounds": plan.schedule.round_count,
            "steps": plan.schedule.steps,
            "pieces": plan.schedule.pieces,
            "alone": rate_json(separate.plans[k].rate),
            "separate": rate_json(separate.rates[k]),
            "loss": {"exact": str(loss), "value": float(loss)},
            "separate_without_helpers": None if without_helpers is None else rate_json(without_helpers.rates[k]),
        }
        for k, (plan, weight, rate, loss) in enumerate(
            zip(together.plans, together.weights, together.rates, together.losses, strict=True)
        )
    ]
    levels = [
        {
            "rate": rate_json(level.rate),
            "most": rate_json(level.most),
            "groups": level.groups,
            "prices": [{"src": src, "dst": dst, "price": str(price)} for src, dst, price in level.prices],
        }
        for level in together.bound.levels
    ]
    return {
        "crossreduce": __version__,
        "machine": request.machine,
        "collective": request.collective,
        "nbytes": request.nbytes,
        "ratio": {"exact": str(together.ratio), "value": float(together.ratio)},
        "groups": groups,
        "levels": levels,
    }
