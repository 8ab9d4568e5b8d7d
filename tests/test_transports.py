"""Every transport obeys the laws of ``transport_laws``. To test another transport, add it to ``TRANSPORTS``."""

import contextlib
from datetime import timedelta
from pathlib import Path

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
