"""A port of this machine for a test."""

import contextlib
import random
import socket

# Linux gives connections ports from 32768 on. A test must not listen there: a process that connects before another one
# listens could get that very port for its own end, and so be connected to itself.
PORTS = range(10_000, 32_768)


def free_port():
    """Return a random port at which nothing listens, and that no connection gets."""
    draw = random.SystemRandom()
    while True:
        port = draw.choice(PORTS)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
