"""Record which engines run in a block of code, and make destinations from device names."""

import contextlib
from unittest import mock

from crossreduce import CrossDeviceOps, PerReplica
from crossreduce.engines import loop
from crossreduce.engines.cuda import driver
from crossreduce.engines.host import HostExecutable


def on_devices(names):
    """Return destinations on the devices with these names."""
    return PerReplica([0] * len(names), names)


def kernel_launches():
    """Return how many kernels the CUDA engine has launched in this process. Assert that it is installed."""
    assert driver.native() is not None, "the compiled module of the CUDA engine is missing"
    return driver.native().counts()[0]


@contextlib.contextmanager
def engine_runs():
    """Yield a list that gets "host" for each run of a kernel and "loop" for each buffer. Calls are not prepared."""
    runs = []

    def recorded(name, function):
        def run(*args, **kwargs):
            runs.append(name)
            return function(*args, **kwargs)

        return run

    nothing = property(lambda _: None, lambda *_: None)
    with (
        mock.patch.object(CrossDeviceOps, "_calls", nothing),
        mock.patch.object(HostExecutable, "run", recorded("host", HostExecutable.run)),
        mock.patch.object(loop, "_reduce_buffer", recorded("loop", loop._reduce_buffer)),
    ):
        yield runs
