"""Ranks for tests: forked processes that meet at a store in the test's own process, and a wire of plain sockets.

No framework, and nothing of the library but its exceptions' classes when they are pickled. Every run has a hard limit,
after which what still runs is killed, by its number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
import traceback
from pathlib import Path


class Store:
    """A table of bytes that processes write and wait for, behind a socket in the file system (so that processes of
    other network namespaces reach it too)."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        self.path = str(Path(self.folder, "store"))
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(256)
        self.table, self.changed, self.closed = {}, threading.Condition(), False
        self.thread = None

    def start(self):
        """Serve; only after the ranks were forked, as threads and forks do not mix."""
        self.thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self.thread.start()

    def _serve(self):
        while True:
            try:
                way, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(way,), daemon=True).start()

    def _answer(self, way):
        with way, contextlib.suppress(OSError, EOFError):
            what, keys, value, timeout = pickle.loads(_read(way))
            with self.changed:
                if what == "put":
                    self.table.setdefault(keys[0], value)
                    self.changed.notify_all()
                elif what == "drop":
                    for key in keys:
                        self.table.pop(key, None)
                else:
                    self.changed.wait_for(lambda: self.closed or self.table.keys() >= set(keys), timeout)
                found = [self.table.get(key) for key in keys]
            _write(way, pickle.dumps(found))

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.thread:
            self.thread.join(5)
        shutil.rmtree(self.folder, ignore_errors=True)


def _read(way):
    (length,) = struct.unpack("<Q", _exactly(way, 8))
    return _exactly(way, length)


def _exactly(way, length):
    got = bytearray()
    while len(got) < length:
        part = way.recv(length - len(got))
        if not part:
            raise EOFError
        got += part
    return bytes(got)


def _write(way, payload):
    way.sendall(struct.pack("<Q", len(payload)) + payload)


class Meet:
    """A ``Rendezvous`` at a ``Store``; groups of other names do not hear each other."""

    def __init__(self, path, rank, size, name="all", timeout_s=20.0):
        self.path, self.rank, self.size, self.name, self.timeout_s = path, rank, size, name, timeout_s
        self.calls = 0

    def ask(self, what, keys, value=None, timeout=0.0):
        with socket.socket(socket.AF_UNIX) as way:
            way.settimeout(timeout + 20)
            way.connect(self.path)
            _write(way, pickle.dumps((what, keys, value, timeout)))
            return pickle.loads(_read(way))

    def all_gather(self, payload):
        self.calls += 1
        keys = [(self.name, self.calls, rank) for rank in range(self.size)]
        self.ask("put", [keys[self.rank]], payload)
        found = self.ask("get", keys, timeout=self.timeout_s)
        late = [rank for rank, said in enumerate(found) if said is None]
        if late:
            raise TimeoutError(f"ranks {late} did not come to meeting {self.calls} of {self.name}")
        if self.calls > 2:  # whoever is here has read all of the meeting before the last one
            self.ask("drop", [(self.name, self.calls - 2, self.rank)])
        return found

    def announce(self, cause):
        with contextlib.suppress(OSError, EOFError):
            self.ask("put", [(self.name, "cause")], cause)

    def heard(self):
        try:
            return self.ask("get", [(self.name, "cause")])[0]
        except (OSError, EOFError):
            return None


class SocketWire:
    """A ``Wire`` of one TCP connection a pair of ranks, each with a thread that sends and one that receives."""

    def __init__(self, rendezvous, address="127.0.0.1"):
        self.rank, self.closed = rendezvous.rank, False
        listener = socket.create_server((address, 0), backlog=rendezvous.size)
        doors = [pickle.loads(said) for said in rendezvous.all_gather(pickle.dumps(listener.getsockname()[:2]))]
        self.ways, self.out, self.waiting, self.early, self.threads = {}, {}, {}, {}, []
        self.lock = threading.Lock()
        for rank in range(self.rank):
            self.ways[rank] = socket.create_connection(doors[rank], timeout=10)
            self.ways[rank].sendall(struct.pack("<i", self.rank))
        for _ in range(self.rank + 1, rendezvous.size):
            listener.settimeout(10)
            way, _ = listener.accept()
            (rank,) = struct.unpack("<i", _exactly(way, 4))
            self.ways[rank] = way
        listener.close()
        for rank, way in self.ways.items():
            way.settimeout(None)
            way.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.out[rank] = queue.SimpleQueue()
            for work in (self._send, self._receive):
                self.threads.append(threading.Thread(target=work, args=(rank, way), daemon=True))
        for thread in self.threads:
            thread.start()

    def _send(self, rank, way):
        while (entry := self.out[rank].get()) is not None:
            address, nbytes, tag, pending = entry
            try:
                way.sendall(struct.pack("<qq", tag, nbytes))
                if nbytes:
                    way.sendall((ctypes.c_char * nbytes).from_address(address))
                pending.end(None)
            except OSError as error:
                pending.end(ConnectionError(str(error)))

    def _receive(self, rank, way):
        failure = ConnectionError(f"rank {rank} hung up")
        try:
            while True:
                tag, nbytes = struct.unpack("<qq", _exactly(way, 16))
                key = (rank, tag)
                with self.lock:
                    posted = self.waiting.get(key, [])
                    entry = posted.pop(0) if posted else None
                if entry is None:
                    data = _exactly(way, nbytes)
                    with self.lock:
                        posted = self.waiting.get(key, [])
                        entry = posted.pop(0) if posted else None
                        if entry is None:
                            self.early.setdefault(key, []).append(data)
                            continue
                    self._fill(entry, data)
                    continue
                address, expected, pending = entry
                if expected != nbytes:
                    pending.end(ConnectionError(f"{nbytes} bytes from rank {rank}, {expected} expected"))
                    return
                got, view = 0, memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else b""
                while got < nbytes:
                    part = way.recv_into(view[got:])
                    if not part:
                        pending.end(failure)
                        return
                    got += part
                pending.end(None)
        except (OSError, EOFError):
            pass
        finally:
            with self.lock:
                self.early.setdefault((rank, None), []).append(failure)
                for (src, _), posted in self.waiting.items():
                    if src == rank:
                        for *_, pending in posted:
                            pending.end(failure)
                        posted.clear()

    @staticmethod
    def _fill(entry, data):
        address, expected, pending = entry
        if expected != len(data):
            pending.end(ConnectionError(f"{len(data)} bytes, {expected} expected"))
        else:
            ctypes.memmove(address, data, expected)
            pending.end(None)

    def send(self, address, nbytes, dst, tag):
        pending = _Pending()
        if self.closed:
            pending.end(ConnectionError("the wire was cut"))
        else:
            self.out[dst].put((address, nbytes, tag, pending))
        return pending

    def receive(self, address, nbytes, src, tag):
        pending = _Pending()
        with self.lock:
            early = self.early.get((src, tag))
            data = early.pop(0) if early else None
            if data is None:
                gone = self.early.get((src, None))
                if gone:
                    pending.end(gone[0])
                else:
                    self.waiting.setdefault((src, tag), []).append((address, nbytes, pending))
        if data is not None:
            self._fill((address, nbytes, pending), data)
        return pending

    def abort(self):
        self.closed = True
        for way in self.ways.values():
            with contextlib.suppress(OSError):
                way.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Send what is queued, then hang up."""
        for outgoing in self.out.values():
            outgoing.put(None)
        for thread in self.threads[::2]:
            thread.join(5)
        self.abort()
        for thread in self.threads:
            thread.join(5)
        for way in self.ways.values():
            way.close()


class _Pending:
    def __init__(self):
        self.done, self.error = threading.Event(), None

    def end(self, error):
        self.error = error
        self.done.set()

    def wait(self, timeout_s):
        if not self.done.wait(timeout_s):
            raise TimeoutError(f"no message in {timeout_s} s")
        if self.error is not None:
            raise self.error


class Died:
    """What ``ranks`` returns for a rank that was killed or left without a word."""

    def __init__(self, status):
        self.status = status

    def __repr__(self):
        return f"Died({self.status})"


def ranks(n, function, *args, timeout_s=60.0, environment=None, check=True, begun=None):
    """Run ``function(rendezvous, *args)`` in n forked processes and return what each returned, in order.

    Args:
      timeout_s: after this long whatever still runs is killed, and the test fails.
      environment: for each rank, what to put into its environment.
      check: raise if a rank raised or died; else its exception (or a ``Died``) stands in its place.
      begun: called with the list of process numbers when all run, in a thread.
    """
    store = Store()
    pids, pipes = [], []
    results = [None] * n
    try:
        for rank in range(n):
            reader, writer = os.pipe()
            pid = os.fork()
            if not pid:
                _child(store, rank, n, function, args, writer, environment[rank] if environment else {})
            os.close(writer)
            pids.append(pid)
            pipes.append(reader)
        store.start()
        if begun:
            threading.Thread(target=begun, args=(list(pids),), daemon=True).start()
        deadline, said = time.monotonic() + timeout_s, {reader: bytearray() for reader in pipes}
        open_ = set(pipes)
        while open_ and time.monotonic() < deadline:
            for reader in select.select(sorted(open_), [], [], 0.2)[0]:
                part = os.read(reader, 1 << 16)
                said[reader] += part
                if not part:
                    open_.discard(reader)
        late = [rank for rank, reader in enumerate(pipes) if reader in open_]
        for rank, reader in enumerate(pipes):
            if rank in late:
                os.kill(pids[rank], signal.SIGKILL)
            _, status = os.waitpid(pids[rank], 0)
            results[rank] = pickle.loads(bytes(said[reader])) if said[reader] else Died(status)
        pids = []
        assert not late, f"ranks {late} did not end within {timeout_s} s: {results}"
    finally:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for reader in pipes:
            os.close(reader)
        store.close()
    if check:
        for rank, result in enumerate(results):
            if isinstance(result, (BaseException, Died)):
                notes = "".join(getattr(result, "__notes__", []))
                raise AssertionError(f"rank {rank}: {result!r}\n{notes}")  # noqa: TRY004
    return results


def _child(store, rank, n, function, args, writer, environment):
    """Run one rank, and leave without what the test's process does when it ends."""
    try:
        os.environ.update(environment)
        store.listener.close()
        try:
            result = function(Meet(store.path, rank, n), *args)
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
