"""Minimising without derivatives, in one or two variables between bounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def compass(value: Callable[[Tensor], float], point: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Step along each axis and diagonal while it helps, then halve the step."""
    best, step = value(point), 0.5
    axes = list(torch.eye(len(point), dtype=torch.float64))
    if len(axes) == 2:
        axes += [axes[0] + axes[1], axes[0] - axes[1]]
    while step > 5e-3:
        trials = [torch.clamp(point + sign * step * axis, lower, upper) for axis in axes for sign in (1, -1)]
        values = [value(trial) for trial in trials]
        winner = min(range(len(trials)), key=values.__getitem__)
        if values[winner] < best:
            point, best = trials[winner], values[winner]
        else:
            step /= 2
    return point
