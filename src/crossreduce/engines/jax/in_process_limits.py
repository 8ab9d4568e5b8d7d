"""How long a custom call waits for devices: an environment variable."""

from __future__ import annotations

import math
import os

from ...errors import ArgumentError, shown


def limit_s() -> float:
    """Return how long devices wait for a missing one, in seconds: ``CROSSREDUCE_JAX_TIMEOUT``, or 40, XLA's own limit.

    Raises:
      ArgumentError: the variable is not a positive number.
    """
    text = os.environ.get("CROSSREDUCE_JAX_TIMEOUT", "40")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < 1e9:
        problem = "CROSSREDUCE_JAX_TIMEOUT must be a positive number of seconds."
        raise ArgumentError.of(problem, shown(text), "CROSSREDUCE_JAX_TIMEOUT=40")
    return limit
