"""`calibrate`: temperature T and covariance scale T_c from held-out data.

The calibrated logits are N(ĝ/T, T_c P^g/T²). Both are searched in their logarithm, so neither can become zero,
negative or infinite, and between bounds; where the optimum runs to a bound, a `CalibrationWarning` says so. The draws
are shared by all inputs and all trial values, so the objective is a smooth deterministic function of (ln T, ln T_c).

T and T_c lie on a *ridge*: both flatten the PMF, so a larger T makes up for a smaller T_c at hardly any cost in NLL.
Where on it the minimum lies is much a matter of chance, and where T_c ≈ 0 the error bars are gone. Of all points that
the held-out data hardly tell from the minimum, `_slide` takes the one with T_c nearest to 1, the covariance of theory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar.compass import compass
from errbar.data import Batch, Unpack, checked_labels
from errbar.errors import ArgumentError, CalibrationWarning, DataError
from errbar.factored import FactoredLogitGaussian
from errbar.modes import plain_execution
from errbar.posterior import Posterior, require_posterior
from errbar.prediction import require_samples, softmax_over_classes_, standard_normal
from errbar.ranks import Team, team_of
from errbar.shards import opened

TEMPERATURE_BOUNDS = (1e-2, 1e2)
COVARIANCE_SCALE_BOUNDS = (1e-4, 1e4)
_NAMES = ("temperature", "covariance_scale")
_BOUNDS = {"temperature": TEMPERATURE_BOUNDS, "covariance_scale": COVARIANCE_SCALE_BOUNDS}
# N (NLL − its minimum) is a log-likelihood ratio: up to 2, ln T_c is within two standard deviations of its optimum
# (Wilks). With few samples that permits much worse PMFs; so it is also limited, in nats a sample, to 0.08 % of a
# probability. With other draws than those of the search the loss is another one: up to 1e-3 averaged over seeds.
_LOG_LIKELIHOOD_RATIO = 2.0
_NEGLIGIBLE_NATS = 8e-4
# Far below, the softmax of a draw is nearly 0 or 1 and a PMF counts which class wins: a class that no draw favours has
# probability zero. On held-out data that can look as good as anything; on others the NLL is infinite.
_LEAST_TEMPERATURE_OF_BOTH = 0.3
_COARSE_SAMPLES = 100
# Samples made at a time: on a CPU they should stay in the cache, a GPU wants few large launches.
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
    """A posterior with T and T_c, or the one of them named in `fit`, replaced by the best on held-out data.

    What is not fitted keeps the value it has. `fit=("temperature",)` with `covariance_scale=0` is the usual
    temperature scaling, `fit=("covariance_scale",)` with `temperature=1` the paper's method.

    T and T_c can stand in for each other: both flatten the PMF, but only T_c keeps error bars. So both by "nll" are not
    the minimum, but of all T_c whose NLL, with the best T for each, exceeds it by at most min(2/N, 8e-4), N the number
    of held-out samples, the one nearest to 1 (in |ln T_c|): the covariance of theory changes only as far as the data
    insist. "brier" and "ece" take their minimum. By its objective, no result is worse than the T and T_c > 0 before.
    Together with T_c, T is not taken below 0.3, where PMFs come to count which class wins; alone it may be.

    Args:
        posterior: the posterior to calibrate.
        data: held-out batches with labels, none of which the model was trained on.
        objective: "nll", "brier" or "ece".
        fit: which of "temperature" and "covariance_scale" to fit.
        samples: Monte Carlo draws for the PMF.
        seed: of those draws.
        unpack: as in `collect`; that of the fit unless given.
        group: as in `collect`. The held-out logits of all ranks are gathered, and the first rank searches for all.
        progress: show progress with the time left.
    """
    team = team_of(group)
    names = team.together(lambda: _require_question(posterior, objective, fit))
    posterior.require_ready(team)
    start = {"temperature": posterior.temperature, "covariance_scale": posterior.covariance_scale}
    team.require_same(start | {"objective": objective, "fit": names, "samples": samples, "seed": seed})
    held_out = _held_out(posterior, data, unpack or posterior.unpack, progress, team)

    def search() -> tuple[dict[str, float], dict[str, float]] | None:
        if not team.leads:
            return None
        with plain_execution(held_out.mean.device):
            return _search(held_out, _OBJECTIVES[objective], names, start, require_samples(samples), seed)

    best, at_bound = team.broadcast(team.together(search))
    for name, bound in at_bound.items():
        _warn_at_bound(name, bound)
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
    """ĝ and a root of P^g (both for T = T_c = 1) and the label of each held-out input.

    Where the covariances have one basis for all inputs (`errbar.factored`), `root` are the deviations along it.
    """

    mean: Float[Tensor, "N M"]
    root: Float[Tensor, "N M d"] | Float[Tensor, "N d"]
    labels: Int[Tensor, "N"]
    basis: Float[Tensor, "M d"] | None = None
    rotation: Float[Tensor, "d d"] | None = None

    def draws(self, samples: int, seed: int) -> Float[Tensor, "d K"]:
        normal = standard_normal(samples, self.root.shape[-1], seed, self.mean).T
        return (normal if self.rotation is None else self.rotation.to(normal.dtype) @ normal).contiguous()

    def _spread(self, rows: slice, normal: Float[Tensor, "d K"]) -> Float[Tensor, "b M K"]:
        root = self.root[rows]
        if root.ndim == 3:
            return root @ normal
        independent = root[:, :, None] * normal
        return independent if self.basis is None else self.basis @ independent

    def pmf(
        self, temperature: float, scale: float, normal: Float[Tensor, "d K"], names: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "N M"], dict[str, Float[Tensor, "N M"]]]:
        """The PMF and its derivatives by ln T and ln T_c, those that are named.

        With g = (ĝ + √T_c A z)/T: ∂f/∂τ = f ∘ (ġ − fᵀġ), where ġ = −g for τ = ln T and ½ √T_c A z/T for τ = ln T_c.
        """
        if scale == 0:
            normal = normal[:, :1]
        pmf = torch.empty_like(self.mean)
        slopes = {name: torch.empty_like(self.mean) for name in names}
        limit = _BLOCK_ELEMENTS.get(self.mean.device.type, _BLOCK_ELEMENTS["cpu"])
        size = max(1, limit // (self.mean.shape[1] * normal.shape[1]))
        for start in range(0, len(self.mean), size):
            rows = slice(start, start + size)
            spread = self._spread(rows, normal)
            spread *= math.sqrt(scale) / temperature
            logits = spread + self.mean[rows, :, None] / temperature
            velocities = {name: -logits if name == "temperature" else spread / 2 for name in names}
            values = softmax_over_classes_(logits)
            pmf[rows] = values.mean(2)
            for name, velocity in velocities.items():
                slopes[name][rows] = (values * (velocity - (values * velocity).sum(1, keepdim=True))).mean(2)
        return pmf, slopes


def _held_out(posterior: Posterior, data: Any, unpack: Unpack | None, progress: bool, team: Team) -> _HeldOut:
    """The held-out inputs of all ranks, in the order of ranks, on each of them. A collective call."""
    stream = opened(data, unpack, team, title="Calibrating", progress=progress)
    own = team.together(lambda: _read(posterior, stream))
    having = team.exchange(own is not None)
    if not any(having):
        raise DataError("The data to calibrate on are empty: expected at least one batch.")
    if team.is_alone and own is not None:
        return own
    device = posterior.information.network.device
    parts = None if own is None else {"mean": own.mean, "root": own.root, "labels": own.labels}
    rows = team.gathered(parts, device)
    # One posterior has one basis, which a rank without data has not made: it is that of the first rank with data.
    held = {} if own is None or having.index(True) != team.rank else {"basis": own.basis, "rotation": own.rotation}
    bases = team.gathered({name: tensor for name, tensor in held.items() if tensor is not None}, device)
    return _HeldOut(**rows, **bases)


def _read(posterior: Posterior, stream: Iterator[Batch]) -> _HeldOut | None:
    """What this rank holds of the held-out inputs; None for nothing."""
    plain = posterior.with_calibration(temperature=1.0, covariance_scale=1.0)
    means, roots, labels = [], [], []
    basis = rotation = None
    for batch in stream:
        gaussian = plain.accurate_logits(batch)
        size, classes = gaussian.mean.shape
        labels.append(checked_labels(batch.labels, size=size, classes=classes, device=gaussian.mean.device))
        means.append(gaussian.mean - gaussian.mean.mean(1, keepdim=True))
        if isinstance(gaussian, FactoredLogitGaussian):
            # One posterior has one basis; with many classes a root of M × d numbers an input would fill the memory.
            roots.append(gaussian.deviations())
            basis, rotation = gaussian.centred_basis.to(gaussian.mean.dtype), gaussian.rotation
        else:
            roots.append(gaussian.sampling_root()[0])
    return _HeldOut(torch.cat(means), torch.cat(roots), torch.cat(labels), basis, rotation) if means else None


@dataclass(frozen=True)
class _Objective:
    """A score to minimise, and for smooth ones the residuals r of a sum of squares that behaves like it near the
    optimum: the gradient is exact, the curvature is that of Gauss and Newton."""

    value: Callable[[Tensor, Tensor], float]
    gradient: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    is_likelihood: bool = False


def _nll_gradient(pmf: Tensor, slope: Tensor, labels: Tensor) -> Tensor:
    """−∂ ln f_y/∂τ of each input."""
    index = labels[:, None]
    return -(slope.gather(1, index) / pmf.gather(1, index))[:, 0]


def _brier_gradient(pmf: Tensor, slope: Tensor, labels: Tensor) -> Tensor:
    """2 (f − e_y)ᵀ ∂f/∂τ of each input."""
    target = torch.nn.functional.one_hot(labels, pmf.shape[1]).to(pmf)
    return (2 * (pmf - target) * slope).sum(1)


_OBJECTIVES = {
    "nll": _Objective(metrics.nll, _nll_gradient, is_likelihood=True),
    "brier": _Objective(metrics.brier, _brier_gradient),
    "ece": _Objective(metrics.ece, None),
}


def _search(
    held_out: _HeldOut,
    objective: _Objective,
    names: tuple[str, ...],
    start: dict[str, float],
    samples: int,
    seed: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """A coarse grid, then quasi-Newton steps (smooth objectives) or a compass search (ECE), then along the ridge.

    Returns the best values, never worse than those at the start, and the bounds at which the objective is as good.
    """
    normal = held_out.draws(samples, seed)

    def value(point: Tensor, draws: Tensor) -> float:
        trial = _at(point, names, start)
        pmf, _ = held_out.pmf(trial["temperature"], trial["covariance_scale"], draws)
        return objective.value(pmf, held_out.labels)

    lower = torch.tensor([math.log(_BOUNDS[name][0]) for name in names], dtype=torch.float64)
    upper = torch.tensor([math.log(_BOUNDS[name][1]) for name in names], dtype=torch.float64)
    if names == _NAMES:
        lower[0] = min(math.log(_LEAST_TEMPERATURE_OF_BOTH), math.log(start["temperature"]))
    # Where the objective is flat or has several minima, the coarse grid decides which one is meant.
    grid = [torch.tensor(p, dtype=torch.float64) for p in _grid(names)]
    coarse = normal[:, :_COARSE_SAMPLES]
    candidates = sorted(grid, key=lambda p: value(p, coarse))[:3]
    here = torch.tensor([math.log(start[name] or 1.0) for name in names], dtype=torch.float64).clamp(lower, upper)
    point = min([*candidates, here], key=lambda p: value(p, normal))
    if objective.gradient is None:
        point = compass(lambda p: value(p, normal), point, lower, upper)
    else:
        point = _quasi_newton(held_out, objective, names, start, normal, point, lower, upper)
    if on_ridge := objective.is_likelihood and names == _NAMES:
        point = _slide(lambda p: value(p, normal), held_out, objective, normal, point, here, lower, upper)
    best, at_bound = value(point, normal), {}
    for index, name in enumerate(names):
        for edge in (lower, upper):
            moved = point.clone()
            moved[index] = edge[index]
            # An edge may be as good as where the slide ended. It only matters if T_c stayed nearer to it than to 1.
            settled = on_ridge and index == 1 and bool(abs(point[1]) < abs(point[1] - edge[1]))
            if not settled and value(moved, normal) <= best + 1e-12:
                at_bound[name] = math.exp(float(edge[index]))
    return _at(point, names, start), at_bound


def _slide(
    value: Callable[[Tensor], float],
    held_out: _HeldOut,
    objective: _Objective,
    normal: Tensor,
    point: Tensor,
    here: Tensor,
    lower: Tensor,
    upper: Tensor,
) -> Tensor:
    """From the minimum along the ridge, t ↦ (the best T for T_c = eᵗ, eᵗ), towards t = 0.

    As far as the objective exceeds its minimum by at most `tolerance`, and its value `here`, at the start, not at all.
    T_c = 1 is tried first; else bisection says how far it goes, to 4 % of T_c, which are 2 % of the error bars.
    """
    tolerance = min(_LOG_LIKELIHOOD_RATIO / len(held_out.labels), _NEGLIGIBLE_NATS)
    allowed = min(value(point) + tolerance, value(here))

    def on_ridge(log_scale: float, begin: Tensor) -> Tensor:
        scale = torch.tensor([log_scale], dtype=torch.float64)
        fixed = {"temperature": 1.0, "covariance_scale": math.exp(log_scale)}
        best = _quasi_newton(held_out, objective, _NAMES[:1], fixed, normal, begin[:1], lower[:1], upper[:1])
        return torch.cat([best, scale])

    refused = min((on_ridge(0.0, begin) for begin in (point, here)), key=value)
    if value(refused) <= allowed:
        return refused
    # The start may itself be the result of a slide: then it stays, however often one calibrates.
    accepted = here if value(here) <= allowed and abs(float(here[1])) < abs(float(point[1])) else point
    while abs(float(accepted[1] - refused[1])) > 0.04:
        middle = (accepted + refused) / 2
        middle = on_ridge(float(middle[1]), middle)
        if value(middle) <= allowed:
            accepted = middle
        else:
            refused = middle
    return accepted


def _at(point: Tensor, names: tuple[str, ...], start: dict[str, float]) -> dict[str, float]:
    return {**start, **{name: math.exp(float(x)) for name, x in zip(names, point, strict=True)}}


def _grid(names: tuple[str, ...]) -> list[list[float]]:
    points: list[list[float]] = [[]]
    for name in names:
        values = (0.3, 0.6, 1.0, 1.7, 3.0, 9.0) if name == "temperature" else (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
        points = [[*point, math.log(v)] for point in points for v in values]
    return points


def _quasi_newton(
    held_out: _HeldOut,
    objective: _Objective,
    names: tuple[str, ...],
    start: dict[str, float],
    normal: Tensor,
    point: Tensor,
    lower: Tensor,
    upper: Tensor,
) -> Tensor:
    """BFGS in one or two logarithms, with a backtracking line search and projection on the bounds."""
    gradient_of = objective.gradient
    assert gradient_of is not None

    def evaluate(at: Tensor) -> tuple[float, Tensor]:
        trial = _at(at, names, start)
        pmf, slopes = held_out.pmf(trial["temperature"], trial["covariance_scale"], normal, names)
        gradient = [float(gradient_of(pmf, slopes[name], held_out.labels).double().mean()) for name in names]
        return objective.value(pmf, held_out.labels), torch.tensor(gradient, dtype=torch.float64)

    value, gradient = evaluate(point)
    inverse_curvature = torch.eye(len(names), dtype=torch.float64)
    for _ in range(60):
        # A variable that is at its bound and would go beyond stays where it is.
        free = ~(((point <= lower) & (gradient > 0)) | ((point >= upper) & (gradient < 0)))
        if not bool(gradient.isfinite().all()):
            break  # a label whose probability is zero in the dtype of results: nothing to go by from here
        if float((gradient * free).abs().max()) < 1e-5:
            break  # what is left to gain, of the order of its square, drowns in the rounding of float32
        direction = -(inverse_curvature @ (gradient * free)) * free
        if float(gradient @ direction) >= 0:
            inverse_curvature = torch.eye(len(names), dtype=torch.float64)
            direction = -gradient * free
        # At most a factor of e a step: the quadratic model is worth nothing further away.
        direction = direction * min(1.0, 1.0 / max(float(direction.abs().max()), 1e-300))
        step = 1.0
        moved = False
        while step > 1e-6 and not moved:
            trial = torch.clamp(point + step * direction, lower, upper)
            trial_value, trial_gradient = evaluate(trial)
            moved = trial_value < value - 1e-4 * step * abs(float(gradient @ direction))
            step /= 2
        if not moved:
            break
        change, slope_change = trial - point, trial_gradient - gradient
        gain = value - trial_value
        point, value, gradient = trial, trial_value, trial_gradient
        curvature = float(change @ slope_change)
        if curvature > 1e-12:
            identity = torch.eye(len(names), dtype=torch.float64)
            left = identity - torch.outer(change, slope_change) / curvature
            inverse_curvature = left @ inverse_curvature @ left.T + torch.outer(change, change) / curvature
        if gain < 1e-10 * (1 + abs(value)) and float(change.abs().max()) < 1e-4:
            break
    return point


def _warn_at_bound(name: str, bound: float) -> None:
    low, high = _BOUNDS[name]
    low = max(low, bound) if bound < 1 else low
    warnings.warn(
        f"The best {name.replace('_', ' ')} lies at the edge of the search, {bound:.4g} (searched {low:g} to "
        f"{high:g}): these data do not determine it. More held-out data, or fitting only one of the two, may help.",
        CalibrationWarning,
        stacklevel=3,
    )
