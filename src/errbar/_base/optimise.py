"""Minimising in a few variables between bounds, with slopes and without."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

# Value, gradient, and a positive semi-definite matrix that approximates the Hessian near the optimum.
Slopes = tuple[float, Float[Tensor, "d"], Float[Tensor, "d d"]]


def pattern_search(
    value: Callable[[Tensor], float], point: Tensor, lower: Tensor, upper: Tensor, rounds: int = 14, step: float = 0.25
) -> tuple[float, Tensor]:
    """Step along each axis and diagonal while it helps, then halve `step`. The least value and where it is.

    `rounds` limits the time: along a valley that the steps do not follow, there is always a little to gain.
    """
    cache: dict[tuple[float, ...], float] = {}

    def at(trial: Tensor) -> float:
        key = tuple(round(coordinate, 9) for coordinate in trial.tolist())
        if key not in cache:
            cache[key] = value(trial)
        return cache[key]

    best = at(point)
    axes = list(torch.eye(len(point), dtype=torch.float64))
    if len(axes) == 2:
        axes += [axes[0] + axes[1], axes[0] - axes[1]]
    for _ in range(rounds):
        trials = [torch.clamp(point + sign * step * axis, lower, upper) for axis in axes for sign in (1, -1)]
        values = [at(trial) for trial in trials]
        winner = min(range(len(trials)), key=values.__getitem__)
        if values[winner] < best:
            point, best = trials[winner], values[winner]
        elif step < 1e-2:
            break
        else:
            step /= 2
    return best, point


def quasi_newton(
    slopes: Callable[[Tensor], Slopes], point: Tensor, lower: Tensor, upper: Tensor, enough: float = 1e-6
) -> tuple[float, Tensor]:
    """BFGS in a few logarithms, with a backtracking line search and projection on the bounds.

    It begins with the curvature that the objective states, and ends where no slope exceeds `enough`.
    """
    value, gradient, curvature = slopes(point)
    identity = torch.eye(len(point), dtype=torch.float64)
    inverse_curvature = (curvature + 1e-8 * identity).inverse()
    for _ in range(60):
        # A variable that is at its bound and would go beyond stays where it is.
        free = ~(((point <= lower) & (gradient > 0)) | ((point >= upper) & (gradient < 0)))
        if float((gradient * free).abs().max()) < enough:
            break
        direction = -(inverse_curvature @ (gradient * free)) * free
        if float(gradient @ direction) >= 0:
            direction = -gradient * free
        # At most a factor of e per step: the quadratic model is useless further away.
        direction = direction * min(1.0, 1.0 / max(float(direction.abs().max()), 1e-300))
        step = 1.0
        is_better = False
        while step > 1e-3 and not is_better:
            trial = torch.clamp(point + step * direction, lower, upper)
            trial_value, trial_gradient, _ = slopes(trial)
            is_better = trial_value < value - 1e-4 * step * abs(float(gradient @ direction))
            step /= 2
        if not is_better:
            break
        change, slope_change = trial - point, trial_gradient - gradient
        gain = value - trial_value
        point, value, gradient = trial, trial_value, trial_gradient
        bend = float(change @ slope_change)
        if bend > 1e-12:
            left = identity - torch.outer(change, slope_change) / bend
            inverse_curvature = left @ inverse_curvature @ left.T + torch.outer(change, change) / bend
        if gain < 1e-9 * (1 + abs(value)) and float(change.abs().max()) < 1e-3:
            break
    return value, point


def turning_point(holds: Callable[[float], bool], low: float, high: float, within: float = 1e-5) -> float:
    """Where `holds` turns from false to true between `low` and `high`, to `within`."""
    if holds(low):
        return low
    if not holds(high):
        return high
    while high - low > within:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low
