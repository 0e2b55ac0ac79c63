"""`choose_prior`: the precision of the prior, by the evidence of the training data or by the NLL of held-out data.

The information does not depend on the prior, so each candidate costs one factorisation and no pass over the training
data. One precision for all layers is searched on a grid; with `per_layer`, each layer then moves along the same grid,
one after the other, as long as that helps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from errbar import metrics
from errbar._progress import track
from errbar.data import Batch, Unpack, batches, checked_labels
from errbar.errors import ArgumentError, CalibrationWarning, CovarianceError, DataError
from errbar.information import Information
from errbar.layers import owner
from errbar.posterior import Posterior, condition
from errbar.prediction import require_samples
from errbar.prior import Prior

# Half a decade apart: between two of these neither the evidence nor the NLL has anything to tell.
PRECISIONS = tuple(10 ** (step / 2) for step in range(-4, 9))
# Layers move one after the other until none does; each move is an improvement, so this only guards the time.
_SWEEPS = 10

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
        information: what `collect` returned; with labels for the evidence.
        data: held-out batches with labels, read once; for `by="nll"` alone.
        by: "evidence", `Posterior.log_evidence` of the training data, or "nll" of the held-out data.
        precisions: the candidates, at least one.
        per_layer: a precision for each layer (a mapping of module names) instead of one for all.
        samples: Monte Carlo draws for the PMF; for `by="nll"` alone.
        seed: of those draws.
        unpack: as in `collect`; that of the fit unless given.
        progress: show progress with the time left.
    """
    if not isinstance(information, Information):
        raise ArgumentError(f"Expected Information, as errbar.collect returns it, got {type(information).__name__}.")
    candidates = sorted({float(Prior(value).precision) for value in precisions})  # type: ignore[arg-type]
    if not candidates:
        raise ArgumentError("precisions is empty; expected at least one positive number.")
    score = _score(by, data, require_samples(samples), seed, unpack or information.task.unpack)
    values = [
        _of(score, information, Prior(precision))
        for precision in track(candidates, "Choosing the prior", enabled=progress)
    ]
    best = max(range(len(values)), key=values.__getitem__)
    if values[best] == -float("inf"):
        raise CovarianceError(
            f"No prior precision from {candidates[0]:g} to {candidates[-1]:g} makes the posterior precision positive. "
            "Try larger ones, or collect with precision='float64'."
        )
    if len(candidates) > 2 and best in (0, len(candidates) - 1):
        _warn_at_edge(candidates[best], by)
    if not per_layer:
        return Prior(candidates[best])
    return _by_layer(information, score, candidates, best, values[best], progress)


def _score(by: str, data: Any, samples: int, seed: int, unpack: Unpack | None) -> Score:
    """What to maximise."""
    if by == "evidence":
        if data is not None:
            raise ArgumentError(
                "The evidence is of the training data; got data= as well. Use by='nll' for held-out data."
            )
        return lambda posterior: posterior.log_evidence()
    if by != "nll":
        raise ArgumentError(f"by is {by!r}; expected 'evidence' or 'nll'.")
    held_out = list(batches(data, unpack)) if data is not None else []
    if not held_out:
        raise DataError("Choosing the prior by NLL needs held-out data with labels: expected at least one batch.")
    return lambda posterior: -_nll(posterior, held_out, samples, seed)


def _nll(posterior: Posterior, held_out: Sequence[Batch], samples: int, seed: int) -> float:
    total, count = 0.0, 0
    for batch in held_out:
        pmf = posterior.predict(batch, samples, seed).pmf
        labels = checked_labels(batch.labels, size=len(pmf), classes=pmf.shape[1], device=pmf.device)
        total += metrics.nll(pmf, labels) * len(pmf)
        count += len(pmf)
    return total / count


def _of(score: Score, information: Information, prior: Prior) -> float:
    """The score of a prior; the worst for one that rounding of the information drowns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            posterior = condition(information, prior)
        except CovarianceError:
            return -float("inf")
    return -float("inf") if posterior.jitter > 0 else score(posterior)


def _by_layer(
    information: Information, score: Score, candidates: Sequence[float], start: int, value: float, progress: bool
) -> Prior:
    layers = list(dict.fromkeys(owner(name) or name for name in information.parameter_names))
    chosen = dict.fromkeys(layers, start)

    def prior() -> Prior:
        return Prior({layer: candidates[index] for layer, index in chosen.items()})

    for _ in range(_SWEEPS):
        before = dict(chosen)
        for layer in track(layers, "Choosing the prior of each layer", enabled=progress):
            for step in (1, -1):
                while 0 <= chosen[layer] + step < len(candidates):
                    chosen[layer] += step
                    trial = _of(score, information, prior())
                    if trial <= value:
                        chosen[layer] -= step
                        break
                    value = trial
        if chosen == before:
            break
    return prior()


def _warn_at_edge(precision: float, by: str) -> None:
    warnings.warn(
        f"The best prior precision by {by} lies at the edge of the candidates, {precision:g}. Give others with "
        "precisions=, or take it as a sign that these data do not determine the prior.",
        CalibrationWarning,
        stacklevel=3,
    )
