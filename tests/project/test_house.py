"""The rules of the house: sizes of files and folders, no circles, no underscored attributes of other objects.

A rule with a number has today's number as its limit. A change that raises a limit of lines says in its message what
users get for them; the other limits only go down.
"""

import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict

import pytest
from imports import FILES, PACKAGE, circles, import_graph, name, tree
from paths import ROOT

from crossreduce.kernels import native

SOURCES = {".py", ".pyi", ".cpp", ".hpp", ".inc", ".cu", ".cuh", ".js", ".css", ".html"}
NO_CODE = {"__pycache__", "data", "third_party", "assets"}  # data files, and files of other projects
FOREIGN_READS = 16  # of private attributes of PyTorch, which has no public ones for these
LIMITS = {"src": 84_950, "tests": 62_550, "benchmarks and scripts": 8_760}  # lines


def code(folder):
    """Return the source files of a folder, without data files and files of other projects."""
    found = (path for path in folder.rglob("*") if path.suffix in SOURCES and not NO_CODE & set(path.parts))
    return sorted(path for path in found if ".min." not in path.name)


def lines(path):
    """Return the number of lines of a file."""
    return path.read_bytes().count(b"\n")


def test_folders_and_files_are_small():
    """No folder of the package has more than 15 files, and no file more than 450 lines."""
    counts = Counter(path.parent for path in code(PACKAGE))
    assert {folder: count for folder, count in counts.items() if count > 15} == {}
    assert {path: lines(path) for path in code(PACKAGE) if lines(path) > 450} == {}


@pytest.mark.parametrize("part", LIMITS)
def test_the_weight_has_a_limit(part):
    """The lines of src, of the tests, and of benchmarks and scripts do not exceed their limits."""
    files = [path for folder in part.split(" and ") for path in code(ROOT / folder)]
    if "scripts" in part:
        files += [path for path in (ROOT / "scripts").iterdir() if not path.suffix and path.is_file()]
    total = sum(map(lines, files))
    assert total <= LIMITS[part], (
        f"{part}: {total} lines in {len(files)} files; CONTRIBUTING.md says when to raise LIMITS"
    )


def test_no_circle_among_the_parts_of_a_folder():
    """The files and sub-folders of each folder import each other in one direction only."""
    packages = {name(path) for path in FILES if path.stem == "__init__"}
    graphs = defaultdict(lambda: defaultdict(set))

    def place(module):
        """Return the folders above a module, and its file."""
        parts = module.removeprefix("crossreduce").lstrip(".").split(".")
        return [*parts, "__init__"] if ".".join(parts) in packages else parts

    for module, targets in import_graph(parents=False).items():
        for own, other in ((place(module), place(target)) for target in targets):
            depth = next((k for k, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if depth is not None:
                graphs[".".join(own[:depth])][own[depth]].add(other[depth])
    assert {at: circles(graph) for at, graph in graphs.items() if circles(graph)} == {}


def test_no_circle_among_files():
    """No files import each other in a circle, imports in functions included. ``circles`` finds circles of two and three
    files, and nothing else."""
    assert circles(import_graph()) == set()
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a", "f"}}
    assert circles(graph) == {frozenset("ab"), frozenset("cde")}


TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public in named tuples in spite of their names


def defined(part):
    """Return the underscored names that a class or module defines: functions, and attributes that it stores."""
    for n in ast.walk(part):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
            yield n.name
        elif isinstance(n, (ast.Attribute, ast.Name)) and isinstance(n.ctx, ast.Store):
            yield n.attr if isinstance(n, ast.Attribute) else n.id
        elif isinstance(n, ast.Tuple):
            yield from (text.value for text in n.elts if isinstance(text, ast.Constant))  # __slots__


def foreign_reads(path):
    """Yield the reads of underscored attributes from objects of another class; those of other modules do not count."""
    nodes = [n for n in ast.walk(tree(path)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    imported = {a.asname or a.name for n in nodes for a in n.names}
    known = {"self", "cls", *(each.split(".")[0] for each in imported)}  # self._a is allowed, self.other._a is not
    for part in tree(path).body:
        own = {*defined(part), *TUPLES}
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                receiver = ast.unparse(node.value)
                if receiver not in known and receiver.split(".")[0] not in known - {"self"} and node.attr not in own:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno} {receiver}.{node.attr}"


def test_no_underscored_attribute_of_another_object():
    """A module reads underscored attributes only of self and of classes that it defines itself."""
    reads = [read for path in FILES for read in foreign_reads(path)]
    assert len(reads) <= FOREIGN_READS, reads


WALK = """
import json, os, sys
import numpy as np
import crossreduce as cr

root = os.path.dirname(cr.__file__) + os.sep
trees = [{"w": np.full((2, 2), float(k)), "b": np.full(3, float(k))} for k in range(3)]

def walk():
    files = set()

    def called(frame, event, argument):
        if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(root):
            files.add(frame.f_code.co_filename)

    sys.setprofile(called)
    cr.all_reduce(trees, "mean")
    sys.setprofile(None)
    return sorted(files)

print(json.dumps([walk(), walk()]))
"""


@pytest.mark.skipif(native() is None, reason="without the compiled kernels calls take other ways")
def test_the_walk_of_all_reduce():
    """The first ``all_reduce`` of trees runs functions of at most 25 files (the aim is 14), and a later one of 3."""
    ran = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, check=True)
    first, later = json.loads(ran.stdout)
    assert len(first) <= 25, first
    assert len(later) <= 3, later
