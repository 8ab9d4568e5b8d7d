"""The rules of the house: sizes of files and folders, no circles, no underscored attributes of other objects.

A rule with a number has today's number as its limit, which only goes down.
"""

import ast
from collections import defaultdict

import pytest
from imports import FILES, PACKAGE, circles, import_graph, name
from paths import ROOT

SOURCES = {".py", ".pyi", ".cpp", ".hpp", ".inc", ".cu", ".cuh", ".js", ".css", ".html"}
NO_CODE = {"__pycache__", "data", "third_party", "assets"}  # data files, and files of other projects
# Folders and files that are still above the limits, with their numbers.
LARGE_FOLDERS: dict[str, int] = {}
LARGE_FILES: dict[str, int] = {}
# Folders among which a circle of imports is still to be removed.
CIRCLES: set[frozenset[str]] = set()
FOREIGN_READS = 16  # of private attributes of PyTorch, which has no public ones for these
LIMITS = {"src": 68_700, "tests": 67_900, "benchmarks and scripts": 8_450}  # lines


def code(folder):
    """Return the source files of a folder of the checkout, without data and what others have written."""
    found = (path for path in folder.rglob("*") if path.suffix in SOURCES and not NO_CODE & set(path.parts))
    return sorted(path for path in found if ".min." not in path.name)


def lines(path):
    """Return the number of lines of a file."""
    return path.read_bytes().count(b"\n")


def test_a_folder_has_at_most_15_files():
    """No folder of the package has more than 15 files, except those of LARGE_FOLDERS, which do not grow."""
    counts = defaultdict(int)
    for path in code(PACKAGE):
        counts["/".join(path.relative_to(PACKAGE).parts[:-1])] += 1
    large = {folder: count for folder, count in counts.items() if count > LARGE_FOLDERS.get(folder, 15)}
    assert large == {}
    assert all(counts[folder] == limit for folder, limit in LARGE_FOLDERS.items() if limit > 15), "lower the limits"


def test_a_file_has_at_most_450_lines():
    """No file of the package has more than 450 lines, except those of LARGE_FILES, which do not grow."""
    counts = {str(path.relative_to(PACKAGE)): lines(path) for path in code(PACKAGE)}
    assert {file: count for file, count in counts.items() if count > LARGE_FILES.get(file, 450)} == {}
    assert [file for file in LARGE_FILES if counts.get(file, 0) <= 450] == [], "remove these from LARGE_FILES"


@pytest.mark.parametrize("part", LIMITS)
def test_the_weight_only_goes_down(part):
    """The lines of src, of the tests, and of benchmarks and scripts do not exceed their limits."""
    parts = {"src": ["src"], "tests": ["tests"], "benchmarks and scripts": ["benchmarks", "scripts"]}[part]
    files = [path for folder in parts for path in code(ROOT / folder)]
    if "scripts" in parts:
        files += [path for path in (ROOT / "scripts").iterdir() if not path.suffix and path.is_file()]
    total = sum(map(lines, files))
    print(f"{part}: {total} lines in {len(files)} files")
    assert total <= LIMITS[part]


def test_no_circle_among_the_parts_of_a_folder():
    """The files and sub-folders of each folder import each other in one direction only."""
    packages = {name(path) for path in FILES if path.stem == "__init__"}
    graphs = defaultdict(lambda: defaultdict(set))

    def place(module):
        """Return the folders above a module, and its file."""
        parts = module.removeprefix("crossreduce").lstrip(".").split(".")
        return [*parts, "__init__"] if ".".join(parts) in packages else parts

    for module, targets in import_graph(parents=False).items():
        for target in targets:
            own, other = place(module), place(target)
            depth = next((k for k, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), None)
            if depth is not None:
                graphs[".".join(own[:depth])][own[depth]].add(other[depth])
    found = {
        frozenset(f"{at}.{part}".lstrip(".") for part in group) for at, g in graphs.items() for group in circles(g)
    }
    assert found - CIRCLES == set()
    assert CIRCLES - found == set(), "remove these from CIRCLES"


def test_circles_are_found():
    """Circles of two and of three nodes are found, and nodes outside a circle do not count."""
    graph = {"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"e"}, "e": {"c"}, "f": {"a", "f"}}
    assert circles(graph) == {frozenset("ab"), frozenset("cde")}


TUPLES = {"_replace", "_asdict", "_fields", "_make"}  # public in named tuples in spite of their names


def defined(tree):
    """Return the underscored names that a class or module defines: functions, and attributes that it stores."""
    nodes = list(ast.walk(tree))
    stored = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    stored |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {
        text.value for n in nodes if isinstance(n, ast.Tuple) for text in n.elts if isinstance(text, ast.Constant)
    }
    return stored | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def foreign_reads(path):
    """Yield the reads of underscored attributes from objects of another class; those of other modules do not count."""
    tree = ast.parse(path.read_text())
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names
    }
    known = {"self", "cls", *(each.split(".")[0] for each in imported)}
    for part in tree.body:
        own = defined(part) | TUPLES
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                receiver = ast.unparse(node.value)
                if receiver not in known and receiver.split(".")[0] not in known - {"self"} and node.attr not in own:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno} {receiver}.{node.attr}"


def test_no_underscored_attribute_of_another_object():
    """A module reads underscored attributes only of self and of classes that it defines itself."""
    reads = [read for path in FILES for read in foreign_reads(path)]
    print(*reads, sep="\n")
    assert len(reads) <= FOREIGN_READS
