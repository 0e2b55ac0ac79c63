"""Ways to fuse the logits of several networks, each with a handful of numbers fitted to held-out data by NLL.

`Readings` are the logit Gaussians of the held-out inputs on contrasts, read once, each covariance by its eigenvectors:
(a P_c + s I)⁻¹ = V_c diag(1/(a λ + s)) V_cᵀ for any a and s. A `Variant` turns a few unbounded numbers θ, mostly
logarithms, into the fused Gaussians; slopes are by automatic differentiation, except those of the Monte Carlo average.

The numbers are chosen so that the limits are within reach and no direction is steep:

    ln T;   ω = ln(q p̄) with p̄⁻¹ = Σ_c 1/(a_c v̄_c + s_c), the fused variance of a typical input, so that the width of
    the fused Gaussian stays as it is when s changes;   ln s_c = κ + (E ζ)_c;   ln a_c = (E η)_c,

with E an orthonormal basis of what sums to zero, so that the geometric mean of a is 1, and v̄_c the mean variance of a
contrast of network c. A weak Gaussian prior on ζ, η, κ and ω, divided by the number of inputs, decides where few data
say nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._base.optimise import Slopes, quasi_newton
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import standard_normal

# Samples made at a time, which should fit in the cache of a CPU.
_BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
# Standard deviations of the prior: of ln a_c and of the logarithms of weights, of ln s_c around their mean, of κ and ω.
_SCALE_PRIOR, _RATIO_PRIOR, _FREE_PRIOR = 1.0, 2.0, 4.0
# Bounds of ln T, and of κ and ω around the logarithm of the typical variance.
_TEMPERATURE_BOUND, _DISCREPANCY_BOUNDS, _WIDTH_BOUNDS, _RATIO_BOUND = 4.0, (-14.0, 14.0), (-16.0, 8.0), 10.0
# The discrepancy that stands for infinity where networks have different weights, in units of the largest variance.
_NEARLY_INFINITE = 1e9
# With a width, T stays above this share of what it is without: at small T a PMF merely counts which class wins, and
# depends on the draws.
_COOLEST = math.log(0.3)
# The slope at which a search ends: what is left to gain is far below the tolerance of the choice.
_ENOUGH = 3e-5
# Below this width, in units of the typical variance, the Gaussian is as good as certain.
_NO_WIDTH = -15.5


@dataclass(frozen=True, eq=False)
class Readings:
    """ĝ_c, V_c and λ_c (P_c = V_c diag(λ_c) V_cᵀ, on contrasts), V_cᵀ ĝ_c and the labels of N held-out inputs."""

    means: Float[Tensor, "C N d"]
    values: Float[Tensor, "C N d"]
    vectors: Float[Tensor, "C N d d"]
    along: Float[Tensor, "C N d"]
    labels: Int[Tensor, "N"]

    @staticmethod
    def of(gaussians: Sequence[Sequence[LogitGaussian]], labels: Int[Tensor, "N"]) -> Readings:
        """From the logits of each network, batch by batch."""
        device = labels.device
        means, values, vectors = [], [], []
        for parts in gaussians:
            basis = linalg.contrast_basis(parts[0].mean.shape[1], device)
            mean = torch.cat([part.mean.to(device).double() for part in parts]) @ basis
            covariance = torch.cat([linalg.contrast_covariance(part.covariance).to(device) for part in parts])
            own_values, own_vectors = linalg.eigenvectors(covariance, name="The covariances of the logits")
            means.append(mean)
            # Below zero by rounding alone.
            values.append(own_values.clamp_min(0))
            vectors.append(own_vectors)
        all_means, all_vectors = torch.stack(means), torch.stack(vectors)
        along = (all_vectors.mT @ all_means[..., None])[..., 0]
        return Readings(all_means, torch.stack(values), all_vectors, along, labels)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def networks(self) -> int:
        return len(self.means)

    def parts(self) -> dict[str, Tensor]:
        """What is different for each input, by name, with the inputs first."""
        values = {"means": self.means, "values": self.values, "vectors": self.vectors, "along": self.along}
        return {name: value.transpose(0, 1) for name, value in values.items()} | {"labels": self.labels}

    @staticmethod
    def of_parts(parts: Mapping[str, Tensor]) -> Readings:
        rest = {name: value.transpose(0, 1) for name, value in parts.items() if name != "labels"}
        return Readings(**rest, labels=parts["labels"])

    def chosen(self, rows: Int[Tensor, "n"]) -> Readings:
        """Some of the inputs, in this order."""
        return Readings(
            self.means[:, rows], self.values[:, rows], self.vectors[:, rows], self.along[:, rows], self.labels[rows]
        )

    def typical_variances(self) -> Float[Tensor, "C"]:
        """v̄_c: the mean variance of a contrast of each network."""
        return self.values.mean((1, 2))


@dataclass(frozen=True)
class Numbers:
    """a, s, T and q of a fused classifier."""

    scales: tuple[float, ...]
    discrepancies: tuple[float, ...]
    temperature: float
    covariance_scale: float


@dataclass(frozen=True, eq=False)
class Variant(ABC):
    """A way to fuse: what is fitted, within which bounds, and what it makes of θ. Subclasses say the rest."""

    name: str
    networks: int
    absent: int | None = None

    @abstractmethod
    def size(self) -> int:
        """How many numbers are fitted."""

    @abstractmethod
    def bounds(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The least and the largest value of each."""

    @abstractmethod
    def starts(self) -> list[Float[Tensor, "k"]]:
        """Where searches begin."""

    def penalty(self, theta: Float[Tensor, "k"]) -> Tensor:
        """−ln of the prior density, up to a constant."""
        return theta.new_zeros(())

    def fused(self, theta: Float[Tensor, "k"], readings: Readings) -> tuple[Tensor, Tensor | None]:
        """ĝ/T on contrasts, and a root of q P/T², None where it is zero."""
        raise TypeError(f"There is no Gaussian of {self.name}.")

    def numbers(self, theta: Float[Tensor, "k"]) -> Numbers:
        """What θ means."""
        raise TypeError(f"There is no Gaussian of {self.name}.")

    def refitted(self) -> tuple[int, ...]:
        """The places in θ of what is fitted again when a network is left out: T and the width."""
        return (0,)

    def log_likelihood(
        self, theta: Float[Tensor, "k"], readings: Readings, normal: Float[Tensor, "d K"]
    ) -> tuple[Float[Tensor, "N"], Tensor]:
        """ln f_y of each input; and a scalar with the slopes of their mean by θ."""
        mean, root = self.fused(theta, readings)
        basis = linalg.contrast_basis(mean.shape[1] + 1, mean.device)
        logits = mean @ basis.mT
        if root is None:
            values = torch.log_softmax(logits, 1).gather(1, readings.labels[:, None])[:, 0]
            return values.detach(), values.mean()
        spread = basis @ root
        values, of_logits, of_spread = _monte_carlo(logits.detach(), spread.detach(), readings.labels, normal)
        return values, ((logits * of_logits).sum() + (spread * of_spread).sum()) / len(readings)

    def kept_weights(self, device: torch.device) -> Float[Tensor, "C"]:
        """1 for each network, and 0 for the one that is left out."""
        weights = torch.ones(self.networks, dtype=torch.float64, device=device)
        if self.absent is not None:
            weights[self.absent] = 0.0
        return weights


def _monte_carlo(
    logits: Float[Tensor, "N M"],
    spread: Float[Tensor, "N M d"],
    labels: Int[Tensor, "N"],
    normal: Float[Tensor, "d K"],
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N M"], Float[Tensor, "N M d"]]:
    """ln f_y = ln (1/K) Σ_k softmax(g + A z_k)_y of each input, and its derivatives by g and by A.

    With l_k = ln softmax(g + A z_k)_y and w = softmax(l): ∂ ln f_y/∂(g + A z_k) = w_k (e_y − f⁽ᵏ⁾). No probability is
    formed, so none underflows.
    """
    values = logits.new_empty(len(logits))
    of_logits, of_spread = torch.empty_like(logits), torch.empty_like(spread)
    # Sums over thousands of inputs are in float64; the draws need no more digits than they have.
    logits, spread = logits.to(normal.dtype), spread.to(normal.dtype)
    count = normal.shape[1]
    size = max(1, _BLOCK_ELEMENTS.get(logits.device.type, 2**19) // (logits.shape[1] * count))
    for start in range(0, len(logits), size):
        rows = slice(start, start + size)
        drawn = spread[rows] @ normal + logits[rows, :, None]
        drawn -= drawn.amax(1, keepdim=True)
        of_label = drawn.gather(1, labels[rows, None, None].expand(-1, 1, count))[:, 0]
        shares = linalg.exp_without_subnormals_(drawn)
        total = shares.sum(1)
        logs = of_label - total.log()
        values[rows] = torch.logsumexp(logs, 1).double() - math.log(count)
        weights = torch.softmax(logs, 1)
        # −w_k f⁽ᵏ⁾, and + w_k for the label.
        shares *= (-weights / total)[:, None, :]
        shares.scatter_add_(1, labels[rows, None, None].expand(-1, 1, count), weights[:, None, :])
        of_logits[rows] = shares.sum(2)
        of_spread[rows] = shares @ normal.mT
    return values, of_logits, of_spread


@dataclass(frozen=True, eq=False)
class Pool(Variant):
    """Mean of logits, softmax(Σ_c w_c ĝ_c/T): w = 1/C, or w ∝ exp(E η) where they are `weighted`.

    `largest` is the largest variance of any contrast of any network.
    """

    weighted: bool = False
    largest: float = 1.0

    def size(self) -> int:
        return self.networks if self.weighted else 1

    def bounds(self) -> tuple[Tensor, Tensor]:
        upper = torch.full((self.size(),), _RATIO_BOUND, dtype=torch.float64)
        upper[0] = _TEMPERATURE_BOUND
        return -upper, upper

    def starts(self) -> list[Tensor]:
        return [torch.zeros(self.size(), dtype=torch.float64)]

    def penalty(self, theta: Tensor) -> Tensor:
        return theta[1:].square().sum() / (2 * _SCALE_PRIOR**2)

    def fused(self, theta: Tensor, readings: Readings) -> tuple[Tensor, Tensor | None]:
        weights = self.weights(theta).to(readings.means.device)
        return (readings.means * weights[:, None, None]).sum(0) / theta[0].exp().to(readings.means.device), None

    def weights(self, theta: Tensor) -> Tensor:
        """w_c, which sum to one."""
        weights = self.kept_weights(theta.device)
        if self.weighted:
            weights = weights * (_sum_zero(self.networks) @ theta[1:]).exp()
        return weights / weights.sum()

    def numbers(self, theta: Tensor) -> Numbers:
        """Equal and infinite s; for different weights s_c = S/w_c, with an S above all that the covariances can be."""
        ones = (1.0,) * self.networks
        T = math.exp(float(theta[0]))
        if not self.weighted:
            return Numbers(ones, (math.inf,) * self.networks, T, 0.0)
        weights = self.weights(theta)
        discrepancies = _NEARLY_INFINITE * max(self.largest, 1.0) / (weights * self.networks)
        return Numbers(ones, tuple(discrepancies.tolist()), T, 0.0)


@dataclass(frozen=True, eq=False)
class PmfPool(Variant):
    """Mean of PMFs, Σ_c softmax(ĝ_c/T)/C: a baseline, which no Gaussian over logits can be."""

    def size(self) -> int:
        return 1

    def bounds(self) -> tuple[Tensor, Tensor]:
        bound = torch.full((1,), _TEMPERATURE_BOUND, dtype=torch.float64)
        return -bound, bound

    def starts(self) -> list[Tensor]:
        return [torch.zeros(1, dtype=torch.float64)]

    def log_likelihood(
        self, theta: Float[Tensor, "k"], readings: Readings, normal: Float[Tensor, "d K"]
    ) -> tuple[Float[Tensor, "N"], Tensor]:
        basis = linalg.contrast_basis(readings.means.shape[2] + 1, readings.means.device)
        logs = torch.log_softmax(readings.means @ basis.mT / theta[0].exp().to(basis.device), 2)
        own = logs.gather(2, readings.labels[None, :, None].expand(len(logs), -1, 1))[..., 0]
        values = torch.logsumexp(own, 0) - math.log(len(logs))
        return values.detach(), values.mean()


@dataclass(frozen=True, eq=False)
class Alone(Variant):
    """One network by itself, N(ĝ_c/T, q P_c/T²); without the `width` softmax(ĝ_c/T)."""

    network: int = 0
    width: bool = True
    variance: float = 1.0
    coolest: float = -_TEMPERATURE_BOUND

    def size(self) -> int:
        return 1 + self.width

    def bounds(self) -> tuple[Tensor, Tensor]:
        centre = math.log(self.variance)
        low, high = [self.coolest, centre + _WIDTH_BOUNDS[0]], [_TEMPERATURE_BOUND, centre + _WIDTH_BOUNDS[1]]
        return torch.tensor(low[: self.size()], dtype=torch.float64), torch.tensor(
            high[: self.size()], dtype=torch.float64
        )

    def starts(self) -> list[Tensor]:
        return [torch.tensor([0.0, math.log(self.variance)][: self.size()], dtype=torch.float64)]

    def penalty(self, theta: Tensor) -> Tensor:
        return ((theta[1:] - math.log(self.variance)) / _FREE_PRIOR).square().sum() / 2

    def fused(self, theta: Tensor, readings: Readings) -> tuple[Tensor, Tensor | None]:
        own = theta.to(readings.means.device)
        mean = readings.means[self.network] / own[0].exp()
        if not self.width:
            return mean, None
        scale = (own[1] - math.log(self.variance)) / 2 - own[0]
        root = readings.vectors[self.network] * readings.values[self.network].sqrt()[:, None, :]
        return mean, root * scale.exp()

    def numbers(self, theta: Tensor) -> Numbers:
        discrepancies = tuple(0.0 if c == self.network else math.inf for c in range(self.networks))
        q = math.exp(float(theta[1]) - math.log(self.variance)) if self.width else 0.0
        return Numbers((1.0,) * self.networks, discrepancies, math.exp(float(theta[0])), q)


@dataclass(frozen=True, eq=False)
class Widened(Variant):
    """P_c → a_c P_c + s_c I. θ = (ln T, ω where there is a `width`, κ, ζ where s is each network's own, η where a is).

    `variances` are v̄_c, `coolest` is the least ln T.
    """

    variances: tuple[float, ...] = ()
    own_discrepancies: bool = False
    own_scales: bool = False
    width: bool = True
    coolest: float = -_TEMPERATURE_BOUND

    def size(self) -> int:
        return 2 + self.width + (self.networks - 1) * (self.own_discrepancies + self.own_scales)

    def refitted(self) -> tuple[int, ...]:
        return (0, 1) if self.width else (0,)

    def _centre(self) -> float:
        return math.log(sum(self.variances) / len(self.variances))

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """ln T, ω, κ, ζ and η."""
        place = 2 if self.width else 1
        ratios = self.networks - 1 if self.own_discrepancies else 0
        stop = place + 1 + ratios
        return theta[0], theta[1] if self.width else None, theta[place], theta[place + 1 : stop], theta[stop:]

    def logarithms(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """ln a_c and ln s_c."""
        _, _, common, ratios, scales = self._split(theta)
        basis = _sum_zero(self.networks)
        zero = theta.new_zeros(self.networks)
        return basis @ scales if self.own_scales else zero, common + (
            basis @ ratios if self.own_discrepancies else zero
        )

    def bounds(self) -> tuple[Tensor, Tensor]:
        centre = self._centre()
        shared = self._centre() - math.log(self.networks)
        low = [self.coolest, *([shared + _WIDTH_BOUNDS[0]] if self.width else []), centre + _DISCREPANCY_BOUNDS[0]]
        high = [
            _TEMPERATURE_BOUND,
            *([shared + _WIDTH_BOUNDS[1]] if self.width else []),
            centre + _DISCREPANCY_BOUNDS[1],
        ]
        rest = [_RATIO_BOUND] * (self.size() - len(low))
        return (
            torch.tensor([*low, *(-bound for bound in rest)], dtype=torch.float64),
            torch.tensor([*high, *rest], dtype=torch.float64),
        )

    def starts(self) -> list[Tensor]:
        """The mean of logits, the paper's fusion, and between them."""
        centre = self._centre()
        shared = centre - math.log(self.networks)
        rest = [0.0] * (self.size() - 2 - self.width)
        places = ((centre + 8.0, shared - 6.0), (centre - 6.0, shared), (centre, shared))
        return [
            torch.tensor([0.0, *([width] if self.width else []), discrepancy, *rest], dtype=torch.float64)
            for discrepancy, width in places
        ]

    def start_from(self, simpler: Widened, theta: Tensor) -> Tensor:
        """The θ of a simpler variant as one of this; the width is small where that had none."""
        log_T, width, common, ratios, scales = simpler._split(theta)
        parts = [log_T[None]]
        if self.width:
            small = theta.new_tensor([self._centre() - math.log(self.networks) - 4.0])
            parts.append(small if width is None else width[None])
        parts.append(common[None])
        none = theta.new_zeros(self.networks - 1)
        if self.own_discrepancies:
            parts.append(ratios if simpler.own_discrepancies else none)
        if self.own_scales:
            parts.append(scales if simpler.own_scales else none)
        return torch.cat(parts)

    def start_at_pool(self, pool: Pool, theta: Tensor) -> Tensor:
        """A mean of logits as a θ of this variant: large s in inverse proportion to the weights."""
        start = self.starts()[0].clone()
        start[0] = theta[0]
        if self.own_discrepancies and pool.weighted:
            place = 3 if self.width else 2
            start[place : place + self.networks - 1] = -theta[1:]
        return start

    def mean_weights(self, theta: Tensor, readings: Readings) -> Float[Tensor, "C"]:
        """The mean over the inputs of tr(P Q_c⁻¹)/d."""
        device = readings.means.device
        log_scales, log_discrepancies = (part.to(device) for part in self.logarithms(theta))
        shares = 1 / (readings.values * log_scales.exp()[:, None, None] + log_discrepancies.exp()[:, None, None])
        precisions = (readings.vectors * shares[:, :, None, :]) @ readings.vectors.mT
        lower, _ = linalg.safe_cholesky(precisions.sum(0), name="The fused information", limit=1e-9)
        products = linalg.inverse_from_cholesky(lower) * precisions
        return products.sum((2, 3)).mean(1) / readings.means.shape[2]

    def penalty(self, theta: Tensor) -> Tensor:
        _, width, common, ratios, scales = self._split(theta)
        total = ((common - self._centre() - math.log(10)) / _FREE_PRIOR).square()
        if width is not None:
            total = total + ((width - self._centre() + math.log(self.networks)) / _FREE_PRIOR).square()
        total = total + ratios.square().sum() / _RATIO_PRIOR**2 + scales.square().sum() / _SCALE_PRIOR**2
        return total / 2

    def fused(self, theta: Tensor, readings: Readings) -> tuple[Tensor, Tensor | None]:
        """Λ = Σ_c Q_c⁻¹ = L Lᵀ, ĝ = Λ⁻¹ Σ_c Q_c⁻¹ ĝ_c, and L⁻ᵀ, a root of P."""
        device = readings.means.device
        log_scales, log_discrepancies = (part.to(device) for part in self.logarithms(theta))
        denominators = readings.values * log_scales.exp()[:, None, None] + log_discrepancies.exp()[:, None, None]
        shares = self.kept_weights(device)[:, None, None] / denominators
        information = ((readings.vectors * shares[:, :, None, :]) @ readings.vectors.mT).sum(0)
        vector = (readings.vectors @ (shares * readings.along)[..., None]).sum(0)
        lower, _ = linalg.safe_cholesky(information, name="The fused information", limit=1e-9)
        mean = linalg.solve_lower_transposed(lower, linalg.solve_lower(lower, vector))[..., 0]
        own = theta.to(device)
        mean = mean / own[0].exp()
        if not self.width:
            return mean, None
        identity = torch.eye(lower.shape[-1], dtype=torch.float64, device=device).expand_as(lower)
        scale = (own[1] + self._log_typical_precision(theta).to(device)) / 2 - own[0]
        return mean, linalg.solve_lower_transposed(lower, identity) * scale.exp()

    def _log_typical_precision(self, theta: Tensor) -> Tensor:
        """−ln p̄ = ln Σ_c 1/(a_c v̄_c + s_c)."""
        log_scales, log_discrepancies = self.logarithms(theta)
        variances = torch.tensor(self.variances, dtype=torch.float64)
        denominators = variances * log_scales.exp() + log_discrepancies.exp()
        return (self.kept_weights(theta.device) / denominators).sum().log()

    def numbers(self, theta: Tensor) -> Numbers:
        log_scales, log_discrepancies = self.logarithms(theta)
        _, width, *_ = self._split(theta)
        q = 0.0
        if width is not None and float(width) - self._centre() + math.log(self.networks) > _NO_WIDTH:
            q = float((width + self._log_typical_precision(theta)).exp())
        scales, discrepancies = (tuple(part.exp().tolist()) for part in (log_scales, log_discrepancies))
        return Numbers(scales, discrepancies, math.exp(float(theta[0])), q)


def _sum_zero(count: int) -> Float[Tensor, "C C-1"]:
    """An orthonormal basis of the vectors that sum to zero."""
    return linalg.contrast_basis(count, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------- fitting


@dataclass(frozen=True, eq=False)
class Fit:
    """A variant with its θ."""

    variant: Variant
    theta: Float[Tensor, "k"]
    value: float

    def losses(self, readings: Readings, normal: Float[Tensor, "d K"]) -> Float[Tensor, "N"]:
        """−ln f_y of each input."""
        return -self.variant.log_likelihood(self.theta, readings, normal)[0].cpu()


def draws_for(readings: Readings, samples: int, seed: int) -> Float[Tensor, "d K"]:
    """The same for all inputs and all trials, so that the NLL is a smooth function of θ; in float32, for speed."""
    like = readings.means.new_empty(0, dtype=torch.float32)
    return standard_normal(samples, readings.means.shape[2], seed, like, "sobol").T.contiguous()


def fitted(
    variant: Variant,
    readings: Readings,
    normal: Float[Tensor, "d K"],
    starts: Sequence[Float[Tensor, "k"]],
    *,
    free: Sequence[int] | None = None,
    curvature: Float[Tensor, "k k"] | None = None,
    tried: int = 2,
) -> Fit:
    """The least of −(1/N) Σ ln f_y + penalty/N from the best of the starts; of θ only the `free` places move.

    `curvature` is that of the objective, where it is known.
    """
    slopes = _objective(variant, readings, normal, curvature)
    lower, upper = variant.bounds()
    starts = [torch.clamp(start, lower, upper) for start in starts]
    if free is not None:
        fixed = [place for place in range(len(lower)) if place not in free]
        lower[fixed], upper[fixed] = starts[0][fixed], starts[0][fixed]
    if len(starts) > tried:
        starts = sorted(starts, key=lambda start: slopes(start)[0])[:tried]
    found = (quasi_newton(slopes, start, lower, upper, enough=_ENOUGH) for start in starts)
    value, theta = min(found, key=lambda pair: pair[0])
    return Fit(variant, theta, value)


def curvature_at(fit: Fit, readings: Readings, normal: Float[Tensor, "d K"]) -> Float[Tensor, "k k"]:
    """The second derivatives of the objective, by differences of slopes, made positive: the folds begin with it."""
    slopes = _objective(fit.variant, readings, normal, None)
    lower, upper = fit.variant.bounds()
    step = 0.02
    columns = []
    centre = slopes(fit.theta)[1]
    for place in range(len(lower)):
        inwards = -step if float(fit.theta[place]) + step > float(upper[place]) else step
        point = fit.theta.clone()
        point[place] += inwards
        columns.append((slopes(point)[1] - centre) / inwards)
    values, vectors = linalg.eigenvectors(torch.stack(columns), name="The slopes")
    return (vectors * values.abs().clamp_min(1e-3)) @ vectors.mT


def _objective(
    variant: Variant, readings: Readings, normal: Float[Tensor, "d K"], known: Float[Tensor, "k k"] | None
) -> Callable[[Tensor], Slopes]:
    # Logarithms of numbers that matter bend the NLL by a few hundredths; BFGS learns the rest.
    curvature = 0.05 * torch.eye(variant.size(), dtype=torch.float64) if known is None else known

    def slopes(point: Tensor) -> Slopes:
        with torch.enable_grad():
            theta = point.detach().clone().requires_grad_()
            values, surrogate = variant.log_likelihood(theta, readings, normal)
            penalty = variant.penalty(theta) / len(readings)
            (gradient,) = torch.autograd.grad(penalty - surrogate.cpu(), theta)
        return float(penalty.detach()) - float(values.mean()), gradient.detach(), curvature

    return slopes


def above(tempered: Fit) -> float:
    """The least ln T of a variant with a width, from the same without."""
    return float(tempered.theta[0]) + _COOLEST


def without(fit: Fit, network: int, readings: Readings, normal: Float[Tensor, "d K"]) -> Fit:
    """The same with one network left out; T and the width are fitted again, the rest stays."""
    variant = replace(fit.variant, absent=network)
    return fitted(variant, readings, normal, [fit.theta], free=variant.refitted())
