"""One file a framework, the same functions in the same order; nothing else here imports a framework.

In: an array, or a framework's name.  Out: its ``Framework``. A framework is imported when its first
array arrives, not before.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from ..errors import ArgumentError, BackendError, message, shown
from ..values import IndexedSlices
from .base import Array, Framework, Modes, Numbers, ReplicaFramework, Sparse, Unwritable

__all__ = [
    "FRAMEWORKS",
    "Array",
    "Framework",
    "Modes",
    "Numbers",
    "ReplicaFramework",
    "Sparse",
    "Unwritable",
    "framework_of",
    "get",
    "known_framework",
]

FRAMEWORKS: Final = ("numpy", "torch", "jax", "tensorflow")
_ROOTS: Final = {name: name for name in FRAMEWORKS} | {"jaxlib": "jax"}
_SCALARS: Final = (bool, int, float, complex)
_KNOWN: Final[dict[type, Framework]] = {}  # by the type of an array: looked up for every leaf of every call


@cache
def get(name: str) -> Framework:
    """Return the framework of a framework, importing it if need be.

    Raises:
      ArgumentError: there is no framework of this name.
      BackendError: the framework is not installed; the message names the extra.

    >>> get("numpy").name
    'numpy'
    """
    if name not in FRAMEWORKS:
        raise ArgumentError(
            message("there is no framework for this framework.", shown(name), "one of " + ", ".join(FRAMEWORKS))
        )
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise BackendError(
            f'framework "{name}" was asked for, but {name} cannot be imported: {error}\n'
            f"  try:   pip install 'crossreduce[{name}]'"
        ) from error
    framework: Framework = importlib.import_module(f".{name}", __name__).FRAMEWORK
    return framework


def framework_of(value: Any) -> Framework:
    """Return the framework whose arrays ``value`` belongs to. Python numbers count as NumPy's.

    Raises:
      ArgumentError: it is no array of any framework known here.
    """
    kind = type(value)
    framework = _KNOWN.get(kind)
    if framework is None:
        framework = _of_type(kind)
        if framework is not None:
            _KNOWN[kind] = framework
    if framework is not None:
        return framework
    if isinstance(value, IndexedSlices):
        return framework_of(value.values)
    own: Framework | None = getattr(value, "crossreduce_framework", None)
    if own is not None:  # an array that carries its framework, as the null framework's do
        return own
    raise ArgumentError(
        message(
            "this is no array.",
            shown(value),
            "a NumPy, PyTorch, JAX or TensorFlow array, a sparse one, or a number",
        )
    )


def known_framework(value: Any) -> Framework | None:
    """Return the framework of an array whose type was met before; else ``None``."""
    return _KNOWN.get(type(value))


def _of_type(kind: type) -> Framework | None:
    if kind in _SCALARS:
        return get("numpy")
    for base in kind.__mro__:
        name = _ROOTS.get(base.__module__.partition(".")[0])
        if name is not None:
            return get(name)
    return None
