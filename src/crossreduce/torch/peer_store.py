"""``PeerStore``: a ``StoreClient`` as a store for ``torch.distributed``.

Input: a key and, on ranks that do not serve the store, its address. Output: a ``dist.Store``. Unlike a ``TCPStore``, it
looks up no host names, and a wait for a stopped process can be ended.
"""

from __future__ import annotations

import torch.distributed as dist

from ..ranks.connections.store import StoreClient


class PeerStore(StoreClient, dist.Store):  # type: ignore[misc]
    """A store that a rank serves; see ``StoreClient``."""

    timeout = dist.Store.timeout  # ``set_timeout`` changes it
    deleteKey, getNumKeys = StoreClient.delete_key, StoreClient.num_keys  # noqa: N815 - the trampolines' names
