"""The option ``--measured`` of the commands ``topology`` and ``plan``: speeds of links that are fitted to results.

Input: files with results, the topology of the machine. Output: a ``Calibration``, and what the commands print of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from .. import Topology
from ..errors import ArgumentError
from ..options import ALGORITHMS
from ..planning.calibration import ASSUMED, Calibration, Estimate, algorithm_of, calibrate
from ..planning.explain import duration, size
from ..schedule.schedule import many
from ..topology.measurements import LARGEST, Measurement, read_measurements
from .arguments import one_of
from .output import progress, rate_json

Measured = Annotated[
    list[Path] | None,
    Option(
        "--measured",
        help="Fit the speeds of the links to these results: JSON of nccl-tests (-J) or of crossreduce bench (--json). "
        "Repeatable, for example for one host and for two.",
    ),
]
MeasuredAlgorithm = Annotated[
    str,
    Option(
        "--measured-algorithm", help=f"Algorithm of measured results that name none, as NCCL's. Default: {ASSUMED}."
    ),
]


def fitted(measured: list[Path] | None, topology: Topology, assumed: str) -> Calibration | None:
    """Return the calibration of a topology with the results in files; ``None``: there are no files."""
    one_of(ALGORITHMS, "--measured-algorithm", assumed)
    if not measured:
        if assumed != ASSUMED:
            raise ArgumentError("--measured-algorithm requires results: add --measured FILE.")
        return None
    found: list[Measurement] = []
    for path in measured:
        try:
            with path.open("rb") as file:
                found += read_measurements(file.read(LARGEST + 1), topology)
        except OSError as error:
            raise ArgumentError(f"--measured {path} cannot be read: {error.strerror}.") from error
        except ArgumentError as error:
            error.prefix(f"--measured {path}")
            raise
    with progress("fitting speeds", 1):
        return calibrate(topology, found, assumed)


def plan_lines(found: Calibration, seconds: float) -> dict[str, str]:
    """Return lines about a plan that is predicted to take ``seconds``, by their labels.

    The first one has the limits of the time that the residuals of the fit imply.
    """
    low, high = map(duration, found.interval(seconds))
    overhead = f" with {duration(float(found.overhead.value))} per call" if found.overhead.value else ""
    how = f"+- {percent_of(2 * found.rms)}, twice the rms of {many(len(found.measurements), 'result')}"
    lines = {"measured": f"{low} to {high}{overhead} ({how})"}
    if found.assumed:
        lines["assumed"] = f"{'; '.join(found.assumed)}: not identified by the results"
    return lines


def calibration_lines(found: Calibration, assumed: str) -> list[str]:
    """Return the fitted speeds, what the results do not identify, and the residuals as lines of text."""
    rms = f"rms of the residuals {percent_of(found.rms)}"
    head = f"speeds fitted to {many(len(found.measurements), 'result')}, {rms}; +-: standard errors"
    classes = [("links", "number", "GB/s given", "fitted", "+-", "us given", "fitted", "+-")]
    for one in found.classes:
        cells = *_cells(one.links.bandwidth, one.bandwidth, 1), *_cells(one.links.latency_s, one.latency, 1e6)
        classes.append((str(one.links), str(one.number), *cells))
    lines = [head, *_columns(classes), *(f"as given, since the results do not identify it: {x}" for x in found.assumed)]
    known = found.overhead.error is not None
    overhead = f"{duration(float(found.overhead.value))} +- {duration(found.overhead.error or 0)}"
    lines.append(f"overhead of a call: {overhead if known else '0, since the results do not identify it'}")
    unnamed = sum(algorithm_of(one, "") == "" for one in found.measurements)
    if unnamed:
        lines.append(f"predicted as {assumed}, since they name no algorithm of this library: {many(unnamed, 'result')}")
    rows = [("collective", "devices", "algorithm", "size", "measured", "predicted", "difference")]
    for measured, seconds, residual in zip(found.measurements, found.predicted, found.residuals, strict=True):
        times = duration(measured.seconds), duration(seconds), f"{100 * residual:+.1f} %"
        what = measured.collective, str(len(measured.devices)), algorithm_of(measured, assumed), size(measured.nbytes)
        rows.append((*what, *times))
    return [*lines, *_columns(rows)]


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def percent_of(ratio: float) -> str:
    """Return a part as a percentage with two significant digits.

    >>> percent_of(0.01234), percent_of(0)
    ('1.2 %', '0 %')
    """
    return f"{100 * ratio:.2g} %"


def calibration_json(found: Calibration, assumed: str) -> dict[str, Any]:
    """Return a calibration for JSON."""
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
            for one in found.classes
        ],
        "overhead_s": float(found.overhead.value),
        "overhead_error": found.overhead.error,
        "rms": found.rms,
        "not_identified": found.assumed,
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
            for one, seconds, residual in zip(found.measurements, found.predicted, found.residuals, strict=True)
        ],
    }


def _cells(given: Any, estimate: Estimate, scale: float) -> tuple[str, str, str]:
    """Return a given number, the fitted one and its standard error as text."""
    if estimate.error is None:
        return f"{float(given) * scale:.4g}", "as given", ""
    return f"{float(given) * scale:.4g}", f"{float(estimate.value) * scale:.4g}", f"{estimate.error * scale:.2g}"
