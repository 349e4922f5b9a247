from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtier

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(FOLDER))  # at the end: the benchmarks' own names are theirs alone
pytest.importorskip("rich")
SHAPE = "3,2,8,float16"
POOL_BYTES = 1 << 20


@pytest.fixture(scope="module")
def work() -> Any:
    """Import what is asked for, and when."""
    return importlib.import_module("_load_work")


@pytest.fixture(scope="module")
def kv() -> Any:
    """Import KV that follows from its block's hash."""
    return importlib.import_module("_load_content")


@pytest.fixture(scope="module")
def clients() -> Any:
    """Import those who ask."""
    return importlib.import_module("_load_run")


@pytest.fixture(scope="module")
def workloads() -> Any:
    """Import workloads and their runs."""
    return importlib.import_module("_load_workloads")


@pytest.fixture(scope="module")
def report() -> Any:
    """Import the table and the sentence."""
    return importlib.import_module("_load_report")


# -- when


def test_percentiles_are_values_that_were_measured(work: Any) -> None:
    """The smallest value that so many percent do not exceed; nothing of nothing."""
    values = list(range(1, 101))
    random.Random(1).shuffle(values)  # noqa: S311 - any order will do
    assert work.percentiles(values) == [50, 95, 99]
    assert work.percentiles([3.0, 9.0]) == [3.0, 9.0, 9.0]
    assert work.percentiles([]) == []


@given(
    kind=st.sampled_from(["poisson", "fixed", "bursty"]),
    rate=st.floats(0.1, 1000),
    count=st.integers(1, 300),
    seed=st.integers(0, 99),
)
def test_arrivals_are_in_order_and_the_same_every_time(
    work: Any, kind: str, rate: float, count: int, seed: int
) -> None:
    """Whatever the kind; the first ones do not depend on how many follow."""
    dues = work.arrivals(kind, rate, count, seed)
    assert len(dues) == count
    assert all(0 <= before <= after for before, after in pairwise([0.0, *dues]))
    assert dues == work.arrivals(kind, rate, count + 5, seed)[:count]


@pytest.mark.parametrize("kind", ["poisson", "fixed", "bursty"])
def test_arrivals_have_the_rate_that_was_asked_for(work: Any, kind: str) -> None:
    """In the long run; bursts come together."""
    dues = work.arrivals(kind, 50.0, 20_000, seed=3)
    assert dues[-1] == pytest.approx(20_000 / 50.0, rel=0.05)
    gaps = np.diff(dues)
    assert (gaps == 0).mean() == pytest.approx(7 / 8 if kind == "bursty" else 0, abs=1e-3)
    if kind != "fixed":  # as irregular as independent events: mean and deviation of gaps agree
        between = gaps[gaps > 0]
        assert between.std() == pytest.approx(between.mean(), rel=0.05)


@pytest.mark.parametrize(("kind", "rate"), [("poisson", 0.0), ("fixed", float("inf")), ("x", 1.0)])
def test_arrivals_that_make_no_sense_are_refused(work: Any, kind: str, rate: float) -> None:
    """By name."""
    with pytest.raises(ValueError, match=r"rate: |arrivals: "):
        work.arrivals(kind, rate, 3, seed=1)


def test_a_trace_keeps_its_rhythm_at_another_rate(work: Any) -> None:
    """Gaps keep their proportions; a trace without gaps comes at once."""
    assert work.rescaled([10.0, 11.0, 14.0], rate=1.0) == [0.0, 0.5, 2.0]
    assert work.rescaled([4.0, 4.0], rate=1.0) == [0.0, 0.0]


# -- how long


def test_lengths_in_whole_blocks(work: Any) -> None:
    """At least one, and within what was asked for."""
    assert work.lengths("8192", 2, 1) == [32, 32]
    assert work.lengths("100", 1, 1) == [1]
    assert work.lengths("list:1024,2048", 3, 1) == [4, 8, 4]
    drawn = work.lengths("uniform:1024-4096", 2000, 1)
    assert (min(drawn), max(drawn)) == (4, 15)
    drawn = work.lengths("lognormal:8192,0.5", 4001, 1)
    assert sorted(drawn)[2000] == pytest.approx(32, abs=1)
    logs = np.log(drawn)
    assert logs.std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "abc", "-5", "uniform:1024", "lognormal:4096", "list:", "list:8,x", "1e99"]
)
def test_lengths_that_make_no_sense_are_refused(work: Any, text: str) -> None:
    """With what would have made sense."""
    with pytest.raises(ValueError, match=r"lengths: .* is not '8192'"):
        work.lengths(text, 1, 1)


# -- sharing


def test_sharing_is_read(work: Any) -> None:
    """System prompts are given in tokens; what is not known is refused by name."""
    made = work.Sharing.parse("system:2048,zipf:1.5,prefixes:9,fresh:0")
    assert made == work.Sharing(system=8, zipf=1.5, prefixes=9, fresh=0.0)
    assert work.Sharing.parse("turns:4").turns == 4
    for text in ("zipf", "zpif:1", "prefixes:0", "fresh:2", "turns:-1"):
        with pytest.raises(ValueError, match="share: "):
            work.Sharing.parse(text)


def test_popular_texts_are_asked_for_more_often_and_every_prompt_has_an_end_of_its_own(
    work: Any,
) -> None:
    """The k-th in proportion to 1 / k; all begin with the system prompt."""
    sharing = work.Sharing(system=2, zipf=1.0, prefixes=4, fresh=0.25)
    asked = work.prompts(sharing, [8], 5000, seed=2)
    assert {len(prompt) for prompt in asked} == {8}
    assert len({prompt[:2] for prompt in asked}) == 1
    texts = Counter(prompt[:6] for prompt in asked)
    shares = [count / 5000 for _, count in texts.most_common()]
    weights = [1 / k for k in (1, 2, 3, 4)]
    assert shares == pytest.approx([each / sum(weights) for each in weights], abs=0.02)
    most_liked = texts.most_common(1)[0][0]
    assert most_liked == work.prefix(sharing, 0, 8)
    assert len({prompt[6:] for prompt in asked}) == 5000
    assert work.working_set(asked) == 2 + 4 * 4 + 5000 * 2
    assert asked == work.prompts(sharing, [8], 5000, seed=2)


def test_a_conversation_grows_by_turns(work: Any) -> None:
    """Each prompt of it begins with the one before, up to its full length."""
    asked = work.prompts(work.Sharing(system=1, turns=4), [12, 8], 400, seed=2)
    talks: dict[bytes, list[Any]] = {}
    for prompt in asked:
        talks.setdefault(prompt[1], []).append(prompt)
    assert len(talks) > 50
    grown = [turns for turns in talks.values() if len(turns) == 4]
    assert {tuple(map(len, turns)) for turns in grown} == {(3, 6, 9, 12), (2, 4, 6, 8)}
    for turns in talks.values():
        assert all(after[: len(before)] == before for before, after in pairwise(turns))


def test_blocks_of_a_trace_are_cut_into_ours(work: Any) -> None:
    """Equal prefixes stay equal, others differ, and long prompts are cut."""
    replayed = importlib.import_module("_replay_traces")
    one, two, three = (bytes([each]) * 32 for each in (1, 2, 3))
    requests = (
        replayed.Request(0.0, (one, two), 1024),
        replayed.Request(1.0, (one, three), 1024),
    )
    first, second = work.of_trace(replayed.Trace("t", 512, requests), blocks_max=3)
    assert (len(first), len(second), len(set(first))) == (3, 3, 3)
    assert first[:2] == second[:2]
    assert first[2] != second[2]


def test_equal_prefixes_have_equal_keys_and_no_others(work: Any, kv: Any) -> None:
    """A block's tokens follow from its name alone."""
    spec = kv.spec_of(SHAPE)
    one, two = work.prompts(work.Sharing(prefixes=1, fresh=0.5), [4], 2, seed=1)
    first, second = (kvtier.BlockKeys.of(spec, work.tokens(each)).hashes for each in (one, two))
    assert len(first) == 4
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


@pytest.mark.parametrize(("text", "expected"), [("40%", 400), ("0%", 0), ("150%", 1500), ("7", 7)])
def test_a_size_may_be_a_part_of_the_working_set(work: Any, text: str, expected: int) -> None:
    """Or whatever the store's settings read."""
    assert work.size(text, 1000, int) == expected


@pytest.mark.parametrize("text", ["x%", "-1%", "nan%", "%"])
def test_a_part_that_makes_no_sense_is_refused(work: Any, text: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match="part of the working set"):
        work.size(text, 1000, int)


# -- content


@pytest.fixture(scope="module")
def content(kv: Any) -> Any:
    """Return what blocks of the smallest shape have to hold."""
    return kv.Content(kv.spec_of(SHAPE), POOL_BYTES)


def filled(work: Any, kv: Any, content: Any, blocks: int) -> tuple[Any, Any]:
    """Return the keys of a prompt and memory that holds its blocks."""
    spec = kv.spec_of(SHAPE)
    (prompt,) = work.prompts(work.Sharing(), [blocks], 1, seed=1)
    keys = kvtier.BlockKeys.of(spec, work.tokens(prompt))
    memory = np.zeros(blocks * spec.block_layout.block_bytes // 8, np.uint64)
    source, slots = content.source(keys), kv.target(content.layout, memory)
    for block in range(blocks):
        (into,) = slots.arrays(block)
        into[:] = np.concatenate(source.arrays(block))
    return keys, memory


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_byte_that_changed_is_found(work: Any, kv: Any, content: Any, data: Any) -> None:
    """Whichever block, layer and bit; the other blocks are right all the same."""
    keys, memory = filled(work, kv, content, 3)
    assert content.differing(keys, memory, range(3), 0) == 0
    at = data.draw(st.integers(0, memory.nbytes - 1))
    memory.view(np.uint8)[at] ^= 1 << data.draw(st.integers(0, 7))
    assert content.differing(keys, memory, range(3), 0) == 1
    block = at // content.layout.block_bytes
    assert content.differing(keys, memory, [block], 0) == 1


def test_blocks_and_layers_in_each_others_place_are_found(work: Any, kv: Any, content: Any) -> None:
    """As is a slot that nobody wrote to."""
    keys, memory = filled(work, kv, content, 2)
    first, second = memory.reshape(2, -1).copy()
    assert content.differing(keys, np.concatenate([second, first]), range(2), 0) == 2
    layers = first.reshape(3, -1)[[1, 0, 2]].reshape(-1)
    assert content.differing(keys, np.concatenate([layers, second]), range(2), 0) == 1
    assert content.differing(keys, second, [1], 1) == 0
    kv.spoil(memory)
    assert content.differing(keys, memory, range(2), 0) == 2


def test_parts_hold_what_arrays_hold(work: Any, kv: Any, content: Any) -> None:
    """Tensors in the record's order, of its shapes."""
    keys, memory = filled(work, kv, content, 2)
    slots = kv.target(content.layout, memory)
    parts = slots.parts(1)
    assert [tuple(part.shape) for part in parts] == [t.shape for t in content.layout.tensors]
    flat = np.concatenate([part.numpy().reshape(-1).view(np.uint16) for part in parts])
    assert (flat == slots.arrays(1)[0]).all()
    assert slots.device.type == "cpu"
    assert len(keys) == 2


def test_shapes_by_name_and_by_numbers(kv: Any) -> None:
    """A block has the bytes that the model's KV of 256 tokens has."""
    assert kv.spec_of("Llama-3-8B").block_layout.block_bytes == 32 << 20
    assert kv.spec_of("qwen2.5-7b").block_layout.block_bytes == 14 << 20
    assert kv.spec_of("2,4,64,float32").block_layout.block_bytes == 2 * 2 * 4 * 64 * 4 * 256
    for text in ("llama-9", "2,4,64", "a,b,c,float16"):
        with pytest.raises(ValueError, match="shape: "):
            kv.spec_of(text)


# -- clients


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds > 0
        self.now += seconds


def test_a_late_request_counts_from_when_it_came(clients: Any) -> None:
    """Open loop: waiting for a client is part of the latency."""
    clock, latencies = Clock(), []

    def serve(_: int, due: float, __: int) -> None:
        clock.sleep(1.0)
        latencies.append(clock.time() - due)

    begun = clients.drive(
        serve, 4, 1, dues=[0.5, 0.6, 0.7, 10.0], clock=clock.time, sleep=clock.sleep
    )
    assert latencies == pytest.approx([1.0, 1.9, 2.8, 1.0])
    assert begun == 100.5


def test_in_a_closed_loop_a_client_asks_again_after_thinking(clients: Any) -> None:
    """So no request is ever late."""
    clock, dues = Clock(), []

    def serve(_: int, due: float, __: int) -> None:
        dues.append(due - 100.0)
        clock.sleep(1.0)

    clients.drive(serve, 3, 1, think_s=0.5, clock=clock.time, sleep=clock.sleep)
    assert dues == [0.0, 1.5, 3.0]


def test_every_request_is_served_once_and_so_many_at_a_time(clients: Any) -> None:
    """All clients are at work at once."""
    together, lock, served = threading.Barrier(4, timeout=30), threading.Lock(), Counter[int]()

    def serve(number: int, _: float, client: int) -> None:
        together.wait()
        assert 0 <= client < 4
        with lock:
            served[number] += 1

    clients.drive(serve, 12, 4)
    assert served == Counter(range(12))


def test_an_error_of_one_client_ends_the_run(clients: Any) -> None:
    """And is raised."""
    served = []

    def serve(number: int, _: float, __: int) -> None:
        served.append(number)
        if number == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        clients.drive(serve, 1000, 2)
    assert len(served) < 1000


@pytest.fixture
def store(kv: Any, tmp_path: Path) -> Iterator[Any]:
    """Open a store that keeps nothing in host memory."""
    with kvtier.open(tmp_path / "s", kv.spec_of(SHAPE), host_bytes=0, ssd_bytes="64MiB") as made:
        yield made


def test_what_is_missing_is_put_and_then_restored_and_compared(
    work: Any, kv: Any, clients: Any, content: Any, store: Any
) -> None:
    """The first request finds nothing, the second everything, of every byte of it sure."""
    (prompt,) = work.prompts(work.Sharing(), [6], 1, seed=1)
    engine = clients.Engine(store, content, clients=1, blocks_max=6)
    for _ in range(2):
        engine.serve(prompt, 0.0, 0)
        store.flush()
    counts = [(each.blocks, each.right, each.wrong, each.failed) for each in engine.seen.served]
    assert counts == [(6, 0, 0, 0), (6, 6, 0, 0)]
    (put,) = engine.seen.puts
    assert put.result().stored == 6
    assert engine.seen.checked_cpu_s > 0


def test_a_store_that_gives_other_bytes_is_found_out(
    work: Any, kv: Any, clients: Any, content: Any, store: Any
) -> None:
    """Such blocks are wrong, and not restored."""
    (prompt,) = work.prompts(work.Sharing(), [6], 1, seed=1)
    clients.Engine(store, content, clients=1, blocks_max=6).fill(prompt)
    other = kv.Content(kv.spec_of(SHAPE), POOL_BYTES, seed=2)
    engine = clients.Engine(store, other, clients=1, blocks_max=6)
    engine.serve(prompt, 0.0, 0)
    (served,) = engine.seen.served
    assert (served.right, served.wrong, served.failed) == (0, 6, 0)
    assert engine.seen.wrong == 6


def test_a_damaged_read_is_no_throughput(
    work: Any, clients: Any, workloads: Any, content: Any, store: Any
) -> None:
    """A byte flipped on the disk costs its block, and that block only."""
    (prompt,) = work.prompts(work.Sharing(), [6], 1, seed=1)
    engine = clients.Engine(store, content, clients=1, blocks_max=6)
    engine.fill(prompt)
    store.flush()
    assert workloads.corrupt(store, 2) == 2
    engine.serve(prompt, 0.0, 0)
    (served,) = engine.seen.served
    assert (served.right, served.wrong, served.failed) == (4, 0, 2)


def test_a_lookup_that_fails_beside_the_load_ends_the_run(work: Any, clients: Any) -> None:
    """Its error is raised where the scope ends."""

    class Broken:
        def keys(self, ids: Any) -> Any:
            """Return anything."""
            return ids

        def lookup(self, _: Any) -> Any:
            """Fail."""
            raise ZeroDivisionError

    asked = work.prompts(work.Sharing(), [1], 1, seed=1)
    with pytest.raises(ZeroDivisionError), clients.Scheduler(Broken(), asked, 1000.0) as scheduler:
        scheduler._thread.join(30)
    assert scheduler.latencies_s == []


def test_a_cold_pass_counts_right_blocks_only(
    work: Any, kv: Any, workloads: Any, content: Any, tmp_path: Path
) -> None:
    """Seconds are those of a GiB that was restored right; the rest is counted as damaged."""
    cold = importlib.import_module("_load_cold")
    spec = kv.spec_of(SHAPE)
    block = spec.block_layout.block_bytes
    with cold.open_cold(tmp_path / "cold", spec, 64 * block) as opened:
        load = cold.ColdLoad(opened, content, 64 * block)
        assert (load.tail, load.blocks) == (2, 64)
        trial = load.run(1e9)
        assert trial.detail["gib"] == 64 * block / (1 << 30)
        assert len(trial.detail["ready_ms"]) == 3
        workloads.corrupt(opened, 3)
        trial = load.run(1e9)
        assert trial.detail["gib"] == 61 * block / (1 << 30)
        assert (load.right, load.wrong, load.damaged) == (125, 0, 3)


# -- workloads


def test_a_described_workload(workloads: Any, work: Any) -> None:
    """What is given is taken, what is wrong is refused by name."""
    made = workloads.yours(
        {"clients": "3", "think": "0.5", "share": "turns:4", "shape": "x", "host": "10%"},
        quick=True,
    )
    assert (made.clients, made.think_s, made.host) == (3, 0.5, "10%")
    assert made.sharing == work.Sharing(turns=4)
    assert not made.filled
    for given_, word in (
        ({"clients": "x"}, "clients"), ({"clients": "0"}, "yours"), ({"trace": "x"}, "trace"),
        ({"arrivals": "x"}, "arrivals"), ({"lengths": "x"}, "lengths"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            workloads.yours(given_, quick=True)


def test_built_in_workloads_exceed_host_memory_and_one_the_ssd(workloads: Any) -> None:
    """By what is asked of them, whatever the shape."""
    made = {each.name: each for each in workloads.built_in(1)}
    assert all(float(each.host.rstrip("%")) < 100 for each in made.values())
    assert float(made["budget"].ssd.rstrip("%")) < 100
    assert made["budget"].dues(1.0) is None
    assert {each.arrivals for each in made.values()} >= {"poisson", "bursty", "closed"}
    texts = made["texts"]
    stored = {block for text in texts.shared(8) for block in text}
    asked = texts.asked(8)
    shared = sum(block in stored for prompt in asked for block in prompt)
    assert 0.7 < shared / sum(map(len, asked)) < 1
    assert max(map(len, asked)) <= 8


# -- the report


def outcome(report: Any, **changes: Any) -> Any:
    """Return made-up numbers."""
    limits = importlib.import_module("_load_limits").Limits(read=2e9, write=1e9, memcpy=9e9)
    values: dict[str, Any] = {
        "name": "texts", "what": "w", "block_bytes": 1 << 20, "asked_blocks": 4096,
        "right_blocks": 1024, "wrong_blocks": 0, "failed_blocks": 0, "damaged_blocks": 0,
        "dropped_blocks": 0, "wall_s": 2.0, "written_s": 4.0, "host_bytes": 0, "ssd_bytes": 1 << 30,
        "read_bytes": 2 * 10**9, "written_bytes": 10**9, "put_bytes": 1 << 30, "cpu_s": 3.0,
        "checked_cpu_s": 1.0, "others": 0.0, "lookup_s": (0.001, 0.002), "ready_s": (0.1,),
        "waited_s": (0.0,), "released_s": (), "limits": limits,
    }  # fmt: skip
    return report.Outcome(**{**values, **changes})


def test_what_a_workload_comes_to(report: Any) -> None:
    """Only right blocks are restored; comparing is not the store's CPU time."""
    made = outcome(report)
    assert made.hit_rate == 0.25
    assert made.restore_rate == (1 << 30) / 2.0
    assert made.disk_share == pytest.approx((1.0 + 1.0) / 4.0)
    assert made.core_s_per_gib == pytest.approx((3.0 - 1.0) / 2)
    assert outcome(report, right_blocks=0, put_bytes=0).core_s_per_gib is None
    value = made.to_json()
    assert value["lookup_ms"] == [1.0, 2.0, 2.0]
    assert value["released_ms"] == []
    assert value["limits"] == {"read": 2e9, "write": 1e9, "memcpy": 9e9}
    json.dumps(value, allow_nan=False)


def test_the_sentence_says_what_was_found(report: Any) -> None:
    """Wrong bytes alone, if there are any; damage beside everything else."""
    harness = importlib.import_module("_harness")
    ratios = [
        harness.Ratio("load_vs_raw", 0.93, harness.Bar(low=0.85), 0.01, 5),
        harness.Ratio("lookup_p99_ms", 2.4, harness.Bar(high=2.0), 0.1, 5),
    ]
    said = report.verdict(ratios, [], report.Blocks(640, 0, 0))
    assert "at 0.93 of what the disk alone delivers (met)" in said
    assert "is 2.4 ms (missed)" in said
    assert "all 640 blocks that count were compared" in said
    assert "could not be read" not in said
    said = report.verdict([], [outcome(report)], report.Blocks(640, 0, 3))
    assert "25% of the blocks restored at 0.54 GB/s" in said
    assert "3 could not be read as they were stored" in said
    said = report.verdict(ratios, [outcome(report)], report.Blocks(640, 2, 0))
    assert said.startswith("WRONG BYTES: 2 restored blocks differ")
    assert "0.93" not in said


# -- the script


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark in its quickest setting."""
    return subprocess.run(
        [sys.executable, str(FOLDER / "load.py"), "--smoke", *arguments],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_load_runs_on_the_smallest_cases(tmp_path: Path) -> None:
    """Every part once, every byte compared, a table that fits, and no file left."""
    out, folder = tmp_path / "load.json", tmp_path / "disk"
    done = run("--dir", str(folder), "--json", str(out))
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: too slow here, which is no bug
    value = json.loads(out.read_text())
    assert set(value) == {"name", "commit", "machine", "settings", "ratios", "results"}
    names = ["load_vs_raw", "lookup_p99_ms", "lookup_from_due_p99_ms", "load_core_s_per_gib"]
    assert list(value["ratios"]) == names
    assert all(number > 0 for number in value["ratios"].values())
    rows = {row["name"]: row for row in value["results"] if row.get("case") == "workload"}
    assert list(rows) == ["texts", "budget", "turns", "trace"]
    assert all(row["asked_blocks"] > 0 == row["wrong_blocks"] for row in rows.values())
    # The others begin with nothing stored: what they find is what was put before they asked, which
    # on a busy machine may be nothing in so short a run.
    assert all(rows[name]["right_blocks"] > 0 for name in ("texts", "budget"))
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "were compared, every byte of them, and are right" in " ".join(done.stdout.split())
    assert not list(folder.iterdir())


def test_damaged_blocks_are_reported_and_not_counted(tmp_path: Path) -> None:
    """Of a workload that somebody described; a bad description is refused by name."""
    out = tmp_path / "load.json"
    done = run(
        "--lengths", "1024", "--share", "prefixes:4,fresh:0", "--requests", "24", "--host", "0%",
        "--corrupt", "6", "--clients", "2", "--dir", str(tmp_path / "d"), "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    row, said = json.loads(out.read_text())["results"]
    assert said["text"].split() == done.stdout.split()[-len(said["text"].split()) :]
    assert row["damaged_blocks"] == 6
    assert row["failed_blocks"] >= 6
    assert row["right_blocks"] + row["failed_blocks"] <= row["asked_blocks"]
    assert "6 could not be read as they were stored" in " ".join(done.stdout.split())
    done = run("--arrivals", "sometimes")
    assert done.returncode == 2
    assert "arrivals: 'sometimes' is not one of" in " ".join(done.stdout.split())
