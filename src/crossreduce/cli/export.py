"""``crossreduce export``: plan a collective, and write the plan into a file or a folder.

Input: the options of ``crossreduce plan``, and a file. Output: the explanation or JSON, and the file: in a format of
``EXPORTERS``, a page for a browser, or a picture.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from .. import Costs, Plan
from ..errors import ArgumentError
from ..export import EXPORTERS, Exporter, format_of
from ..export.explorer import Beside, report_html, stages, with_losses
from ..export.exportable import check_exportable
from ..export.fitting import Fitting, fitting
from ..export.formats.nccl_graph import PATHS
from ..export.runners import runner_files
from ..planning.granularity import TOLERANCE, sizes_that_fit
from ..planning.schedules import CHOICES
from ..topology import byte_count
from ..topology.measurements import LARGEST
from .calibrate import measurements
from .support.arguments import one_of, say_unused
from .support.output import INVOKED, atomic_file, check_folder, draw, print_files, progress, write_folder
from .support.plans import NBYTES, Granularity, PlanRequest, plan_json, plan_options, plan_text, read_granularity
from .support.topologies import PICTURE_SUFFIXES, Json

PAGE_SUFFIX: Final = ".html"
SUFFIXES: Final = tuple(exporter.suffix for exporter in EXPORTERS.values() if exporter.suffix)
TUNER: Final = "nccl-tuner"  # it holds choices for all collectives and sizes, not a plan
ONE_RANK: Final = tuple(name for name, exporter in EXPORTERS.items() if exporter.one_rank)
_GRAPHS: Final = "Options for NCCL graphs"
_FILE: Final = f"{', '.join(SUFFIXES)}; {PAGE_SUFFIX}: a page for a browser; .svg, .png: a picture; or --format."


@plan_options()
def export(
    request: PlanRequest,
    file: Annotated[Path, Argument(metavar="FILE|DIR", help=_FILE)],
    format: Annotated[  # noqa: A002 - the option's name
        str | None, Option(help=f"{', '.join((*EXPORTERS, TUNER))}. Default: by the suffix of the file.")
    ] = None,
    rank: Annotated[
        int | None, Option(help=f"Only the part of this rank, in: {', '.join(ONE_RANK)}. Default: all.")
    ] = None,
    granularity: Granularity = None,
    path: Annotated[
        str | None,
        Option(metavar="PATH", help=f"Connection of the GPUs: {', '.join(PATHS)}.", rich_help_panel=_GRAPHS),
    ] = None,
    copies: Annotated[int | None, Option(help="Channels of each ring.", rich_help_panel=_GRAPHS)] = None,
    measured: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help=f"A report of nccl-tests; repeatable. A page shows its times; {TUNER} needs NCCL_ALGO and NCCL_PROTO.",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        Option(metavar="NAME", help="For a page: an algorithm, or another machine or file, to compare with."),
    ] = None,
    json: Json = False,
) -> None:
    """Plan a collective, and write the plan into a file for another program.

    With the algorithm auto, the fastest plan that the format can hold is
    written. Chakra traces are several files, in a folder.
    """
    kind = _format(file, format)
    if measured and kind not in (TUNER, PAGE_SUFFIX):
        problem = f"--measured is only for --format {TUNER} and pages."
        raise ArgumentError.of(problem, str(measured[0]), "crossreduce calibrate MACHINE RESULTS")
    if beside is not None and kind != PAGE_SUFFIX:
        raise ArgumentError.of("--beside is only for pages.", str(file), f"a file that ends in {PAGE_SUFFIX}")
    graph = {name: value for name, value in (("path", path), ("copies", copies)) if value is not None}
    if graph and kind != "nccl-graph":
        raise ArgumentError(f"{', '.join(f'--{name}' for name in graph)} can only be used with --format nccl-graph.")
    if kind == TUNER:
        if rank is not None:
            raise ArgumentError(f"--rank requires a format that can hold one rank alone: {', '.join(ONE_RANK)}.")
        _say_unused_by_tuner(request, granularity)
        _write_tuner(file, request, measured or [], as_json=json)
        return
    if rank is not None and kind not in ONE_RANK:
        raise ArgumentError(f"--rank requires a format that can hold one rank alone: {', '.join(ONE_RANK)}.")
    exporter = EXPORTERS.get(kind)
    by_rank = exporter is not None and exporter.by_rank
    is_folder = exporter is not None and exporter.is_folder
    share = read_granularity(granularity, TOLERANCE if by_rank and not is_folder else 0.0)
    check_exportable(kind, request.topology, request.collective)
    if exporter is not None and exporter.runs_elsewhere:
        request = request.for_one_kernel()
    if exporter is None:
        times = measurements(measured or [], request.complete)
        wanted = set(request.participants or request.topology.devices)
        if measured and not any(x.collective == request.collective and set(x.devices) == wanted for x in times):
            say_unused("--measured", f"no result is of {request.collective} among {len(wanted)} devices of this plan")
        other = None if beside is None else request.beside(beside)
        shown = Beside(None, beside or "", times, request.label, INVOKED.get())
        text = _write_drawn(file, kind, request, share, other, shown, as_json=json)
    else:
        options: dict[str, Any] = graph if rank is None else {"rank": rank}
        if is_folder:
            text = _write_folder(file, exporter, request, share, options, as_json=json)
        else:
            text = _write_file(file, kind, request, share, options, as_json=json)
    print(text)
    if not json:
        print_files(file, use="open it in a browser" if exporter is None else "written")


def _format(file: Path, given: str | None) -> str:
    """Return the name of the exporter for ``given`` (--format) or the file, or the suffix of a page or a picture."""
    if not file.name:
        raise ArgumentError(f"FILE {file} is a folder: name a file in it.")
    if given is not None:
        return one_of((*EXPORTERS, TUNER), "--format", given)
    suffix = file.suffix.lower()
    if suffix in (PAGE_SUFFIX, *PICTURE_SUFFIXES):
        return suffix
    kind = format_of(file.name)
    if kind is None:
        listed = ", ".join((*SUFFIXES, PAGE_SUFFIX, *PICTURE_SUFFIXES))
        raise ArgumentError(f"{file} must end in {listed}, or --format must be given.")
    return kind


def _say_unused_by_tuner(request: PlanRequest, granularity: float | None) -> None:
    """Say which options select one plan, and so do not change the file of NCCL's tuner plug-in."""
    given = {
        "--collective": request.collective != "all_reduce",
        "--nbytes": request.nbytes != byte_count(NBYTES),
        "--algorithm": request.algorithm != "auto",
        "--root": request.root is not None,
        "--packs": request.packs != 1,
        "--participants": request.participants is not None,
        "--costs or --operation-us": request.costs != Costs(),
        "--granularity": granularity is not None,
    }
    for option in (name for name, is_given in given.items() if is_given):
        say_unused(option, f"the file of {TUNER} has choices for all collectives and sizes")


def _write_tuner(file: Path, request: PlanRequest, measured: list[Path], *, as_json: bool) -> None:
    """Write the file of NCCL's tuner plug-in, and print where the times of its rows are from."""
    from ..export.formats.nccl_tuner import SOURCES, counts_text, read_runs, to_nccl_tuner_csv

    times = read_runs([(str(path), _read_report(path)) for path in measured], request.topology)
    with atomic_file("FILE", file) as target, progress("modelling", 1):
        assert target is not None
        text = to_nccl_tuner_csv(request.topology, times)
        target.write_text(text, "utf-8")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    counts = {source: text.count(f"\n# {source}: ") for source in SOURCES}
    if as_json:
        about = {"file": str(file), "rows": len(rows), **{f"{source}_rows": counts[source] for source in SOURCES}}
        print(json_module.dumps(about | {"assumed": request.topology.assumed}, indent=2))
        return
    print(f"{file}: {len(rows)} rows for {request.machine}: {counts_text(counts)}")
    for assumption in request.topology.assumed:
        print(f"  assumed   {assumption}")
    print(f"  to use    NCCL_TUNER_PLUGIN=libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE={file}")


def _read_report(path: Path) -> bytes:
    """Return the start of a report, one byte more than a report may have."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise ArgumentError(f"--measured {path} cannot be read: {error.strerror or error}.") from error


def _write_drawn(
    file: Path,
    suffix: str,
    request: PlanRequest,
    granularity: float,
    other: PlanRequest | None,
    beside: Beside,
    *,
    as_json: bool,
) -> str:
    """Write a page for a browser or a picture, and return what the command prints.

    A page also shows the plan of the request ``other``, and the measured times of ``beside``.
    """
    with atomic_file("FILE", file) as target:
        with progress("planning", 2) as advance:
            plan = request.plan(granularity=granularity)
            advance("comparing")
        if suffix == PAGE_SUFFIX and target is not None:
            if other is not None:
                beside = beside._replace(plan=other.plan(granularity=granularity))
            with progress("exploring", stages(plan, beside), lines=True) as advance:
                plan, lost = with_losses(plan, advance)
                target.write_text(report_html(plan, advance, beside, lost), "utf-8", newline="\n")
        else:
            draw("draw_schedule", target, plan.schedule, plan.topology)
        return _report(request, plan, {}, {}, as_json=as_json)


def _write_file(
    file: Path, kind: str, request: PlanRequest, granularity: float, options: dict[str, Any], *, as_json: bool
) -> str:
    """Write a file, and a map of ranks to devices if the format has rank numbers. Return what the command prints."""
    exporter = EXPORTERS[kind]
    map_file = file.with_name(f"{file.name}.ranks.json") if exporter.by_rank else None
    extra: dict[str, Any] = {}  # more entries of the JSON
    with (
        atomic_file("FILE", file) as target,
        atomic_file("FILE", map_file) as mapped,
        progress("planning", 3) as advance,
    ):
        assert target is not None
        plan = request.plan(granularity=granularity)
        advance("exporting")
        if request.algorithm in CHOICES and request.packs == 1:  # the planner may take another algorithm
            plan, content, refused = fitting(plan, lambda each: exporter.text(each, **options))
        else:
            plan, content, refused = Fitting(plan, exporter.text(plan, **options), "")
        advance("comparing")
        lines = _ranks_line(plan, exporter)
        if refused:
            lines["format"] = extra["replaced"] = refused
        if mapped is not None:
            multiple = exporter.multiple_of(plan, content)
            about: dict[str, Any] = {"file": file.name, "ranks": plan.ranks, "root": plan.root}
            about |= {f"{exporter.counts}_multiple_of": multiple}
            # Runtimes read every file in the folder of an MSCCL file, so nothing else is written beside it.
            runners = runner_files(kind, map_file.name, f"{file.stem}_") if map_file and kind == "mscclpp" else {}
            if runners:
                about |= {"collective": plan.collective, "files": [_entry(file.name, kind, exporter, plan, multiple)]}
                write_folder("FILE", file.parent, {name: runner.encode() for name, runner in runners.items()})
            mapped.write_text(json_module.dumps(about) + "\n", "utf-8")
            lines["sizes"] = sizes_that_fit(multiple, exporter.counts)
            lines |= {"runners": ", ".join(runners)} if runners else {}
        text = _report(request, plan, extra, lines, as_json=as_json)
        target.write_text(content, "utf-8")
    return text


def _write_folder(
    path: Path, exporter: Exporter, request: PlanRequest, granularity: float, options: dict[str, Any], *, as_json: bool
) -> str:
    """Write the files of a folder and a map of ranks to devices, and return what the command prints."""
    check_folder("DIR", path)
    with progress("planning", 3) as advance:
        plan = request.plan(granularity=granularity)
        advance("exporting")
        files = exporter.write(plan, **options)
        assert isinstance(files, dict)
        advance("comparing")
        remarks = exporter.remarks_on(plan, files)
        lines = _ranks_line(plan, exporter) | remarks
        text = _report(request, plan, {"remarks": remarks}, lines, as_json=as_json)
        about = json_module.dumps({"ranks": plan.ranks, "nbytes": plan.nbytes}) + "\n"
        write_folder("DIR", path, files | {f"{plan.collective}_{plan.algorithm}.ranks.json": about.encode()})
    return text


def _entry(name: str, kind: str, exporter: Exporter, plan: Plan, multiple: int) -> dict[str, Any]:
    """Return what the map of ranks says about its file: that it is for all sizes."""
    sizes = {"least_bytes": 0, "most_bytes": 0, f"{exporter.counts}_multiple_of": multiple}
    return {"file": name, "format": kind, **sizes, "planned_us": {str(plan.nbytes): round(plan.seconds * 1e6, 3)}}


def _ranks_line(plan: Plan, exporter: Exporter) -> dict[str, str]:
    """Return a line, by its label, with the device of each rank; an empty dict if the format has no rank numbers."""
    return (
        {"ranks": ", ".join(f"{rank} {device}" for rank, device in enumerate(plan.ranks))} if exporter.by_rank else {}
    )


def _report(request: PlanRequest, plan: Plan, extra: dict[str, Any], lines: dict[str, str], *, as_json: bool) -> str:
    """Return the plan as text, followed by ``lines``, or as JSON, with the entries of ``extra``."""
    if as_json:
        return json_module.dumps(plan_json(request.machine, plan) | extra, indent=2)
    return plan_text(request, plan, lines)
