"""Registers the backend "crossreduce" of ``torch.distributed`` by name, when torch (2.5 or later) is imported.

This module is the entry point of the group ``torch.backends``, so that a process that imports only torch has the
backend: a worker of Ray, a spawned process, a launcher of a third party. It is not inside the package ``crossreduce``,
whose import would delay every ``import torch``; the first process group imports that.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the backend, unless that was done before or this torch has no ``torch.distributed``."""
    import torch.distributed as dist

    if dist.is_available() and not hasattr(dist.Backend, "CROSSREDUCE"):
        dist.Backend.register_backend("crossreduce", create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, backend_options: Any = None) -> Any:
    """Make a process group of crossreduce, with the arguments of ``torch.distributed``'s registry."""
    from crossreduce.torch.group import create

    return create(options, backend_options)
