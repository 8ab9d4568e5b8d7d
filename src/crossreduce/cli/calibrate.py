"""``crossreduce calibrate``: fit the speeds of links to results, and plan with the fitted links.

Input: the topology of the machine, and files with results. Output: the fitted speeds, the speeds that the results do
not identify, the residuals, and a plan with an interval for its time. On request, it writes the fitted topology.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from .. import Topology
from ..errors import ArgumentError
from ..options import ALGORITHMS
from ..planning.calibration import ASSUMED, Calibration, Estimate, algorithm_of
from ..planning.calibration import calibrate as calibrate_links
from ..planning.explain import duration, size
from ..schedule.schedule import many
from ..topology.measurements import LARGEST, Measurement, read_measurements
from .support.arguments import one_of
from .support.output import atomic_file, progress, rate_json
from .support.plans import PlanRequest, plan_json, plan_options, plan_text
from .support.topologies import Json

_RESULTS: Final = "Reports of nccl-tests or of crossreduce bench (both: -J), for example of one host and of two."


@plan_options("root", "packs", "participants")
def calibrate(
    request: PlanRequest,
    results: Annotated[list[Path], Argument(metavar="RESULTS", help=_RESULTS)],
    assume: Annotated[str, Option(help="Algorithm of results that name none, such as NCCL's.")] = ASSUMED,
    export: Annotated[Path | None, Option(help="Write the fitted topology to this .json file.")] = None,
    json: Json = False,
) -> None:
    """Fit the speeds of links to results, and plan a collective on them.

    Every command accepts the file of --export in place of a machine.
    """
    assume = one_of(ALGORITHMS, "--assume", assume)
    if export is not None and export.suffix.lower() != ".json":
        raise ArgumentError(f"--export must be a .json file, not {export}.")
    with atomic_file("--export", export) as exported:
        fit = fit_links(results, request.complete, assume)
        topology = request.part_of(fit.topology)
        with progress("planning", 2) as advance:
            plan = request._replace(topology=topology).plan()
            advance("comparing")
            if json:
                measured = {"seconds": fit.interval(plan.seconds)} | calibration_json(fit, assume)
                text = json_module.dumps(plan_json(request.machine, plan) | {"measured": measured}, indent=2)
            else:
                lines = [*calibration_lines(fit, assume), "", plan_text(request, plan, plan_lines(fit, plan.seconds))]
                text = "\n".join(lines)
        if exported is not None:
            exported.write_text(topology.to_json() + "\n", "utf-8")
    print(text)


def fit_links(paths: list[Path], topology: Topology, assumed: str) -> Calibration:
    """Fit a topology to the results in files. ``assumed``: the algorithm of results that name none."""
    found = measurements(paths, topology)
    with progress("fitting speeds", 1):
        return calibrate_links(topology, found, assumed)


def measurements(paths: list[Path], topology: Topology) -> tuple[Measurement, ...]:
    """Return the results in files, as times of devices of a topology."""
    found: list[Measurement] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                found += read_measurements(file.read(LARGEST + 1), topology)
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error.strerror}.") from error
        except ArgumentError as error:
            error.prefix(str(path))
            raise
    return tuple(found)


def plan_lines(fit: Calibration, seconds: float) -> dict[str, str]:
    """Return lines, by their labels, about a plan that is predicted to take ``seconds``.

    The first line has the interval of the time: plus or minus twice the rms of the fit's residuals.
    """
    low, high = map(duration, fit.interval(seconds))
    overhead = f" with {duration(float(fit.overhead.value))} per call" if fit.overhead.value else ""
    how = f"+- {percent_of(2 * fit.rms)}, twice the rms of {many(len(fit.measurements), 'result')}"
    lines = {"measured": f"{low} to {high}{overhead} ({how})"}
    if fit.assumed:
        lines["assumed"] = f"{'; '.join(fit.assumed)}: not identified by the results"
    return lines


def calibration_lines(fit: Calibration, assumed: str) -> list[str]:
    """Return lines with the fitted speeds, the speeds that the results do not identify, and the residuals."""
    rms = f"rms of the residuals {percent_of(fit.rms)}"
    head = f"speeds fitted to {many(len(fit.measurements), 'result')}, {rms}; +-: standard errors"
    classes = [("links", "number", "GB/s given", "fitted", "+-", "us given", "fitted", "+-")]
    for fitted in fit.classes:
        bandwidth = _cells(fitted.links.bandwidth, fitted.bandwidth, 1)
        latency = _cells(fitted.links.latency_s, fitted.latency, 1e6)
        classes.append((str(fitted.links), str(fitted.number), *bandwidth, *latency))
    lines = [head, *_columns(classes), *(f"as given, since the results do not identify it: {x}" for x in fit.assumed)]
    is_identified = fit.overhead.error is not None
    overhead = f"{duration(float(fit.overhead.value))} +- {duration(fit.overhead.error or 0)}"
    lines.append(f"overhead of a call: {overhead if is_identified else '0, since the results do not identify it'}")
    unnamed = sum(algorithm_of(measured, "") == "" for measured in fit.measurements)
    if unnamed:
        lines.append(f"predicted as {assumed}, since they name no algorithm of this library: {many(unnamed, 'result')}")
    rows = [("collective", "devices", "algorithm", "size", "measured", "predicted", "difference")]
    for measured, seconds, residual in zip(fit.measurements, fit.predicted, fit.residuals, strict=True):
        times = duration(measured.seconds), duration(seconds), f"{100 * residual:+.1f} %"
        algorithm = algorithm_of(measured, assumed)
        rows.append((measured.collective, str(len(measured.devices)), algorithm, size(measured.nbytes), *times))
    return [*lines, *_columns(rows)]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def percent_of(ratio: float) -> str:
    """Return a ratio as a percentage with two significant digits.

    >>> percent_of(0.01234), percent_of(0)
    ('1.2 %', '0 %')
    """
    return f"{100 * ratio:.2g} %"


def calibration_json(fit: Calibration, assumed: str) -> dict[str, Any]:
    """Return a calibration as a dict for JSON."""
    return {
        "classes": [
            {
                "links": str(one.links),
                "between_hosts": one.links.between_hosts,
                "number": one.number,
                "given": {"gb_per_s": float(one.links.bandwidth), "latency_s": float(one.links.latency_s)},
                "bandwidth": rate_json(one.bandwidth.value),
                "bandwidth_error": one.bandwidth.error,
                "latency_s": float(one.latency.value),
                "latency_error": one.latency.error,
            }
            for one in fit.classes
        ],
        "overhead_s": float(fit.overhead.value),
        "overhead_error": fit.overhead.error,
        "rms": fit.rms,
        "not_identified": fit.assumed,
        "results": [
            {
                "collective": one.collective,
                "devices": one.devices,
                "algorithm": algorithm_of(one, assumed),
                "nbytes": one.nbytes,
                "seconds": one.seconds,
                "predicted": seconds,
                "residual": residual,
            }
            for one, seconds, residual in zip(fit.measurements, fit.predicted, fit.residuals, strict=True)
        ],
    }


def _cells(given: Any, estimate: Estimate, scale: float) -> tuple[str, str, str]:
    """Return three cells: a given number, the fitted number and its standard error, each multiplied by ``scale``."""
    if estimate.error is None:
        return f"{float(given) * scale:.4g}", "as given", ""
    return f"{float(given) * scale:.4g}", f"{float(estimate.value) * scale:.4g}", f"{estimate.error * scale:.2g}"
