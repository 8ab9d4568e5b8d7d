"""The store that a rank serves for a group that was formed again."""

import os

import pytest

from crossreduce.torch.peer_store import PeerStore

KEY = b"of the tests    "


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_end_the_store_of_its_parent():
    """When the store is deleted in a forked process, as at its exit, the parent's connections and its server go on."""
    served = PeerStore(KEY)
    connected = PeerStore(KEY, "127.0.0.1", served.port)
    connected.set("first", b"1")
    if (child := os.fork()) == 0:
        try:
            del served
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    connected.set("second", b"2")
    assert PeerStore(KEY, "127.0.0.1", served.port).get("second") == b"2"
