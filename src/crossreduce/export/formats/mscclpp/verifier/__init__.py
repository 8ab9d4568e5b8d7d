"""Proves MSCCL++ plans of any tool. ``verifier.py`` describes how; the other files run a plan on symbolic memory."""

from .verifier import MscclppReport, verify_mscclpp_json

__all__ = ["MscclppReport", "verify_mscclpp_json"]
