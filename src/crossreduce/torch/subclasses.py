"""Calls with tensors that wrap other tensors, such as ``AsyncCollectiveTensor`` of functional collectives.

Input: a function and its arguments. Output: the results of its calls. A wrapper has no memory of its own, so the
function is called through an op, ``crossreduce::unwrap0``: torch's dispatcher passes it to the class of the wrapper,
which calls the op with the wrapped tensors, once or several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from .memory import tensors_in

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_CALLS: Final[dict[int, Callable[[Sequence[Any]], None]]] = {}  # running calls; an op can only pass on their keys
_KEYS: Final = count()
_LIBRARY: Final = torch.library.Library("crossreduce", "FRAGMENT")
# If this module is imported again, as by tests of pytest plug-ins, the op of the first import still exists.
_NAME: Final = next(name for name in map("unwrap{}".format, count()) if not hasattr(torch.ops.crossreduce, name))
_LIBRARY.define(_NAME + "(Tensor(a!)[] tensors, int key) -> ()")
_LIBRARY.impl(_NAME, lambda tensors, key: _CALLS[key](tensors), "CompositeExplicitAutograd")
_LIBRARY.impl(_NAME, lambda *_: None, "Meta")  # for fake tensors, such as those with which DTensor plans an op


def has_wrapper(tensors: Sequence[Any]) -> bool:
    """Return whether any of the tensors wraps other tensors, so that its class handles ops, or is not initialized."""
    if _PLAIN.issuperset(map(type, tensors)):
        return False
    return any(torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python) or is_lazy(x) for x in tensors)


def call_unwrapped(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
    """Call ``function`` with the tensors that are wrapped in ``arguments``. Return the result of each call.

    The list is empty if their class does not pass the op on, or raises an error before ``function`` is called.
    """
    returned: list[Any] = []
    given = tensors_in(arguments)
    key = next(_KEYS)
    called = False

    def call(tensors: Sequence[Any]) -> None:
        nonlocal called
        called = True
        # A class that passes on its own tensors has their values in their memory.
        inner = [x.as_subclass(torch.Tensor) if has_wrapper([x]) and any(x is y for y in given) else x for x in tensors]
        returned.append(function(*_replaced(arguments, iter(inner))))

    _CALLS[key] = call
    try:
        getattr(torch.ops.crossreduce, _NAME)(given, key)
    except Exception:
        if called:
            raise
    finally:
        del _CALLS[key]
    return returned


def _replaced(given: Any, tensors: Iterator[Any]) -> Any:
    """Return nested lists like ``given``, but with the next of ``tensors`` in place of each tensor."""
    if isinstance(given, (list, tuple)):
        return [_replaced(each, tensors) for each in given]
    return next(tensors) if isinstance(given, torch.Tensor) else given
