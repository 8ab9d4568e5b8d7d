"""Which engine ran: a record of the runs of a call, and destinations by name."""

import contextlib
from unittest import mock

from crossreduce import PerReplica
from crossreduce.engines import loop
from crossreduce.engines.host import HostExecutable


def on_devices(names):
    """Return destinations on the devices with these names."""
    return PerReplica([0] * len(names), names)


@contextlib.contextmanager
def engine_runs():
    """Record runs: ``"host"`` for each run of a kernel, ``"loop"`` for each buffer that the loop reduces."""
    runs = []

    def recorded(name, function):
        def run(*args, **kwargs):
            runs.append(name)
            return function(*args, **kwargs)

        return run

    with (
        mock.patch.object(HostExecutable, "run", recorded("host", HostExecutable.run)),
        mock.patch.object(loop, "_reduce_buffer", recorded("loop", loop._reduce_buffer)),
    ):
        yield runs
