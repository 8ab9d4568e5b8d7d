"""``crossreduce plan --groups`` and ``--mesh``: plans of several groups that share the links.

Input: the texts of the options and a topology. Output: groups of devices; then text or JSON on standard output.
"""

from __future__ import annotations

import json as json_module
import re
from fractions import Fraction
from typing import Any

from .. import Costs, GroupsPlan, Topology, __version__, mesh_groups, plan_groups
from ..errors import ArgumentError
from .arguments import read_subset
from .output import progress, rate_json

Groups = tuple[tuple[str, ...], ...]


def read_groups(groups: str | None, mesh: str | None, topology: Topology) -> Groups:
    """Return the groups that one of the two options lists.

    >>> read_groups("0-1;2,3", None, Topology.ring(4))
    (('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
    >>> read_groups(None, "2x2", Topology.ring(4))
    (('cpu:0', 'cpu:2'), ('cpu:1', 'cpu:3'), ('cpu:0', 'cpu:1'), ('cpu:2', 'cpu:3'))
    """
    if groups is not None and mesh is not None:
        raise ArgumentError("--groups and --mesh cannot be given together.")
    if groups is not None:
        return tuple(read_subset("--groups", text, topology) for text in groups.split(";"))
    sizes = [part.strip() for part in (mesh or "").split("x")]
    if not all(re.fullmatch("[0-9]{1,9}", size) for size in sizes):
        raise ArgumentError(f'--mesh must be sizes such as 2x8, not "{mesh}".')
    return mesh_groups(topology.devices, [int(size) for size in sizes])


def read_weights(text: str | None, count: int) -> list[Fraction] | None:
    """Return a weight per group.

    >>> read_weights("1,2.5", 2)
    [Fraction(1, 1), Fraction(5, 2)]
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", part) and Fraction(part) for part in parts):
        raise ArgumentError(f'--weights must be numbers above 0 such as 1,2.5, not "{text}".')
    if len(parts) != count:
        raise ArgumentError(f"--weights must have one number per group: {len(parts)} numbers, {count} groups.")
    return [Fraction(part) for part in parts]


def print_groups(
    machine: str,
    topology: Topology,
    groups: Groups,
    weights: list[Fraction] | None,
    collective: str,
    nbytes: int,
    costs: Costs,
    *,
    as_json: bool,
) -> None:
    """Plan the groups and print their rates, and what separate plans would lose."""
    with progress("planning", 2) as advance:
        found = plan_groups(topology, groups, weights, collective=collective, nbytes=nbytes, costs=costs)
        advance("comparing")
        text = json_module.dumps(_json(machine, found, collective, nbytes), indent=2) if as_json else found.explain()
    print(text)


def _json(machine: str, found: GroupsPlan, collective: str, nbytes: int) -> dict[str, Any]:
    separate, own = found.separate, found.separate_without_helpers
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
            "alone": rate_json(alone.rate),
            "separate": rate_json(apart),
            "loss": {"exact": str(loss), "value": float(loss)},
            "separate_without_helpers": None if own is None else rate_json(own.rates[k]),
        }
        for k, (plan, weight, rate, alone, apart, loss) in enumerate(
            zip(found.plans, found.weights, found.rates, separate.plans, separate.rates, found.losses, strict=True)
        )
    ]
    levels = [
        {
            "rate": rate_json(level.rate),
            "most": rate_json(level.most),
            "groups": level.groups,
            "prices": [{"src": src, "dst": dst, "price": str(price)} for src, dst, price in level.prices],
        }
        for level in found.bound.levels
    ]
    return {
        "crossreduce": __version__,
        "machine": machine,
        "collective": collective,
        "nbytes": nbytes,
        "ratio": {"exact": str(found.ratio), "value": float(found.ratio)},
        "groups": groups,
        "levels": levels,
    }
