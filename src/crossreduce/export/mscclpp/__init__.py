"""MSCCL++ execution plans: ``writer.py`` writes them."""

from .writer import to_mscclpp_json

__all__ = ["to_mscclpp_json"]
