"""The environment variables of the kernels, and their instruction set."""

import json
import os

import pytest
from kernel_cases import SETS, run_python

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
        ("2", None, 2),
        ("64", None, 64),
        (" 3 ", "1", 3),
        ("4096", "nonsense", 4096),  # OMP_NUM_THREADS is not read
        (None, "2", 2),
        (None, "64", 6),
        (None, "2,8", 2),
        ("", "", 6),
        ("", "1", 1),
    ],
)
def test_the_environment_sets_the_number_of_threads(cpus, monkeypatch, own, openmp, threads):
    """``CROSSREDUCE_NUM_THREADS`` takes precedence; ``OMP_NUM_THREADS`` can only reduce the number."""
    for name, text in (("CROSSREDUCE_NUM_THREADS", own), ("OMP_NUM_THREADS", openmp)):
        if text is not None:
            monkeypatch.setenv(name, text)
    assert kernels.threads() == threads


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "4097", "9" * 30, "9" * 5000, "²", "٣"])
def test_an_invalid_number_of_threads_is_an_error(cpus, monkeypatch, text):
    """The message names the variable and the accepted values; an invalid ``OMP_NUM_THREADS`` is ignored."""
    name = "CROSSREDUCE_NUM_THREADS"
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentError, match=rf"{name} must be an integer from 1 to 4096[\s\S]*try:   {name}=4"):
        kernels.threads()
    monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert kernels.threads() == 6


REDUCE = """
import json, logging
import numpy as np
logged = []
class Handler(logging.Handler):
    def emit(self, record):
        logged.append((record.name, record.levelname, record.getMessage()))
logging.getLogger("crossreduce").addHandler(Handler())
logging.getLogger("crossreduce").setLevel(logging.DEBUG)
from crossreduce import kernels
halves = "float16", "float32", "float16"
program = kernels.FusedProgram(1, ((0, 0, 1),), (~0,))
for _ in range(2):
    kernel = kernels.compile_kernel("sum", halves, 2, 2, 1, (3,), (program,), (kernels.Segment(0, 0, 3, 0),))
    out = np.zeros(3, "float16")
    assert kernel.run([[np.float16([1, 2, 40000]), np.float16([3, 4, 40000])]], [[out]], 2, True, True) is None
memory = kernels.memory(1000)
address = np.frombuffer(memory, np.uint8).ctypes.data
found = out.tolist(), address % 64, len(memory), kernels.memory_usage(), logged
kernels.empty_cache()
print(json.dumps((kernels.instruction_set(), type(kernel).__module__, *found)))
"""


@pytest.mark.parametrize("name", ["", *SETS, "numpy"])
def test_the_environment_names_the_instruction_set(name):
    """Each supported instruction set can be selected, and NumPy; the default is the first one. Nothing is logged."""
    done = run_python(REDUCE, **({"CROSSREDUCE_KERNELS": name} if name else {}))
    used, module, *found, usage, logged = json.loads(done.stdout)
    assert used == (name or SETS[0])
    assert module == "crossreduce.kernels." + ("reference" if name == "numpy" else "_native")
    assert found == [[2, 3, 40000], 0, 1000]
    assert logged == []
    assert usage["peak"] >= usage["live"] >= (0 if name == "numpy" else 1000)


@pytest.mark.parametrize("name", ["sse9", "AVX2", "auto", "avx2 "])
def test_an_unknown_instruction_set_is_an_error(monkeypatch, name):
    """The message contains the given name and the accepted names."""
    monkeypatch.setenv("CROSSREDUCE_KERNELS", name)
    text = (
        r"CROSSREDUCE_KERNELS names kernels that this machine or this build cannot run"
        rf"[\s\S]*{name}[\s\S]*{', '.join(SETS)}, numpy"
    )
    kernels.instruction_set.cache_clear()
    try:
        with pytest.raises(BackendError, match=text):
            kernels.instruction_set()
    finally:
        kernels.instruction_set.cache_clear()


ABSENT = "import sys\nsys.modules['crossreduce.kernels._native'] = None\n"


def test_without_the_extension_numpy_is_used_and_logged_once():
    """Without the compiled extension the kernels in NumPy run, and the reason is logged once, at INFO. The error of
    another name lists NumPy as the only accepted one."""
    code = "\ntry:\n    os.environ['CROSSREDUCE_KERNELS'] = 'avx2'\n    kernels.instruction_set.cache_clear()\n"
    code += "    kernels.instruction_set()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    done = run_python("import os\n" + ABSENT + REDUCE + code)
    first, *error = done.stdout.splitlines()
    name, module, out, offset, size, usage, logged = json.loads(first)
    assert (name, module) == ("numpy", "crossreduce.kernels.reference")
    assert (out, offset, size, usage) == ([2, 3, 40000], 0, 1000, {"live": 0, "pooled": 0, "peak": 0})
    ((logger, level, text),) = logged
    assert (logger, level) == ("crossreduce", "INFO")
    assert "the compiled kernels are not installed" in text
    assert "NumPy is used instead" in text
    assert done.stderr == ""
    assert error[0].startswith(
        "BackendError CROSSREDUCE_KERNELS names kernels that this machine or this build cannot run"
    )
    assert error[-1] == "  try:   one of numpy"


def test_nothing_is_printed_by_default():
    """A program that does not configure logging prints nothing."""
    done = run_python(ABSENT + "from crossreduce import kernels; kernels.instruction_set()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
