"""Entries of calls in the profilers of PyTorch and JAX, and NVTX ranges, of which no profiler of NVIDIA runs here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from command_line import run_python
from jax.profiler import ProfileData
from jax_programs import spread
from torch.profiler import ProfilerActivity, profile

import crossreduce as cr
import crossreduce.jax
from crossreduce.observe.profilers import PROFILERS
from crossreduce.observe.profilers.facts import call_facts


@pytest.fixture(autouse=True)
def _seen():
    PROFILERS.look()


def jax_entries(folder):
    """Return the entries of this library in the only profile of a folder: name, facts, start and duration."""
    (path,) = Path(folder).rglob("*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(path)).planes for line in plane.lines]
    events = [event for line in lines for event in line.events if event.name.startswith("crossreduce:")]
    found = [(event.name, dict(event.stats), event.start_ns, event.duration_ns) for event in events]
    return sorted(found, key=lambda each: each[2])


def test_eager_calls_on_jax_arrays_are_in_its_profile(tmp_path):
    """jax.profiler has an entry for each outermost call, with op, bytes, dtypes and replicas."""
    trees = [{"w": jnp.full((3, 5), k, "float32"), "n": jnp.arange(4, dtype="int32")} for k in range(3)]
    value = cr.PerReplica([jnp.ones(7, "float32")] * 2)
    cr.all_reduce(trees)
    with jax.profiler.trace(str(tmp_path)):
        cr.all_reduce(trees, "max")
        cr.ReductionToOneDevice().reduce("mean", value, value)
        cr.HierarchicalCopyAllReduce().batch_reduce("sum", [(value, value)])
        cr.CrossDeviceOps().broadcast(jnp.ones(2, "float32"), value)
        cr.CrossDeviceOps().gather(value, value, 0)
    cr.all_reduce(trees)  # not profiled
    found = jax_entries(tmp_path)
    names = ["all_reduce", "reduce", "batch_reduce", "broadcast", "gather"]
    assert [name for name, *_ in found] == [f"crossreduce:{name}" for name in names]
    facts = found[0][1]
    assert (facts["op"], int(facts["bytes"]), int(facts["replicas"])) == ("max", 60 + 16, 3)
    assert sorted(facts["dtypes"].split()) == ["float32", "int32"]
    assert [int(each[1]["bytes"]) for each in found[1:]] == [28, 28, 8, 28]
    assert sum(duration for *_, duration in found) > 0


def test_names_in_compiled_jax_programs():
    """Under jit, the operations of all_reduce have its name in the compiled program."""
    program = jax.jit(spread(lambda x: crossreduce.jax.all_reduce(x, "d", "mean", algorithm="ring"), 2))
    text = program.lower(jnp.ones(2)).as_text(debug_info=True)
    assert "crossreduce:all_reduce" in text


def test_calls_in_one_process_are_in_torch_profiles():
    """torch.profiler has an entry for each outermost call, with the tensors' shapes, prepared calls included."""
    xs = [torch.ones(6, 5), torch.ones(6, 5)]
    cr.all_reduce(xs)
    cr.all_reduce(xs)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        for _ in range(3):
            cr.all_reduce(xs)
        cr.all_reduce([np.ones(2), np.ones(2)])
    cr.all_reduce(xs)
    entries = [event for event in found.events() if event.name.startswith("crossreduce:")]
    assert [event.name for event in entries] == ["crossreduce:all_reduce"] * 4
    assert [list(shape) for shape in entries[0].input_shapes] == [[6, 5], [6, 5]]
    assert all(event.cpu_time_total > 0 for event in entries)


def test_errors_are_those_without_a_profiler():
    """A call with invalid arguments raises the same error while a profiler is on, and later calls have entries."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for trees, match in (([], "at least one"), (3, "must be a list"), ([np.ones(2), np.ones(3)], "differ")):
            with pytest.raises(cr.ArgumentError, match=match):
                cr.all_reduce(trees)
        pairs = iter([(cr.PerReplica([torch.ones(2), torch.ones(2)]), "cpu:0")])
        (result,) = cr.ReductionToOneDevice().batch_reduce("sum", pairs)
        assert result[0].tolist() == [2, 2]
    names = [event.name for event in found.events() if event.name.startswith("crossreduce:")]
    assert names == ["crossreduce:all_reduce"] * 3 + ["crossreduce:batch_reduce"]


class Fitted(NamedTuple):
    """A tree with a field of a name that distributed values have, too."""

    values: object
    bias: object


@pytest.mark.parametrize(
    ("trees", "nbytes"),
    [
        ([torch.eye(3).to_sparse()] * 2, 0),
        ([Fitted(torch.tensor(1.0), torch.ones(2))] * 2, 12),
        ([Fitted(None, torch.ones(2))] * 2, 8),
        (Fitted(torch.ones(10), torch.ones(10)), 40),
        ([{"s": cr.IndexedSlices(np.ones((1, 4)), np.array([3]), (9, 4))}] * 2, 40),
    ],
)
def test_a_profiler_does_not_make_calls_fail(trees, nbytes):
    """A call on values of any kind that the library accepts gives the same result while a profiler is on."""
    plain = cr.all_reduce(trees)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        profiled = cr.all_reduce(trees)
    assert str(profiled) == str(plain)
    (name,) = [event.name for event in found.events() if event.name.startswith("crossreduce:")]
    assert name == "crossreduce:all_reduce"
    assert call_facts("all_reduce", "sum", trees).nbytes == nbytes


NVTX = """
#include <stdio.h>
int nvtxRangePushA(const char *name) { printf("push %s\\n", name); fflush(stdout); return 0; }
int nvtxRangePop(void) { printf("pop\\n"); fflush(stdout); return 0; }
"""
CALLS = """
import sys
sys.modules["nvtx"] = None  # the package need not be installed
import numpy as np
import crossreduce as cr
for k in range(2):
    cr.all_reduce([np.ones(8, np.float32)] * 2)
try:
    cr.all_reduce([np.ones(8), np.ones(9)])
except cr.MismatchError:
    print("raised", flush=True)
"""
RANGES = ["push crossreduce:all_reduce sum 32 B float32 x2", "pop"] * 2
RANGES += ["push crossreduce:all_reduce sum 68 B float64 x2", "pop", "raised"]


@pytest.fixture(scope="module")
def nvtx_library(tmp_path_factory):
    """Return a folder with a stand-in for NVIDIA's library, which prints its calls."""
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "nvtx.c").write_text(NVTX)
    command = ["cc", "-shared", "-fPIC", "-o", folder / "libnvToolsExt.so.1", folder / "nvtx.c"]
    subprocess.run(command, check=True)
    return str(folder)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CROSSREDUCE_NVTX": "1"}, RANGES),
        ({"NVTX_INJECTION64_PATH": "/a/profiler"}, RANGES),
        ({"NVTX_INJECTION64_PATH": "/a/profiler", "CROSSREDUCE_NVTX": "0"}, ["raised"]),
    ],
)
def test_nvtx_ranges(nvtx_library, variables, expected):
    """If ranges are on, each call pushes and pops one, prepared or not, also if it raises. Otherwise no call does."""
    ran = run_python(CALLS, LD_LIBRARY_PATH=nvtx_library, **variables)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == expected


def test_nvtx_without_a_library_and_by_nvidias_package():
    """If ranges are wanted and NVTX is missing, calls run, with one warning. The package nvtx is called if it is
    installed and ranges are wanted."""
    ran = run_python(CALLS, CROSSREDUCE_NVTX="1")
    assert ran.stdout.splitlines() == ["raised"]
    assert ran.stderr.count("NVTX is not installed") == 1
    package = """from types import SimpleNamespace
push, pop = (lambda name: print("push", name, flush=True)), (lambda: print("pop", flush=True))
sys.modules["nvtx"] = SimpleNamespace(push_range=push, pop_range=pop)"""
    calls = CALLS.replace('sys.modules["nvtx"] = None', package)
    assert run_python(calls, CROSSREDUCE_NVTX="1").stdout.splitlines() == RANGES
    assert run_python(calls).stdout.splitlines() == ["raised"]


def test_frameworks_that_are_imported_later_are_found():
    """A profiler is found in the first call after its framework is imported, or at the latest after the next call that
    runs in Python, not in compiled code. No call imports a framework."""
    code = """
import json, sys
import numpy as np
import crossreduce as cr
from crossreduce.observe.profilers import PROFILERS
cr.all_reduce([np.ones(2)] * 2)
found = [len(PROFILERS.found), "torch" in sys.modules]
import torch
cr.all_reduce([torch.ones(2)] * 2)
print(json.dumps([*found, len(PROFILERS.found), PROFILERS.unseen, PROFILERS.are_on()]))
"""
    ran = run_python(code)
    # Before torch is imported there are no profilers. Afterwards there is torch's, which is off. JAX is not imported.
    assert json.loads(ran.stdout) == [0, False, 1, ["jax"], False], ran.stderr
    imported = run_python("import crossreduce, sys; print(*sys.modules)").stdout
    assert "crossreduce.observe.profilers.torch" not in imported
    assert sys.modules["crossreduce.observe.profilers.torch"] in PROFILERS.found
