"""Calls with tensors that wrap other tensors, such as ``AsyncCollectiveTensor`` of functional collectives.

Input: a function and its arguments. Output: the works of its calls. Such a tensor has no memory of its own: torch's
dispatcher passes an op to its class, which calls the op with the wrapped tensors, once or several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final

import torch

from .memory import tensors_in

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_CALLS: Final[dict[int, Callable[[Sequence[Any]], None]]] = {}
_KEYS: Final = count()
_LIBRARY: Final = torch.library.Library("crossreduce", "DEF")
_LIBRARY.define("unwrap(Tensor(a!)[] tensors, int key) -> ()")
_LIBRARY.impl("unwrap", lambda tensors, key: _CALLS[key](tensors), "CompositeExplicitAutograd")


def has_wrapper(tensors: Sequence[Any]) -> bool:
    """Return whether any of the tensors wraps others, so that its class handles ops."""
    if _PLAIN.issuperset(map(type, tensors)):
        return False
    return any(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) for tensor in tensors)


def call_unwrapped(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Call ``function`` with the tensors that those in ``arguments`` wrap; return the result of each call.

    The list is empty if their class does not pass the op on, or raises an error before ``function`` is called.
    """
    returned: list[Any] = []
    key = next(_KEYS)
    called = False

    def call(tensors: Sequence[Any]) -> None:
        nonlocal called
        called = True
        returned.append(function(*_replaced(arguments, iter(tensors))))

    _CALLS[key] = call
    try:
        torch.ops.crossreduce.unwrap(tensors_in(arguments), key)
    except Exception:
        if called:
            raise
    finally:
        del _CALLS[key]
    return returned


def _replaced(given: Any, tensors: Iterator[Any]) -> Any:
    """Return ``given`` with its tensors replaced by ``tensors``, in their order."""
    if isinstance(given, (list, tuple)):
        return [_replaced(each, tensors) for each in given]
    return next(tensors) if isinstance(given, torch.Tensor) else given
