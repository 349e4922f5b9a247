"""Traces as MLCommons Chakra execution traces, which simulators such as ASTRA-sim read.

The schema is ``et_def.proto`` of github.com/mlcommons/chakra (MIT): a ``GlobalMetadata`` message,
then one ``Node`` message per event, each after its length as a base-128 varint. Only the fields
used here are described; readers skip what they do not know. Needs ``protobuf`` (extra ``chakra``).

::

    recompute        COMP_NODE         read, copy   MEM_LOAD_NODE
    wait             METADATA_NODE     write        MEM_STORE_NODE

``data_deps`` are what an event was noted to depend on, ``ctrl_deps`` the order within its lane.
"""

from __future__ import annotations

import heapq
import io
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import FormatError
from kvtier.trace import TraceEvent, lane_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["NODES_MAX", "SCHEMA_VERSION", "from_chakra", "to_chakra"]

SCHEMA_VERSION: Final = "0.0.4"
NODES_MAX: Final = 1 << 22
_US: Final = 1e6

_NODE_TYPES: Final = {
    "INVALID_NODE": 0, "METADATA_NODE": 1, "MEM_LOAD_NODE": 2, "MEM_STORE_NODE": 3, "COMP_NODE": 4,
    "COMM_SEND_NODE": 5, "COMM_RECV_NODE": 6, "COMM_COLL_NODE": 7,
}  # fmt: skip
_TYPE_OF: Final = {
    "recompute": "COMP_NODE",
    "read": "MEM_LOAD_NODE",
    "copy": "MEM_LOAD_NODE",
    "write": "MEM_STORE_NODE",
    "wait": "METADATA_NODE",
}
_FOREIGN: Final = {
    "COMP_NODE": ("recompute", "compute"),
    "MEM_LOAD_NODE": ("copy", "host"),
    "MEM_STORE_NODE": ("write", "write"),
    "COMM_SEND_NODE": ("copy", "host"),
    "COMM_RECV_NODE": ("copy", "host"),
    "COMM_COLL_NODE": ("copy", "host"),
}
"""What a node is that another program wrote; nodes of other types only carry dependencies."""


def to_chakra(events: Sequence[TraceEvent]) -> bytes:
    """Encode events as an execution trace; times in microseconds from the first event."""
    proto, messages = _proto(), _messages()
    origin = min((event.begin_s for event in events), default=0.0)
    order = lane_order(events)
    head = messages["GlobalMetadata"](version=SCHEMA_VERSION)
    head.attr.add(name="schema", string_val="kvtier")
    out = io.BytesIO()
    proto.serialize_length_prefixed(head, out)
    for event in events:
        begin_us, end_us = (round((at - origin) * _US) for at in (event.begin_s, event.end_s))
        node = messages["Node"](
            id=event.id,
            name=f"{event.what} [{event.start}, {event.stop})",
            type=_NODE_TYPES[_TYPE_OF[event.what]],
            ctrl_deps=[order[event.id]] if event.id in order else [],
            data_deps=event.after,
            start_time_micros=begin_us,
            duration_micros=end_us - begin_us,
        )
        node.attr.add(name="is_cpu_op", bool_val=event.what == "wait")
        node.attr.add(name="tensor_size", uint64_val=event.nbytes)
        node.attr.add(name="kvtier_what", string_val=event.what)
        node.attr.add(name="kvtier_lane", string_val=event.lane)
        for name in ("session", "start", "stop"):
            node.attr.add(name=f"kvtier_{name}", uint64_val=getattr(event, name))
        proto.serialize_length_prefixed(node, out)
    return out.getvalue()


def from_chakra(data: bytes) -> list[TraceEvent]:
    """Decode an execution trace of ours, or of another program; ``FormatError`` if it is none.

    Events are numbered anew, what they depend on first. Nodes without a start begin when what they
    depend on has ended.
    """
    nodes = _nodes(data)
    events: list[TraceEvent] = []
    stands_for: dict[int, tuple[int, ...]] = {}  # of each node, the events that it comes down to
    ends: dict[int, float] = {}
    for node in _in_order(nodes):
        deps = [*node.ctrl_deps, *node.data_deps]
        ready_s = max((ends[dep] for dep in deps), default=0.0)
        begin_s = max(node.start_time_micros / _US, 0.0) or ready_s
        ends[node.id] = begin_s + node.duration_micros / _US
        data_deps = {event for dep in node.data_deps for event in stands_for[dep]}
        attrs = {attr.name: attr for attr in node.attr}
        kind = _kind(node, attrs)
        if kind is None:  # it does nothing itself: what follows it follows what it followed
            stands_for[node.id] = tuple(sorted({e for dep in deps for e in stands_for[dep]}))
            continue
        number = len(events) + 1
        stands_for[node.id] = (number,)
        own = "kvtier_what" in attrs
        events.append(
            TraceEvent(
                id=number,
                what=kind[0],  # type: ignore[arg-type]
                lane=kind[1],  # type: ignore[arg-type]
                begin_s=begin_s,
                end_s=ends[node.id],
                session=attrs["kvtier_session"].uint64_val if own else 0,
                start=attrs["kvtier_start"].uint64_val if own else 0,
                stop=attrs["kvtier_stop"].uint64_val if own else 0,
                nbytes=attrs["tensor_size"].uint64_val if "tensor_size" in attrs else 0,
                after=tuple(sorted(data_deps)),
            )
        )
    return events


def _kind(node: Any, attrs: dict[str, Any]) -> tuple[str, str] | None:
    if "kvtier_what" in attrs:
        missing = {"kvtier_lane", "kvtier_session", "kvtier_start", "kvtier_stop"} - set(attrs)
        if missing:
            raise FormatError(f"node {node.id}: {', '.join(sorted(missing))} missing")
        return attrs["kvtier_what"].string_val, attrs["kvtier_lane"].string_val
    names = {number: name for name, number in _NODE_TYPES.items()}
    return _FOREIGN.get(names.get(node.type, ""))


def _in_order(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield nodes so that each comes after what it depends on, else in the order of their ids."""
    by_id = {node.id: node for node in nodes}
    if len(by_id) != len(nodes):
        raise FormatError(f"{len(nodes) - len(by_id)} nodes have an id that another one has")
    waits: dict[int, int] = {}
    followers: dict[int, list[int]] = {name: [] for name in by_id}
    for node in nodes:
        deps = {*node.ctrl_deps, *node.data_deps}
        if unknown := deps - by_id.keys():
            raise FormatError(f"node {node.id}: it depends on {min(unknown)}, which is missing")
        waits[node.id] = len(deps)
        for dep in deps:
            followers[dep].append(node.id)
    free = [name for name, count in waits.items() if not count]
    heapq.heapify(free)
    for _ in nodes:
        if not free:
            raise FormatError("nodes depend on each other in a circle")
        name = heapq.heappop(free)
        yield by_id[name]
        for follower in followers[name]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(free, follower)


def _nodes(data: bytes) -> list[Any]:
    messages, proto = _messages(), _proto()
    stream, nodes = io.BytesIO(data), list[Any]()
    kind = messages["GlobalMetadata"]
    while True:
        at = stream.tell()
        try:
            message = proto.parse_length_prefixed(kind, stream)
        except Exception as error:  # protobuf raises what its three implementations raise
            raise FormatError(f"byte {at}: not a message of an execution trace") from error
        if message is None:
            break
        if kind is messages["Node"]:
            nodes.append(message)
        kind = messages["Node"]
        if len(nodes) > NODES_MAX:
            raise FormatError(f"more than {NODES_MAX} nodes")
    if kind is not messages["Node"]:
        raise FormatError("empty: an execution trace begins with its metadata")
    return nodes


def _proto() -> Any:
    try:
        from google.protobuf import proto
    except ImportError as error:
        raise ImportError("Chakra traces need protobuf: pip install 'kvtier[chakra]'") from error
    return proto


@cache
def _messages() -> dict[str, Any]:
    """Return the message classes, described here so that nothing has to be generated."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type = descriptor_pb2.FieldDescriptorProto
    string, uint64, boolean = field_type.TYPE_STRING, field_type.TYPE_UINT64, field_type.TYPE_BOOL
    layout: dict[str, dict[str, tuple[int, Any]]] = {
        "AttributeProto": {
            "name": (1, string),
            "uint64_val": (13, uint64),
            "bool_val": (27, boolean),
            "string_val": (29, string),
        },
        "GlobalMetadata": {"version": (1, string), "attr": (2, "AttributeProto")},
        "Node": {
            "id": (1, uint64),
            "name": (2, string),
            "type": (3, field_type.TYPE_INT32),  # an enum on the wire
            "ctrl_deps": (4, [uint64]),
            "data_deps": (5, [uint64]),
            "start_time_micros": (6, uint64),
            "duration_micros": (7, uint64),
            "attr": (10, "AttributeProto"),
        },
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="kvtier/et_def.proto", package="kvtier.ChakraProtoMsg", syntax="proto3"
    )
    for message_name, fields in layout.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind) in fields.items():
            nested, many = isinstance(kind, str), not isinstance(kind, int)
            message.field.add(
                name=name,
                number=number,
                label=field_type.LABEL_REPEATED if many else field_type.LABEL_OPTIONAL,
                type=field_type.TYPE_MESSAGE if nested else kind[0] if many else kind,
                type_name=f".{file.package}.{kind}" if nested else None,
            )
    attribute = next(m for m in file.message_type if m.name == "AttributeProto")
    attribute.oneof_decl.add(name="value")
    for field in attribute.field[1:]:
        field.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}"))
        for name in layout
    }
