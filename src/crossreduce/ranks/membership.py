"""``Member``: one rank of a group: where the other ranks are, whether they are alive, and why the group was aborted.

Input: a rendezvous, and a transport between hosts. Output: the hosts, their shared memory, and the errors that name the
ranks at fault, the same on every rank. Collectives are not handled here.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Final, NoReturn, TypeAlias

from .. import kernels
from ..errors import (
    ArgumentError,
    BackendError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    decoded,
    encoded,
    message,
    rank_list,
)
from ..observe import diagnostics, flight_recorder
from ..observe.diagnostics import DOCTOR
from .agreement.agreement import Agreements
from .connections import peer_requests
from .connections.peer_requests import Place
from .inter_host.host_parts import distances, lost_links
from .inter_host.multi_host import MultiHostEngine
from .inter_host.one_host import OneHostEngine
from .intra_host.bootstrap import bootstrap
from .intra_host.instructions import READABLE_BUFFERS
from .intra_host.programs import PAIR_TURNS, SLOT_BYTES, TURN_BYTES
from .intra_host.shared_memory import SPIN_S, RankMemory, WaitTimer, is_stopped
from .peers import PeerInfo, Peers
from .transports.base import Rendezvous, Transport
from .transports.tcp import TcpTransport
from .watchdog import RemoteWait, WatchedTransport

_LOG: Final = logging.getLogger("crossreduce")
WARN_AFTER_S: Final = 30.0
ALIVE_S: Final = 0.25  # how often a rank reports that it is alive while its transport connects
DECISION_S: Final = 5.0  # how long after the timeout a rank waits for one that decides which other host is late
CANCEL_S: Final = 0.3  # the longest wait for the end of a transport's cancelled attempt to connect
REMOTE_CAUSE_S: Final = 0.3  # how long a rank waits for another host to publish why it aborted
_CONNECTED, _CONNECTING = "connected", "connecting"

Hosts: TypeAlias = tuple[tuple[int, ...], ...]  # the ranks of each host


class Member(Peers):
    """One rank of a group; for arguments and errors see ``Communicator``."""

    listen_at: str

    def __init__(
        self,
        rendezvous: Rendezvous,
        transport: Transport | Callable[[threading.Event, Hosts], Transport] | None,
        name: str,
        timeout_s: float,
        global_ranks: Sequence[int] | None,
        overlapping: bool,
    ) -> None:
        self.rank, self.size, self.name, self.timeout_s = rendezvous.rank, rendezvous.size, name, timeout_s
        self.rendezvous = rendezvous
        self.global_ranks = tuple(global_ranks or range(self.size))
        self.warn_s = WARN_AFTER_S  # a rank warns after this time, or after half the timeout if that is shorter
        self._broken: ReductionError | None = None
        self._remote: MultiHostEngine | None = None
        self.lost_links: tuple[tuple[int, int], ...] = ()  # pairs of hosts, by number, that could not connect
        self._watched: WatchedTransport | None = None
        self._own_transport: Transport | None = None  # the one that this connected, and closes
        self._warned: RemoteWait | None = None
        where, alone = f"rank {self.global_ranks[self.rank]}", True
        try:
            self._join_host()
            alone = False  # the further checks have the same outcome on all ranks
            self.transport = self._connected(transport) if callable(transport) else transport
            self._own_transport = self.transport if callable(transport) else None
            self._require_transport()
        except Exception as error:
            failure = shared_failure(rendezvous, error, where, alone)
            if str(failure) == str(error):
                raise
            raise failure from error
        except BaseException:  # such as Ctrl-C: this rank does not wait, but the others must not wait for it either
            problem = f'{where} was interrupted while group "{name}" was made.'
            given, remedy = f"pid {os.getpid()} on host {socket.gethostname()}", "restart the job"
            lost = PeerLostError(message(problem, given, remedy), [self.global_ranks[self.rank]])
            rendezvous.publish_abort(encoded(lost))
            raise
        if len(self.hosts) > 1:
            assert self.transport is not None
            if isinstance(self.transport, TcpTransport):
                self.agreements.know(self.transport.reached)
                self.memory.native.carry(self.transport.connections)
            self.transport = self._watched = WatchedTransport(self.transport, self._warn_of_remote_wait)
            self._remote = MultiHostEngine(self.hosts, self.rank, self.memory, self.transport, self.lost_links)
        self.engine = self._remote or OneHostEngine(self.rank, self.size, self._reads_peers, overlapping)
        _LOG.info('group "%s": %d ranks on hosts %s', name, self.size, self._global_hosts())

    def _join_host(self) -> None:
        """Find this host's ranks, and map the memory that they share."""
        if not hasattr(os, "memfd_create"):
            problem = "ranks share memory by memfd_create, which this system does not have."
            raise BackendError.of(problem, f"system {sys.platform}", "ranks on Linux")
        if kernels.instruction_set() == "numpy":
            remedy = "unset CROSSREDUCE_KERNELS, or install crossreduce with a C++ compiler"
            raise BackendError.of("ranks need the compiled kernels.", "kernels in NumPy", remedy)

        def turns(ranks: int) -> int:
            return PAIR_TURNS if ranks == self.size == 2 else 1

        def slot(ranks: int) -> int:
            return SLOT_BYTES + 2 * (turns(ranks) - 1) * TURN_BYTES

        def nbytes(ranks: int, hosts: int) -> int:
            return RankMemory.nbytes(ranks, slot(ranks), self.size, hosts)

        found = bootstrap(self.rendezvous, nbytes, self.global_ranks)
        self.hosts, self.host = found.hosts, found.host
        spin_s = SPIN_S if len(self.host) <= found.cpus else 0.0
        try:
            count = len(self.host)
            self.memory = RankMemory(
                found.fd, self.host, self.rank, slot(count), self.size, len(self.hosts), spin_s, turns(count)
            )
        except OSError as error:
            problem, remedy = "the memory of the host cannot be mapped.", "ulimit -v unlimited"
            raise ReductionError.of(problem, str(error), remedy) from error
        place = peer_requests.listen(self.listen_at)
        own = PeerInfo(os.getpid(), socket.gethostname(), os.urandom(8).hex(), place)
        infos = [json.loads(info) for info in self.rendezvous.all_gather(json.dumps(own).encode())]
        self.peers = [PeerInfo(pid, host, token, Place.read(place)) for pid, host, token, place in infos]
        self.token = self.peers[0].token
        self.agreements = Agreements(self.rank, self.hosts, self.memory, self.peers, self.global_ranks, self.name)
        peer_requests.register(self.token, self.agreements.answer, self.listen_at)
        about: dict[str, str | int] = {"name": self.name, "token": self.token, "version": flight_recorder.version()}
        self.memory.describe(self.global_ranks, about | {"size": self.size, "hosts": len(self.hosts)})
        reads = 1 < len(self.host) == self.size <= READABLE_BUFFERS and self.memory.can_read_all()
        # After this, every rank answers the requests of others.
        self._reads_peers = all(self.rendezvous.all_gather(b"1" if reads else b""))
        # alive() looks for the file lock that a rank's process holds. A process cannot detect its own locks, so a rank
        # with this process's pid that is not alive is a second rank of this process.
        same = [rank for rank in self.host if self.peers[rank].pid == os.getpid() and not self.memory.alive(rank)]
        if same:
            ranks = ", ".join(str(self.global_ranks[rank]) for rank in sorted([*same, self.rank]))
            given = f"ranks {ranks} in process {os.getpid()}"
            raise ContextError.of("several ranks of the group are in one process.", given, "one process per rank")

    def _require_transport(self) -> None:
        if len(self.hosts) > 1 and self.transport is None:
            given = f"hosts of ranks {', '.join(map(str, self._global_hosts()))}"
            remedy = "transport=TcpTransport(...) or MpiTransport(...)"
            raise ArgumentError.of("ranks on several hosts need a transport between them.", given, remedy)

    def _connected(self, connect: Callable[[threading.Event, Hosts], Transport]) -> Transport:
        """Return what ``connect`` returns; all ranks call it together.

        It may block, so it runs in a thread. Meanwhile, the ranks tell each other at the rendezvous that they are
        alive. So if a rank dies, the others do not wait for ``connect``, but for the timeout of the rendezvous, which
        names that rank.
        """
        results: Queue[Transport | Exception] = Queue()
        cancelled, deadline = threading.Event(), time.monotonic() + self.timeout_s

        def run() -> None:
            try:
                results.put(connect(cancelled, self.hosts))
            except Exception as error:  # noqa: BLE001 - it is raised on all ranks
                results.put(error)

        result: Transport | Exception | None = None
        try:
            start_new_thread(run, ())  # no Thread, whose end Python would await when it exits
        except RuntimeError as error:  # too many threads
            result = error
        try:
            while True:
                if result is None:
                    with suppress(Empty):
                        result = results.get(timeout=ALIVE_S)
                state = _CONNECTING
                if result is not None:
                    without = result.unreached if isinstance(result, TcpTransport) else ()
                    state = " ".join([_CONNECTED, *map(str, without)])
                if isinstance(result, Exception):
                    state = f"{type(result).__name__}: {result}"[:300]
                elif result is None and time.monotonic() > deadline:
                    state = f"it did not connect to all ranks within {self.timeout_s:g} s"
                states = [text.decode() for text in self.rendezvous.all_gather(state.encode())]
                known = (_CONNECTED, _CONNECTING)
                failed = {rank: text for rank, text in enumerate(states) if text.partition(" ")[0] not in known}
                if failed:
                    given = "; ".join(f"rank {self.global_ranks[rank]}: {text}" for rank, text in failed.items())
                    remedy = "a network on which all ranks reach each other; GLOO_SOCKET_IFNAME names the interface"
                    raise ReductionError.of("the ranks could not connect to each other.", given, remedy)
                if _CONNECTING not in states:
                    assert result is not None
                    assert not isinstance(result, Exception)
                    unreached = {rank: [*map(int, text.split()[1:])] for rank, text in enumerate(states)}
                    self.lost_links = lost_links(self.hosts, unreached)
                    self._require_routes()
                    return result
        finally:
            cancelled.set()
            if result is None:  # the process may end soon: if a thread returned to Python then, it would be aborted
                with suppress(Empty):
                    results.get(timeout=CANCEL_S)

    def _require_routes(self) -> None:
        """Raise unless every two hosts have a route to each other, perhaps over others; warn of those without a link.

        Raises:
          ReductionError: they have no route.
        """
        if not self.lost_links:
            return
        lost = "; ".join(self.link_text(*pair) for pair in self.lost_links)
        beyond = [host for host, hops in enumerate(distances(len(self.hosts), self.lost_links)[0]) if hops < 0]
        if beyond:
            remedy = "a network on which all ranks reach each other; GLOO_SOCKET_IFNAME names the interface"
            raise ReductionError.of(
                "the ranks could not connect to each other.", f"no connection between {lost}", remedy
            )
        if self.rank == 0:
            _LOG.warning('group "%s": no connection between %s. Collectives pass through other hosts.', self.name, lost)

    def has_link(self, a: int, b: int) -> bool:
        """Return whether two hosts, by their numbers, can exchange messages directly."""
        return (min(a, b), max(a, b)) not in self.lost_links

    def link_text(self, a: int, b: int) -> str:
        """Return two hosts, by their numbers, as errors show them."""
        return " and ".join(f"host {host} ({rank_list(self._global_hosts()[host])})" for host in (a, b))

    @property
    def peers_of_hosts(self) -> tuple[int, ...]:
        """The ranks, one of each host, with which this rank exchanges messages; empty if there are none."""
        return () if self._remote is None else self._remote.peers

    def _warn_after_s(self) -> float:
        return min(self.warn_s, self.timeout_s / 2)

    def _check_peers(self, timer: WaitTimer) -> None:
        """Raise if a missing rank has ended, another host has aborted or the timeout has passed; warn of late ranks."""
        missing = self.memory.missing()
        waited_s = timer.waited_s(self.memory.arrivals())
        if gone := [rank for rank in missing if not self.memory.alive(rank)]:
            still_missing = self.memory.missing()  # a rank may have arrived since, and left after the call
            self._require_alive([rank for rank in gone if rank in still_missing])
        self._require_no_cause(timer)
        # If all missing ranks wait for another host, they can name the rank at fault, so they get the time to do so.
        remote = self._remote is not None and all(
            self._remote.is_waiting_for_hosts(rank) and not is_stopped(self.peers[rank].pid) for rank in missing
        )
        timed_out = bool(missing) and waited_s > self.timeout_s + DECISION_S * timer.has_excuse(remote)
        if timed_out or (missing and timer.is_warning_due()):
            missing = self._stopped(missing) or missing  # the others may wait for the stopped ones
            late = {self.global_ranks[rank]: self.memory.last_call(rank) for rank in missing}
            if timed_out:
                raise CollectiveTimeout(
                    diagnostics.timeout_text(self.timeout_s, self._current_call(), late, self.name), late
                )
            warning = diagnostics.stall_text(waited_s, self._current_call(), late, self.name)
            if remote:
                warning = diagnostics.remote_stall_text(waited_s, self._current_call(), late, None, self.name)
            _LOG.warning("rank %d: %s", self.global_ranks[self.rank], warning)

    def _warn_of_remote_wait(self) -> None:
        """Warn once if a message of another host takes long. The waiting thread cannot check that itself."""
        wait = self._watched.wait if self._watched is not None else None
        if wait is None or wait is self._warned or (waited_s := time.monotonic() - wait.since_s) < self._warn_after_s():
            return
        self._warned, own = wait, self.global_ranks[self.rank]
        with suppress(ValueError):  # the group was closed just now
            call, peer = self._current_call(), self.global_ranks[wait.rank]
            _LOG.warning("rank %d: %s", own, diagnostics.remote_stall_text(waited_s, call, [own], peer, self.name))

    def _remote_failure(self, error: OSError) -> ReductionError:
        """Return the public error for a failed operation between hosts whose ranks are not known.

        If another rank aborted because of a third one, its host publishes the reason at about this time.
        """
        deadline = time.monotonic() + REMOTE_CAUSE_S
        while (cause := self.rendezvous.abort_cause()) is None and time.monotonic() < deadline:
            time.sleep(REMOTE_CAUSE_S / 20)
        if cause is not None:
            return decoded(cause)
        call = f'{self._current_call().words}, of group "{self.name}",'
        problem = f"{call} did not complete between hosts. {diagnostics.UNUSABLE}"
        kind = CollectiveTimeout if isinstance(error, TimeoutError) else PeerLostError
        return kind(message(problem, str(error), f"{DOCTOR} DIR shows what each rank did last"))

    def _abort(self, error: ReductionError) -> None:
        """Make all ranks, of this host and of others, stop with this error, or with that of an earlier abort."""
        try:
            if len(self.hosts) > 1 and not self._has_lost_store(error):
                error = decoded(self.rendezvous.publish_abort(encoded(self.memory.abort_cause() or error)))
        finally:  # another Ctrl-C may end the call above
            self.memory.abort(error)
            if len(self.hosts) > 1 and self.transport is not None:
                self.transport.abort()

    def _has_lost_store(self, error: ReductionError) -> bool:
        """Return whether an error says that the rank is lost that serves the store, which would not answer."""
        owner = self.rendezvous.owner
        return isinstance(error, PeerLostError) and owner is not None and self.global_ranks[owner] in error.ranks

    def _raise_broken(self) -> NoReturn:
        """Write the flight recorder's dump, and raise the error for which the group was aborted."""
        if len(self.hosts) > 1 and self.transport is not None:
            self.transport.abort()  # if another rank aborted, other hosts may still wait for this rank
        error = self._abort_cause()
        if len(self.hosts) > 1 and not self._has_lost_store(error):
            # Hosts of lost ranks notice the loss themselves, unless all their ranks are lost or they cannot be reached.
            lost = {*getattr(error, "ranks", ())}
            readers = [host[0] for host in self.hosts if lost.isdisjoint(self.global_ranks[rank] for rank in host)]
            self.rendezvous.leave(self.host[0], readers)
        path = flight_recorder.write(self._dump(str(error)))
        if path is not None:
            error = renewed(error, str(error).replace(f"{DOCTOR} DIR", f"{DOCTOR} {path.parent}"))
        self._broken = error
        raise renewed(error)

    def _dump(self, cause: str) -> flight_recorder.Dump:
        histories = []
        for rank in self.host:
            ops = tuple(flight_recorder.Op(*op) for op in self.memory.ops(rank))
            histories.append(flight_recorder.History(self.global_ranks[rank], ops, self.peers[rank].pid))
        rank = self.global_ranks[self.rank]
        return flight_recorder.new_dump(self.name, self.token, rank, self._global_hosts(), cause, histories)

    def _global_hosts(self) -> list[list[int]]:
        return [[self.global_ranks[rank] for rank in host] for host in self.hosts]


def shared_failure(rendezvous: Rendezvous, error: Exception, where: str, alone: bool) -> ReductionError:
    """Return the error that all ranks raise because this rank, ``where``, cannot join the group.

    ``alone``: whether ``error`` is about this rank only; then the text names it.
    """
    if not isinstance(error, ReductionError):
        given, remedy = f"{type(error).__name__}: {error}", f"read the traceback of {where}"
        failure = ReductionError.of(f"{where} cannot join the group.", given, remedy)
    elif alone and not isinstance(error, (CollectiveTimeout, MismatchError, PeerLostError)):
        failure = renewed(error, f"{where}: {error}")
    else:
        failure = error
    rendezvous.publish_abort(encoded(failure))
    try:
        rendezvous.all_gather(b"")
    except ReductionError as shared:  # the error that was published first, which may be another rank's
        return shared
    return failure


def renewed(error: ReductionError, text: str | None = None) -> ReductionError:
    """Return a new error of the same kind about the same ranks; one raised again would keep its old traceback."""
    made = type(error)(str(error) if text is None else text)
    if isinstance(made, (CollectiveTimeout, PeerLostError)):
        made.ranks = getattr(error, "ranks", ())
    return made
