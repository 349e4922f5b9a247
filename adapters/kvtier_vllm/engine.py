"""What a rank's store needs of the engine that it is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvtier import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvtier import KVSpec
    from kvtier_vllm.slots import EnginePages

__all__ = ["Engine", "Look", "Sound"]


class Look(Protocol):
    """One look at whether the weights changed (``weights.Look``)."""

    @property
    def ready(self) -> bool:
        """Whether the answer is there without waiting."""

    @property
    def changed(self) -> bool:
        """Whether they changed; may wait for the forward before."""


class Engine(Protocol):
    """What a worker's store needs of the engine that it is in."""

    @property
    def rank(self) -> int:
        """This rank."""

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's KV tensors, by layer."""

    def spec(self) -> KVSpec:
        """Return the spec with the weights as they are now; all ranks ask at the same time."""

    def pages(self) -> EnginePages:
        """Return the engine's pages, in the spec's layout."""

    def look(self) -> Look:
        """Look whether the weights are those of the last ``spec``."""

    def fence(self) -> Any:
        """Return an event after all that the engine has queued on its GPU; None on a CPU."""


@dataclass(frozen=True, slots=True)
class Sound:
    """What a put waits for before it reads: that its step is computed, by the same weights."""

    fence: Any
    look: Look

    def synchronize(self) -> None:
        """Return once that is so; raises ``TransferFailed`` if it is not."""
        if self.fence is not None:
            self.fence.synchronize()
        if self.look.changed:
            raise TransferFailed("the weights changed without a reset of the cache")
