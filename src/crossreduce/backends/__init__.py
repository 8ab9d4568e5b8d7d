"""One file a framework, the same functions in the same order; nothing else here imports a framework.

In: an array, or a framework's name.  Out: its ``Backend``. A framework is imported when its first
array arrives, not before.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from ..errors import ArgumentError, BackendError, message, shown
from ..values import IndexedSlices
from .contract import Array, Backend, Modes, Numbers, ReplicaBackend, Sparse, Unwritable

__all__ = [
    "FRAMEWORKS",
    "Array",
    "Backend",
    "Modes",
    "Numbers",
    "ReplicaBackend",
    "Sparse",
    "Unwritable",
    "backend_of",
    "get",
    "known_backend",
]

FRAMEWORKS: Final = ("numpy", "torch", "jax", "tensorflow")
_ROOTS: Final = {name: name for name in FRAMEWORKS} | {"jaxlib": "jax"}
_SCALARS: Final = (bool, int, float, complex)
_KNOWN: Final[dict[type, Backend]] = {}  # by the type of an array: looked up for every leaf of every call


@cache
def get(name: str) -> Backend:
    """Return the backend of a framework, importing it if need be.

    Raises:
      ArgumentError: there is no backend of this name.
      BackendError: the framework is not installed; the message names the extra.

    >>> get("numpy").name
    'numpy'
    """
    if name not in FRAMEWORKS:
        raise ArgumentError(
            message("there is no backend for this framework.", shown(name), "one of " + ", ".join(FRAMEWORKS))
        )
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise BackendError(
            f'backend "{name}" was asked for, but {name} cannot be imported: {error}\n'
            f"  try:   pip install 'crossreduce[{name}]'"
        ) from error
    backend: Backend = importlib.import_module(f".{name}", __name__).BACKEND
    return backend


def backend_of(value: Any) -> Backend:
    """Return the backend whose arrays ``value`` belongs to. Python numbers count as NumPy's.

    Raises:
      ArgumentError: it is no array of any framework known here.
    """
    kind = type(value)
    backend = _KNOWN.get(kind)
    if backend is None:
        backend = _of_type(kind)
        if backend is not None:
            _KNOWN[kind] = backend
    if backend is not None:
        return backend
    if isinstance(value, IndexedSlices):
        return backend_of(value.values)
    own: Backend | None = getattr(value, "crossreduce_backend", None)
    if own is not None:  # an array that carries its backend, as the null backend's do
        return own
    raise ArgumentError(
        message(
            "this is no array.",
            shown(value),
            "a NumPy, PyTorch, JAX or TensorFlow array, a sparse one, or a number",
        )
    )


def known_backend(value: Any) -> Backend | None:
    """Return the backend of an array whose type was met before; else ``None``."""
    return _KNOWN.get(type(value))


def _of_type(kind: type) -> Backend | None:
    if kind in _SCALARS:
        return get("numpy")
    for base in kind.__mro__:
        name = _ROOTS.get(base.__module__.partition(".")[0])
        if name is not None:
            return get(name)
    return None
