"""Use of a ``ProcessGroupGloo`` in addition to the transport of a group: its collectives, its errors, and its abort.

Input: gloo's process group, which the caller creates. Output: see ``base.Transport`` and ``base.RunningCollective``;
gloo's errors are translated into built-in exceptions.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Self

import torch
from torch._C import _distributed_c10d as c10d

from .addresses import addresses, loopback
from .base import HostTransport

_ABORT_TAG: Final = 0x4352FFFF  # users number their own messages from 0
# Parts of the texts of gloo's errors about connections
_OF_CONNECTIONS: Final = ("Connection", "pair closure", "Timed out", "Broken pipe", "gloo/transport")


class BesideGloo:
    """The transport of a group that also uses ``gloo``, a ``ProcessGroupGloo``: an abort ends gloo's messages, too.

    ``transport``: carries the messages of the library. ``store``: gloo's store. It is referenced here, since gloo does
    not reference a store that is written in Python. ``lazy``: whether gloo connects two ranks only when they exchange
    their first message. Then an abort does not end gloo's messages, since it would first connect all ranks. The
    timeouts of these messages end them.
    """

    def __init__(self, transport: HostTransport, gloo: Any, store: Any, *, lazy: bool) -> None:
        self.send, self.receive, self.close, self._abort = (
            transport.send,
            transport.receive,
            transport.close,
            transport.abort,
        )
        self.reached, self.unreached, self.connections = transport.reached, transport.unreached, transport.connections
        self._gloo, self._store, self._lazy = gloo, store, lazy

    def abort(self) -> None:
        """Make all messages of this rank fail, also those of gloo. Other ranks notice this when they next wait."""
        self._abort()
        # ProcessGroupGloo.abort() does not end waits (torch 2.13), but a wait that times out closes all connections of
        # the group. So this waits a millisecond for a message that no rank sends. If the connection to the other rank
        # is closed already, this wait fails without a timeout, and the next rank is tried.
        for step in range(1, 1 if self._lazy else self._gloo.size()):
            other = (self._gloo.rank() + step) % self._gloo.size()
            try:
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], other, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return


def process_group(
    store: Any, rank: int, size: int, timeout: timedelta, interfaces: Sequence[str], *, is_one_host: bool, lazy: bool
) -> Any:
    """Return a ``ProcessGroupGloo``. ``lazy``: whether two ranks connect only when they exchange their first message.

    Raise a ``RuntimeError`` if it must be lazy, and this version of torch cannot do so.
    """
    if interfaces and not lazy:
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    places = [{"interface": name} for name in interfaces] or [{"hostname": _own_address(is_one_host)}]
    try:
        options._devices = [gloo.create_device(**place, **{"lazy_init": True} if lazy else {}) for place in places]
    except TypeError:
        problem = f"in torch {torch.__version__} gloo needs a connection between every two ranks"
        raise RuntimeError(problem) from None
    options._timeout = timeout
    return torch.distributed.ProcessGroupGloo(store, rank, size, options)


def _own_address(is_one_host: bool) -> str:
    """Return the address of this host at which gloo listens.

    Many systems map the name of the host to a loopback address. Then any program of another host may listen there.
    """
    address = _address_of_name()
    return address if is_one_host or not loopback(address) else next(iter(addresses()), address)


@lru_cache(maxsize=1)
def _address_of_name() -> str:
    """Return the address that gloo would find for the name of this host, which may take seconds."""
    # Python cannot look up a name of 64 bytes, which Linux allows, and no name if its codec "idna" cannot be imported.
    with suppress(OSError, UnicodeError, LookupError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return "127.0.0.1"


class GlooCollective:
    """A collective that gloo runs. See ``base.RunningCollective``."""

    _work: Any = None

    def begin(self, work: Any) -> Self:
        """Set gloo's object for the running collective, and return this object."""
        self._work = work
        return self

    def release(self) -> None:
        """Release the work, which references tensors. An error may still reference this object."""
        self._work = None

    def is_completed(self) -> bool:
        """Return whether it has succeeded or failed."""
        return bool(self._work.is_completed())

    def finish(self) -> None:
        """Raise the error of the completed collective. All errors of gloo have one class, so their texts decide."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if any(part in str(error) for part in _OF_CONNECTIONS):
                raise ConnectionError(str(error)) from error
            raise


def connection_error(error: RuntimeError) -> OSError | None:
    """Return an error of gloo about connections as a ``TimeoutError`` or ``ConnectionError``, and ``None`` for others.

    The result is a ``ConnectionAbortedError`` if this rank closed its connections after a timeout of another message.

    >>> text = "[pair.cc:553] Connection closed by peer [::1]:3. This is typically caused by a remote worker crashing."
    >>> connection_error(RuntimeError(text)), connection_error(RuntimeError("invalid tag"))
    (ConnectionError('Connection closed by peer [::1]:3'), None)
    """
    text = str(error)
    if not any(part in text for part in _OF_CONNECTIONS):
        return None
    kind = ConnectionAbortedError if "timeout caused pair closure" in text else ConnectionError
    return (TimeoutError if "Timed out" in text else kind)(re.sub(r"^\[.*?\] |\. This is .*", "", text))
