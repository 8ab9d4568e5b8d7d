"""Which transport carries the messages between the hosts of a group: the library's own, or a plug-in.

Input: the name that the user has given, and what the other ranks can use. Output: one name for all ranks, and the
transport. The entry-point group ``crossreduce.transports`` names the plug-ins of other packages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple

from ...errors import ArgumentError, BackendError, MismatchError, ReductionError, rank_list, shown
from . import ucx
from .base import HostTransport, Links, Plugin, Transport
from .tcp import TcpTransport, addresses_of

_LOG: Final = logging.getLogger("crossreduce")
VARIABLE: Final = "CROSSREDUCE_TRANSPORT"
_SOCKETS: Final = "CROSSREDUCE_SOCKETS"
_MOST_SOCKETS: Final = 64  # between two ranks
_BY_DEFAULT: Final = 4  # between two ranks, if this is found to be faster than one
_MOST_BY_DEFAULT: Final = 64  # of a rank: descriptors, of which a process may have 1024
AUTO: Final = "auto"
_OWN: Final = ("tcp", "ucx")
_ENTRY_POINTS: Final = "crossreduce.transports"


class Offer(NamedTuple):
    """What a rank wants and can use. ``problem``: why it cannot use ``wanted``, or "" if it can.

    ``usable``: the transport that it would take for "auto", with the version if different ones do not work together.
    ``sockets``: how many it wants between two ranks, or 0 if this is to be measured.
    """

    wanted: str
    usable: str
    problem: str
    sockets: int = 0


def transport_name(given: Any) -> str:
    """Return the name of a transport, or "auto".

    Args:
      given: a name; or ``None``: the one that the variable CROSSREDUCE_TRANSPORT has, and otherwise "auto".
    Raises:
      ArgumentError: no transport has this name.
    """
    name = (os.environ.get(VARIABLE) or AUTO) if given is None else given
    if name not in (AUTO, *_OWN) and not (isinstance(name, str) and name in _others()):
        what, names = VARIABLE if given is None else "transport", (AUTO, *_OWN, *_others())
        raise ArgumentError.of(f"{what} is not the name of a transport.", shown(name), f"one of {', '.join(names)}")
    return name


@lru_cache(maxsize=1)
def _others() -> dict[str, Any]:
    """Return the entry points of other packages, by name."""
    return {each.name: each for each in entry_points(group=_ENTRY_POINTS) if each.name not in _OWN}


def _plugin(name: str) -> Plugin:
    """Return the plug-in of a transport other than "tcp". Raise any error of its import."""
    plugin: Plugin = ucx if name == "ucx" else _others()[name].load()
    return plugin


def offer(wanted: str) -> Offer:
    """Return the offer of this process, for the other ranks. ``wanted``: what ``transport_name`` returned.

    Raises:
      ArgumentError: the variable CROSSREDUCE_SOCKETS is invalid.
    """
    sockets = _sockets()
    if wanted == "tcp":
        return Offer(wanted, wanted, "", sockets)
    if wanted == AUTO:
        return Offer(AUTO, _with_version() if ucx.has_device() and not ucx.unusable() else "tcp", "", sockets)
    try:
        problem = str(_plugin(wanted).unusable() or "")
        return Offer(wanted, wanted if problem or wanted != "ucx" else _with_version(), problem, sockets)
    except Exception as error:  # noqa: BLE001 - of another package
        return Offer(wanted, wanted, f"{type(error).__name__}: {error}", sockets)


def _sockets() -> int:
    """Return the value of CROSSREDUCE_SOCKETS, or 0 if it is not set. If it is invalid, raise an ``ArgumentError``."""
    given = os.environ.get(_SOCKETS) or "0"
    if given != "0" and not (given.isascii() and given.isdecimal() and 1 <= int(given[:9]) <= _MOST_SOCKETS):
        problem = f"{_SOCKETS} is not a number of connections between two ranks."
        raise ArgumentError.of(problem, shown(given), f"1 to {_MOST_SOCKETS}; 0, or unset, to find out the number")
    return int(given)


def socket_count(transport: str, hosts: int) -> tuple[int, bool]:
    """Return how many sockets a group needs between two ranks, the same on all ranks, and whether to find out if more
    than one are faster.

    ``transport``: what ``agreed`` returned. ``hosts``: how many there are; a rank is connected to one rank of each.
    """
    if transport != "tcp":
        return 1, False
    given = _sockets()
    return given or max(1, min(_BY_DEFAULT, _MOST_BY_DEFAULT // max(1, hosts - 1))), not given


def _with_version() -> str:
    return f"ucx {ucx.version().rpartition('.')[0]}"


def agreed(offers: Sequence[Offer], numbers: Sequence[int]) -> str:
    """Return the name of the transport of a group. All ranks pass the same offers, and get the same result.

    ``numbers``: the ranks as errors name them.

    Raises:
      MismatchError: the ranks want different transports or numbers of sockets, or have different versions of UCX.
      BackendError: a rank cannot use the transport.
    """
    if given := _differences([each.wanted for each in offers], numbers):
        remedy = f"the same {VARIABLE}, or transport=..., on all ranks"
        raise MismatchError.of("the ranks want different transports between hosts.", given, remedy)
    if given := _differences([str(each.sockets or "unset") for each in offers], numbers):
        problem = f"the ranks want different numbers of connections ({_SOCKETS})."
        raise MismatchError.of(problem, given, f"the same {_SOCKETS} on all ranks")
    failed = [rank for rank, each in enumerate(offers) if each.problem]
    name = offers[0].wanted
    if failed:
        problem = f"{rank_list([numbers[rank] for rank in failed])} cannot use the transport {name}."
        remedy = f'what the error says, on all hosts; {VARIABLE}=tcp, or transport="tcp", on all ranks'
        raise BackendError.of(problem, offers[failed[0]].problem, remedy)
    given = _differences([each.usable for each in offers], numbers)
    if name == AUTO:
        return "ucx" if not given and offers[0].usable.startswith("ucx") else "tcp"
    if given:  # UCX ends the process if it is connected to some other versions
        raise MismatchError.of("the ranks have different versions of UCX.", given, "the same version on all hosts")
    return name


def _differences(texts: Sequence[str], numbers: Sequence[int]) -> str:
    """Return which ranks have which text, or "" if all have the same."""
    ranks = {each: [numbers[rank] for rank, other in enumerate(texts) if other == each] for each in texts}
    return "; ".join(f"{each} on {rank_list(found)}" for each, found in ranks.items()) if len(ranks) > 1 else ""


def open_transport(name: str, links: Links) -> HostTransport:
    """Return the transport ``name``. If it cannot connect, close the sockets of ``links`` and raise an error."""
    try:
        if name == "tcp":
            made: HostTransport = TcpTransport(links.sockets, links.unreached, links.further, links.measures)
        else:
            connected = _plugin(name).connect(links)
            made = connected if isinstance(connected, TcpTransport) else OtherTransport(connected, links)
    except ReductionError:
        links.close()
        raise
    except Exception as error:
        links.close()
        problem = f"the transport {name} cannot connect this rank."
        raise BackendError.of(problem, f"{type(error).__name__}: {error}", f"{VARIABLE}=tcp on all ranks") from error
    _LOG.info("messages between hosts: transport %s", name)
    return made


class OtherTransport:
    """The transport of another package. See ``base.HostTransport``. The sockets are closed when it is closed."""

    connections = None

    def __init__(self, inner: Transport, links: Links) -> None:
        self.send, self.receive, self.abort, self._close = inner.send, inner.receive, inner.abort, inner.close
        self.reached, self.unreached, self._links = addresses_of(links.sockets), tuple(links.unreached), links

    def close(self) -> None:
        """Close the transport, and the sockets."""
        try:
            self._close()
        finally:
            self._links.close()
