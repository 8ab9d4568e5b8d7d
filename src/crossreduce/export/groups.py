"""MSCCL++ files of groups that run at the same time: one file for each group, and ``groups.json``.

Input: a ``GroupsPlan``. Output: texts by file name. A rank in a file is a rank of the group's own communicator, so the
file can have no helpers. If the common plan needs some, all files are those of the separate plans without helpers, and
``groups.json`` states the rates that these have together.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

from ..errors import PlanError
from ..planning import GroupsPlan, Plan
from ..planning.granularity import TOLERANCE, round_shares
from . import EXPORTERS

FORMAT: Final = "crossreduce.groups/1"


def group_files(plans: GroupsPlan, granularity: float = TOLERANCE) -> dict[str, str]:
    """Return an MSCCL++ file for each group of more than one device, and ``groups.json``, by file name.

    Args:
      plans: the plans of all groups.
      granularity: the part of a group's rate that rounded shares may cost; see ``plan``.
    Raises:
      PlanError: a group is not connected without helpers, or MSCCL++ cannot hold its plan.

    >>> from crossreduce import plan_groups
    >>> files = group_files(plan_groups("hgx-h100", [range(4), range(4, 8)]))
    >>> list(files), json.loads(files["groups.json"])["planned"]
    (['group_0.json', 'group_1.json', 'groups.json'], 'together')
    """
    chosen, rates, planned = plans.plans, plans.rates, "together"
    if any(plan.helpers for plan in chosen):
        separate = plans.separate_without_helpers
        if separate is None:
            problem = "the groups need devices outside of them, which a file of one group's ranks cannot hold."
            helpers = next(plan.helpers for plan in chosen if plan.helpers)
            raise PlanError.of(problem, ", ".join(helpers), "groups whose devices are connected without others")
        chosen, rates, planned = separate.plans, separate.rates, "separately, without helpers"
    files: dict[str, str] = {}
    entries: list[dict[str, Any]] = []
    for k, (plan, rate) in enumerate(zip(chosen, rates, strict=True)):
        entry: dict[str, Any] = {"ranks": plan.ranks, "collective": plan.collective, "root": plan.root}
        entry["gb_per_s"] = None if rate is None else round(float(rate), 3)
        if rate is not None:
            try:
                text, multiple = _text(plan, f"group_{k}", granularity)
            except PlanError as error:
                error.prefix(f"group {k}")
                raise
            files[f"group_{k}.json"] = text
            entry |= {"file": f"group_{k}.json", "bytes_multiple_of": multiple}
        entries.append(entry)
    about = {"format": FORMAT, "planned": planned, "groups": entries}
    return files | {"groups.json": json.dumps(about, indent=1) + "\n"}


def _text(plan: Plan, name: str, granularity: float) -> tuple[str, int]:
    """Return the file of one group, and the number that must divide the bytes of its messages."""
    exporter = EXPORTERS["mscclpp"]
    rounded = round_shares(plan.schedule, plan.topology, granularity, plan.nbytes, plan.request.costs)
    fitted = replace(plan, schedule=rounded)
    text = exporter.text(fitted, name=name)
    return text, exporter.multiple_of(fitted, text)
