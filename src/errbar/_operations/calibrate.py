"""`calibrate`: temperature T and covariance scale T_c from held-out data.

The calibrated logits are N(ĝ/T, T_c P^g/T²). Both are searched in their logarithm, so neither can become zero,
negative or infinite, and between bounds; an optimum at a bound raises a `CalibrationWarning`. The draws are shared by
all inputs and all trial values, so the objective is a smooth deterministic function of (ln T, ln T_c).

T and T_c lie on a *ridge*: both flatten the PMF, so a larger T makes up for a smaller T_c at hardly any cost in NLL.
Where on it the minimum lies is largely a matter of chance, and at T_c ≈ 0 there are no error bars. Of all points that
the held-out data hardly distinguish from the minimum, and that are as good as temperature scaling, `_slide` takes the
one with T_c nearest to 1, the covariance of theory. The NLL is computed from log-probabilities, so it is always finite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar._base.execution import plain_execution
from errbar._base.linalg import exp_without_subnormals_
from errbar._base.optimise import Slopes, pattern_search, quasi_newton, turning_point
from errbar._distributed.shards import opened
from errbar._distributed.team import Team, team_of
from errbar._distributions.sampling import SamplingRoot, require_samples
from errbar._model.batch import Batch, Unpack, checked_labels
from errbar._posterior.posterior import Posterior, require_posterior
from errbar._posterior.pushing import affordable_draws, keeps_draws, require_room
from errbar.errors import ArgumentError, CalibrationWarning, DataError

TEMPERATURE_BOUNDS = (1e-2, 1e2)
COVARIANCE_SCALE_BOUNDS = (1e-4, 1e4)
_NAMES = ("temperature", "covariance_scale")
_BOUNDS = {"temperature": TEMPERATURE_BOUNDS, "covariance_scale": COVARIANCE_SCALE_BOUNDS}
# N (NLL − its minimum) is a log-likelihood ratio: up to 2, ln T_c is within two standard deviations of its optimum
# (Wilks). With few samples that permits much worse PMFs, so it is also limited, in nats per sample, to 0.08 % of a
# probability. With other draws than those of the search the loss differs: up to 1e-3 averaged over seeds.
_LOG_LIKELIHOOD_RATIO = 2.0
_NEGLIGIBLE_NATS = 8e-4
# How much worse than temperature scaling the PMF may become for the sake of T_c, in nats per sample.
_ABOVE_TEMPERATURE_SCALING = 3e-4
# If T is small for the logits at hand, the softmax of a draw is nearly 0 or 1 and a PMF counts which class wins: a
# class that no draw favours has probability zero. On the held-out data this can look as good as anything; on other data
# the NLL is huge. Temperature scaling says what is small: T stays above this share of its T.
_LEAST_SHARE_OF_TEMPERATURE = 0.3
_CANDIDATES = {True: 3, False: 8}  # for smooth objectives and for others
_COARSE_SAMPLES = 100
# Samples made at a time: on a CPU they should fit in the cache, a GPU needs few large launches.
_BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}


def calibrate(
    posterior: Posterior,
    data: Any,
    *,
    objective: str = "nll",
    fit: Sequence[str] = _NAMES,
    samples: int = 1000,
    seed: int = 0,
    unpack: Unpack | None = None,
    group: Any = None,
    progress: bool = False,
) -> Posterior:
    """A posterior with the T and T_c, or the one of them named in `fit`, that are best on held-out data.

    What is not fitted keeps its value. `fit=("temperature",)` with `covariance_scale=0` is the usual
    temperature scaling, `fit=("covariance_scale",)` with `temperature=1` the paper's method.

    T and T_c can stand in for each other: both flatten the PMF, but only T_c gives error bars. So fitting both by "nll"
    does not return the minimum. Consider all T_c whose NLL, with the best T for each, exceeds the least by at most
    min(2/N, 8e-4), where N is the number of held-out samples, and that of temperature scaling (T alone, T_c = 0) by at
    most 3e-4: the one nearest to 1 (in |ln T_c|) is chosen, so the covariance of theory changes only as far as the data
    require. "brier" and "ece" take their minimum; of similar minima of the ECE, the one with the best NLL, because a
    flat PMF is calibrated too. By its objective no result is worse than before (if T_c was 0: by no more than
    min(2/N, 8e-4)).

    If T is small for the logits, PMFs merely count which class wins. So, when fitting both by "nll", T stays above 0.3
    of the T of temperature scaling, unless the log-likelihood of the held-out data rises by more than 2 below that.

    Args:
        posterior: the posterior to calibrate.
        data: held-out batches with labels, not used for training.
        objective: "nll", "brier" or "ece".
        fit: which of "temperature" and "covariance_scale" to fit.
        samples: Monte Carlo draws for the PMF; with M > 100 classes at most 100,000/M, or 100 where that is more. They
            are held in memory where that is quicker: up to 100,000 numbers for each input, or 100 M.
        seed: for these draws.
        unpack: as in `collect`; by default that of the fit.
        group: as in `collect`. The held-out logits of all ranks are gathered, and the first rank searches for all.
        progress: show progress with the time left.
    """
    team = team_of(group)
    names = team.together(lambda: _require_question(posterior, objective, fit))
    posterior.require_ready(team)
    samples = affordable_draws(posterior.information.n_classes, team.together(lambda: require_samples(samples)))
    start = {"temperature": posterior.temperature, "covariance_scale": posterior.covariance_scale}
    team.require_same(start | {"objective": objective, "fit": names, "samples": samples, "seed": seed})
    held_out = _held_out(posterior, data, unpack or posterior.unpack, progress, team, samples, seed)

    def search() -> tuple[dict[str, float], list[str]] | None:
        if not team.leads:
            return None
        with plain_execution(held_out.mean.device):
            return _search(held_out, _OBJECTIVES[objective], names, start, samples, seed)

    best, messages = team.broadcast(team.together(search))
    for text in messages:
        warnings.warn(text, CalibrationWarning, stacklevel=2)
    return posterior.with_calibration(**best)


def _require_question(posterior: object, objective: object, fit: object) -> tuple[str, ...]:
    """What to fit, in the order of `_NAMES`."""
    require_posterior(posterior)
    names = (fit,) if isinstance(fit, str) else tuple(fit) if isinstance(fit, Sequence) else ()
    if not names or any(name not in _NAMES for name in names):
        raise ArgumentError(f"fit is {fit!r}; expected 'temperature', 'covariance_scale' or both.")
    if not isinstance(objective, str) or objective not in _OBJECTIVES:
        raise ArgumentError(f"objective is {objective!r}; expected {', '.join(map(repr, _OBJECTIVES))}.")
    return tuple(name for name in _NAMES if name in names)


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """ĝ and a root of P^g (both for T = T_c = 1) and the label of each held-out input."""

    mean: Float[Tensor, "N M"]
    root: SamplingRoot
    labels: Int[Tensor, "N"]

    def draws(self, samples: int, seed: int) -> Float[Tensor, "d K"]:
        return self.root.draws(samples, seed, self.mean)

    def spread(self) -> float:
        """The mean variance of a contrast, over inputs and contrasts."""
        return float(self.root.squares().mean()) / (self.mean.shape[1] - 1)

    def _blocks(
        self, temperature: float, scale: float, normal: Float[Tensor, "d K"]
    ) -> Iterator[tuple[slice, Float[Tensor, "b M K"], Float[Tensor, "b M"]]]:
        """Rows, √T_c A z/T and ĝ/T; their sum are the samples of the logits."""
        limit = _BLOCK_ELEMENTS.get(self.mean.device.type, _BLOCK_ELEMENTS["cpu"])
        size = max(1, limit // (self.mean.shape[1] * normal.shape[1]))
        for start in range(0, len(self.mean), size):
            rows = slice(start, start + size)
            yield rows, self.root.spread(rows, normal, math.sqrt(scale) / temperature), self.mean[rows] / temperature

    def log_likelihood(
        self, temperature: float, scale: float, normal: Float[Tensor, "d K"], names: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "N"], dict[str, Float[Tensor, "N"]]]:
        """ln f_y of each input and its derivatives by those of ln T and ln T_c that are named; float64.

            ln f_y = ln Σ_k exp(l_k) − ln K,   l_k = g_y − ln Σ_m exp(g_m) of draw k,
            ∂ ln f_y/∂τ = Σ_k w_k (ġ_y − Σ_m f_m ġ_m),   w = softmax(l),

        with g = (ĝ + √T_c A z)/T and ġ = −g for τ = ln T, ½ √T_c A z/T for τ = ln T_c. No probability is formed, so
        none can underflow, and no objective can become infinite.
        """
        if scale == 0:
            normal = normal[:, :1]
        value = self.mean.new_empty(len(self.mean), dtype=torch.float64)
        slopes = {name: torch.empty_like(value) for name in names}
        for rows, spread, mean in self._blocks(temperature, scale, normal):
            label = self.labels[rows, None, None]
            spread_of_label = spread.gather(1, label.expand(-1, 1, spread.shape[2]))[:, 0]
            mean_of_label = mean.gather(1, label[:, 0])
            weights = spread + mean[:, :, None]
            top = weights.amax(1, keepdim=True)
            weights -= top
            exp_without_subnormals_(weights)
            total = weights.sum(1)
            log_share = (spread_of_label + mean_of_label - top[:, 0]).double() - total.double().log()
            value[rows] = torch.logsumexp(log_share, 1) - math.log(normal.shape[1])
            if not names:
                continue
            share = torch.softmax(log_share, 1)
            along_mean = mean_of_label - (mean[:, None, :] @ weights)[:, 0] / total
            along_spread = spread_of_label - (weights.mul_(spread)).sum(1) / total
            for name in names:
                velocity = along_spread / 2 if name == "covariance_scale" else -(along_mean + along_spread)
                slopes[name][rows] = (share * velocity).sum(1)
        return value, slopes

    def pmf(
        self, temperature: float, scale: float, normal: Float[Tensor, "d K"], names: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "N M"], dict[str, Float[Tensor, "N M"]]]:
        """The PMF and its derivatives by those of ln T and ln T_c that are named.

        With g = (ĝ + √T_c A z)/T: ∂f/∂τ = f ∘ (ġ − fᵀġ), where ġ = −g for τ = ln T and ½ √T_c A z/T for τ = ln T_c.
        """
        if scale == 0:
            normal = normal[:, :1]
        pmf = torch.empty_like(self.mean)
        slopes = {name: torch.empty_like(self.mean) for name in names}
        for rows, spread, mean in self._blocks(temperature, scale, normal):
            values = spread + mean[:, :, None]
            values -= values.amax(1, keepdim=True)
            exp_without_subnormals_(values)
            values /= values.sum(1, keepdim=True)
            pmf[rows] = values.mean(2)
            if not names:
                continue
            product_with_spread = spread.mul_(values)
            total, along = product_with_spread.mean(2), product_with_spread.sum(1)
            for name in names:
                if name == "temperature":
                    first, expected = -(total + mean * pmf[rows]), -(along + (mean[:, None, :] @ values)[:, 0])
                else:
                    first, expected = total / 2, along / 2
                slopes[name][rows] = first - (values @ expected[:, :, None])[:, :, 0] / values.shape[2]
        return pmf, slopes


def _held_out(
    posterior: Posterior, data: Any, unpack: Unpack | None, progress: bool, team: Team, samples: int, seed: int
) -> _HeldOut:
    """The held-out inputs of all ranks, in the order of ranks, on every rank. A collective call."""
    stream = opened(data, unpack, team, title="Calibrating", progress=progress)
    own = team.together(lambda: _read(posterior, stream, samples, seed))
    has_data = team.exchange(own is not None)
    if not any(has_data):
        raise DataError("The data for calibration are empty: expected at least one batch.")
    if team.is_alone and own is not None:
        return replace(own, root=own.root.keeping(samples, seed, own.mean))
    device = posterior.information.network.device
    parts = None if own is None else {"mean": own.mean, "root": own.root.values, "labels": own.labels}
    rows = team.gathered(parts, device)
    # One posterior has one basis, which a rank without data lacks: take that of the first rank with data.
    common = {} if own is None or has_data.index(True) != team.rank else own.root.common()
    root = SamplingRoot(
        rows["root"], **team.gathered(common, device), kept=keeps_draws(posterior.information.task, samples)
    )
    return _HeldOut(rows["mean"], root.keeping(samples, seed, rows["mean"]), rows["labels"])


def _read(posterior: Posterior, stream: Iterator[Batch], samples: int, seed: int) -> _HeldOut | None:
    """This rank's part of the held-out inputs; None if it has none."""
    plain = posterior.with_calibration(temperature=1.0, covariance_scale=1.0)
    means: list[Tensor] = []
    roots: list[SamplingRoot] = []
    labels: list[Tensor] = []
    for batch in stream:
        require_room(posterior.information.task, sum(map(len, means)), len(batch), samples)
        gaussian = plain.sampling_logits(batch, samples, seed)
        size, classes = gaussian.mean.shape
        labels.append(checked_labels(batch.labels, size=size, classes=classes, device=gaussian.mean.device))
        means.append(gaussian.mean - gaussian.mean.mean(1, keepdim=True))
        roots.append(gaussian.sampling_root())
    return _HeldOut(torch.cat(means), SamplingRoot.concatenated(roots), torch.cat(labels)) if means else None


def held_out_nll(posterior: Posterior, data: Sequence[Batch], samples: int, seed: int) -> float:
    """−(1/N) Σ_n ln f_y, finite even where a probability would underflow."""
    samples = affordable_draws(posterior.information.n_classes, samples)
    total, count = 0.0, 0
    for batch in data:
        part = _read(posterior, iter([batch]), samples, seed)
        assert part is not None
        with plain_execution(part.mean.device):
            scales = posterior.temperature, posterior.covariance_scale
            total -= float(part.log_likelihood(*scales, part.draws(samples, seed))[0].sum())
        count += len(part.labels)
    return total / count


@dataclass(frozen=True)
class _Objective:
    """A score to minimise, of (ĝ and P^g, T, T_c, draws), with its gradient and a curvature if it is smooth."""

    value: Callable[[_HeldOut, float, float, Tensor], float]
    slopes: Callable[[_HeldOut, float, float, Tensor, Sequence[str]], Slopes] | None
    is_likelihood: bool = False


def _nll(held_out: _HeldOut, temperature: float, scale: float, normal: Tensor) -> float:
    return -float(held_out.log_likelihood(temperature, scale, normal)[0].mean())


def _nll_slopes(held_out: _HeldOut, temperature: float, scale: float, normal: Tensor, names: Sequence[str]) -> Slopes:
    """With s the derivatives of ln f_y of an input: −E s and, as an estimate of the Hessian, E s sᵀ."""
    value, slopes = held_out.log_likelihood(temperature, scale, normal, names)
    each = torch.stack([slopes[name] for name in names]).cpu()
    return -float(value.mean()), -each.mean(1), each @ each.T / each.shape[1]


def _brier(held_out: _HeldOut, temperature: float, scale: float, normal: Tensor) -> float:
    return metrics.brier(held_out.pmf(temperature, scale, normal)[0], held_out.labels)


def _brier_slopes(held_out: _HeldOut, temperature: float, scale: float, normal: Tensor, names: Sequence[str]) -> Slopes:
    """2 E (f − e_y)ᵀ ∂f, and the curvature of Gauss and Newton, 2 E (∂f)ᵀ ∂f."""
    pmf, slopes = held_out.pmf(temperature, scale, normal, names)
    error = pmf - torch.nn.functional.one_hot(held_out.labels, pmf.shape[1]).to(pmf)
    each = torch.stack([slopes[name].flatten() for name in names]).double()
    gradient, curvature = each @ error.flatten().double(), each @ each.T
    return (
        metrics.brier(pmf, held_out.labels),
        2 * gradient.cpu() / len(pmf),
        2 * curvature.cpu() / len(pmf),
    )


def _ece(held_out: _HeldOut, temperature: float, scale: float, normal: Tensor) -> float:
    return metrics.ece(held_out.pmf(temperature, scale, normal)[0], held_out.labels)


_OBJECTIVES = {
    "nll": _Objective(_nll, _nll_slopes, is_likelihood=True),
    "brier": _Objective(_brier, _brier_slopes),
    "ece": _Objective(_ece, None),
}


@dataclass(frozen=True, eq=False)
class _Question:
    """An objective as a function of the logarithms of the fitted values, for these draws."""

    held_out: _HeldOut
    objective: _Objective
    names: tuple[str, ...]
    start: dict[str, float]
    normal: Float[Tensor, "d K"]

    def at(self, point: Tensor) -> dict[str, float]:
        return {**self.start, **{name: math.exp(float(x)) for name, x in zip(self.names, point, strict=True)}}

    def value(self, point: Tensor) -> float:
        trial = self.at(point)
        return self.objective.value(self.held_out, trial["temperature"], trial["covariance_scale"], self.normal)

    def slopes(self, point: Tensor) -> Slopes:
        assert self.objective.slopes is not None
        trial = self.at(point)
        return self.objective.slopes(
            self.held_out, trial["temperature"], trial["covariance_scale"], self.normal, self.names
        )

    def nll(self, point: Tensor) -> float:
        trial = self.at(point)
        return _nll(self.held_out, trial["temperature"], trial["covariance_scale"], self.normal)

    @property
    def allowance(self) -> float:
        """A difference that the data hardly determine, in nats per sample; for other objectives in their units."""
        return min(_LOG_LIKELIHOOD_RATIO / len(self.held_out.labels), _NEGLIGIBLE_NATS)

    def ranked(self, points: Sequence[Tensor]) -> list[tuple[float, Tensor]]:
        return sorted(((self.value(point), point) for point in points), key=lambda pair: pair[0])


@dataclass(frozen=True)
class _Scaling:
    """Temperature scaling alone (T_c = 0): the best T, its NLL, and the largest T that is nearly as good."""

    temperature: float
    nll: float
    gentlest: float


def _temperature_scaling(held_out: _HeldOut, low: float, high: float, slack: float) -> _Scaling:
    """The NLL is convex in 1/T, so it falls and then rises with ln T: bisection by the sign of its slope, and then by
    its value. There is nothing to draw, so this costs less than one evaluation with draws."""
    one = held_out.draws(1, 0)

    def slope(log_temperature: float) -> float:
        _, slopes = held_out.log_likelihood(math.exp(log_temperature), 0.0, one, _NAMES[:1])
        return -float(slopes["temperature"].mean())

    def nll(log_temperature: float) -> float:
        return _nll(held_out, math.exp(log_temperature), 0.0, one)

    best = turning_point(lambda t: slope(t) >= 0, low, high)
    least = nll(best)
    gentlest = turning_point(lambda t: nll(t) > least + slack, best, high)
    return _Scaling(math.exp(best), least, math.exp(gentlest))


def _search(
    held_out: _HeldOut,
    objective: _Objective,
    names: tuple[str, ...],
    start: dict[str, float],
    samples: int,
    seed: int,
) -> tuple[dict[str, float], list[str]]:
    """A coarse grid, then quasi-Newton steps (smooth objectives) or a pattern search (ECE), then along the ridge.

    Returns the best values, and the texts of warnings.
    """
    question = _Question(held_out, objective, names, start, held_out.draws(samples, seed))
    slides = names == _NAMES and objective.is_likelihood
    # The previous values are a candidate, wherever they lie; only T_c = 0 has no logarithm.
    before = torch.tensor([math.log(start[name] or 1.0) for name in names], dtype=torch.float64)
    bounds = torch.tensor([_BOUNDS[name] for name in names], dtype=torch.float64).log()
    lower, upper = torch.minimum(bounds[:, 0], before), torch.maximum(bounds[:, 1], before)
    allowance = question.allowance
    candidates, floor = [before], lower.clone()
    scaling = _Scaling(start["temperature"], math.inf, start["temperature"])
    if "temperature" in names:
        limit = min(allowance, _ABOVE_TEMPERATURE_SCALING)
        scaling = _temperature_scaling(held_out, float(lower[0]), float(upper[0]), limit / 2)
    if slides:
        # If temperature scaling goes to zero, all labels are right, and only this limit bounds T.
        share = _LEAST_SHARE_OF_TEMPERATURE if scaling.temperature > math.exp(float(lower[0]) + 1e-4) else 1.0
        floor[0] = min(max(math.log(share * scaling.gentlest), float(lower[0])), float(before[0]))
    if names == _NAMES:
        candidates.append(_nearly_without_covariance(question, scaling, float(floor[0]), scaling.nll + 0.9 * limit))
        lower[1] = floor[1] = min(float(lower[1]), float(candidates[-1][1]))

    coarse = replace(question, normal=question.normal[:, :_COARSE_SAMPLES])
    first = _grid(held_out, names, scaling.gentlest, lower, upper)
    if objective.slopes is None:
        first += _right_on_average(coarse, lower, upper)
    grid = [point for _, point in coarse.ranked(first)]
    count = _CANDIDATES[objective.slopes is not None]
    gentle_ones = [point for point in grid if bool(point[0] >= floor[0])][:count]
    value, point = _minimise(question, candidates, gentle_ones, floor, upper)
    sharp_ones = [point for point in grid[:count] if bool(point[0] < floor[0])]
    if sharp_ones or bool((point[0] <= floor[0]) & (floor[0] > lower[0])):
        sharp_value, sharp = _minimise(question, [point], sharp_ones, lower, upper)
        if sharp_value < value - _LOG_LIKELIHOOD_RATIO / len(held_out.labels):
            value, point, floor = sharp_value, sharp, lower
    if slides:
        value, point = _slide(question, (value, point), before, scaling, allowance, floor, upper)
    elif start["covariance_scale"] == 0 and "covariance_scale" in names:
        unscaled = objective.value(held_out, start["temperature"], 0.0, question.normal)
        if unscaled < value - allowance:
            return start, []
    return question.at(point), _edges(question, value, point, lower, upper, scaling if slides else None)


def _minimise(
    question: _Question, starts: Sequence[Tensor], grid: Sequence[Tensor], lower: Tensor, upper: Tensor
) -> tuple[float, Tensor]:
    """The best of the minima near the best of the grid and near the best of the starts."""
    starts = [point.clamp(lower, upper) for point in starts]
    if question.objective.slopes is None:
        # A flat PMF may have an ECE as small as any: of similar minima, take the one with the best NLL.
        likely = min([*starts, *grid], key=question.nll)
        order = question.ranked([*starts, *grid])[: 5 - 2 * len(lower)]
        minima = [
            pattern_search(question.value, point, lower, upper) for point in [likely, *(point for _, point in order)]
        ]
        least = min(value for value, _ in minima)
        alike = [pair for pair in minima if pair[0] <= least + question.allowance / 4]
        return min(alike, key=lambda pair: question.nll(pair[1]))
    best = question.ranked(starts)[0]
    if grid:
        _, point = question.ranked(grid)[0]
        minimum = quasi_newton(question.slopes, point, lower, upper)
        if minimum[0] <= best[0]:
            return minimum
    return quasi_newton(question.slopes, best[1], lower, upper)


def _nearly_without_covariance(
    question: _Question, scaling: _Scaling, floor: float, limit: float
) -> Float[Tensor, "2"]:
    """Temperature scaling, with a T_c so small that the NLL stays below the limit: normally the least one that is
    searched, but less where the covariance is huge."""
    least = math.log(COVARIANCE_SCALE_BOUNDS[0])
    point = torch.tensor([max(math.log(scaling.temperature), floor), least], dtype=torch.float64)
    while question.objective.is_likelihood and question.value(point) > limit and float(point[1]) > math.log(1e-60):
        point[1] -= math.log(100)
    return point


def _slide(
    question: _Question,
    minimum: tuple[float, Tensor],
    before: Tensor,
    scaling: _Scaling,
    allowance: float,
    lower: Tensor,
    upper: Tensor,
) -> tuple[float, Tensor]:
    """From the minimum along the ridge, t ↦ (the best T for T_c = eᵗ, eᵗ), towards t = 0.

    As far as the NLL exceeds the least one by at most `allowance`, that of temperature scaling by at most
    3e-4, and that of the previous T and T_c > 0 not at all. T_c = 1 is tried first; else the limit is found to 4 % of
    T_c, which is 2 % of the error bars.
    """
    least, point = minimum
    start, held_out = question.start, question.held_out
    if start["covariance_scale"] == 0:
        before_value = _nll(held_out, start["temperature"], 0.0, question.normal)
        limit = min(least, before_value) + allowance
    else:
        before_value = question.value(before)
        limit = min(least + allowance, before_value)
    limit = min(limit, scaling.nll + min(allowance, _ABOVE_TEMPERATURE_SCALING))

    def on_ridge(log_scale: float, log_temperature: float) -> tuple[float, Tensor]:
        values = {"temperature": 1.0, "covariance_scale": math.exp(log_scale)}
        line = replace(question, names=_NAMES[:1], start=values)
        begin = torch.tensor([log_temperature], dtype=torch.float64).clamp(lower[:1], upper[:1])
        value, best = quasi_newton(line.slopes, begin, lower[:1], upper[:1], enough=1e-4)
        return value, torch.cat([best, torch.tensor([log_scale], dtype=torch.float64)])

    refused_value, refused = min(
        (on_ridge(0.0, float(begin[0])) for begin in (point, before)), key=lambda pair: pair[0]
    )
    if refused_value <= limit:
        return refused_value, refused
    # The start may itself be the result of a slide: then it stays, however often it is calibrated.
    accepted_value, accepted = minimum
    if start["covariance_scale"] > 0 and before_value <= limit and abs(float(before[1])) < abs(float(point[1])):
        accepted_value, accepted = before_value, before
    while (gap := float(refused[1] - accepted[1])) and abs(gap) > 0.04:
        # Near the minimum √(NLL − minimum) is linear in ln T_c. The guess is a little to one side of where it reaches
        # the limit, so that the interval shrinks from both sides.
        roots = [math.sqrt(max(value - least, 0.0)) for value in (accepted_value, limit, refused_value)]
        share = (roots[1] - roots[0]) / max(roots[2] - roots[0], 1e-12)
        share += math.copysign(0.018 / abs(gap), 0.5 - share)
        share = min(max(share, 0.1, 0.01 / abs(gap)), 0.9)
        guess = accepted + share * (refused - accepted)
        value, trial = on_ridge(float(guess[1]), float(guess[0]))
        if value <= limit:
            accepted_value, accepted = value, trial
        else:
            refused_value, refused = value, trial
    return accepted_value, accepted


def _grid(
    held_out: _HeldOut, names: tuple[str, ...], temperature: float, lower: Tensor, upper: Tensor
) -> list[Float[Tensor, "d"]]:
    """Where to start, in units of the T of temperature scaling and of the T_c at which the covariance flattens
    as much as that T does, 8 T²/(π v) for contrasts of variance v (the probit approximation)."""
    spread = held_out.spread()
    unit = min(max(8 * temperature**2 / (math.pi * spread), 1e-100), 1e100) if spread > 0 else 1.0
    scales = [unit * 10 ** (step / 2) for step in range(-6, 5)]
    temperatures = [temperature * factor for factor in (0.1, 0.2, 0.35, 0.6, 0.85, 1.0, 1.3)]
    if names == _NAMES[:1]:
        temperatures = [10 ** (step / 3) for step in range(-6, 7)] + temperatures
    axes = {"temperature": temperatures, "covariance_scale": [*scales, 1.0]}
    points = [torch.tensor(values, dtype=torch.float64).log() for values in product(*(axes[name] for name in names))]
    return [point.clamp(lower, upper) for point in points]


def _right_on_average(coarse: _Question, lower: Tensor, upper: Tensor) -> list[Float[Tensor, "d"]]:
    """Points at which the mean confidence equals the accuracy: the ECE is never less than their difference.

    For each of several T_c this T is found by bisection: the confidence falls with T, which hardly moves the accuracy.
    If only one of them is fitted, the points are an even grid on a line, which costs no more.
    """
    if len(coarse.names) == 1:
        return list(torch.linspace(float(lower), float(upper), 100, dtype=torch.float64)[:, None])
    held_out, points = coarse.held_out, []
    for scale in torch.linspace(float(lower[1]), float(upper[1]), 28, dtype=torch.float64)[:, None]:

        def too_flat(log_temperature: float, scale: Tensor = scale) -> bool:
            at = coarse.at(torch.cat([torch.tensor([log_temperature], dtype=torch.float64), scale]))
            pmf, _ = held_out.pmf(at["temperature"], at["covariance_scale"], coarse.normal)
            confidence, label = pmf.max(1)
            return float(confidence.double().mean()) < float((label == held_out.labels).double().mean())

        turn = turning_point(too_flat, float(lower[0]), float(upper[0]), within=0.1)
        points.append(torch.cat([torch.tensor([turn], dtype=torch.float64), scale]))
    return points


def _edges(
    question: _Question, value: float, point: Tensor, lower: Tensor, upper: Tensor, scaling: _Scaling | None
) -> list[str]:
    """Warnings about values at the edge of the search, and about edges that are as good as the optimum.

    After a slide, which prefers T_c = 1 to an equally good edge, temperature scaling tells whether T has an optimum.
    """
    messages = []
    for index, name in enumerate(question.names):
        low, high = (math.exp(float(edge[index])) for edge in (lower, upper))
        optimum = math.exp(float(point[index]))
        interval = f"searched {low:.4g} to {high:.4g}"
        advice = "these data do not determine it. More held-out data, or fitting only one of the two, may help."
        subject = f"The best {name.replace('_', ' ')} lies at the edge of the search"
        if min(abs(optimum / low - 1), abs(optimum / high - 1)) < 1e-6:
            messages.append(f"{subject}, {optimum:.4g} ({interval}): {advice}")
            continue
        if scaling is None:
            edges = [torch.cat([point[:index], edge[index : index + 1], point[index + 1 :]]) for edge in (lower, upper)]
            is_flat = any(question.value(edge) <= value + 1e-12 for edge in edges)
        else:
            is_flat = index == 0 and not low * 1.0001 < scaling.temperature < high / 1.0001
        if is_flat:
            messages.append(f"{subject} ({interval}), but {optimum:.4g}, which was chosen, is as good: {advice}")
    return messages
