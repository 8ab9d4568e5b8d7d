"""A check before minutes are spent on planning: whether a format can hold the plans of a topology.

Input: the name of a format, a topology and a collective. Output: nothing, or PlanError.
"""

from __future__ import annotations

from ..errors import PlanError
from ..topology import Topology
from .formats.mscclpp.writer.switch_reductions import refusal_reason


def check_exportable(format_name: str, topology: Topology, collective: str) -> None:
    """Raise a PlanError if a format cannot hold the in-network plans of a topology.

    Only all-reduces are checked, since plans of other collectives rarely use switches that reduce. MSCCL XML has no
    operation in switches. MSCCL++ has one for an all-reduce with one reducing switch that joins all GPUs of a host.

    Args:
      format_name: a name of ``EXPORTERS``.
      topology: where the plan will run.
      collective: the name of the collective, such as "all_reduce".
    Raises:
      PlanError: the plan could contain switches that reduce, and the format cannot express them.

    >>> star = Topology.star(4).with_switches(reducing=True)
    >>> check_exportable("mscclpp", star, "all_reduce")
    >>> check_exportable("msccl", star, "all_reduce")
    Traceback (most recent call last):
    ...
    crossreduce.errors.PlanError: msccl files cannot hold in-network plans: MSCCL XML has no operation in switches.
      given: reducing switches switch
      try:   plain switches: plan without --in-network (in_network=True)
    """
    reducing = [switch.name for switch in topology.switches if switch.reduces]
    if collective != "all_reduce" or not reducing:
        return
    reasons = {"msccl": "MSCCL XML has no operation in switches.", "mscclpp": refusal_reason(topology, collective)}
    reason = reasons.get(format_name)
    if reason is not None:
        problem = f"{format_name} files cannot hold in-network plans: {reason}"
        given = f"reducing switches {', '.join(reducing)}"
        raise PlanError.of(problem, given, "plain switches: plan without --in-network (in_network=True)")
