"""The work of ``send`` and ``recv`` between two ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..errors import MismatchError, ReductionError
from ..ranks.messages import Messages
from .op_queue import Finished, exclude_from_compile


class HostMessage(Finished):
    """The work of a message that may be incomplete. ``finish`` is called when it has completed without an error.

    ``require_open`` raises an error if this process was forked from the one that began the message. ``settings``: the
    group's options of gloo, whose ``_timeout`` is the default timeout of ``wait``.
    """

    _finished, _source = False, -1
    _error: Exception | None = None

    def __init__(
        self,
        messages: Messages,
        message: tuple[int, str, int, int],
        tensors: Sequence[Any],
        finish: Callable[[], None] | None,
        require_open: Callable[[], None],
        settings: Any,
    ) -> None:
        """``message``: (number, "send" or "recv", other rank, bytes); see ``Messages.wait``."""
        super().__init__(tensors)
        self._messages, self._message, self._finish = messages, message, finish
        self._require_open, self._settings = require_open, settings
        self._finishing = threading.RLock()  # reentrant: a signal handler may call ``wait`` while its thread holds it

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._finished:
            limit_s = timeout.total_seconds() if timeout else 0.0
            self._advance(limit_s if limit_s > 0 else self._settings._timeout.total_seconds())
        if self._error is not None:
            raise copy.copy(self._error)  # a copy avoids a cycle: raised errors refer to frames, and these to this work
        return True

    def is_completed(self) -> bool:
        if not self._finished:
            self._advance(0.0)
        return self._finished

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _source_rank(self) -> int:
        return self._source

    def _advance(self, limit_s: float) -> None:
        """Wait for the message. If ``limit_s`` is 0, only check whether it is complete."""
        source: int | None = -1
        error: Exception | None = None
        try:
            self._require_open()
        except (ReductionError, RuntimeError) as closed:  # a forked process must not acquire the lock below
            if not self._finished:
                self._error, self._finished = closed.with_traceback(None), True
            return
        try:
            source = self._messages.wait(*self._message, limit_s)
        except (ReductionError, RuntimeError) as failed:
            error = failed.with_traceback(None)
        if source is None:
            return
        with self._finishing:
            if self._finished:
                return
            if error is None and self._finish is not None:
                self._finish()
            self._source, self._error, self._finish = source, error, None
            self._finished = True
        if error is None or isinstance(error, MismatchError):  # not after other errors, which have withdrawn it
            self._messages.forget(self._message[0])

    def __del__(self) -> None:
        """Release this work. The message continues without it."""
        try:
            if not self._finished:
                self._require_open()
                self._messages.forget(self._message[0])
        except Exception:  # noqa: BLE001 - the group is closed, or Python ends
            pass


exclude_from_compile(HostMessage)
