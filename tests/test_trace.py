from __future__ import annotations

import io
import itertools
import json
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import WAIT_S, bring_back, poisoned_slots, prompt_keys, put

from kvtier.chakra import from_chakra, to_chakra
from kvtier.errors import FormatError
from kvtier.simulator import replay
from kvtier.trace import LANES, Trace, TraceEvent, lane_order
from kvtier.trace_files import FORMAT, chrome_trace, from_json_lines, to_json_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.trace import TraceLane, What

MICROSECOND = 1e-6
DONE_BY: dict[TraceLane, What] = {
    "compute": "recompute", "device": "copy", "host": "copy", "ssd": "read", "write": "write"
}  # fmt: skip


@st.composite
def traces(draw: st.DrawFn) -> list[TraceEvent]:
    """Events on all lanes that end in the order of their ids, some after earlier ones."""
    events: list[TraceEvent] = []
    now = 0.0
    for event in range(1, draw(st.integers(1, 25)) + 1):
        now += draw(st.integers(0, 4000)) * MICROSECOND
        over = [e for e in events if e.end_s <= now]
        lane = draw(st.sampled_from(LANES))
        after = draw(st.sets(st.sampled_from([e.id for e in over]), max_size=3)) if over else set()
        ready = max((e.end_s for e in over if e.id in after), default=0.0)
        begin = now - draw(st.floats(0, 1)) * (now - ready)
        first = draw(st.integers(0, 100))
        events.append(
            TraceEvent(
                id=event,
                what=DONE_BY[lane],
                lane=lane,
                begin_s=min(max(begin, ready), now),
                end_s=now,
                session=draw(st.integers(0, 2)),
                start=first,
                stop=first + draw(st.integers(0, 4)),
                nbytes=draw(st.integers(0, 1 << 40)),
                after=tuple(sorted(after)),
            )
        )
    return events


def recorded(events: Sequence[TraceEvent]) -> Trace:
    """Return a trace to which the events were added."""
    trace = Trace()
    for e in events:
        trace.add(
            e.what, e.lane, e.begin_s, e.end_s,
            session=e.session, start=e.start, stop=e.stop, nbytes=e.nbytes, after=e.after,
        )  # fmt: skip
    return trace


# -- recording


@given(traces())
def test_a_trace_returns_what_was_added(events: list[TraceEvent]) -> None:
    """Every field of every event comes back, in the order of the ids."""
    assert recorded(events).events == events


def test_a_full_trace_keeps_the_last_events_and_no_dangling_dependency() -> None:
    """The record is bounded; an event does not name one that is no longer there."""
    trace = Trace(events_max=3)
    for number in range(5):
        trace.add("read", "ssd", number, number + 1, after=tuple(range(1, number + 1)))
    assert [(e.id, e.after) for e in trace.events] == [(3, ()), (4, (3,)), (5, (3, 4))]
    trace.clear()
    assert trace.events == []
    with pytest.raises(ValueError, match="events_max"):
        Trace(events_max=0)


def test_threads_get_ids_of_their_own() -> None:
    """However many threads add events and begin restores, no number is given twice."""
    trace = Trace()
    sessions: list[int] = []

    def work() -> None:
        for number in range(500):
            trace.add("copy", "host", number, number)
            sessions.append(trace.session())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e.id for e in trace.events] == list(range(1, 2001))
    assert sorted(sessions) == list(range(1, 2001))


@pytest.mark.parametrize(
    "change",
    [
        {"what": "sleep"}, {"lane": "gpu"}, {"end_s": 0.5}, {"end_s": float("nan")}, {"start": -1},
        {"stop": 0, "start": 1}, {"nbytes": -1}, {"session": -1}, {"after": (2,)}, {"after": (0,)},
    ],
)  # fmt: skip
def test_an_event_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    """An unknown kind, a time that runs backwards, a dependency on what comes later: refused."""
    event = TraceEvent(2, "read", "ssd", 1.0, 2.0, after=(1,))
    with pytest.raises(FormatError, match="event 2"):
        replace(event, **change)


# -- the order within a lane


@given(traces())
def test_lane_order_names_the_last_event_that_had_ended(events: list[TraceEvent]) -> None:
    """By definition: of the same lane and restore, ended before, none ended later than it."""
    order = lane_order(events)
    by_id = {event.id: event for event in events}
    for event in events:
        before = [
            other
            for other in events
            if (other.session, other.lane) == (event.session, event.lane)
            and other.end_s <= event.begin_s
            and other.id < event.id
        ]
        if not before:
            assert event.id not in order
        else:
            found = by_id[order[event.id]]
            assert found in before
            assert found.end_s == max(other.end_s for other in before)


# -- files


@given(traces())
def test_json_lines_round_trip(events: list[TraceEvent]) -> None:
    """What is read is what was written."""
    assert from_json_lines(to_json_lines(events)) == events


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: [], "line 1"),
        (lambda lines: lines[1:], "line 1"),
        (lambda lines: ['{"format": "kvtier-trace-2"}', *lines[1:]], FORMAT),
        (lambda lines: [lines[0], lines[1][:-10]], "line 2"),
        (lambda lines: [lines[0], "[" * 100_000], "line 2"),
        (lambda lines: [lines[0], lines[1].replace('"ssd"', '"gpu"')], "gpu"),
        (lambda lines: [lines[0], lines[1].replace('"id":1', '"id":"1"')], "line 2"),
        (lambda lines: [lines[0], lines[1].replace('"id":1', '"id":1,"x":2')], "line 2"),
    ],
)
def test_what_is_no_trace_file_is_refused(
    spoil: Callable[[list[str]], list[str]], says: str
) -> None:
    """Another format, a line cut short, a lane nobody knows: ``FormatError`` names the line."""
    lines = list(to_json_lines([TraceEvent(1, "read", "ssd", 0.0, 1.0)]))
    with pytest.raises(FormatError, match=says):
        from_json_lines(spoil(lines))


@given(traces())
def test_chrome_trace_shows_every_event_once_and_none_over_another(
    events: list[TraceEvent],
) -> None:
    """Complete events in microseconds; on one thread they never overlap; arrows are in pairs."""
    value = json.loads(json.dumps(chrome_trace(events)))
    spans = [row for row in value["traceEvents"] if row["ph"] == "X"]
    assert sorted(row["args"]["id"] for row in spans) == [event.id for event in events]
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in spans:
        threads.setdefault((row["pid"], row["tid"]), []).append(row)
    for rows in threads.values():
        rows.sort(key=lambda row: (row["ts"], row["dur"]))
        for earlier, later in itertools.pairwise(rows):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-3
    begins = [row["id"] for row in value["traceEvents"] if row["ph"] == "s"]
    assert sorted(begins) == sorted(row["id"] for row in value["traceEvents"] if row["ph"] == "f")
    assert len(set(begins)) == len(begins)
    named = {
        (row["pid"], row["tid"]) for row in value["traceEvents"] if row.get("name") == "thread_name"
    }
    assert named == set(threads)


# -- Chakra


@given(traces())
def test_chakra_round_trip(events: list[TraceEvent]) -> None:
    """Kinds, lanes, blocks, bytes and dependencies come back exactly, times to the microsecond."""
    found = from_chakra(to_chakra(events))
    origin = min(event.begin_s for event in events)
    assert [replace(e, begin_s=0.0, end_s=0.0) for e in found] == [
        replace(e, begin_s=0.0, end_s=0.0) for e in events
    ]
    for mine, theirs in zip(events, found, strict=True):
        assert theirs.begin_s == pytest.approx(mine.begin_s - origin, abs=MICROSECOND)
        assert theirs.end_s == pytest.approx(mine.end_s - origin, abs=MICROSECOND)


@given(traces(), st.data())
def test_a_damaged_execution_trace_never_raises_anything_else(
    events: list[TraceEvent], data: st.DataObject
) -> None:
    """Cut short or with bytes changed, it is ``FormatError`` or another trace, never a crash."""
    whole = bytearray(to_chakra(events))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    with suppress(FormatError):
        from_chakra(bytes(whole[:cut]))


def test_execution_traces_of_others_are_read() -> None:
    """Communication is a copy, a node that does nothing hands its dependencies on."""
    from google.protobuf import proto

    from kvtier.chakra import _messages

    out = io.BytesIO()
    proto.serialize_length_prefixed(_messages()["GlobalMetadata"](version="0.0.4"), out)
    node = _messages()["Node"]
    for fields in (
        {"id": 30, "type": 7, "duration_micros": 50, "data_deps": [20]},  # a collective
        {"id": 10, "type": 4, "duration_micros": 100},
        {"id": 20, "type": 1, "data_deps": [10]},  # metadata
    ):
        proto.serialize_length_prefixed(node(**fields), out)
    first, second = from_chakra(out.getvalue())
    assert (first.what, first.lane, first.seconds) == ("recompute", "compute", 1e-4)
    assert (second.what, second.lane, second.after) == ("copy", "host", (first.id,))
    assert second.begin_s == pytest.approx(first.end_s)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([{"id": 1, "data_deps": [2]}, {"id": 2, "data_deps": [1]}], "circle"),
        ([{"id": 1, "data_deps": [7]}], "depends on 7"),
        ([{"id": 1}, {"id": 1}], "id that another"),
    ],
)
def test_graphs_that_cannot_run_are_refused(nodes: list[dict[str, Any]], says: str) -> None:
    """Circles, missing nodes and ids given twice: ``FormatError``."""
    from google.protobuf import proto

    from kvtier.chakra import _messages

    out = io.BytesIO()
    proto.serialize_length_prefixed(_messages()["GlobalMetadata"](), out)
    for fields in nodes:
        proto.serialize_length_prefixed(_messages()["Node"](type=4, **fields), out)
    with pytest.raises(FormatError, match=says):
        from_chakra(out.getvalue())


def test_chakras_own_reader_agrees() -> None:
    """Chakra's package decodes our file to the same nodes; skipped where it is not installed."""
    theirs = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="chakra not installed")
    from google.protobuf import proto

    trace = Trace()
    read = trace.add("read", "ssd", 0.0, 1.0, nbytes=5)
    trace.add("copy", "host", 1.0, 1.5, nbytes=5, after=(read,))
    stream = io.BytesIO(to_chakra(trace.events))
    assert proto.parse_length_prefixed(theirs.GlobalMetadata, stream).version == "0.0.4"
    nodes = []
    while (node := proto.parse_length_prefixed(theirs.Node, stream)) is not None:
        nodes.append(node)
    assert [(n.type, list(n.data_deps), n.duration_micros) for n in nodes] == [
        (theirs.MEM_LOAD_NODE, [], 1_000_000),
        (theirs.MEM_LOAD_NODE, [1], 500_000),
    ]


# -- again, in the simulator


@given(traces())
def test_replay_at_the_same_speed_takes_the_same_time(events: list[TraceEvent]) -> None:
    """As many events, each as long as it was, and all of them where they were."""
    again = replay(events)
    origin = min(event.begin_s for event in events)
    assert [event.what for event in again] == [event.what for event in events]
    for mine, theirs in zip(events, again, strict=True):
        assert theirs.begin_s == pytest.approx(mine.begin_s - origin, abs=1e-9)
        assert theirs.seconds == pytest.approx(mine.seconds, abs=1e-9)


@given(traces(), st.dictionaries(st.sampled_from(LANES), st.floats(1.0, 8.0)))
def test_replay_with_faster_lanes_is_never_slower(
    events: list[TraceEvent], faster: dict[Any, float]
) -> None:
    """Nothing begins before what it depends on has ended, and nothing ends later than it did."""
    again = {event.id: event for event in replay(events, faster)}
    origin = min(event.begin_s for event in events)
    for event in events:
        assert again[event.id].end_s <= event.end_s - origin + 1e-9
        for earlier in event.after:
            assert again[earlier].end_s <= again[event.id].begin_s + 1e-9


def test_replay_shows_what_a_faster_link_would_be_worth() -> None:
    """A read of 2 s and a copy of 1 s after it: with the SSD twice as fast, 2 s instead of 3."""
    trace = Trace()
    read = trace.add("read", "ssd", 5.0, 7.0)
    trace.add("copy", "host", 7.0, 8.0, after=(read,))
    trace.add("wait", "compute", 5.0, 8.0)
    again = replay(trace.events, {"ssd": 2.0})
    assert max(event.end_s for event in again) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="positive"):
        replay(trace.events, {"ssd": 0.0})


# -- what a store notes


def test_a_store_notes_reads_copies_steps_and_writes_with_what_they_follow(open_store: Any) -> None:
    """Each block's write; then a restore: a copy after its read, a step after what it builds on."""
    trace = Trace()
    store = open_store(host_bytes=0, trace=trace)
    keys = prompt_keys(6)
    put(store, keys)
    store.flush()
    nbytes = store.spec.block_layout.block_bytes
    writes = [event for event in trace.events if event.what == "write"]
    assert sorted(event.start for event in writes) == list(range(6))
    assert {event.nbytes for event in writes} == {nbytes}
    trace.clear()

    residency = store.lookup(keys)
    tiers = [tier if block != 2 else None for block, tier in enumerate(residency.tiers)]
    plan = store.plan(replace(residency, tiers=tuple(tiers)), way="load")
    assert bring_back(store, keys, plan=plan).recomputed == [2]
    by_id = {event.id: event for event in trace.events}
    assert {event.session for event in by_id.values()} == {1}
    of = {what: [e for e in by_id.values() if e.what == what] for what in ("read", "copy")}
    for what, events in of.items():
        assert sorted(event.start for event in events) == [0, 1, 3, 4, 5], what
    for copy in of["copy"]:
        (read,) = (by_id[name] for name in copy.after)
        assert (read.what, read.start, copy.nbytes) == ("read", copy.start, nbytes)
        assert read.end_s <= copy.begin_s
    (step,) = (event for event in by_id.values() if event.what == "recompute")
    assert (step.start, step.stop) == (2, 3)
    assert sorted(by_id[name].start for name in step.after) == [0, 1]
    assert from_chakra(to_chakra(trace.events))
    assert max(event.end_s for event in replay(trace.events)) > 0


def test_a_store_notes_layers_and_its_own_device_tier(open_store: Any) -> None:
    """A layer of all blocks is one copy; what lay on the device is one from there."""
    trace = Trace()
    store = open_store(device="cpu", device_bytes="1MiB", trace=trace)
    keys = prompt_keys(5)
    put(store, keys)
    store.flush()
    trace.clear()
    plan = store.plan(store.lookup(keys), way="load")
    with store.restore(plan, poisoned_slots(5), layerwise=True) as session:
        assert session.next_step(WAIT_S) is None
    nbytes = store.spec.block_layout.block_bytes
    layers = [event for event in trace.events if event.lane == "host"]
    assert [(e.start, e.stop) for e in layers] == [(0, 5)] * store.spec.layers
    assert sum(event.nbytes for event in layers) == 5 * nbytes
    trace.clear()
    assert store.prefetch(keys, tier="device").result(WAIT_S) == 5
    bring_back(store, keys)
    (owned,) = (event for event in trace.events if event.lane == "device")
    assert (owned.start, owned.stop, owned.nbytes) == (0, 5, 5 * nbytes)
