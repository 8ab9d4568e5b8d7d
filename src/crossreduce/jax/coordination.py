"""JAX's coordination service, which the processes of a job share: the only place that uses private parts of JAX.

Input: a key and a value, or a key. Output: values of other processes, or a ``BackendError`` if JAX has moved it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import jax

from ..errors import BackendError, CollectiveTimeout, PeerLostError, message, rank_list
from ..ranks.connections.rendezvous import interfaces
from ..ranks.transports.addresses import addresses, loopback

_PREFIX: Final = "crossreduce/"
_WAIT_S: Final = 0.2  # for a value, in one request
_LOOK_S: Final = 0.1  # between two looks for processes that have ended
_LINGER_S: Final = 0.5  # how long the process of the store waits before it ends, so that others see who has ended
_ALIVE: Final = "alive/"  # keys of addresses at which processes listen until they end
_ENDED: Final = "ended/"  # keys of processes that have left, or that know others which have ended
_CONNECT_S: Final = 2.0
_OTHERS_S: Final = 60.0  # JAX aborts all processes 50 to 100 s after one has died, if it is not told otherwise


def _state() -> Any:
    """Return JAX's state of the job."""
    try:
        from jax._src.distributed import global_state

        _ = global_state.client.key_value_set, global_state.client.blocking_key_value_get
    except (ImportError, AttributeError) as error:
        problem = "the coordination service of this version of JAX cannot be used to connect processes."
        remedy = "jax.distributed.initialize, and JAX 0.9.2 to 0.11.2; lax.psum over gloo"
        raise BackendError.of(problem, f"JAX {jax.__version__}: {error}", remedy) from error
    return global_state


def publish(key: str, value: str) -> None:
    """Store a value for the other processes of the job."""
    _state().client.key_value_set(_PREFIX + key, value, allow_overwrite=True)


def published(key: str, wait_s: float = 0.05) -> str | None:
    """Return the value of a key, or ``None`` if no process stores one within ``wait_s`` seconds."""
    try:
        return str(_state().client.blocking_key_value_get(_PREFIX + key, max(1, int(wait_s * 1000))))
    except RuntimeError as error:  # XlaRuntimeError
        if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
            return None
        raise


def await_published(key: str, process: int, limit_s: float, watch: Callable[[], None]) -> str:
    """Return the value that a process stores at a key. Wait at most ``limit_s`` seconds. Call ``watch`` meanwhile."""
    deadline = time.monotonic() + limit_s
    while (value := published(key, _WAIT_S)) is None:
        watch()
        if time.monotonic() > deadline:
            problem = f"process {process} did not begin to form the group of processes within {limit_s:g} s."
            remedy = "the same programs, in the same order, in all processes; a larger CROSSREDUCE_JAX_TIMEOUT"
            raise CollectiveTimeout(message(problem, f"process {jax.process_index()} waited", remedy), [process])
    return value


def own_address() -> str:
    """Return an address of this process for the other processes: "127.0.0.1" if the coordinator's is loopback."""
    host = str(_state().coordinator_address or "").rpartition(":")[0].removeprefix("[").removesuffix("]")
    if (local := loopback(host)) or not host:
        return local or "127.0.0.1"
    if names := interfaces():
        return addresses(names)[0]
    try:
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as query:
            query.connect(place)  # nothing is sent
            found = str(query.getsockname()[0])
    except OSError:
        found = ""
    return found if found and not loopback(found) else addresses()[0]


@lru_cache(maxsize=1)
def announce() -> socket.socket:
    """Let other processes see when this one ends: publish where a socket listens until then. Nothing is accepted."""
    address, own, process = own_address(), _state().process_id, os.getpid()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    os.register_at_fork(after_in_child=listener.close)  # a forked process may outlive this one
    publish(f"{_ALIVE}{own}", json.dumps([address, listener.getsockname()[1]]))

    def leave() -> None:
        with suppress(Exception):  # the service has ended, or others have ended before
            if os.getpid() == process and not isinstance(_state().client, _Kept):
                _state().client.key_value_set(f"{_PREFIX}{_ENDED}{own}", json.dumps([[own], "left"]))

    atexit.register(leave)
    return listener


def _stored(prefix: str, client: Any) -> dict[int, str]:
    """Return what processes have published, at keys of ``prefix`` and their numbers."""
    with suppress(RuntimeError):  # nothing, or the service has ended
        return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(_PREFIX + prefix)}
    return {}


class ProcessPresence:
    """Detects that other processes have ended, after they called ``announce``, by connections to their sockets."""

    def __init__(self, members: Sequence[int]) -> None:
        self._own, self._client = jax.process_index(), _state().client
        self._others, self._connections = {*members} - {self._own}, dict[int, socket.socket]()
        self._serves, self._look_at = self._own == min(members), 0.0

    def check(self) -> None:
        """Raise a ``PeerLostError`` if processes have ended. Look for them every ``_LOOK_S`` seconds."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + _LOOK_S
        # What another process has found comes first: that process may have ended since.
        for lost, how in *map(json.loads, _stored(_ENDED, self._client).values()), (self._dead(), "died"):
            if self._others & {*lost}:
                with suppress(Exception):  # the service has ended
                    publish(f"{_ENDED}{self._own}", json.dumps([lost, how]))
                time.sleep(_LINGER_S * self._serves)
                problem = f"{rank_list(lost)} {how} before its first collective of crossreduce.jax."
                raise PeerLostError(message(problem, f"process {self._own} waited", "restart the job"), lost)

    def _dead(self) -> list[int]:
        places = _stored(_ALIVE, self._client) if self._others - self._connections.keys() else {}
        dead = []
        for process in sorted(self._others & places.keys() - self._connections.keys()):
            try:
                connection = socket.create_connection(tuple(json.loads(places[process])), _CONNECT_S)
            except ConnectionError:
                dead.append(process)
            except OSError:  # it cannot be reached from here
                self._others.remove(process)
            else:
                connection.setblocking(False)
                self._connections[process] = connection
        for process, connection in self._connections.items():
            try:  # nothing is sent, so this returns when the process has ended
                connection.recv(1)
                dead.append(process)
            except BlockingIOError:
                continue
            except OSError:
                dead.append(process)
        return dead

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()


def end_without_lost_processes() -> None:
    """Let this process end without waiting for processes that were lost: JAX would wait for up to 300 s.

    The process that runs the service ends after the others: JAX aborts a process that loses its connection to it.
    """
    state = _state()
    if isinstance(state.client, _Kept):
        return
    for name in ("client", "service", "preemption_sync_manager"):
        if (each := getattr(state, name, None)) is not None:
            setattr(state, name, _Kept(each))
    if state.service is not None:
        atexit.register(_await_others, state.client)


class _Kept:
    """An object of JAX's state that is never shut down or destroyed, since both would wait for lost processes."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kept, name)

    def shutdown(self) -> None:
        """Do nothing. ``jax.distributed.shutdown`` calls this."""


def _await_others(client: Any) -> None:
    """Wait until the other processes have ended, at most ``_OTHERS_S`` seconds."""
    deadline = time.monotonic() + _OTHERS_S
    for process, text in _stored(_ALIVE, client).items():
        if process == jax.process_index():
            continue
        if (left_s := deadline - time.monotonic()) <= 0:
            return
        with (
            suppress(OSError),
            socket.create_connection(tuple(json.loads(text)), min(_CONNECT_S, left_s)) as connection,
        ):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.recv(1)  # returns, or fails, when the process has ended
