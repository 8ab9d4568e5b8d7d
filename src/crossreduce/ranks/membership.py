"""``join``: a rank finds the other ranks of a new group, shares memory on its host, and connects to other hosts.

Input: a rendezvous, and a transport between hosts. Output: the resources of a ``Communicator``, or the same error on
every rank. A rank that fails here releases all of them.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Final, TypeAlias

from .. import kernels
from ..errors import (
    ArgumentError,
    BackendError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    encoded,
    message,
    rank_list,
)
from ..observe import flight_recorder
from .agreement.agreement import Agreements
from .connections import peer_requests, shortage
from .connections.peer_requests import Place
from .connections.peers import Hosts, Membership, PeerInfo
from .connections.rendezvous import interfaces
from .failures.abort import copy_error
from .inter_host.host_links import NETWORK_REMEDY, HostLinks
from .intra_host.bootstrap import BootstrapResult, bootstrap, settled
from .intra_host.instructions import READABLE_BUFFERS
from .intra_host.programs import PAIR_TURNS, SLOT_BYTES, TURN_BYTES
from .intra_host.shared_memory import SPIN_S, RankMemory
from .transports.base import Rendezvous, Transport
from .transports.choice import Offer, agreed, offer
from .transports.tcp import open_standard_streams

ALIVE_S: Final = 0.25  # how often a rank reports that it is alive while its transport connects
CANCEL_S: Final = 0.3  # the longest wait for the end of a transport's cancelled attempt to connect
_CONNECTED, _CONNECTING = "connected", "connecting"  # states of a rank; see ``JoinedHost.connect``

Connect: TypeAlias = Callable[[threading.Event, Hosts, str], Transport]  # the last: the name of a transport


def join(
    rendezvous: Rendezvous,
    transport: Transport | Connect | None,
    name: str,
    timeout_s: float,
    global_ranks: Sequence[int] | None,
    listen_at: str,
    wanted: str = "tcp",
) -> tuple[JoinedHost, Transport | None]:
    """Join a group. Return this rank's ``JoinedHost``, and its connected transport if there is one.

    All ranks call this together. For arguments and errors see ``Communicator``.
    """
    numbers = tuple(global_ranks or range(rendezvous.size))
    own = numbers[rendezvous.rank]
    who, host = f"rank {own}", None
    open_standard_streams()
    try:
        host = JoinedHost(rendezvous, numbers, name, listen_at, wanted, transport)
        connected = host.transport
        if connected is None and callable(transport) and len(host.members.hosts) > 1:
            connected = host.connect(rendezvous, transport, timeout_s)
        _require_transport(host.members, connected)
    except Exception as error:
        failure = shared_failure(rendezvous, error, who, alone=host is None)  # later errors are those of all ranks
        if host is not None:
            host.leave()
        if str(failure) == str(error):
            raise
        raise failure from error
    except BaseException:  # such as Ctrl-C: this rank does not wait, but the others must not wait for it either
        problem = f'{who} was interrupted while group "{name}" was made.'
        given, remedy = f"pid {os.getpid()} on host {socket.gethostname()}", "restart the job"
        rendezvous.publish_abort(encoded(PeerLostError(message(problem, given, remedy), [own])))
        if host is not None:
            host.leave()
        raise
    return host, connected


class JoinedHost:
    """A rank that shares memory with the other ranks of its host and answers requests of all ranks.

    ``reads_peers``: whether every rank can read the memory of the processes of all other ranks. ``transport``: the one
    that was given, or ``None``.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        global_ranks: tuple[int, ...],
        name: str,
        listen_at: str,
        wanted: str,
        transport: Transport | Connect | None,
    ) -> None:
        _require_shared_memory()
        self._listen_at = listen_at
        self.transport = None if callable(transport) else transport
        if callable(transport):
            interfaces()  # if the user has named none of this host's, that is an error also if there are no other hosts
        token, rank, size = "", rendezvous.rank, rendezvous.size  # ``unregister`` takes "" until there is a token
        hostname, offered = socket.gethostname(), offer(wanted)
        own = PeerInfo(os.getpid(), hostname, os.urandom(8).hex(), peer_requests.listen(listen_at), offered)
        try:
            shared, self.memory, self.reads_peers = _shared_memory(rendezvous, global_ranks, own)
            hosts = shared.hosts
        except BaseException:
            peer_requests.unregister(token, None, listen_at)
            raise
        try:
            peers = tuple(
                PeerInfo(pid, host, text, Place.read(place), Offer(*theirs))
                for pid, host, text, place, theirs in shared.values
            )
            self.members = Membership(name, rank, global_ranks, hosts, peers)
            self.links = HostLinks(self.members)
            self.agreements = Agreements(rank, hosts, self.memory, peers, global_ranks, name)
            token = self.members.token
            peer_requests.register(token, self.agreements.answer, listen_at)
            about: dict[str, str | int] = {"name": name, "token": token, "version": flight_recorder.version()}
            self.memory.describe(global_ranks, about | {"size": size, "hosts": len(hosts)})
            if len(hosts) > 1 and self.transport is not None:  # else ``connect`` does this
                rendezvous.all_gather(b"")  # after this, every rank answers the requests of ranks of other hosts
            _require_one_rank_per_process(self.members)
        except BaseException:
            peer_requests.unregister(token, None, listen_at)
            self.memory.close()
            raise

    def leave(self) -> None:
        """Release everything."""
        peer_requests.unregister(self.members.token, None, self._listen_at)
        self.agreements.departures.close()
        self.memory.close()

    def connect(self, rendezvous: Rendezvous, connect: Connect, timeout_s: float) -> Transport:
        """Return the transport that ``connect`` returns. All ranks call this together.

        ``connect`` may block, so it runs in a thread. Meanwhile, the ranks exchange their states at the rendezvous. So
        if a rank dies, the rendezvous of the others times out with an error that names that rank.
        """
        hosts = self.members.hosts
        self.links.transport = name = agreed([peer.offer for peer in self.members.peers], self.members.global_ranks)
        results: Queue[Transport | Exception] = Queue()
        cancelled, deadline = threading.Event(), time.monotonic() + timeout_s

        def run() -> None:
            try:
                results.put(connect(cancelled, hosts, name))
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
                # A state is "connecting", or "connected" and the ranks without a connection, or the text of an error.
                state = _CONNECTING
                if result is not None:
                    unreached = getattr(result, "unreached", ())
                    state = " ".join([_CONNECTED, *map(str, unreached)])
                if isinstance(result, Exception):
                    state = f"{type(result).__name__}: {result}"[:300]
                elif result is None and time.monotonic() > deadline:
                    state = f"it did not connect to all ranks within {timeout_s:g} s"
                states = [text.decode() for text in rendezvous.all_gather(state.encode())]
                intact = (_CONNECTED, _CONNECTING)
                failed = {rank: text for rank, text in enumerate(states) if text.partition(" ")[0] not in intact}
                if failed:
                    numbers = self.members.global_ranks
                    given = "; ".join(f"rank {numbers[rank]}: {text}" for rank, text in failed.items())
                    remedy = shortage.REMEDY if all(map(shortage.is_named, failed.values())) else NETWORK_REMEDY
                    raise ReductionError.of("the ranks could not connect to each other.", given, remedy)
                if _CONNECTING not in states:
                    assert result is not None
                    assert not isinstance(result, Exception)
                    self.links.lose({rank: [*map(int, text.split()[1:])] for rank, text in enumerate(states)})
                    return result
        finally:
            cancelled.set()
            if result is None:  # wait: a thread that returns to Python while the process exits would abort the process
                with suppress(Empty):
                    results.get(timeout=CANCEL_S)


def _require_shared_memory() -> None:
    """Raise a ``BackendError`` on a system without the calls that ranks need."""
    if not hasattr(os, "memfd_create"):
        problem = "ranks share memory by memfd_create, which this system does not have."
        raise BackendError.of(problem, f"system {sys.platform}", "ranks on Linux")


def _shared_memory(
    rendezvous: Rendezvous, global_ranks: tuple[int, ...], info: PeerInfo
) -> tuple[BootstrapResult, RankMemory, bool]:
    """Return the hosts and the ``info`` of each rank, as JSON, this host's memory, and the value of ``reads_peers``."""
    if kernels.instruction_set() == "numpy":
        remedy = "unset CROSSREDUCE_KERNELS, or install crossreduce with a C++ compiler"
        raise BackendError.of("ranks need the compiled kernels.", "kernels in NumPy", remedy)
    size = rendezvous.size

    def turns(ranks: int) -> int:
        return PAIR_TURNS if ranks == size == 2 else 1  # see ``RankMemory``

    def slot_nbytes(ranks: int) -> int:
        return SLOT_BYTES + 2 * (turns(ranks) - 1) * TURN_BYTES

    def nbytes(ranks: int, hosts: int) -> int:
        return RankMemory.nbytes(ranks, slot_nbytes(ranks), size, hosts)

    def first(ranks: int, hosts: int) -> list[tuple[int, int]]:
        return RankMemory.first(ranks, slot_nbytes(ranks), nbytes(ranks, hosts))

    def mapped(shared: BootstrapResult) -> RankMemory:
        count = len(shared.host)
        spin_s = SPIN_S if count <= shared.cpu_count else 0.0
        sizes = slot_nbytes(count), size, len(shared.hosts), spin_s, turns(count)
        try:
            return RankMemory(shared.fd, shared.host, rendezvous.rank, *sizes, is_whole=count < size)
        except OSError as error:
            problem, remedy = "the memory of the host cannot be mapped.", "ulimit -v unlimited"
            raise ReductionError.of(problem, str(error), remedy) from error

    shared = bootstrap(rendezvous, nbytes, global_ranks, first, info)
    memory = mapped(shared)
    if len(shared.hosts) > 1:
        return shared, memory, False
    try:
        reads = memory.vote(1 < size <= READABLE_BUFFERS and (rendezvous.is_near or memory.can_read_all()))
        if reads is None:  # some ranks are late, or have no memory
            shared = settled(shared._replace(fd=-1), rendezvous, nbytes, global_ranks)
            if len(shared.hosts) > 1:
                memory.close()
                return shared, mapped(shared), False
            reads = 1 < size <= READABLE_BUFFERS and memory.can_read_all()
            reads = all(rendezvous.all_gather(b"1" if reads else b""))
    except BaseException:
        memory.close()
        raise
    memory.reads_peers = reads
    return shared, memory, reads


def _require_transport(members: Membership, transport: Transport | None) -> None:
    if len(members.hosts) > 1 and transport is None:
        given = f"hosts with the ranks {', '.join(map(str, members.global_hosts()))}"
        remedy = "transport=TcpTransport(...) or MpiTransport(...)"
        raise ArgumentError.of("ranks on several hosts need a transport between them.", given, remedy)


def _require_one_rank_per_process(members: Membership) -> None:
    # Processes have keys of their own. Their numbers may be equal, in two containers.
    key = members.peers[members.rank].place.key
    if len(ranks := [rank for rank in members.host if members.peers[rank].place.key == key]) > 1:
        given = f"{rank_list(members.global_ranks[rank] for rank in ranks)} in process {os.getpid()}"
        raise ContextError.of("several ranks of the group are in one process.", given, "one process per rank")


def shared_failure(rendezvous: Rendezvous, error: Exception, who: str, alone: bool) -> ReductionError:
    """Return the error that all ranks raise because this rank, ``who``, cannot join the group.

    ``alone``: whether ``error`` is about this rank only. Then the text names the rank.
    """
    if not isinstance(error, ReductionError):
        given = f"{type(error).__name__}: {error}"
        remedy = shortage.REMEDY if shortage.is_named(given) else f"read the traceback of {who}"
        failure = ReductionError.of(f"{who} cannot join the group.", given, remedy)
    elif alone and not isinstance(error, (CollectiveTimeout, MismatchError, PeerLostError)):
        failure = copy_error(error, f"{who}: {error}")
    else:
        failure = error
    rendezvous.publish_abort(encoded(failure))
    try:
        rendezvous.all_gather(b"")
    except ReductionError as shared:  # the error that was published first, which may be another rank's
        return shared
    return failure
