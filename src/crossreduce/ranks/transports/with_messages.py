"""``WithMessages``: the transport of a group, and another one of the same kind for messages between any two ranks.

Input: both transports. Output: see ``base.HostTransport``. So a message that nobody receives yet never delays a
collective, and a rank that waits for a message does not wake for the data of collectives.
"""

from __future__ import annotations

from .base import MESSAGE_NBYTES, HostTransport


class WithMessages:
    """A ``HostTransport`` that also aborts and closes ``messages``, which is connected to all ranks of other hosts."""

    def __init__(self, transport: HostTransport, messages: HostTransport) -> None:
        self.messages, self._transport = messages, transport
        self.send, self.receive, self.connections = transport.send, transport.receive, transport.connections
        self.message_nbytes = getattr(transport, "message_nbytes", MESSAGE_NBYTES)
        self.reached = {**messages.reached, **transport.reached}
        self.unreached = tuple(sorted({*messages.unreached, *transport.unreached}))

    def abort(self) -> None:
        """Make all messages of this rank fail, of both transports."""
        self._transport.abort()
        self.messages.abort()

    def close(self) -> None:
        """Close both transports."""
        try:
            self.messages.close()
        finally:
            self._transport.close()
