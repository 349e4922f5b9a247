from __future__ import annotations

from typing import Any

import pytest

from kvtier_vllm.asked import NOTHING_ASKED, Asked, asked_of
from kvtier_vllm.two_step import head_params


def test_a_heads_request_is_understood() -> None:
    """What ``two_step`` sends is what the connector reads."""
    assert asked_of(head_params([1, 2, 3]), tokens_max=3) == Asked(
        restore=False, prefetch=(1, 2, 3)
    )


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True},
        {"kvtier": None},
        {"kvtier": [1]},
        {"kvtier": {"restore": "no"}},
        {"kvtier": {"prefetch": 7}},
        {"kvtier": {"prefetch": ["7"]}},
        {"kvtier": {"prefetch": [True]}},
        {"kvtier": {"prefetch": [-1]}},
        {"kvtier": {"prefetch": [1 << 32]}},
        {"kvtier": {"prefetch": [1, 2, 3, 4]}},
    ],
)
def test_whatever_a_client_sends_else_asks_nothing(params: Any) -> None:
    """A client's nonsense costs neither the engine nor the request."""
    assert asked_of(params, tokens_max=3) == NOTHING_ASKED
