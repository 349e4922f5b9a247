from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvtier import StoreConfig
from kvtier.config import POLICIES, parse_bytes
from kvtier.policies import POLICY


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 0),
        (1, 1),
        (1 << 40, 1 << 40),
        ("0", 0),
        ("4096", 4096),
        ("12b", 12),
        ("12B", 12),
        ("1kB", 1000),
        ("1KB", 1000),
        ("500MB", 500 * 10**6),
        ("2gb", 2 * 10**9),
        ("3TB", 3 * 10**12),
        ("1KiB", 1 << 10),
        ("1mib", 1 << 20),
        ("8GiB", 8 << 30),
        ("200 GiB", 200 << 30),
        ("  2 TiB ", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("0.5kb", 500),
        ("0GiB", 0),
    ],
)
def test_sizes(value: int | str, size: int) -> None:
    """Sizes are bytes, or a number with a decimal or binary unit in any case."""
    assert size == parse_bytes("host_bytes", value)


def test_large_whole_sizes_are_exact() -> None:
    """A whole number of bytes is not rounded, however large."""
    assert parse_bytes("ssd_bytes", "9007199254740993") == 9007199254740993


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ValueError),
        ("-1GiB", ValueError),
        ("", ValueError),
        ("GiB", ValueError),
        ("1 2GiB", ValueError),
        ("8XB", ValueError),
        ("8GiBs", ValueError),
        ("8g", ValueError),
        ("1e9", ValueError),
        ("0x10", ValueError),
        ("1,5GiB", ValueError),
        ("1.GiB", ValueError),
        (".5GiB", ValueError),
        ("inf", ValueError),
        ("nan", ValueError),
        ("9" * 400 + "GiB", ValueError),
        ("8GiB\n8", ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (None, TypeError),
        (b"8GiB", TypeError),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_bad_size_names_the_setting(value: Any, error: type[Exception]) -> None:
    """What is not a size is refused with the name of the setting."""
    with pytest.raises(error, match="ssd_bytes"):
        parse_bytes("ssd_bytes", value)


def test_defaults_are_sound() -> None:
    """A config of two sizes is valid, and immutable."""
    config = StoreConfig(host_bytes=0, ssd_bytes=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.host_bytes = 1  # type: ignore[misc]


BAD = {
    "host_bytes": (-1, "8GiB", None, 1.5),
    "ssd_bytes": (-1, "8GiB", None, 1.5),
    "device_bytes": (-1, "8GiB", None, 1.5),
    "ssd_write_bytes_per_day": (-1, "8GiB", 1.5),
    "integrity_key": (b"short", b"x" * 65, "a string of 16 or more", None, 3),
    "policy": ("", "fifo", None, 3),
    "write_policy": ("", "back", None, 3),
    "tails_only": (0, 1, None, "yes"),
    "host_high_water": (0, -0.5, 1.01, float("nan"), True, "0.9", None, 0.5),
    "host_low_water": (0, -0.5, 1.01, float("nan"), True, "0.9", None, 0.96),
    "staging_blocks_max": (0, -1, 4, 3, "8", None, 8.5),
    "loads_inflight_max": (0, -1, 8, 9, "4", None, 1.5),
    "prefetch_bytes_max": (-1, "1GiB", 1.5, True),
    "prefetch_bytes_per_s": (-1, "1GiB", 1.5, True),
    "writes_inflight_max": (0, -1, "1", None, 1.5),
    "segments_max": (0, -1, "1", None, 1.5),
    "write_batch_blocks_max": (0, -1, "1", None, 1.5),
    "write_queue_blocks_max": (0, -1, "1", None, 1.5),
    "segment_bytes_max": (0, -1, "1GiB", None, 1.5),
    "index_bytes_max": (0, -1, "1GiB", None, 1.5),
    "slot_wait_s_max": (0, -1.0, float("nan"), "1", None),
    "close_s_max": (0, -1.0, float("nan"), "1", None),
}


def test_every_field_has_bad_values() -> None:
    """A new field of StoreConfig gets its bad values here."""
    assert {field.name for field in dataclasses.fields(StoreConfig)} == set(BAD)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_bad_value_names_its_field(name: str, value: Any) -> None:
    """A value out of range or of another type is refused, and the message names the field."""
    with pytest.raises((ValueError, TypeError), match=name):
        StoreConfig(**{"host_bytes": 0, "ssd_bytes": 0, name: value})


def test_tails_alone_are_of_no_use_to_contiguous_callers() -> None:
    """tails_only drops heads, which prefix-closed exists to keep: together they are refused."""
    with pytest.raises(ValueError, match=r"tails_only.*prefix-closed"):
        StoreConfig(host_bytes=0, ssd_bytes=0, policy="prefix-closed", tails_only=True)


def test_every_policy_has_its_name() -> None:
    """The names that a store takes are those of the policies there are, and the default is one."""
    assert set(POLICIES) == set(POLICY)
    assert all(
        StoreConfig(host_bytes=0, ssd_bytes=0, policy=name).policy == name for name in POLICIES
    )
    assert StoreConfig(host_bytes=0, ssd_bytes=0).policy == "priced"
