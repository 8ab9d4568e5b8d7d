"""Do exported files run at the rate that their plans predict, and for which sizes are they?

``benchmarks/planning.py`` prints and stores this table. A clock of tests/ that shares no code with the library runs
each file at 256 MiB, with rank k on the topology's k-th device; operations are not queued one by one
(``operation_s=0``).
"""

from __future__ import annotations

from common import tests_on_path

import crossreduce as cr
from crossreduce.export import EXPORTERS
from crossreduce.export.fitting import fitting
from crossreduce.planning import COLLECTIVES
from crossreduce.planning.granularity import TOLERANCE, is_power_of_two

tests_on_path()  # the clocks

FREE = cr.Costs(operation_s=0)
NBYTES = 1 << 28


def seconds_of(form: str, text: str, plan: cr.Plan) -> float:
    """Return the seconds of a file on the clock of its format."""
    from file_clock import algbw, msccl_seconds

    if form == "msccl":
        return float(msccl_seconds(text, plan.topology, plan.nbytes, plan.schedule))
    return plan.nbytes / 1e9 / algbw(text, plan.schedule, plan.topology)


def parts_of(form: str, multiple: int) -> int:
    """Return the number of equal parts of the buffer; MSCCL++ states bytes, in units of 16."""
    return multiple if form == "msccl" else multiple // 16


def exported(name: str, topology: cr.Topology) -> list[dict[str, object]]:
    """Return for each collective and format the equal parts of the buffer, and the file's rate / the planned one.

    A plan that does not fit the format is replaced, as ``crossreduce export`` does: see ``replaced``.
    """
    lines = []
    for collective in COLLECTIVES:
        best = cr.plan(topology, collective, NBYTES, costs=FREE, granularity=TOLERANCE)
        for form in ("msccl", "mscclpp"):
            found = fitting(best, EXPORTERS[form].text)
            plan, units = found.plan, parts_of(form, EXPORTERS[form].multiple_of(found.plan, found.text))
            lines.append(
                {
                    "name": name, "collective": collective, "format": form, "algorithm": plan.algorithm,
                    "replaced": best.algorithm if found.refused else "", "planned_gb_per_s": round(plan.algbw, 3),
                    "plan_units": plan.schedule.units, "units": units, "power_of_two": is_power_of_two(units),
                    "ratio": round(plan.seconds / seconds_of(form, found.text, plan), 4),
                }
            )  # fmt: skip
    return lines


def show(lines: list[dict[str, object]]) -> None:
    """Print the table."""
    print("\nFILES at 256 MiB: equal parts of the buffer, and the rate of the file / the planned rate")
    for line in lines:
        found = f"{line['algorithm']:20} {line['units']:>7} {line['ratio']:.3f}"
        replaced = f", instead of {line['replaced']}" if line["replaced"] else ""
        print(f"  {line['name']:20} {line['collective']:15} {line['format']:8} {found}{replaced}")
