"""Exporters: plans in the formats of other tools.

``EXPORTERS`` is the registry of formats; ``crossreduce export`` offers exactly these. A new exporter is a
file in this folder and one line here. ``pictures.py`` is not in the registry, since it writes its files itself.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from ..planning import Plan


class Exporter(NamedTuple):
    """A format; ``write`` imports the module of its function at the first use."""

    function: str  # ``module:name`` of the function that returns the text, or the files of a folder
    arguments: tuple[str, ...]  # the attributes of a plan that the function takes
    suffix: str = ""  # files with this suffix have this format by default; "": none
    runs_elsewhere: bool = False  # for programs that do not queue the operations one by one
    by_rank: bool = False  # files have numbers of ranks instead of names of devices
    one_rank: bool = False  # the function takes ``rank``, and then makes the part of this rank alone
    multiple: str = ""  # ``module:name`` of a function: of what a message's size must be a multiple for a file's text
    counts: str = "elements"  # of what the size is counted: elements or bytes
    remarks: str = ""  # ``module:name`` of a function that returns remarks on the files of a folder, by label

    @property
    def is_folder(self) -> bool:
        """Whether an export is a folder of several files."""
        return bool(self.remarks)

    def write(self, plan: Plan, **options: Any) -> str | dict[str, bytes]:
        """Return a plan in this format: the text of a file, or the contents of the files of a folder by their names.

        ``options`` are further arguments of the function.
        """
        arguments = [getattr(plan, name) for name in self.arguments]
        content: str | dict[str, bytes] = resolve_name(self.function)(*arguments, **options)
        return content

    def text(self, plan: Plan, **options: Any) -> str:
        """Return what ``write`` returns, for a format whose exports are single files."""
        content = self.write(plan, **options)
        assert isinstance(content, str)
        return content

    def multiple_of(self, plan: Plan, text: str) -> int:
        """Return a number: the file with this text works for messages whose size is a multiple of it.

        The size is counted in elements or bytes, as ``counts`` says.
        """
        found: int = resolve_name(self.multiple)(text) if self.multiple else plan.schedule.units
        return found

    def remarks_on(self, plan: Plan, files: dict[str, bytes]) -> dict[str, str]:
        """Return lines about a folder's files, by the label of each line."""
        found: dict[str, str] = resolve_name(self.remarks)(plan, files)
        return found


EXPORTERS: Final = {
    "chakra": Exporter(
        "crossreduce.export.formats.chakra:to_chakra",
        ("schedule", "topology", "nbytes"),
        runs_elsewhere=True,
        by_rank=True,
        one_rank=True,
        remarks="crossreduce.export.formats.chakra:remarks",
    ),
    "msccl": Exporter(
        "crossreduce.export.formats.msccl.writer:to_msccl_xml",
        ("schedule", "topology", "nbytes"),
        ".xml",
        runs_elsewhere=True,
        by_rank=True,
        multiple="crossreduce.export.formats.msccl.format:units_of_xml",
    ),
    "mscclpp": Exporter(
        "crossreduce.export.formats.mscclpp:to_mscclpp_json",
        ("schedule", "topology", "nbytes"),
        runs_elsewhere=True,
        by_rank=True,
        multiple="crossreduce.export.formats.mscclpp.layout:bytes_of_json",
        counts="bytes",
    ),
    "nccl-graph": Exporter(
        "crossreduce.export.formats.nccl_graph:to_nccl_graph_xml", ("schedule", "topology"), runs_elsewhere=True
    ),
    "schedule": Exporter("crossreduce.schedule:Schedule.to_json", ("schedule",), ".json"),
    "trace": Exporter(
        "crossreduce.export.formats.trace:to_chrome_trace",
        ("schedule", "topology", "nbytes"),
        ".trace.json",
        one_rank=True,
    ),
}


def format_of(filename: str) -> str | None:
    """Return the name of the exporter for a file's suffix, in upper or lower case, or ``None``.

    >>> format_of("step.trace.json"), format_of("Plan.JSON"), format_of("plan.txt")
    ('trace', 'schedule', None)
    """
    suffixes = {name: exporter.suffix for name, exporter in EXPORTERS.items() if exporter.suffix}
    matches = [name for name, suffix in suffixes.items() if filename.lower().endswith(suffix)]
    return max(matches, key=lambda name: len(suffixes[name]), default=None)
