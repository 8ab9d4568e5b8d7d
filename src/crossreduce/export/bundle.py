"""Bundles: the files with which MSCCL, RCCL or MSCCL++ run the plans of a machine, one for each range of sizes.

Input: a topology and a collective. Output: the texts of files, by path: files in ``msccl/`` and ``mscclpp/``, and
beside these folders a README and ``ranks.json``, the map of the ranks and the list of the files. Nothing is written
here.

The folder ``msccl/`` contains only the files that a runtime reads, since MSCCL and RCCL read every file of the folder
that MSCCL_ALGO_DIR names (mscclInternalSchedulerInit in RCCL's src/misc/msccl/msccl_lifecycle.cc). They use the first
file whose ``minBytes`` and ``maxBytes`` contain the size, both inclusive, so the ranges do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..errors import PlanError
from ..planning import REGISTRY, Plan, plan
from ..planning.granularity import TOLERANCE, sizes_that_fit
from ..schedule import Costs, pipelined
from ..topology import Topology
from . import EXPORTERS
from .exportable import check_exportable
from .msccl.format import read_msccl_xml

LEAST, MOST = 1 << 10, 1 << 30  # the sizes in bytes for which plans are compared, all powers of two from LEAST to MOST
FORMAT: Final = "crossreduce.bundle/1"
ONE_KERNEL: Final = Costs(operation_s=0)  # an exported plan runs as one kernel, so no operations are queued
NO_LIMIT: Final = 2**64 - 1  # in MSCCL++'s files
_SUFFIXES: Final = {"msccl": "xml", "mscclpp": "json"}


class Window(NamedTuple):
    """A range of sizes, both ends inclusive, and the plan for it; ``most_bytes=0``: no limit."""

    least_bytes: int
    most_bytes: int
    plan: Plan


class Bundle(NamedTuple):
    """The files of a bundle, and the ranges for which no plan fits a format."""

    files: dict[str, str]  # texts by path
    windows: dict[str, tuple[Window, ...]]  # by format
    left_out: tuple[str, ...]  # sentences


def bundle(
    topology: Topology,
    collective: str = "all_reduce",
    root: str | int | None = None,
    *,
    formats: Iterable[str] = tuple(_SUFFIXES),
    granularity: float = TOLERANCE,
    costs: Costs = ONE_KERNEL,
    machine: str = "MACHINE",
) -> Bundle:
    """Return the files for all sizes of a collective: see ``crossreduce plan --bundle``.

    Args:
      topology: rank k is its k-th device.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      root: of a reduce or broadcast. The formats do not store it, so the files are for calls with this root only.
      formats: "msccl", "mscclpp" or both.
      granularity: see ``plan``; also the part of the time that a plan may lose before the next range begins.
      costs: see ``plan``.
      machine: the name of the topology in the README.
    Raises:
      PlanError: no plan of any range fits any format.

    >>> made = bundle(Topology.machine("ncv4"), formats=["msccl"])
    >>> sorted(made.files)[:3]
    ['README.md', 'msccl/all_reduce_0.xml', 'msccl/all_reduce_1.xml']
    """
    files: dict[str, str] = {}
    windows: dict[str, tuple[Window, ...]] = {}
    listed: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name in formats:
        found: list[Window] = []
        try:
            check_exportable(name, topology, collective)
        except PlanError as error:
            left_out.append(f"{name}: {str(error).partition(chr(10))[0]}")
            continue
        for window in _windows(topology, collective, root, granularity, costs):
            written = _written(name, window, len(found))
            if isinstance(written, PlanError):
                left_out.append(f"{name}, {_range(window)}: {str(written).partition(chr(10))[0]}")
                continue
            window, text = written
            window = window._replace(most_bytes=range_of(name, text)[1])  # MSCCL++ limits the sizes of pipelines
            path = f"{name}/{collective}_{len(found)}.{_SUFFIXES[name]}"
            found.append(window)
            files[path] = text
            listed.append(_entry(path, name, window, text))
        windows[name] = tuple(found)
    if not files:
        problem = "no plan of this collective fits the limits of the formats."
        raise PlanError.of(problem, "; ".join(left_out), "fewer devices, another collective, other --format")
    some = next(window.plan for found in windows.values() for window in found)
    about = {"format": FORMAT, "machine": machine, "collective": collective, "ranks": some.ranks, "files": listed}
    files["ranks.json"] = json.dumps(about, indent=1) + "\n"
    units = {entry["file"]: entry["elements_multiple_of"] for entry in listed}
    files["README.md"] = _readme(machine, collective, some, windows, left_out, units)
    return Bundle(files, windows, tuple(left_out))


def _windows(
    topology: Topology, collective: str, root: str | int | None, tolerance: float, costs: Costs
) -> list[Window]:
    """Return the ranges of sizes in which one plan takes at most ``tolerance`` longer than the best one."""
    sizes = [1 << power for power in range(LEAST.bit_length() - 1, MOST.bit_length())]
    plans = [plan(topology, collective, nbytes, root=root, costs=costs, granularity=tolerance) for nbytes in sizes]
    starts = [0]
    for k, best in enumerate(plans):
        known = pipelined(plans[starts[-1]].schedule, topology, sizes[k], costs=costs)
        if known.seconds > best.seconds * (1 + tolerance):
            starts.append(k)
    found = []
    for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True):
        middle = sizes[(start + end - 1) // 2]
        schedule, seconds = pipelined(plans[start].schedule, topology, middle, costs=costs)
        request = plans[start].request._replace(nbytes=middle)
        chosen = replace(plans[start], request=request, schedule=schedule, seconds=seconds)
        least = 0 if start == 0 else sizes[start]
        found.append(Window(least, 0 if end == len(sizes) else sizes[end] - 1, chosen))
    return found


def _written(name: str, window: Window, number: int) -> tuple[Window, str] | PlanError:
    """Return the text of a window's file, with another algorithm's plan if the best one does not fit the format."""
    tried = [window.plan]
    first: PlanError | None = None
    while tried:
        chosen = tried.pop(0)
        try:
            return window._replace(plan=chosen), _text(name, window._replace(plan=chosen), number)
        except PlanError as error:
            if first is None:
                first = error
                for algorithm in REGISTRY:
                    with suppress(PlanError):
                        tried.append(_by_name(window.plan, algorithm))
                tried.sort(key=lambda other: other.seconds)
    assert first is not None
    return first


def _by_name(like: Plan, algorithm: str) -> Plan:
    request = like.request
    root = {"broadcast": request.sources[0], "reduce": request.destinations[0]}.get(like.collective)
    assert request.topology is not None
    return plan(
        request.topology,
        like.collective,
        like.nbytes,
        algorithm,
        root=root,
        costs=request.costs,
        granularity=request.granularity,
    )


def _text(name: str, window: Window, number: int) -> str:
    """Return the text of a file; msccl writes 0 for no limit, MSCCL++ the greatest number."""
    most = window.most_bytes or (0 if name == "msccl" else NO_LIMIT)
    title = f"{window.plan.collective}_{window.plan.algorithm}_{number}"
    return str(EXPORTERS[name].write(window.plan, name=title, min_bytes=window.least_bytes, max_bytes=most))


def range_of(name: str, text: str) -> tuple[int, int]:
    """Return the sizes that a file of a format is for; 0 at the end: no limit."""
    if name == "msccl":
        algo = read_msccl_xml(text)
        return algo.min_bytes, algo.max_bytes
    read = json.loads(text)
    most = read["max_message_size"]
    return read["min_message_size"], 0 if most == NO_LIMIT else most


def _entry(path: str, name: str, window: Window, text: str) -> dict[str, Any]:
    made = window.plan
    return {
        "file": path,
        "format": name,
        "least_bytes": window.least_bytes,
        "most_bytes": window.most_bytes,
        "algorithm": made.algorithm,
        "elements_multiple_of": EXPORTERS[name].units_of(made, text),
        "gb_per_s": round(made.algbw, 3),
        "at_bytes": made.nbytes,
    }


def _range(window: Window) -> str:
    """Return a range of sizes as text.

    >>> _range(Window(0, 1023, None)), _range(Window(1024, 0, None))
    ('up to 1023 bytes', 'from 1024 bytes')
    """
    if not window.most_bytes:
        return f"from {window.least_bytes} bytes"
    return f"{f'{window.least_bytes}' if window.least_bytes else 'up'} to {window.most_bytes} bytes"


def _readme(
    machine: str,
    collective: str,
    some: Plan,
    windows: dict[str, tuple[Window, ...]],
    left_out: list[str],
    units: dict[str, int],
) -> str:
    """Return the README: how to use the files, for which ranks and sizes they are, and what is missing.

    ``units``: by file, the number that must divide a message's number of elements.
    """
    lines = [f"# {collective} on {machine}", ""]
    lines += [f"{len(some.ranks)} ranks. The files have no names of devices: rank k must be this device.", ""]
    lines += ["| rank | device |", "|---|---|", *(f"| {k} | {device} |" for k, device in enumerate(some.ranks)), ""]
    if collective in ("broadcast", "reduce"):
        root = (some.request.sources if collective == "broadcast" else some.request.destinations)[0]
        lines += [
            f"Root: {root}, rank {some.ranks.index(root)}. The runtimes use the files for every root, but they are "
            "right for this one only.",
            "",
        ]
    lines += ["Check the files with `crossreduce verify DIR`, where DIR is this folder.", ""]
    how = {
        "msccl": "msccl-executor-nccl and RCCL: set `MSCCL_ALGO_DIR` to the folder `msccl` (and, for RCCL, "
        "`RCCL_MSCCL_FORCE_ENABLE=1` on machines that it does not know). They read every file of the folder, so keep "
        "other files out of it. microsoft/msccl: set `MSCCL_XML_FILES` to the files, separated by colons.",
        "mscclpp": "MSCCL++: load a file with `mscclpp.ExecutionPlan(path, rank)` and run it with its `Executor`, for "
        "the sizes in the table. Input and output are the same memory.",
    }
    for name, found in windows.items():
        if not found:
            continue
        lines += [f"## {name}", "", how[name], ""]
        lines += ["| file | bytes of the whole buffer | algorithm | predicted GB/s | sizes |", "|---|---|---|---|---|"]
        for k, window in enumerate(found):
            rate = f"{window.plan.algbw:.2f} at {window.plan.nbytes} bytes"
            file = f"{name}/{collective}_{k}.{_SUFFIXES[name]}"
            fit = sizes_that_fit(units[file])
            lines.append(f"| {file} | {_range(window)} | {window.plan.algorithm} | {rate} | {fit} |")
        lines.append("")
    if left_out:
        lines += ["## Sizes without a file", "", *(f"- {text}" for text in left_out), ""]
    return "\n".join(lines)
