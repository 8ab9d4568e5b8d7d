"""The MPI transport: a rendezvous and messages between hosts over an mpi4py communicator.

Input: a communicator that no other code uses. Output: see ``base.Rendezvous`` and ``base.Transport``. The caller
imports mpi4py and creates the communicator.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ... import kernels
from ...errors import CollectiveTimeout, decoded, message, rank_list
from ...threads import start_thread
from .base import first_of

_GATHER, _CAUSE = 1, 2  # the tags of MpiRendezvous's messages
_LEFT: Final = 3  # the tag of the empty message by which a rank tells another one that it has left
_FIRST_TAG: Final = 16  # the smallest tag of the transport's messages
_ABORTED: Final = "this rank has aborted the group"
_REMEDY: Final = "make the same calls on all ranks; or crossreduce.mpi.join(timeout_s=...) with more seconds"
_CHECK_S: Final = 0.25  # between two checks whether another rank has aborted
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # between two tests of a message: MPI itself can only wait by spinning
_POLL_S: Final = 0.05  # the longest wait in compiled code
_FUNCTIONS: Final = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Cancel")
_TESTS_AFTER_LEAVING: Final = 250  # tests of a message of a rank that has left, at intervals of about _LONGEST_S
UNFINISHED: Final[list[Any]] = []  # abandoned requests, which reference the memory that MPI may still access


class MpiRendezvous:
    """Where the ranks of an MPI communicator meet. See ``base.Rendezvous``."""

    owner: int | None = None
    is_near = False

    def __init__(self, comm: Any, timeout_s: float) -> None:
        """``comm``: a duplicate that no other code uses."""
        self._comm, self.timeout_s = comm, timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._cause: bytes | None = None
        self.watch: Callable[[], None] = lambda: None
        self._sent: list[Any] = []  # requests, which reference the bytes that MPI still reads

    first = first_of

    def all_gather(self, payload: bytes, meanwhile: Callable[[], None] = lambda: None) -> list[bytes]:
        """Return the payloads of all ranks."""
        if (cause := self.abort_cause()) is not None:
            raise decoded(cause)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = {rank: self._comm.isend(payload, rank, _GATHER) for rank in others}
        payloads: dict[int, bytes] = {self.rank: payload}
        meanwhile()
        deadline, pause = time.monotonic() + self.timeout_s, _SHORTEST_S
        while missing := [rank for rank in others if rank not in payloads]:
            arrived = [rank for rank in missing if self._comm.iprobe(rank, _GATHER)]
            for rank in arrived:  # a rank's messages keep their order, so the next one belongs to this call
                payloads[rank] = self._comm.recv(source=rank, tag=_GATHER)
            if not arrived and (cause := self.abort_cause()) is not None:
                UNFINISHED.extend(sends.values())
                raise decoded(cause)
            if not arrived and time.monotonic() > deadline:
                UNFINISHED.extend(sends.values())
                problem = f"{rank_list(missing)} did not reach the rendezvous within {self.timeout_s:g} s."
                raise CollectiveTimeout(message(problem, remedy=_REMEDY), missing)
            pause = _SHORTEST_S if arrived else min(2 * pause, _LONGEST_S)
            time.sleep(pause)
            self.watch()
        for rank, send in sends.items():
            while not send.test()[0]:
                if time.monotonic() > deadline:
                    UNFINISHED.append(send)
                    problem = f"rank {rank} did not receive a rendezvous message within {self.timeout_s:g} s."
                    raise CollectiveTimeout(message(problem, remedy=_REMEDY), [rank])
                time.sleep(_SHORTEST_S)
        return [payloads[rank] for rank in range(self.size)]

    def publish_abort(self, cause: bytes) -> bytes:
        """Send the reason of an abort to all other ranks, unless there is an earlier one. Return the valid reason."""
        first = self.abort_cause()
        if first is None:
            self._cause = first = cause
            with contextlib.suppress(Exception):  # MPI's own errors: it may be shutting down
                self._sent += [self._comm.isend(cause, rank, _CAUSE) for rank in range(self.size) if rank != self.rank]
        return first

    def abort_cause(self) -> bytes | None:
        """Return the first reason that this rank published or received, or ``None``."""
        if self._cause is None:
            with contextlib.suppress(Exception):
                from mpi4py import MPI

                # A matched probe: no other thread can receive the message.
                if (arrived := self._comm.improbe(MPI.ANY_SOURCE, _CAUSE)) is not None:
                    self._cause = arrived.recv()
        return self._cause

    def roll_call(self, ranks: Iterable[int], timed_out: bool) -> dict[int, bool]:  # noqa: ARG002
        """Return an empty dictionary: other ranks do not notice a failure of MPI, so they could not answer."""
        return {}

    def record_leaving(self) -> None:
        """Do nothing: the transport reports that a rank has left."""

    def has_left(self, rank: int) -> bool:  # noqa: ARG002
        """Return ``False``: ``MpiTransport.has_left`` reports it."""
        return False

    def announce(self, number: int) -> None:
        """Do nothing: MPI's own connections are not checked."""

    def have_announced(self, number: int) -> bool:  # noqa: ARG002
        """Return ``False``: nothing is announced."""
        return False

    def leave(self, reader: int, readers: Iterable[int]) -> None:
        """Do nothing: the end of one process does not end the rendezvous."""


class MpiTransport:
    """Messages over an MPI communicator. See ``base.Transport``.

    MPI makes progress with large messages only while one of its functions is called. So a thread tests all messages
    regularly, if MPI supports threads. Without it, this rank could wait for a rank of its host, which waits for another
    host, which waits for this rank's message.

    ``carrier``: a compiled object that moves the messages instead, also while this rank waits for ranks of its host. It
    needs no thread. It is ``None`` if MPI does not support threads, or its functions were not found.
    """

    # MPI sends a large message after an answer of the receiver, which may wait behind data. Measured for 16 MiB at 1
    # Gbit/s, as the time over that with 2 parts at once: 4 parts 0.81, 8 0.69, 12 0.65.
    lag = 8

    def __init__(self, comm: Any, abort_cause: Callable[[], bytes | None] = lambda: None) -> None:
        """``comm``: a duplicate that no other code uses. ``abort_cause``: see ``base.Rendezvous``. Waits call it."""
        from mpi4py import MPI

        self.abort_cause = abort_cause
        self.aborted = False
        self.carrier = _compiled_messages(comm)
        self._comm, self._address, self._error = comm, MPI.memory.fromaddress, MPI.Exception
        self._threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.messages: set[MpiMessage] = set()  # the messages that have not finished
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> MpiMessage:
        """Start to send."""
        if self.carrier is not None:
            return self.wrap(self.carrier.send(address, nbytes, dst, tag), dst)
        return self._begin(self._comm.Isend, address, nbytes, dst, tag)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> MpiMessage:
        """Start to receive."""
        if self.carrier is not None:
            return self.wrap(self.carrier.receive(address, nbytes, src, tag), src)
        return self._begin(self._comm.Irecv, address, nbytes, src, tag)

    def wrap(self, pending: Any, peer: int) -> MpiMessage:
        """Return a message of ``carrier`` from or to rank ``peer``."""
        return _CompiledMessage(pending, self, peer)

    def _begin(self, start: Callable[..., Any], address: int, nbytes: int, peer: int, tag: int) -> MpiMessage:
        """Start a message, and the thread that tests all messages. An error of MPI is raised later, by ``wait``."""
        if self.aborted:
            return MpiMessage(None, self, failure=_ABORTED)
        try:
            pending = MpiMessage(start(self._address(address, nbytes), peer, _FIRST_TAG + tag), self, peer)
        except self._error as error:
            return MpiMessage(None, self, failure=str(error))
        self.messages.add(pending)
        if self._threads and self._thread is None:
            self._thread = threading.Thread(target=self._test_repeatedly, name="crossreduce-mpi", daemon=True)
            try:
                start_thread(self._thread)
            except BaseException:
                self._thread = None  # if it has started, it ends soon
                raise
        self._wake.set()
        return pending

    def _test_repeatedly(self) -> None:
        """Test all messages every millisecond while there are any, until the transport is aborted."""
        while not self.aborted and threading.current_thread() is self._thread:
            self._wake.wait()
            self._wake.clear()
            while self.messages and not self.aborted:
                for each in list(self.messages):
                    each.test()
                time.sleep(_LONGEST_S)

    def abort(self) -> None:
        """Make all messages fail."""
        self.aborted = True
        if self.carrier is not None:
            self.carrier.abort()
        self._wake.set()
        for each in list(self.messages):
            each.cancel()

    def has_left(self, peer: int) -> bool:
        """Return whether another rank has closed its transport, and told this rank so."""
        return bool(self._comm.iprobe(peer, _LEFT))

    def close(self, peers: Sequence[int] = ()) -> None:
        """Tell the ranks ``peers`` that this rank has left, make all messages fail, and end the thread."""
        if not self.aborted:
            with contextlib.suppress(self._error):  # MPI may be shutting down
                UNFINISHED.extend(self._comm.isend(None, rank, _LEFT) for rank in peers if rank != self._comm.rank)
        self.abort()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None


class MpiMessage:
    """An MPI request, or the reason why it could not be made. See ``base.PendingMessage``.

    ``peer``: the other rank, or ``None`` if the request does not belong to a message between two ranks.
    """

    def __init__(
        self, request: Any, transport: MpiTransport, peer: int | None = None, failure: str | None = None
    ) -> None:
        self._request, self._transport, self._peer, self._failure = request, transport, peer, failure
        self._lock, self._done = threading.Lock(), failure is not None

    def test(self) -> bool:
        """Return whether the request is finished."""
        with self._lock:
            if not self._done:
                try:
                    self._done = bool(self._request.Test())
                except Exception as error:  # noqa: BLE001 - MPI's class of errors exists only after its import
                    self._done, self._failure = True, str(error)
        if self._done:
            self._transport.messages.discard(self)
        return self._done

    def cancel(self) -> None:
        """Cancel the request, since its memory will be used for other purposes."""
        with self._lock, contextlib.suppress(Exception):  # MPI's own errors: it may be shutting down
            if not self._done:
                self._failure = _ABORTED
                self._request.Cancel()
        self.test()

    def wait(self, timeout_s: float) -> None:
        """Wait until the memory may be used again."""
        pause, began = _SHORTEST_S, time.monotonic()
        check_at, left, tests_after_leaving = began + _CHECK_S, False, 0
        while not self.test():
            if self._transport.aborted:
                raise ConnectionError(_ABORTED)
            now = time.monotonic()
            if now > check_at:
                check_at += _CHECK_S
                if self._transport.abort_cause() is not None:
                    raise ConnectionError("another rank has aborted the group")
                left = left or (self._peer is not None and self._transport.has_left(self._peer))
            tests_after_leaving += left
            if tests_after_leaving > _TESTS_AFTER_LEAVING:  # a message that the peer had sent would have arrived by now
                raise ConnectionResetError(f"rank {self._peer} has left the group")
            if now > began + timeout_s:
                raise TimeoutError(f"the message was not sent or received within {timeout_s:g} s")
            self._pause(pause, left)
            pause = min(pause * 1.5, _LONGEST_S)
        if self._failure is not None:
            raise ConnectionError(self._failure)

    def _pause(self, seconds: float, left: bool) -> None:  # noqa: ARG002 - another class needs it
        time.sleep(seconds)


class _CompiledMessage(MpiMessage):
    """A message of ``MpiTransport.carrier``."""

    def test(self) -> bool:
        """Return whether the message is complete."""
        return bool(self._request.poll(0))

    def _pause(self, seconds: float, left: bool) -> None:  # noqa: ARG002 - compiled code needs no pauses
        self._request.poll(_LONGEST_S if left else _POLL_S)


def _compiled_messages(comm: Any) -> Any:
    """Return the compiled object that exchanges messages over a communicator, or ``None``.

    It calls the functions of the MPI library that mpi4py has loaded. Its handles are those of mpi4py.
    """
    from mpi4py import MPI

    if MPI.Query_thread() != MPI.THREAD_MULTIPLE or MPI._sizeof(MPI.Request) > ctypes.sizeof(ctypes.c_void_p):
        return None
    try:
        library = ctypes.CDLL(MPI.__file__)  # its symbols include those of the libraries that it needs
        functions = [ctypes.cast(library[name], ctypes.c_void_p).value for name in _FUNCTIONS]
    except (AttributeError, OSError):
        return None
    kinds = {4: ctypes.c_uint32, 8: ctypes.c_uint64}
    handles = [kinds[MPI._sizeof(each)].from_address(MPI._addressof(each)).value for each in (comm, MPI.BYTE)]
    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    return kernels.native().mpi_connections(others, functions, *handles, _FIRST_TAG)
