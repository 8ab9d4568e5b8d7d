"""``Communicator``: the collectives of a group of ranks, on memory that is given by its address.

Input: a rendezvous, a transport between hosts, and arrays. Output: reduced arrays, or the same error on every rank. On
one host a call is a rank program in shared memory (``one_host``); between hosts see ``multi_host``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from ..errors import ReductionError
from ..observe.counters import Stats
from ..observe.diagnostics import call_text, op_text, planned_text
from ..observe.statistics import Statistics
from ..observe.traces import recording
from ..ops import AnyOp, copy_numbers
from ..topology import Topology
from .array_views import ArrayView, encoded_text, require_alike, require_root
from .call_runner import CallRunner
from .connections import peer_requests
from .failures.abort import GroupAbort, left_after_errors
from .failures.failure_detector import FailureDetector
from .failures.peer_errors import InnerFailure
from .failures.watchdog import WatchedTransport
from .inter_host.multi_host import MultiHostEngine
from .inter_host.one_host import OneHostEngine, RankExecutable
from .inter_host.two_level import same_speeds
from .intra_host.instructions import reduction_numbers
from .intra_host.registers import Decision
from .membership import Connect, join
from .transports.base import Rendezvous, RunningCollective, Transport, has_links
from .transports.with_messages import WithMessages

_LOG: Final = logging.getLogger("crossreduce")


class Communicator:
    """The collectives of a group, from the view of one rank.

    Calls block, release Python's global lock, and react to signals; calls of several threads run one after another. All
    ranks must make the same calls in the same order; this is checked before any result is written.

    ``lock`` is held during each call. These attributes do not refer to the communicator: the shared ``memory``,
    ``agreements``, the ``links`` between hosts, the failure ``detector``, ``statistics`` and ``calls``.

    Args:
      rendezvous: where the ranks meet.
      transport: carries messages between hosts; it may be ``None`` if all ranks are on one host. It may be a function
        that returns a connected transport. It is called when all ranks have arrived. Its arguments are an event, which
        is set when it should give up, the ranks of each host, and the name of the transport on which they agree. The
        communicator closes this transport.
      name: the group's name in messages.
      timeout_s: how long a call waits for other ranks, in seconds.
      global_ranks: the ranks' numbers in messages and errors, such as those in a larger group. The default is 0, 1, ...
      overlapping: whether ranks may compute while an op runs, as under DDP; the same on all ranks.
      listen_at: the address of this host at which this rank answers requests of others. "" means all addresses.
      wanted: the name of the transport that this rank wants, or "auto"; see ``transports.choice``.
    Raises, on all ranks if one has the fault:
      ArgumentError: CROSSREDUCE_NUM_THREADS is invalid, or ranks on several hosts have no transport.
      BackendError: the compiled kernels are missing, or this system is not Linux.
      CollectiveTimeout: some ranks did not reach the rendezvous in time.
      ContextError: two ranks are in one process.
      MismatchError: the ranks have different versions of crossreduce, or want different transports.
      PeerLostError: a rank was interrupted, or the rendezvous cannot be reached any more.
      ReductionError: a rank cannot allocate or map the memory that its host shares, or the ranks cannot connect.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        transport: Transport | Connect | None,
        *,
        name: str,
        timeout_s: float,
        global_ranks: Sequence[int] | None = None,
        overlapping: bool = True,
        listen_at: str = "",
        wanted: str = "tcp",
    ) -> None:
        joined, connected = join(rendezvous, transport, name, timeout_s, global_ranks, listen_at, wanted)
        self._own_transport = connected if callable(transport) else None
        self._watched: WatchedTransport | None = None
        try:
            self.rendezvous, self.listen_at, self.wanted = rendezvous, listen_at, wanted
            self.memory, self.agreements, self.links = joined.memory, joined.agreements, joined.links
            members = joined.members
            self.name, self.rank, self.size, self.global_ranks = name, members.rank, members.size, members.global_ranks
            self.hosts, self.host, self.peers = members.hosts, members.host, members.peers
            self.token = members.token  # names the group to other processes
            self.ranks_of_other_hosts = tuple(rank for host in self.hosts if host != self.host for rank in host)
            self.successor: peer_requests.Successor | None = None  # the group that has replaced this one
            self.traced: Path | None = None  # the file to which the calls are written
            self.plan_digest = ""  # a hash of the plans on measured links, the same on all ranks
            self.transport = connected
            self._engine: OneHostEngine | MultiHostEngine
            self.detector = FailureDetector(members, self.memory, rendezvous, connected, timeout_s)
            self._abort = GroupAbort(members, self.memory, rendezvous, connected, self.detector)
            if connected is not None and len(self.hosts) > 1:  # ``join`` requires a transport then
                if has_links(connected):
                    self.agreements.know(connected.reached)
                    self.agreements.connect(self.links.lost)
                carrier = connected.connections if has_links(connected) else getattr(connected, "carrier", None)
                if carrier is not None:
                    self.memory.native.carry(carrier)
                if isinstance(connected, WithMessages):
                    self.memory.mailboxes.reach(connected.messages.connections, self.ranks_of_other_hosts)
                self.transport = self._watched = WatchedTransport(connected, self.detector.warn_of_remote_wait)
                watch = self._watched.watch if carrier is not None else None
                self._engine = MultiHostEngine(
                    self.hosts, self.rank, self.memory, self.transport, self.links.lost, watch, has_links(connected)
                )
            else:
                self._engine = OneHostEngine(self.rank, self.size, joined.reads_peers, overlapping)
            calls = CallRunner(members, self.memory, rendezvous, self._engine, self.detector, self._abort)
            self.lock = calls.lock
            host = tuple(self.global_ranks[rank] for rank in self.host)
            self.statistics = Statistics(name, members.own, self.size, host, self.memory.counts)
            self.calls = calls  # last: without it, ``close`` and ``__del__`` release nothing
        except BaseException:  # such as Ctrl-C
            joined.leave()
            for part in filter(None, (self._own_transport, self._watched)):
                part.close()
            raise
        recording.register(self)
        _LOG.info('group "%s": %d ranks on hosts %s', name, self.size, members.global_hosts())

    def all_reduce(self, op: AnyOp, source: ArrayView, result: ArrayView, exact: bool = False) -> None:
        """Combine ``source`` of all ranks into ``result`` on every rank. Source and result may be the same memory.

        ``exact``, here and in the other reductions: see ``instructions.reduction_numbers``.
        """
        require_alike(source, result)
        self._collective("all_reduce", op, source, (source.address, result.address), None, exact)

    def reduce(self, op: AnyOp, source: ArrayView, result: ArrayView | None, root: int, exact: bool = False) -> None:
        """Combine ``source`` of all ranks into ``result`` of the root."""
        require_root(self.rank, self.size, root, result is not None)
        if result is not None:
            require_alike(source, result)
        addresses = (source.address,) if result is None else (source.address, result.address)
        self._collective("reduce", op, source, addresses, root, exact)

    def broadcast(self, array: ArrayView, root: int) -> None:
        """Copy ``array`` of the root to ``array`` of every rank."""
        require_root(self.rank, self.size, root, None)
        self._collective("broadcast", None, array, (array.address,), root)

    def all_gather(self, source: ArrayView, results: Sequence[ArrayView], text: str = "") -> None:
        """Copy ``source`` of rank k to ``results[k]`` of every rank. ``text``: describes the call, as in errors."""
        require_alike(source, *results, count=self.size)
        self._collective("all_gather", None, source, (source.address, *(r.address for r in results)), None, text=text)

    def reduce_scatter(self, op: AnyOp, sources: Sequence[ArrayView], result: ArrayView, exact: bool = False) -> None:
        """Combine ``sources[k]`` of all ranks into ``result`` of rank k."""
        require_alike(result, *sources, count=self.size)
        addresses = (*(s.address for s in sources), result.address)
        self._collective("reduce_scatter", op, result, addresses, None, exact)

    def gather(self, source: ArrayView, results: Sequence[ArrayView] | None, root: int) -> None:
        """Copy ``source`` of rank k to ``results[k]`` of the root."""
        require_root(self.rank, self.size, root, results is not None)
        if results is not None:
            require_alike(source, *results, count=self.size)
        self._collective("gather", None, source, (source.address, *(r.address for r in results or ())), root)

    def scatter(self, sources: Sequence[ArrayView] | None, result: ArrayView, root: int) -> None:
        """Copy ``sources[k]`` of the root to ``result`` of rank k."""
        require_root(self.rank, self.size, root, sources is not None)
        if sources is not None:
            require_alike(result, *sources, count=self.size)
        self._collective("scatter", None, result, (result.address, *(s.address for s in sources or ())), root)

    def all_to_all(self, sources: Sequence[ArrayView], results: Sequence[ArrayView]) -> None:
        """Copy ``sources[k]`` of rank i to ``results[i]`` of rank k. No source may overlap a result."""
        require_alike(*sources[:1], *sources, count=self.size)  # not ``sources[0]``, since there may be no sources
        require_alike(*sources[:1], *results, count=self.size)
        self._collective("all_to_all", None, sources[0], tuple(x.address for x in (*sources, *results)), None)

    def exchange_parts(self, text: str, addresses: tuple[int, int, int]) -> None:
        """Execute an all-to-all of parts of any sizes, on one host. ``text`` describes the call.

        ``addresses``: of a table with this rank's sizes (see ``RankProgram`` in C++), what is sent, and the result.
        """
        assert isinstance(self._engine, OneHostEngine)
        self.calls.run(text, partial(self._engine.compile_parts, encoded_text(text)), addresses, None, self._release)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.require_same("barrier")

    def require_same(self, text: str) -> None:
        """Raise a ``MismatchError`` if the ranks pass different texts. No data is reduced or copied."""
        self.calls.run(
            text,
            lambda: self._engine.compile("", 0, copy_numbers("uint8"), None, encoded_text(text)),  # "": no collective
            (),
            None,
            self._release,
        )

    def check_links(self, text: str) -> None:
        """Check that all ranks pass the same text, and find links between hosts that were lost since the last check.

        A link is lost if a message has not arrived over it within 10 s, or less if the timeout is short, although all
        ranks are in this call. Later calls are then planned without it. Only the library's own connections are checked.

        Raises:
          MismatchError: the texts differ.
          ReductionError: some hosts have no route to each other any more. The group cannot be used again.
          PeerLostError, CollectiveTimeout: as for every call.
        """
        engine = self._engine
        if not isinstance(engine, MultiHostEngine) or not has_links(self._own_transport):
            self.require_same(text)
            return
        unreached = self.links.unreached(lambda: self.require_same(text), engine, self.rendezvous, self.timeout_s)
        try:
            if not self.links.lose(unreached):
                return
        except ReductionError as error:
            self._abort.publish(error)
            self._abort.raise_cause()
        with self.lock:
            engine.lose(self.links.lost)
            self.calls.executables.clear()

    def delegate(self, text: str, start: Callable[[], RunningCollective]) -> None:
        """Let another library execute a collective, and return when it has done so on all ranks.

        If it fails on a rank, the group is aborted, and all ranks raise the same error. There are two exceptions: a
        ``RuntimeError``, ``TypeError`` or ``ValueError`` of ``start``, and an error of the library that is not a
        ``ConnectionError``. Such an error is raised at the end, and the group can still be used.

        Args:
          text: the description of the call, the same on all ranks.
          start: begins the collective; called when all ranks have made this call.
        Raises:
          UnsupportedError: some hosts have no link to each other, which the other library would need.
        """
        if self.links.lost:
            self.require_same(f"inner {text}")
            self.links.require_all(text.partition(" ")[0])
        failures: list[Exception] = []

        def inner() -> None:
            try:
                running = start()
            except (RuntimeError, TypeError, ValueError) as error:  # raised below; signal handlers raise other errors
                failures.append(error)
                return
            self.detector.wait_for_inner(running)
            try:
                running.finish()
            except ConnectionError as error:
                raise InnerFailure(str(error), timed_out=False) from error
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        self.calls.run(
            f"inner {text}", lambda: self._engine.compile_inner(encoded_text(text)), (), inner, self._release
        )
        if failures:
            raise failures[0]

    def plan_on(self, topology: Topology) -> bool:
        """Plan later calls between hosts on the links of ``topology`` (see ``measurement``). All ranks call this.

        If the links are nearly those on which calls are planned already, plans and compiled calls are kept.

        Returns:
          Whether later calls are planned again.
        Raises:
          MismatchError: the ranks have different topologies, or make different plans of the same one. The group can
            still be used, with its earlier plans.
        """
        engine = self._engine
        if not isinstance(engine, MultiHostEngine):
            return False
        planned = engine.topology
        changed = planned is None or not same_speeds(planned, topology)
        digest = engine.plan_digest(topology if planned is None or changed else planned)
        self.require_same(planned_text("links between hosts", digest))
        if changed:
            with self.lock:
                engine.topology = topology
                self.calls.executables.clear()
                recording.write_topology(self)
        self.plan_digest = digest.hex()
        return changed

    # What the group is and has done

    @property
    def timeout_s(self) -> float:
        """How long a call waits for other ranks, in seconds. It may be changed between calls."""
        return self.detector.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self.detector.timeout_s = seconds

    @property
    def host_topology(self) -> Topology | None:
        """The links between hosts on which calls are planned, if they were measured."""
        return self._engine.topology if isinstance(self._engine, MultiHostEngine) else None

    @property
    def peers_of_hosts(self) -> tuple[int, ...]:
        """The ranks, one of each host, with which this rank exchanges messages. It may have none."""
        return self._engine.peers

    @property
    def failure(self) -> ReductionError | None:
        """The error for which the group was aborted, which further calls raise, or ``None`` if it was not aborted."""
        with suppress(ValueError):  # the memory is closed
            return self._abort.cause
        return None

    def stats(self) -> Stats:
        """Return statistics of this rank's calls in the group so far, or until it was closed. Any thread may call this.

        In a process that was forked from the rank's process, raise a ``ContextError``.
        """
        return self.statistics.read()

    # How the group ends

    def decide(self, kind: int, flag: bool, timeout_s: float) -> Decision:
        """Agree with the other ranks on which of them are left. If this fails, leave the group. See ``Agreements``.

        Raises:
          ContextError: the group is closed, also meanwhile, or belongs to another process.
          ExcludedError: the others have decided without this rank, or this rank reaches no quorum.
        """
        self.require_usable()
        with left_after_errors(self.abort, self.require_usable):
            return self.agreements.decide(kind, flag, self.memory.completed(), timeout_s)

    def require_usable(self) -> None:
        """Raise a ``ContextError`` if the group is closed, belongs to another process, or this thread is in a call."""
        self.calls.require_usable()

    def succeed(self, token: str) -> None:
        """Record that this rank continues in the group ``token``, which the ranks' latest agreement has formed."""
        self.successor = peer_requests.Successor(token, self.agreements.number, self.agreements.last)

    def give_up(self, error: ReductionError) -> None:
        """Abort the group with ``error``, unless it was aborted before. Current calls fail on all ranks.

        Raises:
          ContextError: the group is closed, or belongs to another process.
        """
        self.require_usable()
        self._end_calls(error if self._abort.cause is None else None)

    def interrupt(self, error: ReductionError | None = None) -> None:
        """Abort the group with ``error``, by default since a wait for a message was interrupted. Messages fail soon."""
        if self.calls.is_usable():
            self._end_calls(error or self.detector.interrupted_message())

    def abort(self) -> None:
        """Leave the group at once. Current calls and all other messages of the transport fail on all ranks."""
        if self.calls.is_usable():
            self._end_calls(self.detector.lost([self.rank], "left"))
        self.close()

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        if not self.calls.is_usable():
            return
        if self.calls.close():  # a signal handler called this during a call, which then fails
            self._abort.publish(self.detector.lost([self.rank], "left"))
            return
        with self.lock:
            self._release()

    def __del__(self) -> None:
        """Leave the group."""
        try:  # noqa: SIM105 - suppress may be None
            self.close()
        except Exception:  # noqa: BLE001 - ``__init__`` has failed, or Python ends and has cleared this module
            pass

    def _end_calls(self, error: ReductionError | None) -> None:
        """Abort the group, if an error is given, and make all messages of the transport fail, also on one host."""
        if error is not None:
            self._abort.publish(error)
        if self.transport is not None:  # in a group on one host, the caller may use it
            self.transport.abort()

    def _release(self) -> None:
        """Leave the group, and release everything. The caller holds ``lock``."""
        peer_requests.unregister(self.token, self.successor, self.listen_at)
        self.agreements.departures.close()
        if self.memory.fd >= 0:
            self.statistics.close()
            if len(self.hosts) > 1 and self.memory.abort_cause() is None:
                self.rendezvous.record_leaving()
            recording.close(self)
            self.memory.record_leaving()
            self.memory.close()
            if self._own_transport is not None:
                self._own_transport.close()
        if self._watched is not None:  # last, since Ctrl-C may end the wait for its thread, and close() does not retry
            self._watched.close()

    def _collective(
        self,
        name: str,
        op: AnyOp | None,
        array: ArrayView,
        addresses: tuple[int, ...],
        root: int | None,
        exact: bool = False,
        text: str = "",
    ) -> None:
        """Run a collective on arrays with the size and dtype of ``array``. ``op``: ``None`` if they are only copied."""

        def compile_call() -> RankExecutable:
            numbers = copy_numbers(array.dtype) if op is None else reduction_numbers(op, array.dtype, self.size, exact)
            described = text or call_text(name, op and op_text(op, numbers.exact), root, array.dtype, array.shape)
            return self._engine.compile(name, array.size, numbers, root, encoded_text(described))

        key = name, op, array.dtype, array.shape, root, exact
        self.calls.run((*key, text) if text else key, compile_call, addresses, None, self._release)

    def executable(
        self, name: str, op: AnyOp | None, array: ArrayView, root: int | None, exact: bool
    ) -> RankExecutable | None:
        """Return the executable of a collective that was called with such an array, or ``None`` if it is not cached."""
        return self.calls.executables.get((name, op, array.dtype, array.shape, root, exact))

    def resume(self, executable: RankExecutable, outcome: int) -> None:
        """Complete a prepared call, which stopped with ``outcome`` in compiled code. The caller holds ``lock``."""
        try:
            self.calls.resume(executable, outcome)
        finally:
            if self.calls.closed:
                self._release()

    def abandon(self) -> None:
        """Abort the group because an exception ended a prepared call before ``resume`` could handle it."""
        self.calls.abandon()
        if self.calls.closed:
            self._release()
