"""The invariants of the architecture, checked in the source and in new processes."""

import ast
import doctest
import importlib
import inspect
import json
import os
import subprocess
import sys

import frameworks
import paths
import pytest
from imports import BY_MODULE, FILES, PACKAGE, circles, import_graph, imports, name

import crossreduce

SOURCE = paths.ROOT / "src" / "crossreduce"
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
    ("errors", "autograph", "threads", "progress", "chrome_trace"),
    ("ops", "devices"),
    ("kernels",),
    ("values",),
    ("topology",),
    ("packing",),
    ("observe",),
    ("frameworks",),
    ("schedule",),
    ("planning",),
    ("options",),
    ("lowering",),
    ("export",),
    ("engines",),
    ("ranks",),
    ("trace",),
    ("reduction",),
    ("strategy",),
    ("processes",),
    ("torch", "jax", "tensorflow", "mpi"),
    ("torchft",),
    ("cli",),
    ("__main__",),
)
PURE = ("planning", "schedule", "topology")


def floor(module):
    """Return the position of a module's folder or file in ``FLOORS``."""
    top = module.split(".")[0]
    (found,) = [number for number, stories in enumerate(FLOORS) if top in stories]
    return found


def test_every_file_has_a_floor():
    """Every file and folder directly in the package has a position in ``FLOORS``."""
    tops = {name(path).split(".")[0] for path in FILES} - {""}
    assert tops <= {story for stories in FLOORS for story in stories}
    assert len(FILES) > 20


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


def test_no_import_circle():
    """No files import each other in a circle, imports in functions and under TYPE_CHECKING included."""
    assert circles(import_graph()) == set()


# Files that import a framework other than their own.
EXCEPTIONS = {
    "values": {"numpy"},  # IndexedSlices accepts lists; NumPy is imported only for a list
    "kernels.reference": {"numpy"},
    "kernels.exact_reference": {"numpy"},
    "frameworks.jax.arrays": {"numpy"},  # JAX and TensorFlow take dtypes and constants from NumPy
    "frameworks.tensorflow.arrays": {"numpy"},
    "frameworks.cupy.arrays": {"numpy"},  # CuPy's dtypes are NumPy's
    "planning.optimal.bounds.solver": {"numpy"},
    "planning.optimal.bounds.steiner": {"numpy"},  # the prices of many trees at once
    "planning.calibration": {"numpy"},
    "planning.optimal.few_step.shallow_trees": {
        "numpy"
    },  # the arrays of the search; only forests of few steps import these files
    "planning.optimal.few_step.switch_routes": {"numpy"},
    "planning.optimal.few_step.tree_program": {"numpy"},
    "schedule.link_use": {"numpy"},  # arrays of the use of links over time; only reports need them
    "schedule.clock": {"numpy"},  # arrays of the transfers; without NumPy the clock uses lists
    "topology.automorphisms": {"numpy"},  # colours of all nodes at once; only large topologies need them
    "torch.memory": {"numpy"},  # NumPy finds out exactly whether strided tensors overlap
    "ranks.transports.gloo": {"torch"},  # gloo is part of torch; only users of torch import this file
    "frameworks.jax.host_memory": {"numpy"},  # NumPy turns memory into arrays of JAX
    "engines.cuda.jax": {"numpy"},  # a NumPy integer is an attribute of 64 bits, whether or not JAX has x64 enabled
    "frameworks.tensorflow.host_memory": {"numpy"},
    "processes.array_group": {"numpy"},  # reduces its users' NumPy arrays
}


def test_frameworks_are_imported_only_in_their_own_files():
    """A framework is imported only in the files and folders that are named after it, in cli/ and in EXCEPTIONS.

    Its files and folders are <framework>.py, observe/profilers/<framework>.py, frameworks/<framework>.py,
    engines/<framework>/, engines/host/ and engines/cuda/; the commands in cli/ are programs.
    """
    places = ("{}.", "frameworks.{}.", "engines.{}.", "engines.cuda.{}.")
    places += ("observe.profilers.{}.",)
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


def test_the_exceptions_are_used():
    """Each file in EXCEPTIONS imports the frameworks that are listed for it."""
    for module, due in EXCEPTIONS.items():
        path = BY_MODULE[f"crossreduce.{module}"]
        roots = {imported.split(".")[0] for imported in imports(path)}
        assert due <= roots, module


def test_the_needs_of_single_files_are_used():
    """Each file in NEEDED imports the modules that are listed for it."""
    for module, due in NEEDED.items():
        path = BY_MODULE[f"crossreduce.{module}"]
        assert due <= {imported.split(".")[0] for imported in imports(path)}, module


def test_values_imports_numpy_inside_a_function_only():
    """values.py does not import NumPy at its top level, so arrays of other frameworks do not load it."""
    top = [
        n for n in ast.parse((PACKAGE / "values.py").read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))
    ]
    modules = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    assert not modules & {"numpy", "ml_dtypes"}


# The standard library's modules that pure code may use: none of them does I/O or reads a clock.
HARMLESS = {
    "bisect",
    "__future__",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "fractions",
    "numbers",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "typing",
}
# Further modules that single files need, each for one reason.
NEEDED = {
    "planning.optimal.bounds.solver": {"numpy", "scipy"},  # solves linear programs
    "planning.optimal.bounds.steiner": {"numpy", "scipy"},  # the cheapest ways through switches
    "planning.calibration": {"numpy", "scipy"},  # solves least-squares problems
    "planning.optimal.few_step.shallow_trees": {"numpy"},  # searches trees for many prices at once
    "planning.optimal.few_step.switch_routes": {"numpy"},  # lists hops as arrays
    "planning.optimal.few_step.tree_program": {"numpy", "scipy"},  # solves linear programs
    "topology.automorphisms": {"numpy"},  # colours of nodes
    "topology.routes": {"threading"},  # a lock: threads may search routes of one topology at the same time
    "planning.plans": {"os", "importlib"},  # the type of a path; report() finds the writer in export/ by its name
    "schedule.link_use": {"numpy"},  # adds up the transfers of a link
    "schedule.clock": {"numpy"},  # computes the reads of a tick together; without NumPy, plain Python does
    "topology.machines": {"difflib"},  # finds the names that are nearest to a wrong one
    "topology.link_kinds": {"importlib"},  # reads the package's own data files
    "topology.formats": {"pathlib"},  # reads the given file
    "topology.topology_like": {"os", "pathlib"},  # whether a name is that of a file
    "topology.discover": {"os", "pathlib"},  # inspects this machine
    "topology.formats.nccl_xml": {"xml"},
    "topology.nvml": {"ctypes"},  # calls the driver's library
}
IMPURE = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint", "globals"}


def test_planning_schedule_and_topology_are_pure():
    """Files of planning/, schedule/ and topology/ import only HARMLESS modules, ``crossreduce`` and the modules that
    NEEDED lists for the file (some of which do I/O), and use no built-in of IMPURE, such as open."""
    wrong = []
    for path in FILES:
        if name(path).split(".")[0] in PURE:
            allowed = HARMLESS | {"crossreduce"} | NEEDED.get(name(path), set())
            wrong += [f"{name(path)} imports {m}" for m in imports(path) if m.split(".")[0] not in allowed]
            used = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            wrong += [f"{name(path)} uses {used & IMPURE}"] if used & IMPURE else []
    assert wrong == []


# Of all modules, these may read the rounds of a schedule; everything else consumes the program that lower() returns.
READERS_OF_ROUNDS = ("schedule.", "planning.", "lowering")


def test_only_planning_and_lowering_read_rounds():
    """No module outside schedule/, planning/ and lowering/ has an attribute access ``.rounds``.

    ``Schedule`` is the only class with an attribute of this name, so none of them can interpret a schedule itself.
    """
    readers = [
        name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "rounds"
    ]
    assert [module for module in readers if not f"{module}.".startswith(READERS_OF_ROUNDS)] == []
    assert not any(module.startswith("lowering") for module in readers)  # lower() calls live_rounds(schedule) instead
    assert "schedule.schedule" in readers


MODULES_AT_IMPORT = 116  # of the package; on a quiet machine they take below 150 ms
CHILD = """
import json, sys, time
start = time.process_time()  # the time of this process, since other processes may be using the CPUs
import asyncio, unittest.mock, xml.dom.minidom, http.client
yardstick = time.process_time() - start
start = time.process_time()
import crossreduce
seconds = time.process_time() - start
own = [module for module in sys.modules if module.startswith("crossreduce.")]
print(json.dumps([seconds / yardstick, len(own), sorted({module.split(".")[0] for module in sys.modules})]))
"""


# Without bytecode, an import compiles all sources again, which takes longer.
ENVIRONMENT = {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def child(code, *flags):
    ran = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    return ran.stdout


def test_importing_crossreduce_is_quick_and_loads_no_framework():
    """``import crossreduce`` loads no framework, tree library or CLI, and is as quick as asyncio and others."""
    heavy = set().union(*PACKAGES.values()) | {"optree", "typer", "rich", "sklearn", "matplotlib", "scipy", "pandas"}
    heavy |= {"google"}  # protobuf
    runs = [json.loads(child(CHILD)) for _ in range(7)]
    for _, modules, loaded in runs:
        assert not set(loaded) & heavy, f"import crossreduce loads {set(loaded) & heavy}"
        assert modules <= MODULES_AT_IMPORT
    ratio = min(ratio for ratio, _, _ in runs)  # the machine may be busy: the best run counts
    print(f"import crossreduce: {ratio:.2f} of the time of four parts of the standard library, {runs[0][1]} modules")
    assert ratio < 2


def test_planning_needs_no_framework():
    """Topologies, schedules, simulations and the null framework's counts work if no framework can be imported."""
    code = f"""
import sys
for blocked in {sorted(set().union(*PACKAGES.values()))!r}:
    sys.modules[blocked] = None  # an import of it fails from now on
import crossreduce as cr
from crossreduce.frameworks.null import NullFramework
from crossreduce.planning import PLANNERS, Request, schedule_for
names = tuple(f"cpu:{{k}}" for k in range(5))
for algorithm in PLANNERS:
    request = Request("all_reduce", names, names, algorithm, packs=2)
    schedule = schedule_for(request)
    assert cr.Schedule.from_json(schedule.to_json()) == schedule
    ring = cr.Topology.ring(names, 25)
    assert cr.simulate(schedule_for(request._replace(topology=ring, nbytes=1 << 20)), ring, 1 << 20).seconds > 0
    null = NullFramework()
    value = cr.PerReplica([null.zeros((10,), "float32", name) for name in names])
    cr.AllReduceCrossDeviceOps(algorithm).reduce("mean", value, value)
    assert null.counts.copies
try:
    cr.all_reduce([1.0, 2.0])
except cr.BackendError as error:
    print("refused:", error)
"""
    out = child(code)
    assert 'refused: framework "numpy" was requested, but numpy cannot be imported' in out
    assert "pip install" in out


@pytest.mark.parametrize("plug_in", ["torch", "jax", "tensorflow"])
def test_a_plug_in_without_its_framework(plug_in):
    """The import of a plug-in without its framework raises a BackendError that names the extra to install."""
    out = child(f"""
import sys
for blocked in {sorted(PACKAGES[plug_in])!r}:
    sys.modules[blocked] = None
import crossreduce as cr
try:
    import crossreduce.{plug_in}
except cr.BackendError as error:
    print("refused:", error)
""")
    assert f"refused: crossreduce.{plug_in} needs " in out
    assert f"{plug_in} cannot be imported: " in out
    assert out.endswith(f"\n  try:   pip install 'crossreduce[{plug_in}]'\n")


def test_numpy_arrays_load_no_other_framework():
    """Reducing NumPy arrays imports no other framework."""
    out = child("""
import sys
import numpy as np
import crossreduce as cr
value = cr.PerReplica([np.ones(3)] * 3)
cr.HierarchicalCopyAllReduce().reduce("sum", value, value)
cr.all_reduce([{"a": 1.0}, {"a": 2.0}])
print(sorted({"torch", "jax", "jaxlib", "tensorflow"} & set(sys.modules)))
""")
    assert out.strip() == "[]"


def test_all_is_complete():
    """Every public name of the package is in ``__all__``, sorted, and every name in it exists."""
    public = {
        key for key, value in vars(crossreduce).items() if not key.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(crossreduce.__all__)
    assert list(crossreduce.__all__) == sorted(crossreduce.__all__)


MODULES = ["crossreduce", *(f"crossreduce.{name(path)}" for path in FILES if name(path) and path.stem != "__main__")]


def modules_of(framework):
    """Return the modules whose last part is a framework, and those of its folder in frameworks/."""
    folder = f"crossreduce.frameworks.{framework}."
    return [module for module in MODULES if module.split(".")[-1] == framework or module.startswith(folder)]


def failed_examples(modules):
    """Run the examples in the docstrings of modules; return how many fail, by module."""
    failed = {module: doctest.testmod(importlib.import_module(module)).failed for module in modules}
    return {module: count for module, count in failed.items() if count}


def test_docstring_examples_run():
    """Every example in a docstring prints the output that it shows; the next test covers frameworks' own files.

    crossreduce.torchft is left out: it has no example, and cannot be imported without torchft.
    """
    left_out = {module for framework in FRAMEWORKS[1:] for module in modules_of(framework)} | {"crossreduce.torchft"}
    assert failed_examples(module for module in MODULES if module not in left_out) == {}


@pytest.mark.parametrize("framework", [framework for framework in FRAMEWORKS[1:] if framework in frameworks.NAMES])
def test_docstring_examples_of_frameworks_run(framework):
    """The docstring examples of a framework's own files print their output, once the tests have set up its devices."""
    frameworks.load(framework)
    mine = modules_of(framework)
    assert f"crossreduce.frameworks.{framework}.arrays" in mine
    assert failed_examples(mine) == {}


def test_there_are_examples():
    """The search for examples finds at least 10 in three modules, so the tests above are not empty."""
    modules = [importlib.import_module(f"crossreduce.{module}") for module in ("options", "devices", "values")]
    found = sum(len(test.examples) for module in modules for test in doctest.DocTestFinder().find(module))
    assert found >= 10


def test_everything_public_has_a_docstring():
    """Every module, public class and public function has a docstring."""
    missing = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        missing += [] if ast.get_docstring(tree) else [name(path)]
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                missing += [] if ast.get_docstring(node) else [f"{name(path)}.{node.name}"]
    assert missing == []


def test_class_names_are_unique():
    """No two classes of the package have one name, except those of tensorflow/ that have TensorFlow's names."""
    mirrored = {"AllReduceCrossDeviceOps", "HierarchicalCopyAllReduce", "ReductionToOneDevice"}
    names = [
        node.name for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]
    assert {found for found in names if names.count(found) > 1} == mirrored


def test_the_public_face_is_documented():
    """Every public name, and every public method and property of a class but a tuple, has or inherits a docstring."""
    for public in crossreduce.__all__:
        thing = getattr(crossreduce, public)
        assert inspect.getdoc(thing), public
        if inspect.isclass(thing) and not issubclass(thing, tuple):
            for attribute, value in vars(thing).items():
                described = callable(value) or isinstance(value, (property, classmethod, staticmethod))
                if described and not attribute.startswith("_"):
                    assert inspect.getdoc(getattr(thing, attribute)), f"{public}.{attribute}"


def test_every_expected_error_is_matched():
    """Each ``pytest.raises`` matches a message, keeps the error for later checks, or expects a MemoryError."""
    unmatched = []
    for file in sorted((paths.ROOT / "tests").rglob("*.py")):
        tree = ast.parse(file.read_text())
        items = [item for node in ast.walk(tree) if isinstance(node, ast.With) for item in node.items]
        kept = {item.context_expr for item in items if item.optional_vars is not None}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call not in kept:
                textless = ast.unparse(call.args[0]) == "MemoryError"
                if not textless and not any(keyword.arg == "match" for keyword in call.keywords):
                    unmatched.append(f"{file.name}:{call.lineno}")
    assert not unmatched


def test_the_deliberate_faults_can_be_applied():
    """Each text that scripts/mutate replaces occurs once in its file, and the tests that must notice it exist."""
    for line in (paths.ROOT / "scripts/faults.jsonl").read_text().splitlines():
        fault = json.loads(line)
        assert (SOURCE / fault["file"]).read_text().count(fault["old"]) == 1, fault["promise"]
        named = [word.partition("::")[0] for word in fault["tests"].split() if word.startswith("tests/")]
        assert named, fault["promise"]
        assert [name for name in named if not (paths.ROOT / name).exists()] == [], fault["promise"]
