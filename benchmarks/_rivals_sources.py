"""Which rivals there are, and what their environments need."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from _rivals_process import Source

LMCACHE: Final = "lmcache==0.5.6"
LMCACHE_RAW_BLOCK: Final = "lmcache-rust-raw-block-io==0.5.7rc2"
"""A package of its own; without it there is no ``raw_block``."""
LMCACHE_NEEDS: Final = (
    "numpy<=2.2.6", "numba", "aiofile", "aiofiles", "aiohttp", "blake3", "cachetools",
    "cryptography", "fastapi", "httpx", "msgspec", "nvtx", "opentelemetry-api<=1.40.0",
    "opentelemetry-sdk<=1.40.0", "prometheus_client<=0.24.1", "psutil", "py-cpuinfo", "pyyaml",
    "pyzmq>=25.0.0", "requests", "safetensors", "sortedcontainers", "transformers>=5.4,<6",
    "uvicorn",
)  # fmt: skip
"""What its storage backends import. Its own list needs CUDA packages, so pip must not follow it."""
MOONCAKE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
PLAIN: Final = "plain"
"""Needs nothing extra, so it always takes part."""


def sources() -> dict[str, Source]:
    """Return the rivals by name."""
    # Exactly the torch that is in use here: any other may be gigabytes of CUDA.
    torch = f"torch=={version('torch')}"
    return {
        PLAIN: Source(PLAIN, "", "_rivals_plain_worker.py"),
        "lmcache": Source(
            "lmcache",
            LMCACHE,
            "_lmcache_worker.py",
            ((torch,), ("--no-deps", LMCACHE, LMCACHE_RAW_BLOCK), (torch, *LMCACHE_NEEDS)),
            "lmcache.v1.storage_backend.local_disk_backend",
            # It sends usage reports unless told not to.
            {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"},
        ),
        "mooncake": Source(
            "mooncake", MOONCAKE, "_mooncake_worker.py", ((MOONCAKE, "numpy"),), "mooncake.store"
        ),
    }
