"""What recomputing and loading cost: frozen numbers for decisions, and a profiler that learns them.

Recomputing a step of ``tokens`` tokens that begins at position ``start`` costs

    fixed + per_token * tokens + per_attention * tokens * (start + (tokens - 1) / 2)

(kernel launches and weights; matrix products; attention over what came before). The three terms are
fitted by recursive least squares on relative errors. A tier's link costs ``latency + bytes / rate``
with a rate that is an exponentially weighted mean over what was seen.
"""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvtier.plan import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Accuracy", "ComputeCost", "CostModel", "LinkCost", "Profiler"]

TOKEN_SCALE: Final = 256.0  # features are near 1 for a block at the head of a prompt
POSITION_SCALE: Final = 1024.0
NOISE: Final = 0.05  # relative spread of a step's time that the fit takes for granted
OUTLIER_RATIO: Final = 3.0  # a step this far off its prediction counts a tenth
OUTLIER_WEIGHT: Final = 0.1
OUTLIERS_MAX: Final = 3
PACE_CHANGE_MAX: Final = 100.0  # at once; where it was more, three more steps tell
CALIBRATED_SAMPLES: Final = 2
DRIFT: Final = np.array([0.005, 0.01, 0.005])  # of each term per step, relative to the largest
THETA_MAX: Final = 1e6  # seconds; a record with more is not one of ours
EWMA_WEIGHT: Final = 0.3
ACCURACY_WEIGHT: Final = 0.1
INTERFERENCE_WEIGHT: Final = 0.2
OVERLAP_DOUBT: Final = 0.95  # how little a step beside loads says about one without
INTERFERENCE_MIN: Final = -1.0
INTERFERENCE_MAX: Final = 4.0
SECONDS_MIN: Final = 1e-9
SAMPLES_MAX: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Seconds to recompute; ``samples`` 0 means that nothing was measured yet.

    ``fixed_s`` per step, ``token_s`` per token, ``attention_s`` per token and position.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    attention_s: float = 0.0
    samples: int = 0

    @property
    def known(self) -> bool:
        """Whether enough steps were seen to predict by."""
        return self.samples >= CALIBRATED_SAMPLES

    def seconds(self, start: int, tokens: int) -> float:
        """Predict one step over positions [start, start + tokens)."""
        middle = start + (tokens - 1) / 2
        return self.fixed_s + tokens * (self.token_s + self.attention_s * middle)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """A tier's link towards the engine. ``samples`` 0 means that the numbers are assumed."""

    bytes_per_s: float
    latency_s: float = 0.0
    samples: int = 0

    def seconds(self, nbytes: int) -> float:
        """Predict the time that ``nbytes`` occupy the link, latency left out."""
        return nbytes / self.bytes_per_s


ASSUMED: Final[Mapping[Tier, LinkCost]] = {
    Tier.HOST: LinkCost(bytes_per_s=8e9, latency_s=1e-5),
    Tier.SSD: LinkCost(bytes_per_s=1e9, latency_s=1e-4),
}


@dataclass(frozen=True, slots=True)
class CostModel:
    """The numbers that plans are made from."""

    compute: ComputeCost = ComputeCost()
    host: LinkCost = ASSUMED[Tier.HOST]
    ssd: LinkCost = ASSUMED[Tier.SSD]
    interference: float = 0.0
    """By what share a step takes longer while loads are under way."""

    def link(self, tier: Tier) -> LinkCost:
        """Return the link cost of ``tier``."""
        return self.host if tier is Tier.HOST else self.ssd

    def shared(self, *, compute: float = 1.0, links: float = 1.0) -> CostModel:
        """Return the costs for a request that gets these shares of the device and of the links.

        Shares are in (0, 1]: a quarter of a GPU's token budget makes every step take four times as
        long, a link shared with three others delivers a quarter.
        """
        for name, share in (("compute", compute), ("links", links)):
            if not 0 < share <= 1:
                raise ValueError(f"{name}: a share of {share} is not in (0, 1]")
        return replace(
            self,
            compute=replace(
                self.compute,
                fixed_s=self.compute.fixed_s / compute,
                token_s=self.compute.token_s / compute,
                attention_s=self.compute.attention_s / compute,
            ),
            host=replace(self.host, bytes_per_s=self.host.bytes_per_s * links),
            ssd=replace(self.ssd, bytes_per_s=self.ssd.bytes_per_s * links),
        )

    def load_seconds(self, tier: Tier, nbytes: int) -> float:
        """Predict how long one transfer of ``nbytes`` keeps the link of ``tier``."""
        link = self.link(tier)
        return link.latency_s + link.seconds(nbytes)

    def block_seconds(self, block_tokens: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Predict recomputing each of the blocks [start, stop), the fixed cost of steps left out.

        While nothing loads; ``interference`` comes on top of that.
        """
        middle = np.arange(start, stop) * float(block_tokens) + (block_tokens - 1) / 2
        compute = self.compute
        seconds: np.ndarray[Any, Any] = block_tokens * (
            compute.token_s + compute.attention_s * middle
        )
        return seconds


@dataclass(slots=True)
class _Fit:
    """Recursive least squares over (1, tokens, tokens * position), scaled to be near 1."""

    theta: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(3))
    covariance: np.ndarray[Any, Any] = field(default_factory=lambda: np.eye(3))
    samples: int = 0
    outliers: int = 0
    """How many steps in a row were far slower than predicted; negative: far faster."""

    def add(self, start: int, tokens: int, seconds: float, trust: float = 1.0) -> None:
        unit = tokens / TOKEN_SCALE
        x = np.array([1.0, unit, unit * (start + (tokens - 1) / 2) / POSITION_SCALE])
        if self.samples == 0:
            # The first step goes to the per-token term; the others start at zero, known to a
            # fraction of it.
            self.theta = np.array([0.0, seconds / unit, 0.0])
            self.covariance = np.diag(np.array([0.05, 1.0, 0.5]) * seconds / unit) ** 2
        predicted = float(self.theta @ x)
        weight = trust
        # As ``cost`` predicts: a term below zero may cancel the others out in a step of few tokens,
        # and the ratio to next to nothing would say nothing about the pace.
        ratio = seconds / max(float(np.maximum(self.theta, 0.0) @ x), SECONDS_MIN)
        if self.samples > CALIBRATED_SAMPLES and not 1 / OUTLIER_RATIO < ratio < OUTLIER_RATIO:
            weight *= OUTLIER_WEIGHT
            side = 1 if ratio > 1 else -1
            self.outliers = self.outliers + side if self.outliers * side > 0 else side
            if abs(self.outliers) == OUTLIERS_MAX:
                self._change_pace(ratio)
                return
        else:
            self.outliers = 0
        # The larger of both, or one step that was far too fast would count as very exact.
        noise = (NOISE * max(seconds, predicted)) ** 2 / weight
        spread = self.covariance @ x
        gain = spread / (noise + float(x @ spread))
        self.theta = self.theta + gain * (seconds - predicted)
        self.covariance = self._drifted(self.covariance - np.outer(gain, spread))
        self.samples += 1

    def _change_pace(self, ratio: float) -> None:
        # So many in a row are no outliers: the device has another pace, in all its terms.
        ratio = min(max(ratio, 1 / PACE_CHANGE_MAX), PACE_CHANGE_MAX)
        ratio = min(ratio, THETA_MAX / max(float(np.abs(self.theta).max()), SECONDS_MIN))
        self.theta = self.theta * ratio
        self.covariance = self._drifted(self.covariance * ratio**2)
        self.outliers = 0
        self.samples += 1

    def _drifted(self, covariance: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Let the terms drift a little with every step, so that a lasting change is learned.

        Scaling by a diagonal from both sides bounds what is never seen and keeps the matrix a
        covariance, which clipping its entries would not.
        """
        bound = (float(np.abs(self.theta).max()) + SECONDS_MIN) ** 2
        drifted = covariance + np.diag(DRIFT**2) * bound
        scale = np.minimum(1.0, np.sqrt(bound / np.maximum(np.diag(drifted), SECONDS_MIN**2)))
        bounded = drifted * np.outer(scale, scale)
        symmetric: np.ndarray[Any, Any] = (bounded + bounded.T) / 2
        return symmetric

    def cost(self) -> ComputeCost:
        # Recompute cost rises with position: a fit that says otherwise is noise, cut off at zero.
        fixed, token, attention = np.maximum(self.theta, 0.0)
        return ComputeCost(
            fixed_s=float(fixed),
            token_s=float(token) / TOKEN_SCALE,
            attention_s=float(attention) / TOKEN_SCALE / POSITION_SCALE,
            samples=self.samples,
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far predictions were from what happened, over the last restores (weighted mean).

    ``ratio`` is measured over predicted time, ``error`` the distance of that ratio from 1.
    """

    restores: int = 0
    ratio: float = 1.0
    error: float = 0.0


class Profiler:
    """Learns a ``CostModel`` from what was observed; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the store
        self._interference = 0.0
        self._accuracy = Accuracy()
        self._fit = _Fit()
        self._links: dict[Tier, LinkCost] = dict(ASSUMED)

    @property
    def costs(self) -> CostModel:
        """The numbers as known now."""
        with self._lock:
            return CostModel(
                self._fit.cost(),
                self._links[Tier.HOST],
                self._links[Tier.SSD],
                max(self._interference, 0.0),
            )

    @property
    def accuracy(self) -> Accuracy:
        """How good predictions have been."""
        with self._lock:
            return self._accuracy

    def computed(self, start: int, tokens: int, seconds: float, overlap: float = 0.0) -> None:
        """Learn from one step over positions [start, start + tokens) that took ``seconds``.

        ``overlap`` is the share of the step during which loads were under way. What such a step
        takes beyond its prediction is put down to them, slowly; the rest teaches the fit.
        """
        if not (tokens > 0 and 0 < seconds < np.inf):
            return
        with self._lock:
            cost = self._fit.cost()
            if overlap > 0 and cost.known:
                excess = seconds / max(cost.seconds(start, tokens), SECONDS_MIN) - 1
                seen = min(max(excess / overlap, INTERFERENCE_MIN), INTERFERENCE_MAX)
                self._interference += overlap * INTERFERENCE_WEIGHT * (seen - self._interference)
            # Noise may take the mean below zero, where it stays without effect.
            alone = seconds / (1 + overlap * max(self._interference, 0.0))
            self._fit.add(start, tokens, alone, trust=1 - OVERLAP_DOUBT * overlap)

    def restored(self, predicted_s: float, measured_s: float) -> None:
        """Note how long a restore took that was predicted to take ``predicted_s``."""
        if not (0 < predicted_s < np.inf and 0 < measured_s < np.inf):
            return
        with self._lock:
            old, ratio = self._accuracy, measured_s / predicted_s
            weight = max(ACCURACY_WEIGHT, 1 / (old.restores + 1))
            self._accuracy = Accuracy(
                old.restores + 1,
                old.ratio + weight * (ratio - old.ratio),
                old.error + weight * (abs(ratio - 1) - old.error),
            )

    def loaded(self, tier: Tier, nbytes: int, busy_s: float) -> None:
        """Learn from one load of ``nbytes`` that kept its link busy for ``busy_s``."""
        if not (nbytes > 0 and 0 < busy_s < np.inf):
            return
        with self._lock:
            old = self._links[tier]
            weight = max(EWMA_WEIGHT, 1 / (old.samples + 1))  # the first one replaces the guess
            # The mean is over seconds per byte, since plans add up times. Blocks of a store have
            # one size, so the latency that each load pays is part of its rate.
            mean = 1 / ((1 - weight) / old.bytes_per_s + weight * busy_s / nbytes)
            self._links[tier] = LinkCost(mean, 0.0, old.samples + 1)

    def to_record(self) -> dict[str, dict[str, Any]]:
        """Return plain numbers for a file, compute and links apart."""
        with self._lock:
            return {
                "compute": {
                    "theta": self._fit.theta.tolist(),
                    "covariance": self._fit.covariance.ravel().tolist(),
                    "samples": self._fit.samples,
                    "outliers": self._fit.outliers,
                    "interference": self._interference,
                    "accuracy": astuple(self._accuracy),
                },
                "links": {
                    str(tier): [link.bytes_per_s, link.latency_s, link.samples]
                    for tier, link in self._links.items()
                },
            }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Profiler:
        """Decode ``to_record``, of which either half may be missing; ``ValueError`` otherwise."""
        profiler = cls()
        try:
            if record.get("compute"):
                profiler._fit = _fit(record["compute"])
                interference = record["compute"].get("interference", 0.0)
                profiler._interference = _within(
                    interference, INTERFERENCE_MAX, low=INTERFERENCE_MIN
                )
                profiler._accuracy = _accuracy(*record["compute"].get("accuracy", (0, 1.0, 0.0)))
            if record.get("links"):
                links = record["links"]
                profiler._links |= {tier: _link(*links[tier]) for tier in ASSUMED if tier in links}
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a cost record: {error!r}") from error
        return profiler


def _fit(record: Mapping[str, Any]) -> _Fit:
    theta = np.array(record["theta"], dtype=np.float64).reshape(3)
    covariance = np.array(record["covariance"], dtype=np.float64).reshape(3, 3)
    samples = int(record["samples"])
    finite = np.isfinite(theta).all() and np.isfinite(covariance).all()
    if not (finite and 0 <= samples < SAMPLES_MAX and np.abs(theta).max() <= THETA_MAX):
        raise ValueError("numbers out of range")
    spread = np.linalg.eigvalsh(covariance)
    symmetric = np.allclose(covariance, covariance.T, rtol=1e-6, atol=0)
    if not symmetric or spread.max() > THETA_MAX**2 or spread.min() < -1e-9 * spread.max():
        raise ValueError("not a covariance")
    outliers = int(record.get("outliers", 0))
    if abs(outliers) >= OUTLIERS_MAX:
        raise ValueError("numbers out of range")
    return _Fit(theta, covariance, samples, outliers)


def _within(value: float, high: float, *, low: float = 0.0) -> float:
    if not low <= float(value) <= high:
        raise ValueError("numbers out of range")
    return float(value)


def _accuracy(restores: int, ratio: float, error: float) -> Accuracy:
    if not 0 <= int(restores) < SAMPLES_MAX:
        raise ValueError("numbers out of range")
    return Accuracy(int(restores), _within(ratio, THETA_MAX), _within(error, THETA_MAX))


def _link(bytes_per_s: float, latency_s: float, samples: int) -> LinkCost:
    link = LinkCost(float(bytes_per_s), float(latency_s), int(samples))
    if not (0 < link.bytes_per_s < np.inf and 0 <= link.latency_s < np.inf and link.samples >= 0):
        raise ValueError("numbers out of range")
    return link
