"""Confidence limits of the expected calibration error, from the counts of its bins.

The estimate Σ_j w_j |acc_j − conf_j| is above what it estimates: noise makes every gap larger, and |·| has no slope at
zero. So no bootstrap around the estimate holds. Here a value of the error is inside the limits if data like these are
not a surprise under it (test inversion). A value e says nothing about how it is spread over the bins; each limit
therefore takes the spread that is hardest to tell from the data, in units of a bin's standard error
σ_j = √(p_j(1 − p_j)/n_j), p_j midway between accuracy and confidence:

- The *lower* limit puts the error into few bins, where it makes the estimate largest: the bins keep the gaps that were
  seen, those of most standard errors first, until together they have e. There are two tests, and the larger of their
  limits counts: by the estimate itself, and by what of each gap exceeds two standard errors, Σ_j w_j (|gap_j| − 2σ_j)₊.
  Of the estimate, bins without a gap are most, where one of many is wrong; nothing is left of them in the second.
- The *upper* limit spreads it, which makes the estimate smallest: a bin whose gap is more than two standard errors
  keeps it, every other has the same number c of standard errors. What is compared is the estimate, to which the bins
  that keep their gap count only 2Φ(c) − 1, the slope of E|Z + c|: so much of an error in these gaps reaches the others,
  which make up for it. In a bin so near to 0 or 1 that there is no room on one side the sign decides more than the
  size: so all is done once more with all doubtful gaps on the side that has room, where a bin without room on the
  other counts with its sign. The larger of the two is the limit. It is at least that of the 10 % quantile of data whose
  doubtful bins have no gap: an estimate so small that not even that fits is luck, not knowledge.

Under each such spread the numbers of right answers are drawn anew, binomially, and the weights of the bins with them;
the data are a surprise if too few of the draws lie beyond them (those that are equal count half). Too few is 0.4 α,
α = 1 − level, where either limit can be wrong: where the gaps stand out from the noise, which one begins to do at 1.5
standard errors and does from 3 on, and where one bin has all the noise. With many bins whose gaps do not stand out, at
zero above all, only one limit can be wrong, because the two spreads differ: then it is α for the upper limit, and 0.8 α
for the lower. `_Bins.tail` leads from one to the other. The second test of the lower limit always has 0.4 α. What is
left of α is for what the spreads do not know: they are estimated from the gaps that were seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from errbar._base.quantiles import quantiles

# In standard errors: from where on a bin keeps its gap, between where it begins and ends to stand out, and the room
# below which its sign counts.
_KEPT = 2.0
_STANDS_OUT = (1.5, 3.0)
_ROOM = 3.0
# The share of α that a limit has where both can be wrong, and where the other cannot; of the second test of the lower.
_BOTH, _LOWER, _ABOVE, _UPPER = 0.4, 0.8, 0.4, 1.0
# The quantile of draws without doubtful gaps below which data are not believed.
_LUCK = 0.1
# Halvings: the limits to one part in five hundred of the range, well below the noise of a thousand draws.
_STEPS = 9
# Probabilities of binomial tails are left out from so many standard deviations on.
_TAIL = 8.0
_EQUAL = 1e-12


def ece_limits(
    count: Float[Tensor, "J"],
    right: Float[Tensor, "J"],
    confidence: Float[Tensor, "J"],
    *,
    level: float,
    resamples: int,
    seed: int,
) -> tuple[float, float]:
    """Limits of Σ_j w_j |acc_j − conf_j|: of each bin the number of inputs, of right ones and the mean confidence.

    Bins without inputs are left out.
    """
    full = count > 0
    bins = _Bins(count[full], right[full], confidence[full].clamp(0, 1))
    draws = _Draws(bins, resamples, seed)
    low = max(_lower(bins, draws, 1 - level, 0.0, _LOWER), _lower(bins, draws, 1 - level, _KEPT, _ABOVE))
    return low, max(low, *(_upper(bins, draws, 1 - level, *side) for side in bins.sides()))


@dataclass(frozen=True, eq=False)
class _Bins:
    count: Float[Tensor, "J"]
    right: Float[Tensor, "J"]
    confidence: Float[Tensor, "J"]

    @cached_property
    def weight(self) -> Float[Tensor, "J"]:
        return self.count / self.count.sum()

    @cached_property
    def gap(self) -> Float[Tensor, "J"]:
        """acc_j − conf_j, with its sign."""
        return self.right / self.count - self.confidence

    @cached_property
    def error(self) -> Float[Tensor, "J"]:
        """σ_j, above zero also where all or none are right: one input more is taken to be half right."""
        p = (self.right + self.count * self.confidence + 1) / (2 * self.count + 2)
        return (p * (1 - p) / self.count).sqrt()

    @cached_property
    def size(self) -> Float[Tensor, "J"]:
        """|acc_j − conf_j| in standard errors."""
        return self.gap.abs() / self.error

    @cached_property
    def sign(self) -> Float[Tensor, "J"]:
        return torch.where(self.gap > 0, 1.0, -1.0).double()

    def sides(self) -> list[tuple[Float[Tensor, "J"], Bool[Tensor, "J"]]]:
        """The signs to try, and which bins count with theirs: as seen, and doubtful ones where there is room."""
        sign = self.sign
        tight = torch.minimum(self.confidence, 1 - self.confidence) < _ROOM * self.error
        roomy = torch.where(self.confidence > 0.5, -1.0, 1.0).double()
        other = torch.where(tight | (self.size < _KEPT), roomy, sign)
        observed_signs = (sign, torch.zeros_like(tight))
        return (
            [observed_signs] if torch.equal(other, sign) and not bool(tight.any()) else [observed_signs, (other, tight)]
        )

    def gaps(self, size: Float[Tensor, "J"], sign: Float[Tensor, "J"]) -> Float[Tensor, "J"]:
        """|gap| of so many standard errors, no larger than accuracies between 0 and 1 allow."""
        return torch.minimum(size * self.error, torch.where(sign > 0, 1 - self.confidence, self.confidence))

    def ece(self, size: Float[Tensor, "J"], sign: Float[Tensor, "J"]) -> float:
        return float((self.weight * self.gaps(size, sign)).sum())

    def tail(self, size: Float[Tensor, "J"], alpha: float, most: float) -> float:
        """α (b + (1 − κ²)(1 − 1/J*)(most − b)), b = 0.4: from α·most to α·b.

        κ = Σ_j w_j² σ_j² s_j / Σ_j w_j² σ_j² is the share of the noise from gaps that stand out, s_j from 0 to 1 as one
        does; J* = (Σ_j w_j σ_j)² / Σ_j w_j² σ_j² the number of bins, by their part in the noise.
        """
        noise = self.weight * self.error
        begin, end = _STANDS_OUT
        share = (noise.square() * ((size - begin) / (end - begin)).clamp(0, 1)).sum() / noise.square().sum()
        number = noise.sum().square() / noise.square().sum()
        return alpha * (_BOTH + float((1 - share.square()) * (1 - 1 / number)) * (most - _BOTH))


class _Draws:
    """Data drawn anew under gaps, always from the same random numbers, so that limits are found by halving."""

    def __init__(self, bins: _Bins, resamples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(bins.count), resamples)
        # One number from each of as many equal parts of 0 … 1, in an order of its own for each bin: every bin alone has
        # its distribution nearly exactly.
        order = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(1)
        self.uniform = (order + torch.rand(shape, generator=generator, dtype=torch.float64)) / resamples
        self.weight = _multinomial(bins.count, resamples, generator) / bins.count.sum()
        self.bins = bins

    def gaps(self, size: Float[Tensor, "J"], sign: Float[Tensor, "J"]) -> Float[Tensor, "J R"]:
        """acc_j − conf_j with accuracies drawn from Bin(n_j, conf_j ± gap_j)/n_j, by the quantiles of `uniform`."""
        count, confidence = self.bins.count[:, None], self.bins.confidence[:, None]
        p = confidence + (sign * self.bins.gaps(size, sign))[:, None]
        p = p.clamp(1e-15, 1 - 1e-15)
        reach = _TAIL * (count * p * (1 - p)).sqrt() + 20
        first = (count * p - reach).floor().clamp_min(0)
        length = int(torch.minimum(2 * reach + 2, count + 1).max())
        number = first + torch.arange(length, dtype=torch.float64)
        inside = torch.minimum(number, count)
        log_probability = (
            torch.lgamma(count + 1)
            - torch.lgamma(inside + 1)
            - torch.lgamma(count - inside + 1)
            + inside * p.log()
            + (count - inside) * (-p).log1p()
        )
        cumulative = torch.where(number <= count, log_probability.exp(), 0.0).cumsum(1)
        index = torch.searchsorted(cumulative / cumulative[:, -1:], self.uniform)
        return torch.minimum(first + index, count) / count - confidence

    def beyond(self, values: Float[Tensor, "R"], estimate: float) -> float:
        """The share of the draws above what was seen; equal ones count half."""
        equal = (values - estimate).abs() <= _EQUAL
        return float(((values > estimate) & ~equal).double().mean() + equal.double().mean() / 2)


def _multinomial(count: Float[Tensor, "J"], resamples: int, generator: torch.Generator) -> Float[Tensor, "J R"]:
    """Counts of bins drawn anew: each from what the ones before have left, binomially."""
    left = count.sum().expand(resamples).clone()
    rest, rows = float(count.sum()), []
    for each in count.tolist():
        share = torch.full_like(left, min(1.0, each / rest))
        rows.append(torch.binomial(left, share, generator=generator))
        left, rest = left - rows[-1], rest - each
    return torch.stack(rows)


def _lower(bins: _Bins, draws: _Draws, alpha: float, noise: float, most: float) -> float:
    """By Σ_j w_j (|acc_j − conf_j| − noise · σ_j)₊; `most` is the share of α where the upper limit cannot be wrong."""
    sign, size = bins.sign, bins.size

    def estimate(weight: Float[Tensor, "J R"], gap: Float[Tensor, "J R"]) -> Float[Tensor, "R"]:
        return (weight * (gap.abs() - noise * bins.error[:, None]).clamp_min(0)).sum(0)

    observation = float(estimate(bins.weight[:, None], bins.gap[:, None]))
    rank = size.argsort(descending=True, stable=True).argsort().double()

    def first(number: float) -> Float[Tensor, "J"]:
        """The gaps of the first so many bins, the last one in part."""
        return size * (number - rank).clamp(0, 1)

    def surprising(number: float) -> bool:
        gaps = first(number)
        values = estimate(draws.weight, draws.gaps(gaps, sign))
        return draws.beyond(values, observation) < bins.tail(gaps, alpha, most)

    if not surprising(0.0):
        return 0.0
    return bins.ece(first(_halved(surprising, 0.0, float(len(size)))[0]), sign)


def _upper(bins: _Bins, draws: _Draws, alpha: float, sign: Float[Tensor, "J"], by_sign: Bool[Tensor, "J"]) -> float:
    clear_gaps = torch.where((bins.size > _KEPT) & (bins.sign == sign), bins.size, 0.0)

    def spread(level: float) -> Float[Tensor, "J"]:
        return clear_gaps.clamp_min(level)

    without = draws.gaps(clear_gaps, sign)

    def expected(level: float) -> bool:
        counts = torch.where(clear_gaps > level, math.erf(level / math.sqrt(2)), 1.0)[:, None]

        def estimate(weight: Float[Tensor, "J R"], gap: Float[Tensor, "J R"]) -> Float[Tensor, "R"]:
            return (counts * weight * torch.where(by_sign[:, None], sign[:, None] * gap, gap.abs())).sum(0)

        observation = float(estimate(bins.weight[:, None], bins.gap[:, None]))
        observation = max(observation, float(quantiles(estimate(draws.weight, without), (_LUCK,))))
        gaps = spread(level)
        return 1 - draws.beyond(estimate(draws.weight, draws.gaps(gaps, sign)), observation) >= bins.tail(
            gaps, alpha, _UPPER
        )

    low, high = 0.0, 3.0
    # No accuracy is further than one from its confidence: from there on a larger level is the same spread.
    while expected(high) and high < float((1 / bins.error).max()):
        low, high = high, 2 * high
    return bins.ece(spread(_halved(expected, low, high)[1]), sign)


def _halved(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """The last value found where `holds` is true and the first where it is not; true at `low`, false at `high`."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
