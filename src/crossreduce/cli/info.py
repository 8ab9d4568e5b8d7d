"""``crossreduce info``: list the frameworks, installed or not, and the devices that are available to them.

Output: a table or JSON. Versions are read without imports. Each installed framework is then imported in a separate
process, all in parallel. So a framework that is broken or crashes its process is reported like any other. This process
makes no context on a GPU, since that would take memory there.
"""

from __future__ import annotations

import json as json_module
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any, Final

from rich.markup import escape
from rich.table import Table
from typer import Option

from .. import __version__, kernels
from ..engines.cuda.driver import devices, unusable
from ..engines.nccl_library import library
from ..frameworks import FRAMEWORKS, package
from ..options import ALGORITHMS
from ..topology.discover import discover
from .support.output import terminal

DISTRIBUTIONS: Final = {  # the names on PyPI of frameworks that have several
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-intel", "tf-nightly"),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy"),
}
TIMEOUT_S: Final = 120


def info(
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show versions, frameworks with their devices, and algorithms."""
    nccl = library()
    with ThreadPoolExecutor() as pool:
        frameworks = dict(zip(FRAMEWORKS, pool.map(framework_info, FRAMEWORKS), strict=True))
    report: dict[str, Any] = {
        "crossreduce": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernels": kernels.instruction_set(),
        "threads": kernels.threads(),
        "cuda": {"unusable": unusable(), "devices": [] if unusable() else devices()},
        "nccl": nccl if isinstance(nccl, str) else nccl.version,
        "frameworks": frameworks,
        "algorithms": list(ALGORITHMS),
        "topology": list(discover().notes),
    }
    if json:
        print(json_module.dumps(report, indent=2))
    else:
        show(report)


def framework_info(name: str) -> dict[str, Any]:
    """Return a framework's version, its devices as text, and its error. Each of them may be ``None``."""
    version = installed_version(name)
    if version is None:
        return {"version": None, "devices": None, "error": f"not installed  try: pip install {package(name)}"}
    command = [sys.executable, "-m", f"{__package__}.train.trainers", name]
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"version": version, "devices": None, "error": f"importing it took more than {TIMEOUT_S} s"}
    lines = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    result = lines[-1] if lines else f"importing it ended with exit code {ran.returncode}"
    devices_text, error = (None, result) if ran.returncode else (result, None)
    return {"version": version, "devices": devices_text, "error": error}


def installed_version(name: str) -> str | None:
    """Return the version of a framework, or "unknown", without importing it; ``None`` if it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None if find_spec(name) is None else "unknown"


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    console = terminal()
    about = Table.grid(padding=(0, 2))
    about.add_row("crossreduce", report["crossreduce"])
    about.add_row("Python", report["python"])
    about.add_row("platform", report["platform"])
    why = "the compiled kernels are not installed" if kernels.native() is None else "selected by CROSSREDUCE_KERNELS"
    about.add_row("kernels", f"NumPy: {why}" if report["kernels"] == "numpy" else f"compiled, {report['kernels']}")
    about.add_row("threads", str(report["threads"]))
    unused = report["cuda"]["unusable"]
    about.add_row("CUDA", escape(f"not used: {unused}" if unused else "\n".join(report["cuda"]["devices"])))
    about.add_row("NCCL", escape(report["nccl"]))
    about.add_row("topology", "; ".join(map(escape, report["topology"])))
    about.add_row("algorithms", ", ".join(report["algorithms"]))
    console.print(about)
    table = Table("framework", "version", "devices")
    for name, framework in report["frameworks"].items():
        state = framework["devices"] or f"[red]{escape(framework['error'])}[/red]"
        table.add_row(name, framework["version"] or "-", state)
    console.print()
    console.print(table)
