"""Writes MSCCL++ plans: ``writer.py`` chooses between blocks, pipelines and switches that reduce."""

from .writer import to_mscclpp_json

__all__ = ["to_mscclpp_json"]
