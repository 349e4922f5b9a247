"""Prefill, generate and put: one model and one store, joined."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Final, Self

import torch

import kvtier
from kvtier.errors import SpecMismatch, StoreFailed
from kvtier.identity import BLOCK_TOKENS, spec_differences
from kvtier_hf.cache import KVTierCache
from kvtier_hf.checks import check_runnable, positions_max
from kvtier_hf.guard import ForwardGuard
from kvtier_hf.requests import check_generate, prompt_ids
from kvtier_hf.spec import describe
from kvtier_hf.weights import weights_signature

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel
    from transformers.utils.generic import ModelOutput

    from kvtier import (
        BlockKeys,
        KVSpec,
        PutResult,
        RestorePlan,
        RestoreReport,
        Step,
        Store,
        Transfer,
    )

__all__ = ["Adapter", "attach", "open"]

STEP_TIMEOUT_S: Final = 30.0  # a load that takes longer is recomputed
STEP_BLOCKS_MAX: Final = {"cpu": 1}  # 256 tokens fill a CPU
STEP_BLOCKS_MAX_ELSE: Final = 4  # a GPU is bound by launches at 256
RESERVE_TOKENS: Final = 256
RESERVE_TOKENS_MAX: Final = 1024  # of a long max_new_tokens; an answer beyond grows the cache
CALIBRATED_BLOCKS: Final = 2  # how far into a prompt the store's calibration goes


class Adapter:
    """One model joined with one store; made by ``attach`` or ``open``, for one thread at a time.

    ``tenant`` separates users who must not see each other's hits, ``adapter`` names by content what
    changes the model beyond its weights. Closing it (or leaving its scope) takes its guard off the
    model; the store stays its owner's.
    """

    def __init__(
        self, model: PreTrainedModel, store: Store, *, tenant: str = "", adapter: str = ""
    ) -> None:
        described = describe(model, store.spec.block_tokens)
        differences = spec_differences(store.spec, described.spec)
        if differences:
            raise SpecMismatch(
                f"the store's spec differs from the model's in {', '.join(differences)}: open the "
                "store with kvtier_hf.spec_of(model)"
            )
        self.model = model
        self.store = store
        self.guard = ForwardGuard(described.body)
        self.last_report: RestoreReport | None = None
        """What the last prefill restored; None if its prompt had no full block."""
        self.last_put: Transfer[PutResult] | None = None
        """The copy under way since the last ``generate``."""
        self._body = described.body
        self._device = described.device
        self._signature = described.signature
        self._tenant = tenant
        self._adapter = adapter
        hook = described.body.module.register_forward_pre_hook(
            self.guard, with_kwargs=True, prepend=True
        )
        self._unhook = weakref.finalize(self, hook.remove)

    @property
    def spec(self) -> KVSpec:
        """The spec of model and store."""
        return self.store.spec

    def prefill(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        reserve: int = RESERVE_TOKENS,
        plan: RestorePlan | None = None,
        compute_price: float | None = None,
        deadline_s: float | None = None,
    ) -> KVTierCache:
        """Return a cache with the prompt's full blocks in place, loaded or recomputed.

        ``input_ids``: [1, n]. At least one token is left for ``generate`` or ``model(...)``, which
        take the **full** prompt ids (``generate``) or the rest of them (``model``) with the cache.
        ``reserve`` tokens fit behind the prompt before the cache grows. ``plan`` replaces the plan
        that ``plan(input_ids)`` would give; ``compute_price`` and ``deadline_s`` are as there.

        Raises ``ValueError`` for a prompt that is empty, too long, padded or a batch, or a model in
        training mode; ``SpecMismatch`` if the weights changed since ``attach`` or ``plan`` is
        another prompt's.
        """
        if reserve < 0:
            raise ValueError(f"reserve: {reserve} is negative")
        self._check_model()
        ids, keys = self._look(input_ids, attention_mask)
        prompt = ids.to(self._device)
        cache = KVTierCache(self.spec.block_layout, self._device, ids.numel() + reserve, self)
        if len(keys):
            plan = plan or self._plan(keys, compute_price, deadline_s)
            self._restore(plan, keys, prompt, cache)
        # Feeding nothing is impossible: a prompt of whole blocks gives its last token again.
        placed = len(keys) * self.spec.block_tokens
        cache.start(prompt, min(placed, ids.numel() - 1), placed)
        self.last_report = cache.report
        return cache

    def plan(
        self,
        input_ids: torch.Tensor,
        *,
        compute_price: float | None = None,
        deadline_s: float | None = None,
    ) -> RestorePlan:
        """Return what ``prefill`` would do now: nothing is loaded or computed; errors as there.

        ``compute_price`` is what a second of compute is worth in seconds of waiting (None: the
        store's own), ``deadline_s`` by when the plan with the least compute is preferred.
        """
        return self._plan(self._look(input_ids, None)[1], compute_price, deadline_s)

    def put(self, cache: KVTierCache) -> Transfer[PutResult]:
        """Store the full blocks of everything the cache holds, prompt and answer; returns at once.

        What is stored already is not copied again. The cache may be used further meanwhile.
        Raises ``ValueError`` for a cache of another adapter or one whose tokens were fed with other
        positions than theirs, ``SpecMismatch`` if the weights changed.
        """
        if not isinstance(cache, KVTierCache) or cache.owner is not self:
            raise ValueError("cache: not made by this adapter's prefill")
        self._check_model()
        ids = cache.token_ids()
        keys = self.store.keys(ids, tenant=self._tenant, adapter=self._adapter)
        after: dict[str, Any] = {}
        if self._device.type == "cuda":
            after["after"] = torch.cuda.current_stream(self._device).record_event()
        transfer = self.store.put(keys, source=cache.slots, blocks=range(len(keys)), **after)
        cache.lend(transfer, len(keys) * self.spec.block_tokens)
        return transfer

    def generate(
        self,
        input_ids: torch.Tensor,
        **generate_kwargs: Any,
    ) -> torch.Tensor | ModelOutput:
        """Prefill, ``model.generate(input_ids, **generate_kwargs)`` and put; returns its result.

        ``last_report`` says what was restored, ``last_put`` is the copy of the new blocks. A store
        that fails after the answer exists costs a warning, not the answer; the next call raises.

        Raises ``ValueError`` for what one sequence on a prefilled cache cannot do (beams, several
        answers, another cache) and what ``prefill`` refuses.
        """
        check_generate(self.model, input_ids, generate_kwargs)
        cache = self.prefill(
            input_ids,
            attention_mask=generate_kwargs.get("attention_mask"),
            reserve=min(
                generate_kwargs.get("max_new_tokens") or RESERVE_TOKENS, RESERVE_TOKENS_MAX
            ),
        )
        result: torch.Tensor | ModelOutput = self.model.generate(  # type: ignore[operator]
            input_ids, **{self._body.cache_name: cache}, **generate_kwargs
        )
        try:
            self.last_put = self.put(cache)
        except StoreFailed as error:
            warnings.warn(f"nothing was stored: {error}", RuntimeWarning, stacklevel=2)
        return result

    def calibrate(self) -> None:
        """Time what the store's cost model does not know yet; seconds at most."""
        scratch: list[KVTierCache] = []

        def compute(step: Step) -> None:
            if not scratch or scratch[0].capacity < step.tokens.stop:
                layout = self.spec.block_layout
                cache = KVTierCache(layout, self._device, step.tokens.stop, self)
                for tensor in cache.slots.tensors:
                    tensor.zero_()
                scratch[:] = [cache]
            ids = torch.arange(len(step.tokens), device=self._device) % self.model.config.vocab_size
            self._run(ids, scratch[0], step)

        self._check_model()
        limit = positions_max(self.model.config)
        # A model that takes less than two blocks has next to nothing to restore.
        if limit is None or limit >= CALIBRATED_BLOCKS * self.spec.block_tokens:
            self.store.calibrate(compute)

    def close(self) -> None:
        """Take the guard off the model; caches made by this adapter cannot be run any more."""
        self._unhook()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, BlockKeys]:
        limit = positions_max(self.model.config)
        ids = prompt_ids(input_ids, attention_mask, self.model.config.vocab_size, limit)
        return ids, self.store.keys(ids, tenant=self._tenant, adapter=self._adapter)

    def _plan(
        self, keys: BlockKeys, compute_price: float | None, deadline_s: float | None
    ) -> RestorePlan:
        return self.store.plan(
            self.store.lookup(keys),
            resident=0,
            step_blocks_max=STEP_BLOCKS_MAX.get(self._device.type, STEP_BLOCKS_MAX_ELSE),
            compute_price=compute_price,
            deadline_s=deadline_s,
        )

    def _restore(
        self, plan: RestorePlan, keys: BlockKeys, prompt: torch.Tensor, cache: KVTierCache
    ) -> None:
        if plan.hashes != keys.hashes or plan.resident:
            raise SpecMismatch(
                "plan: of another prompt, or one that expects blocks in place already"
            )
        # The buffers may lie where an earlier kernel is still writing, in this stream's order; the
        # store copies on another stream.
        _wait(self._device)
        with self.store.restore(plan, into=cache.slots) as session:
            while step := session.next_step(timeout=STEP_TIMEOUT_S):
                self._run(prompt[step.tokens.start : step.tokens.stop], cache, step)
                session.computed(step)
        cache.report = session.report

    def _run(self, ids: torch.Tensor, cache: KVTierCache, step: Step) -> None:
        # Everything before the step is in place, loaded or computed, so its length says so.
        cache.seek(step.tokens.start)
        cache.promise(step.tokens.stop)
        self.guard.driving = True
        try:
            self._body.run(ids, cache)
        finally:
            self.guard.driving = False
        _wait(self._device)  # the step's time is what the GPU needs, not its launches

    def _check_model(self) -> None:
        if not self._unhook.alive:
            raise ValueError("this adapter is closed: attach again")
        check_runnable(self.model)
        if weights_signature(self.model) != self._signature:
            raise SpecMismatch("the model's weights changed since it was attached: attach again")


def attach(
    model: PreTrainedModel,
    store: Store,
    *,
    calibrate: bool = True,
    tenant: str = "",
    adapter: str = "",
) -> Adapter:
    """Join a model with a store opened with ``spec_of(model)``.

    ``calibrate`` times what the store's cost model does not know yet (seconds, once per model and
    machine). Raises ``SpecMismatch`` naming the fields in which the store's spec differs, and what
    ``spec_of`` raises.
    """
    attached = Adapter(model, store, tenant=tenant, adapter=adapter)
    if calibrate:
        try:
            attached.calibrate()
        except BaseException:
            attached.close()
            raise
    return attached


@contextlib.contextmanager
def open(  # noqa: A001 - read as kvtier_hf.open; the arguments are settings
    model: PreTrainedModel,
    path: str | Path,
    *,
    block_tokens: int = BLOCK_TOKENS,
    calibrate: bool = True,
    tenant: str = "",
    adapter: str = "",
    **settings: Any,
) -> Iterator[Adapter]:
    """Open a store for ``model`` and attach it, for the length of a ``with``.

    ``settings`` are those of ``kvtier.open`` (host_bytes, ssd_bytes, ...); errors are those of
    ``spec_of``, ``kvtier.open`` and ``attach``.
    """
    described = describe(model, block_tokens)
    settings.setdefault("device", device_name(described.device))
    with (
        kvtier.open(path, described.spec, **settings) as store,
        attach(model, store, calibrate=calibrate, tenant=tenant, adapter=adapter) as attached,
    ):
        yield attached


def device_name(device: torch.device) -> str:
    """Return what recomputes on ``device``: what a step costs is learned per name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
