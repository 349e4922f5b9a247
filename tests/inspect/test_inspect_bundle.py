"""`export` and `import`: what arrives is what left, or nothing arrives."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    SPEC,
    assert_sound,
    bring_back,
    flip,
    payload_of,
    prompt,
    prompt_keys,
    put,
    record_of,
    run_python,
    segment_files,
    variant,
)

import kvtier
from kvtier import FormatError, StoreLocked
from kvtier.tiers.segment import encode_header, keyed_tag, part_digests
from kvtier_inspect import bundle, cli, exporting, importing
from kvtier_inspect.bundle import Block, BundleReader, write_bundle
from kvtier_inspect.exporting import Selection
from kvtier_inspect.locked import locked
from kvtier_inspect.opened import opened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tiers.base import Record

OTHER = variant(model="test/other")
KEY = b"k" * 32


def block_of(record: Record, *, key: bytes = b"", payload: bytes | None = None) -> Block:
    """Return a made-up block with its known bytes."""
    data = payload_of(record.id, record.payload_bytes) if payload is None else payload
    digests = part_digests(record.part_bytes, memoryview(data))
    header = encode_header(record, digests)
    if key:
        header = encode_header(record, digests, keyed_tag(key, header, memoryview(data)))
    return Block(header, data)


def written(path: Path, blocks: list[Block], specs: tuple[kvtier.KVSpec, ...] = (SPEC,)) -> str:
    """Write a bundle of made-up blocks and return its path."""
    with path.open("wb") as file:
        write_bundle(file, specs, blocks)
    return str(path)


def fill(path: str, **own: Any) -> None:
    """Make a store with two tenants' blocks of one spec, and three of another."""
    with contextlib.closing(kvtier.open(path, SPEC, ssd_bytes="8MiB", **own)) as store:
        put(store, store.keys(prompt(4, 1), tenant="me"))
        put(store, store.keys(prompt(4, 2), tenant="you"))
    with contextlib.closing(kvtier.open(path, OTHER, ssd_bytes="8MiB", **own)) as store:
        put(store, prompt_keys(3, 3, OTHER))


@pytest.fixture
def full(tmp_path: Path) -> str:
    """Make a store that holds eleven blocks."""
    fill(str(tmp_path / "full"))
    return str(tmp_path / "full")


def contents(path: str) -> dict[bytes, bytes]:
    """Return the blocks of a bundle: payloads by namespace and hash."""
    with BundleReader(path) as reader:
        reader.verify()
        return {
            found.record.id.namespace + found.record.id.hash: bytes(found.payload or b"")
            for found in reader.blocks()
        }


def export(store: str, out: Path, **chosen: Any) -> int:
    """Export and return the exit code."""
    return exporting.run(store, str(out), Selection(**chosen), as_json=True)


# -- round trips


def test_another_store_hits_what_was_exported(full: str, tmp_path: Path) -> None:
    """A store in another directory, opened by another process, restores every exported byte."""
    assert export(full, tmp_path / "all") == 0
    assert cli.run(["import", str(tmp_path / "new"), str(tmp_path / "all")]) == 0
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import kvtier
from support import SPEC, assert_sound, bring_back, prompt
store = kvtier.open(sys.argv[1], SPEC, ssd_bytes="8MiB")
for tenant, seed in (("me", 1), ("you", 2)):
    assert bring_back(store, store.keys(prompt(4, seed), tenant=tenant)).loaded == 4
assert_sound(store)
store.close()
"""
    run_python(code, str(tmp_path / "new"))
    with contextlib.closing(kvtier.open(str(tmp_path / "new"), OTHER, ssd_bytes="8MiB")) as store:
        assert bring_back(store, prompt_keys(3, 3, OTHER)).loaded == 3


def test_a_bundle_of_a_bundle_is_the_same_file(full: str, tmp_path: Path) -> None:
    """What is exported depends on the blocks alone, not on the store or on when it was read."""
    for name in ("a", "b"):
        assert export(full, tmp_path / name) == 0
    with contextlib.closing(kvtier.open(full, SPEC, ssd_bytes="8MiB")) as store:
        bring_back(store, store.keys(prompt(4, 1), tenant="me"))
    assert cli.run(["import", str(tmp_path / "new"), str(tmp_path / "a")]) == 0
    assert export(str(tmp_path / "new"), tmp_path / "c") == 0
    first = (tmp_path / "a").read_bytes()
    assert [(tmp_path / name).read_bytes() == first for name in "bc"] == [True, True]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_live_store_can_be_exported(open_store: Callable[..., Any], tmp_path: Path) -> None:
    """Beside a writer, which does not notice."""
    store = open_store()
    put(store, prompt_keys(4))
    assert export(store.path, tmp_path / "out") == 0
    assert len(contents(str(tmp_path / "out"))) == 4


@settings(max_examples=25)
@given(numbers=st.sets(st.integers(0, 40)), already=st.sets(st.integers(0, 40)))
def test_import_adds_what_is_missing(
    tmp_path_factory: pytest.TempPathFactory, numbers: set[int], already: set[int]
) -> None:
    """After an import a store has the union; what it had is untouched, and is not written again."""
    folder = tmp_path_factory.mktemp("union")
    paths = [
        written(folder / name, [block_of(record_of(n)) for n in sorted(chosen)])
        for name, chosen in (("first", already), ("second", numbers))
    ]
    for path, stored in zip(paths, (already, numbers - already), strict=True):
        with BundleReader(path) as reader, locked(str(folder / "store")) as held:
            done = importing.import_blocks(
                held, reader, reader.verify(), limit_bytes=1 << 40, key=b""
            )
        assert done.stored == len(stored)
        assert done.dropped == 0
    if already | numbers:
        assert export(str(folder / "store"), folder / "out") == 0
        records = [record_of(number) for number in already | numbers]
        wanted = {r.id.namespace + r.id.hash: payload_of(r.id, r.payload_bytes) for r in records}
        assert contents(str(folder / "out")) == wanted


# -- which blocks


def test_filters(full: str, tmp_path: Path) -> None:
    """By namespace, tenant, hash, and a block with what it is chained to; all that is given."""
    keys = kvtier.BlockKeys.of(SPEC, prompt(4, 1), tenant="me")
    cases: list[tuple[dict[str, Any], int]] = [
        ({"namespace": OTHER.namespace.hex()[:10]}, 3),
        ({"tenant": "me"}, 4),
        ({"tenant": ""}, 3),
        ({"hashes": (keys[1].hex()[:9], keys[3].hex())}, 2),
        ({"prefix_of": keys[2].hex()[:11]}, 3),
        ({"namespace": SPEC.namespace.hex(), "tenant": "you"}, 4),
    ]
    for number, (chosen, blocks) in enumerate(cases):
        assert export(full, tmp_path / str(number), **chosen) == 0
        assert len(contents(str(tmp_path / str(number)))) == blocks, chosen
    held = contents(str(tmp_path / "4"))
    assert set(held) == {SPEC.namespace + keys[block] for block in range(3)}


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"namespace": "zz"}, "hex"),
        ({"namespace": ""}, None),
        ({"hashes": ("00000000",)}, "no block"),
        ({"prefix_of": ""}, None),
        ({"prefix_of": "f" * 65}, "hex"),
        ({"namespace": "f" * 64}, "there are: .*test/other"),
    ],
)
def test_a_filter_that_fits_nothing(
    full: str, tmp_path: Path, chosen: dict[str, Any], words: str | None
) -> None:
    """A name that fits nothing is an error that says so, and leaves no file."""
    if words is None:
        assert export(full, tmp_path / "out", **chosen) == 0
        return
    with pytest.raises(ValueError, match=words):
        export(full, tmp_path / "out", **chosen)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_over(full: str, tmp_path: Path) -> None:
    """An export never replaces a file, and a failed one leaves none."""
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        export(full, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["full", "out"]
    (tmp_path / "other.new").write_text("half of one")
    with pytest.raises(ValueError, match=r"other\.new.*remove it"):
        export(full, tmp_path / "other")
    assert (tmp_path / "other.new").read_text() == "half of one"


# -- damage in the store


def test_damaged_blocks_are_left_out_and_said(
    full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that fails its checksums is not exported; the others are, and the code is 1."""
    flip(segment_files(full)[0], 4096 + 4096 + 100)
    assert export(full, tmp_path / "out") == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 1
    assert len(contents(str(tmp_path / "out"))) == 10


def test_blocks_without_a_spec_are_left_out_and_said(full: str, tmp_path: Path) -> None:
    """Nobody could tell what such blocks mean."""
    os.unlink(f"{full}/specs/{OTHER.namespace.hex()}.msgpack")
    assert export(full, tmp_path / "out") == 1
    assert len(contents(str(tmp_path / "out"))) == 8


# -- damage and malice in the bundle


def unsigned(path: str) -> tuple[bytes, bytes, int, int]:
    """Return a bundle's preamble, content, blocks and content bytes."""
    data = Path(path).read_bytes()
    _, blocks, nbytes = struct.unpack("<8sQQ", data[-56:-32])
    content = zstandard.ZstdDecompressor().decompressobj().decompress(data[16:-56])
    return data[:16], content, blocks, nbytes


def signed(preamble: bytes, content: bytes, blocks: int, nbytes: int | None = None) -> bytes:
    """Return a bundle with this content and the right digest: whoever writes one can do that."""
    frame = zstandard.ZstdCompressor().compress(content)
    trailer = struct.pack(
        "<8sQQ", b"KVTEND\r\n", blocks, len(content) if nbytes is None else nbytes
    )
    data = preamble + frame + trailer
    return data + hashlib.sha256(data).digest()


def refused(path: Path, data: bytes, target: Path) -> str:
    """Import bytes that are not a sound bundle: refused in words, and nothing is written."""
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        importing.run(
            str(target), str(path), key_file="", ssd_bytes="", dry_run=False, as_json=True
        )
    assert not target.exists()
    return str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of a bundle of three blocks."""
    path = tmp_path_factory.mktemp("sound") / "bundle"
    return Path(written(path, [block_of(record_of(n)) for n in range(3)])).read_bytes()


@given(data=st.data())
def test_a_bundle_cut_or_altered_anywhere_is_refused(
    sound: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever is missing, added or changed: no block of it is written."""
    folder = tmp_path_factory.mktemp("cut")
    place = data.draw(st.integers(0, len(sound) - 1))
    how = data.draw(st.sampled_from(["cut", "flip", "insert", "append"]))
    extra = data.draw(st.binary(min_size=1, max_size=9))
    altered = {
        "cut": sound[:place],
        "flip": sound[:place] + bytes([sound[place] ^ extra[0] or 1]) + sound[place + 1 :],
        "insert": sound[:place] + extra + sound[place:],
        "append": sound + extra,
    }[how]
    if altered != sound:
        refused(folder / "bundle", altered, folder / "store")


@given(data=st.data())
def test_a_forged_bundle_gives_words_or_whole_blocks(
    sound: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Content altered under a right digest is refused, or every block in it has its checksums."""
    folder = tmp_path_factory.mktemp("forged")
    (folder / "sound").write_bytes(sound)
    preamble, content, blocks, nbytes = unsigned(str(folder / "sound"))
    draw = data.draw
    edges = [0, 4, 8, 300, 400, 4096, len(content) - 1]
    place = draw(st.sampled_from(edges) | st.integers(0, len(content) - 1))
    junk = draw(st.binary(max_size=16) | st.sampled_from([b"\xff" * 4, bytes(4), b"\xff" * 8]))
    forged = signed(
        draw(st.just(preamble) | st.binary(min_size=16, max_size=16)),
        content[:place] + junk + content[place + draw(st.integers(0, 16)) :],
        draw(st.just(blocks) | st.integers(0, (1 << 64) - 1)),
        draw(st.none() | st.just(nbytes) | st.integers(0, (1 << 64) - 1)),
    )
    (folder / "forged").write_bytes(forged)
    try:
        held = contents(str(folder / "forged"))
    except FormatError:
        return
    for key, payload in held.items():
        assert payload == payload_of(kvtier.tiers.base.BlockId(key[:32], key[32:]), len(payload))


def forgeries() -> Iterator[tuple[str, Callable[[Path], bytes], str]]:
    """Return bundles that somebody made up: a name, how to make it, and what is said about it."""
    record = record_of(1)

    def one(*blocks: Block, specs: tuple[kvtier.KVSpec, ...] = (SPEC,)) -> Callable[[Path], bytes]:
        return lambda folder: Path(written(folder / "made", list(blocks), specs)).read_bytes()

    def raw(content: bytes, blocks: int = 1) -> Callable[[Path], bytes]:
        preamble = struct.pack("<8sII", b"KVTBND\r\n", 1, 0)
        return lambda _folder: signed(preamble, content, blocks)

    spec = SPEC.to_bytes()
    head = struct.pack("<II", 1, len(spec)) + spec
    wide = variant(head_dim=1 << 20, kv_heads=1 << 10, block_tokens=1 << 16)
    vast = record_of(1, wide)
    yield "another layout", one(block_of(record_of(1, variant(layers=2), SPEC.namespace))), "parts"
    yield "no spec", one(block_of(record), specs=(OTHER,)), "spec is not in"
    yield "twice", one(block_of(record), block_of(record)), "out of order"
    yield "unordered", one(block_of(record_of(2)), block_of(record)), "out of order"
    yield "codec", one(block_of(record_of(1, codec=7))), "codec 7"
    yield "kind", one(block_of(record_of(1, kind=kvtier.tiers.base.Kind.STATE))), "kind"
    yield "many specs", raw(struct.pack("<I", 1 << 31)), "specs, at most"
    yield "long spec", raw(struct.pack("<II", 1, 1 << 31)), "a spec of"
    yield "no spec at all", raw(struct.pack("<II", 1, 3) + b"abc"), "KVSpec"
    yield "long header", raw(head + struct.pack("<I", 1 << 31)), "a record header of"
    yield "odd header", raw(head + struct.pack("<I", 4097)), "a record header of"
    yield "a bomb", raw(head + bytes(64 << 20), 1), "a record header of 0"
    yield "vast", one(Block(encode_header(vast, [0] * 3), b""), specs=(wide,)), "over 4294967296"
    yield "too few", raw(head, 5), "ends within"
    yield "too many", raw(head + b"more", 0), "does not end"


@pytest.mark.parametrize(("make", "words"), [pytest.param(m, w, id=n) for n, m, w in forgeries()])
def test_hostile_bundles(tmp_path: Path, make: Callable[[Path], bytes], words: str) -> None:
    """Each lie is refused in words before anything is written, however large its numbers are."""
    assert words in refused(tmp_path / "bundle", make(tmp_path), tmp_path / "store")


def test_a_frame_that_wants_much_memory(tmp_path: Path, sound: bytes) -> None:
    """A frame whose window is over the bound is refused, not allocated."""
    (tmp_path / "sound").write_bytes(sound)
    preamble, content, blocks, nbytes = unsigned(str(tmp_path / "sound"))
    parameters = zstandard.ZstdCompressionParameters(window_log=27, strategy=1)
    packed = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(
        packed, closefd=False
    ) as frame:
        frame.write(content)
    data = preamble + packed.getvalue() + struct.pack("<8sQQ", b"KVTEND\r\n", blocks, nbytes)
    said = refused(tmp_path / "b", data + hashlib.sha256(data).digest(), tmp_path / "store")
    assert "decompressed" in said


@pytest.mark.parametrize("kind", ["empty", "text", "directory", "pipe", "newer", "missing"])
def test_what_is_no_bundle(
    tmp_path: Path, kind: str, sound: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """A message and exit code 3, never a traceback and never a wait."""
    path = tmp_path / "bundle"
    match kind:
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("not a bundle\n" * 100)
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "newer":
            path.write_bytes(sound[:8] + b"\2" + sound[9:])
    assert cli.run(["import", str(tmp_path / "store"), str(path)]) == 3
    said = capfd.readouterr().err
    assert "bundle" in said
    assert not (tmp_path / "store").exists()
    if kind == "newer":
        assert "version 2" in said


# -- the store that imports


def test_an_engine_keeps_its_store(open_store: Callable[..., Any], tmp_path: Path) -> None:
    """A store that has a writer is refused, and the writer does not notice."""
    path = written(tmp_path / "bundle", [block_of(record_of(1))])
    store = open_store()
    with pytest.raises(StoreLocked):
        importing.run(store.path, path, key_file="", ssd_bytes="", dry_run=False, as_json=True)
    assert cli.run(["import", store.path, path]) == 4
    assert put(store, prompt_keys(2)).stored == 2


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    """It verifies and makes no store."""
    path = written(tmp_path / "bundle", [block_of(record_of(1))])
    assert cli.run(["import", str(tmp_path / "store"), path, "--dry-run"]) == 0
    assert not (tmp_path / "store").exists()


def test_a_budget_is_kept_and_nothing_is_evicted(full: str, tmp_path: Path) -> None:
    """What finds no room is counted, the code is 1, and what was there is there."""
    before = set()
    export(full, tmp_path / "before")
    before = set(contents(str(tmp_path / "before")))
    path = written(tmp_path / "bundle", [block_of(record_of(n)) for n in range(500)])
    with BundleReader(path) as reader, locked(full) as held:
        limit = 4 << 20
        done = importing.import_blocks(held, reader, reader.verify(), limit_bytes=limit, key=b"")
        assert done.stored
        assert done.dropped
        assert done.stored + done.dropped == 500
    used = sum(os.lstat(each).st_blocks * 512 for each in segment_files(full))
    assert used <= limit
    export(full, tmp_path / "after")
    assert before < set(contents(str(tmp_path / "after")))
    assert cli.run(["import", full, path, "--ssd-bytes", "1MiB"]) == 1


def test_a_keyed_store_takes_only_its_own(tmp_path: Path) -> None:
    """With a key, blocks without its tag are refused, and what is written can be read with it."""
    (tmp_path / "key").write_bytes(KEY)
    store = str(tmp_path / "store")
    keyed = ["--key-file", str(tmp_path / "key")]
    plain = written(tmp_path / "plain", [block_of(record_of(1))])
    other = written(tmp_path / "other", [block_of(record_of(1), key=b"x" * 32)])
    for path in (plain, other):
        assert cli.run(["import", store, path, *keyed]) == 3
        assert not os.path.exists(store)
    fill(str(tmp_path / "keyed"), integrity_key=KEY)
    assert export(str(tmp_path / "keyed"), tmp_path / "out") == 0
    assert cli.run(["import", store, str(tmp_path / "out"), *keyed]) == 0
    with contextlib.closing(
        kvtier.open(store, SPEC, ssd_bytes="8MiB", integrity_key=KEY)
    ) as opened_again:
        keys = opened_again.keys(prompt(4, 1), tenant="me")
        assert bring_back(opened_again, keys).loaded == 4
        assert_sound(opened_again)
    (tmp_path / "key").write_bytes(b"short")
    assert cli.run(["import", store, plain, *keyed]) == 2


def test_the_order_is_that_of_the_bytes() -> None:
    """Columns sort as the verifier compares: by every byte, zeros at the end included."""
    from kvtier.tiers.base import BlockId, Location
    from kvtier.tiers.entries import entry_of, table

    hashes = [bytes(31) + b"\1", b"\1" + bytes(31), b"\1\0\1" + bytes(29), b"\xff" * 32, bytes(32)]
    records = [
        record_of(1, id=BlockId(namespace, each), created_ns=created)
        for namespace in (bytes(32), b"\1" + bytes(31))
        for created in (2, 1)
        for each in hashes
    ]
    entries = table(entry_of(each, Location(1, 0, 8192), 0) for each in records)
    rows = exporting.ordered(entries, np.arange(len(entries)))
    assert [bundle.place(records[row]) for row in rows] == sorted(map(bundle.place, records))


def test_a_chain_that_bites_its_tail_ends(tmp_path: Path) -> None:
    """Parents that somebody made up in a circle are followed once."""
    first, second = record_of(1), record_of(2)
    loop = record_of(1, parent=second.id.hash)
    assert second.parent == first.id.hash
    path = written(tmp_path / "loop", [block_of(loop), block_of(second)])
    assert cli.run(["import", str(tmp_path / "store"), path]) == 0
    with opened(str(tmp_path / "store")) as store:
        chosen = Selection(prefix_of=second.id.hash.hex())
        assert len(exporting.selected(store.entries, store.specs, chosen)) == 2
