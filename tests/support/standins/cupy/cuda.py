"""CuPy's devices, streams, events and pointers: see the package's docstring."""

import itertools
import threading

from . import _machine

_thread = threading.local()
_streams = itertools.count(0x1000)


def _state():
    if not hasattr(_thread, "device"):
        _thread.device, _thread.stack = 0, []
        _thread.streams = [[Stream.null] for _ in range(_machine.DEVICES)]
    return _thread


class runtime:  # noqa: N801 - a module in CuPy
    """The CUDA runtime."""

    class CUDARuntimeError(RuntimeError):
        """An error of the runtime."""

    @staticmethod
    def getDeviceCount():  # noqa: N802
        if not _machine.DEVICES:
            raise runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return _machine.DEVICES

    @staticmethod
    def getDevice():  # noqa: N802
        return _state().device

    @staticmethod
    def setDevice(device):  # noqa: N802
        if not 0 <= device < _machine.DEVICES:
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _state().device = device


class Device:
    """A CUDA device; a context in which it is the current one."""

    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)

    def __enter__(self):
        _state().stack.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *args):
        runtime.setDevice(_state().stack.pop())

    def synchronize(self):
        _machine.synchronize()
        for stream in [stream for stream in list(_machine._clocks) if stream[0] == self.id]:
            _machine.wait(None, _machine.snapshot(stream))


class Event:
    """A point in the work of a stream of the device that was current when the event was made."""

    def __init__(self, disable_timing=False):
        self.ptr, self._device, self._clock = next(_streams), runtime.getDevice(), {}


class Stream:
    """A queue of work on one device. The null stream (``ptr`` 0) is that of the device that is current at its use."""

    null = None

    def __init__(self, null=False, non_blocking=False):
        self.ptr = _machine.NULL if null else next(_streams)
        self.device_id = -1 if null else runtime.getDevice()

    def _on(self, device):
        """Return the stream as the machine names it, for work that is queued while a device is the current one."""
        if self.device_id not in (-1, device):
            raise runtime.CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        return device, self.ptr

    def __enter__(self):
        current = runtime.getDevice()
        device = current if self.device_id == -1 else self.device_id
        if device != current:
            raise RuntimeError(f"The stream is of device {device}, not of the current one, {current}")
        _state().streams[device].append(self)
        _state().stack.append(device)
        return self

    def __exit__(self, *args):
        _state().streams[_state().stack.pop()].pop()

    def record(self, event=None):
        event = Event() if event is None else event
        stream = self._on(runtime.getDevice())
        if event._device != stream[0]:
            raise runtime.CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        event._clock = _machine.snapshot(stream)
        return event

    def wait_event(self, event):
        _machine.wait(self._on(runtime.getDevice()), event._clock)

    def synchronize(self):
        _machine.synchronize()
        _machine.wait(None, _machine.snapshot(self._on(runtime.getDevice() if self.device_id < 0 else self.device_id)))


Stream.null = Stream(null=True)


def get_current_stream(device_id=-1):
    """Return the current stream of a device; by default, of the current device."""
    return _state().streams[runtime.getDevice() if device_id == -1 else device_id][-1]


class MemoryPointer:
    """An address in a block of memory."""

    def __init__(self, mem, offset):
        self.mem, self.ptr, self.device_id = mem, mem.address + offset, mem.device

    @property
    def device(self):
        return Device(self.device_id)

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.address + offset)


def alloc(size):
    """Return new memory on the current device."""
    device = runtime.getDevice()
    return MemoryPointer(_machine.Block(size, device, get_current_stream()._on(device)), 0)


class MemoryPool:
    """Gives memory to new arrays."""

    def malloc(self, size):
        return alloc(size)


_pool = MemoryPool()


def get_allocator():
    """Return the function that new arrays get their memory from."""
    return _pool.malloc


def _launch(reads, writes):
    """Record a kernel on the current device and stream. Arrays of other devices raise: there is no peer access."""
    device = runtime.getDevice()
    for x in (*reads, *writes):
        if x.data.device_id != device:
            raise ValueError(f"An array of device {x.data.device_id} on device {device}: there is no peer access.")
    _queue(reads, writes)


def _queue(reads, writes):
    """Record work on the current stream of the current device that may access memory of any device."""
    stream = get_current_stream()._on(runtime.getDevice())
    for x in reads:
        x.data.mem.access(stream, False)
    for x in writes:
        x.data.mem.access(stream, True)
