"""Every transport obeys the laws of ``transport_laws``. To test another transport, add it to ``TRANSPORTS``."""

import contextlib
import ctypes
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import transport_laws
from ranks import SocketTransport, ranks
from test_mpi import launched
from transport_laws import LAWS

from crossreduce.errors import PeerLostError


def on_sockets(law, folder):
    """Run a test of transport_laws.py on the sockets transport, an example of a user's own transport."""

    def rank(rendezvous):
        transport = SocketTransport(rendezvous)
        law(transport, rendezvous)
        with contextlib.suppress(PeerLostError):  # one of the laws aborts the group
            rendezvous.all_gather(b"")
        transport.close()

    ranks(3, rank)


def on_gloo(law, folder):
    """Run a test of transport_laws.py on gloo, in forked processes."""

    def rank(rendezvous):
        import torch.distributed as dist

        from crossreduce.transports.gloo import GlooTransport

        store = dist.FileStore(str(folder / "store"), rendezvous.size)
        gloo = dist.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, timeout=timedelta(seconds=30))
        law(GlooTransport(gloo), rendezvous)

    ranks(3, rank)


def on_mpi(law, folder):
    """Run a test of transport_laws.py under mpiexec."""
    status, output = launched(3, str(Path(transport_laws.__file__)), "mpi", law.__name__, timeout_s=60)
    assert status == 0, output
    assert output.count("passed") == 3, output


TRANSPORTS = {"sockets": on_sockets, "gloo": on_gloo, "mpi": on_mpi}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_obeys_the_laws(transport, law, tmp_path):
    """Messages are ordered and unchanged, waits time out, and aborts end waits, on every transport."""
    TRANSPORTS[transport](law, tmp_path)


def test_gloo_tells_a_lost_connection_from_a_timeout():
    """A wait that gloo let time out raises a ConnectionError if gloo had lost the connection, or else a TimeoutError.

    The texts are those of torch 2.13, with a peer that was killed and with one that was stopped.
    """
    from crossreduce.transports.gloo import GlooTransport

    def fail(text):
        raise RuntimeError(text)

    waiting = "gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 3000ms for send operation to complete"
    reasons = {
        "gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:63107.": ConnectionError,
        "Application timeout caused pair closure": TimeoutError,
    }
    for reason, kind in reasons.items():
        gloo = SimpleNamespace(
            send=lambda *_: SimpleNamespace(wait=lambda _: fail(waiting)), recv=lambda *_, reason=reason: fail(reason)
        )
        message = GlooTransport(gloo).send(ctypes.addressof(ctypes.create_string_buffer(8)), 8, 1, 0)
        with pytest.raises(kind, match="rank 1"):
            message.wait(3)
