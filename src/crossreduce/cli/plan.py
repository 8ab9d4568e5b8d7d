"""``crossreduce plan``: plan a collective on a topology, compare it with its bound, and export the schedule.

Input: a machine, a file or ``this`` machine, a collective, a number of bytes. Output: an explanation or JSON, the
steps, a picture, a page for a browser, a file in one of the formats of ``EXPORTERS``.
"""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from .. import Plan, __version__
from .. import plan as planned
from ..errors import ArgumentError
from ..export import EXPORTERS, Exporter, format_of
from ..export.exportable import check_exportable
from ..export.fitting import Fitting, fitting
from ..options import ALGORITHMS
from ..packing import MOST_PACKS
from ..planning.calibration import ASSUMED
from ..planning.explain import shape
from ..planning.granularity import TOLERANCE, sizes_that_fit
from ..planning.optimal.bounds import COLLECTIVES
from ..planning.schedules import CHOICES
from .arguments import at_least, one_of, read_costs, read_machine, read_nbytes, read_node, read_subset
from .bundle import check_bundle, write_bundle
from .groups import print_groups, read_groups, read_weights
from .measured import Measured, MeasuredAlgorithm, calibration_json, fitted, plan_lines
from .output import (
    atomic_file,
    bound_json,
    check_folder,
    draw,
    print_files,
    print_paged,
    progress,
    rate_json,
    write_explorer,
    write_folder,
)
from .topology import MACHINE, Devices, Hosts, InNetwork, Nics, Picture, Speeds, WithoutLink, check_picture, select

NBYTES: Final = "64M"
SUFFIXES: Final = tuple(exporter.suffix for exporter in EXPORTERS.values() if exporter.suffix)
FORMATS: Final = f"Format of the export: {', '.join(EXPORTERS)}. Default: by the suffix {', '.join(SUFFIXES)}."

ONE_RANK: Final = tuple(name for name, exporter in EXPORTERS.items() if exporter.one_rank)


def plan(
    machine: Annotated[str, Argument(metavar="MACHINE|FILE|this", help=f"{MACHINE}.")],
    collective: Annotated[str, Option(help=", ".join(COLLECTIVES))] = "all_reduce",
    nbytes: Annotated[str, Option(help="Bytes of the buffer; K, M, G are powers of 1024.")] = NBYTES,
    algorithm: Annotated[str, Option(help=", ".join(ALGORITHMS))] = "auto",
    root: Annotated[str | None, Option(help="Root, by number or name. Default: the best one.")] = None,
    packs: Annotated[int, Option(help="Number of trees, for one_device and hierarchical_copy.")] = 1,
    operation_us: Annotated[
        float | None,
        Option(
            help="Microseconds to queue an operation. Default: 2 on CUDA devices; 0 on others, and in exported plans, "
            "which other programs run."
        ),
    ] = None,
    devices: Devices = None,
    participants: Annotated[
        str | None,
        Option(help="Devices that take part, such as 0-3,6; all others help: they forward and combine. Default: all."),
    ] = None,
    groups: Annotated[
        str | None,
        Option(help='Groups that run at the same time, such as "0-3;4-7": one plan for all on the links they share.'),
    ] = None,
    mesh: Annotated[
        str | None,
        Option(
            help="Groups of a mesh of the devices, such as 2x8: the lines along each dimension, as in a DeviceMesh."
        ),
    ] = None,
    weights: Annotated[
        str | None, Option(help="With --groups or --mesh: a number per group; rates are in proportion. Default: 1.")
    ] = None,
    without_link: WithoutLink = None,
    hosts: Hosts = 1,
    granularity: Annotated[
        float | None,
        Option(
            help="Percent of the rate that shares in powers of two may cost, so that a file fits most sizes; 0: exact "
            "shares. Default: 2 in MSCCL and MSCCL++ files, else 0."
        ),
    ] = None,
    speeds: Speeds = "raw",
    nics: Nics = None,
    in_network: InNetwork = False,
    measured: Measured = None,
    measured_algorithm: MeasuredAlgorithm = ASSUMED,
    picture: Picture = None,
    export: Annotated[
        Path | None, Option(help="Write the schedule to this file; Chakra traces to this folder.")
    ] = None,
    report: Annotated[
        Path | None,
        Option(help="Write the plan as one HTML file (.html), which shows it in a browser without a network."),
    ] = None,
    format: Annotated[str | None, Option(help=FORMATS)] = None,  # noqa: A002 - the option's name
    rank: Annotated[
        int | None,
        Option(help=f"With --export, only the part of this rank. Formats: {', '.join(ONE_RANK)}. Default: all ranks."),
    ] = None,
    bundle: Annotated[
        Path | None,
        Option(help="Write MSCCL and MSCCL++ files for all sizes into this new folder. With --format, one of the two."),
    ] = None,
    costs: Annotated[
        str | None,
        Option(
            metavar="FILE|published",
            help="Costs besides the links: a file of Costs.to_json; published: those that are known of the machine.",
        ),
    ] = None,
    steps: Annotated[
        bool, Option("--steps", help="Also print the steps of the schedule; on a terminal in a pager.")
    ] = False,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan a collective: its schedule, its predicted time and its bound.

    Times are simulated from the bandwidths and latencies of the links. The
    exit code is 2 if some devices have no path between them.
    """
    one_of(COLLECTIVES, "--collective", collective)
    one_of(ALGORITHMS, "--algorithm", algorithm)
    if granularity is not None and not 0 <= granularity <= 100:
        problem = "--granularity must be a percentage from 0 to 100."
        raise ArgumentError.of(problem, str(granularity), "--granularity 2")
    if operation_us is not None and not 0 <= operation_us <= 1e6:
        problem = "--operation-us must be a number of microseconds from 0 to 1000000."
        raise ArgumentError.of(problem, str(operation_us), "--operation-us 2")
    size = read_nbytes("--nbytes", nbytes)
    if at_least(1, "--packs", packs) > MOST_PACKS:
        raise ArgumentError(f"--packs must be {MOST_PACKS} or less, not {packs}.")
    check_picture(picture)
    if report is not None and not report.name.lower().endswith(".html"):
        raise ArgumentError(f"--report {report} must end in .html.")
    if bundle is not None:
        given = {
            "--nbytes": nbytes != NBYTES, "--algorithm": algorithm != "auto", "--packs": packs != 1, "--export": export,
            "--picture": picture, "--report": report, "--steps": steps, "--participants": participants,
            "--rank": rank is not None, "--groups": groups, "--mesh": mesh, "--weights": weights,
        }  # fmt: skip
        rootless = collective not in ("broadcast", "reduce")
        given["--root of an " + collective.replace("_", "-")] = root is not None and rootless
        check_bundle(bundle, format, [option for option, value in given.items() if value])
    elif groups is not None or mesh is not None:
        given = {
            "--algorithm": algorithm != "auto", "--root": root, "--packs": packs != 1, "--participants": participants,
            "--granularity": granularity is not None, "--measured": bool(measured), "--picture": picture,
            "--export": export, "--report": report, "--format": format, "--steps": steps, "--rank": rank is not None,
        }  # fmt: skip
        refused_options = [option for option, value in given.items() if value]
        if refused_options:
            raise ArgumentError(f"--groups and --mesh plan several groups, without {refused_options[0]}.")
    elif weights is not None:
        raise ArgumentError("--weights requires groups: give them with --groups or --mesh.")
    elif format is not None and export is None:
        raise ArgumentError("--format requires a file: give it with --export.")
    kind = (
        one_of(EXPORTERS, "--format", format)
        if format is not None and bundle is None
        else ""
        if export is None
        else format_of(export.name)
    )
    if kind is None:
        raise ArgumentError(f"--export {export} must end in {', '.join(SUFFIXES)}, or --format must be given.")
    if rank is not None and kind not in ONE_RANK:
        raise ArgumentError(f"--rank requires --export in a format of one rank alone: {', '.join(ONE_RANK)}.")
    options: dict[str, Any] = {} if rank is None else {"rank": rank}
    complete = read_machine(machine, hosts, speeds, nics, in_network)
    calibration = fitted(measured, complete, measured_algorithm)
    chosen = select(complete if calibration is None else calibration.topology, devices, without_link)
    main = None if root is None else read_node("--root", root, complete)
    members = None if participants is None else read_subset("--participants", participants, chosen)
    stated = read_costs(costs, machine, hosts, nics)
    if operation_us is not None:
        stated = replace(stated, operation_s=operation_us / 1e6)
    if groups is not None or mesh is not None:
        several = read_groups(groups, mesh, chosen)
        listed = read_weights(weights, len(several))
        print_groups(machine, chosen, several, listed, collective, size, stated, as_json=json)
        return
    if bundle is not None:
        part = TOLERANCE if granularity is None else granularity / 100
        made_for = f"{machine}, {hosts} hosts" if hosts > 1 else machine
        made_for += "" if chosen == complete else ", with changes (a part, or measured speeds)"
        write_bundle(bundle, format, chosen, collective, main, part, stated, made_for, as_json=json)
        return
    exporter = EXPORTERS.get(kind)
    check_exportable(kind, chosen, collective)
    by_rank, runs_elsewhere = (exporter.by_rank, exporter.runs_elsewhere) if exporter else (False, False)
    folder = export if exporter is not None and exporter.is_folder else None
    if folder is not None:
        check_folder("--export", folder)
        export = None
    map_file = export.with_name(f"{export.name}.ranks.json") if export is not None and by_rank else None
    with atomic_file("--picture", picture) as drawing, atomic_file("--report", report) as explorer:
        with (
            atomic_file("--export", export) as exported,
            atomic_file("--export", map_file) as mapped,
            progress("planning", 3) as advance,
        ):
            if runs_elsewhere and stated.operation_s is None:
                stated = replace(stated, operation_s=0)
            part = granularity / 100 if granularity is not None else TOLERANCE if map_file is not None else 0.0
            found = planned(
                chosen, collective, size, algorithm, root=main, participants=members, packs=packs, costs=stated,
                granularity=part,
            )  # fmt: skip
            advance("exporting")
            content, refused = "", ""
            if exported is not None and exporter is not None:
                free = algorithm in CHOICES and packs == 1
                if free:
                    fit = fitting(found, lambda each: exporter.text(each, **options))
                else:
                    fit = Fitting(found, exporter.text(found, **options), "")
                found, content, refused = fit
            advance("comparing")
            facts, multiple = _json(machine, found, with_steps=steps) if json else {}, found.schedule.units
            text = "" if json else found.explain()
            lines = (
                {"ranks": ", ".join(f"{rank} {device}" for rank, device in enumerate(found.ranks))} if by_rank else {}
            )
            if calibration is not None:
                lines |= plan_lines(calibration, found.seconds)
                interval = {"seconds": calibration.interval(found.seconds)}
                facts["measured"] = interval | calibration_json(calibration, measured_algorithm)
            if folder is not None and exporter is not None:
                facts["remarks"] = remarks = _export_folder(folder, exporter, found, **options)
                lines |= remarks
            elif exported is not None and exporter is not None:
                exported.write_text(content, "utf-8")
                multiple = exporter.multiple_of(found, content)
            if refused:
                lines["format"] = facts["replaced"] = refused
            if mapped is not None and export is not None:
                counts = exporter.counts if exporter else "elements"
                about: dict[str, Any] = {"file": export.name, "ranks": found.ranks, "root": found.root}
                about |= {f"{counts}_multiple_of": multiple}
                mapped.write_text(json_module.dumps(about) + "\n", "utf-8")
                lines["sizes"] = sizes_that_fit(multiple, counts)
            if json:
                text = json_module.dumps(facts, indent=2)
            else:
                text += "".join(f"\n  {label:<10}{line}" for label, line in lines.items())
        write_explorer(found, explorer)
        if steps:
            print_paged(text if json else f"{text}\n{found.schedule}")
        else:
            print(text)
        draw("draw_schedule", drawing, found.schedule, found.topology)
    if not json:
        print_files(report, picture)


def _export_folder(folder: Path, exporter: Exporter, found: Plan, **options: Any) -> dict[str, str]:
    """Write the files of a folder and the map of ranks, and return the exporter's remarks."""
    files = exporter.write(found, **options)
    assert isinstance(files, dict)
    about = json_module.dumps({"ranks": found.ranks, "nbytes": found.nbytes}) + "\n"
    write_folder("--export", folder, files | {f"{found.collective}_{found.algorithm}.ranks.json": about.encode()})
    return exporter.remarks_on(found, files)


def _json(machine: str, found: Plan, *, with_steps: bool) -> dict[str, Any]:
    schedule, limit, trees = found.schedule, found.bound, shape(found.schedule)
    report = {
        "crossreduce": __version__,
        "machine": machine,
        "collective": found.collective,
        "nbytes": found.nbytes,
        "devices": limit.devices,
        "ranks": found.ranks,
        "helpers": found.helpers,
        "algorithm": found.algorithm,
        "seconds": found.seconds,
        "algbw_gb_per_s": found.algbw,
        "rate": rate_json(found.rate),
        "bound": bound_json(limit),
        "ratio": {"exact": str(found.ratio), "value": float(found.ratio)},
        "k": {"exact": str(trees.k), "value": float(trees.k)},
        "roots": trees.roots,
        "depth": trees.depth,
        "chunks": schedule.chunk_count,
        "rounds": schedule.round_count,
        "steps": schedule.steps,
        "pieces": schedule.pieces,
        "others": {
            name: {"seconds": seconds, "rate": rate_json(rate)} for name, (seconds, rate) in found.others().items()
        },
    }
    return report | ({"schedule": json_module.loads(schedule.to_json())} if with_steps else {})
