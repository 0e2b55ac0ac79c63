"""`choose_prior`: the precision of the prior, by the evidence of the training data or by the NLL of held-out data.

The information does not depend on the prior, so each candidate costs one factorisation and no pass over the training
data. One precision for all layers is searched on a grid, and then between the neighbours of the best, by parabolas in
ln λ; with `per_layer`, each layer then moves along the same grid, one after the other, as long as that helps, and is
refined in the same way. From candidates given by the caller the best is returned, without refinement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from errbar._base.progress import track
from errbar._calibration.held_out import held_out_nll
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Unpack, batches
from errbar._model.selection import owner
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior, condition
from errbar._posterior.prior import Prior
from errbar.errors import ArgumentError, CalibrationWarning, CovarianceError, DataError

# Half a decade apart, which brackets the optimum; between two of these the evidence can still change by tens of nats.
PRECISIONS = tuple(10 ** (step / 2) for step in range(-4, 9))
# Layers move one after the other until none does; each move is an improvement, so this only guards the time.
_SWEEPS = 10
# The refinement ends when it would gain less: nats of evidence (of all training data), or of NLL per sample.
_NEGLIGIBLE = {"evidence": 1e-2, "nll": 1e-5}
_TRIALS = 8

Score = Callable[[Posterior], float]


def choose_prior(
    information: Information,
    data: Any = None,
    *,
    by: str = "evidence",
    precisions: Sequence[float] = PRECISIONS,
    per_layer: bool = False,
    samples: int = 1000,
    seed: int = 0,
    unpack: Unpack | None = None,
    progress: bool = False,
) -> Prior:
    """The best prior for this information; nothing else changes. Use it as `condition(information, prior)`.

    Args:
        information: the result of `collect`; the evidence needs labels.
        data: held-out batches with labels, read once; only for `by="nll"`.
        by: "evidence", `Posterior.log_evidence` of the training data, or "nll" of the held-out data.
        precisions: the candidates, at least one. The best of the default ones is refined (evidence: to about 0.01
            nats); of your own candidates, one is returned.
        per_layer: one precision per layer (a mapping of module names) instead of one for all.
        samples: Monte Carlo draws for the PMF; only for `by="nll"`; with many classes fewer, as in `calibrate`.
        seed: for these draws.
        unpack: as in `collect`; by default that of the fit.
        progress: show progress with the time left.
    """
    if not isinstance(information, Information):
        raise ArgumentError(f"Expected Information, as errbar.collect returns it, got {type(information).__name__}.")
    candidates = sorted({float(Prior(value).precision) for value in precisions})  # type: ignore[arg-type]
    if not candidates:
        raise ArgumentError("precisions is empty; expected at least one positive number.")
    score = _score(by, data, require_samples(samples), seed, unpack or information.task.unpack)
    return _best(information, score, candidates, by, per_layer, progress)


def prior_by_evidence(information: Information, precisions: Sequence[float], tick: Callable[[], None]) -> Prior:
    """`choose_prior` by the evidence, one precision for all; `tick` is called for each trial, and may raise."""

    def score(posterior: Posterior) -> float:
        tick()
        return posterior.log_evidence()

    return _best(information, score, sorted(precisions), "evidence", per_layer=False, progress=False)


def _best(
    information: Information, score: Score, candidates: list[float], by: str, per_layer: bool, progress: bool
) -> Prior:
    values = [
        _of(score, information, Prior(precision))
        for precision in track(candidates, "Choosing the prior", enabled=progress)
    ]
    best = max(range(len(values)), key=values.__getitem__)
    if values[best] == -float("inf"):
        raise CovarianceError(
            f"No prior precision from {candidates[0]:g} to {candidates[-1]:g} makes the posterior precision positive. "
            "Try larger ones, or collect with precision='float64'.",
            arguments={"precision": "float64"},
        )
    value, negligible = values[best], _NEGLIGIBLE[by] if candidates == list(PRECISIONS) else math.inf
    is_at_edge = len(candidates) > 2 and best in (0, len(candidates) - 1)
    if negligible < math.inf:

        def common(log_precision: float) -> float:
            return _of(score, information, Prior(math.exp(log_precision)))

        around = slice(max(best - 1, 0), best + 2)
        scores = dict(zip(map(math.log, candidates[around]), values[around], strict=True))
        log_best, value = _refined(common, scores, negligible)
        is_at_edge = is_at_edge and log_best in scores and scores[log_best] == values[best]
        # The grid moves along, so that layers start from the best common precision.
        candidates = [precision * math.exp(log_best) / candidates[best] for precision in candidates]
    if is_at_edge:
        _warn_at_edge(candidates[best], by)
    if not per_layer:
        return Prior(candidates[best])
    return _by_layer(information, score, candidates, best, value, progress, negligible)


def _refined(value: Callable[[float], float], heights: dict[float, float], negligible: float) -> tuple[float, float]:
    """Where a function is greatest, and its value there, from its `heights` at two or three places.

    Steps to the top of the parabola through the best place and its neighbours; where that fails, to the middle
    of the wider side. Ends when the parabola promises to gain less than `negligible`.
    """
    heights = dict(heights)
    for _ in range(_TRIALS):
        places = sorted(heights)
        best = max(places, key=heights.__getitem__)
        at = places.index(best)
        sides = places[max(at - 1, 0) : at + 2]
        wider = max((place for place in sides if place != best), key=lambda place: abs(place - best))
        trial, gain = (best + wider) / 2, math.inf
        if len(sides) == 3 and all(math.isfinite(heights[place]) for place in sides):
            left, right = sides[0] - best, sides[2] - best
            slopes = [(heights[place] - heights[best]) / (place - best) for place in (sides[0], sides[2])]
            bend = (slopes[1] - slopes[0]) / (right - left)
            if bend < 0:
                tilt = slopes[0] - bend * left
                step, gain = -tilt / (2 * bend), -(tilt**2) / (4 * bend)
                # A tiny step would leave the far side as wide as it is.
                trial = best + (
                    step if abs(step) > 0.02 * (right - left) else math.copysign(0.02 * (right - left), step)
                )
        if gain < negligible or abs(wider - best) < 1e-3:
            break
        heights[trial] = value(trial)
    best = max(heights, key=heights.__getitem__)
    return best, heights[best]


def _score(by: str, data: Any, samples: int, seed: int, unpack: Unpack | None) -> Score:
    """What to maximise."""
    if by == "evidence":
        if data is not None:
            raise ArgumentError(
                "The evidence is that of the training data, but data= was given. Use by='nll' for held-out data."
            )
        return lambda posterior: posterior.log_evidence()
    if by != "nll":
        raise ArgumentError(f"by is {by!r}; expected 'evidence' or 'nll'.")
    held_out = list(batches(data, unpack)) if data is not None else []
    if not held_out:
        raise DataError("Choosing the prior by NLL needs held-out data with labels: expected at least one batch.")
    return lambda posterior: -held_out_nll(posterior, held_out, samples, seed)


def _of(score: Score, information: Information, prior: Prior) -> float:
    """The score of a prior; −∞ for one that is lost in the rounding of the information."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            posterior = condition(information, prior)
        except CovarianceError:
            return -float("inf")
    return -float("inf") if posterior.jitter > 0 else score(posterior)


def _by_layer(
    information: Information,
    score: Score,
    candidates: Sequence[float],
    start: int,
    value: float,
    progress: bool,
    negligible: float,
) -> Prior:
    """Along the candidates until no layer moves; then between them, unless all is `negligible`."""
    layers = list(dict.fromkeys(owner(name) or name for name in information.parameter_names))
    indices = dict.fromkeys(layers, start)

    def prior() -> Prior:
        return Prior({layer: candidates[index] for layer, index in indices.items()})

    for _ in range(_SWEEPS):
        before = dict(indices)
        for layer in track(layers, "Choosing the prior of each layer", enabled=progress):
            for step in (1, -1):
                while 0 <= indices[layer] + step < len(candidates):
                    indices[layer] += step
                    trial = _of(score, information, prior())
                    if trial <= value:
                        indices[layer] -= step
                        break
                    value = trial
        if indices == before:
            break
    if negligible == math.inf:
        return prior()
    exact = {layer: math.log(candidates[index]) for layer, index in indices.items()}
    width = math.log(candidates[1] / candidates[0])
    for _ in range(_SWEEPS):
        previous = value
        for layer in track(layers, "Refining the prior of each layer", enabled=progress):

            def alone(log_precision: float, layer: str = layer) -> float:
                trial = {**exact, layer: log_precision}
                return _of(score, information, Prior({name: math.exp(at) for name, at in trial.items()}))

            # Below and above; layers depend on each other, so the optimum of an earlier sweep may have moved.
            ends = {exact[layer] + side: alone(exact[layer] + side) for side in (-width, width)}
            exact[layer], value = _refined(alone, {exact[layer]: value, **ends}, negligible)
        if value - previous < negligible:
            break
        width = max(width / 2, 0.1)
    return Prior({layer: math.exp(at) for layer, at in exact.items()})


def _warn_at_edge(precision: float, by: str) -> None:
    warnings.warn(
        f"The best prior precision by {by} lies at the edge of the candidates, {precision:g}. Give others with "
        "precisions=, or take it as a sign that these data do not determine the prior.",
        CalibrationWarning,
        stacklevel=4,
    )
