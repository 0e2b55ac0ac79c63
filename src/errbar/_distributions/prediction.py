"""`Prediction`: the PMF of each input with its error bars, from Monte Carlo samples of the logits.

Samples are kept class by class with the draws in the last dimension, (B, M, K): exponentials and sums then run over
contiguous memory. They are made again, block by block, whenever a statistic needs them, so that a prediction holds
(B, M) numbers and not (B, M, K).

Sums over draws are good to rounding whatever K and the batch: by torch's own sums, which are pairwise, or by products
over a thousand draws that are added in float64. A product over all draws adds in an order that depends on the
batch, with an error that grows with K (1e-5 at K = 1000 in float32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.checks import whole_number
from errbar._base.execution import plain_execution
from errbar._base.memory import require_memory
from errbar.errors import ArgumentError

# Samples of one block: they should stay in the cache between the passes that make a softmax of them; a GPU wants few
# large launches instead.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 2**28}


# Numbers in a block of draws that is kept for the next prediction.
_KEPT_DRAWS = 2**18

# Draws of one product of deviations, which has an error below 5e-7 in float32; products are added in float64.
_PRODUCT_DRAWS = 1024

# Draws of which the least is what others are measured from.
_LOW_DRAWS = 16

# Sobol sequences that the Monte Carlo error is estimated from: its relative error is 1/√30.
_REPLICATES = 16


class Sampler(Protocol):
    """Samples f⁽ᵏ⁾ of the PMF of some rows."""

    @property
    def rows(self) -> int: ...

    @property
    def classes(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def draws(self) -> str: ...

    @property
    def like(self) -> Tensor: ...

    def block(self, start: int, stop: int) -> Float[Tensor, "b M K"]: ...

    def mean_block(self, start: int, stop: int) -> Float[Tensor, "b M"]: ...


@dataclass(frozen=True, eq=False)
class GaussianSampler:
    """f⁽ᵏ⁾ = softmax(ĝ + A z⁽ᵏ⁾), A Aᵀ = P^g on contrasts, with the same draws z for every input (eq:gmarg).

    Where P^g is diagonal, `root` holds the standard deviations of the M logits instead of A. `mean` is 0 for the most
    likely class, so that the logits that count are the ones with the least rounding.
    """

    mean: Float[Tensor, "B M"]
    root: Float[Tensor, "B M d"] | Float[Tensor, "B M"]
    normal: Float[Tensor, "d K"]
    draws: str
    seed: int

    @property
    def rows(self) -> int:
        return self.mean.shape[0]

    @property
    def classes(self) -> int:
        return self.mean.shape[1]

    @property
    def samples(self) -> int:
        return self.normal.shape[1]

    @property
    def like(self) -> Tensor:
        return self.mean

    def block(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        return softmax_over_classes_(self._logits(start, stop))

    def mean_block(self, start: int, stop: int) -> Float[Tensor, "b M"]:
        """c + (1/K) Σ_k (f⁽ᵏ⁾ − c): the rounding of the sum is in proportion to the spread of f, and none without it.

        c is the least of some draws, class by class. So c ≤ K f̂/16: small probabilities keep their digits too.
        """
        exponentials = self._logits(start, stop)
        exponentials -= exponentials.amax(1, keepdim=True)
        exponentials.exp_()
        weights = exponentials.sum(1, keepdim=True).reciprocal_()
        low = (exponentials[:, :, :_LOW_DRAWS] * weights[:, :, :_LOW_DRAWS]).amin(2)
        deviations = torch.addcmul(-low[:, :, None], exponentials, weights, out=exponentials)
        return low + deviations.sum(2) / self.samples

    def replicates(self, count: int) -> Iterator[GaussianSampler]:
        """The same with other draws, which follow from the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        for seed in torch.randint(2**62, (count,), generator=generator).tolist():
            yield replace(self, normal=self._redrawn(seed), seed=seed)

    def _redrawn(self, seed: int) -> Float[Tensor, "d K"]:
        return _draws(self.samples, self.normal.shape[0], seed, self.draws).to(self.mean).T.contiguous()

    def _logits(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        root = self.root[start:stop]
        if root.ndim == 2:
            logits = root[:, :, None] * self.normal
        else:
            logits = (root.flatten(0, 1) @ self.normal).reshape(stop - start, self.classes, self.samples)
        logits += self.mean[start:stop, :, None]
        return logits


@dataclass(frozen=True, eq=False)
class GivenSampler:
    """Independent samples that are already there (eq:genMC)."""

    values: Float[Tensor, "B M K"]

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def classes(self) -> int:
        return self.values.shape[1]

    @property
    def samples(self) -> int:
        return self.values.shape[2]

    @property
    def draws(self) -> str:
        return "random"

    @property
    def like(self) -> Tensor:
        return self.values

    def block(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        return self.values[start:stop]

    def mean_block(self, start: int, stop: int) -> Float[Tensor, "b M"]:
        return self.values[start:stop].mean(2, dtype=torch.float64).to(self.values.dtype)


def softmax_over_classes_(logits: Float[Tensor, "b M K"]) -> Float[Tensor, "b M K"]:
    """Softmax over dimension 1, in place."""
    logits -= logits.amax(1, keepdim=True)
    logits.exp_()
    logits /= logits.sum(1, keepdim=True)
    return logits


def standard_normal(
    rows: int, columns: int, seed: int, like: Tensor, draws: str = "random"
) -> Float[Tensor, "rows columns"]:
    """Draws that depend on the seed alone: float64 on the CPU, then cast and moved to where `like` is.

    - "random": independent draws, plain Monte Carlo;
    - "antithetic": each draw z together with −z, which makes odd functions of z exact;
    - "sobol": a scrambled Sobol sequence, whose points fill the space evenly.
    """
    seed = require_seed(seed)
    if rows * columns <= _KEPT_DRAWS:
        return _kept_draws(rows, columns, seed, draws).to(like)
    require_memory(
        2 * 8 * rows * columns,
        torch.device("cpu"),
        what=f"Drawing {rows:,} samples of {columns:,} numbers",
        instead="Ask for fewer samples.",
    )
    return _draws(rows, columns, seed, draws).to(like)


def _draws(rows: int, columns: int, seed: int, draws: str) -> Float[Tensor, "rows columns"]:
    generator = torch.Generator().manual_seed(seed)
    if draws == "random":
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if draws == "antithetic":
        half = torch.randn((rows + 1) // 2, columns, generator=generator, dtype=torch.float64)
        return torch.cat([half, -half])[:rows]
    if draws == "sobol":
        engine = torch.quasirandom.SobolEngine(columns, scramble=True, seed=seed)
        # Points lie on a grid that holds 0 and not 1: half a cell further, all are inside.
        normal: Tensor = torch.special.ndtri(engine.draw(rows, dtype=torch.float64) + 2.0**-31)
        return normal
    raise ArgumentError(f"draws is {draws!r}; expected 'random', 'antithetic' or 'sobol'.")


@lru_cache(maxsize=16)
def _kept_draws(rows: int, columns: int, seed: int, draws: str) -> Float[Tensor, "rows columns"]:
    """Draws of the usual size are made once; nobody writes to them."""
    with plain_execution(torch.device("cpu")):
        return _draws(rows, columns, seed, draws)


def require_seed(seed: int) -> int:
    whole = whole_number(seed)
    if whole is None or not 0 <= whole < 2**63:
        raise ArgumentError(f"seed is {seed!r}; expected a whole number of zero or more.")
    return whole


def require_samples(samples: int) -> int:
    whole = whole_number(samples)
    if whole is None or whole < 1:
        raise ArgumentError(f"samples is {samples!r}; expected a whole number of one or more.")
    return whole


@dataclass(frozen=True, eq=False)
class Prediction:
    """PMFs f̂(x|T) = (1/K) Σ_k f⁽ᵏ⁾ of B inputs, and everything that their samples tell.

    `jitter` is the largest share of its mean diagonal that a logit covariance needed to be factorised.
    """

    pmf: Float[Tensor, "B M"]
    sampler: Sampler
    jitter: float = 0.0

    @staticmethod
    def from_sampler(sampler: Sampler, jitter: float = 0.0) -> Prediction:
        with plain_execution(sampler.like.device):
            pmf = sampler.like.new_empty(sampler.rows, sampler.classes)
            for start, stop in _blocks(sampler):
                pmf[start:stop] = sampler.mean_block(start, stop)
        return Prediction(pmf, sampler, jitter)

    def __len__(self) -> int:
        return self.sampler.rows

    @cached_property
    def covariance(self) -> Float[Tensor, "B M M"]:
        """P^f = (1/K) Σ_k (f⁽ᵏ⁾ − f̂)(·)ᵀ, computed when it is read."""
        return _over_blocks(self.sampler, _covariance, self.sampler.classes, self.sampler.classes)

    @cached_property
    def std(self) -> Float[Tensor, "B M"]:
        """√diag P^f, without making P^f."""
        return _over_blocks(self.sampler, lambda f: f.var(2, correction=0).sqrt(), self.sampler.classes)

    def std_of(self, weights: Float[Tensor, "A M"]) -> Float[Tensor, "B A"]:
        """√(cᵀ P^f c) for each row c of `weights`: the standard deviation of cᵀf, without making P^f."""
        return _over_blocks(self.sampler, lambda f: (weights @ f).var(2, correction=0).sqrt(), len(weights))

    @cached_property
    def label(self) -> Int[Tensor, "B"]:
        """The most likely class."""
        return self.pmf.argmax(1)

    @cached_property
    def confidence(self) -> Float[Tensor, "B"]:
        """The probability of the most likely class."""
        return self.pmf.amax(1)

    @cached_property
    def standard_error(self) -> Float[Tensor, "B M"]:
        """The Monte Carlo error of the PMF: an estimate of the standard deviation of f̂ over seeds.

        More samples make it smaller; they do not change std. Its square has the variance of f̂ as its expectation:
        - "random" draws are independent: Σ_k (f⁽ᵏ⁾ − f̂)²/(K(K − 1));
        - "antithetic" draws are independent in pairs, so it is that of the means of the pairs. Where f is an even
          function of z, as it nearly is where classes are alike, the two of a pair say the same, and the error is up
          to √2 times that of random draws;
        - "sobol" points all depend on each other: the PMF is computed for 16 further sequences with seeds of their
          own, at the cost of 16 predictions when this is read, and the variance of these is taken.
        NaN where the draws cannot tell: from one sample, or from one antithetic pair.
        """
        sampler = self.sampler
        if isinstance(sampler, GaussianSampler) and sampler.draws == "sobol":
            pmfs = [Prediction.from_sampler(other).pmf for other in sampler.replicates(_REPLICATES)]
            return torch.stack(pmfs, 2).var(2).sqrt()
        error = _error_of_pairs if sampler.draws == "antithetic" else _error_of_draws
        return _over_blocks(sampler, error, sampler.classes)

    @cached_property
    def entropy(self) -> Float[Tensor, "B"]:
        """H(f̂) in nats: the total uncertainty about the class."""
        return _entropy(self.pmf)

    @cached_property
    def mutual_information(self) -> Float[Tensor, "B"]:
        """H(f̂) − (1/K) Σ_k H(f⁽ᵏ⁾) in nats: how much of the entropy the parameters are to blame for.

        The difference loses its digits where both entropies are nearly the same. It is computed as
            (1/K) Σ_k Σ_m f̂_m φ(f_m⁽ᵏ⁾/f̂_m),     φ(r) = r ln r − r + 1 ≥ 0,
        which is the same because Σ_m f_m = Σ_m f̂_m = 1; rounding of f and f̂ enters it in second order.
        """
        with plain_execution(self.pmf.device):
            parts = [
                _mutual_information(self.sampler.block(start, stop), self.pmf[start:stop])
                for start, stop in _blocks(self.sampler)
            ]
            return torch.cat(parts) if parts else self.pmf.new_empty(0)

    def risk(self, threshold: float | Float[Tensor, "M"]) -> Float[Tensor, "B M"]:
        """r_m = Pr{f_m > γ_m} ≈ (1/K) Σ_k 1(f_m⁽ᵏ⁾ > γ_m), for one threshold or one per class."""
        try:
            limit = torch.as_tensor(threshold, dtype=self.pmf.dtype, device=self.pmf.device)
        except (TypeError, ValueError, RuntimeError):
            limit = self.pmf.new_full((), torch.nan)
        if limit.shape not in ((), (self.sampler.classes,)) or not bool(((limit >= 0) & (limit <= 1)).all()):
            raise ArgumentError(
                f"The risk threshold is {threshold!r}; expected a probability, or one for each of the "
                f"{self.sampler.classes} classes."
            )
        limits = limit.expand(self.sampler.classes)[:, None]
        return _over_blocks(self.sampler, lambda f: (f > limits).to(f.dtype).mean(2), self.sampler.classes)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
        """Equal-tailed intervals that hold f_m with probability `level`: (lower, upper)."""
        if not isinstance(level, (int, float)) or not 0 < level < 1:
            raise ArgumentError(f"The level of the interval is {level!r}; expected a number between 0 and 1.")
        tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=self.pmf.dtype, device=self.pmf.device)
        both = _over_blocks(
            self.sampler, lambda f: torch.quantile(f, tails, dim=2).permute(1, 2, 0), self.sampler.classes, 2
        )
        return both[..., 0], both[..., 1]

    def samples(self) -> Float[Tensor, "B K M"]:
        """All samples f⁽ᵏ⁾; B·K·M numbers."""
        return _over_blocks(self.sampler, lambda f: f.mT, self.sampler.samples, self.sampler.classes)


def _over_blocks(sampler: Sampler, statistic: Callable[[Float[Tensor, "b M K"]], Tensor], *shape: int) -> Tensor:
    """`statistic` of the samples of all rows, a block of rows at a time."""
    with plain_execution(sampler.like.device):
        result = sampler.like.new_empty(sampler.rows, *shape)
        for start, stop in _blocks(sampler):
            result[start:stop] = statistic(sampler.block(start, stop))
    return result


def _blocks(sampler: Sampler) -> Iterator[tuple[int, int]]:
    row_bytes = sampler.classes * sampler.samples * sampler.like.element_size()
    size = max(1, BLOCK_BYTES.get(sampler.like.device.type, 2**21) // row_bytes)
    for start in range(0, sampler.rows, size):
        yield start, min(start + size, sampler.rows)


def _covariance(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M M"]:
    deviations = values - values.mean(2, keepdim=True)
    total = torch.zeros(*values.shape[:2], values.shape[1], dtype=torch.float64, device=values.device)
    for part in deviations.split(_PRODUCT_DRAWS, 2):
        total += part @ part.mT
    return total.div_(values.shape[2]).to(values.dtype)


def _error_of_draws(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
    """√(Σ_k (f⁽ᵏ⁾ − f̂)²/(K(K − 1))), of independent draws."""
    count = values.shape[2]
    if count < 2:
        return values.new_full(values.shape[:2], torch.nan)
    return (values.var(2) / count).sqrt()


def _error_of_pairs(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
    """√Var f̂ with K f̂ = Σ 2 a_j over the means a_j of the pairs, and one draw without its partner where K is odd."""
    count = values.shape[2]
    pairs = count // 2
    if pairs < 2:
        return values.new_full(values.shape[:2], torch.nan)
    # As `_draws` has them: the first of all pairs, the one without a partner, the others.
    means = (values[:, :, :pairs] + values[:, :, count - pairs :]) / 2
    variance = 4 * pairs * means.var(2)
    if count % 2:
        variance += values.var(2)
    return variance.sqrt() / count


def _entropy(pmf: Float[Tensor, "b M"]) -> Float[Tensor, "b"]:
    """−Σ_m f_m ln f_m, with ln f of the most likely class from the sum of the others.

    Where that is small, f itself has no digits left: 1 − 10⁻⁸ is 1 in float32.
    """
    top, label = pmf.max(1, keepdim=True)
    others = pmf.scatter(1, label, 0.0)
    # `top` and not 1 − Σ others, as NaN in one class alone would be gone.
    return -torch.xlogy(others, others).sum(1) - top[:, 0] * torch.log1p(-others.sum(1))


def _mutual_information(values: Float[Tensor, "b M K"], pmf: Float[Tensor, "b M"]) -> Float[Tensor, "b"]:
    """(1/K) Σ_k Σ_m f̂_m φ(r), r = f_m⁽ᵏ⁾/f̂_m, with φ(r) = (1 + u) ln(1 + u) − u of u = r − 1."""
    kind = torch.finfo(values.dtype)
    scale = pmf.clamp_min(kind.tiny)
    ratio = values / scale[:, :, None]
    excess = ratio - 1
    # r = 0 has φ = 1; its logarithm is kept finite, since 0 · ∞ is no number.
    terms = excess.clamp_min(kind.eps / 2 - 1).log1p_()
    terms *= ratio
    terms -= excess
    return (terms.mean(2) * scale).sum(1).clamp_min(0)
