"""The search of `calibrate` for T, T_c and the softening c, on logit Gaussians that are held (`HeldOut`).

All are searched in their logarithm, so none can become zero, negative or infinite, and between bounds.

T and T_c lie on a *ridge*: both flatten the PMF, so a larger T makes up for a smaller T_c at hardly any cost in NLL.
Where on it the minimum lies is largely a matter of chance, and at T_c ≈ 0 there are no error bars. Of all points that
the held-out data hardly distinguish from the minimum, and that are as good as temperature scaling, `_slide` takes the
one with T_c nearest to 1, the covariance of theory.

With a softening, T(x) = T √(1 + c v̄(x)), the coordinate that stands for T is T(x) at the median of v̄: c then changes
how T(x) varies, and not its level, so the three hardly depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.optimise import Slopes, quasi_newton, turning_point
from errbar._base.threads import one_thread
from errbar._calibration.ece_search import distinct, least_ece, least_ece_near
from errbar._calibration.held_out import HeldOut
from errbar._calibration.question import (
    LITTLE,
    LOG_LIKELIHOOD_RATIO,
    NAMES,
    NEGLIGIBLE_NATS,
    OBJECTIVES,
    TWO,
    Minimum,
    Objective,
    Question,
)
from errbar._distributions.calibration import Calibration

TEMPERATURE_BOUNDS = (1e-2, 1e2)
COVARIANCE_SCALE_BOUNDS = (1e-4, 1e4)
# c times the median of v̄: below, T(x) is constant to a tenth of a per cent; above, it is proportional to √v̄.
SOFTENING_BOUNDS = (1e-3, 1e3)
# How much worse than temperature scaling the PMF may become for the sake of T_c, in nats per sample.
ABOVE_TEMPERATURE_SCALING = 3e-4
# If T is small for the logits at hand, the softmax of a draw is nearly 0 or 1 and a PMF counts which class wins: a
# class that no draw favours has probability zero. On the held-out data this can look as good as anything; on other data
# the NLL is huge. Temperature scaling says what is small: T stays above this share of its T.
_LEAST_SHARE_OF_TEMPERATURE = 0.3
_CANDIDATES = 3

# Whether losses are as good as others, by their differences.
LossRule = Callable[[Float[Tensor, "N"]], bool]


@dataclass(frozen=True)
class Scaling:
    """Temperature scaling alone (T_c = 0): the best T, its NLL, and the largest T that is nearly as good."""

    temperature: float
    nll: float
    gentlest: float


def temperature_scaling(
    held_out: HeldOut, low: float, high: float, slack: float, softening: float = 0.0, within: float = 1e-5
) -> Scaling:
    """The NLL is convex in 1/T, so it falls and then rises with ln T: bisection by the sign of its slope, and then by
    its value. There is nothing to draw, so this costs less than one evaluation with draws."""
    one = held_out.draws(1, 0)

    def at(log_temperature: float) -> Calibration:
        return Calibration(math.exp(log_temperature), 0.0, softening)

    def slope(log_temperature: float) -> float:
        _, slopes = held_out.log_likelihood(at(log_temperature), one, NAMES[:1])
        return -float(slopes["temperature"].mean())

    def nll(log_temperature: float) -> float:
        return held_out.nll(at(log_temperature), one)

    best = turning_point(lambda t: slope(t) >= 0, low, high, within)
    least = nll(best)
    gentlest = turning_point(lambda t: nll(t) > least + slack, best, high, within)
    return Scaling(math.exp(best), least, math.exp(gentlest))


@dataclass(frozen=True, eq=False)
class _Allowed:
    """Whether the losses at a point are as good as those of temperature scaling, by a rule about their differences."""

    question: Question
    scaling: Scaling
    rule: LossRule

    @cached_property
    def alone(self) -> Float[Tensor, "N"]:
        at = Calibration(self.scaling.temperature, 0.0)
        return self.question.held_out.log_likelihood(at, self.question.normal)[0]

    def __call__(self, point: Tensor) -> bool:
        own = self.question.held_out.log_likelihood(self.question.at(point), self.question.normal)[0]
        return self.rule((self.alone - own).cpu())


def best_calibration(
    held_out: HeldOut,
    objective: Objective,
    names: tuple[str, ...],
    start: Calibration,
    samples: int,
    seed: int,
    most: float | None = None,
) -> tuple[Calibration, list[str]]:
    """The best values, and the texts of warnings; `most` is the most that may be given away for the sake of T_c."""
    # Each trial is many short steps over one block of numbers after the other.
    with one_thread(held_out.mean.numel() * samples, held_out.mean.device):
        return _best(held_out, objective, names, start, samples, seed, most)


def _best(
    held_out: HeldOut,
    objective: Objective,
    names: tuple[str, ...],
    start: Calibration,
    samples: int,
    seed: int,
    most: float | None,
) -> tuple[Calibration, list[str]]:
    if most is None:
        most = LITTLE if "softening" in names else NEGLIGIBLE_NATS
    question = Question(held_out, objective, names, start, held_out.draws(samples, seed), most)
    if "softening" not in names:
        return _Plain(question).answer()
    if held_out.typical_variance() <= 0:
        advice = "P^g is zero for half of the held-out inputs, so there is nothing that it could follow."
        rest = tuple(name for name in names if name != "softening")
        without = replace(question, names=rest, start=replace(start, softening=0.0))
        best, messages = _Plain(without).answer() if rest else (without.start, [])
        return best, [*messages, f"The softening stays 0: {advice}"]
    return _Softened(question).answer()


def calibration_near(
    held_out: HeldOut,
    names: tuple[str, ...],
    near: Calibration,
    samples: int,
    seed: int,
    *,
    slides: bool = True,
    is_as_good: LossRule | None = None,
) -> Calibration:
    """As `best_calibration` by NLL, from a good start alone, for parts of data of which the whole was searched.

    Little is given away for the sake of T_c. With a rule about the differences of losses to those of temperature
    scaling, only what passes it is returned; if the best values do not, those that the search began from.
    """
    if near.softening == 0:
        names = tuple(name for name in names if name != "softening")
    with one_thread(held_out.mean.numel() * samples, held_out.mean.device):
        return _near(held_out, names, near, samples, seed, slides, is_as_good)


def _near(
    held_out: HeldOut,
    names: tuple[str, ...],
    near: Calibration,
    samples: int,
    seed: int,
    slides: bool,
    is_as_good: LossRule | None,
) -> Calibration:
    start = Calibration(1.0, 0.0)
    question = Question(held_out, OBJECTIVES["nll"], names, start, held_out.draws(samples, seed), LITTLE)
    rest = tuple(name for name in names if name != "softening")
    plain = _Plain(replace(question, names=rest), within=1e-3)
    lower, upper = plain.floor.clone(), plain.bounds[1]
    if "softening" in names:
        lower, upper = _Softened(question).bounds(lower, plain)
    begin = question.point(near)
    if "covariance_scale" in names:
        lower[1] = min(float(lower[1]), float(begin[1]))
    value, point = quasi_newton(question.slopes, begin.clamp(lower, upper), lower, upper, enough=1e-4)
    if slides:
        allowed = None if is_as_good is None else _Allowed(question, plain.scaling, is_as_good)
        if allowed is not None and not allowed(point):
            return near
        _, point = _slide(question, (value, point), plain.scaling, lower, upper, allowed)
    return question.at(point)


def largest_covariance(held_out: HeldOut, samples: int, seed: int, is_as_good: LossRule) -> Calibration:
    """T and the largest T_c ≤ 1 for which, with the best T for it, the losses are as good as those of temperature
    scaling, by a rule about their differences. T_c = 0 where that is less than the least one that is searched."""
    question = Question(held_out, OBJECTIVES["nll"], TWO, Calibration(1.0, 0.0), held_out.draws(samples, seed))
    plain = _Plain(question)
    scaling, ridge = plain.scaling, _Ridge(question, plain.floor, plain.bounds[1])
    begin = torch.tensor([math.log(scaling.temperature), 0.0], dtype=torch.float64)
    allowed = _Allowed(question, scaling, is_as_good)

    def too_wide(log_scale: float) -> bool:
        return not allowed(ridge.at(log_scale, begin)[1])

    low = math.log(COVARIANCE_SCALE_BOUNDS[0])
    if too_wide(low):
        return Calibration(scaling.temperature, 0.0)
    scale = 0.0 if not too_wide(0.0) else turning_point(too_wide, low, 0.0, within=0.02)
    return question.at(ridge.at(scale, begin)[1])


@dataclass(frozen=True, eq=False)
class _Plain:
    """Without a softening: a coarse grid, then quasi-Newton steps (smooth objectives) or a pattern search (ECE), then
    along the ridge."""

    question: Question
    within: float = 1e-5

    @property
    def slides(self) -> bool:
        return self.question.names == TWO and self.question.objective.is_likelihood

    @cached_property
    def before(self) -> Float[Tensor, "d"]:
        """The previous values are a candidate, wherever they lie; only T_c = 0 has no logarithm."""
        return self.question.point(self.question.start)

    @cached_property
    def bounds(self) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
        ends = {"temperature": TEMPERATURE_BOUNDS, "covariance_scale": COVARIANCE_SCALE_BOUNDS}
        bounds = torch.tensor([ends[name] for name in self.question.names], dtype=torch.float64).log()
        return torch.minimum(bounds[:, 0], self.before), torch.maximum(bounds[:, 1], self.before)

    @property
    def limit(self) -> float:
        return min(self.question.allowance, ABOVE_TEMPERATURE_SCALING)

    @cached_property
    def scaling(self) -> Scaling:
        question, (lower, upper) = self.question, self.bounds
        if "temperature" not in question.names:
            return Scaling(question.start.temperature, math.inf, question.start.temperature)
        return temperature_scaling(
            question.held_out, float(lower[0]), float(upper[0]), self.limit / 2, question.start.softening, self.within
        )

    @cached_property
    def floor(self) -> Float[Tensor, "d"]:
        floor = self.bounds[0].clone()
        if self.slides:
            # If temperature scaling goes to zero, all labels are right, and only this limit bounds T.
            lowest = float(floor[0])
            share = _LEAST_SHARE_OF_TEMPERATURE if self.scaling.temperature > math.exp(lowest + 1e-4) else 1.0
            floor[0] = min(max(math.log(share * self.scaling.gentlest), lowest), float(self.before[0]))
        return floor

    @cached_property
    def minimum(self) -> tuple[Minimum, Tensor, Tensor]:
        """The least value and where it is, and the floor and lower bound that held in the search."""
        question, scaling = self.question, self.scaling
        lower, upper = self.bounds
        floor = self.floor
        candidates = [self.before]
        if question.names == TWO:
            most = scaling.nll + 0.9 * self.limit
            candidates.append(_nearly_without_covariance(question, scaling, float(floor[0]), most))
            lower, floor = lower.clone(), floor.clone()
            lower[1] = floor[1] = min(float(lower[1]), float(candidates[-1][1]))
        first = _grid(question, scaling.gentlest, lower, upper)
        if question.objective.slopes is None:
            return least_ece(question, candidates, first, lower, upper), floor, lower
        grid = [point for _, point in question.coarse().ranked(first)]
        gentle_ones = [point for point in grid if bool(point[0] >= floor[0])][:_CANDIDATES]
        value, point = _minimise(question, candidates, gentle_ones, floor, upper)
        sharp_ones = [point for point in grid[:_CANDIDATES] if bool(point[0] < floor[0])]
        if sharp_ones or bool((point[0] <= floor[0]) & (floor[0] > lower[0])):
            sharp_value, sharp = _minimise(question, [point], sharp_ones, lower, upper)
            if sharp_value < value - LOG_LIKELIHOOD_RATIO / len(question.held_out):
                value, point, floor = sharp_value, sharp, lower
        return (value, point), floor, lower

    def answer(self) -> tuple[Calibration, list[str]]:
        question, start = self.question, self.question.start
        (value, point), floor, lower = self.minimum
        upper = self.bounds[1]
        if self.slides:
            value, point = _slide(question, (value, point), self.scaling, floor, upper)
        elif start.covariance_scale == 0 and "covariance_scale" in question.names:
            unscaled = question.objective.value(question.held_out, start, question.normal)
            if unscaled < value - question.allowance:
                return start, []
        return question.at(point), _edges(question, value, point, lower, upper, self.scaling if self.slides else None)


@dataclass(frozen=True, eq=False)
class _Softened:
    """With a softening: from the best without one, and from several c at once, because there is more than one
    optimum. No result is worse than the best without."""

    question: Question

    def answer(self) -> tuple[Calibration, list[str]]:
        question = self.question
        names, start = question.names, question.start
        rest = tuple(name for name in names if name != "softening")
        plain = _Plain(replace(question, names=rest, start=replace(start, softening=0.0)))
        constant = plain.question.start
        constant_value = question.objective.value(question.held_out, constant, question.normal)
        if rest:
            (constant_value, point), floor, _ = plain.minimum
            constant = plain.question.at(point)
        lower, upper = self.bounds(floor if rest else torch.empty(0), plain)
        value, point = self._minimum(constant, lower, upper)
        if value >= constant_value - 1e-7 or float(point[-1]) <= float(lower[-1]) + 1e-6:
            return plain.answer() if rest else (constant, [])
        if question.objective.is_likelihood and set(TWO) <= set(names):
            value, point = _slide(question, (value, point), plain.scaling, lower, upper)
        scaling = plain.scaling if plain.slides else None
        return question.at(point), _edges(question, value, point, lower, upper, scaling)

    def bounds(self, floor: Tensor, plain: _Plain) -> tuple[Tensor, Tensor]:
        question = self.question
        typical = question.held_out.typical_variance()
        ends = [math.log(bound / typical) for bound in SOFTENING_BOUNDS]
        lower = torch.cat([floor, torch.tensor(ends[:1], dtype=torch.float64)])
        upper = torch.tensor(ends[1:], dtype=torch.float64)
        if len(floor):
            upper = torch.cat([plain.bounds[1], upper])
        return lower, upper

    def _minimum(self, constant: Calibration, lower: Tensor, upper: Tensor) -> Minimum:
        question = self.question
        # The coordinate of T is that of T(x) at the median, so the T without a softening is where to begin.
        without = torch.cat([replace(question, names=question.names[:-1]).point(constant), lower[-1:]])
        middle = (float(lower[-1]) + float(upper[-1])) / 2
        starts = [] if question.start.softening == 0 else [question.point(question.start)]
        for step in (-1, 0, 1):
            for factor in (1.0, 0.1) if "covariance_scale" in question.names else (1.0,):
                point = without.clone()
                point[-1] = middle + step * math.log(10)
                if factor != 1:
                    point[question.names.index("covariance_scale")] += math.log(factor)
                starts.append(point)
        starts = [point.clamp(lower, upper) for point in starts]
        if question.objective.slopes is None:
            return least_ece_near(question, [without.clamp(lower, upper), *starts], lower, upper)
        coarse = question.coarse()
        ends = [quasi_newton(coarse.slopes, point, lower, upper, enough=1e-5)[1] for point in starts]
        _, best = question.ranked(distinct(ends))[0]
        return quasi_newton(question.slopes, best, lower, upper)


def _minimise(
    question: Question, starts: Sequence[Tensor], grid: Sequence[Tensor], lower: Tensor, upper: Tensor
) -> Minimum:
    """The best of the minima near the best of the grid and near the best of the starts."""
    starts = [point.clamp(lower, upper) for point in starts]
    best = question.ranked(starts)[0]
    if grid:
        _, point = question.ranked(grid)[0]
        minimum = quasi_newton(question.slopes, point, lower, upper)
        if minimum[0] <= best[0]:
            return minimum
    return quasi_newton(question.slopes, best[1], lower, upper)


def _nearly_without_covariance(question: Question, scaling: Scaling, floor: float, limit: float) -> Float[Tensor, "2"]:
    """Temperature scaling, with a T_c so small that the NLL stays below the limit: normally the least one that is
    searched, but less where the covariance is huge."""
    least = math.log(COVARIANCE_SCALE_BOUNDS[0])
    point = torch.tensor([max(math.log(scaling.temperature), floor), least], dtype=torch.float64)
    while question.objective.is_likelihood and question.value(point) > limit and float(point[1]) > math.log(1e-60):
        point[1] -= math.log(100)
    return point


def _slide(
    question: Question,
    minimum: Minimum,
    scaling: Scaling,
    lower: Tensor,
    upper: Tensor,
    allowed: Callable[[Tensor], bool] | None = None,
) -> Minimum:
    """From the minimum along the ridge, t ↦ (the best of the others for T_c = eᵗ, eᵗ), towards t = 0.

    As far as the NLL exceeds the least one by at most the allowance, that of temperature scaling by at most 3e-4, and
    that of the previous values with T_c > 0 not at all; and only to what is `allowed`. T_c = 1 is tried first; else the
    limit is found to 4 % of T_c, which is 2 % of the error bars.
    """
    least, point = minimum
    start, allowance = question.start, question.allowance
    before, before_value = question.point(start), question.objective.value(question.held_out, start, question.normal)
    has_before = start.covariance_scale > 0 and ("softening" not in question.names or start.softening > 0)
    limit = min(least + allowance, before_value)
    if start.covariance_scale == 0:
        limit = min(least, before_value) + allowance
    limit = min(limit, scaling.nll + min(allowance, ABOVE_TEMPERATURE_SCALING))
    ridge = _Ridge(question, lower, upper)
    begins = (point, before) if has_before or "softening" not in question.names else (point,)
    refused_value, refused = min((ridge.at(0.0, begin) for begin in begins), key=lambda pair: pair[0])
    is_within = refused_value <= limit
    if is_within and (allowed is None or allowed(refused)):
        return refused_value, refused
    # The start may itself be the result of a slide: then it stays, however often it is calibrated.
    accepted_value, accepted = minimum
    if has_before and before_value <= limit and abs(float(before[1])) < abs(float(point[1])):
        accepted_value, accepted = before_value, before
    while (gap := float(refused[1] - accepted[1])) and abs(gap) > 0.04:
        # Near the minimum √(NLL − minimum) is linear in ln T_c. The guess is a little to one side of where it reaches
        # the limit, so that the interval shrinks from both sides.
        roots = [math.sqrt(max(value - least, 0.0)) for value in (accepted_value, limit, refused_value)]
        share = (roots[1] - roots[0]) / max(roots[2] - roots[0], 1e-12)
        share += math.copysign(0.018 / abs(gap), 0.5 - share)
        share = min(max(share, 0.1, 0.01 / abs(gap)), 0.9)
        if is_within:
            # The NLL does not say where what is allowed ends.
            share = 0.5
        guess = accepted + share * (refused - accepted)
        value, trial = ridge.at(float(guess[1]), guess)
        if value <= limit and (allowed is None or allowed(trial)):
            accepted_value, accepted = value, trial
        else:
            refused_value, refused, is_within = value, trial, value <= limit
    return accepted_value, accepted


@dataclass(frozen=True, eq=False)
class _Ridge:
    """The best of the other values for a T_c; T_c is the second coordinate of the question."""

    question: Question
    lower: Tensor
    upper: Tensor

    def at(self, log_scale: float, begin: Tensor) -> Minimum:
        others = [index for index in range(len(begin)) if index != 1]

        def whole(part: Tensor) -> Tensor:
            point = begin.clone()
            point[others], point[1] = part, log_scale
            return point

        def slopes(part: Tensor) -> Slopes:
            value, gradient, curvature = self.question.slopes(whole(part))
            return value, gradient[others], curvature[others][:, others]

        low, high = self.lower[others], self.upper[others]
        value, part = quasi_newton(slopes, begin[others].clamp(low, high), low, high, enough=1e-4)
        return value, whole(part)


def _grid(question: Question, temperature: float, lower: Tensor, upper: Tensor) -> list[Float[Tensor, "d"]]:
    """Where to start, in units of the T of temperature scaling and of the T_c at which the covariance flattens
    as much as that T does, 8 T²/(π v) for contrasts of variance v (the probit approximation)."""
    spread, names = question.held_out.spread(), question.names
    unit = min(max(8 * temperature**2 / (math.pi * spread), 1e-100), 1e100) if spread > 0 else 1.0
    scales = [unit * 10 ** (step / 2) for step in range(-6, 5)]
    temperatures = [temperature * factor for factor in (0.1, 0.2, 0.35, 0.6, 0.85, 1.0, 1.3)]
    if names == TWO[:1]:
        temperatures = [10 ** (step / 3) for step in range(-6, 7)] + temperatures
    axes = {"temperature": temperatures, "covariance_scale": [*scales, 1.0]}
    points = [torch.tensor(values, dtype=torch.float64).log() for values in product(*(axes[name] for name in names))]
    return [point.clamp(lower, upper) for point in points]


def _edges(
    question: Question, value: float, point: Tensor, lower: Tensor, upper: Tensor, scaling: Scaling | None
) -> list[str]:
    """Warnings about values at the edge of the search, and about edges that are as good as the optimum.

    After a slide, which prefers T_c = 1 to an equally good edge, temperature scaling tells whether T has an optimum.
    Both edges of c are limits that mean something: a constant T(x), and one that is proportional to √v̄.
    """
    return [
        message
        for index, name in enumerate(question.names)
        if name != "softening"
        for message in _edges_of(question, value, point, lower, upper, scaling, index)
    ]


def _edges_of(
    question: Question,
    value: float,
    point: Tensor,
    lower: Tensor,
    upper: Tensor,
    scaling: Scaling | None,
    index: int,
) -> Iterator[str]:
    low, high = (math.exp(float(edge[index])) for edge in (lower, upper))
    optimum = math.exp(float(point[index]))
    interval = f"searched {low:.4g} to {high:.4g}"
    advice = "these data do not determine it. More held-out data, or fitting only one of the two, may help."
    subject = f"The best {question.names[index].replace('_', ' ')} lies at the edge of the search"
    if min(abs(optimum / low - 1), abs(optimum / high - 1)) < 1e-6:
        yield f"{subject}, {optimum:.4g} ({interval}): {advice}"
        return
    if scaling is None:
        edges = [torch.cat([point[:index], edge[index : index + 1], point[index + 1 :]]) for edge in (lower, upper)]
        is_flat = any(question.value(edge) <= value + 1e-12 for edge in edges)
    else:
        is_flat = index == 0 and not low * 1.0001 < scaling.temperature < high / 1.0001
    if is_flat:
        yield f"{subject} ({interval}), but {optimum:.4g}, which was chosen, is as good: {advice}"
