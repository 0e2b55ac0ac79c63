"""The search of `calibrate` for the least ECE, which is a step function and has many minima.

Its size changes by more than the minima differ where one input changes its bin, so few draws find where the minima are,
and all of them compare and improve these. The ECE is never less than |mean confidence − accuracy|, so points at which
the two are equal are where to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.optimise import pattern_search, turning_point
from errbar._calibration.question import TWO, Minimum, Question

_BISECTION_SAMPLES, _COARSE_SAMPLES, _PATTERN_SAMPLES = 50, 100, 200
# How many of the coarse grid are looked at more closely.
_CANDIDATES = 8
# So many of the starts are compared with all draws beside the ends, and so many points improved further, if they are
# near the least: the last steps gain less than this.
_FINALISTS, _POLISHED = 8, 3
_POLISH_GAINS = 5e-3


def least_ece(
    question: Question, candidates: Sequence[Tensor], grid: Sequence[Tensor], lower: Tensor, upper: Tensor
) -> Minimum:
    """The least ECE near the candidates, near the best of the grid, and where PMFs are right on average."""
    coarse = question.with_draws(_COARSE_SAMPLES)
    starts = [point.clamp(lower, upper) for point in candidates]
    turns: list[Tensor] = []
    if len(lower) == 1:
        points, turns = _right_on_a_line(question, coarse, lower, upper)
    else:
        points = _right_on_average(question.with_draws(_BISECTION_SAMPLES), lower, upper)
        starts += _best_without_covariance(question, lower, upper)
    ranked = [point for _, point in coarse.ranked([*grid, *points])]
    return least_ece_near(question, [*starts, *ranked[:_CANDIDATES]], lower, upper, turns)


def least_ece_near(
    question: Question, starts: Sequence[Tensor], lower: Tensor, upper: Tensor, turns: Sequence[Tensor] = ()
) -> Minimum:
    """Of similar minima that are no worse than the first start, the one with the best NLL, because a flat PMF may have
    an ECE as small as any.

    `turns` were found with all draws, and need no search with few.
    """
    fewer = question.with_draws(_PATTERN_SAMPLES)
    likely = min(starts, key=fewer.nll)
    ranked = [point for _, point in fewer.ranked(starts)]
    ends = [pattern_search(fewer.value, point, lower, upper, rounds=10)[1] for point in distinct([likely, ranked[0]])]
    finalists = question.ranked(distinct([*turns, *ends, *ranked[:_FINALISTS]]))
    least = finalists[0][0]
    last = [point for value, point in finalists[:_POLISHED] if value < least + _POLISH_GAINS]
    minima = [pattern_search(question.value, point, lower, upper, rounds=4, step=0.04) for point in last]
    before = question.value(starts[0])
    minima += [*finalists, (before, starts[0])]
    limit = min(min(value for value, _ in minima) + question.allowance / 4, before)
    alike = [pair for pair in minima if pair[0] <= limit]
    return min(alike, key=lambda pair: question.nll(pair[1])) if len(alike) > 1 else alike[0]


def distinct(points: Sequence[Tensor]) -> list[Tensor]:
    """Points that are further than a hundredth from each other."""
    kept: list[Tensor] = []
    for point in points:
        if all(float((point - other).abs().max()) > 1e-2 for other in kept):
            kept.append(point)
    return kept


def _excess(question: Question, point: Tensor) -> float:
    """Mean confidence − accuracy."""
    held_out = question.held_out
    confidence, label = held_out.pmf(question.at(point), question.normal)[0].max(1)
    return float(confidence.double().mean()) - float((label == held_out.labels).double().mean())


def _right_on_average(coarse: Question, lower: Tensor, upper: Tensor) -> list[Float[Tensor, "2"]]:
    """For each of several T_c, the T at which the mean confidence equals the accuracy, by bisection: the confidence
    falls with T, which hardly moves the accuracy."""
    points = []
    for scale in torch.linspace(float(lower[1]), float(upper[1]), 28, dtype=torch.float64)[:, None]:

        def too_flat(log_temperature: float, scale: Tensor = scale) -> bool:
            return _excess(coarse, torch.cat([torch.tensor([log_temperature], dtype=torch.float64), scale])) < 0

        turn = turning_point(too_flat, float(lower[0]), float(upper[0]), within=0.1)
        points.append(torch.cat([torch.tensor([turn], dtype=torch.float64), scale]))
    return points


def _right_on_a_line(
    question: Question, coarse: Question, lower: Tensor, upper: Tensor
) -> tuple[list[Float[Tensor, "1"]], list[Float[Tensor, "1"]]]:
    """Of an even grid on the line between the bounds, the points that are nearest to right on average; and, with all
    draws, where too sure turns into too flat or back. Of flat PMFs, the draws decide on the labels."""
    line = list(torch.linspace(float(lower), float(upper), 100, dtype=torch.float64)[:, None])
    excess = [_excess(coarse, point) for point in line]
    near = sorted(range(len(line)), key=lambda i: abs(excess[i]))[: len(line) // 4]
    turns = []
    for i in range(len(line) - 1):
        if (excess[i] < 0) == (excess[i + 1] < 0):
            continue

        def turned(at: float, before: bool = excess[i] < 0) -> bool:
            return (_excess(question, torch.tensor([at], dtype=torch.float64)) < 0) != before

        # With other draws it may lie a little further on either side.
        ends = (float(line[max(i - 1, 0)]), float(line[min(i + 2, len(line) - 1)]))
        turns.append(torch.tensor([turning_point(turned, *ends, within=1e-2)], dtype=torch.float64))
    return [line[i] for i in near], turns


def _best_without_covariance(question: Question, lower: Tensor, upper: Tensor) -> list[Float[Tensor, "2"]]:
    """The best T on a line of 200 for T_c = 0, which needs no draws, with the least T_c that is searched."""
    line = torch.linspace(float(lower[0]), float(upper[0]), 200, dtype=torch.float64)[:, None]
    alone = replace(question, names=TWO[:1], start=replace(question.start, covariance_scale=0.0))
    return [torch.cat([point, lower[1:]]) for _, point in alone.ranked(list(line))[:2]]
