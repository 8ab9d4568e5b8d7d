"""Read MSCCL XML: the elements of a file as values, and the limits of the runtimes that the file breaks.

Input: the text of a file for msccl-executor-nccl, microsoft/msccl or RCCL. Output: an ``Algo``, or ScheduleError.
``verifier.py`` proves what the steps compute.

Source: msccl_parser.cc, msccl_parser.h and msccl_struct.h in github.com/Azure/msccl-executor-nccl and
github.com/ROCm/rccl (src/misc/msccl, src/include/msccl); ir.py in github.com/microsoft/msccl-tools (msccl/language).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ....errors import ScheduleError, shown
from ..collective import Location
from ..proof import BUFFERS, VERIFIABLE, cut, quoted_name

KNOWN: Final = VERIFIABLE | {"alltoallv", "gather", "scatter", "send", "recv", "custom"}
SENDS: Final = frozenset({"s", "rcs", "rrs", "rrcs"})
RECEIVES: Final = frozenset({"r", "rcs", "rrs", "rrc", "rrcs"})
READS: Final = frozenset({"s", "rrs", "rrc", "rrcs", "cpy", "re"})  # types that read src
WRITES: Final = frozenset({"r", "rcs", "rrc", "rrcs", "cpy", "re"})  # types that write dst
TYPES: Final = SENDS | RECEIVES | READS | WRITES | {"nop"}
PROTOCOLS: Final = ("Simple", "LL", "LL128")

LARGEST_COUNT: Final = 71  # MSCCL_MAX_COUNT is 72, and a step's cnt must be below it
MOST_PEERS: Final = 32  # MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL: of the send peers, and receive peers, of a channel
MOST_CHUNKS: Final = 32768  # an offset is an int16
LAST_WAITED: Final = 127  # a dependency's threadblock is an int8
LONGEST_TEXT: Final = 1 << 26
# Larger files are refused before they take gigabytes. A file at the verifier's limits has fewer elements, and elements
# of the format have at most 13 attributes.
MOST_ELEMENTS: Final = 1 << 18
MOST_ATTRIBUTES: Final = 64
LONGEST_TAG: Final = 1 << 16  # bytes

_NUMBER: Final = re.compile(r"0|-?[1-9][0-9]{0,18}")  # no leading zeros: the runtimes' strtol reads 010 as 8
_LARGEST: Final = 2**31 - 1  # attributes are of type int, but
_MOST_BYTES: Final = 2**63 - 1  # minBytes and maxBytes are of type int64_t


@dataclass(frozen=True)
class Runtime:
    """The limits of a runtime."""

    name: str
    channels: int
    threadblocks: int  # per GPU
    steps: int  # per threadblock
    elements: int  # of the XML
    required: tuple[str, ...] = ("name", "outofplace", "minBytes", "maxBytes")  # the attributes of <algo> that it needs


# The limits are MAXCHANNELS (nccl's device.h), MSCCL_MAX_NUM_THREAD_BLOCKS and MSCCL_MAX_NUM_STEPS (msccl_struct.h;
# earlier versions had more), and MAX_NODES (msccl_parser.h). It limits the elements that count for one GPU: the algo,
# each gpu, and the GPU's own threadblocks and steps. The limits of microsoft/msccl are in its src/include/msccl.h; that
# of elements is not known. Its parser (mscclGetAlgoFromXMLAndSetAlgo in src/graph/topo.cc) requires only the name.
RUNTIMES: Final = {
    "msccl": Runtime("msccl-executor-nccl", 32, 1024, 64, 32768),
    "rccl": Runtime("RCCL", 128, 64, 64, 4096),
    "microsoft": Runtime("microsoft/msccl", 32, 216, 256, MOST_ELEMENTS, ("name",)),
}


class XmlStep(NamedTuple):
    """A ``step`` element. It depends on step ``step`` of threadblock ``threadblock``, or on no step if these are -1."""

    type: str
    src: Location
    dst: Location
    chunks: int
    threadblock: int
    step: int
    signals: bool


class Threadblock(NamedTuple):
    """A ``tb`` element."""

    send: int  # the rank to which it sends, or -1
    recv: int  # the rank from which it receives, or -1
    channel: int
    steps: tuple[XmlStep, ...]


class Gpu(NamedTuple):
    """A ``gpu`` element."""

    sizes: dict[str, int]  # the number of chunks in each buffer
    threadblocks: tuple[Threadblock, ...]  # in the order of their ids


class Algo(NamedTuple):
    """An ``algo`` element.

    ``missing`` lists which of name, outofplace, minBytes and maxBytes it does not have, and ``skipped`` describes the
    elements that the runtimes skip.
    """

    name: str
    proto: str
    channels: int
    chunks: int
    coll: str
    inplace: bool
    outofplace: bool
    min_bytes: int
    max_bytes: int
    gpus: tuple[Gpu, ...]
    missing: tuple[str, ...]
    skipped: tuple[str, ...]


def units_of_xml(text: str) -> int:
    """Return the number of chunks of a file. The number of elements of a message must be a multiple of it."""
    return read_msccl_xml(text).chunks


def read_msccl_xml(text: str) -> Algo:
    """Return the content of an MSCCL XML file, after checks of its elements and attributes.

    Document types, entities, long tags and many elements are refused, so reading takes seconds and less than 1 GB.
    Elements that the runtimes do not know are skipped with all that they contain, as the runtimes do.

    Raises:
      ScheduleError: the text is not MSCCL XML; an attribute is missing or invalid; ids are not 0, 1, 2, ...

    >>> from crossreduce.planning import ring
    >>> from crossreduce.export.formats.msccl.writer import to_msccl_xml
    >>> read_msccl_xml(to_msccl_xml(ring(["cuda:0", "cuda:1"]))).gpus[1].threadblocks[0].steps[0].type
    'rrc'
    """
    if not isinstance(text, str):
        raise ScheduleError.of("MSCCL XML must be a str.", shown(text), "the content of a .xml file")
    if len(text) > LONGEST_TEXT:
        raise ScheduleError.of(f"this text is longer than {LONGEST_TEXT} characters.", f"{len(text)} characters")
    top, skipped = _parse(text)
    at = f"algo {quoted_name(top.attributes.get('name', ''))}"
    missing = tuple(name for name in ("name", "outofplace", "minBytes", "maxBytes") if name not in top.attributes)
    count = top.number("ngpus", at, least=1)
    gpus = [_read_gpu(child, at, count) for child in _order_by_id(top.children, "gpu", count, at)]
    proto, coll = top.text("proto", at), top.text("coll", at)
    if proto not in PROTOCOLS:
        raise ScheduleError.of(f"{at}: unknown protocol.", shown(proto), "one of " + ", ".join(PROTOCOLS))
    if coll not in KNOWN:
        raise ScheduleError.of(f"{at}: unknown collective.", shown(coll), "one of " + ", ".join(sorted(KNOWN)))
    inplace = top.flag("inplace", at)
    outofplace = not inplace if "outofplace" in missing else top.flag("outofplace", at)
    if not inplace and not outofplace:
        problem = f"{at}: the file is neither for calls in place nor out of place, so no call uses it."
        raise ScheduleError.of(problem, 'inplace="0" outofplace="0"', 'outofplace="1"')
    chunks = top.number("nchunksperloop", at, least=1, most=MOST_CHUNKS)
    if coll in ("reducescatter", "allgather", "alltoall") and chunks % count:
        problem = f"{at}: all ranks must have the same number of chunks in {coll}."
        raise ScheduleError.of(problem, f"{chunks} chunks, {count} ranks", f"nchunksperloop: a multiple of {count}")
    name, channels = top.attributes.get("name", ""), top.number("nchannels", at)
    least, most = (0 if key in missing else top.number(key, at, most=_MOST_BYTES) for key in ("minBytes", "maxBytes"))
    return Algo(name, proto, channels, chunks, coll, inplace, outofplace, least, most, tuple(gpus), missing, skipped)


@dataclass
class _XmlElement:
    """An element of a file. Its methods return checked attributes; ``at`` is the place of the element in errors."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[_XmlElement] = field(default_factory=list)

    def text(self, key: str, at: str) -> str:
        if key not in self.attributes:
            problem = f"{at} (line {self.line}): <{self.name}> lacks the attribute {key}."
            raise ScheduleError.of(problem, cut(", ".join(self.attributes)) or "no attribute")
        return self.attributes[key]

    def number(self, key: str, at: str, least: int = 0, most: int = _LARGEST) -> int:
        text = self.text(key, at)
        value = int(text) if _NUMBER.fullmatch(text) else None
        if value is None or not least <= value <= most:
            limits = f"from {least} to {most}"
            problem = f"{at} (line {self.line}): {key} must be an integer {limits}, without leading zeros."
            raise ScheduleError.of(problem, shown(text))
        return value

    def flag(self, key: str, at: str) -> bool:
        return bool(self.number(key, at, most=1))


_CHILDREN: Final = {"": "algo", "algo": "gpu", "gpu": "tb", "tb": "step", "step": ""}
_SKIPPED: Final = "/"  # stands for the name of an element that the runtimes skip; no element has this name


def _parse(text: str) -> tuple[_XmlElement, tuple[str, ...]]:
    """Return the root element of an XML text, and descriptions of the elements that the runtimes skip.

    The runtimes skip elements of other names in an algo, gpu or tb (mscclXmlLoadSub in msccl_parser.cc). For an element
    in a step, they read a list of handlers that does not exist.

    Raises:
      ScheduleError: the text is too large or is not MSCCL XML.
    """
    from xml.parsers import expat  # loaded with the first file that is read

    parser = expat.ParserCreate("utf-8")
    open_elements = [_XmlElement("", {}, 0)]
    skipped: dict[tuple[str, str], list[int]] = {}  # by the names of the parent and the element: the lines
    count = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        parent = open_elements[-1]
        line = parser.CurrentLineNumber
        skips = name != _CHILDREN.get(parent.name)
        if skips and parent.name in ("", "step"):
            inside = f"<{parent.name}>" if parent.name else "the file"
            problem = f"line {line}: {inside} must not contain an element <{name[:40]}>."
            raise ScheduleError.of(problem, "", "algo > gpu > tb > step, as in files of msccl-tools and RCCL")
        nonlocal count
        count += 1
        if count > MOST_ELEMENTS or len(attributes) > MOST_ATTRIBUTES:
            limits = f"up to {MOST_ELEMENTS} elements, each with up to {MOST_ATTRIBUTES} attributes"
            given = f"element {count}, <{name}>, with {len(attributes)} attributes"
            raise ScheduleError.of(f"line {line}: the file is too large to be read.", given, limits)
        element = _XmlElement(name, attributes, line)
        if not skips:
            parent.children.append(element)
        elif parent.name in _CHILDREN:
            skipped.setdefault((parent.name, name[:40]), []).append(line)
        open_elements.append(element if not skips else _XmlElement(_SKIPPED, {}, line))

    def characters(data: str) -> None:
        if data.strip():
            raise ScheduleError.of(f"line {parser.CurrentLineNumber}: unexpected text between elements.", shown(data))

    def refuse(*_: object) -> None:
        raise ScheduleError(f"line {parser.CurrentLineNumber}: the file must not contain a DOCTYPE or entities.")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_elements.pop()
    parser.CharacterDataHandler = characters
    parser.StartDoctypeDeclHandler = refuse
    try:
        data = text.encode()
        # In parts, because expat would first collect all attributes of a tag, however many there are.
        for end in range(LONGEST_TAG, len(data) + LONGEST_TAG, LONGEST_TAG):
            parser.Parse(data[end - LONGEST_TAG : end], False)
            if end - parser.CurrentByteIndex > 2 * LONGEST_TAG:
                problem = f"line {parser.CurrentLineNumber}: a tag or comment is longer than {LONGEST_TAG} bytes."
                raise ScheduleError.of(problem, shown(data[parser.CurrentByteIndex :][:200].decode(errors="replace")))
        parser.Parse(b"", True)
    except (expat.ExpatError, UnicodeError) as error:
        raise ScheduleError.of(f"this is not XML: {error}.", shown(text), "MSCCL XML") from error
    notes = [
        f"line {lines[0]}: the runtimes skip the element <{name}> in <{parent}>"
        + (f", and {len(lines) - 1} others like it" if len(lines) > 1 else "")
        for (parent, name), lines in skipped.items()
    ]
    return open_elements[0].children[0], tuple(notes)


def _order_by_id(elements: list[_XmlElement], what: str, count: int | None, at: str) -> list[_XmlElement]:
    """Return <``what``> elements in the order of their ids. If ``count`` is not ``None``, there must be so many."""
    by_id = {element.number("id", at): element for element in elements}
    wanted = len(elements) if count is None else count
    if sorted(by_id) != list(range(len(elements))) or len(elements) != wanted:
        given = cut(", ".join(element.attributes["id"] for element in elements)) or "none"
        problem = f"{at}: there must be {wanted} <{what}> elements with the ids 0, 1, 2, ..., each once."
        raise ScheduleError.of(problem, f"ids {given}", f"ids 0 to {wanted - 1}")
    return [by_id[number] for number in range(wanted)]


def _read_gpu(element: _XmlElement, algo: str, ranks: int) -> Gpu:
    """Return the content of a ``gpu`` element. ``algo`` is the place of its parent, in words."""
    at = f"{algo}, gpu {element.attributes['id']}"
    sizes = {buffer: element.number(f"{buffer}_chunks", at) for buffer in BUFFERS}
    blocks = []
    for child in _order_by_id(element.children, "tb", None, at):
        here = f"{at}, tb {child.attributes['id']}"
        send, recv = (child.number(key, here, least=-1, most=ranks - 1) for key in ("send", "recv"))
        if element.attributes["id"] in (str(send), str(recv)):
            raise ScheduleError(f"{here}: a GPU cannot send to itself, nor receive from itself: {send=}, {recv=}.")
        channel = child.number("chan", here, least=-1)
        steps = tuple(_read_step(step, number, here, send, recv) for number, step in enumerate(child.children))
        blocks.append(Threadblock(send, recv, channel, steps))
    return Gpu(sizes, tuple(blocks))


def _read_step(element: _XmlElement, number: int, block: str, send: int, recv: int) -> XmlStep:
    """Return the content of a ``step`` element. ``block`` is the place of its threadblock, in words."""
    at = f"{block}, step {number}"
    if element.number("s", at) != number:
        given = f's="{element.attributes["s"]}"'
        raise ScheduleError.of(f"{at}: steps must be numbered 0, 1, 2, ...", given, f's="{number}"')
    kind = element.text("type", at)
    if kind not in TYPES:
        raise ScheduleError.of(f"{at}: unknown type.", shown(kind), "one of " + ", ".join(sorted(TYPES)))
    if (kind in SENDS and send < 0) or (kind in RECEIVES and recv < 0):
        raise ScheduleError(f"{at} ({kind}): the threadblock lacks a peer that it needs: send={send}, recv={recv}.")
    spans = []
    for end in ("src", "dst"):
        buffer = element.text(f"{end}buf", at)
        if buffer not in BUFFERS:
            raise ScheduleError.of(f"{at}: unknown buffer in {end}buf.", shown(buffer), "one of i, o, s")
        spans.append(Location(buffer, element.number(f"{end}off", at, least=-1)))
    count = element.number("cnt", at, least=0 if kind == "nop" else 1)
    threadblock, step = (element.number(key, at, least=-1) for key in ("depid", "deps"))
    return XmlStep(kind, spans[0], spans[1], count, threadblock, step, element.flag("hasdep", at))


def broken_limits(algo: Algo, runtime: Runtime) -> Iterator[str]:
    """Yield, in words, the limits of a runtime that a file breaks. The runtime refuses the file, or runs it wrongly."""
    if missing := [name for name in algo.missing if name in runtime.required]:
        yield f"{runtime.name} refuses a file without the attribute {', '.join(missing)}"
    if algo.channels > runtime.channels:
        yield f"{runtime.name} has {runtime.channels} channels, the file needs {algo.channels}"
    limits = {
        "threadblocks per GPU": runtime.threadblocks,
        "steps per threadblock": runtime.steps,
        "XML elements per GPU": runtime.elements,
        "ranks to send to on a channel": MOST_PEERS,
        "ranks to receive from on a channel": MOST_PEERS,
        "chunks per step": LARGEST_COUNT,
        "threadblocks to wait for": LAST_WAITED + 1,
    }
    needs = [_needs(gpu.threadblocks, len(algo.gpus)) for gpu in algo.gpus]
    for (what, most), counts in zip(limits.items(), zip(*needs, strict=True), strict=True):
        if max(counts) > most:
            yield f"{runtime.name} has {most} {what}, gpu {counts.index(max(counts))} needs {max(counts)}"
    if any(block.channel < 0 for gpu in algo.gpus for block in gpu.threadblocks):
        yield f"{runtime.name} refuses a threadblock without a channel"


def _needs(blocks: tuple[Threadblock, ...], gpus: int) -> tuple[int, ...]:
    """Return how much of each limited resource a GPU needs, in the order of ``limits`` in ``broken_limits``."""
    steps = [step for block in blocks for step in block.steps]
    return (
        len(blocks),
        max((len(block.steps) for block in blocks), default=0),
        1 + gpus + len(blocks) + len(steps),
        max(Counter(block.channel for block in blocks if block.send >= 0).values(), default=0),
        max(Counter(block.channel for block in blocks if block.recv >= 0).values(), default=0),
        max((step.chunks for step in steps if step.type != "nop"), default=0),
        max((step.threadblock for step in steps), default=-1) + 1,
    )
