"""The invariants of the architecture, checked in the source and in new processes."""

import ast
import doctest
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter

import frameworks
import paths
import pytest
from imports import FILES, imports, name, tree

import crossreduce

FRAMEWORKS = ("numpy", "torch", "jax", "tensorflow", "cupy")
# The top-level packages of each framework; ml_dtypes gives NumPy its bfloat16.
PACKAGES = {
    "numpy": {"numpy", "ml_dtypes"},
    "torch": {"torch"},
    "jax": {"jax", "jaxlib"},
    "tensorflow": {"tensorflow", "keras"},
    "cupy": {"cupy", "cupyx"},
}

# Lowest first: a file imports from its own top-level file or folder and from lower floors, never from others.
FLOORS = (
    *(("errors", "autograph", "progress", "chrome_trace"), ("threads",), ("ops", "devices"), ("kernels",), ("values",)),
    *(("topology",), ("packing",), ("observe",), ("frameworks",), ("schedule",), ("planning",), ("options",)),
    *(("lowering",), ("export",), ("engines",), ("ranks",), ("trace",), ("reduction",), ("strategy",), ("processes",)),
    *(("torch", "jax", "tensorflow", "mpi"), ("torchft", "vllm"), ("cli",), ("__main__",)),
)
PURE = ("planning", "schedule", "topology")


def floor(module):
    """Return the position of a module's folder or file in ``FLOORS``."""
    top = module.split(".")[0]
    (found,) = [number for number, stories in enumerate(FLOORS) if top in stories]
    return found


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("info", "crossreduce INFO: b"),
        ("WARNING", ""),
        ("", ""),
        ("loud", "CROSSREDUCE_LOG must name a level of messages."),
    ],
)
def test_messages_go_to_standard_error_on_request(value, found):
    """CROSSREDUCE_LOG names the least level of the messages on standard error; another text is an error."""
    code = "import crossreduce, logging; log = logging.getLogger('crossreduce'); log.debug('a'); log.info('b')"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CROSSREDUCE_LOG": value},
    )
    assert (found in ran.stderr, bool(ran.stderr), ran.returncode) == (True, bool(found), int(value == "loud"))
    assert "DEBUG" not in ran.stderr


def test_imports_only_point_down():
    """A file imports only from its own top-level file or folder and from lower floors.

    Only cli, __main__, torch, jax and tensorflow import ``crossreduce`` itself.
    """
    wrong = []
    for path in FILES:
        own = name(path).split(".")[0]
        for module in imports(path) if own else ():
            if module == "crossreduce":
                allowed = own in ("cli", "__main__", "torch", "jax", "tensorflow")
            else:
                other = module.removeprefix("crossreduce.").split(".")[0]
                allowed = not module.startswith("crossreduce.") or other == own or floor(other) < floor(own)
            wrong += [] if allowed else [f"{name(path)} imports {module}"]
    assert wrong == []


# The standard library's modules that pure code may use: none of them does I/O or reads a clock.
HARMLESS = {
    *("bisect", "__future__", "collections", "contextlib", "dataclasses", "enum", "fractions", "numbers"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "re", "typing"),
}
# Pure code that computes with arrays, and solves linear programs or least-squares problems.
LP = "planning.optimal.few_step.tree_program"
STAGES = "planning.between_hosts.staged_shares"
WITH_SCIPY = ("planning.optimal.bounds.solver", "planning.optimal.bounds.steiner", "planning.calibration", LP, STAGES)
FEW_STEP = "planning.optimal.few_step.switch_routes"
ROUNDS = "planning.between_hosts.list_scheduler"
WITH_NUMPY = (*WITH_SCIPY, FEW_STEP, ROUNDS, "topology.automorphisms", "schedule.link_use", "schedule.clock")
# Further modules that single files of pure code need, each for one reason.
NEEDED = {module: {"numpy"} | ({"scipy"} if module in WITH_SCIPY else set()) for module in WITH_NUMPY} | {
    "topology.routes": {"threading"},  # a lock: threads may search routes of one topology at the same time
    "planning.explain": {"textwrap"},
    "planning.plans": {"os", "importlib"},  # the type of a path; report() finds the writer in export/ by its name
    "topology.machines": {"difflib"},  # finds the names that are nearest to a wrong one
    "topology.link_kinds": {"importlib"},  # reads the package's own data files
    "topology.formats": {"pathlib"},  # reads the given file
    "topology.topology_like": {"os", "pathlib"},  # whether a name is that of a file
    "topology.discover": {"os", "pathlib"},  # inspects this machine
    "topology.formats.nccl_xml": {"xml"},
    "topology.nvml": {"ctypes"},  # calls the driver's library
}
IMPURE = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint", "globals"}
# Files that import a framework other than their own: JAX, TensorFlow and CuPy take dtypes and memory from NumPy.
EXCEPTIONS = {module: {"numpy"} for module in WITH_NUMPY} | {
    "values": {"numpy"},  # IndexedSlices accepts lists; NumPy is imported only for a list
    **{each: {"numpy"} for each in ("kernels.reference", "kernels.exact_reference")},
    **{f"processes.{each}": {"numpy"} for each in ("array_group", "weighted_mean")},
    **{f"frameworks.{each}.arrays": {"numpy"} for each in ("jax", "tensorflow", "cupy")},
    **{f"frameworks.{each}.host_memory": {"numpy"} for each in ("jax", "tensorflow")},
    "torch.memory": {"numpy"},  # NumPy finds out exactly whether strided tensors overlap
    "engines.cuda.jax": {"numpy"},  # a NumPy integer is an attribute of 64 bits, whether or not JAX has x64 enabled
    **{f"jax.{each}": {"numpy"} for each in ("process_group", "process_jobs")},  # the ranks exchange NumPy arrays
    "vllm.communicator": {"torch"},  # vLLM's tensors are torch's
    "ranks.transports.gloo": {"torch"},  # gloo is part of torch; only users of torch import this file
}


def test_frameworks_are_imported_only_in_their_own_files():
    """A framework is imported only in the files and folders that are named after it, in cli/ and in EXCEPTIONS.

    Its files and folders are <framework>.py, observe/profilers/<framework>.py, frameworks/<framework>.py,
    engines/<framework>/, engines/host/ and engines/cuda/; the commands in cli/ are programs.
    """
    places = ("{}.", "frameworks.{}.", "engines.{}.", "engines.cuda.{}.", "observe.profilers.{}.")
    every = set().union(*PACKAGES.values())
    wrong = []
    for path in FILES:
        module = name(path)
        own = {f for f in FRAMEWORKS for place in places if f"{module}.".startswith(place.format(f))}
        allowed = {package for f in own | EXCEPTIONS.get(module, set()) for package in PACKAGES[f]}
        found = {imported.split(".")[0] for imported in imports(path)} & every
        if module.split(".")[0] != "cli" and not found <= allowed:
            wrong.append(f"{module} imports {found - allowed}")
    assert wrong == []


def test_planning_schedule_and_topology_are_pure():
    """Files of planning/, schedule/ and topology/ import only HARMLESS modules, ``crossreduce`` and the modules that
    NEEDED lists for the file (some of which do I/O), and use no built-in of IMPURE, such as open."""
    wrong = []
    for path in FILES:
        if name(path).split(".")[0] in PURE:
            allowed = HARMLESS | {"crossreduce"} | NEEDED.get(name(path), set())
            wrong += [f"{name(path)} imports {m}" for m in imports(path) if m.split(".")[0] not in allowed]
            used = {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
            wrong += [f"{name(path)} uses {used & IMPURE}"] if used & IMPURE else []
    assert wrong == []


def test_only_planning_and_lowering_read_rounds():
    """Only files of schedule/ and planning/ read ``.rounds``, an attribute that only ``Schedule`` has. All others use
    the program that ``lower`` returns."""
    nodes = [(name(path), node) for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    assert {module.split(".")[0] for module, node in nodes if node.attr == "rounds"} == {"schedule", "planning"}


MODULES_AT_IMPORT = 116  # of the package; on a quiet machine they take below 150 ms
CHILD = """
import json, sys
calls = 0
def count(*event):
    global calls
    calls += event[1] in ("call", "c_call")
def calls_of(imported):
    global calls
    calls = 0
    sys.setprofile(count)
    exec(imported)
    sys.setprofile(None)
    return calls
yardstick = calls_of("import asyncio, unittest.mock, xml.dom.minidom, http.client")
ratio = calls_of("import crossreduce") / yardstick
own = [module for module in sys.modules if module.startswith("crossreduce.")]
print(json.dumps([ratio, len(own), sorted({module.split(".")[0] for module in sys.modules})]))
"""


def child(code):
    """Run code in a new process that may write bytecode, since an import without it takes longer; return its output."""
    around = {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=around).stdout


def test_importing_crossreduce_is_quick_and_loads_no_framework():
    """``import crossreduce`` loads no framework, tree library or CLI. It calls at most 1.2 times as many
    functions as an import of asyncio etc., however busy the machine is."""
    heavy = {"optree", "typer", "rich", "sklearn", "matplotlib", "scipy", "pandas", "google"}.union(*PACKAGES.values())
    child("import crossreduce")  # writes the bytecode
    ratio, modules, loaded = json.loads(child(CHILD))
    assert not set(loaded) & heavy
    assert modules <= MODULES_AT_IMPORT
    assert ratio < 1.2


def test_planning_needs_no_framework():
    """Topologies, schedules, simulations and the null framework's counts work if no framework can be imported."""
    out = child(f"""
import sys
sys.modules |= dict.fromkeys({set().union(*PACKAGES.values())!r})  # an import of them fails from now on
import crossreduce as cr
from crossreduce.frameworks.null import NullFramework
from crossreduce.planning import PLANNERS, Request, schedule_for
names = tuple(f"cpu:{{k}}" for k in range(5))
ring, null = cr.Topology.ring(names, 25), NullFramework()
value = cr.PerReplica([null.zeros((10,), "float32", name) for name in names])
for algorithm in PLANNERS:
    request = Request("all_reduce", names, names, algorithm, packs=2)
    schedule = schedule_for(request)
    assert cr.Schedule.from_json(schedule.to_json()) == schedule
    assert cr.simulate(schedule_for(request._replace(topology=ring, nbytes=1 << 20)), ring, 1 << 20).seconds > 0
    before = null.counts.copies
    cr.AllReduceCrossDeviceOps(algorithm).reduce("mean", value, value)
    assert null.counts.copies > before
try:
    cr.all_reduce([1.0, 2.0])
except cr.BackendError as error:
    print("refused:", error)
""")
    assert 'refused: framework "numpy" was requested, but numpy cannot be imported' in out
    assert "pip install" in out


def test_plug_ins_without_their_frameworks():
    """Reducing NumPy arrays imports no other framework. The import of a plug-in without its framework raises a
    BackendError that names the extra to install."""
    plug_ins = ("torch", "jax", "tensorflow")
    out = child(f"""
import importlib, sys
import numpy as np
import crossreduce as cr
value = cr.PerReplica([np.ones(3)] * 3)
cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
cr.all_reduce([{{"a": 1.0}}, {{"a": 2.0}}])
others = {set().union(*(PACKAGES[each] for each in plug_ins))!r}
print(others & set(sys.modules))
sys.modules |= dict.fromkeys(others)  # an import of them fails from now on
for plug_in in {plug_ins}:
    try:
        importlib.import_module("crossreduce." + plug_in)
    except cr.BackendError as error:
        print("refused:", error)
""")
    loaded, *messages = out.split("refused: ")
    assert loaded == "set()\n"
    for plug_in, refused in zip(plug_ins, messages, strict=True):
        assert refused.startswith(f"crossreduce.{plug_in} needs ")
        assert f"{plug_in} cannot be imported: " in refused
        assert refused.endswith(f"\n  try:   pip install {plug_in}\n")


MODULES = ["crossreduce", *(f"crossreduce.{name(path)}" for path in FILES if name(path) and path.stem != "__main__")]


def modules_of(framework):
    """Return the modules whose last part is a framework, and those of its folder in frameworks/."""
    folder = f"crossreduce.frameworks.{framework}."
    return {module for module in MODULES if module.split(".")[-1] == framework or module.startswith(folder)}


def failed_examples(modules):
    """Run the examples in the docstrings of modules; return how many fail, by module."""
    failed = {module: doctest.testmod(importlib.import_module(module)).failed for module in sorted(modules)}
    return {module: count for module, count in failed.items() if count}


def test_docstring_examples_run():
    """Every example in a docstring prints the output that it shows. The next test covers frameworks' own files.

    Two modules are left out: they have no example, and cannot be imported without torchft and vLLM.
    """
    left_out = {"crossreduce.torchft", "crossreduce.vllm.communicator"}.union(*map(modules_of, FRAMEWORKS[1:]))
    assert failed_examples(set(MODULES) - left_out) == {}


@pytest.mark.parametrize("framework", [framework for framework in FRAMEWORKS[1:] if framework in frameworks.NAMES])
def test_docstring_examples_of_frameworks_run(framework):
    """The docstring examples of a framework's own files print their output, once the tests have set up its devices."""
    frameworks.load(framework)
    assert f"crossreduce.frameworks.{framework}.arrays" in modules_of(framework)
    assert failed_examples(modules_of(framework)) == {}


def test_everything_public_is_documented():
    """Every module, public class and public function has a docstring. Every public method and property of a public
    class has or inherits one, except in tuples. ``__all__`` has every public name of the package, sorted."""
    missing = []
    for path in FILES:
        parts = [node for node in tree(path).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        public = [tree(path), *(node for node in parts if not node.name.startswith("_"))]
        missing += [(name(path), getattr(node, "name", "")) for node in public if not ast.get_docstring(node)]
    for public in crossreduce.__all__:
        thing = getattr(crossreduce, public)
        missing += [] if inspect.getdoc(thing) else [public]
        for attribute, value in vars(thing).items() if inspect.isclass(thing) and not issubclass(thing, tuple) else ():
            described = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if described and not attribute.startswith("_") and not inspect.getdoc(getattr(thing, attribute)):
                missing.append((public, attribute))
    assert missing == []
    public = {key for key, value in vars(crossreduce).items() if key[0] != "_" and not inspect.ismodule(value)}
    assert list(crossreduce.__all__) == sorted(public)


def test_every_expected_error_is_matched():
    """Each ``pytest.raises`` matches a message, keeps the error for later checks, or expects a MemoryError."""
    unmatched = []
    for file in sorted((paths.ROOT / "tests").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(text))) if "pytest.raises" in (text := file.read_text()) else []
        items = [item for node in nodes if isinstance(node, ast.With) for item in node.items]
        calls = [ast.unparse(item.context_expr) for item in items if item.optional_vars is None]
        wrong = [call for call in calls if re.match(r"pytest\.raises\((?!MemoryErr|.*match=)", call)]
        unmatched += [f"{file.name}: {call}" for call in wrong]
    assert not unmatched


def test_class_names_are_unique():
    """No two classes of the package have one name, except those of tensorflow/ that have TensorFlow's names."""
    mirrored = {"AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce", "ReductionToOneDevice"}
    counts = Counter(node.name for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef))
    assert {name for name, count in counts.items() if count > 1} == mirrored


def test_the_deliberate_faults_can_be_applied(tmp_path):
    """Each text that scripts/mutate replaces occurs once in its file, and the tests that must notice it exist. The
    changed Python file has no undefined names: an error of that kind would be noticed by any test."""
    for number, line in enumerate((paths.ROOT / "scripts/faults.jsonl").read_text().splitlines(), start=1):
        fault = json.loads(line)
        text = (paths.ROOT / "src/crossreduce" / fault["file"]).read_text()
        assert text.count(fault["old"]) == 1, fault["promise"]
        if fault["file"].endswith(".py"):
            (tmp_path / f"fault_{number}.py").write_text(text.replace(fault["old"], fault["new"]))
        named = [word.partition("::")[0] for word in fault["tests"].split() if word.startswith("tests/")]
        assert named, fault["promise"]
        assert all((paths.ROOT / each).exists() for each in named), fault["promise"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
