"""The environment variables of the kernels, their instruction set, and the pool of result memory."""

import json
import os

import numpy as np
import pytest
from kernel_cases import SETS, run_python

from crossreduce import ArgumentError, BackendError, kernels
from crossreduce.kernels import reference


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
found = out.tolist(), address % 64, len(memory), kernels.usage(), logged
kernels.empty_cache()
print(json.dumps((kernels.instruction_set(), type(kernel).__module__, *found)))
"""


def test_the_best_instruction_set_is_the_default():
    """Unless the environment names another, the first supported instruction set is used, and nothing is logged."""
    name, module, out, offset, size, usage, logged = json.loads(run_python(REDUCE).stdout)
    assert name == SETS[0]
    assert module == "crossreduce.kernels._native"
    assert (out, offset, size, logged) == ([2, 3, 40000], 0, 1000, [])
    assert usage["peak"] >= usage["live"] >= 1000


@pytest.mark.parametrize("name", [*SETS, "numpy"])
def test_the_environment_names_the_instruction_set(name):
    """Each supported instruction set can be selected, and NumPy."""
    used, module, out, *_ = json.loads(run_python(REDUCE, CROSSREDUCE_KERNELS=name).stdout)
    assert used == name
    assert module == "crossreduce.kernels." + ("reference" if name == "numpy" else "_native")
    assert out == [2, 3, 40000]


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
    """Without the compiled extension the kernels in NumPy run, and the reason is logged once, at INFO."""
    done = run_python(ABSENT + REDUCE)
    name, module, out, offset, size, usage, logged = json.loads(done.stdout)
    assert (name, module) == ("numpy", "crossreduce.kernels.reference")
    assert (out, offset, size, usage) == ([2, 3, 40000], 0, 1000, {"live": 0, "pooled": 0, "peak": 0})
    ((logger, level, text),) = logged
    assert (logger, level) == ("crossreduce", "INFO")
    assert "the compiled kernels are not installed" in text
    assert "NumPy is used instead" in text
    assert done.stderr == ""


def test_without_the_extension_no_compiled_instruction_set_is_accepted():
    """Without the extension, the error lists NumPy as the only accepted name."""
    code = "from crossreduce import kernels; kernels.instruction_set()"
    done = run_python(ABSENT + code, CROSSREDUCE_KERNELS=SETS[0])
    assert "BackendError: CROSSREDUCE_KERNELS names kernels that this machine or this build cannot run." in done.stderr
    assert "try:   one of numpy\n" in done.stderr


def test_nothing_is_printed_by_default():
    """A program that does not configure logging prints nothing."""
    done = run_python(ABSENT + "from crossreduce import kernels; kernels.instruction_set()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Result memory


def address(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data if len(memory) else 0


@pytest.mark.parametrize("allocate", [kernels.memory, reference.memory], ids=["kernels", "reference"])
def test_memory_is_aligned_and_writable(allocate):
    """Memory has the requested size, starts at a cache line, and is shared with no other memory."""
    for nbytes in (0, 1, 63, 64, 65, 1000, 4096, (1 << 21) - 1, 1 << 21, (1 << 22) + 5):
        blocks = [allocate(nbytes) for _ in range(3)]
        for k, memory in enumerate(blocks):
            view = memoryview(memory)
            assert (view.nbytes, view.readonly, len(memory)) == (nbytes, False, nbytes)
            assert address(memory) % 64 == 0
            np.frombuffer(memory, np.uint8)[:] = k
        for k, memory in enumerate(blocks):
            assert bytes(memory) == bytes([k]) * nbytes


@pytest.mark.parametrize(
    ("size", "fault"),
    [
        (-1, "negative"),
        ("1", "integer"),
        (1.5, "integer"),
        (None, "integer"),
        (1 << 70, "too large|too big|cannot fit"),
    ],
)
def test_memory_of_an_invalid_size_is_refused(size, fault):
    """A size that is negative, too large or not an integer raises."""
    with pytest.raises((ValueError, TypeError, OverflowError), match=fault):
        kernels.memory(size)


def test_an_allocation_that_fails_raises():
    """If the system has not enough memory, ``MemoryError`` is raised and the usage does not change."""
    before = kernels.usage()["live"]
    with pytest.raises(MemoryError):
        kernels.memory(1 << 62)
    assert kernels.usage()["live"] == before


def test_freed_memory_is_reused():
    """The next request of the same size receives the freed memory; a request of another size does not."""
    kernels.memory(1 << 20)  # raises the peak of memory in use, up to which memory is pooled
    kernels.empty_cache()
    first = kernels.memory(123_457)
    freed = address(first)
    before = kernels.usage()
    del first
    assert kernels.usage()["pooled"] == before["pooled"] + 123_457
    assert address(kernels.memory(123_456)) != freed
    again = kernels.memory(123_457)
    assert address(again) == freed
    assert kernels.usage()["live"] == before["live"]


def test_a_view_keeps_its_memory():
    """Memory is not reused while an array uses it."""
    array = np.frombuffer(kernels.memory(77_777), np.uint8)
    array[:] = 3
    others = [kernels.memory(77_777) for _ in range(3)]
    assert array.ctypes.data not in map(address, others)
    assert (array == 3).all()


def test_the_pool_can_be_emptied():
    """``empty_cache`` frees all pooled memory and no memory in use."""
    used = kernels.memory(5000)
    np.frombuffer(used, np.uint8)[:] = 9
    for nbytes in (0, 1, 100, 1 << 22):
        kernels.memory(nbytes)
    kernels.empty_cache()
    assert kernels.usage()["pooled"] == 0
    assert bytes(used) == b"\t" * 5000


ALLOCATE = """
import random
import numpy as np
from crossreduce import kernels

random.seed({seed})
live, peak = [], 0
for _ in range(2000):
    action = random.random()
    if action < 0.45 or not live:
        live.append(kernels.memory(random.choice([0, 1, 64, 1000, 1000, 5000, 70_000, 3_000_000])))
    elif action < 0.9:
        live.pop(random.randrange(len(live)))
    elif action < 0.98:
        del live[random.randrange(len(live)) :]
    else:
        kernels.empty_cache()
    usage, total = kernels.usage(), sum(map(len, live))
    peak = max(peak, total)
    assert (usage["live"], usage["peak"]) == (total, peak), (usage, total, peak)
    assert usage["live"] + usage["pooled"] <= usage["peak"], usage
    starts = sorted((np.frombuffer(x, np.uint8).ctypes.data, len(x)) for x in live if len(x))
    assert all(a + n <= b for (a, n), (b, _) in zip(starts, starts[1:]))
"""


@pytest.mark.parametrize("seed", range(3))
def test_pooled_memory_and_memory_in_use_never_exceed_the_peak(seed):
    """The library never holds more memory than was once in use, and no two blocks overlap."""
    done = run_python(ALLOCATE.format(seed=seed))  # in a new process, whose peak is that of these allocations
    assert (done.returncode, done.stderr) == (0, "")
