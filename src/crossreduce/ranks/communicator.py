"""``Communicator``: the collectives of a group of ranks, on memory that is given by its address.

Input: a rendezvous, a transport between hosts, and arrays. Output: reduced arrays, or the same error on every rank. On
one host a call is a rank program in shared memory (``one_host``); between hosts see ``multi_host``.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import (
    ArgumentError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    UnsupportedError,
    message,
)
from ..observe.diagnostics import DOCTOR, UNUSABLE, CallSignature, call_text, mismatch_text, op_text, planned_text
from ..ops import COMPLEX, ReduceOp, copying
from ..topology import Topology
from . import tracing
from .connections import peer_requests
from .inter_host.exchange import Patience, PeerError
from .inter_host.host_parts import distances, lost_links, same_speeds
from .inter_host.one_host import RankExecutable
from .intra_host.instructions import reduction_numbers
from .intra_host.registers import Decision
from .intra_host.shared_memory import MAX_TEXT_BYTES, GroupAborted
from .membership import Hosts, renewed
from .peers import InnerFailure
from .statistics import CountedMember
from .transports.base import Rendezvous, RunningCollective, Transport
from .transports.tcp import TcpTransport

PATIENCE_S: Final = 10.0  # how long a message may take in a check of the links; a lost packet is sent again in 1 to 3 s
_CACHED_STAGES: Final = 1 << 15  # the most stages that are cached; on 8 ranks a stage takes 1 to 2 KiB


class ArrayView(NamedTuple):
    """An array in C order: its address, its number of elements and the name of their dtype.

    ``shape`` is a part of the call's description: a call fails if it is not the same on all ranks.
    """

    address: int
    size: int
    dtype: str
    shape: tuple[int, ...]


class Communicator(CountedMember):
    """The collectives of a group, from the view of one rank.

    Calls block, release Python's global lock, and react to signals; calls of several threads run one after another. All
    ranks must make the same calls in the same order; this is checked before any result is written.

    ``lock`` is held during each call.

    Args:
      rendezvous: where the ranks meet.
      transport: carries messages between hosts; it may be ``None`` if all ranks are on one host. A function that
        connects one is called, on all ranks, when all of them are there. Its arguments: an event that is set when it
        should give up, and the ranks of each host. The communicator closes what it returns.
      name: the group's name in messages.
      timeout_s: how long a call waits for other ranks, in seconds.
      global_ranks: the ranks' numbers in messages and errors, such as those in a larger group; ``None``: 0, 1, ...
      overlapping: whether ranks may compute while an op runs, as under DDP; the same on all ranks.
      listen_at: the address of this host at which this rank answers requests of others; empty: all addresses.
    Raises, on all ranks if one has the fault:
      ArgumentError: CROSSREDUCE_NUM_THREADS is invalid, or ranks on several hosts have no transport.
      BackendError: the compiled kernels are missing, or this system is not Linux.
      CollectiveTimeout: some ranks did not reach the rendezvous in time.
      ContextError: two ranks are in one process.
      MismatchError: the ranks have different versions of crossreduce.
      PeerLostError: a rank was interrupted, or the rendezvous cannot be reached any more.
      ReductionError: a rank cannot allocate or map the memory that its host shares, or the ranks cannot connect.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        transport: Transport | Callable[[threading.Event, Hosts], Transport] | None,
        *,
        name: str,
        timeout_s: float,
        global_ranks: Sequence[int] | None = None,
        overlapping: bool = True,
        listen_at: str = "",
    ) -> None:
        self.lock = threading.Lock()
        self._caller: int | None = None  # the thread that is in a call in Python; see ``_is_calling``
        self._executables: dict[Any, RankExecutable] = {}
        self._stages = 0  # the number of stages of all cached executables
        self._closed = False
        self.listen_at = listen_at
        self.token = ""  # names the group to other processes; empty: it is not known yet
        self.successor: peer_requests.Successor | None = None  # the later form of the group in which this rank goes on
        self.traced: Path | None = None  # the file to which the calls are written
        self._checks = 0  # the number of checks of the links
        self.plan_digest = ""  # of the plans on the measured links, the same on all ranks; empty: none were measured
        super().__init__(rendezvous, transport, name, timeout_s, global_ranks, overlapping)
        tracing.register(self)

    # The collectives

    def all_reduce(self, op: ReduceOp, source: ArrayView, result: ArrayView, exact: bool = False) -> None:
        """Combine ``source`` of all ranks into ``result`` on every rank; both may be the same memory.

        ``exact``, here and in the other reductions: see ``instructions.reduction_numbers``.
        """
        self._check(source, result)
        self._collective("all_reduce", op, source, (source.address, result.address), None, exact)

    def reduce(self, op: ReduceOp, source: ArrayView, result: ArrayView | None, root: int, exact: bool = False) -> None:
        """Combine ``source`` of all ranks into ``result`` of the root."""
        self.check_root(root, result is not None)
        if result is not None:
            self._check(source, result)
        addresses = (source.address,) if result is None else (source.address, result.address)
        self._collective("reduce", op, source, addresses, root, exact)

    def broadcast(self, array: ArrayView, root: int) -> None:
        """Copy ``array`` of the root to ``array`` of every rank."""
        self.check_root(root, None)
        self._collective("broadcast", None, array, (array.address,), root)

    def all_gather(self, source: ArrayView, results: Sequence[ArrayView]) -> None:
        """Copy ``source`` of rank k to ``results[k]`` of every rank."""
        self._check(source, *results, count=self.size)
        self._collective("all_gather", None, source, (source.address, *(r.address for r in results)), None)

    def reduce_scatter(
        self, op: ReduceOp, sources: Sequence[ArrayView], result: ArrayView, exact: bool = False
    ) -> None:
        """Combine ``sources[k]`` of all ranks into ``result`` of rank k."""
        self._check(result, *sources, count=self.size)
        addresses = (*(s.address for s in sources), result.address)
        self._collective("reduce_scatter", op, result, addresses, None, exact)

    def gather(self, source: ArrayView, results: Sequence[ArrayView] | None, root: int) -> None:
        """Copy ``source`` of rank k to ``results[k]`` of the root."""
        self.check_root(root, results is not None)
        if results is not None:
            self._check(source, *results, count=self.size)
        self._collective("gather", None, source, (source.address, *(r.address for r in results or ())), root)

    def scatter(self, sources: Sequence[ArrayView] | None, result: ArrayView, root: int) -> None:
        """Copy ``sources[k]`` of the root to ``result`` of rank k."""
        self.check_root(root, sources is not None)
        if sources is not None:
            self._check(result, *sources, count=self.size)
        self._collective("scatter", None, result, (result.address, *(s.address for s in sources or ())), root)

    def all_to_all(self, sources: Sequence[ArrayView], results: Sequence[ArrayView]) -> None:
        """Copy ``sources[k]`` of rank i to ``results[i]`` of rank k. No source may overlap a result."""
        self._check(*sources[:1], *sources, count=self.size)
        self._check(*sources[:1], *results, count=self.size)
        self._collective("all_to_all", None, sources[0], tuple(x.address for x in (*sources, *results)), None)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.require_same("barrier")

    def require_same(self, text: str) -> None:
        """Check that all ranks pass the same text, and move nothing.

        Raises:
          MismatchError: the texts differ.
        """
        self._run(text, lambda: self.engine.compile("", 0, copying("uint8"), None, encoded_text(text)), ())

    def require_link(self, method: str, peer: int | None) -> None:
        """Raise unless another library can carry a message of this rank: ``method`` "send" or "recv" with a rank.

        Raises:
          UnsupportedError: the ranks' hosts have no link, or ``peer`` is ``None``, any rank, and some hosts have none.
        """
        if not self.lost_links:
            return
        own = self.hosts.index(self.host)
        far = [host for host, hops in enumerate(distances(len(self.hosts), self.lost_links)[own]) if hops > 1]
        lost = [host for host in far if peer is None or peer in self.hosts[host]]
        if lost:
            problem = f"a {method.partition('_')[0]} needs a connection between the hosts of both ranks."
            given = f"no connection between {self.link_text(own, lost[0])}"
            raise UnsupportedError.of(problem, given, "a collective, which passes through other hosts")

    def check_links(self, text: str) -> None:
        """Check that all ranks pass the same text, and find links between hosts that are lost since the last check.

        A link is lost if a message has not arrived over it within 10 s, or less if the timeout is short, although all
        ranks are in this call. Later calls are then planned without it. Only the library's own connections are checked.

        Raises:
          MismatchError: the texts differ.
          ReductionError: some hosts have no route to each other any more. The group cannot be used again.
          PeerLostError, CollectiveTimeout: as for every call.
        """
        if self._remote is None or not isinstance(self._own_transport, TcpTransport):
            return self.require_same(text)
        self._checks += 1
        number = self._checks
        # The first messages of an op have as many rounds as the longest route has links; each may take so long.
        limit_s = min(PATIENCE_S, self.timeout_s / (1 + self._remote.diameter))
        patience = Patience(lambda: self.rendezvous.have_announced(number), limit_s)
        self.rendezvous.announce(number)
        self._remote.patience = patience
        try:
            self.require_same(text)
        finally:
            self._remote.patience = None
        own = json.dumps(sorted(patience.given_up)).encode()
        unreached = {rank: json.loads(given_up) for rank, given_up in enumerate(self.rendezvous.all_gather(own))}
        lost = tuple(sorted({*self.lost_links, *lost_links(self.hosts, unreached)}))
        if lost == self.lost_links:
            return None
        self.lost_links = lost
        try:
            self._require_routes()
        except ReductionError as error:
            self._abort(error)
            self._raise_broken()
        with self.lock:
            self._remote.lose(lost)
            self._executables.clear()
            self._stages = 0
        return None

    def delegate(self, text: str, start: Callable[[], RunningCollective]) -> None:
        """Let another library execute a collective, and return when it has done so on all ranks.

        If it fails on a rank, this group is aborted, with the same error on all ranks. If ``start`` raises a
        ``RuntimeError``, ``TypeError`` or ``ValueError``, or the library an error that is not a ``ConnectionError``, it
        is raised at the end, and the group can still be used.

        Args:
          text: the description of the call, the same on all ranks.
          start: begins the collective; called when all ranks have made this call.
        Raises:
          UnsupportedError: some hosts have no link to each other, which the other library would need.
        """
        if self.lost_links:
            self.require_same(f"inner {text}")
            problem = f"{text.partition(' ')[0]} of these arguments needs a connection between every two hosts."
            given = "no connection between " + "; ".join(self.link_text(*pair) for pair in self.lost_links)
            raise UnsupportedError.of(problem, given, "a collective of the library, which passes through other hosts")
        failures: list[Exception] = []

        def inner() -> None:
            try:
                running = start()
            except (RuntimeError, TypeError, ValueError) as error:  # raised below; others are those of signal handlers
                failures.append(error)
                return
            self._wait_for_inner(running)
            try:
                running.finish()
            except ConnectionError as error:
                raise InnerFailure(str(error), timed_out=False) from error
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        self._run(f"inner {text}", lambda: self.engine.compile_inner(encoded_text(text)), (), inner)
        if failures:
            raise failures[0]

    def plan_on(self, topology: Topology) -> bool:
        """Plan later calls between hosts on the links of ``topology`` (see ``measurement``); all ranks call it.

        If the links are nearly those on which calls are planned already, plans and compiled calls are kept.

        Returns:
          Whether later calls are planned again.
        Raises:
          MismatchError: the ranks have different topologies, or make different plans of the same one. The group can
            still be used, with its earlier plans.
        """
        if self._remote is None:
            return False
        known = self._remote.topology
        changed = known is None or not same_speeds(known, topology)
        digest = self._remote.plan_digest(topology if known is None or changed else known)
        self.require_same(planned_text("links between hosts", digest))
        if changed:
            with self.lock:
                self._remote.topology = topology
                self._executables.clear()
                self._stages = 0
                tracing.write_topology(self)
        self.plan_digest = digest.hex()
        return changed

    @property
    def host_topology(self) -> Topology | None:
        """The links between hosts on which calls are planned, if they were measured."""
        return None if self._remote is None else self._remote.topology

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Abort the group if the enclosed inter-host communication fails."""
        try:
            yield
        except ReductionError:  # raised by a call of this group, which has aborted it if necessary
            raise
        except (ConnectionError, TimeoutError) as error:
            self._abort(self._roll_call(error) if isinstance(error, PeerError) else self._remote_failure(error))
            self._raise_broken()
        except BaseException:  # Ctrl-C: other hosts' messages would be written to memory that is about to be freed
            self._abort(self._lost([self.rank], "was interrupted"))
            raise

    def supports(self, op: ReduceOp | None, dtype: str, exact: bool = False) -> bool:
        """Return whether this communicator can reduce a dtype by an op, or move it (``None``)."""
        with suppress(UnsupportedError):
            reduction_numbers(op or ReduceOp.MAX, dtype, self.size, exact)
            return True
        return op is None and dtype in COMPLEX

    def abort(self) -> None:
        """Leave the group at once; current calls, and all other uses of the transport, fail on all ranks."""
        if not self._closed and os.getpid() == self._pid:
            self._abort(self._lost([self.rank], "left"))
            if self.transport is not None:  # even on one host: other operations may use the transport
                self.transport.abort()
        self.close()

    @property
    def completed(self) -> int:
        """How many ops of this group have succeeded here."""
        with suppress(ValueError):  # the memory is closed
            ended = [number for number, _, _, end in self.memory.ops(self.rank) if end is not None]
            return max(ended, default=0)
        return 0

    @property
    def failure(self) -> ReductionError | None:
        """The error for which the group was aborted, which further calls raise; ``None``: it was not."""
        with suppress(ValueError):  # the memory is closed
            return self._broken or self.memory.abort_cause()
        return None

    def decide(self, kind: int, flag: bool, timeout_s: float) -> Decision:
        """Agree with the other ranks on which of them are left (see ``Agreements``); if that fails, leave the group.

        Raises:
          ContextError: the group is closed, or belongs to another process.
          ExcludedError: the others have decided without this rank, or this rank reaches no quorum.
        """
        self._require_usable(threading.get_ident())
        try:
            return self.agreements.decide(kind, flag, self.completed, timeout_s)
        except BaseException:  # also Ctrl-C: the others must not count on a rank that has left this call
            self.abort()
            raise

    def require_usable(self) -> None:
        """Raise a ``ContextError`` if the group is closed, or belongs to another process."""
        self._require_usable(threading.get_ident())

    def succeed(self, token: str) -> None:
        """Note that this rank goes on in a later form of the group, of which its ranks have agreed last."""
        self.successor = peer_requests.Successor(token, self.agreements.number, self.agreements.last)

    def give_up(self, error: ReductionError) -> None:
        """Abort the group for the reason ``error``, unless it was aborted before; current calls fail on all ranks.

        Raises:
          ContextError: the group is closed, or belongs to another process.
        """
        self._require_usable(threading.get_ident())
        if self._broken is None and self.memory.abort_cause() is None:
            self._abort(error)
        if self.transport is not None:
            self.transport.abort()

    def interrupt(self) -> None:
        """Abort the group because another operation of its transport was interrupted; that operation fails soon."""
        if not self._closed and os.getpid() == self._pid:
            own = self.global_ranks[self.rank]
            problem = f'rank {own} was interrupted while it waited for a message of group "{self.name}". {UNUSABLE}'
            given = f"pid {self._pid} on host {self.peers[self.rank].hostname}"
            remedy = f"read the last output of rank {own}; {DOCTOR} DIR shows the last calls of each rank"
            self._abort(PeerLostError(message(problem, given, remedy), [own]))
            if self.transport is not None:
                self.transport.abort()

    def message_failure(self, method: str, peer: int | None, error: OSError) -> ReductionError:
        """Return the public error for a message of the caller's, on the same connections, that failed.

        Args:
          method: "send" or "recv".
          peer: the rank to or from which the message was; ``None``: it could come from any rank.
          error: a ``TimeoutError``, or a ``ConnectionError``, with the library's text.
        """
        call = f"{method} {'to' if method == 'send' else 'from'} " + (
            "any rank" if peer is None else f"rank {self.global_ranks[peer]}"
        )
        with suppress(ValueError, OSError):  # raised by the memory if this rank closes the group at the same time
            return self._message_failure(call, peer, error)
        return ContextError.of(f'group "{self.name}" was closed during {call}.', str(error), "wait for messages first")

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._is_calling(threading.get_ident()):  # a signal handler called this during a call, which then fails
            self._abort(self._lost([self.rank], "left"))
            return
        with self.lock:
            self._release()

    def __del__(self) -> None:
        """Leave the group."""
        try:  # noqa: SIM105 - suppress may be None
            self.close()
        except Exception:  # noqa: BLE001 - ``__init__`` has failed, or Python ends and has cleared this module
            pass

    def _release(self) -> None:
        peer_requests.unregister(self.token, self.successor, self.listen_at)
        if self.memory.fd >= 0:
            self._end_statistics()
            if len(self.hosts) > 1 and self.memory.abort_cause() is None:
                self.rendezvous.record_leaving()
            tracing.close(self)
            self.memory.record_leaving()
            self.memory.close()
            if self._own_transport is not None:
                self._own_transport.close()
        if self._watched is not None:  # last, since Ctrl-C may end the wait for its thread, and close() does not retry
            self._watched.close()

    # Running a call

    def _collective(
        self,
        name: str,
        op: ReduceOp | None,
        array: ArrayView,
        addresses: tuple[int, ...],
        root: int | None,
        exact: bool = False,
    ) -> None:
        """Run a collective on arrays of ``array``'s size and dtype: reduce them by ``op``; ``None``: copy them."""

        def compiled() -> RankExecutable:
            numbers = copying(array.dtype) if op is None else reduction_numbers(op, array.dtype, self.size, exact)
            text = call_text(name, op and op_text(op, numbers.exact), root, array.dtype, array.shape)
            return self.engine.compile(name, array.size, numbers, root, encoded_text(text))

        self._run((name, op, array.dtype, array.shape, root, exact), compiled, addresses)

    def _run(
        self,
        key: Any,
        compiled: Callable[[], RankExecutable],
        addresses: tuple[int, ...],
        inner: Callable[[], None] | None = None,
    ) -> None:
        """Run a call; for ``inner`` see the engines. ``compiled`` returns the executable, if ``key`` is not cached."""
        thread = threading.get_ident()
        self._require_usable(thread)  # before the lock, which is never released if it was held during a fork
        with self.lock:
            self._caller = thread
            try:
                self._require_intact()
                executable = self._executables.get(key)
                if executable is None:
                    executable = compiled()
                    self._stages += executable.cost
                    if self._stages > _CACHED_STAGES:  # the new executable replaces all others
                        self._executables.clear()
                        self._stages = executable.cost
                    self._executables[key] = executable
                found = executable
                self._finish(lambda: self.engine.run(found, addresses, self, self.timeout_s, inner))
            finally:
                self._caller = None
                if self._closed:
                    self._release()

    def executable(
        self, name: str, op: ReduceOp | None, array: ArrayView, root: int | None, exact: bool
    ) -> RankExecutable | None:
        """Return the executable of a collective that was called with such an array, or ``None`` if it was forgotten."""
        return self._executables.get((name, op, array.dtype, array.shape, root, exact))

    def resume(self, executable: RankExecutable, outcome: int) -> None:
        """Complete a call that compiled code has begun with the lock, and that stopped with ``outcome``."""
        try:
            self._finish(lambda: self._complete(outcome, executable.stages))
        finally:
            if self._closed:
                self._release()

    def abandon(self) -> None:
        """Abort the group because an exception ended a prepared call before ``resume`` could handle it."""
        self._abort(self._lost([self.rank], "was interrupted"))
        if self._closed:
            self._release()

    def _is_calling(self, thread: int) -> bool:
        """Return whether this thread is in a call, in Python or in compiled code."""
        return thread in (self._caller, self.memory.native.caller())

    def _finish(self, run: Callable[[], bool]) -> None:
        """Run a call. ``run`` returns whether all ranks made the same call."""
        failed = False
        calls: dict[int, CallSignature] = {}
        try:
            if not run():
                calls = self._calls_of_all()
        except GroupAborted:  # another rank has recorded the reason
            failed = True
        except (InnerFailure, PeerError, ReductionError) as error:
            self._abort(error if isinstance(error, ReductionError) else self._roll_call(error))
            if error.__cause__ is not None or not isinstance(error, (CollectiveTimeout, PeerLostError)):
                self._raise_broken()
            failed = True
        except BaseException:  # Ctrl-C, or what a signal handler raised
            if self.memory.running or self._remote is not None:
                self._abort(self._lost([self.rank], "was interrupted"))
            raise
        if failed:  # outside of the handlers, since the traceback would begin with the same facts, or with none
            self._raise_broken()
        if calls:
            named = {self.global_ranks[rank]: call for rank, call in calls.items()}
            raise MismatchError(mismatch_text(named, self.name))

    def _calls_of_all(self) -> dict[int, CallSignature]:
        """Return the current call of every rank of the group."""
        if self._remote is not None:
            own = [*self._current_call(), self._remote.digest.hex()]
            calls = [json.loads(call) for call in self.rendezvous.all_gather(json.dumps(own).encode())]
            if len({(number, text) for number, text, _ in calls}) == 1:  # they differ in their plans
                calls = [[number, planned_text(text, bytes.fromhex(plan)), plan] for number, text, plan in calls]
            return {rank: CallSignature(number, text) for rank, (number, text, _) in enumerate(calls)}
        number = self.memory.number
        recorded = {rank: {op[0]: op[1] for op in self.memory.ops(rank)} for rank in self.host}
        return {rank: CallSignature(number, texts.get(number, "?")) for rank, texts in recorded.items()}

    def _require_usable(self, thread: int) -> None:
        """Raise unless this thread of this process may make a call."""
        if os.getpid() != self._pid:
            problem = f'group "{self.name}" belongs to process {self._pid}, from which this process was forked.'
            raise ContextError.of(problem, f"process {os.getpid()}", "make the group after the fork, or use spawn")
        if self._is_calling(thread):
            problem = f'this thread is already in a call of group "{self.name}".'
            raise ContextError.of(problem, "a call in a signal handler", "only close() or abort() in a handler")
        self._require_open()  # before _run takes the lock: a signal handler during close() would wait for it forever

    def _require_open(self) -> None:
        if self._closed:
            raise ContextError.of(f'group "{self.name}" is closed.', remedy="make a new group")

    def _require_intact(self) -> None:
        """Raise if the group is closed or broken; if an interrupted call did not abort it, abort it and raise."""
        self._require_open()
        if self._broken is not None:
            raise renewed(self._broken)
        unfinished = self._remote is not None and self._remote.has_unfinished_exchange
        if self.memory.running or unfinished:  # an interrupted call has not aborted the group: Ctrl-C came twice
            self._abort(self._lost([self.rank], "was interrupted"))
            self._raise_broken()

    # Checking a call

    def check_root(self, root: int, has_all: bool | None = None) -> None:
        """Raise ``ArgumentError`` unless the root is a rank of the group.

        ``has_all``: whether this rank passed all parts, or the result, as only the root must; ``None``: not checked.
        """
        if not 0 <= root < self.size:
            problem = "the root is not a rank of the group."
            raise ArgumentError.of(problem, str(root), f"0 to {self.size - 1}")
        if has_all is not None and has_all != (self.rank == root):
            who, given = ("only the root may", "passed") if has_all else ("the root must", "did not pass")
            problem = f"{who} pass the result of a reduce, the results of a gather, the sources of a scatter."
            raise ArgumentError.of(problem, f"rank {self.rank} {given} it; the root is rank {root}")

    def _check(self, first: ArrayView | None = None, *others: ArrayView, count: int | None = None) -> None:
        """Raise unless all arrays have the same size and dtype, and ``others`` are ``count`` arrays (``None``: any)."""
        if count is not None and len(others) != count:
            raise ArgumentError.of("there must be one array per rank.", f"{len(others)} arrays for {count} ranks")
        assert first is not None, "a group has at least one rank"
        for other in others:
            if (other.size, other.dtype) != (first.size, first.dtype):
                given = f"{first.dtype}{list(first.shape)} and {other.dtype}{list(other.shape)}"
                raise MismatchError.of("inputs and results must have the same dtype and size.", given)


def encoded_text(text: str) -> bytes:
    """Return a call's description as at most ``MAX_TEXT_BYTES`` bytes; a hash replaces the end of a longer one."""
    encoded = text.encode()
    if len(encoded) <= MAX_TEXT_BYTES:
        return encoded
    start = encoded[: MAX_TEXT_BYTES - 20].decode(errors="ignore").encode()
    return start + b"... " + blake2b(encoded, digest_size=8).hexdigest().encode()
