"""crossreduce for PyTorch's processes: a ``torch.distributed`` backend, and a hook for DDP.

Importing this registers the backend::

    import crossreduce.torch
    torch.distributed.init_process_group("crossreduce")  # or "cpu:crossreduce,cuda:nccl"

In: calls of ``torch.distributed``.  Out: reductions through memory that the ranks of a host share, and through gloo
between hosts. Replicas in one process need none of this: see ``crossreduce.all_reduce``.
"""

from __future__ import annotations

import torch.distributed as dist

from .group import Group, create
from .hook import HookState, all_reduce_hook

__all__ = ["Group", "HookState", "all_reduce_hook"]

NAME = "crossreduce"

if NAME.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
