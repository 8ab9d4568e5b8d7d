"""Pretends that torch's tensors in host memory are on CUDA devices. ``fake_nccl.c`` reports every misuse of NCCL."""

import ctypes
import subprocess
import threading

import torch
from paths import NATIVE

import crossreduce as cr
from crossreduce import values
from crossreduce.engines import nccl, nccl_library
from crossreduce.engines.cuda import torch as torch_memory
from crossreduce.frameworks.torch import arrays as torch_framework
from crossreduce.reduction import pipeline

SOURCE = NATIVE / "fake_nccl.c"


def built(folder, *flags):
    """Compile the stand-in for NCCL, and return its path."""
    path = folder / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    path.parent.mkdir(parents=True)
    warnings = ("-Wall", "-Wextra", "-Werror")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-pthread", *warnings, *flags, SOURCE, "-o", path], check=True)
    return path


class HostMemory(torch_memory.TorchDeviceMemory):
    """torch's ``DeviceMemory``, with tensors in host memory. Each thread has streams of its own."""

    def __init__(self, path):
        self.fake = ctypes.CDLL(str(path))
        self.fake.fake_own.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int
        self.fake.fake_owner.argtypes = ctypes.c_size_t, ctypes.c_size_t
        self.fake.fake_report.restype = self.fake.fake_called.restype = ctypes.c_char_p
        self.threads = threading.local()
        self.kept = []

    def put(self, x, device):
        """Record that a tensor is on a device, and return the tensor."""
        storage = x.untyped_storage()
        self.fake.fake_own(storage.data_ptr(), storage.nbytes(), device)
        self.kept.append(x)
        return x

    def device(self, x):
        """Return the number of a tensor's device, or -1 if it is in host memory."""
        return self.fake.fake_owner(x.data_ptr(), 1)

    def are_on(self, arrays, devices):
        return all(
            self.device(x) == device for row in arrays for x, device in zip(row, devices, strict=True) if x.numel()
        )

    def operands(self, arrays, devices):
        found = super().operands(arrays, devices)
        for row in found.arrays if found else ():
            for x, device in zip(row, devices, strict=True):
                if self.device(x) != device:
                    self.put(x, device)
        return found

    def allocate(self, shape, dtype, device):
        return self.put(super().allocate(shape, dtype, device), device)

    def block(self, dtype, nbytes, device):
        return self.put(super().block(dtype, nbytes, device), device)

    def _device(self, number):
        return torch.device("cpu")

    def stream(self, device):
        return (device + 1) * 4096 + getattr(self.threads, "number", 0)

    def called(self):
        """Return the names of the functions that were called since the last call of this method, and forget them."""
        names = self.fake.fake_called().decode().split()
        self.fake.fake_forget()
        return names


def install(monkeypatch, path):
    """Replace NCCL and torch's devices by stand-ins, and return the ``HostMemory``."""
    memory = HostMemory(path)
    memory.fake.fake_reset()
    monkeypatch.setattr(torch_framework, "_place", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch_framework, "_require", lambda devices: None)
    monkeypatch.setattr(torch_memory, "_are_on", memory.are_on)
    found = values.locate

    def locate(x):
        return f"cuda:{memory.device(x)}" if isinstance(x, torch.Tensor) and memory.device(x) >= 0 else found(x)

    monkeypatch.setattr(values, "locate", locate)
    monkeypatch.setattr(pipeline, "locate", locate)
    known = nccl.device_memory
    monkeypatch.setattr(nccl, "device_memory", lambda name: memory if name == "torch" else known(name))
    monkeypatch.setattr(nccl_library, "_candidates", lambda: [(str(path), 0)])
    for cache in (nccl_library._open, nccl._refusal, nccl._wrong_devices, pipeline._compile, pipeline.log_once):
        cache.cache_clear()
    return memory


def on(*devices):
    """Return destinations on CUDA devices."""
    return cr.PerReplica([0] * len(devices), [f"cuda:{k}" for k in devices])
