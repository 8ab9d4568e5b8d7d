"""Compare the stand-in for CuPy with CuPy itself: python compare.py FOLDER

FOLDER has CuPy: pip install --no-deps --target FOLDER cupy-cuda12x cuda-pathfinder. No GPU is needed. Each public name
of the stand-in must be CuPy's, and each function must have CuPy's parameters in their order; else the exit code is 1.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

PARTS = ("", "ndarray", "cuda", "cuda.Device", "cuda.Stream", "cuda.Event", "cuda.runtime", "cuda.MemoryPointer")


def load(folder):
    """Return the module ``cupy`` of a folder."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupy_backends")]:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    module = importlib.import_module("cupy")
    sys.path.remove(str(folder))
    return module


def parameters(function):
    """Return the names of a function's parameters; compiled functions list them in their docstring."""
    try:
        found = list(inspect.signature(function).parameters)
    except ValueError:
        text = re.search(r"\((.*?)\)", (function.__doc__ or "()").partition("\n")[0])
        words = [word.partition("=")[0].split()[-1] for word in text[1].split(", ") if word] if text else []
        found = [word.lstrip("*\\") for word in words]
    return [name for name in found if name not in ("self", "", "/")]


def members(module, part):
    """Return the public members of a part of ``cupy``."""
    for name in filter(None, part.split(".")):
        module = getattr(module, name)
    return {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}


def main():
    ours, real = (load(folder) for folder in (Path(__file__).parent, Path(sys.argv[1])))
    wrong = []
    for part in PARTS:
        theirs = members(real, part)
        for name, value in members(ours, part).items():
            if inspect.ismodule(value):
                continue
            if name not in theirs:
                wrong.append(f"{part}.{name} is not in CuPy")
            elif inspect.isroutine(value) and parameters(value) != parameters(theirs[name]):
                wrong.append(f"{part}.{name}{parameters(value)}, in CuPy {parameters(theirs[name])}")
    print(f"CuPy {real.__version__}", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
