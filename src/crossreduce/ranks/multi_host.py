"""The engine for groups on several hosts: reduce on each host, exchange between hosts, distribute the results.

Input: a collective, the ranks of the hosts, and the links between hosts if they were measured. Output: an executable
for each rank. If the smallest host has n ranks, the first n ranks of each host are its rail leaders. Each leader owns a
stripe of every piece: it reduces the stripe on its host and exchanges it with the same leader of the other hosts. The
reduction to the leaders and the distribution of the results are rank programs. They are pipelined with the exchange:
while a piece is exchanged, later ones are reduced, and earlier ones are distributed. Partial results travel in the
accumulator's dtype; where they become final they are divided and rounded, once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from ..lowering import lower
from ..ops import Numbers, copying
from ..packing import itemsize
from ..planning import Request, plan, schedule_for
from ..schedule import Schedule
from ..topology import Topology
from ..transports.base import Transport
from .exchange import EAGER_BYTES, Exchange, ExchangeProgram, agreed, delay, exchange_program, piece_sizes
from .instructions import ArrayPlaces, Phase, RankInstruction, kernel, native_program, pipelined
from .one_host import RankExecutable, one_round
from .programs import LINE, PIECE_BYTES, SLOT_BYTES, STREAMING_BYTES, RankCompiler, analyze, line_shares
from .shared_memory import RankMemory, StageRunner

TAG: Final = 0
SMALLEST_PIECE: Final = 1 << 17
"""Bytes of a large array's first and last pieces, of all leaders together; the others have up to ``PIECE_BYTES``."""
COLLECTIVES: Final = ("all_reduce", "reduce", "broadcast")  # these run over several hosts

# Words at the start of each slot: whether all hosts made the same call; whether the rank waits for another host.
_VERDICT, _REMOTE = 0, 1
_SAME, _DIFFERENT = 1, 2


class MultiHostEngine:
    """Compiles and runs one rank's calls in a group on several hosts; its methods are those of ``OneHostEngine``.

    ``hosts``: the ranks of each host. ``memory``: that of this rank's host. ``transport``: between hosts.
    """

    def __init__(self, hosts: tuple[tuple[int, ...], ...], rank: int, memory: RankMemory, transport: Transport) -> None:
        self.hosts, self.rank, self.memory, self.transport = hosts, rank, memory, transport
        self.ranks, self.host = memory.host, hosts.index(memory.host)
        self.leaders = min(map(len, hosts))
        self.peers = rail_peers(hosts, rank)
        self.leader = self.ranks.index(rank) if self.peers else None
        self.topology: Topology | None = None  # the topology of the hosts, if it was measured
        self._exchange: Exchange | None = None  # the exchange of the current op

    def compile(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> RankExecutable:
        """Return the executable of a call; if ``size`` is 0, it only compares the ranks' calls, as no data moves."""
        if size == 0:
            return RankExecutable(native_program([[]] * 3), 3, text, _digest(text, ""))
        nbytes = itemsize(numbers.dtype)
        root_host = None if root is None else next(k for k, ranks in enumerate(self.hosts) if root in ranks)
        rounded = 1 << (size * nbytes - 1).bit_length()
        widened = itemsize(numbers.accumulator) > itemsize(numbers.result)
        schedule = host_schedule(self.topology, len(self.hosts), collective, rounded, root_host, widened)
        between = lower(schedule)
        sizes = piece_sizes(size, nbytes, SMALLEST_PIECE, PIECE_BYTES, delay(between, 2))
        exchange = None
        if self.leader is not None:
            shares = [line_shares(piece, self.leaders, nbytes) for piece in sizes]
            stripes = tuple(ends[self.leader + 1] - ends[self.leader] for ends in shares)
            order = [host_names(len(self.hosts)).index(name) for name in schedule.devices]
            peers = tuple(self.peers[host] for host in order)
            exchange = exchange_program(between, order.index(self.host), peers, stripes, numbers)
        depth = delay(between, len(sizes)) + 2
        phases, deliveries = self._local_parts(collective, sizes, numbers, root, exchange, depth)
        stages = pipelined(len(sizes), phases, depth)
        digest = _digest(text, f"{schedule.to_json()} {sizes}")
        return RankExecutable(native_program(stages), len(stages), text, digest, exchange, deliveries)

    @staticmethod
    def compile_inner(text: bytes) -> RankExecutable:
        """Return the executable of a call that another library executes."""
        return RankExecutable(native_program([[]] * 5), 5, text, _digest(text, "inner"))

    def _local_parts(
        self,
        collective: str,
        sizes: tuple[int, ...],
        numbers: Numbers,
        root: int | None,
        exchange: ExchangeProgram | None,
        depth: int,
    ) -> tuple[list[Phase], tuple[list[RankInstruction], ...]]:
        """Return the reduction to the leaders and the distribution of results, as phases for ``pipelined``.

        The second part of the result is, for each piece, the instructions that a leader executes after the exchange. A
        slot begins with a line of words; the room of the reduction and that of the distribution follow. The exchange's
        memory counts as the leader's buffer after the caller's. Piece j is distributed in stage j + ``depth``.
        """
        everyone, leaders = tuple(range(len(self.ranks))), range(self.leaders)
        me, used = self.ranks.index(self.rank), (LINE,) * len(self.ranks)
        main = tuple(k for k in everyone if self.ranks[k] == root)
        sources = main if collective == "broadcast" else everyone
        destinations = {
            "all_reduce": everyone,
            "reduce": main,
            "broadcast": tuple(k for k in everyone if k not in main),
        }
        buffers = 1 if collective == "broadcast" or (collective == "reduce" and self.rank != root) else 2
        nbytes = itemsize(numbers.dtype)
        starts = tuple(start * nbytes for start in accumulate(sizes[:-1], initial=0))
        partials = finals = ArrayPlaces(buffers, ())  # where the leader's own stripe is; other ranks do not use them
        if exchange is not None and self.leader is not None:
            stripes = [line_shares(size, self.leaders, nbytes)[self.leader] for size in sizes]
            wide, narrow = itemsize(numbers.accumulator), itemsize(numbers.result)
            partials, finals = (
                ArrayPlaces(buffers, tuple(at(j) - stripe * width for j, stripe in enumerate(stripes)))
                for at, width in ((exchange.partial_at, wide), (exchange.results_at, narrow))
            )
        phases: list[Phase] = []
        deliveries: tuple[list[RankInstruction], ...] = ()
        if sources:
            program = one_round("reduce_scatter", len(self.ranks), [(sources, (k,)) for k in leaders])
            analysis = analyze(program, numbers._replace(result=numbers.accumulator, divisor=1), 1)
            reduction = RankCompiler(analysis, me, sizes, [ArrayPlaces(0, starts)], [partials], bases=used)
            phases += [(phase, partial(reduction.phase, phase=phase)) for phase in (0, 1)]
            used = reduction.ends
        if destinations[collective]:
            program = one_round("all_gather", len(self.ranks), [((k,), destinations[collective]) for k in leaders])
            analysis = analyze(program, copying(numbers.result), 1)
            streaming = starts[-1] + sizes[-1] * nbytes >= STREAMING_BYTES
            outputs = [ArrayPlaces(buffers - 1, starts)]
            delivery = RankCompiler(analysis, me, sizes, [finals], outputs, streaming=streaming, bases=used)
            phases.append((depth, partial(delivery.phase, phase=1)))
            if exchange is not None:
                deliveries = tuple(delivery.phase(piece, 0) for piece in range(len(sizes)))
            used = delivery.ends
        assert max(used) <= SLOT_BYTES // 2, "a piece does not fit into a slot"
        return phases, deliveries

    def run(
        self,
        executable: RankExecutable,
        addresses: tuple[int, ...],
        runner: StageRunner,
        timeout_s: float,
        inner: Callable[[], None] | None = None,
    ) -> bool:
        """Run a call; see ``OneHostEngine.run``."""
        exchange = None
        if executable.exchange is not None:
            exchange = self._exchange = Exchange(executable.exchange, self.transport, TAG, timeout_s)
            addresses = (*addresses, exchange.base)
        same_here = runner.begin(executable.program, addresses, executable.text, 2)
        same = same_here
        if self.leader is not None:
            digest = blake2b(executable.digest + str(self.memory.number).encode(), digest_size=16).digest()
            data: dict[int, bytes] = {}
            if not same_here:
                digest = bytes(len(digest))  # zeros differ from every call's digest
            elif exchange is not None:
                data = exchange.first_data()
            received = self._agreed(digest, data, timeout_s)
            same = same_here and received is not None
            if exchange is not None and received is not None:
                exchange.take_first(received)
        if not same_here:
            self._exchange = None
            return False
        if self.leader is not None:
            self._word(_VERDICT).value = _SAME if same else _DIFFERENT
        if exchange is not None and same:
            self._exchange_stage(executable, exchange, addresses, 1)
        runner.reach(3)
        if self._word(_VERDICT, self.ranks[0]).value != _SAME:
            self.memory.end_op()
            self._exchange = None
            return False
        if inner is not None:
            with self._waiting_for_hosts():
                inner()
            runner.reach(4)  # all ranks of this host have returned from it
            if self.leader is not None:
                self._agreed(bytes(1), {}, timeout_s)  # and all ranks of the other hosts
            runner.reach(5)
        elif exchange is None and executable.stages > 3:
            runner.reach(executable.stages)
        elif exchange is not None:
            for stage in range(2, executable.stages - 1):
                self._exchange_stage(executable, exchange, addresses, stage)
                runner.reach(stage + 2)
            with self._waiting_for_hosts():
                exchange.close()
            self._exchange = None
        return True

    def _agreed(self, digest: bytes, data: dict[int, bytes], timeout_s: float) -> dict[int, bytes] | None:
        """Return the data of the leaders of all other hosts; ``None``: they did not all pass the same digest."""
        with self._waiting_for_hosts():
            others = [peer for peer in self.peers if peer != self.rank]
            return agreed(digest, data, others, self.transport, TAG, timeout_s)

    def _exchange_stage(
        self, executable: RankExecutable, exchange: Exchange, addresses: tuple[int, ...], stage: int
    ) -> None:
        """Execute the inter-host part of a stage, after the stage's instructions."""
        assert executable.exchange is not None

        def address(region: int, offset: int) -> int:
            return offset + (addresses[~region] if region < 0 else self.memory.address(self.ranks[region]))

        with self._waiting_for_hosts():
            exchange.run_stage(stage - 1)
        piece = stage - 1 - executable.exchange.delay
        delivered = executable.deliveries[piece] if executable.deliveries and piece >= 0 else ()
        for size, operands, results, numbers, _ in delivered:
            run = kernel(numbers, size, len(operands), len(results)).run
            run([[address(*place) for place in operands]], [[address(*place) for place in results]], 1, False, False)

    def is_waiting_for_hosts(self, rank: int) -> bool:
        """Return whether a rank of this host waits for another host: in the current op, or still in the one before."""
        other = -SLOT_BYTES // 2 if self.memory.number % 2 else SLOT_BYTES // 2  # ops use the halves in turn
        return any(self._word(_REMOTE, rank, offset).value for offset in (0, other))

    @contextmanager
    def _waiting_for_hosts(self) -> Iterator[None]:
        word = self._word(_REMOTE)
        word.value = 1
        yield  # an error skips the next line; it breaks the group, so no later call reads the word
        word.value = 0

    def _word(self, which: int, rank: int | None = None, offset: int = 0) -> ctypes.c_int32:
        """Return a word at the start of the half of a rank's slot that the current op uses, or at an offset from it."""
        start = self.memory.address(self.rank if rank is None else rank) + offset
        return ctypes.c_int32.from_address(start + 4 * which)


def rail_peers(hosts: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    """Return the rail leaders, one of each host, among which a rank exchanges data; empty: it is no leader.

    >>> rail_peers(((0, 1), (2, 3, 4)), 3), rail_peers(((0, 1), (2, 3, 4)), 4)
    ((1, 3), ())
    """
    place = next(ranks for ranks in hosts if rank in ranks).index(rank)
    return tuple(ranks[place] for ranks in hosts) if place < min(map(len, hosts)) else ()


def _digest(text: bytes, more: str) -> bytes:
    return blake2b(text + b"\0" + more.encode(), digest_size=16).digest()


def host_names(hosts: int) -> tuple[str, ...]:
    """Return the names of hosts in their topology and schedules."""
    return tuple(f"host{k}/cpu:0" for k in range(hosts))


@lru_cache(maxsize=256)
def host_schedule(
    topology: Topology | None, hosts: int, collective: str, nbytes: int, root: int | None, widened: bool = False
) -> Schedule:
    """Return the schedule by which hosts exchange the partial results of their ranks.

    Args:
      topology: the links between hosts; ``None``: they were not measured and are assumed to be equal.
      hosts: the number of hosts.
      collective: one of ``COLLECTIVES``.
      nbytes: of an array, rounded up to a power of 2.
      root: the root's host, of a reduce or broadcast.
      widened: whether partial results are larger than results.
    """
    names = host_names(hosts)
    if hosts == 2 or (topology is None and collective == "all_reduce"):  # optimal, and found without a search
        end = names if root is None else (names[root],)
        sources = end if collective == "broadcast" else names
        destinations = end if collective == "reduce" else names
        algorithm = "one_device"
        if (
            root is None
        ):  # of 2 hosts each sends its array once with both algorithms, but direct sends halves of results
            once = hosts == 2 and not widened
            algorithm = "one_shot" if once or nbytes * (hosts - 1) <= EAGER_BYTES else "direct"
        return schedule_for(Request(collective, sources, destinations, algorithm))
    wiring = topology or Topology.full_mesh(names, gb_per_s=1, latency_s=1e-4)
    main = None if root is None else wiring.devices[root]
    return plan(wiring, collective, nbytes, root=main).schedule.cut_into(1)
