"""A port of the loopback address for a test."""

import socket


def free_port():
    """Return a port at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
