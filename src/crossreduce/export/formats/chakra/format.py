"""The format of Chakra's execution traces: protobuf messages, each after its length as a varint.

``encode`` converts the nodes of one rank to the bytes of its trace, and ``decode`` does the reverse. A trace is a
``GlobalMetadata`` message, followed by ``Node`` messages. Their classes are created here from descriptors, only with
the fields that these traces use. The protobuf package (the "chakra" extra) is imported at the first call.

Source: github.com/mlcommons/chakra, schema/protobuf/et_def.proto (messages and numbers of fields) and src/feeder
(lengths before messages; ``comm_size`` is an int64, ``comm_src``, ``comm_dst`` and ``comm_tag`` are int32).
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ....errors import ArgumentError, BackendError, shown

COMP_NODE: Final = 4
COMM_SEND_NODE: Final = 5
COMM_RECV_NODE: Final = 6

VERSION: Final = "0.0.4"  # of the schema, as the converters of Chakra write it

_LABELS: Final = {"optional": 1, "repeated": 3}  # the numbers of FieldDescriptorProto.Label and Type
_TYPES: Final = {"int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "message": 11, "uint32": 13, "enum": 14}
# For each message its fields: label, type, name, number. A type that is not in _TYPES is the name of a message or enum.
_MESSAGES: Final = {
    "AttributeProto": (
        ("optional", "string", "name", 1),
        ("optional", "int32", "int32_val", 7),
        ("optional", "int64", "int64_val", 9),
        ("optional", "uint32", "uint32_val", 11),
        ("optional", "uint64", "uint64_val", 13),
        ("optional", "bool", "bool_val", 27),
        ("optional", "string", "string_val", 29),
    ),
    "GlobalMetadata": (("optional", "string", "version", 1), ("repeated", "AttributeProto", "attr", 2)),
    "Node": (
        ("optional", "uint64", "id", 1),
        ("optional", "string", "name", 2),
        ("optional", "NodeType", "type", 3),
        ("repeated", "uint64", "ctrl_deps", 4),
        ("repeated", "uint64", "data_deps", 5),
        ("optional", "uint64", "start_time_micros", 6),
        ("optional", "uint64", "duration_micros", 7),
        ("repeated", "AttributeProto", "attr", 10),
    ),
}
_NODE_TYPES: Final = {
    "INVALID_NODE": 0,
    "COMP_NODE": COMP_NODE,
    "COMM_SEND_NODE": COMM_SEND_NODE,
    "COMM_RECV_NODE": COMM_RECV_NODE,
}


class TraceNode(NamedTuple):
    """A node of a trace: a message that its rank sends or receives, or a computation."""

    id: int
    kind: int  # COMP_NODE, COMM_SEND_NODE or COMM_RECV_NODE
    name: str
    deps: tuple[int, ...]  # the nodes of the same rank that must be complete before this one starts
    src: int = -1  # a rank; this field and the next four are only for messages
    dst: int = -1
    size: int = 0  # bytes
    tag: int = 0
    through: tuple[str, ...] | None = None  # the network nodes that the message passes; None: the network's own route
    duration_micros: int = 0


class Trace(NamedTuple):
    """The trace of one rank."""

    nodes: list[TraceNode]  # in the order of the file
    about: dict[str, str]  # the attributes of the metadata, by name


def encode(nodes: Iterable[TraceNode], about: dict[str, str]) -> bytes:
    """Return the bytes of one rank's trace. Its metadata stores the texts in ``about`` as attributes, by name.

    Raises:
      BackendError: protobuf is not installed.

    >>> trace = encode([TraceNode(0, COMM_SEND_NODE, "send", (), src=0, dst=1, size=1000)], {"collective": "broadcast"})
    >>> decode(trace).nodes[0][:7]
    (0, 5, 'send', (), 0, 1, 1000)
    """
    metadata_class, node_class = _classes()
    attributes = [{"name": name, "string_val": text} for name, text in about.items()]
    stream = io.BytesIO()
    _write(stream, metadata_class(version=VERSION, attr=attributes))
    for node in nodes:
        fields = {"id": node.id, "name": node.name, "type": node.kind, "data_deps": node.deps}
        _write(stream, node_class(**fields, duration_micros=node.duration_micros, attr=_attributes(node)))
    return stream.getvalue()


def decode(trace: bytes) -> Trace:
    """Return the trace that the bytes of a file contain.

    Raises:
      ArgumentError: the bytes are not a trace of Chakra.
      BackendError: protobuf is not installed.
    """
    metadata_class, node_class = _classes()
    from google.protobuf.message import DecodeError

    stream = io.BytesIO(trace)
    problem, remedy = "these bytes are not an execution trace of Chakra.", "the bytes of a file NAME.RANK.et"
    try:
        head = _read(stream, metadata_class)
        nodes = []
        while (message := _read(stream, node_class)) is not None:
            nodes.append(_node(message))
    except (DecodeError, ValueError, TypeError, IndexError) as error:
        raise ArgumentError.of(problem, f"{shown(trace)}: {error}", remedy) from error
    if head is None:
        raise ArgumentError.of(problem, "no bytes", remedy)
    return Trace(nodes, {attribute.name: attribute.string_val for attribute in head.attr})


def _node(message: Any) -> TraceNode:
    """Convert a ``Node`` message to a ``TraceNode``. Missing attributes get the default values of ``TraceNode``."""
    values = {attribute.name: _value(attribute) for attribute in message.attr}
    through = values.get("through")
    fields = {name: values[f"comm_{name}"] for name in ("src", "dst", "size", "tag") if f"comm_{name}" in values}
    fields |= {"through": None if through is None else tuple(through.split(","))}
    deps = (*message.data_deps, *message.ctrl_deps)
    return TraceNode(message.id, message.type, message.name, deps, **fields, duration_micros=message.duration_micros)


def _attributes(node: TraceNode) -> list[dict[str, Any]]:
    """Return the attributes of a node's message, each as the fields of an ``AttributeProto``."""
    # Without is_cpu_op, Chakra's first feeder would take a node for work of the CPU.
    attributes: list[dict[str, Any]] = [{"name": "is_cpu_op", "bool_val": False}]
    if node.kind != COMP_NODE:
        attributes += [{"name": "comm_src", "int32_val": node.src}, {"name": "comm_dst", "int32_val": node.dst}]
        attributes += [{"name": "comm_size", "int64_val": node.size}, {"name": "comm_tag", "int32_val": node.tag}]
    if node.through is not None:
        attributes.append({"name": "through", "string_val": ",".join(node.through)})
    return attributes


def _value(attribute: Any) -> Any:
    """Return the value of an attribute, or ``None`` if it has a type that these traces do not use."""
    kind = attribute.WhichOneof("value")
    return None if kind is None else getattr(attribute, kind)


def _write(stream: io.BytesIO, message: Any) -> None:
    from google.protobuf import proto

    proto.serialize_length_prefixed(message, stream)


def _read(stream: io.BytesIO, kind: Any) -> Any:
    """Return the next message, which has the class ``kind``, or ``None`` at the end of the stream."""
    from google.protobuf import proto

    return proto.parse_length_prefixed(kind, stream)


@lru_cache(maxsize=1)
def _classes() -> tuple[Any, Any]:
    """Return the classes of ``GlobalMetadata`` and ``Node``.

    A separate descriptor pool avoids conflicts with classes that protoc generated from the same schema.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise BackendError.of("Chakra traces need protobuf.", remedy="pip install protobuf") from error
    package = "ChakraProtoMsg"
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=package, syntax="proto3")
    file.enum_type.add(name="NodeType", value=[{"name": name, "number": n} for name, n in _NODE_TYPES.items()])
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")  # an attribute has one value, and so only one field besides its name
        for label, kind, field_name, number in fields:
            field = message.field.add(name=field_name, number=number, label=_LABELS[label])
            field.type = _TYPES.get(kind, _TYPES["enum" if kind == "NodeType" else "message"])
            if kind not in _TYPES:
                field.type_name = f".{package}.{kind}"
            if name == "AttributeProto" and field_name != "name":
                field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    types = [pool.FindMessageTypeByName(f"{package}.{name}") for name in ("GlobalMetadata", "Node")]
    metadata_class, node_class = map(message_factory.GetMessageClass, types)
    return metadata_class, node_class
