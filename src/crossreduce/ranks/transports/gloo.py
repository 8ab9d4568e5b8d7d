"""A ``ProcessGroupGloo``: its collectives, its errors, and its abort.

Input: a store at which its ranks meet. Output: see ``base.RunningCollective``; gloo's errors are translated into
built-in exceptions.
"""

from __future__ import annotations

import atexit
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Self

import torch
from torch._C import _distributed_c10d as c10d

from .addresses import addresses, loopback

# Parts of the texts of gloo's errors about connections
_OF_CONNECTIONS: Final = ("Connection", "pair closure", "Timed out", "Broken pipe", "gloo/transport")


def process_group(
    store: Any, rank: int, size: int, timeout: timedelta, interfaces: Sequence[str], *, is_one_host: bool
) -> Any:
    """Return a ``ProcessGroupGloo``, whose ranks connect to each other. ``interfaces``: names, or empty for any."""
    if interfaces:
        return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = c10d.ProcessGroupGloo
    options = _options(gloo.create_device(hostname=_own_address(is_one_host)), timeout)
    return torch.distributed.ProcessGroupGloo(store, rank, size, options)


def settings(rank: int, size: int, timeout: timedelta) -> Any:
    """Return a ``ProcessGroupGloo`` without connections. torch keeps a group's timeout in it.

    From torch 2.14 on, it also has the rank and the size of the group: torch reads them in the group's default backend.
    """
    options = _options(_loopback_device(), timeout, threads=1)
    if hasattr(options, "enable_reconfigure"):
        options.enable_reconfigure = True  # gloo then does not connect the ranks
    else:
        rank, size = 0, 1
    return torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), rank, size, options)


def _options(device: Any, timeout: timedelta, threads: int = 2) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout, options._threads = [device], timeout, threads
    return options


@lru_cache(maxsize=1)
def _loopback_device() -> Any:
    gloo: Any = c10d.ProcessGroupGloo
    atexit.register(_loopback_device.cache_clear)  # a device has a thread, which ends with it
    try:
        return gloo.create_device(hostname="127.0.0.1")
    except RuntimeError:  # the loopback interface is down
        return gloo.create_device(hostname=_own_address(is_one_host=False))


def abort(gloo: Any) -> None:
    """Make all messages of a ``ProcessGroupGloo`` fail, also on the other ranks."""
    # ProcessGroupGloo.abort() does not end waits (torch 2.13), but a wait that times out closes all connections of the
    # group. So this waits a millisecond for a message that no rank sends. If the connection to the other rank is closed
    # already, this wait fails without a timeout, and the next rank is tried.
    for step in range(1, gloo.size()):
        try:
            other = (gloo.rank() + step) % gloo.size()
            gloo.recv([torch.empty(1, dtype=torch.uint8)], other, 0).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return


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
    progress = 0  # not known

    def begin(self, work: Any) -> Self:
        """Set gloo's object for the running collective, and return this object."""
        self._work = work
        return self

    def release(self) -> None:
        """Release the work, which references tensors. An error may still reference this object."""
        self._work = None

    def wait(self, seconds: float) -> bool:
        """Wait so long. Return whether it has succeeded or failed."""
        time.sleep(seconds)
        return bool(self._work.is_completed())

    def finish(self) -> None:
        """Raise the error of the completed collective. All errors of gloo have one class, so their texts decide."""
        try:
            self._work.wait()
        except RuntimeError as error:
            if any(part in str(error) for part in _OF_CONNECTIONS):
                raise ConnectionError(str(error)) from error
            raise
