"""Bundles: files with which MSCCL, RCCL or MSCCL++ run the plans of a machine, one file for each range of sizes.

Input: a topology and a collective. Output: the texts of files by path: files in ``msccl/`` and ``mscclpp/``, a README,
and ``ranks.json`` with the device of each rank and the list of the files. Nothing is written here.

The folder ``msccl/`` contains only the files that a runtime reads, since MSCCL and RCCL read every file of the folder
that MSCCL_ALGO_DIR names (mscclInternalSchedulerInit in RCCL's src/misc/msccl/msccl_lifecycle.cc). They use the first
file whose ``minBytes`` and ``maxBytes`` contain the size, both inclusive, so the ranges do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ..errors import PlanError
from ..planning import COLLECTIVES, Plan, plan
from ..planning.explain import size
from ..planning.granularity import TOLERANCE, sizes_that_fit
from ..schedule import Costs, pipelined, simulate
from ..topology import Topology
from . import EXPORTERS
from .exportable import check_exportable
from .fitting import fitting
from .formats.msccl.format import read_msccl_xml
from .formats.mscclpp.format import read_mscclpp_json
from .formats.mscclpp.layout import unit_bytes
from .runners import launch_text, runner_files

SIZES: Final = tuple(1 << power for power in range(10, 31))  # the bytes for which plans are compared
STAGES: Final = len(SIZES)  # how often ``bundle`` calls ``advance``
MOST_OCTAVES: Final = 3  # a range whose plan has several pieces contains at most this number of powers of two
_STEP: Final = 64  # ranges begin at multiples of this number of bytes
FORMAT: Final = "crossreduce.bundle/1"
ONE_KERNEL: Final = Costs(operation_s=0)  # an exported plan runs as one kernel, so no operations are queued
NO_LIMIT: Final = 2**64 - 1  # the largest size in MSCCL++'s files without a limit
SUFFIXES: Final = {"msccl": "xml", "mscclpp": "json"}


class Window(NamedTuple):
    """A range of sizes, including both ends, and the plan for it."""

    least_bytes: int
    most_bytes: int  # 0 stands for no limit
    plan: Plan


class Bundle(NamedTuple):
    """The files of a bundle."""

    files: dict[str, str]  # texts by path
    windows: dict[str, tuple[Window, ...]]  # by format
    left_out: tuple[str, ...]  # for each format and range without a fitting plan, a sentence with the reason


def bundle(
    topology: Topology,
    collective: str = "all_reduce",
    root: str | int | None = None,
    *,
    formats: Iterable[str] = tuple(SUFFIXES),
    granularity: float = TOLERANCE,
    costs: Costs = ONE_KERNEL,
    machine: str = "MACHINE",
    advance: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Return the files for all sizes of a collective: see ``crossreduce bundle``.

    Args:
      topology: the machine. Rank k is device k of it.
      collective: "all_reduce", "reduce", "broadcast", "reduce_scatter" or "all_gather".
      root: the root of a reduce or broadcast. The formats do not store it, so files are only for calls with this root.
      formats: "msccl", "mscclpp" or both.
      granularity: see ``plan``. A new range begins if the plan would exceed the best time by more than this fraction.
      costs: see ``plan``.
      machine: the name of the topology in the README.
      advance: called with a text after each of ``STAGES`` sizes is planned.
    Raises:
      PlanError: no plan of any range fits any format.

    >>> sorted(bundle(Topology.machine("ncv4"), formats=["msccl"]).files)[:3]
    ['README.md', 'measure.py', 'msccl/all_reduce_0.xml']
    """
    files: dict[str, str] = {}
    windows: dict[str, tuple[Window, ...]] = {}
    entries: list[dict[str, Any]] = []
    left_out: list[str] = []
    planned: list[Window] = []
    for name in formats:
        written: list[Window] = []
        try:
            check_exportable(name, topology, collective)
        except PlanError as error:
            reason = str(error).partition("\n")[0]
            left_out.append(f"all sizes, {name}: {reason}")
            continue
        planned = planned or _windows(topology, collective, root, granularity, costs, advance)  # once for all formats
        for window in planned:
            try:
                fit = fitting(window.plan, partial(_text, name, window, len(written)))
            except PlanError as error:
                reason = str(error).partition("\n")[0]
                left_out.append(f"{name}, {_range(window)}: {reason}")
                continue
            window, text = window._replace(plan=fit.plan), fit.text
            facts = facts_of(name, text)
            window = window._replace(most_bytes=facts["most_bytes"])  # MSCCL++ limits the sizes of pipelines
            path = f"{name}/{collective}_{len(written)}.{SUFFIXES[name]}"
            written.append(window)
            files[path] = text
            multiple = f"{EXPORTERS[name].counts}_multiple_of"
            replaced = {"replaced": fit.refused} if fit.refused else {}
            entries.append(_entry(path, name, window) | {multiple: facts[multiple]} | replaced)
        windows[name] = tuple(written)
    if not files:
        problem = "no plan of this collective fits the limits of the formats."
        raise PlanError.of(problem, "; ".join(left_out), "fewer devices, another collective, other --format")
    sample = next(window.plan for written in windows.values() for window in written)  # all have the same root and ranks
    about = {
        "format": FORMAT,
        "machine": machine,
        "collective": collective,
        "root": sample.root,
        "ranks": sample.ranks,
        "costs": json.loads(costs.to_json()),
        "granularity": granularity,
        "assumed": sample.topology.assumed,
        "files": entries,
    }
    files["ranks.json"] = json.dumps(about, indent=1) + "\n"
    fits = {
        entry["file"]: sizes_that_fit(entry[f"{exporter.counts}_multiple_of"], exporter.counts)
        for entry in entries
        for exporter in [EXPORTERS[entry["format"]]]
    }
    for name, written_windows in windows.items():
        files |= runner_files(name) if written_windows else {}
    files["README.md"] = _readme(machine, collective, sample, windows, left_out, fits)
    return Bundle(files, windows, tuple(left_out))


def _windows(
    topology: Topology,
    collective: str,
    root: str | int | None,
    tolerance: float,
    costs: Costs,
    advance: Callable[[str], None],
) -> list[Window]:
    """Return the ranges of sizes, each with a plan.

    At the powers of two in a range, its plan exceeds the best time by at most the fraction ``tolerance``. Neighbouring
    ranges meet where their plans are equally fast. In an MSCCL file, the number of pieces is the same for all sizes of
    messages, so ranges of plans with pieces are short.
    """
    plans = []
    for nbytes in SIZES:
        plans.append(plan(topology, collective, nbytes, root=root, costs=costs, granularity=tolerance))
        advance(f"planned {size(nbytes)}")
    starts = [0]  # for each range, the index of its first size; the whole range uses the plan for that size
    for k, best in enumerate(plans):
        current = pipelined(plans[starts[-1]].schedule, topology, SIZES[k], costs=costs)
        is_wide = current.schedule.pieces > 1 and k - starts[-1] >= MOST_OCTAVES
        if current.seconds > best.seconds * (1 + tolerance) or is_wide:
            starts.append(k)
    least = [0]  # for each range, its least size in bytes
    for before, after in pairwise(starts):
        least.append(_crossing(plans[before], plans[after], SIZES[after] // 2, SIZES[after]))
    windows = []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(SIZES)
        middle = SIZES[(start + end - 1) // 2]
        schedule, seconds = pipelined(plans[start].schedule, topology, middle, costs=costs)
        request = plans[start].request._replace(nbytes=middle)
        range_plan = replace(plans[start], request=request, schedule=schedule, seconds=seconds)
        windows.append(Window(least[i], least[i + 1] - 1 if i + 1 < len(starts) else 0, range_plan))
    return windows


def _crossing(before: Plan, after: Plan, low: int, high: int) -> int:
    """Return the size in bytes from which on the second plan is at least as fast as the first, with an error of 1/64.

    The result is above ``low`` and at most ``high``, where the second plan is faster.
    """

    def seconds(compared: Plan, nbytes: int) -> float:
        return pipelined(compared.schedule, compared.topology, nbytes, costs=compared.request.costs).seconds

    while high - low > max(_STEP, low // 64):
        middle = (low + high) // 2 // _STEP * _STEP
        if seconds(after, middle) <= seconds(before, middle):
            high = middle
        else:
            low = middle
    return high


def _text(name: str, window: Window, number: int, window_plan: Plan) -> str:
    """Return the text of a window's file in format ``name``. Raise PlanError if no size in the window can use it."""
    most = window.most_bytes or (0 if name == "msccl" else NO_LIMIT)
    title = f"{window_plan.collective}_{window_plan.algorithm}_{number}"
    text = EXPORTERS[name].text(window_plan, name=title, min_bytes=window.least_bytes, max_bytes=most)
    multiple = EXPORTERS[name].multiple_of(window_plan, text)
    if window.most_bytes and window.most_bytes // multiple * multiple < max(window.least_bytes, 1):
        sizes = f"multiples of {multiple} {EXPORTERS[name].counts}"
        problem = f"the file would be only for sizes that are {sizes}, none of them in its range."
        raise PlanError.of(problem, _range(window), "a greater granularity, which makes the ranges wider")
    return text


def facts_of(name: str, text: str) -> dict[str, Any]:
    """Return the fields of ``ranks.json`` that a file of a format also states. ``most_bytes`` is 0 without a limit.

    Raises:
      ScheduleError: the text is not of the format.
    """
    if name == "msccl":
        algo = read_msccl_xml(text)
        kind, ranks, multiple = algo.coll, len(algo.gpus), {"elements_multiple_of": algo.chunks}
        least, most = algo.min_bytes, algo.max_bytes
    else:
        content = read_mscclpp_json(text)
        kind, ranks, multiple = content.collective, len(content.gpus), {"bytes_multiple_of": unit_bytes(content)}
        least, most = content.min_bytes, 0 if content.max_bytes == NO_LIMIT else content.max_bytes
    collective = next((name for name in COLLECTIVES if name.replace("_", "") == kind), kind)
    return {"collective": collective, "ranks": ranks, "least_bytes": least, "most_bytes": most, **multiple}


def _entry(path: str, name: str, window: Window) -> dict[str, Any]:
    """Return the entry of a file in ``ranks.json``."""
    return {
        "file": path,
        "format": name,
        "least_bytes": window.least_bytes,
        "most_bytes": window.most_bytes,
        "algorithm": window.plan.algorithm,
        "gb_per_s": round(window.plan.algbw, 3),
        "at_bytes": window.plan.nbytes,
        "planned_us": planned_us(window.plan, window.least_bytes, window.most_bytes),
    }


def planned_us(window_plan: Plan, least_bytes: int, most_bytes: int) -> dict[str, float]:
    """Return the predicted microseconds of a plan for each power of two in a range, by the size as text."""
    sizes = [nbytes for nbytes in SIZES if least_bytes <= nbytes <= (most_bytes or NO_LIMIT)]
    topology, costs = window_plan.topology, window_plan.request.costs
    seconds = {nbytes: simulate(window_plan.schedule, topology, nbytes, costs=costs).seconds for nbytes in sizes}
    return {str(nbytes): round(each * 1e6, 3) for nbytes, each in seconds.items()}


def _range(window: Window) -> str:
    """Return a range of sizes as text.

    >>> _range(Window(0, 1023, None)), _range(Window(1024, 0, None)), _range(Window(0, 0, None))
    ('up to 1023 bytes', 'from 1024 bytes', 'all sizes')
    """
    if not window.most_bytes and not window.least_bytes:
        return "all sizes"
    if not window.most_bytes:
        return f"from {window.least_bytes} bytes"
    return f"{f'{window.least_bytes}' if window.least_bytes else 'up'} to {window.most_bytes} bytes"


_HOW: Final = {
    "msccl": """A runtime reads all regular files of the folder, so keep other files out of it. It uses a file for the
sizes in the table, and its own algorithms for others. DIR is the absolute path of this folder.

- msccl-executor-nccl: `mpirun -x MSCCL_ALGO_DIR=DIR/msccl ...`
- RCCL: `mpirun -x MSCCL_ALGO_DIR=DIR/msccl -x RCCL_MSCCL_FORCE_ENABLE=1 ...`, in a version that still has MSCCL. If a
  process has several GPUs, also set `RCCL_MSCCL_ENABLE_SINGLE_PROCESS=1`.
- microsoft/msccl: `mpirun -x NCCL_ALGO=MSCCL,RING,TREE -x MSCCL_XML_FILES=FILE:FILE ...`, with the paths of the files.
  It reads `maxBytes="0"` as no size at all: in the last file, write a large number instead.

`NCCL_DEBUG=INFO` logs which files were read.
""",
    "mscclpp": """`register_mscclpp.py` registers the files with MSCCL++, and selects one by collective and size.
Input and output are the same memory. MSCCL++'s executor raises an error for sizes that a file does not have.
""",
}


def _readme(
    machine: str,
    collective: str,
    sample: Plan,
    windows: dict[str, tuple[Window, ...]],
    left_out: list[str],
    fits: dict[str, str],
) -> str:
    """Return the README: how to use the files, for which ranks and sizes, and the sizes without a file.

    ``fits`` has for each file a description of the sizes within its range that can use it.
    """
    lines = [f"# {collective} on {machine}", ""]
    lines += [
        f"{len(sample.ranks)} ranks. The files name no devices, so each rank must use the device in this table:",
        "",
    ]
    lines += ["| rank | device |", "|---|---|", *(f"| {k} | {device} |" for k, device in enumerate(sample.ranks)), ""]
    if sample.root is not None:
        lines += [
            f"The root is {sample.root}, rank {sample.ranks.index(sample.root)}. The files do not store it: a runtime "
            "uses them for all roots, and the results for others are wrong. Do not use them in programs that have "
            "other roots.",
            "",
        ]
    lines += [
        "Check the files with `crossreduce verify DIR`, where DIR is this folder. Sizes are those of the whole buffer: "
        "of the output of an all-gather, of the input of a reduce-scatter. Predictions count links and the costs in "
        "`ranks.json`, but not the start of a kernel.",
        "",
    ]
    if sample.topology.assumed:
        lines += [f"Not stated by {machine}, so assumed:", "", *(f"- {text}" for text in sample.topology.assumed), ""]
    for name, format_windows in windows.items():
        if not format_windows:
            continue
        lines += [f"## {name}", "", _HOW[name], launch_text(name, sample.ranks)]
        lines += ["| file | bytes | algorithm | predicted | sizes |", "|---|---|---|---|---|"]
        for k, window in enumerate(format_windows):
            rate = f"{window.plan.algbw:.2f} GB/s at {size(window.plan.nbytes)}"
            file = f"{name}/{collective}_{k}.{SUFFIXES[name]}"
            lines.append(f"| {file} | {_range(window)} | {window.plan.algorithm} | {rate} | {fits[file]} |")
        lines.append("")
    if left_out:
        lines += ["## Sizes without a file", "", *(f"- {text}" for text in left_out), ""]
    return "\n".join(lines)
