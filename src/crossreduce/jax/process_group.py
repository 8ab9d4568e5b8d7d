"""The groups of processes that run collectives of JAX programs: one thread for each set of processes.

Input: calls of which all devices of this process have arrived (``native/xla/process_calls.cpp``). Output: written
results, or an error that each device of the call gets.

XLA runs the independent collectives of a program in any order, another one in each process. So a call is named by the
program, its place in it, and how often it has run, which are the same in all processes. Each process offers the names
of the calls that have arrived; the calls that all processes offer run, in the order of the lowest process.
"""

from __future__ import annotations

import atexit
import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from typing import Final

import jax
import numpy as np

from .. import kernels
from ..engines.jax.process_calls import process_limit_s
from ..errors import MismatchError, PeerLostError, ReductionError, message
from ..processes import RankGroup
from ..processes.meeting import meet_at
from ..processes.rank_group import make_group
from ..ranks.connections.rendezvous import Origin
from ..ranks.survival.formation import Settings
from ..ranks.transports.addresses import loopback
from ..ranks.transports.choice import transport_name
from . import coordination
from .process_jobs import SENT_NBYTES, Job

_LOG: Final = logging.getLogger("crossreduce")
_NAME_NBYTES: Final = 16
_MOST_OFFERED: Final = 15  # calls that a process offers at once
_OFFERS_NBYTES: Final = (_MOST_OFFERED + 1) * _NAME_NBYTES  # their number, and their names
_PAUSES_S: Final = (1e-4, 5e-3)  # between two offers without a common call, first and longest
_started: Final = threading.Event()
_starting: Final = threading.Lock()


def start() -> None:
    """Start the thread that waits for calls, once per process. It ends with the process."""
    with _starting:
        if not _started.is_set():
            threading.Thread(target=_dispatch, name="crossreduce jax", daemon=True).start()
            _started.set()


def _dispatch() -> None:
    """Start a thread for each set of processes that has a call."""
    while True:
        members = kernels.native().next_processes()
        threading.Thread(target=_Server(members).serve, name=f"crossreduce jax {members}", daemon=True).start()


class _Call:
    """A call that has arrived. ``name``: the same in all processes, and different for each run."""

    def __init__(self, number: int, job: Job, text: str, name: bytes, addresses: Sequence[int]) -> None:
        self.number, self.job, self.text, self.name, self.addresses = number, job, text, name, addresses
        self.part = np.empty(0, np.uint8)  # what this process has sent with its offer


class _Server:
    """Runs the calls of one set of processes."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.own = members, members.index(jax.process_index())
        self._ready: dict[bytes, _Call] = {}  # calls that have arrived and have not run, in the order of arrival
        self._jobs: dict[tuple[int, int], tuple[Job, bytes]] = {}
        self._firsts: set[bytes] = set()  # the first names that the processes offer
        self._failure = ""  # why no call can run any more
        self._offers = np.zeros(_OFFERS_NBYTES + SENT_NBYTES, np.uint8)
        self._received = np.zeros((len(members), len(self._offers)), np.uint8)

    def serve(self) -> None:
        """Run calls until the process ends."""
        native, group = kernels.native(), None
        try:
            self._take(native.next_call(self.members, -1.0))
            group = form(self.members)
            while True:
                self._take_all()
                self._run_common(group)
                if not self._ready:
                    self._take(native.next_call(self.members, -1.0))
        except Exception as error:  # noqa: BLE001 - all devices get it
            self._failure = str(error) if isinstance(error, ReductionError) else f"{type(error).__name__}: {error}"
            self._failure = self._failure.replace("call shrink, or restart", "restart")  # JAX cannot shrink a job
            _LOG.debug("a collective of JAX failed", exc_info=True)
            if isinstance(error, PeerLostError) and " left " not in self._failure.splitlines()[0]:
                coordination.end_without_lost_processes()
            if group is not None:
                with suppress(Exception):
                    group.communicator.abort()
        while True:
            for call in self._ready.values():
                native.finish_call(call.number, f"{call.job.words()}: {self._failure}")
            self._ready.clear()
            self._take(native.next_call(self.members, -1.0))

    def _take(self, taken: tuple[int, int, int, int, str, tuple[int, ...]]) -> None:
        """Add a call that has arrived."""
        number, site, twin, group, text, addresses = taken
        job, digest = self._jobs.get((site, group)) or self._new_job(site, twin, group, text)
        name = digest + job.runs.to_bytes(8, "little")
        job.runs += 1
        self._ready[name] = _Call(number, job, text, name, addresses)

    def _take_all(self) -> None:
        """Add all calls that have arrived."""
        while (taken := kernels.native().next_call(self.members, 0.0)) is not None:
            self._take(taken)

    def _new_job(self, site: int, twin: int, group: int, text: str) -> tuple[Job, bytes]:
        """Return the job of a call site, and the first bytes of its names. Sites of one text share their job."""
        digest = blake2b(f"{twin} {group} {text}".encode(), digest_size=8).digest()
        job = next((job for job, other in self._jobs.values() if other == digest), None)
        found = self._jobs[site, group] = (job or Job(text, group, self.members, self.own), digest)
        return found

    def _run_common(self, group: RankGroup) -> None:
        """Offer the calls that have arrived, and run those that all processes offer. If there are none, wait a bit."""
        began, pause = time.monotonic(), _PAUSES_S[0]
        while not (common := self._common(group)):
            self._require_same_programs(group, began)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES_S[1])
            self._take_all()
        sent = self._sent_first(common)
        for name in common:
            call = self._ready[name]
            if call is sent:
                nbytes = len(sent.part)
                parts = self._received[:, _OFFERS_NBYTES : _OFFERS_NBYTES + nbytes]
                call.job.reduce_parts([*parts], call.addresses)
            else:
                call.job.run(group, call.addresses)
            del self._ready[name]
            kernels.native().finish_call(call.number, "")

    def _common(self, group: RankGroup) -> list[bytes]:
        """Return the names of the calls that all processes offer, in the order of the lowest process."""
        names, offers = list(self._ready)[:_MOST_OFFERED], self._offers
        offers[0] = len(names)
        offers[_NAME_NBYTES : (len(names) + 1) * _NAME_NBYTES] = np.frombuffer(b"".join(names), np.uint8)
        first = self._ready[names[0]]
        if first.job.is_sent_at_once():
            first.part = first.job.part(first.addresses)
            offers[_OFFERS_NBYTES : _OFFERS_NBYTES + len(first.part)] = first.part
        group.all_gather(offers, out=self._received)
        found = []
        for row in self._received[:, :_OFFERS_NBYTES]:
            text, size = row.tobytes(), _NAME_NBYTES
            found.append([text[at : at + size] for at in range(size, (text[0] + 1) * size, size)])
        self._firsts = {names[0] for names in found}
        return [name for name in found[0] if all(name in others for others in found[1:])]

    def _sent_first(self, common: list[bytes]) -> _Call | None:
        """Return the call of which all processes have sent their parts with their offers, if there is one."""
        call = self._ready[common[0]]
        return call if self._firsts == {common[0]} and call.job.is_sent_at_once() else None

    def _require_same_programs(self, group: RankGroup, began: float) -> None:
        """Raise a ``MismatchError`` if processes run different programs, or no common call arrives in time.

        Programs differ for certain if neither of two processes has compiled the call in which the other one waits.
        """
        first = next(iter(self._ready.values()))
        texts = self._exchanged(group, json.dumps([first.job.words(), first.text]))
        known = [int(kernels.native().is_known_call(text)) for _, text in texts]
        flags = group.all_gather(np.array(known, np.uint8))
        late = group.all_gather(np.array([time.monotonic() - began > process_limit_s()], np.uint8)).any()
        pairs = [(a, b) for a in range(len(texts)) for b in range(a) if not flags[a, b] and not flags[b, a]]
        if not pairs and not late:
            return
        problem = "the processes wait in different collectives of crossreduce.jax."
        if late:
            problem = f"{problem[:-1]}, and have no common one for {process_limit_s():g} s."
        given = "; ".join(f"process {member}: {words}" for member, (words, _) in zip(self.members, texts, strict=True))
        remedy = "the same programs, in the same order, on the same mesh in all processes"
        raise MismatchError(message(problem, given, remedy))

    def _exchanged(self, group: RankGroup, text: str) -> list[list[str]]:
        """Return the JSON texts of all processes."""
        own = text.encode()
        sizes = group.all_gather(np.array([len(own)], np.int64)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(own)] = np.frombuffer(own, np.uint8)
        rows = group.all_gather(padded)
        return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def form(members: Sequence[int]) -> RankGroup:
    """Return the group of some processes of the job, all of which call this. They meet over JAX's coordination service.

    The lowest process serves a store, and publishes its address and a secret key there.
    """
    limit_s, own, count = process_limit_s(), members.index(jax.process_index()), len(members)
    key = "group/" + "-".join(map(str, members))
    if len(key) > 200:
        key = f"group/{blake2b(key.encode(), digest_size=16).hexdigest()}"
    coordination.announce()
    address = coordination.own_address()
    name = "jax " + ",".join(map(str, members))
    settings = Settings(limit_s, name, listen_at=loopback(address), transport=transport_name(None))

    def serving(port: int) -> None:
        coordination.publish(key, json.dumps([address, port, secret.hex()]))

    with closing(coordination.ProcessPresence(members)) as presence:
        host, port, secret = address, 0, secrets.token_bytes(16)
        if own != 0:
            host, port, text = json.loads(coordination.await_published(key, members[0], limit_s, presence.check))
            secret = bytes.fromhex(text)
        store = meet_at(secret, host, port, own, count, limit_s, serving, presence.check)
        group = make_group(store, own, count, settings, Origin(presence.check), global_ranks=members)
    atexit.register(group.close)
    return group
