"""Device names: this library accepts all usual spellings and converts them to one canonical spelling.

Input: ``cuda:3``, ``GPU:3``, ``/gpu:3``, ``/job:worker/task:1/device:GPU:3``, ``host1/cuda:3``, ``cuda:0#2`` (the third
logical device on one physical GPU). Output: the canonical string. The frameworks, and not this module, check whether a
device exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from .errors import DeviceError, shown

# TensorFlow writes GPU, torch writes cuda, JAX writes both. The other kinds have one spelling, except for capitals.
KINDS: Final = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "tpu": "tpu", "mps": "mps", "xpu": "xpu"}
SPELLINGS: Final = '"cpu:0", "cuda:3", "host1/cuda:3", "cuda:0#2", "GPU:3", "/job:worker/task:1/device:GPU:3"'

_PLACE: Final = re.compile(r"(?:device:)?([a-z]+)(?::([0-9]{1,9}))?(?:#([0-9]{1,9}))?", re.IGNORECASE)
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_JOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*")  # no "-": it separates job and task in a host's name
_NUMBER: Final = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Device:
    """The parts of a device's name. ``host`` is empty for this process's own host."""

    host: str
    kind: str
    index: int
    logical: int

    def __str__(self) -> str:
        name = f"{self.kind}:{self.index}"
        if self.logical:
            name += f"#{self.logical}"
        return f"{self.host}/{name}" if self.host else name

    @property
    def physical(self) -> str:
        """The physical device that this logical device is on.

        >>> parse("cuda:0#2").physical
        'cuda:0'
        """
        return str(replace(self, logical=0))


def parse(name: str) -> Device:
    """Parse a device's name.

    Missing parts default to this host, index 0 and logical device 0. TensorFlow's job and task become a host
    such as ``worker-1``; task 0 of ``/job:localhost`` is this host. The replica in TensorFlow's names is ignored.

    Raises:
      DeviceError: the name is empty or cannot be parsed.

    >>> str(parse("/job:localhost/replica:0/task:0/device:GPU:3")), str(parse("host1/cuda:3"))
    ('cuda:3', 'host1/cuda:3')
    """
    if not isinstance(name, str):
        raise _unreadable(name)
    return _parse(name)


@lru_cache(maxsize=4096)
def _parse(name: str) -> Device:
    parts = name.split("/")
    place = _PLACE.fullmatch(parts[-1])
    if place is None or place[1].lower() not in KINDS:
        raise _unreadable(name)
    prefix = parts[:-1]
    if prefix and prefix[0] == "":  # the name begins with "/", as TensorFlow's names do
        host = _tensorflow_host(name, prefix[1:])
    elif not prefix:
        host = ""
    elif len(prefix) == 1 and _HOST.fullmatch(prefix[0]):
        host = prefix[0]
    else:
        raise _unreadable(name)
    return Device(host, KINDS[place[1].lower()], int(place[2] or 0), int(place[3] or 0))


def canonical(name: str) -> str:
    """Return a device's name in the canonical spelling.

    >>> [canonical(name) for name in ("GPU:3", "/gpu:3", "cuda:0#2", "CPU", "cuda:0#0")]
    ['cuda:3', 'cuda:3', 'cuda:0#2', 'cpu:0', 'cuda:0']
    """
    return str(parse(name))


def _tensorflow_host(name: str, parts: list[str]) -> str:
    """Return the host that fields of TensorFlow name: "job:worker", "task:1" are "worker-1". Errors show ``name``."""
    fields: dict[str, str] = {}
    for part in parts:
        key, colon, value = part.partition(":")
        if not colon or key.lower() not in ("job", "replica", "task") or key.lower() in fields or not value:
            raise _unreadable(name)
        fields[key.lower()] = value
    job, task = fields.get("job", "localhost"), fields.get("task", "0")
    if not _JOB.fullmatch(job) or not all(_NUMBER.fullmatch(fields.get(key, "0")) for key in ("replica", "task")):
        raise _unreadable(name)
    return "" if (job, int(task)) == ("localhost", 0) else f"{job}-{int(task)}"


def _unreadable(name: object) -> DeviceError:
    empty = isinstance(name, str) and not name
    problem = "a device's name must not be empty." if empty else "this device name cannot be parsed."
    return DeviceError.of(problem, shown(name), f"a name such as {SPELLINGS}")
