"""Draws of logits and of PMFs, and sums over them.

Samples are kept class by class with the draws in the last dimension, (B, M, K): exponentials and sums then run over
contiguous memory. They are computed again, block by block, whenever a statistic needs them, so that a prediction holds
(B, M) numbers and not (B, M, K).

Sums over draws are good to rounding whatever K and the batch: by torch's own sums, which are pairwise, or by products
over a thousand draws that are added in float64. A product over all draws adds in an order that depends on the
batch, with an error that grows with K (1e-5 at K = 1000 in float32).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.checks import whole_number
from errbar._base.execution import graph_execution, plain_execution
from errbar._base.memory import require_memory, usable_bytes
from errbar._model.outputs import CLASSES, OutputKind
from errbar.errors import ArgumentError

# Bytes of one block of samples, which should stay in the cache between the passes of a softmax; a GPU needs few large
# launches instead.
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 2**28}

# Numbers in a block of draws that is kept for the next prediction.
_KEPT_DRAWS = 2**18

# Draws of one product of deviations, which has an error below 5e-7 in float32; products are added in float64.
_PRODUCT_DRAWS = 1024

# The number of draws whose smallest value is the reference for all others.
_LOW_DRAWS = 16


@dataclass(frozen=True, eq=False)
class SamplingRoot:
    """A of each input with A Aᵀ = P^g on contrasts, which turns draws z into logits ĝ + A z.

    `values` hold A itself; or √v, where A is diagonal; or √w, where A = Q diag(√w) R with one `basis` Q and one
    `rotation` R (the identity unless given) for all inputs: R goes to the draws then, once. Where draws of the logits
    are `kept`, `values` are d of these and A = values/√d: up to d random samples are the first of the kept ones, which
    need no numbers, so that their draws are (0, K); more, or others, are A z.
    """

    values: Float[Tensor, "B M d"] | Float[Tensor, "B d"]
    basis: Float[Tensor, "M d"] | None = None
    rotation: Float[Tensor, "d d"] | None = None
    kept: bool = False

    @property
    def is_of_one_draw(self) -> bool:
        """Whether each input takes a single number."""
        return not self.kept and self.values.ndim == 3 and self.values.shape[2] == 1 and self.rotation is None

    @staticmethod
    def concatenated(parts: Sequence[SamplingRoot]) -> SamplingRoot:
        """The rows of several of one posterior, which share `basis` and `rotation`."""
        return replace(parts[0], values=torch.cat([part.values for part in parts]))

    def draws(self, samples: int, seed: int, like: Tensor, draws: str = "random") -> Float[Tensor, "d K"]:
        """R z of K draws, as `spread` takes them."""
        if self.kept and draws == "random" and samples <= self.values.shape[-1]:
            return like.new_empty(0, samples)
        return self.rotated(standard_normal(samples, self.values.shape[-1], seed, like, draws).T)

    def rotated(self, normal: Float[Tensor, "d K"]) -> Float[Tensor, "d K"]:
        return (normal if self.rotation is None else self.rotation.to(normal.dtype) @ normal).contiguous()

    def spread(self, rows: slice, draws: Float[Tensor, "d K"], scale: float = 1.0) -> Float[Tensor, "b M K"]:
        """`scale` A z of some rows; a new tensor, which the caller may change."""
        values = self.values[rows]
        if self.kept and not len(draws):
            return values[:, :, : draws.shape[1]] * scale
        if self.kept:
            scale /= math.sqrt(values.shape[2])
        if scale != 1:
            draws = draws * scale
        if values.ndim == 3:
            return (values.flatten(0, 1) @ draws).reshape(*values.shape[:2], draws.shape[1])
        independent = values[:, :, None] * draws
        return independent if self.basis is None else self.basis @ independent

    def keeping(self, samples: int, seed: int, like: Tensor) -> SamplingRoot:
        """A root that holds the K draws A z, where products with a `basis` would be made again and again.

        The same where there is no basis, and where the draws, M × K numbers for each input, would take more than a
        third of the memory that is left: slower then, with the same numbers.
        """
        if self.basis is None:
            return self
        inputs, classes = len(self.values), len(self.basis)
        if inputs * classes * samples * self.values.element_size() > usable_bytes(like.device) // 3:
            return self
        draws = self.draws(samples, seed, like)
        values = self.values.new_empty(inputs, classes, samples)
        size = max(1, BLOCK_BYTES.get(like.device.type, 2**21) // (classes * samples * self.values.element_size()))
        for start in range(0, inputs, size):
            rows = slice(start, start + size)
            values[rows] = self.spread(rows, draws)
        return SamplingRoot(values, kept=True)

    def squares(self) -> Float[Tensor, "B"]:
        """tr A Aᵀ in float64."""
        if self.values.ndim == 3:
            norms: Tensor = self.values.flatten(1).norm(dim=1)
            return norms.double().square() / (self.values.shape[2] if self.kept else 1)
        columns = 1.0 if self.basis is None else self.basis.double().square().sum(0)
        return (self.values.double().square() * columns).sum(1)

    def common(self) -> dict[str, Tensor]:
        """What all inputs have in common, by the names of the fields."""
        shared = {"basis": self.basis, "rotation": self.rotation}
        return {name: tensor for name, tensor in shared.items() if tensor is not None}

    def whole(self) -> Float[Tensor, "B M d"] | Float[Tensor, "B M"]:
        """A itself, M × d numbers per input, for draws that are not rotated; √v where it is diagonal."""
        if self.basis is None:
            return self.values / math.sqrt(self.values.shape[2]) if self.kept else self.values
        root = self.basis * self.values[:, None, :]
        return root if self.rotation is None else root @ self.rotation.to(root.dtype)


class Sampler(Protocol):
    """Samples f⁽ᵏ⁾ of the PMF of some rows; for several labels, of the probability of each."""

    @property
    def kind(self) -> OutputKind: ...

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

    def chosen(self, rows: slice | Tensor) -> Sampler:
        """The samples of some rows, whose draws stay the same."""
        ...


@runtime_checkable
class Replicable(Protocol):
    """A sampler that can draw again."""

    def replicates(self, count: int) -> Iterator[Sampler]: ...


@dataclass(frozen=True, eq=False)
class GaussianSampler:
    """f⁽ᵏ⁾ = softmax(ĝ + A z⁽ᵏ⁾), A Aᵀ = P^g on contrasts, with the same draws z for every input (eq:gmarg).

    `mean` is 0 for the most likely class, so that the logits that count are the ones with the least rounding; `normal`
    is rotated already. Of several labels f⁽ᵏ⁾ = σ(ĝ + A z⁽ᵏ⁾), with A Aᵀ = P^g and ĝ as it is.
    """

    mean: Float[Tensor, "B M"]
    root: SamplingRoot
    normal: Float[Tensor, "d K"]
    draws: str
    seed: int
    kind: OutputKind = CLASSES

    @staticmethod
    def of(
        mean: Float[Tensor, "B M"],
        root: SamplingRoot,
        samples: int,
        seed: int,
        draws: str,
        kind: OutputKind = CLASSES,
    ) -> GaussianSampler:
        normal = root.draws(require_samples(samples), seed, mean, draws)
        shifted = mean - mean.amax(1, keepdim=True) if kind.has_gauge else mean
        return GaussianSampler(shifted, root, normal, draws, require_seed(seed), kind)

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
        logits = self._logits(start, stop)
        if logits.requires_grad:
            return self.kind.probability(logits)
        return probabilities_(logits, self.kind)

    def mean_block(self, start: int, stop: int) -> Float[Tensor, "b M"]:
        """c + (1/K) Σ_k (f⁽ᵏ⁾ − c): the rounding of the sum is in proportion to the spread of f, and none without it.

        c is the least of some draws, class by class. So c ≤ K f̂/16: small probabilities keep their digits too.
        """
        if not self.kind.has_gauge:
            values = self.block(start, stop)
            if values.requires_grad:
                return _mean_with_graph(values)
            least = values[:, :, :_LOW_DRAWS].amin(2)
            values -= least[:, :, None]
            return least + values.sum(2) / self.samples
        exponentials = self._logits(start, stop)
        if exponentials.requires_grad:
            return _mean_with_graph(torch.softmax(exponentials, 1))
        exponentials -= exponentials.amax(1, keepdim=True)
        exponentials.exp_()
        weights = exponentials.sum(1, keepdim=True).reciprocal_()
        low = (exponentials[:, :, :_LOW_DRAWS] * weights[:, :, :_LOW_DRAWS]).amin(2)
        deviations = torch.addcmul(-low[:, :, None], exponentials, weights, out=exponentials)
        return low + deviations.sum(2) / self.samples

    def chosen(self, rows: slice | Tensor) -> GaussianSampler:
        return replace(self, mean=self.mean[rows], root=replace(self.root, values=self.root.values[rows]))

    def complement(self) -> GaussianSampler:
        """Of several labels, samples of 1 − f with digits of their own: σ(−g), where 1 − σ(g) would be rounded."""
        return replace(self, mean=-self.mean, root=replace(self.root, values=-self.root.values))

    def replicates(self, count: int) -> Iterator[GaussianSampler]:
        """The same with other draws, which follow from the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        for seed in torch.randint(2**62, (count,), generator=generator).tolist():
            normal = _draws(self.samples, self.normal.shape[0], seed, self.draws).to(self.mean).T.contiguous()
            yield replace(self, normal=self.root.rotated(normal), seed=seed)

    def _logits(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        logits = self.root.spread(slice(start, stop), self.normal)
        logits += self.mean[start:stop, :, None]
        return logits


@dataclass(frozen=True, eq=False)
class GivenSampler:
    """Independent samples that are already there (eq:genMC)."""

    values: Float[Tensor, "B M K"]
    kind: OutputKind = CLASSES

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

    def chosen(self, rows: slice | Tensor) -> GivenSampler:
        return GivenSampler(self.values[rows], self.kind)

    def complement(self) -> GivenSampler:
        """Of several labels, 1 − f."""
        return GivenSampler(1 - self.values, self.kind)


def _mean_with_graph(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
    """c + (1/K) Σ_k (f⁽ᵏ⁾ − c) as in `GaussianSampler.mean_block`, of which c is a constant."""
    low = values[:, :, :_LOW_DRAWS].detach().amin(2)
    return low + (values - low[:, :, None]).mean(2)


def probabilities_(logits: Float[Tensor, "b M K"], kind: OutputKind) -> Float[Tensor, "b M K"]:
    """f of logits, in place."""
    return softmax_over_classes_(logits) if kind.has_gauge else logits.sigmoid_()


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


def normal_quantiles(count: int, seed: int, like: Tensor) -> Float[Tensor, "1 K"]:
    """Φ⁻¹((k + ½)/K), k = 0 … K − 1, in an order that follows from the seed, so that the first ones are a sample."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    quantiles: Tensor = torch.special.ndtri((order.double() + 0.5) / count)
    return quantiles[None].to(like)


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


def mean_over_draws(sampler: Sampler) -> Float[Tensor, "B M"]:
    """f̂ = (1/K) Σ_k f⁽ᵏ⁾."""
    if sampler.like.requires_grad:
        with graph_execution(sampler.like.device):
            return torch.cat([sampler.mean_block(start, stop) for start, stop in blocks(sampler)])
    with plain_execution(sampler.like.device):
        pmf = sampler.like.new_empty(sampler.rows, sampler.classes)
        for start, stop in blocks(sampler):
            pmf[start:stop] = sampler.mean_block(start, stop)
    return pmf


def over_blocks(sampler: Sampler, statistic: Callable[[Float[Tensor, "b M K"]], Tensor], *shape: int) -> Tensor:
    """`statistic` of the samples of all rows, a block of rows at a time; with a graph if the samples have one."""
    if sampler.like.requires_grad:
        with graph_execution(sampler.like.device):
            return torch.cat([statistic(sampler.block(start, stop)) for start, stop in blocks(sampler)])
    with plain_execution(sampler.like.device):
        result = sampler.like.new_empty(sampler.rows, *shape)
        for start, stop in blocks(sampler):
            result[start:stop] = statistic(sampler.block(start, stop))
    return result


def blocks(sampler: Sampler) -> Iterator[tuple[int, int]]:
    """(start, stop) of the rows of each block."""
    row_bytes = sampler.classes * sampler.samples * sampler.like.element_size()
    size = max(1, BLOCK_BYTES.get(sampler.like.device.type, 2**21) // row_bytes)
    for start in range(0, sampler.rows, size):
        yield start, min(start + size, sampler.rows)


def covariance_of_draws(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M M"]:
    """(1/K) Σ_k (f⁽ᵏ⁾ − f̂)(·)ᵀ."""
    deviations = values - values.mean(2, keepdim=True)
    count = values.shape[2]
    if count <= _PRODUCT_DRAWS:
        # One product needs no sum: its M² numbers would be converted to float64 and back.
        return (deviations @ deviations.mT).div_(count)
    total = torch.zeros(*values.shape[:2], values.shape[1], dtype=torch.float64, device=values.device)
    for part in deviations.split(_PRODUCT_DRAWS, 2):
        total += part @ part.mT
    return total.div_(count).to(values.dtype)


def std_of_draws(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
    """√((1/K) Σ_k (f⁽ᵏ⁾ − f̂)²), in two passes: torch's own `var` takes ten times as long on a CPU."""
    # From the first draw: equal draws have no deviation, where their mean would be rounded.
    deviations = values - values[:, :, :1]
    deviations = deviations - deviations.mean(2, keepdim=True)
    return deviations.square().mean(2).sqrt()


def error_of_draws(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
    """√(Σ_k (f⁽ᵏ⁾ − f̂)²/(K(K − 1))), of independent draws."""
    count = values.shape[2]
    if count < 2:
        return values.new_full(values.shape[:2], torch.nan)
    return std_of_draws(values) / math.sqrt(count - 1)


def error_of_pairs(values: Float[Tensor, "b M K"]) -> Float[Tensor, "b M"]:
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
