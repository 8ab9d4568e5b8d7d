"""Measured times of collectives, from the JSON of nccl-tests (``-J FILE``) or of ``crossreduce bench``.

Input: the content of a file, and the topology on which it was measured. Output: ``Measurement``s with the topology's
devices. Both programs write the same keys, except that nccl-tests lists devices in ``config``, one per process, and
states no algorithm. In its reports, the name of the program determines the collective.

Source: github.com/NVIDIA/nccl-tests, src/util.cu (keys; texts for booleans and roots; ``time`` in microseconds) and
src/common.cu (``size``: the bytes of the whole buffer; the name of an experiment is empty unless a trace is replayed).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..devices import parse
from ..errors import ArgumentError, shown
from .formats.json_format import check_type, why_not
from .topology import Topology
from .topology_like import MOST_BYTES

LARGEST: Final = 64 << 20
"""The greatest number of bytes of a file. With ``-I 1`` a file has the time of every call."""

_NAMES: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
_COLLECTIVES: Final = {name.replace("_", ""): name for name in _NAMES}  # by the names of nccl-tests


class Measurement(NamedTuple):
    """The mean time of a collective."""

    collective: str
    nbytes: int  # of the whole buffer
    seconds: float
    devices: tuple[str, ...]  # by rank
    algorithm: str | None = None  # if the file names one
    root: str | None = None  # a device, for a broadcast or reduce
    packs: int = 1


def read_measurements(data: bytes, topology: Topology) -> tuple[Measurement, ...]:
    """Return the measurements in a file. Results for 0 bytes are skipped.

    Times are those of out-of-place operations, or of in-place operations if there are no others. Host k of the file, in
    the order of the lowest ranks, is host k of the topology, and device number d of a host is that host's device d.

    Raises:
      ArgumentError: the file is not such a report, has no results, or has a device that is not in the topology. Or a
        result has an unknown collective, a missing or invalid field, or wrong elements.

    >>> report = {"config": {"nthreads": 1, "ngpus": 2, "devices": [
    ...               {"rank": 0, "pid": 7, "hostname": "a", "device": 0}]},
    ...           "args": ["./all_gather_perf"],
    ...           "results": [{"size": 4096, "root": "    -1", "out_of_place": {"time": 12.5, "nwrong": None}}]}
    >>> read_measurements(json.dumps(report).encode(), Topology.ring(2))[0][:4]
    ('all_gather', 4096, 1.25e-05, ('cpu:0', 'cpu:1'))
    """
    return _read(data, topology)


def read_times(data: bytes) -> tuple[Measurement, ...]:
    """Return the measurements in a file, as ``read_measurements`` does, of devices named rank 0, rank 1, ..."""
    return _read(data, None)


def _read(data: bytes, topology: Topology | None) -> tuple[Measurement, ...]:
    problem = "this is not a report of nccl-tests (-J FILE) or of crossreduce bench (--json, or -J FILE)"
    if len(data) > LARGEST:
        raise ArgumentError.of(f"a report must have at most {LARGEST} bytes.", shown(data[:40]), "a run without -I 1")
    try:
        report = check_type(dict, json.loads(data.decode()))
        devices = _devices(report, topology)
        packs = max(1, check_type(int, report["config"].get("num_packs", 1)))
        rows = check_type(list, report["results"])
        measurements = [result for row in rows for result in _measurement(report, row, devices, packs)]
    except ArgumentError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ArgumentError.of(
            f"{problem}: {why_not(error)}.", shown(data[:80]), "all_reduce_perf -J results.json"
        ) from error
    if not measurements:
        raise ArgumentError.of("the report has no results.", shown(data[:80]), "a run that measured some bytes")
    return tuple(measurements)


def _measurement(
    report: dict[str, Any], row: dict[str, Any], devices: tuple[str, ...], packs: int
) -> Iterator[Measurement]:
    """Yield the measurement of a row, or nothing if the row is for 0 bytes."""
    timing = row.get("out_of_place") or row["in_place"]
    micros = timing["time"] if "time" in timing else timing["cpu_time"]
    size, root_rank = check_type(int, row["size"]), int(row["root"])
    if timing.get("nwrong") not in (None, 0):
        given = f"{timing['nwrong']:g} wrong elements of {size} bytes"
        raise ArgumentError.of("a result with wrong elements cannot be used.", given, "a run without errors")
    if size <= 0:
        return
    if size > MOST_BYTES:
        raise ArgumentError.of(f"a size must be at most {MOST_BYTES} bytes.", f"{size} bytes", "sizes up to 1 TiB")
    if not isinstance(micros, (int, float)) or not 0 < micros < math.inf:
        raise ArgumentError.of("a time must be a number of microseconds above 0.", f"{micros!r} for {size} bytes")
    collective = _collective(row.get("experiment_name") or check_type(str, report["args"][0]))
    root = devices[root_rank] if collective in ("broadcast", "reduce") else None
    algorithm = row.get("algorithm")
    yield Measurement(collective, size, micros / 1e6, devices, algorithm, root, packs)


def _collective(program: str) -> str:
    """Return the collective that a program measures, given its path or the name of the experiment.

    >>> [_collective(program) for program in ("build/reduce_scatter_perf", "AllReduce", "all_gather_perf")]
    ['reduce_scatter', 'all_reduce', 'all_gather']
    """
    name = re.sub("_perf(_mpi)?$", "", program.rpartition("/")[2])
    collective = _COLLECTIVES.get(name.replace("_", "").lower())
    if collective is None:
        problem = "results of this collective cannot be compared with a prediction."
        raise ArgumentError.of(problem, shown(program), "results of " + ", ".join(_NAMES))
    return collective


def _devices(report: dict[str, Any], topology: Topology | None) -> tuple[str, ...]:
    """Return the topology's device of each rank, or without a topology "rank 0", "rank 1", ...

    nccl-tests lists one device per process. The ranks of a process have consecutive numbers and devices.
    """
    config = report["config"]
    entries = check_type(list, config["devices"] if "devices" in config else report["devices"])
    per_process = int(config["nthreads"]) * int(config["ngpus"])
    # For each rank, the host's name and the number of the rank's device, as in the report.
    places = {
        check_type(int, entry["rank"]): (str(entry["hostname"]), check_type(int, entry["device"])) for entry in entries
    }
    if len({(entry["hostname"], entry["pid"]) for entry in entries}) * per_process > len(entries):
        for entry in entries:  # the first rank of each process
            for k in range(1, per_process):
                places.setdefault(entry["rank"] + k, (entry["hostname"], entry["device"] + k))
    if sorted(places) != list(range(len(places))):
        raise ValueError(f"its ranks are {sorted(places)}")
    if topology is None:
        return tuple(f"rank {rank}" for rank in sorted(places))
    by_rank = [places[rank] for rank in range(len(places))]
    hosts = list(dict.fromkeys(parse(device).host for device in topology.devices))
    host_of = dict(zip(dict.fromkeys(host for host, _ in by_rank), hosts, strict=False))
    devices = {(parse(device).host, parse(device).index): device for device in topology.devices}
    for host, number in by_rank:
        if (host_of.get(host), number) not in devices:
            known = f"{len(hosts)} hosts and {len(devices)} devices"
            given = f"device {number} of host {shown(host)}; a topology with {known}"
            remedy = "the machine on which it was measured, with --hosts for several"
            raise ArgumentError.of("the report has a device that the topology does not have.", given, remedy)
    return tuple([devices[host_of[host], number] for host, number in by_rank])
