"""``Communicator``: the collectives of a group of ranks, over memory that is named by its address.

In: where the ranks meet, and a wire between hosts.  Out: reduced memory, or the same error on every rank. On one host
a call is a course through shared memory; between hosts see ``across``. Knows no arrays.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from ..errors import ArgumentError, ContextError, MismatchError, ReductionError, UnsupportedError, message
from ..ops import COMPLEX, ReduceOp
from ..topology import Topology
from ..transports.base import Buffer, Rendezvous, Wire
from .diagnostics import Said, described
from .exchange import Late, Lost
from .membership import Member, again
from .multi_host import Crossing
from .programs import Numbers, copying, flows, native_course, reduction_numbers
from .shared_memory import BROKEN, DONE, LEFT, MISMATCH, MOST_TEXT, WAITING, Watch

_KEPT: Final = 1 << 15  # ticks of courses that are remembered; on 8 ranks each takes 1 to 2 KiB
ACROSS: Final = ("all_reduce", "reduce", "broadcast")  # the collectives that are planned over several hosts


class _GivenUp(Exception):  # noqa: N818
    """Somebody on this host has said why nothing goes on."""


class _Call(NamedTuple):
    """A call, ready to run."""

    course: Any
    ticks: int
    text: bytes


class Communicator(Member):
    """The collectives of a group, seen from one rank.

    Calls block, let other Python threads run, and answer signals; calls of several threads wait for each other. All
    ranks make the same calls in the same order; before any result is written each makes sure that all do.

    Args:
      rendezvous: where the ranks meet.
      wire: how ranks of different hosts reach each other; ``None`` where all are on one.
      name: the group's, in messages.
      timeout_s: how long a call waits for other ranks, in seconds.
      members: what messages and errors call the ranks, such as their numbers in a larger group; ``None``: 0, 1, ...
    Raises:
      BackendError: the compiled kernels are not there, or this system is not Linux.
      CollectiveTimeout: some ranks did not come.
      ContextError: two ranks are one process.
      MismatchError: the ranks have different versions of crossreduce.
      ReductionError: some rank has no memory, or cannot reach what its host shares.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        wire: Wire | None,
        *,
        name: str,
        timeout_s: float,
        members: Sequence[int] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that is in a call
        self._pid = os.getpid()
        self._calls: dict[Any, _Call | Crossing] = {}
        self._ticks = 0  # of all of these
        self._closed = False
        super().__init__(rendezvous, wire, name, timeout_s, members)

    # The collectives

    def all_reduce(self, op: ReduceOp, source: Buffer, result: Buffer) -> None:
        """Combine all ranks' ``source`` into everybody's ``result``, which may be the same memory."""
        self._check(source, result)
        self._reduction("all_reduce", op, source, (source.address, result.address), None)

    def reduce(self, op: ReduceOp, source: Buffer, result: Buffer | None, root: int) -> None:
        """Combine all ranks' ``source`` into the root's ``result``."""
        self.check_root(root, result is not None)
        if result is not None:
            self._check(source, result)
        addresses = (source.address,) if result is None else (source.address, result.address)
        self._reduction("reduce", op, source, addresses, root)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """Copy the root's ``buffer`` to everybody's."""
        self.check_root(root, None)
        self._copying("broadcast", buffer, (buffer.address,), root)

    def all_gather(self, source: Buffer, results: Sequence[Buffer]) -> None:
        """Copy every rank's ``source`` to everybody's ``results``, one a rank."""
        self._check(source, *results, count=self.size)
        self._copying("all_gather", source, (source.address, *(r.address for r in results)), None)

    def reduce_scatter(self, op: ReduceOp, sources: Sequence[Buffer], result: Buffer) -> None:
        """Combine all ranks' ``sources[k]`` into rank k's ``result``."""
        self._check(result, *sources, count=self.size)
        self._reduction("reduce_scatter", op, result, (*(s.address for s in sources), result.address), None)

    def gather(self, source: Buffer, results: Sequence[Buffer] | None, root: int) -> None:
        """Copy every rank's ``source`` to the root's ``results``."""
        self.check_root(root, results is not None)
        if results is not None:
            self._check(source, *results, count=self.size)
        self._copying("gather", source, (source.address, *(r.address for r in results or ())), root)

    def scatter(self, sources: Sequence[Buffer] | None, result: Buffer, root: int) -> None:
        """Copy the root's ``sources[k]`` to rank k's ``result``."""
        self.check_root(root, sources is not None)
        if sources is not None:
            self._check(result, *sources, count=self.size)
        self._copying("scatter", result, (result.address, *(s.address for s in sources or ())), root)

    def all_to_all(self, sources: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        """Copy rank i's ``sources[k]`` to rank k's ``results[i]``."""
        self._check(*sources[:1], *sources, count=self.size)
        self._check(*sources[:1], *results, count=self.size)
        self._copying("all_to_all", sources[0], tuple(b.address for b in (*sources, *results)), None)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.agree("barrier")

    def agree(self, what: str) -> None:
        """Make sure that all ranks say the same, and move nothing.

        Raises:
          MismatchError: they do not.
        """
        self._run(what, lambda: self._nothing(what), ())

    def plan_on(self, topology: Topology) -> None:
        """Plan calls between hosts by measured links from now on; all ranks say the same (see ``links.measure``)."""
        if self._across is not None:
            with self._lock:
                self._across.topology = topology
                self._calls.clear()
                self._ticks = 0

    @contextmanager
    def afar(self) -> Iterator[None]:
        """Give up on the group if what is done here breaks off: messages to other hosts, beside the collectives."""
        try:
            yield
        except ReductionError:  # a call's, which has done what it must
            raise
        except (ConnectionError, TimeoutError) as error:
            self._give_up(self._from_afar(error))
            self._raise_broken()
        except BaseException:  # Ctrl-C: what other hosts send would come into memory that is about to go
            self._give_up(self._interrupted("was interrupted"))
            raise

    def plans(self, collective: str, op: ReduceOp | None = None, dtype: str = "uint8") -> bool:
        """Return whether a call runs here; else it is for another engine, after ``agree``."""
        if len(self.hosts) > 1 and collective not in (*ACROSS, "barrier"):
            return False
        with suppress(UnsupportedError):
            reduction_numbers(op or ReduceOp.MAX, dtype, self.size)
            return True
        return op is None and dtype in COMPLEX

    def abort(self) -> None:
        """Leave the group at once, also in the middle of a call, which then fails on all ranks.

        So does what else is under way on the wire.
        """
        if not self._closed and os.getpid() == self._pid:
            self._give_up(self._interrupted("left"))
            if self.wire is not None:  # ranks of one host may use its engine, too
                self.wire.abort()
        self.close()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._caller == threading.get_ident():  # a signal's handler, in the middle of a call, which fails now
            self._give_up(self._interrupted("left"))
            return
        with self._lock:
            self._let_go()

    def __del__(self) -> None:
        """Leave the group."""
        with suppress(Exception):  # it may be half made
            self.close()

    def _let_go(self) -> None:
        if self.arena.fd >= 0:
            self.arena.leave(self._nothing(LEFT).course)
            self.arena.close()
        if self._lookout is not None:  # last: Ctrl-C may end the wait for its thread, and nobody comes here again
            self._lookout.close()

    # How a call runs

    def _reduction(
        self, collective: str, op: ReduceOp, given: Buffer, addresses: tuple[int, ...], root: int | None
    ) -> None:
        def make() -> _Call | Crossing:
            numbers = reduction_numbers(op, given.dtype, self.size)
            text = described(collective, op.value, root, given.dtype, given.shape)
            return self._made(collective, given.size, numbers, root, text)

        self._run((collective, op, given.dtype, given.shape, root), make, addresses)

    def _copying(self, collective: str, given: Buffer, addresses: tuple[int, ...], root: int | None) -> None:
        def make() -> _Call | Crossing:
            numbers = copying(given.dtype)
            text = described(collective, None, root, given.dtype, given.shape)
            return self._made(collective, given.size, numbers, root, text)

        self._run((collective, given.dtype, given.shape, root), make, addresses)

    def _run(self, key: Any, make: Callable[[], _Call | Crossing], addresses: tuple[int, ...]) -> None:
        thread = threading.get_ident()
        self._require_usable(thread)  # before the lock, which may have been held when this process was forked
        with self._lock:
            self._caller = thread
            try:
                self._require_whole()
                call = self._calls.get(key) or self._remembered(key, make())
                if isinstance(call, Crossing):
                    self._cross(call, addresses)
                else:
                    self._walk(call, addresses)
            finally:
                self._caller = None
                if self._closed:
                    self._let_go()

    def _remembered(self, key: Any, call: _Call | Crossing) -> _Call | Crossing:
        """Return a call that was made just now, and keep it for the next time, if need be instead of all others."""
        self._ticks += call.ticks
        if self._ticks > _KEPT:
            self._calls.clear()
            self._ticks = call.ticks
        self._calls[key] = call
        return call

    def _require_usable(self, thread: int) -> None:
        """Raise unless this thread of this process may call."""
        if os.getpid() != self._pid:
            problem = f'group "{self.name}" belongs to process {self._pid}, which this one was forked from.'
            raise ContextError(message(problem, f"process {os.getpid()}", "make the group after the fork, or spawn"))
        if self._caller == thread:
            problem = f'a call of group "{self.name}" is under way in this very thread.'
            raise ContextError(message(problem, "a call in a signal's handler", "close() or abort() there"))
        self._require_open()  # before the lock, too: a signal's handler may run while this very thread closes

    def _require_open(self) -> None:
        if self._closed:
            raise ContextError(message(f'group "{self.name}" is closed.', remedy="make a new group"))

    def _require_whole(self) -> None:
        """Raise what broke the group, if it is broken."""
        self._require_open()
        if self._broken is not None:
            raise again(self._broken)
        if self.arena.running:  # a call was interrupted, perhaps a second time before it had said so
            self._give_up(self._interrupted("was interrupted"))
            self._raise_broken()

    def _walk(self, call: _Call, addresses: tuple[int, ...]) -> None:
        """Run a call on this host, and look round now and then while it waits."""
        try:
            outcome = self.arena.begin(call.course, addresses, call.text, call.ticks)
            if outcome == WAITING:
                watch = Watch(self._warn_after_s())
                while outcome == WAITING:
                    self._look_round(watch)
                    outcome = self.arena.advance(call.ticks)
        except ReductionError as error:
            self._give_up(error)
            outcome = BROKEN
        except BaseException:  # Ctrl-C, or whatever else a signal's handler raised
            if self.arena.running:
                self._give_up(self._interrupted("was interrupted"))
            raise
        if outcome == MISMATCH:
            number = self.arena.number
            raise self._mismatch({rank: self.arena.call(rank, number) or Said(number, "?") for rank in self.host})
        if outcome == BROKEN:
            self._raise_broken()

    def _cross(self, crossing: Crossing, addresses: tuple[int, ...]) -> None:
        """Walk through a call over several hosts."""
        assert self._across is not None
        watch = Watch(self._warn_after_s())

        def begin(course: Any, buffers: tuple[int, ...], text: bytes, until: int) -> bool:
            return reached(self.arena.begin(course, buffers, text, until), until)

        def reach(until: int) -> None:
            reached(self.arena.advance(until), until)

        def reached(outcome: int, until: int) -> bool:
            while outcome == WAITING:
                self._look_round(watch)
                outcome = self.arena.advance(until)
            if outcome == BROKEN:
                raise _GivenUp
            return outcome == DONE

        try:
            same = self._across.run(crossing, addresses, begin, reach, self.timeout_s)
            calls = [] if same else self.rendezvous.all_gather(json.dumps(self._said()).encode())
        except (_GivenUp, Lost, Late, ReductionError) as error:
            if not isinstance(error, _GivenUp):
                self._give_up(self._from_afar(error) if isinstance(error, (Lost, Late)) else error)
            self._raise_broken()
        except BaseException:  # Ctrl-C, or whatever else a signal's handler raised
            self._give_up(self._interrupted("was interrupted"))
            raise
        if calls:
            raise self._mismatch({rank: Said(*json.loads(call)) for rank, call in enumerate(calls)})

    # What a call is

    def _nothing(self, what: str) -> _Call | Crossing:
        return self._made("", 0, copying("uint8"), None, what)

    def _made(self, collective: str, size: int, numbers: Numbers, root: int | None, text: str) -> _Call | Crossing:
        if self._across is not None:
            if collective and collective not in ACROSS:
                problem = f"{collective} over several hosts is for another engine."
                raise UnsupportedError(message(problem, f"{len(self.hosts)} hosts", "ask plans(), then agree()"))
            return self._across.crossing(collective, size, numbers, root, short(text))
        given = flows(collective, self.size, root) if collective else ()
        course, ticks = native_course(given, size, numbers, self.rank, self.size)
        return _Call(course, ticks, short(text))

    def check_root(self, root: int, has_all: bool | None = None) -> None:
        """Raise ``ArgumentError`` unless the root is a rank, and only it has all parts, or the result."""
        if not 0 <= root < self.size:
            raise ArgumentError(message("the root is no rank of the group.", str(root), f"0 to {self.size - 1}"))
        if has_all is not None and has_all != (self.rank == root):
            problem = f"rank {root} is the root, and only the root has all parts or the result."
            raise ArgumentError(message(problem, f"rank {self.rank} {'has' if has_all else 'lacks'} them"))

    def _check(self, first: Buffer | None = None, *others: Buffer, count: int | None = None) -> None:
        """Raise unless buffers are alike, and as many as there are ranks."""
        if count is not None and len(others) != count:
            raise ArgumentError(message("there must be one buffer a rank.", f"{len(others)} for {count} ranks"))
        assert first is not None, "there is one rank at least"
        for other in others:
            if (other.size, other.dtype) != (first.size, first.dtype):
                given = f"{first.dtype}{list(first.shape)} and {other.dtype}{list(other.shape)}"
                raise MismatchError(message("what goes in and comes out differs in dtype or size.", given))


def short(text: str) -> bytes:
    """Return a call's description as at most ``MOST_TEXT`` bytes; what is cut off still counts, by its hash."""
    encoded = text.encode()
    if len(encoded) <= MOST_TEXT:
        return encoded
    return (
        encoded[: MOST_TEXT - 20].decode(errors="ignore").encode()
        + b"... "
        + blake2b(encoded, digest_size=8).hexdigest().encode()
    )
