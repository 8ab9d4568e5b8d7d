"""What ``crossreduce export`` prints about exported traces: their sizes, and their time on links that are FIFOs.

Input: a plan and the contents of its trace files. Output: lines of text.
"""

from __future__ import annotations

from ....planning import Plan
from ....planning.explain import duration
from ....schedule.schedule import many
from .format import decode
from .replay import replay_nodes
from .writer import MOST_NODES


def remarks(plan: Plan, files: dict[str, bytes]) -> dict[str, str]:
    """Return lines by their labels: "traces", and "replay" if the files are those of all ranks.

    >>> from crossreduce.export.formats.chakra import to_chakra
    >>> from crossreduce.planning import plan
    >>> made = plan("hgx-h100", nbytes="1G", operation_s=0)
    >>> for label, text in remarks(made, to_chakra(made.schedule, made.topology, made.nbytes)).items():
    ...     print(label, text)
    traces 8 files for 1073741824 bytes, 28736 nodes, 1 piece per chunk, 128 packets per routed piece
    replay 4.18 ms on FIFO links as in ASTRA-sim, 0.11 % longer than predicted
    """
    read = [decode(content) for content in files.values()]
    about = read[0].about
    pieces, packets = int(about["pieces"]), int(about["packets"])
    planned = plan.schedule.pieces
    parts = [
        f"{many(len(files), 'file')} for {about['nbytes']} bytes",
        many(sum(len(trace.nodes) for trace in read), "node"),
        f"{many(pieces, 'piece')} per chunk",
    ]
    if pieces < planned:
        parts.append(f"not {planned} as planned, which needs more than {MOST_NODES} nodes")
    if packets > 1:
        parts.append(f"{packets} packets per routed piece")
    if len(files) < len(plan.ranks):
        return {"traces": ", ".join(parts)}
    seconds = replay_nodes([trace.nodes for trace in read], plan.topology, plan.ranks)
    difference = round(100 * (seconds / plan.seconds - 1), 2) if plan.seconds else 0.0
    compared = f"{abs(difference)} % {'longer' if difference > 0 else 'shorter'} than" if difference else "as"
    replayed = f"{duration(seconds)} on FIFO links as in ASTRA-sim, {compared} predicted"
    return {"traces": ", ".join(parts), "replay": replayed}
