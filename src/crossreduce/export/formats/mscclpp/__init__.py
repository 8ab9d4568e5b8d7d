"""MSCCL++ execution plans: ``writer.py`` writes them; ``verifier.py`` proves plans of any tool."""

from .verifier import MscclppReport, verify_mscclpp_json
from .writer import to_mscclpp_json

__all__ = ["MscclppReport", "to_mscclpp_json", "verify_mscclpp_json"]
