"""What vLLM's plug-in does if CROSSREDUCE_VLLM=1: vLLM's groups on CPUs get a communicator of crossreduce.

Input: vLLM's current platform. Output: the name of a class, which vLLM asks its platform for whenever it makes a group.
The entry point of the group ``vllm.general_plugins`` is in ``_crossreduce_torch``, so that vLLM's processes do not
import this package if the variable is not set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

from ..errors import ArgumentError, shown

VARIABLE: Final = "CROSSREDUCE_VLLM"
CLASS: Final = f"{__name__}.communicator.CrossreduceCommunicator"
_LOG: Final = logging.getLogger("crossreduce")


def install() -> None:
    """Let vLLM's groups of this process use crossreduce, if the variable is 1. Another call changes nothing more.

    If this version of vLLM has no communicators for CPUs, or another platform, a warning says that vLLM's own
    communicator is used.

    Raises:
      ArgumentError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ArgumentError.of(f"{VARIABLE} must be 0 or 1.", shown(value), f"{VARIABLE}=1")
    if value == "0":
        return
    try:
        from vllm.platforms import current_platform as platform

        name_of_class = platform.get_device_communicator_cls
        is_cpu = platform.is_cpu()
    except (ImportError, AttributeError) as error:
        _warn(error)
        return
    if not is_cpu:
        _warn(f"its platform is {type(platform).__name__}, and crossreduce serves CPUs only")
    elif not isinstance(name_of_class, _Choice):
        platform.get_device_communicator_cls = _Choice(name_of_class)


class _Choice:
    """The function that replaces the platform's: it returns the name of the class, or what the platform returned."""

    def __init__(self, own: Callable[[], str]) -> None:
        self.own = own

    def __call__(self) -> str:
        try:
            from . import communicator  # noqa: F401 - is it possible with this version of vLLM?
        except (ImportError, AttributeError) as error:
            _warn(error)
            return self.own()
        return CLASS


def _warn(reason: Any) -> None:
    _LOG.warning("vLLM's own communicator is used in spite of %s=1: %s", VARIABLE, reason)
