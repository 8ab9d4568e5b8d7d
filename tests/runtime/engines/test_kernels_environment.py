"""The environment variables of the kernels, and their instruction set."""

import logging
import os
import sys

import numpy as np
import pytest
from kernel_cases import SETS, reduction, run_python

from crossreduce import ArgumentError, BackendError, kernels


@pytest.fixture
def cpus(monkeypatch):
    """Make the process have six CPUs, and no variable that sets the number of threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for name in ("CROSSREDUCE_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


def test_threads_default_to_the_cpus_of_the_process(cpus, monkeypatch):
    """By default there is one thread for each CPU that the process may use."""
    assert kernels.threads() == 6
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert kernels.threads() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert kernels.threads() == 1


@pytest.mark.parametrize(
    ("own", "openmp", "threads"),
    [
        ("2", None, 2), ("64", None, 64), (" 3 ", "1", 3), ("4096", "nonsense", 4096),  # OMP_NUM_THREADS is not read
        (None, "2", 2), (None, "64", 6), (None, "2,8", 2), ("", "", 6), ("", "1", 1),
    ],
)  # fmt: skip
def test_the_environment_sets_the_number_of_threads(cpus, monkeypatch, own, openmp, threads):
    """``CROSSREDUCE_NUM_THREADS`` takes precedence. ``OMP_NUM_THREADS`` can only reduce the number."""
    for name, text in (("CROSSREDUCE_NUM_THREADS", own), ("OMP_NUM_THREADS", openmp)):
        if text is not None:
            monkeypatch.setenv(name, text)
    assert kernels.threads() == threads


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "4097", "9" * 30, "9" * 5000, "²", "٣"])
def test_an_invalid_number_of_threads_is_an_error(cpus, monkeypatch, text):
    """The error names the variable and the accepted values. An invalid ``OMP_NUM_THREADS`` is ignored."""
    name = "CROSSREDUCE_NUM_THREADS"
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=rf"{name} must be an integer from 1 to 4096[\s\S]*try:   {name}=4"):
        kernels.threads()
    monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert kernels.threads() == 6


@pytest.fixture
def fresh(monkeypatch):
    """Make this process choose the kernels again, during the test and after it."""
    monkeypatch.setattr(kernels, "_NATIVE", [])
    kernels.instruction_set.cache_clear()
    yield monkeypatch
    kernels.instruction_set.cache_clear()


def module_of_a_kernel():
    """Return the name of the module of a new kernel, after it has computed a mean into memory of the library."""
    case = reduction("mean", "float16", "float32", "float16", 2, 3)
    kernel = kernels.compile_kernel(*case)
    memory = kernels.memory(6)
    assert np.frombuffer(memory, np.uint8).ctypes.data % 64 == 0
    sources = [np.float16([1, 2, 40000]), np.float16([3, 4, 40000])]
    assert kernel.run([sources], [[memory]], 2, True, True) is None  # 2 threads, streaming stores, finds overlaps
    assert np.frombuffer(memory, "float16").tolist() == [2, 3, 40000]
    return type(kernel).__module__


@pytest.mark.parametrize("name", ["", *SETS, "numpy"])
def test_the_environment_names_the_instruction_set(fresh, caplog, name):
    """Each supported instruction set, and NumPy, can be selected. The default is the first set. Nothing is logged."""
    fresh.setenv("CROSSREDUCE_KERNELS", name)
    with caplog.at_level(logging.DEBUG, "crossreduce"):
        assert kernels.instruction_set() == (name or SETS[0])
        assert module_of_a_kernel() == "crossreduce.kernels." + ("reference" if name == "numpy" else "_native")
    assert caplog.records == []


WRONG = r"CROSSREDUCE_KERNELS names kernels that this machine or this build cannot run"


@pytest.mark.parametrize("name", ["sse9", "AVX2", "auto", "avx2 "])
def test_an_unknown_instruction_set_is_an_error(fresh, name):
    """The message contains the given name and the accepted names."""
    fresh.setenv("CROSSREDUCE_KERNELS", name)
    with pytest.raises(BackendError, match=rf"{WRONG}[\s\S]*{name}[\s\S]*{', '.join(SETS)}, numpy"):
        kernels.instruction_set()


def test_without_the_extension_numpy_is_used_and_logged_once(fresh, caplog):
    """Without the compiled extension the kernels in NumPy run, and the reason is logged once, at INFO. The error of
    another name lists NumPy as the only accepted one."""
    fresh.setitem(sys.modules, "crossreduce.kernels._native", None)
    with caplog.at_level(logging.DEBUG, "crossreduce"):
        for _ in range(2):
            assert kernels.instruction_set() == "numpy"
            assert module_of_a_kernel() == "crossreduce.kernels.reference"
        assert kernels.memory_usage() == {"live": 0, "pooled": 0, "peak": 0}
        kernels.empty_cache()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("crossreduce", "INFO")
    assert record.getMessage().startswith("the compiled kernels are not installed (")
    assert record.getMessage().endswith("); NumPy is used instead")
    fresh.setenv("CROSSREDUCE_KERNELS", "avx2")
    kernels.instruction_set.cache_clear()
    with pytest.raises(BackendError, match=rf"{WRONG}[\s\S]*  try:   one of numpy$"):
        kernels.instruction_set()


def test_nothing_is_printed_by_default():
    """A program that does not configure logging prints nothing, also where the compiled extension is missing."""
    done = run_python(
        "import sys\nsys.modules['crossreduce.kernels._native'] = None\n"
        "from crossreduce import kernels\nassert kernels.instruction_set() == 'numpy'"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
