"""Write the CSV file that the tuner plug-in in NCCL's repository reads: an algorithm and a protocol for each size.

Input: a topology, perhaps reports of nccl-tests. Output: text. The times are those of NCCL's model (``nccl_model.py``),
fitted to the reports. Where at least two algorithms or protocols were measured, their times decide instead, also
interpolated or extrapolated ones. CollNet, which the model does not have, is chosen only if it was measured.

The plug-in passes the number of channels to NCCL, and passes 1 for a row with -1, which is up to 15 times as slow. So
each row has a number. If NCCL does not offer a choice for a call, such as NVLS for a product, the plug-in continues
with the next row that matches. So rows of rings and trees with LL and Simple, which NCCL always offers, come last.

Source: NVIDIA/nccl 2.30, plugins/tuner/example/plugin.c (the columns; lines have at most 255 characters; ``#`` begins a
comment; the first row counts that matches and that NCCL offers; both sizes are inclusive; ``*nChannels = 1``) and
src/enqueue.cc (what NCCL does with the number); NVIDIA/nccl-tests, src/util.cu (``env`` in reports);
eunomia-bpf/nccl-eBPF, docs/tmp/experiment-results-b300.md (one channel on 8 B300).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from ...errors import ArgumentError, shown
from ...planning import COLLECTIVES
from ...schedule.schedule import many
from ...topology import Topology
from ...topology.measurements import read_measurements
from .nccl_model import ALGORITHMS, PROTOCOLS, Model
from .proof import cut

HEADER: Final = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
LONGEST_LINE: Final = 250  # the plug-in reads 255 characters
LARGEST: Final = 2**64 - 1  # a size_t
SOURCES: Final = ("measured", "interpolated", "extrapolated", "modelled")  # of times, see ``Choice``
_SIZES: Final = tuple(1 << power for power in range(6, 36))  # the sizes for which times are compared


class Choice(NamedTuple):
    """An algorithm and a protocol, with their time.

    ``source`` of the time: "measured"; "interpolated" between measured sizes; "extrapolated" from them; or "modelled".
    """

    seconds: float
    algorithm: str
    protocol: str
    source: str


class TunerRow(NamedTuple):
    """A row of the file. Sizes include both ends."""

    collective: str
    least_bytes: int
    most_bytes: int
    choice: Choice
    at_bytes: int  # the size for which the time of the choice is
    channels: int


Key = tuple[str, str, str]  # a collective, an algorithm and a protocol
Times = Mapping[Key, Mapping[int, float]]  # measured seconds by bytes


def to_nccl_tuner_csv(topology: Topology, times: Times | None = None) -> str:
    """Return the file for all five collectives and all sizes, on the devices of a topology.

    Args:
      topology: the machine. Its number of hosts and of devices are those of NCCL's communicator.
      times: measured seconds, from ``read_runs``.
    Raises:
      PlanError: some devices are not connected.

    >>> text = to_nccl_tuner_csv(Topology.machine("hgx-h100"))
    >>> print(text.splitlines()[-1])
    allgather,6291457,18446744073709551615,ring,simple,64,1,8,-1,-1
    """
    model = Model(topology)
    fits = _fits(model, times or {})
    lines = [
        f"# NCCL tuner configuration: {model.ranks} GPUs, {many(model.hosts, 'host')}.",
        "# For: NVIDIA/nccl plugins/tuner/example.",
        "# Use: NCCL_TUNER_PLUGIN=PATH/libnccl-tuner-example.so NCCL_TUNER_CONFIG_FILE=THIS_FILE.",
        "# Channels: NCCL's own rule, rounded up; NCCL uses at most as many as it has made. -1: any number or buffer.",
        "# A communicator of another size matches no row, and the plug-in then gives it 1 channel. To leave the number",
        '# to NCCL, change "*nChannels = 1" in plugin.c to "*nChannels = 0".',
        *(_comment("assumed", each) for each in topology.assumed),
        f"# {HEADER}",
    ]
    head, counts = len(lines) - 1, Counter[str]()
    for collective in COLLECTIVES:
        rows = rows_of(model, times or {}, fits, collective)
        uncertain = [row for row in rows if not _is_always_offered(row.choice)]
        others = rows_of(model, times or {}, fits, collective, always_offered=True) if uncertain else []
        rows += [other for other in others if any(_overlap(other, row) for row in uncertain)]
        for row in rows:
            counts[row.choice.source] += 1
            micros = row.choice.seconds * 1e6
            lines.append(f"# {row.choice.source}: {micros:.1f} us for {row.at_bytes} bytes")
            columns = (collective.replace("_", ""), row.least_bytes, row.most_bytes, *row.choice[1:3], row.channels)
            lines.append(",".join(map(str, (*columns, model.hosts, model.ranks, -1, -1))))
    source = ", with the assumed speeds" if topology.assumed else ""
    lines.insert(head, f"# Rows: {counts_text(counts)}{source}.")
    assert all(len(line) <= LONGEST_LINE for line in lines)
    return "\n".join(lines) + "\n"


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the numbers of rows by the source of their time as text.

    >>> counts_text({"measured": 2, "modelled": 50})
    '2 with a measured size, 50 modelled'
    """
    return ", ".join(
        f"{counts.get(source, 0)} {'with a measured size' if source == SOURCES[0] else source}"
        for source in SOURCES
        if source in (SOURCES[0], SOURCES[-1]) or counts.get(source)
    )


def _comment(kind: str, text: str) -> str:
    """Return a comment of one line of ASCII. The plug-in would read the rest of a longer line as a row."""
    line = " ".join(text.split()).encode("ascii", "replace").decode()
    return cut(f"# {kind}: {line}", LONGEST_LINE)


def rows_of(
    model: Model,
    times: Times,
    fits: Mapping[str, tuple[float, float]],
    collective: str,
    *,
    always_offered: bool = False,
) -> list[TunerRow]:
    """Return the rows of a collective, which have no gaps and do not overlap. A row stands for neighbouring sizes.

    The time of a row is that of its first size, or of its first measured one.

    ``always_offered``: only choices that NCCL offers for all calls.
    """
    sizes = sorted({*_SIZES, *(n for key, by_size in times.items() if key[0] == collective for n in by_size)})
    ends = [(size + after) // 2 if after - size > 1 else size for size, after in pairwise(sizes)]
    rows: list[TunerRow] = []
    least = 0
    for size, most in zip(sizes, [*ends, LARGEST], strict=True):
        choice = _best(model, times, fits, collective, size, always_offered=always_offered)
        row = TunerRow(collective, least, most, choice, size, model.channels(*choice[1:3], most))
        if rows and _kind(row) == _kind(rows[-1]):
            shown = row if (row.choice.source, rows[-1].choice.source) == SOURCES[:2] else rows[-1]
            rows[-1] = shown._replace(least_bytes=rows[-1].least_bytes, most_bytes=most)
        else:
            rows.append(row)
        least = most + 1
    return rows


def _kind(row: TunerRow) -> tuple[str, str, str, int]:
    """Return what neighbouring sizes of one row have in common. Interpolated times stand with the measured ones."""
    _, algorithm, protocol, source = row.choice
    return algorithm, protocol, SOURCES[0] if source == SOURCES[1] else source, row.channels


def _is_always_offered(choice: Choice) -> bool:
    """Return whether NCCL offers this choice for all calls: not LL128, NVLS, PAT or CollNet."""
    return choice.algorithm in ("ring", "tree") and choice.protocol != "ll128"


def _overlap(a: TunerRow, b: TunerRow) -> bool:
    return a.least_bytes <= b.most_bytes and b.least_bytes <= a.most_bytes


def _best(
    model: Model,
    times: Times,
    fits: Mapping[str, tuple[float, float]],
    collective: str,
    nbytes: int,
    *,
    always_offered: bool,
) -> Choice:
    """Return the fastest choice. If several were measured, only they are compared."""
    measured = []
    for (name, algorithm, protocol), by_size in times.items():
        if name == collective:
            source = SOURCES[1] if min(by_size) <= nbytes <= max(by_size) else SOURCES[2]
            source = SOURCES[0] if nbytes in by_size else source
            measured.append(Choice(_seconds_at(by_size, nbytes), algorithm, protocol, source))
    measured = [choice for choice in measured if _is_always_offered(choice) or not always_offered]
    if len(measured) > 1:
        return min(measured)
    latency, transfer = fits.get(collective, (1.0, 1.0))
    known = {choice[1:3] for choice in measured}
    modelled = []
    for algorithm, protocol in model.choices(collective):
        parts = model.parts(collective, algorithm, protocol, nbytes)
        choice = Choice(parts[0] * latency + parts[1] * transfer, algorithm, protocol, SOURCES[3])
        if (algorithm, protocol) not in known and (_is_always_offered(choice) or not always_offered):
            modelled.append(choice)
    return min(measured + modelled)


def _seconds_at(by_size: Mapping[int, float], nbytes: int) -> float:
    """Return the seconds for a size from those for the sizes around it.

    Below all sizes, the time is that of the least size; above, the rate is that of the greatest size.

    >>> [_seconds_at({1000: 1.0, 4000: 4.0}, nbytes) for nbytes in (500, 2000, 8000)]
    [1.0, 2.0, 8.0]
    """
    sizes = sorted(by_size)
    k = bisect_left(sizes, nbytes)
    if k == 0:
        return by_size[sizes[0]]
    if k == len(sizes):
        return by_size[sizes[-1]] * nbytes / sizes[-1]
    low, high = sizes[k - 1], sizes[k]
    part = (math.log(nbytes) - math.log(low)) / (math.log(high) - math.log(low))
    return round(math.exp((1 - part) * math.log(by_size[low]) + part * math.log(by_size[high])), 15)


def _fits(model: Model, times: Times) -> dict[str, tuple[float, float]]:
    """Return for each measured collective the factors of the model's latencies and transfers that fit best.

    They minimize the sum of the squares of the relative errors. A factor that is not above 0 is not fitted.
    """
    rows = defaultdict[str, list[tuple[float, float]]](list)
    for (collective, algorithm, protocol), by_size in times.items():
        if (algorithm, protocol) in model.choices(collective):
            for nbytes, seconds in by_size.items():
                latency, transfer = model.parts(collective, algorithm, protocol, nbytes)
                rows[collective].append((latency / seconds, transfer / seconds))
    fits = {}
    for collective, pairs in rows.items():
        aa, ab, bb = (math.fsum(row[i] * row[j] for row in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = math.fsum(row[0] for row in pairs), math.fsum(row[1] for row in pairs)
        determinant = aa * bb - ab * ab
        if determinant > 1e-9 * aa * bb:
            latency, transfer = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
            if latency > 0 and transfer > 0:
                fits[collective] = latency, transfer
    return fits


def read_runs(reports: Iterable[tuple[str, bytes]], topology: Topology) -> dict[Key, dict[int, float]]:
    """Return measured seconds from reports of nccl-tests, each a (name, content), of runs with a forced choice.

    The report states ``NCCL_ALGO`` and ``NCCL_PROTO`` in ``env``. Of several times for a size, the least counts.

    Raises:
      ArgumentError: a content is not a report, or was not measured on all devices of the topology; NCCL_ALGO or
        NCCL_PROTO is missing, or does not name exactly one algorithm or protocol.
    """
    times: dict[Key, dict[int, float]] = {}
    for name, content in reports:
        try:
            measurements = read_measurements(content, topology)
        except ArgumentError as error:
            error.prefix(name)
            raise
        algorithm = _forced(name, content, "NCCL_ALGO", ALGORITHMS)
        protocol = _forced(name, content, "NCCL_PROTO", PROTOCOLS)
        for measured in measurements:
            if set(measured.devices) != set(topology.devices):
                given = f"{len(measured.devices)} devices in {name}, {len(topology.devices)} in the topology"
                raise ArgumentError.of("a report must have all devices of the topology.", given, "--devices")
            by_size = times.setdefault((measured.collective, algorithm, protocol), {})
            by_size[measured.nbytes] = min(measured.seconds, by_size.get(measured.nbytes, math.inf))
    return times


def _forced(name: str, content: bytes, variable: str, known: tuple[str, ...]) -> str:
    """Return the value of an environment variable in a report, in lower case."""
    environment = json.loads(content).get("env")
    entries = [entry for entry in environment if isinstance(entry, str)] if isinstance(environment, list) else []
    given = [value for key, _, value in (entry.partition("=") for entry in entries) if key == variable]
    # NCCL_ALGO=CollnetDirect and NVLSTree; later versions also read "allreduce:ring".
    value = given[0].rpartition(":")[2].strip().lower() if given else ""
    found = [choice for choice in known if choice.replace("_", "") == value.replace("_", "")]
    if not found:
        problem = f"a report must state in env which {variable} was forced, and only one."
        shown_value = shown(given[0]) if given else "no such variable"
        raise ArgumentError.of(problem, f"{name}: {shown_value}", f"{variable}={known[1]} all_reduce_perf -J FILE")
    return found[0]
