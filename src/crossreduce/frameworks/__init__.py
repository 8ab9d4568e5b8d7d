"""Array operations of each framework: one file per framework, with the same functions in the same order.

Input: an array, or a framework's name. Output: its ``Framework``, which is imported at the first such input, not
before. Elsewhere, a framework other than NumPy is imported only by code for this framework (``crossreduce.torch`` and
other plug-ins, modules in ``engines/`` and ``transports/``), and by the command line.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from ..errors import ArgumentError, BackendError, shown
from ..values import IndexedSlices
from .base import Array, Framework, Immutable, ReplicaFramework, Sparse, ThreadModes

__all__ = [
    "FRAMEWORKS",
    "KNOWN",
    "Array",
    "Framework",
    "Immutable",
    "ReplicaFramework",
    "Sparse",
    "ThreadModes",
    "framework_of",
    "get",
    "missing_framework",
]

FRAMEWORKS: Final = ("numpy", "torch", "jax", "tensorflow", "cupy")
_ROOTS: Final = {name: name for name in FRAMEWORKS} | {"jaxlib": "jax", "cupyx": "cupy"}
_SCALARS: Final = (bool, int, float, complex)
KNOWN: Final[dict[type, Framework]] = {}
"""A cache: the framework of each type for which ``_of_type`` has found one."""


@cache
def get(name: str) -> Framework:
    """Return a framework by name, importing it on first use.

    Raises:
      ArgumentError: the name is unknown.
      BackendError: the framework cannot be imported.

    >>> get("numpy").name
    'numpy'
    """
    if name not in FRAMEWORKS:
        raise ArgumentError.of("this framework is not supported.", shown(name), "one of " + ", ".join(FRAMEWORKS))
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise missing_framework(f'framework "{name}" was requested, but', name, error) from error
    framework: Framework = importlib.import_module(f".{name}.arrays", __name__).FRAMEWORK
    return framework


def package(name: str) -> str:
    """Return the package of a framework on PyPI.

    >>> package("jax"), package("cupy")
    ('jax', 'cupy-cuda12x')
    """
    return {"cupy": "cupy-cuda12x"}.get(name, name)


def missing_framework(why: str, name: str, error: ImportError) -> BackendError:
    """Return the error for a framework that cannot be imported, with the command that installs it."""
    problem = f"{why} {name} cannot be imported: {error}"
    remedy = f"pip install {package(name)}"
    if "more than once per process" in str(error):  # NumPy's error after its modules were removed from sys.modules
        remedy = f"import {name} once, before anything that removes modules from sys.modules, such as in-process tests"
    return BackendError.of(problem, remedy=remedy)


def framework_of(value: Any) -> Framework:
    """Return the framework that an array belongs to. Python numbers belong to NumPy.

    Raises:
      ArgumentError: it is not an array of a supported framework.
    """
    kind = type(value)
    framework = KNOWN.get(kind)
    if framework is None:
        framework = _of_type(kind)
        if framework is not None:
            KNOWN[kind] = framework
    if framework is not None:
        return framework
    if isinstance(value, IndexedSlices):
        return framework_of(value.values)
    own: Framework | None = getattr(value, "crossreduce_framework", None)
    if own is not None:  # an array with its own framework, such as a NullArray
        return own
    remedy = "a NumPy, PyTorch, JAX, TensorFlow or CuPy array, a sparse one, or a number"
    raise ArgumentError.of("this is not an array.", shown(value), remedy)


def _of_type(kind: type) -> Framework | None:
    """Return the framework whose package defines a class or one of its bases, or ``None``."""
    if kind in _SCALARS:
        return get("numpy")
    for base in kind.__mro__:
        name = _ROOTS.get(base.__module__.partition(".")[0])
        if name is not None:
            return get(name)
    return None
