"""Ranks for tests: forked processes, a rendezvous at a store in the test's process, and a transport over sockets.

This module imports no framework, and of crossreduce only what is needed to unpickle a result or an exception. Every run
has a time limit, after which its remaining processes are killed by their process numbers.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import shutil
import signal
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path

from crossreduce.errors import CollectiveTimeout, decoded

LIMIT_S = 200.0  # for all ranks of a test, on a machine with much other work


class Store:
    """A table of values that processes write and wait for. They reach it through a socket in the file system, also from
    other network namespaces."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        self.path = str(Path(self.folder, "store"))
        self.listener = Listener(self.path, "AF_UNIX", backlog=256)
        self.table, self.changed, self.closed = {}, threading.Condition(), False
        self.thread = threading.Thread(target=self._serve, name="store", daemon=True)

    def start(self):
        """Start to answer requests. Call this after the ranks were forked: a fork of several threads may deadlock."""
        self.thread.start()

    def _serve(self):
        while not self.closed:
            with contextlib.suppress(OSError, EOFError):
                connection = self.listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError, EOFError):
            what, keys, value, timeout = connection.recv()
            with self.changed:
                if what == "put":
                    self.table.setdefault(keys[0], value)
                    self.changed.notify_all()
                elif what == "drop":
                    for key in keys:
                        self.table.pop(key, None)
                else:
                    wanted, cause = set(keys), (*keys[0][:1], "cause")
                    self.changed.wait_for(
                        lambda: self.closed or self.table.keys() >= wanted or cause in self.table, timeout
                    )
                found = [self.table.get(key) for key in keys]
            connection.send(found)

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if self.thread.ident:
            with contextlib.suppress(OSError):
                Client(self.path, "AF_UNIX").close()  # ends the wait for a connection
            self.thread.join(5)
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class SocketRendezvous:
    """A ``Rendezvous`` that uses a ``Store``. Groups with different names are independent of each other."""

    is_near = False

    def __init__(self, path, rank, size, name="all", timeout_s=60.0):
        self.path, self.rank, self.size, self.name, self.timeout_s = path, rank, size, name, timeout_s
        self.calls, self.owner, self.watch = 0, None, lambda: None

    def query(self, what, keys, value=None, timeout=0.0):
        with Client(self.path, "AF_UNIX") as connection:
            connection.send((what, keys, value, timeout))
            assert connection.poll(timeout + 100), "the store does not answer"
            return connection.recv()

    def first(self, key, value):
        return self.query("put", [(self.name, "first", key)], value)[0]

    def all_gather(self, payload, meanwhile=lambda: None):
        if cause := self.abort_cause():
            raise decoded(cause)
        self.calls += 1
        keys = [(self.name, self.calls, rank) for rank in range(self.size)]
        self.query("put", [keys[self.rank]], payload)
        meanwhile()
        found = self.query("get", keys, timeout=self.timeout_s)
        late = [rank for rank, value in enumerate(found) if value is None]
        if late and (cause := self.abort_cause()):
            raise decoded(cause)
        if late:
            raise CollectiveTimeout(f"ranks {late} did not reach all_gather {self.calls} of {self.name}", late)
        if self.calls > 2:  # all ranks have read the values of call self.calls - 2, so this rank drops its own
            self.query("drop", [(self.name, self.calls - 2, self.rank)])
        return found

    def publish_abort(self, cause):
        with contextlib.suppress(OSError, EOFError):
            return self.query("put", [(self.name, "cause")], cause)[0]
        return cause

    def roll_call(self, ranks, timed_out):
        try:
            for rank in ranks:
                self.query("put", [(self.name, "alive", rank)], timed_out)
            found = self.query("get", [(self.name, "alive", rank) for rank in range(self.size)])
        except EOFError:
            raise ConnectionError("the store has ended") from None
        return {rank: late for rank, late in enumerate(found) if late is not None}

    def record_leaving(self):
        with contextlib.suppress(OSError, EOFError):
            self.query("put", [(self.name, "left", self.rank)], True)

    def has_left(self, rank):
        return bool(self.query("get", [(self.name, "left", rank)])[0])

    def announce(self, number):
        self.query("put", [(self.name, "check", number, self.rank)], True)

    def have_announced(self, number):
        return all(self.query("get", [(self.name, "check", number, rank) for rank in range(self.size)]))

    def leave(self, reader, readers):
        pass

    def abort_cause(self):
        try:
            return self.query("get", [(self.name, "cause")])[0]
        except (OSError, EOFError):
            return None


def connected(rendezvous, cancelled=None, **options):
    """Return ``Links`` to all other ranks. All ranks must call this together. ``options``: those of ``tcp.connect``.

    By default, CROSSREDUCE_SOCKETS says how many connections are made.
    """
    from crossreduce.ranks.transports import tcp
    from crossreduce.ranks.transports.base import Links

    payloads = []

    def publish(payload):
        payloads.extend(rendezvous.all_gather(payload))

    cancelled = cancelled or threading.Event()
    read = payloads.__getitem__
    options.setdefault("count", int(os.environ.get("CROSSREDUCE_SOCKETS") or 1))
    made = tcp.connect(rendezvous.rank, range(rendezvous.size), publish, read, cancelled, **options)
    further = {rank: each[1:] for rank, each in made.items()}
    return Links(rendezvous.rank, {rank: each[0] for rank, each in made.items()}, (), cancelled, further)


class SocketTransport:
    """A custom ``Transport``, which the library does not know: that of CROSSREDUCE_TRANSPORT, by default TCP.

    ``in_python``: whether it has no compiled object, so that all exchanges run in Python.
    """

    def __init__(self, rendezvous, address="127.0.0.1", in_python=False):
        from crossreduce.ranks.transports import choice

        links = connected(rendezvous, listen_at=address)
        self.inner, self.closed = choice.open_transport(os.environ.get(choice.VARIABLE, "tcp"), links), False
        self.send, self.receive, self.close = self.inner.send, self.inner.receive, self.inner.close
        self.carrier = None if in_python else self.inner.connections

    def abort(self):
        self.closed = True
        self.inner.abort()


class Died:
    """The result of ``ranks`` for a rank that was killed or ended without a result."""

    def __init__(self, status):
        self.status = status

    def __repr__(self):
        return f"Died({self.status})"


def ranks(n, function, *args, timeout_s=LIMIT_S, environment=None, check=True, begun=None):
    """Run ``function(rendezvous, *args)`` in n forked processes, and return their results, in the order of the ranks.

    Args:
      timeout_s: after this time the remaining processes are killed, and the test fails.
      environment: for each rank the variables to set in its environment.
      check: whether to raise an error if a rank raised one or died. Otherwise its result is the exception or ``Died``.
      begun: called in a thread with the list of process numbers when all processes run.
    """
    store, threads = Store(), ThreadPoolExecutor(1)
    pids, pipes = [], []
    results = [None] * n
    gate, opener = os.pipe()
    try:
        for rank in range(n):
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                # All begin when all are forked. Else a thread of this process that answers one of them, such as that of
                # a TCPStore, may have locked the system's resolver at a fork, and the new process would wait for ever.
                os.close(opener)
                os.read(gate, 1)
                _child(store, rank, n, function, args, writer, environment[rank] if environment else {})
            os.close(writer)
            pids.append(pid)
            pipes.append(reader)
        os.close(opener)
        store.start()
        helper = threads.submit(begun, list(pids)) if begun else None
        deadline, output = time.monotonic() + timeout_s, {reader: bytearray() for reader in pipes}
        open_ = set(pipes)
        while open_ and time.monotonic() < deadline:
            for reader in select.select(sorted(open_), [], [], 0.2)[0]:
                part = os.read(reader, 1 << 16)
                output[reader] += part
                if not part:
                    open_.discard(reader)
        late = [rank for rank, reader in enumerate(pipes) if reader in open_]
        problem = None
        if helper:  # before processes are reaped, since it may send signals to their numbers
            try:
                helper.result(100)
            except Exception as error:
                problem = error
        for rank, reader in enumerate(pipes):
            if rank in late:
                os.kill(pids[rank], signal.SIGKILL)
            _, status = os.waitpid(pids[rank], 0)
            results[rank] = pickle.loads(bytes(output[reader])) if output[reader] else Died(status)
        pids = []
        assert not late, f"ranks {late} did not end within {timeout_s} s: {results}"
        if problem is not None:  # often because all ranks had failed before
            problem.add_note("\n".join(f"rank {rank}: {_text(result)}" for rank, result in enumerate(results)))
            raise problem
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for reader in [gate, *pipes]:
            os.close(reader)
        threads.shutdown(wait=False)
        store.close()
    if check:
        for rank, result in enumerate(results):
            if isinstance(result, (BaseException, Died)):
                raise AssertionError(f"rank {rank}: {_text(result)}")  # noqa: TRY004
    return results


def _text(result):
    """Return a rank's result as text, with the traceback of an exception."""
    return "\n".join([repr(result), *getattr(result, "__notes__", [])])


class Moment:
    """A point in time, with the time for which each rank's process has waited for a CPU until then."""

    def __init__(self):
        """Record the current time, either in the test's process or in a rank."""
        parent = os.getppid() if _IN_RANK else os.getpid()
        self.time, self.waits = time.monotonic(), {}
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            for pid in children.read_text().split():
                self.waits[pid] = 0.0
                for schedule in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                    with contextlib.suppress(OSError):  # a thread that has ended
                        self.waits[pid] += int(schedule.read_text().split()[1]) / 1e9

    def seconds_since(self, earlier):
        """Return the seconds since another moment, without the time for which the ranks waited for a CPU.

        If each rank has a CPU of its own, this is the elapsed time. Otherwise waits for busy CPUs do not count.
        """
        waited = sum(max(0.0, total - earlier.waits.get(pid, total)) for pid, total in self.waits.items())
        return self.time - earlier.time - waited


_IN_RANK = False


def _child(store, rank, n, function, args, writer, environment):
    """Run one rank, and end this process without the exit handlers of the test's process."""
    global _IN_RANK
    _IN_RANK = True
    gc.freeze()  # garbage of the test's process may be a store, whose end would wait for a thread that is not here
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        os.environ.update(environment)
        store.listener.close()
        try:
            result = function(SocketRendezvous(store.path, rank, n), *args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            error.__cause__ = error.__context__ = error.__traceback__ = None
            result = error
        try:
            payload = pickle.dumps(result)
            pickle.loads(payload)
        except Exception as error:
            payload = pickle.dumps(RuntimeError(f"{result!r} cannot be pickled: {error!r}"))
        while payload:
            payload = payload[os.write(writer, payload) :]
    finally:
        os._exit(0)
