"""The modules of the package, and which of them import which."""

import ast
from functools import cache
from pathlib import Path

import crossreduce

PACKAGE = Path(crossreduce.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def name(path):
    """Return a file's module within the package: ``frameworks.numpy``; an ``__init__`` has its folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_MODULE = {f"crossreduce.{name(path)}".removesuffix("."): path for path in FILES}


@cache
def tree(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path):
    """Return all modules that a file imports, anywhere in it, with full names: ``crossreduce.errors``."""
    package = ["crossreduce", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, node.module] if node.module else parents)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in BY_MODULE else base


def import_graph(parents=True):
    """Return the modules that each module imports. With ``parents``, ``a.b`` from outside ``a`` counts ``a``, too."""
    graph = {}
    for module, path in BY_MODULE.items():
        targets = set(imports(path)) & set(BY_MODULE)
        for target in list(targets) if parents else ():
            parts = target.split(".")
            packages = {".".join(parts[:k]) for k in range(1, len(parts))}
            targets |= {package for package in packages if not f"{module}.".startswith(f"{package}.")}
        graph[module] = targets
    return graph


def circles(graph):
    """Return the sets of nodes that reach each other."""
    reachable = {}
    for node in graph:
        reached, new = set(), {node}
        while new:
            new = set().union(*(graph.get(other, set()) for other in new)) - reached
            reached |= new
        reachable[node] = reached
    groups = {frozenset(o for o in reachable[node] if node in reachable.get(o, ())) for node in graph}
    return {group for group in groups if len(group) > 1}
