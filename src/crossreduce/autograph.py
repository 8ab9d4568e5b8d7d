"""What tells tracers to call this library as it is, not to rewrite it.

Under ``tf.function``, AutoGraph reads the source of every function it meets and rewrites its loops and
branches. Here they only steer what is known while tracing, so that costs seconds (5.7 s against 0.07 s
for a first trace) and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """Mark a function, and what it calls, as none that AutoGraph rewrites; TensorFlow need not be there.

    Source: this attribute is what tf.autograph.experimental.do_not_convert sets
    (``do_not_convert`` in tensorflow/python/autograph/impl/api.py).
    """
    function.autograph_info__ = {}  # type: ignore[attr-defined]
    return function
