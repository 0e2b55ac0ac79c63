"""Intervals: by resampling the inputs for means, by Wilson's formula for shares, by DeLong's for areas under ROCs."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar._base.quantiles import quantiles
from errbar.report.values import Estimate

RESAMPLES = 1000
# The two-sided 95 % quantile of the standard normal distribution.
_Z = 1.959964


def means(values: Float[Tensor, "N k"], seed: int, inputs: Int[Tensor, "N"] | None = None) -> list[Estimate]:
    """The mean of each column with the basic bootstrap interval [2 mean − q₉₇.₅, 2 mean − q₂.₅].

    All columns are resampled together, so that differences between them are paired. With `inputs`, which say of which
    input a row is, these are resampled, with all of their rows.
    """
    if inputs is not None:
        return shares(values, torch.ones_like(values), inputs, seed)
    count, columns = values.shape
    generator = torch.Generator().manual_seed(seed)
    resamples = torch.empty(RESAMPLES, columns, dtype=torch.float64)
    # One resample at a time: all at once would be a thousand times the inputs.
    for resample in range(RESAMPLES):
        resamples[resample] = values[torch.randint(count, (count,), generator=generator)].mean(0)
    return _basic(values.mean(0), resamples)


def shares(
    values: Float[Tensor, "N k"], counts: Float[Tensor, "N k"], inputs: Int[Tensor, "N"], seed: int
) -> list[Estimate]:
    """Σ values/Σ counts of each column, with the interval by resampling inputs; NaN where there are no counts."""
    numbers, place = inputs.unique(return_inverse=True)
    sums = torch.zeros(2, len(numbers), values.shape[1], dtype=torch.float64)
    sums[0].index_add_(0, place, values.double())
    sums[1].index_add_(0, place, counts.double())
    generator = torch.Generator().manual_seed(seed)
    resamples = torch.empty(RESAMPLES, values.shape[1], dtype=torch.float64)
    for resample in range(RESAMPLES):
        total = sums[:, torch.randint(len(numbers), (len(numbers),), generator=generator)].sum(1)
        resamples[resample] = total[0] / total[1]
    whole = sums.sum(1)
    return _basic(whole[0] / whole[1], resamples)


def _basic(middle: Float[Tensor, "k"], resamples: Float[Tensor, "R k"]) -> list[Estimate]:
    estimates = []
    for column, value in enumerate(middle.tolist()):
        drawn = resamples[:, column]
        # Of few inputs with such decisions a resample may have none.
        drawn = drawn[~drawn.isnan()]
        if not math.isfinite(value) or not len(drawn):
            estimates.append(Estimate(value, math.nan, math.nan))
            continue
        low, high = quantiles(drawn, (0.025, 0.975)).tolist()
        estimates.append(Estimate(value, 2 * value - high, 2 * value - low))
    return estimates


def share(right: float, count: int) -> Estimate:
    """right/count with Wilson's interval, which stays within 0 … 1 and has a width even if none or all are right.

    >>> share(10, 10).low > 0.7
    True
    """
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    p = right / count
    middle = (p + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(p * (1 - p) / count + _Z**2 / (4 * count**2))
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


def area(inside: Float[Tensor, "N"], outside: Float[Tensor, "K"]) -> Estimate:
    """AUROC of telling `outside` (larger) from `inside`, with the interval of DeLong, DeLong and Clarke-Pearson (1988).

    With V_k the share of `inside` below outside_k, and W_n the share of `outside` above inside_n (ties count half),
    the area is mean V = mean W, and its variance var(V)/K + var(W)/N.
    """
    both = torch.cat([inside, outside]).double()
    positive = torch.arange(len(both)) >= len(inside)
    value = metrics.auroc(both, positive)
    V, W = _share_below(inside, outside), 1 - _share_below(outside, inside)
    if min(len(V), len(W)) < 2:
        return Estimate(value, math.nan, math.nan)
    half = _Z * math.sqrt(float(V.var()) / len(V) + float(W.var()) / len(W))
    return Estimate(value, max(0.0, value - half), min(1.0, value + half))


def _share_below(reference: Float[Tensor, "N"], values: Float[Tensor, "K"]) -> Float[Tensor, "K"]:
    """For each value the share of the reference below it; equal ones count half."""
    ascending, queries = reference.double().sort().values, values.double().contiguous()
    below = torch.searchsorted(ascending, queries)
    up_to = torch.searchsorted(ascending, queries, right=True)
    return (below + up_to).double() / (2 * len(ascending))
