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
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import jax

from ..errors import BackendError, CollectiveTimeout, message
from ..ranks.connections.rendezvous import interfaces
from ..ranks.transports.addresses import addresses, loopback

_PREFIX: Final = "crossreduce/"
_WAIT_S: Final = 1.0  # for a value, in one request
_ALIVE: Final = "alive/"  # keys of addresses at which processes listen until they end
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


def await_published(key: str, process: int, limit_s: float) -> str:
    """Return the value that a process stores at a key. Wait at most ``limit_s`` seconds for it."""
    deadline = time.monotonic() + limit_s
    while (value := published(key, _WAIT_S)) is None:
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
    address = own_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    os.register_at_fork(after_in_child=listener.close)  # a forked process may outlive this one
    publish(f"{_ALIVE}{jax.process_index()}", json.dumps([address, listener.getsockname()[1]]))
    return listener


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
    for key, text in client.key_value_dir_get(_PREFIX + _ALIVE):
        if int(key.rpartition("/")[2]) == jax.process_index():
            continue
        if (left_s := deadline - time.monotonic()) <= 0:
            return
        with (
            suppress(OSError),
            socket.create_connection(tuple(json.loads(text)), min(_CONNECT_S, left_s)) as connection,
        ):
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.recv(1)  # returns, or fails, when the process has ended
