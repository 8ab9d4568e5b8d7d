"""The check that the GPUs of this machine read each other's memory rightly, for ``doctor``.

Output: the facts, and lines of text. The check runs in a process of its own, which is this module: where reads are
wrong, the driver may stop that process or never answer. Its contexts on the GPUs end with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, Final

from ...errors import DriverError

TIMEOUT_S: Final = 120
COMMAND: Final = [sys.executable, "-m", __name__]
_MAX_PAIRS: Final = 8  # that are listed
_CAUSE: Final = "cause: probably the IOMMU, or the access control (ACS) of PCIe switches, which redirect such reads"
_REMEDY: Final = "try:   CROSSREDUCE_P2P=0, so that the driver copies between GPUs; or turn the IOMMU and ACS off"


def check_peers() -> dict[str, Any]:
    """Check the reads of all pairs of GPUs, even if ``CROSSREDUCE_P2P`` is 0.

    Returns:
      ``devices``: their numbers; ``unusable``: why there are none, or an empty text; ``failing``: of each pair, the GPU
      that reads and the one whose memory it reads; ``unchecked``: pairs of a GPU that cannot be used now, such as one
      that belongs to another process, and why; ``error``: what ended the check, or ``None``.
    """
    facts: dict[str, Any] = {"devices": [], "unusable": "", "failing": [], "unchecked": [], "error": None}
    environment = os.environ | {"CROSSREDUCE_P2P": "1"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT_S, "check": False}
    try:
        ran = subprocess.run(COMMAND, env=environment, **how)
    except subprocess.TimeoutExpired:
        return facts | {"error": f"it did not end within {TIMEOUT_S} s"}
    if ran.returncode:
        last = re.split(r"\n(?=\S)", ran.stderr.strip())[-1]  # from the last line without indent on
        return facts | {"error": " ".join(last.split()) or f"it ended with exit code {ran.returncode}"}
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return facts | found


def is_wrong(facts: dict[str, Any]) -> bool:
    """Return whether the facts of ``check_peers`` show a fault."""
    return bool(facts["failing"] or facts["error"])


def describe(facts: dict[str, Any]) -> list[str]:
    """Return the facts of ``check_peers`` as lines."""
    if facts["error"]:
        return [f"the check of reads between GPUs failed: {facts['error']}", _CAUSE, _REMEDY]
    unchecked = [f"cuda:{number} cannot be used now, and was not checked: {why}" for number, why in facts["unchecked"]]
    failing = [f"cuda:{reader} reads cuda:{owner} wrongly" for reader, owner in facts["failing"]]
    if failing:
        more = [f"and {len(failing) - _MAX_PAIRS} more pairs"] if len(failing) > _MAX_PAIRS else []
        return [*unchecked, *failing[:_MAX_PAIRS], *more, _CAUSE, _REMEDY]
    count = len(facts["devices"])
    if count > 1:
        return [*unchecked, f"{count} GPUs read each other's memory rightly, where the driver lets them"]
    return [*unchecked, f"nothing to check: {facts['unusable'] or 'there is only one GPU'}"]


def _check() -> None:
    """Check all GPUs that have kernels, and print the facts."""
    from ...engines.cuda import driver

    why = driver.unusable()
    numbers, unchecked = [], []
    for number in range(0 if why else driver.native().device_count()):
        if not driver.lacks_kernels(number):
            try:
                driver.load_kernels(number)
                numbers.append(number)
            except DriverError as error:  # such as a GPU in exclusive mode, or without free memory
                unchecked.append((number, " ".join(str(error).split())))
    failing = driver.check_peer_reads(numbers) if len(numbers) > 1 else []
    print(json.dumps({"devices": numbers, "unusable": why, "failing": failing, "unchecked": unchecked}))


if __name__ == "__main__":
    _check()
