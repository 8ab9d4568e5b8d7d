"""``crossreduce compare``: two machines, two plans or two measured results side by side.

Input: two names of machines or files of topologies, two files of ``crossreduce plan --json``, or two reports of
nccl-tests or ``crossreduce bench``. Output: a table or JSON, with the ratio of the second to the first.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from rich.table import Table
from typer import Argument, Option

from .. import Topology, __version__, bound
from .. import plan as library_plan
from ..devices import parse
from ..errors import ArgumentError, PlanError, ReductionError, printable
from ..planning.explain import duration, percent, size
from ..planning.optimal.bounds import COLLECTIVES
from ..topology.measurements import LARGEST, read_times
from ..topology.topology_like import is_path
from .support.arguments import one_of, read_beside, read_nbytes, say_unused
from .support.output import progress, terminal
from .support.plans import NBYTES
from .support.topologies import MACHINE, Hosts, Json, Nics

_WHAT: Final = f"{MACHINE}; a file of crossreduce plan --json; or a report of nccl-tests or crossreduce bench"
_KINDS: Final = {"machine": "a machine", "plan": "a plan", "results": "measured results"}


class ComparedRow(NamedTuple):
    """A property of both, and how it is shown. ``None``: one of them does not have it."""

    what: str
    a: Any
    b: Any
    show: Callable[[Any], str] = str
    is_measure: bool = True  # whether the ratio of two numbers means something

    @property
    def ratio(self) -> float | None:
        """``b / a``, if both are numbers."""
        fits = self.is_measure and all(isinstance(x, (int, float)) and x > 0 for x in (self.a, self.b))
        return float(self.b / self.a) if fits else None


def compare(
    a: Annotated[str, Argument(metavar="A", help=f"{_WHAT}.")],
    b: Annotated[str, Argument(metavar="B", help="The same kind as A.")],
    hosts: Hosts = 1,
    nics: Nics = None,
    collective: Annotated[str | None, Option(help="Of machines: the planned collective. Default: all_reduce.")] = None,
    nbytes: Annotated[str | None, Option(help=f"Of machines: the bytes of the plan. Default: {NBYTES}.")] = None,
    json: Json = False,
) -> None:
    """Show two machines, two plans or two measured results side by side.

    Machines are compared by their links, their bounds and the plans of one
    collective. Rates are GB/s (1e9 bytes) of the whole buffer.
    """
    planned = one_of(COLLECTIVES, "--collective", collective or "all_reduce")
    planned_bytes = read_nbytes("--nbytes", nbytes or NBYTES)
    (kind, first), (other, second) = _read(a), _read(b)
    if kind != other:
        problem = f"A and B must be of one kind, but A is {_KINDS[kind]}, and B is {_KINDS[other]}."
        raise ArgumentError.of(problem, f"{a}, {b}", "two machines, two plans, or two reports")
    if kind == "machine":
        with progress(a, 2) as advance:
            facts = []
            for name, other_name in ((a, b), (b, a)):
                topology = read_beside(name, hosts, nics, other_name)
                facts.append(_machine_facts(topology, planned, planned_bytes))
                advance(b)
        rows = [ComparedRow(what, x, facts[1][what][0], show, measure) for what, (x, show, measure) in facts[0].items()]
    else:
        given = {"--hosts": hosts != 1, "--nics": nics is not None}
        given |= {"--collective": collective is not None, "--nbytes": nbytes is not None}
        for option, is_given in given.items():
            if is_given:
                say_unused(option, f"A and B are {_KINDS[kind].removeprefix('a ')}{'s' * (kind == 'plan')}")
        rows = _plan_rows(first, second) if kind == "plan" else _result_rows(a, first, b, second)
    if json:
        entries = [{"what": row.what, "a": row.a, "b": row.b, "ratio": row.ratio} for row in rows]
        print(json_module.dumps({"crossreduce": __version__, "kind": kind, "a": a, "b": b, "rows": entries}, indent=2))
        return
    table = Table("", printable(f"A: {a}"), printable(f"B: {b}"), "B / A")
    for row in rows:
        cells = ("-" if x is None else row.show(x) for x in (row.a, row.b))
        table.add_row(row.what, *cells, "" if row.ratio is None else f"{row.ratio:.3g}")
    terminal(markup=False, emoji=False, highlight=False).print(table)


def _read(text: str) -> tuple[str, Any]:
    """Return the kind of an argument, and the content of its file, if it is a plan or a report."""
    if not is_path(text) or not text.lower().endswith(".json"):
        return "machine", None
    try:
        with Path(text).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise ArgumentError(f"{text} cannot be read: {error.strerror}.") from error
    try:
        content = json_module.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        content = None
    keys = set(content) if isinstance(content, dict) else set()
    for key, kind, found in (
        ("results", "results", data),
        ("seconds", "plan", (text, content)),
        ("links", "machine", None),
    ):
        if key in keys:
            return kind, found
    problem = f"{text} is not JSON of a topology, of a plan with its time, or of measured results."
    given = ", ".join(sorted(keys)[:6]) or repr(data[:40])
    raise ArgumentError.of(problem, given, "crossreduce plan MACHINE --json > plan.json")


def _machine_facts(topology: Topology, collective: str, nbytes: int) -> dict[str, tuple[Any, Any, bool]]:
    """Return the properties of a machine: for each its value, how it is shown, and whether ratios mean something."""
    facts: dict[str, tuple[Any, Any, bool]] = {
        "devices": (len(topology.devices), str, True),
        "hosts": (len({parse(device).host for device in topology.devices}), str, True),
        "switches": (len(topology.switches), str, True),
        "links": (len(topology.links), str, True),
        "GB/s of the slowest link": (_rate(min((x.bandwidth for x in topology.links), default=None)), _gb_per_s, True),
        "GB/s of the fastest link": (_rate(max((x.bandwidth for x in topology.links), default=None)), _gb_per_s, True),
    }
    for name in COLLECTIVES:
        try:
            rate = _rate(bound(topology, name).algbw)
        except PlanError:  # some devices have no path between them
            rate = None
        facts[f"bound of {name}, GB/s"] = rate, _gb_per_s, True
    what = f"{collective} of {size(nbytes)}"
    try:
        made = library_plan(topology, collective, nbytes)
    except PlanError:
        return facts | {what: (None, duration, True), f"{what}, algorithm": (None, str, False)}
    return facts | {what: (made.seconds, duration, True), f"{what}, algorithm": (made.algorithm, str, False)}


def _plan_rows(first: tuple[str, Any], second: tuple[str, Any]) -> list[ComparedRow]:
    """Return the rows of two plans, from the JSON of ``crossreduce plan``."""
    a, b = (_plan_facts(*each) for each in (first, second))
    return [ComparedRow(what, x, b[what][0], show, measure) for what, (x, show, measure) in a.items()]


def _plan_facts(file: str, report: Mapping[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    try:
        rate, most = (entry and float(entry["gb_per_s"]) for entry in (report["rate"], report["bound"]["algbw"]))
        counts = {name: (int(report[name]), str, True) for name in ("depth", "chunks", "rounds", "steps", "pieces")}
        return {
            "machine": (str(report["machine"]), printable, False),
            "collective": (str(report["collective"]), str, False),
            "bytes": (int(report["nbytes"]), size, True),
            "devices": (len(report["devices"]), str, True),
            "algorithm": (str(report["algorithm"]), str, False),
            "predicted time": (float(report["seconds"]), duration, True),
            "predicted GB/s": (float(report["algbw_gb_per_s"]), _gb_per_s, True),
            "GB/s when large": (rate, _gb_per_s, True),
            "bound, GB/s": (most, _gb_per_s, True),
            "of the bound": (float(Fraction(report["ratio"]["value"])), lambda x: percent(Fraction(x)), False),
        } | counts
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        problem = f"{file} is not the JSON of a plan: {'it lacks ' if isinstance(error, KeyError) else ''}{error}."
        raise ArgumentError.of(
            problem, ", ".join(list(report)[:6]), "crossreduce plan MACHINE --json > plan.json"
        ) from None


def _result_rows(a: str, first: bytes, b: str, second: bytes) -> list[ComparedRow]:
    """Return a row for each measurement in two reports."""
    times: list[dict[str, float]] = []
    reports = []
    for name, data in ((a, first), (b, second)):
        try:
            reports.append(read_times(data))
        except ReductionError as error:
            error.prefix(name)
            raise
    several = any(len({each.algorithm for each in measured}) > 1 for measured in reports)
    for measured in reports:
        found: dict[str, float] = {}
        for each in measured:
            root = "" if each.root is None else f", {each.root}"
            algorithm = f", {each.algorithm}" if several and each.algorithm else ""
            found[f"{each.collective} of {size(each.nbytes)}{root}{algorithm}"] = each.seconds
        times.append(found)
    return [ComparedRow(what, times[0].get(what), times[1].get(what), duration) for what in times[0] | times[1]]


def _rate(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _gb_per_s(rate: float) -> str:
    return f"{rate:.2f}"
