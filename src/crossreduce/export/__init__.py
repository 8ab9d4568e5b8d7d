"""Exporters: plans in the formats of other tools.

``EXPORTERS`` is the registry of text formats; ``crossreduce plan --export`` offers exactly these. A new exporter is a
file in this folder and one line here. ``pictures.py`` is not in the registry, since it returns no text.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from ..planning import Plan


class Exporter(NamedTuple):
    """A text format; ``write`` imports the module of its function at the first use."""

    function: str  # ``module:name`` of the function that returns the text
    arguments: tuple[str, ...]  # the attributes of a plan that the function takes
    suffix: str = ""  # files with this suffix have this format by default; "": none
    runs_elsewhere: bool = False  # for programs that do not queue the operations one by one
    by_rank: bool = False  # files have numbers of ranks instead of names of devices

    def write(self, plan: Plan, **options: Any) -> str:
        """Return a plan in this format; ``options`` are further arguments of the function."""
        text: str = resolve_name(self.function)(*(getattr(plan, name) for name in self.arguments), **options)
        return text


EXPORTERS: Final = {
    "msccl": Exporter(
        "crossreduce.export.msccl.writer:to_msccl_xml", ("schedule",), ".xml", runs_elsewhere=True, by_rank=True
    ),
    "mscclpp": Exporter("crossreduce.export.mscclpp:to_mscclpp_json", ("schedule",), runs_elsewhere=True, by_rank=True),
    "nccl-graph": Exporter(
        "crossreduce.export.nccl_graph:to_nccl_graph_xml", ("schedule", "topology"), runs_elsewhere=True
    ),
    "schedule": Exporter("crossreduce.schedule:Schedule.to_json", ("schedule",), ".json"),
    "trace": Exporter("crossreduce.export.trace:to_chrome_trace", ("schedule", "topology", "nbytes"), ".trace.json"),
}


def format_of(filename: str) -> str | None:
    """Return the name of the exporter for a file's suffix, in upper or lower case; ``None``: there is none.

    >>> format_of("step.trace.json"), format_of("Plan.JSON"), format_of("plan.txt")
    ('trace', 'schedule', None)
    """
    suffixes = {name: exporter.suffix for name, exporter in EXPORTERS.items() if exporter.suffix}
    matches = [name for name, suffix in suffixes.items() if filename.lower().endswith(suffix)]
    return max(matches, key=lambda name: len(suffixes[name]), default=None)
