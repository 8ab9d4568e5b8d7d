"""Callers of the fake CUDA driver: random programs, whose order is recomputed."""

import ctypes
import re

from cuda_launches import Tensor, packed
from fake_cuda import NON_BLOCKING

SUM = b"sum_f32_any"
NAME = re.compile(r"\((op\d+)\)")


class Caller:
    """Calls the fake driver, on some devices, and keeps the objects that it made."""

    def __init__(self, driver, devices):
        self.driver, self.made = driver, {}
        self.call("cuInit", 0)
        self.contexts = [self.give("cuDevicePrimaryCtxRetain", device) for device in range(devices)]

    def call(self, name, *arguments, gives=0):
        """Call a function, which must return a code."""
        code = getattr(self.driver.lib, name)(*arguments)
        assert code == gives, (name, code, self.driver.report())

    def give(self, name, *arguments, gives=0, kind=ctypes.c_void_p):
        """Call a function whose first parameter is the address of its result; return that."""
        result = kind()
        self.call(name, ctypes.byref(result), *arguments, gives=gives)
        return result.value

    def capture_status(self, stream):
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.byref(status))
        return status.value

    def use(self, device):
        self.call("cuCtxSetCurrent", self.contexts[device])

    def stream(self, device, flags=NON_BLOCKING):
        self.use(device)
        return self.give("cuStreamCreate", flags)

    def event(self, device):
        self.use(device)
        return self.give("cuEventCreate", 2)

    def function(self, device, name=SUM):
        self.use(device)
        module = self.made.get(device) or self.give("cuModuleLoadData", b"image")
        self.made[device] = module
        return self.give("cuModuleGetFunction", module, name)

    def launch(self, function, stream, sources, results, size, gives=0, change=lambda launch: launch):
        """Launch a sum of float32 arrays at these addresses; the current context must be the function's."""
        launch = packed([Tensor(size, 0, list(sources), list(results))], [(0, 0, 0, 0)], 1, 1, (4, 4, 4))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(kept := ctypes.create_string_buffer(change(launch))))
        self.call("cuLaunchKernel", function, 5, 1, 1, 256, 1, 1, 0, stream, parameters, None, gives=gives)
        del kept

    def order(self, event, before, after):
        """Let a stream wait for another one."""
        self.call("cuEventRecord", event, before)
        self.call("cuStreamWaitEvent", after, event, 0)


class Program:
    """A random program of copies over streams of two devices, and an independent computation of its order.

    A place is a bit mask: the operations that are complete once it is reached.
    """

    def __init__(self, driver, draw):
        self.driver, self.draw, self.caller = driver, draw, Caller(driver, 2)
        for device in range(2):
            self.caller.use(device)
            self.caller.call("cuCtxEnablePeerAccess", self.caller.contexts[1 - device], 0)
        flags = [NON_BLOCKING, NON_BLOCKING, 0, 0]
        self.streams = [(device, flag, self.caller.stream(device, flag)) for device in range(2) for flag in flags]
        self.streams += [(device, 0, None) for device in range(2)]  # the default streams
        self.events = [(device, self.caller.event(device)) for device in range(2) for _ in range(3)]
        self.places, self.recorded, self.host = [0] * len(self.streams), [None] * 6, 0
        self.memory = [driver.memory(64, int(device)) for device in (0, 1)]
        self.model = [bytearray(b"\xa5" * 64), bytearray(b"\xa5" * 64)]
        self.operations = []

    def reach(self, s):
        """Update the place of a stream by its implicit waits."""
        device, flags, handle = self.streams[s]
        self.places[s] |= self.host
        for other, (its_device, its_flags, its_handle) in enumerate(self.streams):
            blocking = flags == its_flags == 0 and device == its_device
            if blocking and (handle is None) != (its_handle is None):
                self.places[s] |= self.places[other]

    def accesses(self):
        """Draw what a copy reads and writes: (memory, begin, nbytes) of each."""
        nbytes = int(self.draw.integers(1, 9))
        source, target = (int(self.draw.integers(0, 2)) for _ in range(2))
        begin, end = int(self.draw.integers(0, 24)), int(self.draw.integers(32, 56))
        return (source, begin, nbytes), (target, end if self.draw.random() < 0.7 else begin + 9, nbytes)

    def step(self):
        """Do something random."""
        s = int(self.draw.integers(0, len(self.streams)))
        device, _, handle = self.streams[s]
        self.caller.use(device)
        kind = self.draw.choice(["copy"] * 4 + ["record"] * 4 + ["wait"] * 4 + ["sync", "host"])
        if kind == "copy":
            read, write = self.accesses()
            bit = self.operation([(*read, False), (*write, True)], s)
            to, source = (self.memory[m] + begin for m, begin, _ in (write, read))
            self.caller.call("cuMemcpyAsync", to, source, read[2], handle)
            self.model[write[0]][write[1] : write[1] + write[2]] = self.model[read[0]][read[1] : read[1] + read[2]]
            self.places[s] |= bit
        elif kind == "record":
            e = int(self.draw.choice([k for k, (on, _) in enumerate(self.events) if on == device]))
            self.reach(s)
            self.caller.call("cuEventRecord", self.events[e][1], handle)
            self.recorded[e] = self.places[s]
        elif kind == "wait":
            e = int(self.draw.integers(0, 6))
            if self.recorded[e] is not None:
                self.reach(s)
                self.caller.call("cuStreamWaitEvent", handle, self.events[e][1], 0)
                self.places[s] |= self.recorded[e]
        elif kind == "sync":
            self.reach(s)
            self.caller.call("cuStreamSynchronize", handle)
            self.host |= self.places[s]
        else:
            m, begin, nbytes = self.accesses()[0]
            writes = bool(self.draw.random() < 0.5)
            bit = self.operation([(m, begin, nbytes, writes)], None)
            self.driver.host_access(self.memory[m] + begin, nbytes, writes)
            self.host |= bit

    def operation(self, accesses, s):
        if s is not None:
            self.reach(s)
        self.driver.label(f"op{len(self.operations)}")
        self.operations.append((accesses, self.host if s is None else self.places[s]))
        return 1 << (len(self.operations) - 1)

    def unordered(self):
        """Return the pairs of operations that conflict and are not ordered."""
        pairs = set()
        for j, (accesses, before) in enumerate(self.operations):
            for i in range(j):
                if not before >> i & 1 and any(
                    a[0] == b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2] and (a[3] or b[3])
                    for a in self.operations[i][0]
                    for b in accesses
                ):
                    pairs.add((f"op{i}", f"op{j}"))
        return pairs

    def check(self):
        """Compare the report and the bytes with this account; return whether all was ordered."""
        self.driver.label("")
        self.driver.run()
        right = self.unordered()
        lines = self.driver.report()
        assert all(line.startswith("not ordered: ") for line in lines), lines
        found = {tuple(NAME.findall(line)) for line in lines}
        assert found <= right
        assert {second for _, second in found} == {second for _, second in right}
        assert bool(found) == bool(right)
        if not right:
            assert [self.driver.read(each, 64) for each in self.memory] == [bytes(each) for each in self.model]
        return not right
