"""``Member``: a rank's place in a group: who the others are, whether they come, and why nothing goes on.

In: where the ranks meet, and a wire between hosts.  Out: the hosts, their shared memory, and the errors that say who
is to blame: the same on every rank. Knows no collectives.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple, NoReturn

from .. import kernels
from ..errors import (
    ArgumentError,
    BackendError,
    CollectiveTimeout,
    ContextError,
    MismatchError,
    PeerLostError,
    ReductionError,
    message,
)
from ..transports.base import Rendezvous, Wire
from . import flight_recorder as record
from .bootstrap import meet
from .diagnostics import DOCTOR, Said, disagreement, lost, stalled, stalled_afar, timed_out
from .exchange import Late, Lost
from .multi_host import Across
from .programs import SLOT_BYTES
from .shared_memory import LEFT, SPIN_S, Arena, Watch, packed, stopped, unpacked
from .watchdog import Lookout, Wait

_LOG: Final = logging.getLogger("crossreduce")
WARN_AFTER_S: Final = 30.0
AFAR_S: Final = 0.3  # so long a rank waits for another host to say what happened there


class Card(NamedTuple):
    """What a rank tells all others. ``token``: rank 0's is the group's; ``problem``: why it cannot take part."""

    pid: int
    hostname: str
    version: str
    token: str
    problem: str


class Member:
    """One rank of a group; see ``Communicator`` for what it takes and raises."""

    def __init__(
        self, rendezvous: Rendezvous, wire: Wire | None, name: str, timeout_s: float, members: Sequence[int] | None
    ) -> None:
        if kernels.instruction_set() == "numpy" or not hasattr(os, "memfd_create"):
            problem = "ranks share memory through the compiled kernels, on Linux."
            remedy = "install with a C++ compiler, on Linux, and no CROSSREDUCE_KERNELS=numpy"
            raise BackendError(message(problem, f"kernels {kernels.instruction_set()}", remedy))
        self.rank, self.size, self.name, self.timeout_s = rendezvous.rank, rendezvous.size, name, timeout_s
        self.rendezvous, self.wire = rendezvous, wire
        self.members = tuple(members or range(self.size))
        self.warn_s = WARN_AFTER_S  # or after half the timeout
        self._broken: ReductionError | None = None
        meeting = meet(rendezvous, lambda ranks: Arena.nbytes(ranks, SLOT_BYTES))
        self.hosts, self.host = meeting.hosts, meeting.host
        self._across: Across | None = None
        self._lookout: Lookout | None = None
        self._warned: Wait | None = None
        spin_s = SPIN_S if len(self.host) <= meeting.cpus else 0.0
        problem = ""
        try:
            self.arena = Arena(meeting.fd, self.host, self.rank, SLOT_BYTES, spin_s)
        except OSError as error:  # such as a limit of this process: the others shall not wait for it
            problem = str(error)
        card = Card(os.getpid(), socket.gethostname(), record.version(), os.urandom(8).hex(), problem)
        self.cards = [Card(*json.loads(said)) for said in rendezvous.all_gather(json.dumps(card).encode())]
        self.token = self.cards[0].token
        self._require_complete()
        if len(self.hosts) > 1:
            if wire is None:
                given = f"hosts of ranks {', '.join(map(str, self._named_hosts()))}"
                raise ArgumentError(message("ranks of several hosts need a wire between them.", given))
            self.wire = self._lookout = Lookout(wire, self._look_afar)
            self._across = Across(self.hosts, self.rank, self.arena, self.wire)
        _LOG.info('group "%s": %d ranks on hosts %s', name, self.size, self._named_hosts())

    def _require_complete(self) -> None:
        """Raise unless all ranks can take part, each a process of its own."""
        named = list(zip(self.members, self.cards, strict=True))
        if len({card.version for card in self.cards}) > 1:
            given = "; ".join(f"rank {rank}: {card.version}" for rank, card in named)
            raise MismatchError(message("all ranks need the same version of crossreduce.", given))
        if any(card.problem for card in self.cards):
            given = "; ".join(f"rank {rank}: {card.problem}" for rank, card in named if card.problem)
            problem = "some ranks cannot reach the memory that their host shares."
            raise ReductionError(message(problem, given, "a larger limit of address space (ulimit -v)"))
        # A process does not see its own locks.
        same = [rank for rank in self.host if self.cards[rank].pid == os.getpid() and not self.arena.alive(rank)]
        if same:
            ranks = ", ".join(str(self.members[rank]) for rank in sorted([*same, self.rank]))
            given = f"ranks {ranks} in process {os.getpid()}"
            raise ContextError(message("a process can be but one rank of a group.", given, "one process a rank"))

    def _warn_after_s(self) -> float:
        return min(self.warn_s, self.timeout_s / 2)

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
            self._across.afar(rank) and not stopped(self.cards[rank].pid) for rank in missing
        )
        if missing and waited_s > self.timeout_s + 2 * AFAR_S * afar:
            late = {self.members[rank]: self.arena.said(rank) for rank in missing}
            raise CollectiveTimeout(timed_out(self.timeout_s, self._said(), late, self.name), late)
        if missing and watch.due_to_warn():
            late = {self.members[rank]: self.arena.said(rank) for rank in missing}
            warning = stalled(waited_s, self._said(), late, self.name)
            if afar:
                warning = stalled_afar(waited_s, self._said(), late, None, self.name)
            _LOG.warning("rank %d: %s", self.members[self.rank], warning)

    def _look_afar(self) -> None:
        """Warn, once, if a message from another host takes long: whoever waits for it cannot look round meanwhile."""
        wait = self._lookout.waits if self._lookout is not None else None
        if wait is None or wait is self._warned or (waited_s := time.monotonic() - wait.since_s) < self._warn_after_s():
            return
        self._warned = wait
        own = self.members[self.rank]
        with suppress(ValueError):  # the group was closed just now
            warning = stalled_afar(waited_s, self._said(), [own], self.members[wait.rank], self.name)
            _LOG.warning("rank %d: %s", own, warning)

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

    def _said(self) -> Said:
        return self.arena.said(self.rank)

    def _lost(self, ranks: Sequence[int], how: str) -> PeerLostError:
        cards = {self.members[rank]: self.cards[rank] for rank in ranks}
        places = {rank: f"pid {card.pid} on host {card.hostname}" for rank, card in cards.items()}
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

    def _mismatch(self, said: dict[int, Said]) -> MismatchError:
        """Return the error that ranks' calls, which are not the same, call for."""
        return MismatchError(disagreement({self.members[rank]: call for rank, call in said.items()}, self.name))

    def _raise_broken(self) -> NoReturn:
        """Write down what ranks did last, and raise why nothing goes on."""
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
            error = again(error, str(error).replace(f"{DOCTOR} DIR", f"{DOCTOR} {path.parent}"))
        self._broken = error
        raise again(error)

    def _record(self, cause: str) -> record.Dump:
        histories = [
            record.History(
                self.members[rank], tuple(record.Op(*op) for op in self.arena.ops(rank)), self.cards[rank].pid
            )
            for rank in self.host
        ]
        rank = self.members[self.rank]
        return record.taken(self.name, self.token, rank, self._named_hosts(), cause, histories)

    def _named_hosts(self) -> list[list[int]]:
        return [[self.members[rank] for rank in host] for host in self.hosts]


def again(error: ReductionError, text: str | None = None) -> ReductionError:
    """Return a new error of the same kind, about the same ranks: one that was raised keeps its traceback."""
    return type(error)(str(error) if text is None else text, getattr(error, "ranks", ()))
