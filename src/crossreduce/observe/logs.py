"""``CROSSREDUCE_LOG``: messages of the library on standard error, also if the program does not configure ``logging``.

The logger is ``logging.getLogger("crossreduce")``. Without the variable, Python prints its warnings and errors, and a
program that configures ``logging`` gets all messages. With it, they go to standard error only. The logger has no
``NullHandler``, with which Python would not print the warnings about ranks that are late.
"""

from __future__ import annotations

import logging
import os
from typing import Final

from ..errors import ArgumentError

VARIABLE: Final = "CROSSREDUCE_LOG"
_LEVELS: Final = ("debug", "info", "warning", "error")


def configure() -> None:
    """Print messages of the level that the variable names, and of higher levels. ``import crossreduce`` calls this.

    Raises:
      ArgumentError: the variable names no level.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    if text.lower() not in _LEVELS:
        raise ArgumentError.of(f"{VARIABLE} must name a level of messages.", text, ", ".join(_LEVELS))
    logger, handler = logging.getLogger("crossreduce"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s crossreduce %(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(text.upper())
    logger.propagate = False
