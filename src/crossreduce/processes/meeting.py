"""How the ranks of ``crossreduce.processes`` find each other: the launcher's variables, and the store of rank 0.

Input: arguments of ``join``, and the environment. Output: a store at which all ranks have met.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from operator import index
from typing import Any, Final

from .. import kernels
from ..errors import ArgumentError, CollectiveTimeout, MismatchError, ReductionError, encoded, message, shown
from ..ranks.connections.rendezvous import MET, NEW, StoreRendezvous, lost_store_errors
from ..ranks.connections.store import LIMIT_S, StoreClient, StorePart
from ..ranks.failures.abort import shortage_named
from ..ranks.transports.addresses import loopback
from ..ranks.transports.tcp import open_standard_streams

_ANSWER_S: Final = 1.0  # how long rank 0 may take to answer, even if the timeout is shorter
_PAUSES_S: Final = (0.01, 0.5)  # between two attempts to reach rank 0, first and longest
_REFUSED_S: Final = 3.0  # how long another program may answer at the address, such as an earlier job that is ending
_LATE_S: Final = 5.0  # how long rank 0 waits for the others to read why they cannot meet
_MOST_RANKS: Final = 1 << 16
_OTHER_KEY: Final = "the same key on all ranks: {} connections to this rank did not prove that they know it"


def meet(
    rank: int | None, size: int | None, address: str | None, key: str | None, timeout_s: float
) -> tuple[StoreClient, int, int, str]:
    """Return the store at which all ranks have met, this rank, the number of ranks, and the address where they listen.

    For arguments and errors see ``join``.
    """
    own, count = _number(rank, "rank", "RANK"), _number(size, "size", "WORLD_SIZE")
    if not 0 <= own < count <= _MOST_RANKS:
        problem = f"the rank must be at least 0 and less than the size, which is at most {_MOST_RANKS}."
        raise ArgumentError.of(problem, f"rank {own}, size {count}")
    secret = _digest(os.environ.get("CROSSREDUCE_KEY", "") if key is None else key)
    host, port, listen_at = meeting_place(address, count)
    return meet_at(secret, host, port, own, count, timeout_s), own, count, listen_at


def meet_at(
    key: bytes,
    host: str,
    port: int,
    own: int,
    count: int,
    timeout_s: float,
    serving: Callable[[int], None] = lambda _: None,
    watch: Callable[[], None] = NEW.watch,
) -> StoreClient:
    """Return the store that rank 0 serves at a host and port, at which all ranks have met.

    ``serving``: called on rank 0 with the port at which it listens, since ``port`` may be 0, for any free port. For
    ``watch`` see ``Origin``. The store calls it, too, until it gets another one.
    """
    open_standard_streams()
    kernels.native()  # loads a file now: later, programs that connect may use up the open files of this process
    with shortage_named(f"rank {own} cannot join the group."):
        store = _serve(key, host, port, count) if own == 0 else _connect(key, host, port, own, timeout_s, watch)
        store.watch = watch
        try:
            if own == 0:
                serving(store.port)
            _meet(store, own, count, timeout_s)
        except CollectiveTimeout as error:
            store.close()
            if own == 0 and store.refused:
                raise CollectiveTimeout(f"{error}; {_OTHER_KEY.format(store.refused)}", error.ranks) from None
            raise
        except BaseException:
            store.close()
            raise
    store.limit_s = LIMIT_S
    return store


def _number(given: Any, what: str, variable: str) -> int:
    """Return the argument ``what`` as an integer. If ``given`` is ``None``, read an environment variable."""
    value: Any = os.environ.get(variable) if given is None else given
    if isinstance(value, bool):
        raise ArgumentError.of(f"{what} must be an integer.", shown(value))
    remedy = f"{what}=..., or a launcher that sets {variable}, such as torchrun"
    if value is None:
        raise ArgumentError.of(f"{what} was not given, and {variable} is not set.", f"{what}=None", remedy)
    try:
        return int(value) if given is None else index(value)
    except (TypeError, ValueError):
        where = variable if given is None else what
        raise ArgumentError.of(f"{where} must be an integer.", shown(value), remedy) from None


def _rank_0_address(address: Any) -> tuple[str, int]:
    """Return the host and port at which rank 0 listens. ``address``: the argument of ``join``."""
    given, port_offset = address, 0
    if address is None:
        host, port = (os.environ.get(variable) for variable in ("MASTER_ADDR", "MASTER_PORT"))
        if host is None or port is None:
            problem = "address was not given, and MASTER_ADDR and MASTER_PORT are not both set."
            raise ArgumentError.of(problem, f"MASTER_ADDR={host}, MASTER_PORT={port}", 'address="HOST:PORT"')
        given = f"{host}:{port}"
        port_offset = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun listens at MASTER_PORT itself
    host, _, port = given.rpartition(":") if isinstance(given, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not _is_host(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) + port_offset < 1 << 16:
        raise ArgumentError.of("this is not an address.", shown(given), '"HOST:PORT", such as "node0:29500"')
    return host, int(port) + port_offset


def _is_host(text: str) -> bool:
    try:
        return bool(text.encode("idna")) and text.isprintable() and " " not in text
    except UnicodeError:  # an empty or too long part
        return False


def meeting_place(address: Any, size: int) -> tuple[str, int, str]:
    """Return the host and port at which rank 0 listens, and the address at which all ranks listen ("" for all)."""
    if size > 1:
        host, port = _rank_0_address(address)
        return host, port, loopback(host)
    host = "localhost"
    with suppress(ArgumentError):  # one rank needs no rendezvous, but processes of other hosts may join it later
        host, _ = _rank_0_address(address)
    return "localhost", 0, loopback(host)


def _digest(key: Any) -> bytes:
    """Return the key of the store, a hash of the secret text ``key``."""
    if not isinstance(key, str):
        raise ArgumentError.of("key must be a str.", type(key).__name__, "the same secret text on all ranks")
    return blake2b(key.encode(errors="surrogatepass"), digest_size=16, person=b"crossreduce key").digest()


def _serve(key: bytes, host: str, port: int, size: int) -> StoreClient:
    try:
        return StoreClient(key, port=port, serve_at=loopback(host), ranks=size)
    except OSError as error:
        remedy = "another port, or end the program that listens there"
        raise ArgumentError.of(f"rank 0 cannot listen at port {port}.", str(error), remedy) from error


def _connect(key: bytes, host: str, port: int, rank: int, timeout_s: float, watch: Callable[[], None]) -> StoreClient:
    """Return a connection to the store of rank 0. Repeat failed attempts, since rank 0 may start later."""
    began, pause, refused_at = time.monotonic(), _PAUSES_S[0], 0.0
    target = loopback(host) or host  # "localhost" may also be ::1, at which rank 0 does not listen
    while True:
        store: StoreClient | None = None
        try:
            store = StoreClient(key, target, port)
            store.limit_s = min(LIMIT_S, max(_ANSWER_S, began + timeout_s - time.monotonic()))
            store.num_keys()  # any request: the first one opens the channel
        except (OSError, RuntimeError) as error:
            now, failure = time.monotonic(), error
            if store is not None:
                store.close()
        else:
            store.limit_s = LIMIT_S
            return store
        if isinstance(failure, OSError) or "Timeout" in str(failure):  # rank 0 does not listen yet, or was stopped
            if now > began + timeout_s:
                if isinstance(failure, OSError):
                    problem = f"rank {rank} did not reach rank 0 at {host}:{port} within {timeout_s:g} s."
                    remedy = "start all ranks; the address of rank 0's host; a longer timeout; read the last output of "
                    remedy += "rank 0; join_invited, if the other ranks have continued and this rank was restarted"
                else:
                    program = f"the program that listens at {host}:{port}"
                    problem = f"{program} did not answer rank {rank} within {timeout_s:g} s."
                    remedy = "a port at which no other program listens; a longer timeout; rank 0 may also be stopped"
                raise CollectiveTimeout(message(problem, str(failure), remedy), [0])
        else:
            refused_at = refused_at or now
            if now > refused_at + min(_REFUSED_S, timeout_s):
                problem = f"the program that listens at {host}:{port} does not accept rank {rank}."
                remedy = "the same key on all ranks; a port at which no other program listens"
                if "know the key" not in str(failure):  # it has closed the connection, and sent no proof
                    remedy = f"read the last output of rank 0, which may lack open files or memory; {remedy}"
                raise ArgumentError.of(problem, str(failure), remedy)
        watch()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def _meet(store: StoreClient, rank: int, size: int, timeout_s: float) -> None:
    """Wait for all ranks, and check that each rank joins once, and that all have the same size.

    A process that comes after all ranks have met cannot end their group. If the ranks cannot meet, rank 0 keeps the
    store for some seconds, so that later ranks read the reason, too.
    """
    rendezvous = StoreRendezvous(StorePart(store, "meet/"), rank, size, timeout_s)
    if rank == 0:
        rendezvous.read_s = _LATE_S
    with lost_store_errors("rank 0, which runs it,", [0]):
        own, claims = secrets.token_hex(8).encode(), StorePart(store, "rank/")
        first = claims.compare_set("size", b"", f"{size} {rank}".encode()).decode()  # stored by the first rank
        is_first = claims.compare_set(str(rank), b"", own) == own
    error: ReductionError | None = None
    other_size, other_rank = first.split()
    if other_size != str(size):
        problem = f"the size is {size} on rank {rank} and {other_size} on rank {other_rank}."
        error = MismatchError.of(problem, remedy="the same size, or WORLD_SIZE, on all ranks")
    elif not is_first:
        problem = f"two processes have joined as rank {rank}."
        error = ArgumentError.of(problem, remedy="a different number for each rank; a different address for each job")
    if error is not None:
        if rendezvous.publish_abort(encoded(error)) == MET:
            remedy = "join_invited in a process that was restarted; a different address for each job"
            raise type(error).of(problem, "the group at this address is complete", remedy)
        with suppress(ReductionError):  # this raises the published error, but first waits until others have read it
            rendezvous.all_gather(b"")
        raise error
    rendezvous.meet()
