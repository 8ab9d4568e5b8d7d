"""Read MSCCL++ execution plans (JSON).

Input: the text of a plan of any tool, for MSCCL++'s executor. Output: a ``MscclppPlan``, or ScheduleError.
``limits.py`` lists the executor's limits that a plan exceeds; ``verifier.py`` proves what the operations compute.

Source: src/core/executor/execution_plan.cc in github.com/microsoft/mscclpp (the fields and how they refer to each
other); python/mscclpp/language/internal/operations.py (the fields that MSCCL++'s tool writes).
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple

from ....errors import ScheduleError, shown
from ....topology.formats.json_format import why_not
from ..proof import BUFFERS, cut, quoted_name
from .json_fields import LARGEST, Fields

CHANNELS: Final = ("memory", "port", "switch", "none")
PROTOCOLS: Final = ("Simple", "LL")

# Operations on data, with patterns of their sources and destinations. "l": local memory, "r": a buffer of another GPU,
# "w": a switch channel; "+": one or more; "*": any number.
OPERATIONS: Final = {
    "put": ("l+", "r+"),
    "pws": ("l+", "r+"),
    "pwsf": ("l+", "r+"),
    "get": ("r+", "l+"),
    "copy": ("l", "l"),
    "re": ("l+", "l"),
    "res": ("l+", "lr*"),
    "rre": ("lr*", "l"),
    "rres": ("lr*", "lr*"),
    "ppkt": ("l+", "r+"),
    "rppkt": ("l", "r+"),
    "cpkt": ("l", "l"),
    "upkt": ("l", "l"),
    "repkt": ("l+", "l"),
    "respkt": ("l+", "lr*"),
    "recpkt": ("l+", "ll"),
    "recspkt": ("l+", "llr*"),
    "glres": ("w", "w"),
    "gstore": ("l", "w"),
    "gstorepkt": ("l", "w"),
}
PAIRED: Final = frozenset({"put", "pws", "pwsf", "get", "ppkt"})  # one source for each destination
ON_PORTS: Final = frozenset({"put", "pws", "pwsf", "ppkt", "rppkt"})  # operations on data that port channels have
ON_CHANNELS: Final = frozenset({"signal", "wait", "flush", "rlxsignal", "rlxwait"})
OTHERS: Final = ON_CHANNELS | {"nop", "barrier", "sem_acquire", "sem_release", "pipeline"}

# The largest texts that are read: larger ones would take gigabytes or minutes.
LONGEST_TEXT: Final = 1 << 26
MOST_OBJECTS: Final = 1 << 20
MOST_LISTS: Final = 1 << 21
MOST_COMMAS: Final = 1 << 23
MOST_CHUNKS: Final = 1 << 20
MOST_GPUS: Final = 1 << 12


class ChunkSpan(NamedTuple):
    """Neighbouring chunks that an operation reads or writes, in a local buffer or in buffers of other GPUs."""

    kind: str  # "l" for a local buffer, "r" for a remote buffer, "w" for a switch channel
    buffer: str  # "i", "o" or "s" for a local buffer, otherwise ""
    number: int  # the position in the threadblock's remote buffers or switch channels, or -1
    first: int
    size: int


class PlanOperation(NamedTuple):
    """An operation of a threadblock."""

    name: str
    channel_type: str = "none"
    channels: tuple[int, ...] = ()  # positions in the threadblock's channels of this type
    srcs: tuple[ChunkSpan, ...] = ()
    dsts: tuple[ChunkSpan, ...] = ()
    group: tuple[int, int] = (0, 1)  # (k, n): it processes the k-th of n parts of its chunks
    barrier: tuple[int, int] = (-1, 0)  # the number that names the barrier, and how many threadblocks wait there
    semaphores: tuple[int, ...] = ()
    reduce_op: str = "sum"  # the executor does not read it
    unit: int = 0  # for a pipeline, the bytes of an iteration
    chunks: int = 0  # for a pipeline, the chunks whose bytes determine the number of iterations
    operations: tuple[PlanOperation, ...] = ()  # for a pipeline, the operations of each iteration


class PlanThreadblock(NamedTuple):
    """A threadblock. For each type of channel, it has positions in the GPU's lists of channels and remote buffers."""

    operations: tuple[PlanOperation, ...]
    channels: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]


class RemoteBuffer(NamedTuple):
    """A buffer of another GPU, and the types of channels through which it is accessed."""

    rank: int
    buffer: str
    access: tuple[str, ...]


class PlanGpu(NamedTuple):
    """A GPU: the number of chunks in its buffers, its resources and its threadblocks."""

    inputs: int
    outputs: int
    scratch: int
    channels: dict[str, tuple[int, ...]]  # the other rank of each memory channel and of each port channel
    switches: tuple[tuple[str, tuple[int, ...]], ...]  # the buffer and the ranks of each switch channel
    buffers: tuple[RemoteBuffer, ...]
    semaphores: tuple[int, ...]  # their initial values
    threadblocks: tuple[PlanThreadblock, ...]


class MscclppPlan(NamedTuple):
    """An execution plan of MSCCL++."""

    name: str
    collective: str
    protocol: str
    inplace: bool
    reuse: bool  # reuse_resources: contexts share one scratch buffer, and long chunks use it again and again
    double: bool  # use_double_scratch_buffer: calls use the halves of the scratch buffer in turn
    alignment: int  # bytes
    threads: int  # per threadblock
    min_bytes: int
    max_bytes: int
    gpus: tuple[PlanGpu, ...]


def read_mscclpp_json(text: str) -> MscclppPlan:
    """Return the content of an MSCCL++ execution plan, after checks of its fields.

    Raises:
      ScheduleError: the text is not such a plan, or is too large; a field is missing or invalid; a number refers to a
        channel, buffer, semaphore or rank that does not exist.

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.formats.mscclpp import to_mscclpp_json
    >>> plan = read_mscclpp_json(to_mscclpp_json(ring(["cuda:0", "cuda:1"])))
    >>> plan.collective, plan.gpus[1].inputs
    ('allreduce', 2)
    """
    if not isinstance(text, str):
        raise ScheduleError.of("an MSCCL++ plan must be a str.", shown(text), "the content of a .json file")
    most_signs = {"{": MOST_OBJECTS, "[": MOST_LISTS, ",": MOST_COMMAS}
    for sign, most in most_signs.items():
        if len(text) > LONGEST_TEXT or text.count(sign) > most:
            given = f"{len(text)} characters, {text.count(sign)} of them '{sign}'"
            limit = f"up to {LONGEST_TEXT} characters, {most} '{sign}'"
            raise ScheduleError.of("the plan is too large to be read.", given, limit)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError.of(
            f"this is not an MSCCL++ plan: {why_not(error)}.", shown(text), "an MSCCL++ plan"
        ) from error
    top = Fields(content, "plan")
    name = top.text("name")
    top.at = f"plan {quoted_name(name)}"
    protocol, collective = top.text("protocol"), top.text("collective")
    if protocol not in PROTOCOLS:
        raise top.error("unknown protocol.", shown(protocol), "one of " + ", ".join(PROTOCOLS))
    children = top.children("gpus", "gpu")
    if not 1 <= len(children) <= MOST_GPUS:
        raise top.error("the plan must have GPUs.", f"{len(children)} GPUs", f"1 to {MOST_GPUS} GPUs")
    gpus = tuple(_gpu(child, number, len(children)) for number, child in enumerate(children))
    least, most = top.number("min_message_size", default=0), top.number("max_message_size", default=LARGEST)
    if least > most:
        raise top.error("the sizes exclude all messages.", f"min_message_size={least}, max_message_size={most}")
    return MscclppPlan(
        name,
        collective,
        protocol,
        top.flag("inplace"),
        top.flag("reuse_resources", default=False),
        top.flag("use_double_scratch_buffer", default=False),
        top.number("buffer_alignment", default=16, least=1, most=1 << 20),
        top.number("num_threads_per_block", default=1024, least=1, most=1024),
        least,
        most,
        gpus,
    )


def _gpu(fields: Fields, rank: int, ranks: int) -> PlanGpu:
    """Return GPU number ``rank`` of ``ranks`` GPUs."""
    if fields.number("id") != rank:
        raise fields.error("GPUs must be listed in the order of their ids.", f"id={fields.number('id')}", f"id={rank}")
    sizes = [fields.number(f"{which}_chunks", most=MOST_CHUNKS) for which in ("input", "output", "scratch")]
    channels: dict[str, tuple[int, ...]] = {"memory": (), "port": ()}
    switches: list[tuple[str, tuple[int, ...]]] = []
    for channel in fields.children("channels", "channel"):
        kind = channel.one_of("channel_type", CHANNELS[:3])
        if kind == "switch":
            buffer = channel.one_of("buffer_type", BUFFERS)
            groups = channel.children("rank_groups", "rank group")
            switches += [(buffer, group.numbers("ranks", ranks, "ranks")) for group in groups]
        else:
            peers = channel.numbers("connected_to", ranks, "ranks")
            if rank in peers:
                raise channel.error("a channel must connect two GPUs.", f"connected_to {rank}")
            channels[kind] += peers
    buffers = []
    for child in fields.children("remote_buffers", "remote buffer", default=[]):
        target = child.number("rank", most=ranks - 1)
        access = tuple(str(kind) for kind in child.items("access_channel_types"))
        buffers.append(RemoteBuffer(target, child.one_of("type", BUFFERS), access))
    semaphores = fields.children("semaphores", "semaphore", default=[])
    initial = tuple(semaphore.number("init_value", most=1 << 20) for semaphore in semaphores)
    gpu = PlanGpu(sizes[0], sizes[1], sizes[2], channels, tuple(switches), tuple(buffers), initial, ())
    blocks = fields.children("threadblocks", "tb")
    return gpu._replace(threadblocks=tuple(_threadblock(child, k, gpu) for k, child in enumerate(blocks)))


def _threadblock(fields: Fields, number: int, gpu: PlanGpu) -> PlanThreadblock:
    """Return threadblock ``number`` of a GPU. ``gpu`` is complete except for its threadblocks."""
    if fields.number("id") != number:
        given = f"id={fields.number('id')}"
        raise fields.error("threadblocks must be listed in the order of their ids.", given, f"id={number}")
    channels: dict[str, tuple[int, ...]] = {"memory": (), "port": (), "switch": ()}
    for used in fields.children("channels", "channels"):
        kind = used.one_of("channel_type", CHANNELS[:3])
        count = len(gpu.switches) if kind == "switch" else len(gpu.channels[kind])
        channels[kind] += used.numbers("channel_ids", count, f"{kind} channels of the GPU")
    buffers: dict[str, tuple[int, ...]] = {"memory": (), "port": ()}
    for used in fields.children("remote_buffer_refs", "remote_buffer_refs", default=[]):
        kind = used.one_of("access_channel_type", CHANNELS[:2])
        ids = used.numbers("remote_buffer_ids", len(gpu.buffers), "remote buffers of the GPU")
        for remote in ids:
            if kind not in gpu.buffers[remote].access:
                problem = f"remote buffer {remote} is not declared for access through {kind} channels."
                raise used.error(problem, f"access_channel_types: {', '.join(gpu.buffers[remote].access)}")
        buffers[kind] += ids
    block = PlanThreadblock((), channels, buffers)
    operations = tuple(_operation(child, gpu, block) for child in fields.children("ops", "op"))
    return block._replace(operations=operations)


def _operation(fields: Fields, gpu: PlanGpu, block: PlanThreadblock, *, inner: bool = False) -> PlanOperation:
    """Return an operation of a threadblock. ``inner`` operations are those in a pipeline."""
    name = fields.text("name")
    if name not in OPERATIONS and name not in OTHERS:
        raise fields.error(
            "MSCCL++'s executor has no such operation.",
            shown(name),
            "one of " + ", ".join(sorted({*OPERATIONS, *OTHERS})),
        )
    fields.at += f" ({name})"
    kind = fields.one_of("channel_type", CHANNELS) if "channel_type" in fields.content else "none"
    operation = PlanOperation(name, kind)
    if name in ON_CHANNELS and kind not in ("memory", "port"):
        raise fields.error("the operation needs memory or port channels.", f"channel_type {kind}")
    if name == "flush" and kind != "port":
        raise fields.error("only port channels are flushed.", f"channel_type {kind}")
    if name in ON_CHANNELS or (name in OPERATIONS and kind == "port"):
        count = len(block.channels[kind])
        operation = operation._replace(channels=fields.numbers("channel_ids", count, f"{kind} channels of the tb"))
    if name in OPERATIONS:
        operation = _add_spans(operation, fields, block)
        if "reduce_op" in fields.content:
            operation = operation._replace(reduce_op=fields.text("reduce_op"))
    elif name == "barrier":
        numbers = fields.number("barrier_id"), fields.number("num_threadblocks", least=1)
        operation = operation._replace(barrier=numbers)
    elif name in ("sem_acquire", "sem_release"):
        ids = fields.numbers("semaphore_ids", len(gpu.semaphores), "semaphores of the GPU")
        operation = operation._replace(semaphores=ids)
    elif name == "pipeline":
        if inner:
            raise fields.error("a pipeline must not contain a pipeline.")
        context = Fields(fields.value("iter_context"), f"{fields.at}, iter_context")
        unit, chunks = context.number("unit_size", least=1, most=(1 << 32) - 1), context.number("num_chunks")
        children = tuple(_operation(child, gpu, block, inner=True) for child in fields.children("ops", "op"))
        operation = operation._replace(unit=unit, chunks=chunks, operations=children)
    if "tbg_info" in fields.content:
        group = Fields(fields.value("tbg_info"), f"{fields.at}, tbg_info")
        size = group.number("tbg_size", least=1, most=1 << 16)
        operation = operation._replace(group=(group.number("tb_id", most=size - 1), size))
    return operation


def _add_spans(operation: PlanOperation, fields: Fields, block: PlanThreadblock) -> PlanOperation:
    """Return the operation with its sources and destinations, which must match the operation's patterns."""
    name, kind, patterns = operation.name, operation.channel_type, OPERATIONS[operation.name]
    if kind == "port" and name not in ON_PORTS:
        raise fields.error("port channels do not have this operation.", "channel_type port", "channel_type memory")
    if kind not in ("memory", "port") and "r" in "".join(patterns):
        raise fields.error("the operation needs memory or port channels.", f"channel_type {kind}")
    spans = []
    for key, pattern in zip(("src_buff", "dst_buff"), patterns, strict=True):
        found = tuple(_span(child, kind, block) for child in fields.children(key, key))
        kinds = "".join(span.kind for span in found)
        if not re.fullmatch(pattern, kinds):
            words = "l: local memory, r: a remote buffer, w: a switch channel, +: one or more, *: any number"
            raise fields.error(f"unexpected kinds of {key}.", cut(kinds) or "none", f"{pattern} ({words})")
        spans.append(found)
    srcs, dsts = spans
    if name in PAIRED and len(srcs) != len(dsts):
        given = f"{len(srcs)} sources, {len(dsts)} destinations"
        raise fields.error("there must be one source for each destination.", given)
    if kind == "port" and len(operation.channels) < len(dsts):
        given = f"{len(operation.channels)} channels, {len(dsts)} destinations"
        raise fields.error("there must be one channel for each destination.", given)
    return operation._replace(srcs=srcs, dsts=dsts)


def _span(fields: Fields, kind: str, block: PlanThreadblock) -> ChunkSpan:
    """Return the chunks of one source or destination. ``kind`` is the operation's type of channel."""
    first, size = fields.number("index", most=MOST_CHUNKS), fields.number("size", most=MOST_CHUNKS)
    if "switch_channel_id" in fields.content:
        switches = len(block.channels["switch"])
        number = fields.number("switch_channel_id", most=switches - 1)
        return ChunkSpan("w", "", number, first, size)
    if "buffer_id" in fields.content:
        if kind not in block.buffers:
            raise fields.error("a remote buffer needs memory or port channels.", f"channel_type {kind}")
        number = fields.number("buffer_id", most=len(block.buffers[kind]) - 1)
        return ChunkSpan("r", "", number, first, size)
    return ChunkSpan("l", fields.one_of("type", BUFFERS), -1, first, size)
