"""kvtier for Hugging Face transformers: prefill from a store, generate, put back.

::

    import kvtier_hf

    with kvtier_hf.open(model, "/nvme/kvtier", host_bytes="8GiB", ssd_bytes="200GiB") as kv:
        output = kv.generate(input_ids, max_new_tokens=64)       # one call, or in three:

        cache = kv.prefill(input_ids)                            # look up, load and recompute
        output = model.generate(input_ids, cache=cache)          # unmodified transformers
        kv.put(cache)                                            # prompt and answer, asynchronously
"""

from __future__ import annotations

from kvtier_hf.adapter import Adapter, attach, open  # noqa: A004 - read as kvtier_hf.open
from kvtier_hf.cache import KVTierCache
from kvtier_hf.spec import spec_of

__all__ = ["Adapter", "KVTierCache", "attach", "open", "spec_of"]
