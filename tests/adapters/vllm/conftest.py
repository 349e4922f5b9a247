"""Tests of the vLLM adapter; those that need vLLM run in .venv-vllm (tools/test)."""

from __future__ import annotations

import importlib.util
import warnings

import pytest

pytest.register_assert_rewrite("vllm_harness", "vllm_process")
if importlib.util.find_spec("vllm") is not None:
    import vllm_harness

    vllm_harness.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # at import vLLM and what it brings warn of their own
        import vllm.distributed.kv_transfer.kv_connector.v1
        import vllm.v1.core.sched.async_scheduler  # noqa: F401
