"""``Schedule``: a collective written as rounds of steps, before one byte moves.

A schedule does not depend on the buffer's size: chunks are shares of the buffer, and ``spans(size)`` returns their
elements. So one schedule serves every size, and equal requests give equal schedules.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any, ClassVar, Final, NamedTuple

from ..errors import ArgumentError, ScheduleError, shown
from ..topology.formats.json_format import check_list, check_type, load, why_not

FORMAT: Final = "crossreduce.schedule/1"
GENERATED_FORMAT: Final = "crossreduce.schedule/2"  # with a symmetry that generates the other chunks


class Chunk(NamedTuple):
    """A share of the flat buffer, the devices that contribute to it and the devices that need its result.

    Devices are numbers: positions in the schedule's ``devices``. The five collectives differ only in these two lists:
    an all-reduce has several devices in both, a broadcast one source, a reduce one destination, a reduce-scatter one
    destination per chunk, an all-gather one source per chunk.
    """

    share: Fraction
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


class Step(NamedTuple):
    """Device ``dst`` replaces its value of a chunk by the combination of the values of ``srcs``.

    With one source this is a copy. Several values are combined in the listed order. The old value of ``dst`` is
    included only if ``srcs`` has ``dst``. All values are read as the previous round left them.
    """

    chunk: int
    dst: int
    srcs: tuple[int, ...]


class Route(NamedTuple):
    """The switches and devices that transfers of one chunk from ``src`` to ``dst`` pass."""

    chunk: int
    src: int
    dst: int
    through: tuple[str, ...]
    round: int | None = None  # or None for all rounds without a route of their own


Round = tuple[Step, ...]


@dataclass(frozen=True)
class Schedule:
    """A complete collective. Rounds are synchronous.

    Every step of a round reads the values that the previous round left, and no two steps of a round write the same
    chunk on the same device (``verify`` checks it). So the steps of a round can run at the same time.

    Args:
      collective: the collective's name, for readers. The sources and destinations of the chunks define the collective.
      algorithm: the planner's name.
      devices: canonical names; chunks, steps and routes contain positions in this tuple.
      chunks: shares that add up to 1.
      rounds: the steps of each round.
      pieces: the number of pipelined pieces that each chunk may be cut into; results do not depend on it.
      routes: for single chunks, routes between two devices that differ from ``Topology.route``. Results do not depend
        on them.
    Raises:
      ScheduleError: a device is listed twice, a number is out of range, a chunk, step or route is malformed, the
        shares do not add up to 1, or two routes have the same chunk, devices and round.

    >>> pair = Chunk(Fraction(1), sources=(0, 1), destinations=(0, 1))
    >>> schedule = Schedule("all_reduce", "custom", ("cpu:0", "cpu:1"), (pair,),
    ...                     ((Step(0, 0, (0, 1)),), (Step(0, 1, (0,)),)))
    >>> print(schedule)
    all_reduce custom: 2 devices, 1 chunk, 2 rounds, 2 steps
      round 0: chunk 0: cpu:0 <- cpu:0 + cpu:1
      round 1: chunk 0: cpu:1 <- cpu:0
    >>> Schedule.from_json(schedule.to_json()) == schedule
    True
    """

    collective: str
    algorithm: str
    devices: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    rounds: tuple[Round, ...]
    pieces: int = 1
    routes: tuple[Route, ...] = ()

    # Makes a schedule from a base and a symmetry's JSON. ``generated_schedule.py``, which imports this file, sets it.
    generated: ClassVar[Callable[[Schedule, Any], Schedule] | None] = None

    def __post_init__(self) -> None:
        # Lists are copied to tuples, since they could be changed after the schedule was made.
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "chunks", tuple(Chunk(share, tuple(s), tuple(d)) for share, s, d in self.chunks))
        object.__setattr__(self, "rounds", tuple([_freeze(steps) for steps in self.rounds]))
        n = len(self.devices)
        for route in self.routes:
            if len(route) not in (4, 5) or isinstance(route[3], str):  # tuple() would split it into letters
                raise _malformed_error("a route", route, _ROUTE, n)
        routes = tuple(Route(chunk, src, dst, tuple(through), *when) for chunk, src, dst, through, *when in self.routes)
        object.__setattr__(self, "routes", routes)
        if len(set(self.devices)) != n:
            twice = sorted({device for k, device in enumerate(self.devices) if device in self.devices[:k]})
            problem = "each device may appear only once in a schedule."
            raise ScheduleError.of(problem, f"{', '.join(twice)} more than once", "each device once")
        for number, chunk in enumerate(self.chunks):
            if chunk.share < 0 or not _are_positions(chunk.sources, n) or not _are_positions(chunk.destinations, n):
                remedy = "a share of 0 or more; at least one source and one destination, none of them twice"
                raise _malformed_error(f"chunk {number}", chunk, remedy, n)
        if sum(count * share for share, count in Counter(chunk.share for chunk in self.chunks).items()) != 1:
            given = f"shares {', '.join(str(chunk.share) for chunk in self.chunks) or 'none'}"
            raise ScheduleError.of("the chunks must cover the buffer: their shares must add up to 1.", given)
        self._check_steps()
        for route in self.routes:
            has_round = route.round is None or 0 <= route.round < len(self.rounds)
            ends = (route.src, route.dst)
            has_names = route.through and all(isinstance(node, str) for node in route.through)
            if not (0 <= route.chunk < len(self.chunks) and _are_positions(ends, n) and has_names and has_round):
                raise _malformed_error("a route", route, _ROUTE, n)
        seen: dict[tuple[int, int, int, int | None], Route] = {}
        for route in self.routes:
            key = (*route[:3], route.round)
            if key in seen:
                problem = "a chunk can have only one route between two devices in a round."
                raise ScheduleError.of(problem, f"{seen[key]} and {route}", "one of them")
            seen[key] = route
        if self.pieces < 1:
            raise ScheduleError.of("pieces must be at least 1.", shown(self.pieces), "pieces=1")

    def _check_steps(self) -> None:
        """Raise ScheduleError if a step has a number that is out of range, or no operand."""
        count, n = len(self.chunks), len(self.devices)
        every = list(chain.from_iterable(self.rounds))
        operands = [srcs for _, _, srcs in every]
        numbers = {*chain.from_iterable(operands), *[dst for _, dst, _ in every], 0}
        chunks = {*[chunk for chunk, _, _ in every], 0}
        if all(operands) and 0 <= min(numbers) <= max(numbers) < n and 0 <= min(chunks) <= max(chunks) < count:
            return  # sets are quicker than a look at each step
        for r, steps in enumerate(self.rounds):
            for s, step in enumerate(steps):
                c, dst, srcs = step
                in_range = 0 <= c < count and 0 <= dst < n
                if not in_range or not srcs or min(srcs) < 0 or max(srcs) >= n:
                    remedy = f"chunk 0 to {len(self.chunks) - 1}; at least one src"
                    raise _malformed_error(f"round {r}, step {s}", step, remedy, n)

    @cached_property
    def _hash_of_steps(self) -> int:
        return hash((self.collective, self.algorithm, self.devices, self.chunks, self.rounds, self.routes))

    def __hash__(self) -> int:
        # A schedule is a cache key in every call: its thousands of steps are hashed once, for any number of pieces.
        return hash((self._hash_of_steps, self.pieces))

    def __reduce__(self) -> tuple[type[Schedule], tuple[Any, ...]]:
        # Pickles do not contain the cached hash, which differs between processes.
        return Schedule, self._parts

    @property
    def _parts(self) -> tuple[Any, ...]:
        """The arguments of ``__init__``."""
        return self.collective, self.algorithm, self.devices, self.chunks, self.rounds, self.pieces, self.routes

    def cut_into(self, pieces: int) -> Schedule:
        """Return the same schedule with another number of pieces. Both schedules share the tuples of steps."""
        if pieces < 1:
            raise ScheduleError.of("pieces must be at least 1.", shown(pieces), "pieces=1")
        other = object.__new__(Schedule)
        parts = ("collective", "algorithm", "devices", "chunks", "rounds", "routes")
        other.__dict__.update({name: getattr(self, name) for name in parts}, pieces=pieces)
        other.__dict__["_hash_of_steps"] = self._hash_of_steps
        return other

    def ordered_by(self, names: Sequence[str]) -> Schedule:
        """Return the same schedule with its devices in the order of ``names``. Devices without a name there follow.

        >>> from crossreduce.planning import one_device
        >>> one_device(["cpu:2", "cpu:0", "cpu:1"]).ordered_by(["cpu:0", "cpu:1", "cpu:2"]).devices
        ('cpu:0', 'cpu:1', 'cpu:2')
        """
        listed_first = {name: k for k, name in enumerate(names)}
        devices = tuple(sorted(self.devices, key=lambda name: listed_first.get(name, len(listed_first))))
        if devices == self.devices:
            return self
        position = [devices.index(name) for name in self.devices]

        def moved(positions: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([position[k] for k in positions])

        chunks = [Chunk(share, moved(sources), moved(results)) for share, sources, results in self.chunks]
        rounds = [tuple([Step(c, position[dst], moved(srcs)) for c, dst, srcs in steps]) for steps in self.rounds]
        routes = [route._replace(src=position[route.src], dst=position[route.dst]) for route in self.routes]
        return Schedule(
            self.collective, self.algorithm, devices, tuple(chunks), tuple(rounds), self.pieces, tuple(routes)
        )

    def spans(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return each chunk's range of elements ``(start, stop)`` in a flat buffer of ``size`` elements.

        Each boundary is rounded only once, so the chunks cover the buffer and equal shares differ by at most one
        element.

        >>> from crossreduce.planning import direct
        >>> direct(["cpu:0", "cpu:1", "cpu:2"]).spans(10)
        ((0, 3), (3, 6), (6, 10))
        """
        return spans((chunk.share for chunk in self.chunks), size)

    @property
    def units(self) -> int:
        """The least n such that all shares are multiples of 1/n of the buffer."""
        return math.lcm(*(chunk.share.denominator for chunk in self.chunks if chunk.share))

    @property
    def steps(self) -> int:
        """The number of steps in all rounds."""
        return sum(map(len, self.rounds))

    @property
    def round_count(self) -> int:
        """The number of rounds."""
        return len(self.rounds)

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return len(self.chunks)

    def to_json(self) -> str:
        """Return the schedule as JSON text. Equal schedules have the same text."""
        return json.dumps(self._json, separators=(",", ":"))

    @property
    def _json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "format": FORMAT,
            "collective": self.collective,
            "algorithm": self.algorithm,
            "devices": self.devices,
            "chunks": [[str(chunk.share), chunk.sources, chunk.destinations] for chunk in self.chunks],
            "rounds": self.rounds,
            "pieces": self.pieces,
        }
        if self.routes:
            content["routes"] = [route if route.round is not None else route[:4] for route in self.routes]
        return content

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read a schedule back from ``to_json``'s text.

        Raises:
          ScheduleError: the text is not JSON, has another format, or a part of it is missing or invalid.
          ArgumentError: the argument is not text.
        """
        if not isinstance(text, (str, bytes)):
            raise ArgumentError.of("a schedule in JSON must be text.", shown(text), "Path(...).read_text()")
        try:
            number = partial(check_type, int)
            read = load(
                text, (FORMAT, GENERATED_FORMAT), "collective", "algorithm", "devices", "chunks", "rounds", "pieces"
            )
            chunks = [Chunk(_share(share), check_list(int, s), check_list(int, d)) for share, s, d in read["chunks"]]
            rounds = [
                tuple(Step(number(c), number(dst), check_list(int, srcs)) for c, dst, srcs in steps)
                for steps in read["rounds"]
            ]
            routes = [
                Route(number(c), number(src), number(dst), check_list(str, through), *check_list(int, when))
                for c, src, dst, through, *when in check_list(list, read.get("routes", []))
            ]
            collective, algorithm = check_type(str, read["collective"]), check_type(str, read["algorithm"])
            devices, pieces = check_list(str, read["devices"]), check_type(int, read["pieces"])
            schedule = Schedule(collective, algorithm, devices, tuple(chunks), tuple(rounds), pieces, tuple(routes))
            if read["format"] == FORMAT:
                return schedule
            assert Schedule.generated is not None
            return Schedule.generated(schedule, read["symmetry"])
        except ScheduleError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            problem = f"this text is not a schedule in JSON: {why_not(error)}."
            raise ScheduleError.of(problem, shown(text), "the text that Schedule.to_json returns") from error

    def describe(self, step: Step) -> str:
        """Return a step as text: ``chunk 0: cpu:0 <- cpu:0 + cpu:1``."""
        srcs = " + ".join(self.devices[src] for src in step.srcs)
        return f"chunk {step.chunk}: {self.devices[step.dst]} <- {srcs}"

    @cached_property
    def _through(self) -> dict[tuple[int, int, int, int | None], tuple[str, ...]]:
        """The nodes that each route passes, by chunk, source, destination and round; see ``Route``."""
        return {(route.chunk, route.src, route.dst, route.round): route.through for route in self.routes}

    def through(self, r: int, chunk: int, src: int, dst: int) -> tuple[str, ...] | None:
        """Return the nodes that a transfer passes in round ``r``, or ``None`` if it takes the topology's own route."""
        return self._through.get((chunk, src, dst, r), self._through.get((chunk, src, dst, None)))

    @property
    def head(self) -> str:
        """One line with the collective, the algorithm and the counts."""
        return (
            f"{self.collective} {self.algorithm}: {many(len(self.devices), 'device')}, "
            f"{many(self.chunk_count, 'chunk')}, {many(self.round_count, 'round')}, {many(self.steps, 'step')}"
        )

    def __str__(self) -> str:
        lines = [f"  round {r}: {self.describe(step)}" for r, steps in enumerate(self.rounds) for step in steps]
        return "\n".join([self.head, *lines])


def spans(shares: Iterable[Fraction], size: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of elements of consecutive shares of a buffer: see ``Schedule.spans``."""
    ends = [int(end * size) for end in accumulate(shares)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def live_rounds(schedule: Schedule) -> list[list[Step]]:
    """Return for each round the steps on which the result of some destination depends.

    Other steps, and steps that copy a device's value to itself, are left out, so a round may be empty.

    >>> from crossreduce.planning import direct
    >>> [len(steps) for steps in live_rounds(direct(["cpu:0", "cpu:1"]))]
    [2, 2]
    """
    return live_steps(schedule.chunks, schedule.rounds)


def live_steps(chunks: Sequence[Chunk], rounds: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """Return the same as ``live_rounds``, for chunks and rounds of which no schedule was made."""
    live = [{*chunk.destinations} for chunk in chunks]  # for each chunk, devices whose value is needed later
    kept_rounds = []
    for steps in reversed(rounds):
        kept = [step for step in steps if step.dst in live[step.chunk] and step.srcs != (step.dst,)]
        for chunk, dst, _ in kept:
            live[chunk].discard(dst)
        for chunk, _, srcs in kept:
            live[chunk].update(srcs)
        kept_rounds.append(kept)
    return kept_rounds[::-1]


_ROUTE: Final = "Route(chunk, src, dst, names of the nodes between them[, round]) with an existing chunk and round"


def _freeze(steps: Iterable[Step]) -> Round:
    """Return the steps of a round as a tuple of ``Step`` with tuples of operands, so that they cannot change."""
    listed = tuple(steps)
    if {*map(type, listed)} <= {Step} and {*[type(srcs) for _, _, srcs in listed]} <= {tuple}:
        return listed
    return tuple([Step(chunk, dst, tuple(srcs)) for chunk, dst, srcs in listed])


def _are_positions(numbers: Iterable[int], n: int) -> bool:
    """Return whether ``numbers`` is not empty, and has only different numbers from 0 to n - 1."""
    positions = tuple(numbers)
    return bool(positions) and len(set(positions)) == len(positions) and all(0 <= k < n for k in positions)


def _malformed_error(what: str, given: object, remedy: str, n: int) -> ScheduleError:
    return ScheduleError.of(f"{what} is malformed.", shown(given), f"{remedy}; device numbers from 0 to {n - 1}")


def _share(value: object) -> Fraction:
    text = check_type(str, value)
    if not re.fullmatch(r"[0-9]{1,100}(/[0-9]{1,100})?", text):  # Fraction("1e99999999") would take minutes
        raise ValueError(f'{value!r} is not the share of a chunk, such as "1/3"')
    return Fraction(text)


def many(count: int, noun: str) -> str:
    """Return a number with its noun, singular or plural.

    >>> many(1, "root"), many(2, "root")
    ('1 root', '2 roots')
    """
    return f"{count} {noun}{'s' * (count != 1)}"
