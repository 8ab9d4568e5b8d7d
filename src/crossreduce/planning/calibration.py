"""Fit the bandwidths and latencies of a topology to measured times of collectives.

Input: a topology and ``Measurement``s on it. Output: a ``Calibration``: fitted topology, standard errors, residuals.

Links are of the same class if they have equal bandwidths and latencies in the given topology and are all within hosts,
or all between hosts. The fit has a bandwidth and a latency for each class, and a constant overhead for each call. The
predicted time of a measurement is the overhead plus the simulated time of the algorithm's schedule. A simulated time is
a sum of maxima of latencies and of bytes / bandwidth, so it is piecewise linear in the latencies and the inverses of
the bandwidths. Therefore each step of the fit solves a linear least-squares problem with bounds, with the derivatives
of the current piece (Gauss-Newton). If a bandwidth has no effect where the steps end, the fit is repeated from a start
at which the links of that class are the slowest. Errors are relative, so small and large buffers have the same weight.

A parameter is not identified, and keeps its given value, if it has no effect on the measurements, if others have the
same effect, or if its standard error is above half of its value. Of several parameters with the same effect, the
overhead is left out first (it is then 0), then a latency, then a bandwidth; of several latencies or bandwidths, the one
with the least effect.

Source: Björck, Numerical methods for least squares problems, SIAM, 1996 (Gauss-Newton; standard errors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, shown
from ..schedule import Schedule, simulate
from ..topology import Topology
from ..topology.links import Link
from ..topology.measurements import Measurement
from .plans import plan
from .schedules import NAMES

ASSUMED: Final = "ring"
"""The default for results that do not name their algorithm. NCCL uses rings only if ``NCCL_ALGO=Ring`` is set.

Source: github.com/NVIDIA/nccl-tests, issue 196.
"""

MOST_STEPS: Final = 20  # of Gauss-Newton; at most 6 were necessary in the tests
LEAST_EFFECT: Final = 0.01  # an identified parameter causes at least this part of one of the measured times
MOST_ERROR: Final = 0.5  # the greatest standard error of an identified parameter, relative to its value
SMALL_S: Final = 1e-6  # the scale of latencies that are given as 0, and of the overhead
FASTEST: Final = 1000  # a fitted bandwidth is at most this multiple of the given one
DIGITS: Final = 4  # significant digits of fitted numbers


class LinkClass(NamedTuple):
    """All links with a given bandwidth and latency within hosts, or all such links between hosts."""

    bandwidth: Fraction  # GB/s, as given
    latency_s: Fraction
    between_hosts: bool

    def __str__(self) -> str:
        where = "between hosts" if self.between_hosts else "within hosts"
        return f"{float(self.bandwidth):.4g} GB/s {where}"


class Estimate(NamedTuple):
    """A fitted number and its standard error, or the given number and ``None`` if it is not identified."""

    value: Fraction
    error: float | None


class FittedClass(NamedTuple):
    """A class of links with its fitted speeds."""

    links: LinkClass
    number: int  # of links in the class
    bandwidth: Estimate  # GB/s
    latency: Estimate  # seconds


@dataclass(frozen=True)
class Calibration:
    """A topology with fitted speeds, and how well it predicts the measurements."""

    topology: Topology
    classes: tuple[FittedClass, ...]
    overhead: Estimate  # seconds of each call that do not depend on its size
    measurements: tuple[Measurement, ...]
    predicted: tuple[float, ...]  # seconds of each measurement

    @property
    def residuals(self) -> tuple[float, ...]:
        """For each measurement its predicted time minus the measured one, relative to the measured one."""
        pairs = zip(self.predicted, self.measurements, strict=True)
        return tuple(seconds / measured.seconds - 1 for seconds, measured in pairs)

    @property
    def rms(self) -> float:
        """The root of the mean square of the residuals."""
        return math.sqrt(math.fsum(r * r for r in self.residuals) / len(self.residuals))

    @property
    def assumed(self) -> tuple[str, ...]:
        """The parameters that the measurements do not identify, as text."""
        texts = []
        for fitted in self.classes:
            estimates = {"bandwidth": fitted.bandwidth, "latency": fitted.latency}
            names = [name for name, estimate in estimates.items() if estimate.error is None]
            texts += [f"{' and '.join(names)} of links of {fitted.links}"] if names else []
        return tuple(texts)

    def interval(self, seconds: float) -> tuple[float, float]:
        """Return the limits of the likely time of a call. ``seconds`` is its predicted time without overhead.

        They are the prediction with overhead, times 1 - 2 ``rms`` and 1 + 2 ``rms``. If the errors are normally
        distributed, 95 % of the times are within these limits.
        """
        total = seconds + float(self.overhead.value)
        return max(0.0, total * (1 - 2 * self.rms)), total * (1 + 2 * self.rms)


def calibrate(topology: Topology, measurements: Iterable[Measurement], assumed: str = ASSUMED) -> Calibration:
    """Return a calibration: the topology with the bandwidths and latencies that predict the measurements best.

    Args:
      topology: the links with the speeds to start from.
      measurements: at least two, on devices of the topology.
      assumed: the algorithm that is taken for measurements that name none, or one that this library does not have.
    Raises:
      ArgumentError: too few measurements, or an unknown algorithm.
      PlanError: an algorithm cannot plan a measured collective.

    >>> ring = Topology.ring(4, gb_per_s=25, latency_s=1e-6)
    >>> times = {1 << k: 6 * (2e-6 + (1 << k) / 8 / 20e9) for k in (10, 16, 20, 24)}  # both ways, at 20 GB/s and 2 us
    >>> fit = calibrate(ring, [Measurement("all_reduce", n, t, ring.devices) for n, t in times.items()])
    >>> [(float(fitted.bandwidth.value), float(fitted.latency.value)) for fitted in fit.classes]
    [(20.0, 2e-06)]
    """
    if assumed not in NAMES:
        raise ArgumentError.of("there is no such algorithm.", shown(assumed), "one of " + ", ".join(NAMES))
    measured = tuple(measurements)
    if len(measured) < 2:
        problem = "a calibration needs at least two results, of different sizes."
        raise ArgumentError.of(problem, f"{len(measured)} results", "nccl-tests with several sizes: -b 1K -e 1G -f 4")
    return _Fit(topology, measured, assumed).calibration()


class _Fit:
    """A least-squares fit. Its parameters are the inverse bandwidth and the latency of each class, and the overhead.

    Their numbers are 2 * k and 2 * k + 1 for class k, and the last one. Parameters are multiples of the given numbers,
    or of ``SMALL_S`` for the overhead and for latencies given as 0. ``given`` is the start, ``lower`` the lower limits.
    """

    def __init__(self, topology: Topology, measurements: tuple[Measurement, ...], assumed: str) -> None:
        self.topology, self.measurements = topology, measurements
        self.members: dict[LinkClass, list[Link]] = {}
        for link in topology.links:
            self.members.setdefault(_class_of(link), []).append(link)
        self.classes = sorted(self.members, key=lambda kind: (kind.between_hosts, -kind.bandwidth, kind.latency_s))
        self.schedules = [_planned_schedule(topology, measured, assumed) for measured in measurements]
        self.given = [value for kind in self.classes for value in (1.0, float(bool(kind.latency_s)))] + [0.0]
        self.lower = [value for _ in self.classes for value in (1 / FASTEST, 0.0)] + [0.0]

    def calibration(self) -> Calibration:
        """Return the fit of all parameters that the measurements identify."""
        free, values = list(range(len(self.given))), list(self.given)  # ``free``: the numbers of the fitted parameters
        while True:
            values, errors, columns = self._fit_from_several_starts(free, values)
            left_out = self._not_identified(free, values, errors, columns)
            if left_out is None:
                return self._result(values, _standard_errors(free, errors, columns))
            free.remove(left_out)
            values[left_out] = self.given[left_out]

    def _fit_from_several_starts(self, free: list[int], values: list[float]) -> tuple[list[float], Any, Any]:
        """Return the best result of ``_solve`` from several starts: ``values``, and some with other slowest links."""
        best = self._solve(free, values)
        speeds = [float(kind.bandwidth) / best[0][2 * k] for k, kind in enumerate(self.classes)]
        for k, kind in enumerate(self.classes):
            if 2 * k in free and abs(best[2][:, free.index(2 * k)]).max() < LEAST_EFFECT:  # no effect on any time
                start = list(best[0])
                start[2 * k] = float(kind.bandwidth) / (min(speeds) / 2)  # half the speed of the slowest class
                other = self._solve(free, start)
                best = min(best, other, key=lambda solution: float(solution[1] @ solution[1]))
        return best

    def _solve(self, free: list[int], values: list[float]) -> tuple[list[float], Any, Any]:
        """Return the values of all parameters with the least errors, these relative errors, and their derivatives.

        The search starts at ``values``. It ends when a step stays in one linear piece, since that step is exact, or
        when a step makes the errors larger.
        """
        import numpy as np
        from scipy.optimize import lsq_linear

        errors = self._errors(values)
        columns = self._derivatives(free, values, errors)
        lower = np.array(self.lower)[free]
        for _ in range(MOST_STEPS if free else 0):
            start = np.array(values)[free]
            step = lsq_linear(columns, -errors, (lower - start, np.inf)).x  # 0 for parameters without effect here
            new = dict(zip(free, np.maximum(lower, start + step), strict=True))
            new_values = [float(new.get(k, value)) for k, value in enumerate(values)]
            new_errors = self._errors(new_values)
            if new_errors @ new_errors >= errors @ errors:
                break
            linear = np.abs(errors + columns @ step - new_errors).max() < 1e-9
            values, errors = new_values, new_errors
            if linear:
                break
            columns = self._derivatives(free, values, errors)
        return values, errors, columns

    def _errors(self, values: Sequence[float]) -> Any:
        """Return the relative errors of the predictions."""
        import numpy as np

        return np.array(self._predicted(values)) / [measured.seconds for measured in self.measurements] - 1

    def _derivatives(self, free: list[int], values: list[float], errors: Any) -> Any:
        """Return the derivatives of the relative errors, one column for each free parameter."""
        import numpy as np

        columns = np.empty((len(errors), len(free)))
        for column, k in enumerate(free):
            step = 1e-5 * max(values[k], 1.0)
            moved = [*values[:k], values[k] + step, *values[k + 1 :]]
            columns[:, column] = (self._errors(moved) - errors) / step
        return columns

    def _not_identified(self, free: list[int], values: list[float], errors: Any, columns: Any) -> int | None:
        """Return a free parameter that the measurements do not identify, or ``None`` if they identify all."""
        import numpy as np

        scale = np.array([max(values[k], 1.0) for k in free])
        deviation, columns = _standard_errors(free, errors, columns), columns * scale
        effects = dict(zip(free, np.abs(columns).max(axis=0) if free else [], strict=True))
        unlimited = [k for k in free if values[k] <= self.lower[k] > 0]  # bandwidths that reached ``FASTEST``
        for numbers in ([k for k in free if effects[k] < LEAST_EFFECT], unlimited):
            if numbers:
                return numbers[0]
        if len(free) > 1:  # a singular value near 0: some parameters can change together without an effect
            _, singular, directions = np.linalg.svd(columns / np.linalg.norm(columns, axis=0), full_matrices=False)
            if singular[-1] < 1e-4 * singular[0]:
                dependent = [k for k, part in zip(free, directions[-1], strict=True) if abs(part) > 0.1]
                return self._first_to_leave_out(dependent, effects)
        overhead = len(self.given) - 1
        vague = [k for k in free if deviation[k] > MOST_ERROR * max(values[k], float(k != overhead))]
        return self._first_to_leave_out(vague, effects) if vague else None

    def _first_to_leave_out(self, parameters: list[int], effects: dict[int, float]) -> int:
        """Return the overhead, or else the latency (odd number) with the least effect, or else such a bandwidth."""
        overhead = len(self.given) - 1
        return min(parameters, key=lambda k: (k != overhead, k % 2 == 0, effects[k], k))

    def _predicted(self, values: Sequence[float], digits: int = 12) -> list[float]:
        """Return the predicted seconds of each measurement."""
        topology = self._fitted(values, digits)
        parts: dict[tuple[str, ...], Topology] = {}
        overhead, predicted = values[-1] * SMALL_S, []
        for (schedule, devices), measured in zip(self.schedules, self.measurements, strict=True):
            if devices not in parts:
                parts[devices] = topology.part(devices)
            predicted.append(overhead + simulate(schedule, parts[devices], measured.nbytes, operation_s=0).seconds)
        return predicted

    def _fitted(self, values: Sequence[float], digits: int) -> Topology:
        """Return the topology with the speeds of these parameters, each rounded to some significant digits."""
        links = []
        for k, kind in enumerate(self.classes):
            bandwidth, latency_s = self._speeds(kind, values[2 * k], values[2 * k + 1], digits)
            links += [link._replace(bandwidth=bandwidth, latency_s=latency_s) for link in self.members[kind]]
        assumed = tuple(f"before the fit: {text.removeprefix('before the fit: ')}" for text in self.topology.assumed)
        return Topology.unchecked(self.topology.devices, links, self.topology.switches, assumed)

    def _speeds(self, kind: LinkClass, inverse: float, latency: float, digits: int) -> tuple[Fraction, Fraction]:
        """Return the bandwidth in GB/s and the latency in s of a class, rounded unless they are as given."""
        bandwidth = kind.bandwidth if inverse == 1 else round_digits(float(kind.bandwidth) / inverse, digits)
        scale = float(kind.latency_s) or SMALL_S
        if latency == (1 if kind.latency_s else 0):
            return bandwidth, kind.latency_s
        return bandwidth, round_digits(latency * scale, digits)

    def _result(self, values: list[float], errors: dict[int, float]) -> Calibration:
        """Return the calibration with these parameters and the standard errors of the identified ones."""
        classes = []
        for k, kind in enumerate(self.classes):
            bandwidth, latency_s = self._speeds(kind, values[2 * k], values[2 * k + 1], DIGITS)
            scale = float(kind.latency_s) or SMALL_S
            inverse, error = errors.get(2 * k), errors.get(2 * k + 1)
            bandwidth_error = None if inverse is None else float(bandwidth) * inverse / values[2 * k]
            fitted_bandwidth = Estimate(bandwidth, bandwidth_error)
            fitted_latency = Estimate(latency_s, None if error is None else error * scale)
            classes.append(FittedClass(kind, len(self.members[kind]), fitted_bandwidth, fitted_latency))
        error = errors.get(len(values) - 1)
        overhead = Estimate(round_digits(values[-1] * SMALL_S, DIGITS), None if error is None else error * SMALL_S)
        predicted = self._predicted([*values[:-1], float(overhead.value) / SMALL_S], DIGITS)
        fitted = self._fitted(values, DIGITS)
        return Calibration(fitted, tuple(classes), overhead, self.measurements, tuple(predicted))


def _standard_errors(free: list[int], errors: Any, columns: Any) -> dict[int, float]:
    """Return the standard errors of the free parameters. They are infinite without more measurements than these."""
    import numpy as np

    if len(errors) <= len(free):
        return dict.fromkeys(free, math.inf)
    variance = float(errors @ errors) / (len(errors) - len(free))
    covariance = np.linalg.pinv(columns.T @ columns)
    return {k: math.sqrt(max(0.0, variance * float(covariance[i, i]))) for i, k in enumerate(free)}


def round_digits(value: float, digits: int) -> Fraction:
    """Return a number rounded to some significant digits, or 0 if it is below 1e-12, the least number of a topology.

    >>> round_digits(123.456, 4), round_digits(1e-15, 4)
    (Fraction(247, 2), Fraction(0, 1))
    """
    return Fraction(f"{value:.{digits}g}") if value >= 1e-12 else Fraction(0)


def algorithm_of(measured: Measurement, assumed: str) -> str:
    """Return the algorithm of a measurement, or ``assumed`` if it names no algorithm of this library."""
    return measured.algorithm if measured.algorithm in NAMES else assumed


def _class_of(link: Link) -> LinkClass:
    hosts = [node.rpartition("/")[0] for node in (link.src, link.dst)]
    return LinkClass(link.bandwidth, link.latency_s, hosts[0] != hosts[1])


def _planned_schedule(topology: Topology, measured: Measurement, assumed: str) -> tuple[Schedule, tuple[str, ...]]:
    """Return the schedule of a measurement, planned on the uncalibrated topology, and the devices that it ran on."""
    part, algorithm = topology.part(measured.devices), algorithm_of(measured, assumed)
    collective, root, packs = measured.collective, measured.root, measured.packs
    planned = plan(part, collective, measured.nbytes, algorithm, root=root, packs=packs, operation_s=0.0)
    return planned.schedule, measured.devices
