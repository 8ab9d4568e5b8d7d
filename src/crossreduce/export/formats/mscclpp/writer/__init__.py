"""Writes MSCCL++ plans. ``writer.py`` chooses between ``blocks.py``, ``pipelines.py`` and ``switch_reductions.py``."""

from .writer import to_mscclpp_json

__all__ = ["to_mscclpp_json"]
