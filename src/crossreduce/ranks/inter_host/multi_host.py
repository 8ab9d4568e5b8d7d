"""The engine for groups on several hosts: reduce on each host, exchange between hosts, distribute the results.

Input: a collective, the ranks of the hosts, and the links between hosts if they were measured. Output: an executable
for each rank. If the smallest host has n ranks, the first n ranks of each host are its rail leaders. Each leader owns a
stripe of every piece of an array: it reduces the stripe on its host and exchanges it with the same leader of the other
hosts. Rank programs (see ``two_level``) reduce to the leaders and distribute the results. While a piece is exchanged,
later ones are reduced, and earlier ones are distributed. A third program moves arrays that stay on a host. Partial
results travel in the accumulator's dtype and are divided and rounded once, when they become final.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Final

from ...lowering import Program, forward_through_devices, lower, part_of
from ...observe.counters import kind_and_bytes
from ...observe.traces.format import Phase as TracePhase
from ...ops import Numbers
from ...packing import itemsize
from ...topology import Topology
from ..connections.peers import rail_peers
from ..failures.stage_runner import StageRunner
from ..intra_host.instructions import (
    ArrayPlaces,
    BufferReference,
    Phase,
    RankInstruction,
    kernel,
    native_program,
    pipeline,
)
from ..intra_host.partial_sums import header_nbytes, partial_itemsize, travelling_itemsize
from ..intra_host.programs import LINE, PIECE_BYTES, SLOT_BYTES, STREAMING_BYTES, RankCompiler
from ..intra_host.shared_memory import DIFFERS, DONE, ELSEWHERE, MISMATCH, RankMemory
from ..intra_host.slot_words import DIFFERENT, SAME, remote_wait, verdict
from ..transports.base import PendingMessage, Transport
from .call_comparison import Patience, call_digest, exchange_digests
from .compiled_calls import CompiledCalls
from .exact_exchange import ExactExchange, HostTerms
from .exchange import (
    EAGER_BYTES,
    ROUND_LAG,
    Exchange,
    ExchangeProgram,
    delay,
    exchange_program,
    first_data,
    piece_sizes,
    run_stage,
    take_first,
    wait_for,
)
from .one_host import RankExecutable
from .two_level import (
    SMALL_BYTES,
    HostPart,
    Lost,
    Stripe,
    array_pieces,
    buffer_count,
    can_use_arrays,
    crossing_arrays,
    distances,
    equal_links,
    host_names,
    host_parts,
    host_programs,
    host_schedule,
    most_elements,
    stripe,
)

TAG: Final = 0
SMALLEST_PIECE: Final = 1 << 17
"""Bytes that all leaders together send over a link for the first piece, and for the last piece, of a large array."""

PLANNED_BYTES: Final = 1 << 26
"""The bytes of the all-reduce whose schedule the ranks compare in ``plan_digest``, before they use measured links."""

_LOCAL_DELAY: Final = 2  # stages. The first 3 stages also run if calls differ, so they must not write into user buffers


class MultiHostEngine:
    """Compiles and runs one rank's calls in a group on several hosts; its methods are those of ``OneHostEngine``.

    ``hosts``: the ranks of each host. ``memory``: the shared memory of this rank's host. ``transport``: carries
    messages between hosts. ``lost``: the pairs of hosts without a link. ``watch``: if compiled code can exchange
    messages (see ``RankMemory.awaited``), a function that returns a message whose wait is recorded. ``ends_at_once``:
    whether messages may use the caller's arrays, since their memory is not used after an abort.
    """

    def __init__(
        self,
        hosts: tuple[tuple[int, ...], ...],
        rank: int,
        memory: RankMemory,
        transport: Transport,
        lost: Lost = (),
        watch: Callable[[PendingMessage, int], PendingMessage] | None = None,
        ends_at_once: bool = False,
    ) -> None:
        self.hosts, self.rank, self.memory, self.transport = hosts, rank, memory, transport
        self.ranks, self.host = memory.host, hosts.index(memory.host)
        self.leaders = min(map(len, hosts))
        self.peers = rail_peers(hosts, rank)
        self.leader = self.ranks.index(rank) if self.peers else None  # its index, if this rank is a leader
        self.topology: Topology | None  # the links between hosts, if they were measured
        self.digest = b""  # of the last call
        self._exchanges: tuple[Exchange, ...] = ()  # the exchanges of the current op
        self.patience: Patience | None = None  # set only while the links are checked
        self._watch, self._ends_at_once, self._is_alone = watch, ends_at_once, max(map(len, hosts)) == 1
        self._compiled, self._lag = CompiledCalls(), getattr(transport, "lag", ROUND_LAG)
        self.lose(lost)

    def lose(self, lost: Lost) -> None:
        """Stop sending between these pairs of hosts. Assume that all other links are equal until they are measured."""
        self.lost, self.topology = lost, None
        hops = distances(len(self.hosts), lost)
        # The leaders of other hosts to which this leader has a link; empty if this rank is not a leader.
        self.neighbours = [peer for host, peer in enumerate(self.peers) if hops[self.host][host] == 1]
        self.diameter = max(map(max, hops))  # links on the longest of all shortest routes

    def plan_digest(self, topology: Topology) -> bytes:
        """Return the digest by which ranks check that they have the same topology and plan a large all-reduce alike."""
        schedule = host_schedule(topology, self.hosts, "all_reduce", PLANNED_BYTES, None, lost=self.lost)
        return _digest(topology.to_json().encode(), schedule.to_json())

    def compile(self, collective: str, size: int, numbers: Numbers, root: int | None, text: bytes) -> RankExecutable:
        """Return the executable of a call. If ``size`` is 0, no data moves, and the ranks only compare their calls."""
        if size == 0:
            program = native_program([[]] * 3, *kind_and_bytes(text, collective))
            return RankExecutable(program, 3, text, _digest(text, ""), prepared=False)
        nbytes = travelling_itemsize(numbers, collective)
        parts = host_parts(self.hosts, collective, root)
        arrays = sum(len(part.arrays) for part in parts)
        rounded_nbytes = 1 << (size * arrays * nbytes - 1).bit_length()
        widened = partial_itemsize(numbers) > itemsize(numbers.result)
        schedule = host_schedule(self.topology, self.hosts, collective, rounded_nbytes, root, widened, self.lost)
        between = lower(schedule)
        if self.lost:
            between = forward_through_devices(between, self.topology or equal_links(len(self.hosts), self.lost))
        crossing = nbytes * crossing_arrays(len(self.hosts), parts)
        # Smaller pieces for more rounds, since more pieces are then under way when the last one begins. Measured for
        # 32 MiB on 2 cores with pieces of 1, 1/2 and 1/4 MiB: 2 hosts of 4 ranks take 1.08, 1.065 and 1.055 times the
        # link's time at 1 Gbit/s, and 94, 89 and 126 ms at 10 Gbit/s; 3 hosts of 2 ranks with a slow link, in 4 rounds,
        # 1.20, 1.135 and 1.10 times the bound.
        fitting = crossing * most_elements(self.hosts, collective, root, numbers)
        most = min(PIECE_BYTES // max(2, between.round_count), fitting)
        # A stage of an exact reduction takes longer. Measured on 2 hosts of 4 ranks, 2 cores, 256 KiB to 4 MiB at
        # 1 Gbit/s: exact all-reduces take 1.8 to 2.2 times as long as others; with this factor of 2, 1.6 to 2.0 times.
        smallest = min(most, SMALLEST_PIECE * (2 if numbers.exact else 1))
        compiled = self._watch is not None and not self.lost and not numbers.exact
        in_code = compiled and size * crossing <= min(PIECE_BYTES, fitting)

        def all_nbytes(leaders: int, leader: int) -> int:
            """Return the bytes of a leader's partial results, if there is one piece. All hosts count the same parts."""
            numbered = [stripe(len(part.arrays), leaders, leader, size, itemsize(numbers.dtype)) for part in parts]
            elements = sum(each.size for each, part in zip(numbered, parts, strict=True) if part.crosses)
            return elements * partial_itemsize(numbers) + len(between.chunks) * header_nbytes(numbers)

        direct = compiled and self._is_alone and can_use_arrays(parts, between, numbers)
        if direct and self._ends_at_once and not (in_code and all_nbytes(1, 0) <= EAGER_BYTES):
            in_code = False
            smallest, most = array_pieces(parts, between, smallest, self.transport)
        sizes = (size,) if in_code else piece_sizes(size, crossing, smallest, most, delay(between, 2))
        # One message to each host: more of them take longer than their share of the data.
        leaders = 1 if in_code and all_nbytes(1, 0) <= SMALL_BYTES else self.leaders
        eager = len(sizes) == 1 and all_nbytes(leaders, self.leader or 0) <= EAGER_BYTES
        # First messages do not use the caller's arrays after an abort, later ones may.
        direct = direct and (self._ends_at_once or not eager or between.round_count == 1)
        copies = direct and not eager and not self._ends_at_once
        exchanges = {}  # for each part in which this leader takes part, by the part's number
        if self.leader is not None and self.leader < leaders:
            order = [host_names(len(self.hosts)).index(name) for name in schedule.devices]  # the host of each device
            for p, part in enumerate(parts):
                stripes = tuple(self._stripe(part, size, numbers, leaders).size for size in sizes)
                buffers = (
                    (part.arrays[0].input, part.arrays[0].output) if direct else None
                )  # the only array of the part
                how = stripes, numbers, eager, buffers, self._lag, copies
                if part.crosses and (exchange := self._part_exchange(part, between, order, *how)) is not None:
                    exchanges[p] = exchange
        # Only what stays on a host needs other instructions, and these need no pieces.
        in_code, pieces = (True, (size,)) if direct else (in_code, sizes)
        depth = 2 if in_code else delay(between, len(sizes), self._lag) + 2
        local = self._local_parts(collective, pieces, numbers, root, exchanges, depth, leaders, in_code)
        phases, deliveries, folds = local
        stages = pipeline(len(pieces), phases, depth)
        counted = kind_and_bytes(text, collective, numbers.dtype, size, sum(map(len, self.hosts)))
        digest, programs = _digest(text, f"{schedule.to_json()} {sizes} {in_code}"), tuple(exchanges.values())
        if not compiled:
            given = native_program(stages, *counted), len(stages), text, digest, programs, deliveries
            return RankExecutable(*given, folds=folds, prepared=False)
        compared = tuple(self.neighbours) if self.leader is not None and self.leader < leaders else ()
        return self._compiled.executable(
            *(stages, programs, buffer_count(parts, self.rank), deliveries, compared, digest, counted, text),
            streaming=size * arrays * nbytes >= STREAMING_BYTES,
        )

    def _part_exchange(
        self,
        part: HostPart,
        between: Program,
        order: list[int],
        *how: Any,
    ) -> ExchangeProgram | None:
        """Return the program by which this leader exchanges its stripe of a part's arrays with other hosts.

        Return ``None`` if the leader neither sends nor receives. ``order``: the host of each device of ``between``.
        ``how``: the arguments of ``exchange_program`` from ``sizes`` on.
        """
        ends = (tuple(map(order.index, hosts)) for hosts in (part.sources, part.destinations))
        peers = tuple(self.peers[host] for host in order)
        program = exchange_program(part_of(between, *ends), order.index(self.host), peers, *how)
        return program if any(stage.sends or stage.receives for stage in program.part.stages) else None

    def _stripe(self, part: HostPart, size: int, numbers: Numbers, leaders: int) -> Stripe:
        assert self.leader is not None
        return stripe(len(part.arrays), leaders, self.leader, size, itemsize(numbers.dtype))

    @staticmethod
    def compile_inner(text: bytes) -> RankExecutable:
        """Return the executable of a call that another library executes."""
        return RankExecutable(
            native_program([[]] * 5, *kind_and_bytes(text)), 5, text, _digest(text, "inner"), prepared=False
        )

    def _local_parts(
        self,
        collective: str,
        sizes: tuple[int, ...],
        numbers: Numbers,
        root: int | None,
        exchanges: dict[int, ExchangeProgram],
        depth: int,
        leaders: int,
        in_code: bool,
    ) -> tuple[list[Phase], tuple[list[RankInstruction], ...], tuple[list[RankInstruction], ...]]:
        """Return what this rank executes on its host: phases for ``pipeline``, deliveries and folds.

        Deliveries and folds are executed by leaders only: see ``RankExecutable``. In an exact reduction, the folds
        replace the phase that makes partial results. A slot begins with a cache line for ``slot_words``. The slot
        memory of each program follows. Instructions refer to the memories of the exchanges as buffers whose numbers
        follow those of the caller's buffers. Piece j is distributed in stage j + ``depth``. ``in_code``: see
        ``_in_code``.
        """
        parts = host_parts(self.hosts, collective, root)
        programs = host_programs(self.hosts, collective, root, self.host, leaders)
        buffers = buffer_count(parts, self.rank)
        written = sum(self.rank in array.destinations for p in parts for array in p.arrays)
        nbytes, wide, narrow = map(itemsize, (numbers.dtype, numbers.accumulator, numbers.result))
        starts = tuple(start * nbytes for start in accumulate(sizes[:-1], initial=0))
        streaming = written * sum(sizes) * nbytes >= STREAMING_BYTES

        def inputs_at(p: int, a: int) -> ArrayPlaces:
            return ArrayPlaces(parts[p].arrays[a].input, starts)

        def outputs_at(p: int, a: int) -> ArrayPlaces:
            return ArrayPlaces(parts[p].arrays[a].output, starts)

        def striped(at: Callable[[ExchangeProgram, int], int], width: int, p: int, a: int) -> ArrayPlaces:
            """Return where a leader's stripe of array ``a`` of part ``p`` is; ``at`` returns the offset of a piece."""
            if p not in exchanges:  # other ranks do not use it
                return ArrayPlaces(buffers, ())
            shifts = [self._stripe(parts[p], size, numbers, leaders).shifts.get(a, 0) for size in sizes]
            places = tuple(at(exchanges[p], piece) + shift * width for piece, shift in enumerate(shifts))
            return ArrayPlaces(buffers + [*exchanges].index(p), places)

        partials: Callable[[int, int], ArrayPlaces] = partial(striped, ExchangeProgram.partial_at, wide)
        results: Callable[[int, int], ArrayPlaces] = partial(striped, ExchangeProgram.results_at, narrow)
        if any(program.arrays for program in exchanges.values()):  # nothing is copied
            partials, results = inputs_at, outputs_at
        ends: dict[str, tuple[Callable[[int, int], ArrayPlaces], ...]]  # return where inputs and outputs are
        ends = {"up": (inputs_at, partials), "local": (inputs_at, outputs_at), "down": (results, outputs_at)}
        compiled, slot_ends = {}, (LINE,) * len(self.ranks)  # the bytes in use of each rank's slot
        kinds = [kind for kind in programs._fields if getattr(programs, kind) is not None]
        place = self.ranks.index(self.rank)
        for kind, analysis in zip(kinds, programs.analyses(numbers), strict=True):
            inputs, outputs = ([at(*array) for array in getattr(programs, kind).arrays] for at in ends[kind])
            streams = streaming and kind != "up"
            compiled[kind] = RankCompiler(analysis, place, sizes, inputs, outputs, streaming=streams, bases=slot_ends)
            slot_ends = compiled[kind].ends
        assert max(slot_ends) <= SLOT_BYTES // 2, "a piece does not fit into a slot"
        # Local arrays need the first and the last of the three stages of an op in compiled code.
        stages = {"up": (0, 1), "local": (0, 2) if in_code else (_LOCAL_DELAY, _LOCAL_DELAY + 1)}
        phases: list[Phase] = [
            (stage, partial(compiled[kind].phase, phase=phase))
            for kind in stages
            if kind in compiled
            for phase, stage in enumerate(stages[kind][: 1 if numbers.exact else 2])
        ]
        folds: tuple[list[RankInstruction], ...] = ()
        if numbers.exact and exchanges:
            folds = tuple(compiled["up"].phase(piece, 1) for piece in range(len(sizes)))
        deliveries: tuple[list[RankInstruction], ...] = ()
        if "down" in compiled:
            phases.append((depth, partial(compiled["down"].phase, phase=1)))
            if exchanges:
                delivered = [compiled["down"].phase(piece, 0) for piece in range(len(sizes))]
                deliveries = (*([] for _ in range(depth - 2)), *delivered)
        return phases, deliveries, folds

    def run(
        self,
        executable: RankExecutable,
        addresses: tuple[int, ...],
        runner: StageRunner,
        timeout_s: float,
        inner: Callable[[], None] | None = None,
    ) -> bool:
        """Run a call; see ``OneHostEngine.run``."""
        if executable.prepared:
            addresses += executable.addresses
            outcome = runner.start(executable.program, addresses, executable.text, executable.stages)
            return self.resume(executable, outcome, runner, timeout_s)
        self.digest = executable.digest
        exchanges = tuple(self._new_exchange(program, timeout_s) for program in executable.exchanges)
        self._exchanges, addresses = exchanges, (*addresses, *(exchange.base for exchange in exchanges))
        same_here = runner.begin(executable.program, addresses, executable.text, 2)
        same = same_here
        if same_here and executable.folds:
            self._fold(executable, exchanges, addresses, 0)
        if self.leader is not None:
            digest = call_digest(executable.digest, self.memory.number)
            data: dict[int, bytes] = {}
            if not same_here:
                digest = bytes(len(digest))  # zeros, which differ from the digest of any call
            else:
                data = first_data(exchanges)
            received = self._agreed(digest, data, timeout_s)
            same = same_here and received is not None
            if received is not None:
                take_first(exchanges, received)
        if not same_here:
            self._exchanges = ()
            return False
        if self.leader is not None:
            verdict(self.memory, self.rank).value = SAME if same else DIFFERENT
        if exchanges and same:
            self._exchange_stage(executable, exchanges, addresses, 1)
        runner.reach(3)
        if verdict(self.memory, self.ranks[0]).value != SAME:
            self.memory.end_op()
            self._exchanges = ()
            return False
        if inner is not None:
            with self._waiting_for_hosts(TracePhase.INNER, 2):
                inner()
            runner.reach(4)  # all ranks of this host have returned from ``inner``
            if self.leader is not None:  # wait until all ranks of the other hosts have returned, too
                self._agreed(bytes(1), {}, timeout_s, TracePhase.BETWEEN_HOSTS)
            runner.reach(5)
        elif not exchanges and executable.stages > 3:
            runner.reach(executable.stages)
        elif exchanges:
            for stage in range(2, executable.stages - 1):
                self._exchange_stage(executable, exchanges, addresses, stage)
                runner.reach(stage + 2)
            with self._waiting_for_hosts(TracePhase.BETWEEN_HOSTS, executable.stages - 1):
                for exchange in exchanges:
                    exchange.close()
            self._exchanges = ()
        return True

    def resume(self, executable: RankExecutable, outcome: int, runner: StageRunner, timeout_s: float) -> bool:
        """Complete a prepared call; see ``OneHostEngine.resume``. Longer waits for other hosts are recorded here."""
        self.digest = executable.digest
        assert self._watch is not None
        while (outcome := runner.settle(outcome, executable.stages)) == ELSEWHERE:
            pending, rank = self.memory.awaited()
            with self._waiting_for_hosts(None, 1):  # compiled code traces the whole phase
                wait_for(self._watch(pending, rank), rank, timeout_s)
            outcome = self.memory.advance(executable.stages)
        # Leaders that have not compared their calls answer those that have: ranks of other hosts may make other calls.
        if self.leader is not None and (outcome == MISMATCH or (outcome == DIFFERS and not executable.compares)):
            self._agreed(bytes(len(executable.digest)), {}, timeout_s)
        return outcome == DONE

    def _agreed(
        self, digest: bytes, data: dict[int, bytes], timeout_s: float, phase: TracePhase = TracePhase.AGREE
    ) -> dict[int, bytes] | None:
        """Exchange digests and data with the leaders of linked hosts. Return their data, as ``exchange_digests``."""
        with self._waiting_for_hosts(phase, 1):
            others, transport, rounds = self.neighbours, self.transport, self.diameter
            return exchange_digests(digest, data, others, transport, TAG, timeout_s, rounds, self.patience)

    def _exchange_stage(
        self, executable: RankExecutable, exchanges: Sequence[Exchange], addresses: tuple[int, ...], stage: int
    ) -> None:
        """Execute the inter-host work of a stage, after the stage's instructions."""
        if 1 < stage <= len(executable.folds):
            self._fold(executable, exchanges, addresses, stage - 1)
        with self._waiting_for_hosts(TracePhase.BETWEEN_HOSTS, stage):
            run_stage(exchanges, stage - 1)
        delivered = executable.deliveries[stage - 1] if executable.deliveries else ()
        for size, operands, results, numbers, _ in delivered:
            run = kernel(numbers, size, len(operands), len(results)).run
            sources, targets = ([self._address(place, addresses) for place in each] for each in (operands, results))
            run([sources], [targets], 1, False, False)  # threads, streaming, check_overlap
        if delivered:
            self.memory.native.trace(TracePhase.COPY_OUT, stage)

    def _new_exchange(self, program: ExchangeProgram, timeout_s: float) -> Exchange:
        if program.numbers.exact:
            return ExactExchange(program, self.transport, TAG, timeout_s, sum(map(len, self.hosts)))
        return Exchange(program, self.transport, TAG, timeout_s)

    def _fold(
        self, executable: RankExecutable, exchanges: Sequence[Exchange], addresses: tuple[int, ...], piece: int
    ) -> None:
        """Write the partial sums of a piece of an exact reduction into the memory of the exchanges."""
        terms: list[list[HostTerms]] = [[] for _ in exchanges]
        for size, operands, ((region, offset),), *_ in executable.folds[piece]:
            number = ~region - (len(addresses) - len(exchanges))  # the exchanges' memories are the last buffers
            terms[number].append(HostTerms(size, [self._address(place, addresses) for place in operands], offset))
        for exchange, own_terms in zip(exchanges, terms, strict=True):
            assert isinstance(exchange, ExactExchange)
            exchange.add(piece, own_terms)
        self.memory.native.trace(TracePhase.REDUCE, piece + 1)

    def _address(self, place: BufferReference, addresses: tuple[int, ...]) -> int:
        """Return the address of a place: in the slot of rank ``region`` of the host, or in buffer ``~region``."""
        region, offset = place
        return offset + (addresses[~region] if region < 0 else self.memory.address(self.ranks[region]))

    @property
    def has_unfinished_exchange(self) -> bool:
        """Whether an exception has ended an op whose messages may still be under way."""
        return bool(self._exchanges)

    @contextmanager
    def _waiting_for_hosts(self, phase: TracePhase | None, stage: int) -> Iterator[None]:
        """Mark this rank as waiting for other hosts, so that its host's ranks can see it; count and trace the time."""
        word = remote_wait(self.memory, self.rank)
        word.value, began = 1, time.monotonic_ns()
        yield  # an error skips the next lines; it breaks the group, so no later call reads the word
        word.value = 0
        self.memory.count_between_hosts(time.monotonic_ns() - began)
        if phase is not None:
            self.memory.native.trace(phase, stage)


def _digest(text: bytes, more: str) -> bytes:
    return blake2b(text + b"\0" + more.encode(), digest_size=16).digest()
