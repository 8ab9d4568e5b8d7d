"""The UCX transport: UCX moves the messages between hosts, over InfiniBand, RoCE, EFA, TCP or shared memory.

Input: connected sockets, and UCX's library, which is opened at run time: the system's ``libucp.so.0``, else that of
the package ``libucx-cu12``, which also works without CUDA. Output: see ``base.Transport``. The sockets remain open: by
them this rank notices at once that another one ends, which UCX may notice only after 20 s. UCX's own variables, such as
``UCX_NET_DEVICES`` and ``UCX_TLS``, keep their meaning. What UCX sends is neither encrypted nor authenticated.
"""

from __future__ import annotations

import importlib.util
import os
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from ... import kernels
from ...errors import BackendError
from .base import MESSAGE_NBYTES, Links
from .tcp import TcpTransport

_LIBRARY: Final = "libucp.so.0"
_PACKAGE: Final = "libucx"  # of the distribution libucx-cu12
_DEVICES: Final = Path("/sys/class/infiniband")
_open: Final[weakref.WeakSet[UcxTransport]] = weakref.WeakSet()
_forked: Final[list[str]] = []  # why this process, which another one made by fork, cannot use UCX
_REMEDY: Final = "UCX_NET_DEVICES and UCX_TLS that this host has (ucx_info -d lists them); CROSSREDUCE_TRANSPORT=tcp"


def has_device() -> bool:
    """Return whether this host has an RDMA device, one of whose ports is active."""
    try:
        return _DEVICES.exists() and any("ACTIVE" in state.read_text() for state in _DEVICES.glob("*/ports/*/state"))
    except OSError:  # removed meanwhile
        return False


def unusable() -> str:
    """Return why UCX's library cannot be used, or "" if it can."""
    if _forked:
        return _forked[0]
    try:
        _library()
    except OSError as error:
        return str(error)
    return ""


def version() -> str:
    """Return the version of UCX, such as "1.22.0". Raise an ``OSError`` if it cannot be used."""
    made: str = kernels.native().UcxWorker(_library()).version
    return made


@lru_cache(maxsize=1)
def _library() -> str:
    """Return the path of a library that can be used, which stays open. Raise an ``OSError`` if there is none."""
    paths, reasons = [_LIBRARY], []
    package = importlib.util.find_spec(_PACKAGE)
    paths += [str(Path(folder, "lib", _LIBRARY)) for folder in (package and package.submodule_search_locations) or ()]
    for path in paths:
        try:
            kernels.native().UcxWorker(path)
        except OSError as error:
            reasons.append(str(error))
        else:
            return path
    remedy = "pip install libucx-cu12, or UCX of the system; remove an older one"
    raise OSError(f"UCX's library cannot be opened: {'; '.join(reasons)}. Try: {remedy}")


class UcxTransport(TcpTransport):
    """Messages that UCX moves. See ``base.Transport``."""

    message_nbytes = MESSAGE_NBYTES  # UCX does not show how much of a message it has moved

    def __init__(self, links: Links) -> None:
        worker = kernels.native().UcxWorker(_library())
        try:
            address = worker.open()
        except OSError as error:
            raise BackendError.of("UCX cannot be used.", str(error), _REMEDY) from error
        self._rank, self._worker, self._addresses = links.rank, worker, links.exchanged(address)
        super().__init__(links.sockets, links.unreached)
        _open.add(self)

    def close(self) -> None:
        """Leave the group, and release UCX's objects."""
        super().close()
        _open.discard(self)

    def _connections(self, ranks: list[int], descriptors: list[int], silent_s: float) -> Any:
        try:
            addresses = [self._addresses[rank] for rank in ranks]
            return self._worker.connect(self._rank, ranks, descriptors, addresses, silent_s)
        except OSError as error:
            raise BackendError.of("UCX cannot connect the ranks.", str(error), _REMEDY) from error


def _after_fork() -> None:
    if _open:  # a thread of UCX, which connects ranks, does not exist in the forked process
        _forked.append(f"UCX was in use when process {os.getppid()} forked this one. Try: start processes by spawn")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

connect: Final = UcxTransport
