"""The sizes of exported traces, which ``crossreduce export`` prints.

Input: a plan and the contents of its trace files. Output: lines of text.
"""

from __future__ import annotations

from ....planning import Plan
from ....schedule.schedule import many
from .format import decode
from .writer import MOST_NODES


def remarks(plan: Plan, files: dict[str, bytes]) -> dict[str, str]:
    """Return the lines by their labels. The only label is "traces". ``files`` has the trace files by name.

    >>> from crossreduce.export.formats.chakra import to_chakra
    >>> from crossreduce.planning import plan
    >>> h100 = plan("hgx-h100", nbytes="1G", operation_s=0)
    >>> remarks(h100, to_chakra(h100.schedule, h100.topology, h100.nbytes))["traces"]
    '8 files for 1073741824 bytes, 28736 nodes, 1 piece per chunk, 128 packets per routed piece'
    """
    traces = [decode(content) for content in files.values()]
    about = traces[0].about
    pieces, packets = int(about["pieces"]), int(about["packets"])
    parts = [
        f"{many(len(files), 'file')} for {about['nbytes']} bytes",
        many(sum(len(trace.nodes) for trace in traces), "node"),
        f"{many(pieces, 'piece')} per chunk",
    ]
    if pieces < plan.schedule.pieces:
        parts.append(f"not {plan.schedule.pieces} as planned, which needs more than {MOST_NODES} nodes")
    if packets > 1:
        parts.append(f"{packets} packets per routed piece")
    return {"traces": ", ".join(parts)}
