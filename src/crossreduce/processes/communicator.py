"""``Communicator``: the collectives of a group of ranks, over memory that is named by its address.

In: where the ranks meet, and a wire between hosts.  Out: reduced memory, or the same error on every rank. On one host
a call is a course through shared memory; between hosts see ``across``. Knows no arrays.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple, NoReturn

from .. import kernels
from ..errors import (
    ArgumentError,
    BackendError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
    message,
)
from ..ops import COMPLEX, ReduceOp
from ..topology import Topology
from . import record
from .across import Across, Crossing
from .agreement import DOCTOR, Said, described, disagreement, lost, stalled, stalled_afar, timed_out
from .arena import BROKEN, DONE, LEFT, MISMATCH, MOST_TEXT, SPIN_S, WAITING, Arena, Watch, packed, stopped, unpacked
from .between import Late, Lost
from .contract import Buffer, Rendezvous, Wire
from .courses import SLOT_BYTES, Numbers, copying, flows, native_course, reduction_numbers
from .hosts import meet

_LOG: Final = logging.getLogger("crossreduce")
_KEPT: Final = 1 << 15  # ticks of courses that are remembered; on 8 ranks each takes 1 to 2 KiB
WARN_AFTER_S: Final = 30.0


ACROSS: Final = ("all_reduce", "reduce", "broadcast")  # the collectives that are planned over several hosts
AFAR_S: Final = 0.3  # so long a rank waits for another host to say what happened there


class _GivenUp(Exception):  # noqa: N818
    """Somebody on this host has said why nothing goes on."""


class _Call(NamedTuple):
    """A call, ready to run."""

    course: Any
    ticks: int
    text: bytes


class Communicator:
    """The ranks of a group, seen from one of them.

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
        if kernels.instruction_set() == "numpy" or not hasattr(os, "memfd_create"):
            problem = "ranks share memory through the compiled kernels, on Linux."
            remedy = "install with a C++ compiler, on Linux, and no CROSSREDUCE_KERNELS=numpy"
            raise BackendError(message(problem, f"kernels {kernels.instruction_set()}", remedy))
        self.rank, self.size, self.name, self.timeout_s = rendezvous.rank, rendezvous.size, name, timeout_s
        self.rendezvous, self.wire = rendezvous, wire
        self.members = tuple(members or range(self.size))
        self.warn_s = WARN_AFTER_S  # or after half the timeout
        self._lock = threading.Lock()
        self._caller: int | None = None  # the thread that is in a call
        self._pid = os.getpid()
        self._calls: dict[Any, _Call | Crossing] = {}
        self._ticks = 0  # of all of these
        self._broken: ReductionError | None = None
        self._closed = False
        meeting = meet(rendezvous, lambda ranks: Arena.nbytes(ranks, SLOT_BYTES))
        self.hosts = meeting.hosts
        self.host = next(host for host in self.hosts if self.rank in host)
        self._across: Across | None = None
        spin_s = SPIN_S if len(self.host) <= meeting.cpus else 0.0
        problem = ""
        try:
            self.arena = Arena(meeting.fd, self.host, self.rank, SLOT_BYTES, spin_s)
        except OSError as error:  # such as a limit of this process: the others shall not wait for it
            problem = str(error)
        card = [os.getpid(), socket.gethostname(), record.version(), os.urandom(8).hex(), problem]
        self.cards = [json.loads(said) for said in rendezvous.all_gather(json.dumps(card).encode())]
        self.token = self.cards[0][3]
        self._require_complete()
        if len(self.hosts) > 1:
            if wire is None:
                given = f"hosts of ranks {', '.join(map(str, self._named_hosts()))}"
                raise ArgumentError(message("ranks of several hosts need a wire between them.", given))
            self._across = Across(self.hosts, self.rank, self.arena, wire)
        _LOG.info('group "%s": %d ranks on hosts %s', name, self.size, self._named_hosts())

    def _require_complete(self) -> None:
        """Raise unless all ranks can take part, each a process of its own."""
        versions = {said[2] for said in self.cards}
        if len(versions) > 1:
            given = "; ".join(f"rank {rank}: {said[2]}" for rank, said in zip(self.members, self.cards, strict=True))
            raise MismatchError(message("all ranks need the same version of crossreduce.", given))
        without = [(rank, said[4]) for rank, said in zip(self.members, self.cards, strict=True) if said[4]]
        if without:
            given = "; ".join(f"rank {rank}: {why}" for rank, why in without)
            problem = "some ranks cannot reach the memory that their host shares."
            raise ReductionError(message(problem, given, "a larger limit of address space (ulimit -v)"))
        # A process does not see its own locks.
        same = [rank for rank in self.host if self.cards[rank][0] == os.getpid() and not self.arena.alive(rank)]
        if same:
            named = ", ".join(str(self.members[rank]) for rank in sorted([*same, self.rank]))
            given = f"ranks {named} in process {os.getpid()}"
            raise ContextError(message("a process can be but one rank of a group.", given, "one process a rank"))

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
        """Leave the group at once, also in the middle of a call, which then fails on all ranks."""
        if not self._closed and os.getpid() == self._pid:
            self._give_up(self._interrupted("left"))
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
            raise _again(self._broken, str(self._broken))
        if self.arena.running:  # a call was interrupted, perhaps a second time before it had said so
            self._give_up(self._interrupted("was interrupted"))
            self._raise_broken()

    def _walk(self, call: _Call, addresses: tuple[int, ...]) -> None:
        """Run a call on this host, and look round now and then while it waits."""
        try:
            outcome = self.arena.begin(call.course, addresses, call.text, call.ticks)
            if outcome == WAITING:
                watch = Watch(min(self.warn_s, self.timeout_s / 2))
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
            self._raise_mismatch()
        if outcome == BROKEN:
            self._raise_broken()

    def _cross(self, crossing: Crossing, addresses: tuple[int, ...]) -> None:
        """Walk through a call over several hosts."""
        assert self._across is not None
        watch = Watch(min(self.warn_s, self.timeout_s / 2))

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
            calls = None if same else self.rendezvous.all_gather(json.dumps(self._said()).encode())
        except (_GivenUp, Lost, Late, ReductionError) as error:
            if not isinstance(error, _GivenUp):
                self._give_up(self._from_afar(error) if isinstance(error, (Lost, Late)) else error)
            calls = None
            self._raise_broken()
        except BaseException:  # Ctrl-C, or whatever else a signal's handler raised
            self._give_up(self._interrupted("was interrupted"))
            raise
        if calls is not None:
            said = {self.members[rank]: Said(*json.loads(call)) for rank, call in enumerate(calls)}
            raise MismatchError(disagreement(said, self.name))

    def _from_afar(self, error: ConnectionError | TimeoutError) -> ReductionError:
        """Return what is to be said of a rank of another host that does not answer, or of some: then it is not known.

        It may itself have given up over somebody else; then its host says so about now.
        """
        deadline = time.monotonic() + AFAR_S
        while (heard := self.rendezvous.heard()) is None and time.monotonic() < deadline:
            time.sleep(AFAR_S / 20)
        if heard is not None:
            return unpacked(heard)
        if not isinstance(error, (Lost, Late)):
            problem = (
                f'{self._said().words}, of group "{self.name}", did not end between hosts; the group is of no use.'
            )
            kind = CollectiveTimeout if isinstance(error, TimeoutError) else PeerLostError
            return kind(message(problem, str(error), f"{DOCTOR} DIR shows what each rank did last"))
        if isinstance(error, Lost):
            return self._lost([error.rank], "died")
        late = self.members[error.rank]
        return CollectiveTimeout(timed_out(self.timeout_s, self._said(), {late: None}, self.name), [late])

    def _look_round(self, watch: Watch) -> None:
        """Raise if a rank that is waited for is gone, if other hosts have given up, or if it takes too long."""
        missing = self.arena.missing()
        waited_s = watch.waited_s(self.arena.arrivals())
        gone = [rank for rank in missing if not self.arena.alive(rank)]
        if gone:
            left = all(self.arena.said(rank).text == LEFT for rank in gone)
            raise self._lost(gone, "left" if left else "died")
        if len(self.hosts) > 1:
            heard = watch.heard(self.rendezvous.heard)
            if heard is not None:
                raise unpacked(heard)
        # Whoever is waiting for another host knows better whom to name.
        afar = self._across is not None and all(
            self._across.afar(rank) and not stopped(self.cards[rank][0]) for rank in missing
        )
        if missing and waited_s > self.timeout_s + 2 * AFAR_S * afar:
            late = {self.members[rank]: self.arena.said(rank) for rank in missing}
            raise CollectiveTimeout(timed_out(self.timeout_s, self._said(), late, self.name), late)
        if missing and watch.due_to_warn():
            late = {self.members[rank]: self.arena.said(rank) for rank in missing}
            warning = stalled(waited_s, self._said(), late, self.name)
            if afar:
                warning = stalled_afar(waited_s, self._said(), late, self.name)
            _LOG.warning("rank %d: %s", self.members[self.rank], warning)

    def _said(self) -> Said:
        return self.arena.said(self.rank)

    def _lost(self, ranks: Sequence[int], how: str) -> PeerLostError:
        places = {self.members[rank]: f"pid {self.cards[rank][0]} on host {self.cards[rank][1]}" for rank in ranks}
        return PeerLostError(lost(places, self._said(), self.name, how), places)

    def _interrupted(self, how: str) -> PeerLostError:
        return self._lost([self.rank], how)

    def _give_up(self, error: ReductionError) -> None:
        """Tell all ranks, of this host and of others, why nothing goes on."""
        self.arena.give_up(error)
        if len(self.hosts) > 1:
            self.rendezvous.announce(packed(self.arena.cause() or error))
            if self.wire is not None:
                self.wire.abort()

    def _raise_mismatch(self) -> NoReturn:
        number = self.arena.number
        said = {self.members[rank]: self.arena.call(rank, number) or Said(number, "?") for rank in self.host}
        raise MismatchError(disagreement(said, self.name))

    def _raise_broken(self) -> NoReturn:
        if len(self.hosts) > 1 and self.wire is not None:
            self.wire.abort()  # a lane of another host may wait for this rank, which did not give up itself
        deadline = time.monotonic() + 1  # whoever gave up may still be writing why
        while (error := self.arena.cause()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if error is None:  # nor will it ever
            gone = [rank for rank in self.host if not self.arena.alive(rank)]
            error = self._lost(gone, "died") if gone else self._interrupted("was interrupted")
        path = record.write(self._record(str(error)))
        if path is not None:
            error = _again(error, str(error).replace(f"{DOCTOR} DIR", f"{DOCTOR} {path.parent}"))
        self._broken = error
        raise _again(error, str(error))

    def _record(self, cause: str) -> record.Dump:
        histories = [
            record.History(
                self.members[rank], tuple(record.Op(*op) for op in self.arena.ops(rank)), self.cards[rank][0]
            )
            for rank in self.host
        ]
        rank = self.members[self.rank]
        return record.taken(self.name, self.token, rank, self._named_hosts(), cause, histories)

    def _named_hosts(self) -> list[list[int]]:
        return [[self.members[rank] for rank in host] for host in self.hosts]

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


def _again(error: ReductionError, text: str) -> ReductionError:
    """Return a new error of the same kind, about the same ranks: one that was raised keeps its traceback."""
    return type(error)(text, getattr(error, "ranks", ()))


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
