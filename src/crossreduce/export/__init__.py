"""Exporters: plans in the formats of other tools.

``EXPORTERS`` is the registry of formats, and ``crossreduce export`` offers exactly these. A new exporter is a file in
``formats/`` and one line here. ``pictures/`` and ``explorer/`` are not in the registry, since they write their files.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from ..planning import Plan


class Exporter(NamedTuple):
    """A format. Functions are stated as ``module:name``, and the module is imported when the function is called."""

    function: str  # returns the text of a file, or the contents of a folder's files
    arguments: tuple[str, ...]  # the attributes of a plan that the function takes
    suffix: str = ""  # files with this suffix have this format by default; "" for no suffix
    runs_elsewhere: bool = False  # whether it is for programs that do not queue operations one by one
    by_rank: bool = False  # whether files have rank numbers instead of device names
    one_rank: bool = False  # whether the function takes ``rank`` to make only the part of one rank
    multiple: str = ""  # a function that returns, for a file's text, the number that must divide a message's size
    counts: str = "elements"  # the unit of this size: elements or bytes
    remarks: str = ""  # a function that returns remarks on the files of a folder, by label

    @property
    def is_folder(self) -> bool:
        """Whether an export is a folder of several files."""
        return bool(self.remarks)

    def write(self, plan: Plan, **options: Any) -> str | dict[str, bytes]:
        """Return a plan in this format: the text of a file, or the contents of a folder's files by their names.

        ``options`` are further arguments of ``function``.
        """
        arguments = [getattr(plan, name) for name in self.arguments]
        content: str | dict[str, bytes] = resolve_name(self.function)(*arguments, **options)
        return content

    def text(self, plan: Plan, **options: Any) -> str:
        """Return what ``write`` returns, for a format with single files."""
        content = self.write(plan, **options)
        assert isinstance(content, str)
        return content

    def multiple_of(self, plan: Plan, text: str) -> int:
        """Return the number of which the size of each message must be a multiple, in the unit ``counts``.

        ``text`` is the exported file of ``plan``.
        """
        multiple: int = resolve_name(self.multiple)(text) if self.multiple else plan.schedule.units
        return multiple

    def remarks_on(self, plan: Plan, files: dict[str, bytes]) -> dict[str, str]:
        """Return remarks on the files of an exported folder, by the label of each remark."""
        remarks: dict[str, str] = resolve_name(self.remarks)(plan, files)
        return remarks


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
    """Return the name of the exporter with a file's suffix, in upper or lower case, or ``None`` if no exporter has it.

    >>> format_of("step.trace.json"), format_of("Plan.JSON"), format_of("plan.txt")
    ('trace', 'schedule', None)
    """
    suffixes = {name: exporter.suffix for name, exporter in EXPORTERS.items() if exporter.suffix}
    matches = [name for name, suffix in suffixes.items() if filename.lower().endswith(suffix)]
    return max(matches, key=lambda name: len(suffixes[name]), default=None)
