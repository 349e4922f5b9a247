"""kvtier for vLLM: a KV connector, and a scheduler that recomputes a head while its tail loads.

::

    vllm serve MODEL --scheduler-cls kvtier_vllm.scheduler.HybridScheduler --kv-transfer-config '{
        "kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier_vllm.connector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"path": "/nvme/kvtier", "host_bytes": "32GiB"}}'

What faces the engine imports vLLM (``connector``, ``scheduler``, ``contract``, ``facts``,
``pages``, ``identity``, ``stats``, ``events``); what decides (``coordinator``, ``restores``,
``saves``, ``planning``, ``mirror``) and what moves (``worker``, ``slots``, ``weights``) does not.
"""

from __future__ import annotations

__all__: list[str] = []
