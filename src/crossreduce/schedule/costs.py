"""``Costs``: what a simulation counts besides the bandwidths and latencies of links.

Input: numbers that a user states, or the published ones of a machine. Output: an argument of ``simulate`` and ``plan``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, shown
from ..topology import Topology, TopologyLike, topology_of
from ..topology.formats.json_format import check_list, check_type, load, why_not

FORMAT: Final = "crossreduce.costs/1"

# The seconds in which a host queues one operation of a CUDA device. Assumed, and not measured on any GPU.
OPERATION_S: Final = 2e-6

_LEAST, _MOST = 1e-12, 1e18  # limits of bandwidths and rates, so that computed times are finite

Pair = tuple[str, str]


class SharedLimit(NamedTuple):
    """A bandwidth that several links share, such as both directions of a network card."""

    gb_per_s: float
    links: tuple[Pair, ...]  # by (src, dst), canonical names


@dataclass(frozen=True)
class Costs:
    """Costs of a simulation besides the links. A cost that is ``None`` is not counted, except for ``operation_s``.

    Args:
      operation_s: the seconds in which a host queues one operation. ``None`` stands for ``OPERATION_S`` for CUDA
        devices and for 0 for other devices.
      reduction_gb_per_s: the GB/s with which a device reads operands and writes results while it combines values.
        Combining k values of b bytes moves (k + 1) b bytes.
      messages_per_s: the largest number of transfers per second over a link between two hosts (a network card).
      shared: bandwidths that several links share, as ``SharedLimit``s or tuples of the same fields.
    Raises:
      ArgumentError: ``operation_s`` is not from 0 to 1, another number is not positive, or a shared limit has no links.

    >>> Costs(messages_per_s=2e8).messages_per_s
    200000000.0
    >>> Costs.from_json(Costs(reduction_gb_per_s=3350).to_json()) == Costs(reduction_gb_per_s=3350)
    True
    """

    operation_s: float | None = None
    reduction_gb_per_s: float | None = None
    messages_per_s: float | None = None
    shared: tuple[SharedLimit, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "operation_s", seconds_of(self.operation_s))
        for name in ("reduction_gb_per_s", "messages_per_s"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else _positive(name, value))
        try:
            limits = [SharedLimit(*limit) for limit in self.shared]
            pairs = [tuple((str(src), str(dst)) for src, dst in limit.links) for limit in limits]
        except (TypeError, ValueError) as error:
            remedy = 'shared=[(25, [("host0/cuda:0", "rail0"), ("rail0", "host0/cuda:0")])]'
            raise ArgumentError.of("shared must list tuples (GB/s, links).", shown(self.shared), remedy) from error
        if not all(pairs):
            raise ArgumentError.of("a shared limit must have links.", shown(self.shared), "one or more (src, dst)")
        speeds = [_positive("the GB/s of a shared limit", limit.gb_per_s) for limit in limits]
        object.__setattr__(self, "shared", tuple(map(SharedLimit, speeds, pairs)))

    @classmethod
    def machine(cls, name: str, hosts: int = 1, *, nics: str | None = None) -> Costs:
        """Return the published costs of a machine of the library. The machine's data file has their sources.

        >>> Costs.machine("hgx-h100").reduction_gb_per_s
        3350.0
        """
        from ..topology.machines import machine_costs

        memory, messages = machine_costs(name, hosts, nics=nics)
        return cls(reduction_gb_per_s=memory, messages_per_s=messages)

    def to_json(self) -> str:
        """Return the costs as JSON text."""
        content = {"format": FORMAT} | {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read costs back from the text of ``to_json``, in which keys may be missing.

        Raises:
          ArgumentError: the text is not JSON of this format, or a value is invalid.
        """
        try:
            read = load(text, FORMAT)
            unknown = sorted(read.keys() - {"format", *cls.__dataclass_fields__})
            if unknown:
                raise ValueError(f"it has an unknown key, {unknown[0]}")  # noqa: TRY301 - as load's errors
            fields: dict[str, Any] = {name: read[name] for name in cls.__dataclass_fields__ if name in read}
            fields["shared"] = tuple(
                (speed, tuple(check_list(str, check_type(list, pair)) for pair in check_type(list, links)))
                for speed, links in check_list(list, read.get("shared", []))
            )
            return cls(**fields)
        except ArgumentError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            problem = f"this text does not have costs in JSON: {why_not(error)}."
            raise ArgumentError.of(problem, shown(text), f'text of format "{FORMAT}"') from error

    def require_links(self, topology: Topology) -> None:
        """Raise an ArgumentError unless the topology has all links of the shared limits."""
        for limit in self.shared:
            missing = [pair for pair in limit.links if pair not in topology.by_ends]
            if missing:
                given = f"{missing[0][0]} -> {missing[0][1]}"
                raise ArgumentError.of("a shared limit must name links of the topology.", given, repr(topology))


def both_directions(
    topology: TopologyLike, gb_per_s: float, kinds: Iterable[Pair] | None = None
) -> tuple[SharedLimit, ...]:
    """Return for each link between hosts (a network card) a limit that it shares with the link in the other direction.

    Args:
      topology: a ``Topology``, a machine's name or a file's path.
      gb_per_s: the bandwidth that the two directions share.
      kinds: (src, dst) of each link, instead of all links between hosts. One direction of a pair suffices.

    >>> from crossreduce import Topology
    >>> len(both_directions(Topology.machine("hgx-h100", 2), 60))
    16
    """
    chosen = [pair for pair in topology_of(topology).by_ends if between_hosts(*pair)] if kinds is None else list(kinds)
    one_direction = {frozenset(pair): pair for pair in chosen}  # both directions have the same key
    return tuple(SharedLimit(gb_per_s, ((src, dst), (dst, src))) for src, dst in one_direction.values())


def between_hosts(src: str, dst: str) -> bool:
    """Return whether a link leaves a host: its ends are on different hosts, or one end is a switch of the network.

    >>> between_hosts("host0/cuda:1", "rail1"), between_hosts("host0/cuda:1", "host0/nvswitch")
    (True, False)
    """
    return src.rpartition("/")[0] != dst.rpartition("/")[0]


def seconds_of(given: object) -> float | None:
    """Return ``given`` if it is a valid ``operation_s``: a number of seconds from 0 to 1, or ``None``.

    Raises:
      ArgumentError: ``given`` is anything else.
    """
    if given is None or (isinstance(given, (int, float)) and not isinstance(given, bool) and 0 <= given <= 1):
        return given
    problem = "operation_s must be a number of seconds from 0 to 1, or None."
    raise ArgumentError.of(problem, shown(given), f"operation_s={OPERATION_S}")


def costs_of(costs: object, operation_s: object = None) -> Costs:
    """Return the ``Costs`` of a call: ``costs``, if given, with ``operation_s``, if given.

    Raises:
      ArgumentError: ``costs`` is not ``Costs``, or both arguments state ``operation_s``.
    """
    if costs is None:
        return Costs(operation_s=operation_s)  # type: ignore[arg-type] # it is checked there
    if not isinstance(costs, Costs):
        remedy = 'Costs(reduction_gb_per_s=3350), or Costs.machine("hgx-h100") for published ones'
        raise ArgumentError.of("costs must be Costs.", shown(costs), remedy)
    if operation_s is not None and costs.operation_s is None:
        return replace(costs, operation_s=operation_s)  # type: ignore[arg-type] # it is checked there
    if operation_s is not None:
        problem = "operation_s must not be given twice."
        raise ArgumentError.of(problem, f"operation_s={shown(operation_s)}, costs", "Costs(operation_s=...)")
    return costs


def _positive(what: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and _LEAST <= value <= _MOST:
        return float(value)
    problem = f"{what} must be a number above 0, from {_LEAST:g} to {_MOST:g}."
    raise ArgumentError.of(problem, shown(value), "another number, or omit it if it must not be counted")
