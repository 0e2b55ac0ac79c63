"""`calibrate_fusion`: scales, discrepancies, T and q of several classifiers together, from held-out data.

`FusedClassifier` states the formula, `variants` how each variant is fitted. Which variant is taken is decided by
cross-validation, with preference for the simple ones: few held-out data give the mean of the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.execution import plain_execution
from errbar._base.memory import require_memory
from errbar._base.progress import track
from errbar._calibration.folds import divided, group_numbers, require_folds, standard_error
from errbar._calibration.overlap import Overlap
from errbar._distributed.shards import opened_raw
from errbar._distributed.team import Team, team_of
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import require_samples, require_seed
from errbar._fusion.fused import FusedClassifier, batch_of_each, require_posteriors
from errbar._fusion.table import FusionRow, FusionTable
from errbar._fusion.variants import (
    Alone,
    Fit,
    Numbers,
    PmfPool,
    Pool,
    Readings,
    Variant,
    Widened,
    above,
    curvature_at,
    draws_for,
    fitted,
    without,
)
from errbar._model.batch import Unpack, checked_labels
from errbar._posterior.posterior import Posterior
from errbar.errors import ArgumentError, CalibrationWarning, DataError, MismatchError

# What a simpler variant may be worse by, out of fold, if that is within one standard error: 1.5 nats over all held-out
# inputs, and from 300 on less, because what cross-validation does not see of too many numbers is of second order.
_NATS, _MANY = 1.5, 300
# In nats per input: by how much the mean of PMFs must be better to be worth a warning.
_WORTH_A_WARNING = 3e-4
MEAN_OF_LOGITS, MEAN_OF_PMFS, BEST_NETWORK = "mean of logits", "mean of PMFs", "best network alone"


def calibrate_fusion(
    posteriors: Sequence[Posterior],
    held_out: Any,
    *,
    groups: Sequence[Any] | None = None,
    folds: int = 5,
    seed: int = 0,
    samples: int = 128,
    unpack: Unpack | None = None,
    group: Any = None,
    progress: bool = False,
) -> FusedClassifier:
    """Several classifiers of the same classes as one, with the numbers that are best on held-out data.

    The covariance of each network becomes a_c P_c + s_c I, where s_c is what it is wrong by beyond its parameters; the
    fused logits are N(ĝ/T, q P/T²) with P = (Σ_c (a_c P_c + s_c I)⁻¹)⁻¹. All are fitted together by NLL. Between
    s → ∞, the mean of the logits, and s = 0, the paper's fusion, are these variants, from the simple to the rich: the
    mean of logits, the best network alone, weighted means of logits, one s for all, an s for each, an s and an a for
    each; those with s with q = 0 and with q fitted. Each is cross-validated; the simplest is taken whose NLL out of
    fold exceeds the least by at most one standard error of the paired difference, and by at most min(1.5/N, 450/N²) for
    N held-out inputs, or groups of them. `print` of the result shows all of it.

    A deep ensemble is `calibrate_fusion([autofit(m, train, held_out).posterior for m in members], held_out)`.

    Args:
        posteriors: one for each network, calibrated or not; networks may differ in all but their classes.
        held_out: batches (x, labels) that took part in no training, with one x for all networks; or
            ([x_1, …], labels) with one input for each network.
        groups: one value for each held-out input: inputs with equal values, such as frames of one object, stay in one
            fold and count as one in standard errors.
        folds: of the cross-validation.
        seed: of the folds and of the draws.
        samples: Monte Carlo draws (Sobol points) in the search.
        unpack: as in `collect`, for all networks; by default each network reads a batch as its fit did.
        group: as in `collect`. The held-out logits of all ranks are gathered, and the first rank searches for all.
        progress: show progress with the time left.
    """
    team = team_of(group)
    if groups is not None and not team.is_alone:
        raise ArgumentError(
            "groups is a list of values, and several processes divide the held-out data; expected one process, or no "
            "groups."
        )
    sources = team.together(lambda: require_posteriors(posteriors))
    folds, samples, seed = team.together(lambda: (require_folds(folds), require_samples(samples), require_seed(seed)))
    for c, posterior in enumerate(sources):
        posterior.require_ready(team)
        facts = {f"{name} of posterior {c}": value for name, value in posterior.calibration.described().items()}
        team.require_same(facts)
    team.require_same({"folds": folds, "samples": samples, "seed": seed})
    readings = read_fusion(sources, held_out, unpack, team, progress=progress)

    def search() -> tuple[Numbers, FusionTable] | None:
        if not team.leads:
            return None
        own = None if groups is None else group_numbers(groups, len(readings))
        with plain_execution(readings.means.device):
            choice = best_fusion(readings, folds, seed, samples, groups=own, progress=progress)
        return choice.fit.variant.numbers(choice.fit.theta), choice.table

    numbers, table = team.broadcast(team.together(search))
    _warn_of_pmfs(table)
    return FusedClassifier(sources, **vars(numbers), table=table)


# ------------------------------------------------------------------------------------------------------- reading


def read_fusion(
    posteriors: Sequence[Posterior],
    held_out: Any,
    unpack: Unpack | None,
    team: Team | None = None,
    *,
    progress: bool = False,
) -> Readings:
    """The logit Gaussians of all networks for the held-out inputs, on the device of the first.

    Those of all ranks, in the order of ranks, on every rank: a collective call.
    """
    team = team or Team()
    overlaps = [Overlap(posterior.information) for posterior in posteriors]
    stream = opened_raw(held_out, team, title="Reading held-out data", progress=progress)
    own = team.together(lambda: _readings_of(posteriors, stream, unpack, overlaps))
    if not any(team.exchange(own is not None)):
        raise DataError("The held-out data are empty: expected at least one batch.")
    for overlap in overlaps:
        overlap.warn(team, stacklevel=3)
    if team.is_alone and own is not None:
        return own
    device = posteriors[0].information.network.device
    return Readings.of_parts(team.gathered(None if own is None else own.parts(), device))


def _readings_of(
    posteriors: Sequence[Posterior], stream: Iterator[Any], unpack: Unpack | None, overlaps: Sequence[Overlap]
) -> Readings | None:
    """This rank's part of the held-out inputs; None if it has none."""
    device = posteriors[0].information.network.device
    classes = posteriors[0].information.n_classes
    gaussians: list[list[LogitGaussian]] = [[] for _ in posteriors]
    labels: list[Tensor] = []
    count = 0
    for value in stream:
        batches = batch_of_each(value, posteriors, unpack)
        rows = len(batches[0])
        count += rows
        # The covariances, their eigenvectors, and as much again for the slopes.
        require_memory(
            4 * 8 * len(posteriors) * count * classes**2,
            device,
            what=f"Fusing {len(posteriors)} networks of {classes} classes on {count:,} held-out inputs",
            instead="Give fewer held-out data.",
        )
        for c, (posterior, batch) in enumerate(zip(posteriors, batches, strict=True)):
            if len(batch) != rows:
                raise MismatchError(
                    f"A held-out batch has {rows} inputs for network 0 and {len(batch)} for network {c}; expected row "
                    "i of each to be one object."
                )
            gaussians[c] += [posterior.unrounded_logits(part) for part in overlaps[c].watching([batch])]
        labels.append(checked_labels(batches[0].labels, size=rows, classes=classes, device=device))
    if not count:
        return None
    with plain_execution(device):
        return Readings.of(gaussians, torch.cat(labels))


# ------------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True, eq=False)
class FusionChoice:
    """The variant that was taken, fitted to all held-out data; the table; and all that were compared, by name."""

    fit: Fit
    table: FusionTable
    fits: Mapping[str, Fit]


@dataclass(frozen=True, eq=False)
class _Trial:
    """A variant fitted to all inputs and to each fold's complement, and −ln f_y of each input out of fold."""

    name: str
    size: int
    fit: Fit
    fits: tuple[Fit, ...]
    losses: Float[Tensor, "N"]


def variants_of(readings: Readings) -> list[Variant]:
    """What is compared beside the baselines, the simple ones first."""
    count = readings.networks
    typical = readings.typical_variances()
    largest = float(readings.values.max())
    simple: list[Variant] = [
        Pool(MEAN_OF_LOGITS, count),
        Pool("weighted mean of logits", count, weighted=True, largest=largest),
    ]
    if not bool((typical > 0).any()):
        # No network has a covariance: there is nothing to weigh by. One that has none beside others is taken by its s.
        return simple
    variances = tuple(typical.tolist())

    def widened(name: str, *, own: bool = False, scales: bool = False) -> list[Variant]:
        return [
            Widened(f"{name}{title}", count, None, variances, own, scales, width)
            for title, width in ((", q = 0", False), ("", True))
        ]

    return [
        *simple,
        *widened("one s"),
        *widened("an s for each", own=True),
        *widened("an s and an a for each", own=True, scales=True),
    ]


def best_fusion(
    readings: Readings,
    folds: int,
    seed: int,
    samples: int,
    *,
    groups: Int[Tensor, "N"] | None = None,
    progress: bool = False,
) -> FusionChoice:
    """Cross-validate all variants and take one by the rule of docs/design.md."""
    groups = torch.arange(len(readings)) if groups is None else groups
    parts = divided(groups, folds, seed)
    normal = draws_for(readings, samples, seed)
    variants = variants_of(readings)
    steps: Iterator[Variant] = track(variants, "Fusing", enabled=progress)
    candidates: list[_Trial] = []
    known: list[Fit] = []
    for position, variant in enumerate(steps):
        if isinstance(variant, Widened) and variant.width:
            # The one before is the same without a width.
            variant = replace(variant, coolest=above(known[-1]))
        candidates.append(_tried(variant, readings, normal, parts, known))
        known.append(candidates[-1].fit)
        if position == 0:
            candidates.append(_best_alone(readings, normal, parts))
    pmfs = _tried(PmfPool(MEAN_OF_PMFS, readings.networks), readings, normal, parts, [])
    chosen = simplest_of_best([trial.losses for trial in candidates], groups)
    trial = candidates[chosen]
    table = _table(trial, candidates, pmfs, readings, normal, parts, groups)
    return FusionChoice(trial.fit, table, {other.name: other.fit for other in (pmfs, *candidates)})


def simplest_of_best(losses: Sequence[Float[Tensor, "N"]], groups: Int[Tensor, "N"] | None = None) -> int:
    """The first whose mean exceeds the least by at most one standard error of the paired difference and the tolerance.

    `losses` are −ln f_y of each input, out of fold, of variants from the simple to the rich; inputs of one group are
    not independent.
    """
    groups = torch.arange(len(losses[0])) if groups is None else groups
    best = min(losses, key=lambda own: float(own.mean()))
    limit = tolerance(int(groups.max()) + 1)

    def is_near(own: Float[Tensor, "N"]) -> bool:
        difference = own - best
        return float(difference.mean()) <= min(limit, standard_error(difference, groups))

    return next(position for position, own in enumerate(losses) if is_near(own))


def tolerance(count: int) -> float:
    """min(1.5/N, 450/N²), in nats per input.

    >>> tolerance(100), tolerance(3000)
    (0.015, 5e-05)
    """
    return _NATS / count * min(1.0, _MANY / count)


def _complement(part: Int[Tensor, "n"], count: int) -> Int[Tensor, "m"]:
    is_left = torch.ones(count, dtype=torch.bool)
    is_left[part] = False
    return torch.nonzero(is_left)[:, 0]


def _tried(
    variant: Variant,
    readings: Readings,
    normal: Float[Tensor, "d K"],
    parts: Sequence[Int[Tensor, "n"]],
    known: Sequence[Fit],
) -> _Trial:
    """Fitted to all inputs from several starts, and from there to all folds but one, each in turn."""
    starts = [*variant.starts(), *_carried(variant, known)]
    fit = fitted(variant, readings, normal, starts)
    curvature = curvature_at(fit, readings, normal)
    losses = torch.empty(len(readings), dtype=torch.float64)
    fits = []
    for part in parts:
        rest = readings.chosen(_complement(part, len(readings)))
        fits.append(fitted(variant, rest, normal, [fit.theta], curvature=curvature))
        losses[part] = fits[-1].losses(readings.chosen(part), normal)
    return _Trial(variant.name, variant.size(), fit, tuple(fits), losses)


def _carried(variant: Variant, known: Sequence[Fit]) -> list[Float[Tensor, "k"]]:
    """Where simpler variants ended, as starts of a richer one."""
    if not isinstance(variant, Widened):
        return []
    pools = [variant.start_at_pool(fit.variant, fit.theta) for fit in known if isinstance(fit.variant, Pool)]
    simpler = [variant.start_from(fit.variant, fit.theta) for fit in known if isinstance(fit.variant, Widened)]
    return [*pools, *simpler[-2:]]


def _best_alone(readings: Readings, normal: Float[Tensor, "d K"], parts: Sequence[Int[Tensor, "n"]]) -> _Trial:
    """The network with the least tempered NLL of each fold's complement, then with T and q of its own."""
    fit = _alone(readings, normal)
    losses = torch.empty(len(readings), dtype=torch.float64)
    fits = []
    for part in parts:
        fits.append(_alone(readings.chosen(_complement(part, len(readings))), normal, near=fit))
        losses[part] = fits[-1].losses(readings.chosen(part), normal)
    return _Trial(BEST_NETWORK, fit.variant.size(), fit, tuple(fits), losses)


def _alone(
    readings: Readings, normal: Float[Tensor, "d K"], *, absent: int | None = None, near: Fit | None = None
) -> Fit:
    """The best network of those that are there; `near` is where the search begins, if it is the same network."""
    count = readings.networks
    tempered = [
        fitted(variant, readings, normal, variant.starts())
        for c in range(count)
        if c != absent
        for variant in [Alone(BEST_NETWORK, count, None, c, width=False)]
    ]
    best = min(tempered, key=lambda fit: fit.value)
    assert isinstance(best.variant, Alone)
    network = best.variant.network
    typical = float(readings.values[network].mean())
    if typical == 0:
        return best
    variant = Alone(BEST_NETWORK, count, None, network, width=True, variance=typical, coolest=above(best))
    starts = variant.starts()
    if near is not None and isinstance(near.variant, Alone) and near.variant.network == network and near.variant.width:
        starts = [near.theta]
    wide = fitted(variant, readings, normal, starts)
    return wide if wide.value < best.value else best


# ------------------------------------------------------------------------------------------------------- the table


def _table(
    trial: _Trial,
    candidates: Sequence[_Trial],
    pmfs: _Trial,
    readings: Readings,
    normal: Float[Tensor, "d K"],
    parts: Sequence[Int[Tensor, "n"]],
    groups: Int[Tensor, "N"],
) -> FusionTable:
    mean_of_logits = candidates[0]

    def row(other: _Trial) -> FusionRow:
        difference = other.losses - mean_of_logits.losses
        error = standard_error(difference, groups)
        return FusionRow(other.name, other.size, float(other.losses.mean()), float(difference.mean()), error)

    best = min(candidates, key=lambda other: float(other.losses.mean()))
    reason = (
        f"Chosen: {trial.name}, the best out of fold."
        if best is trial
        else f"Chosen: {trial.name}, the simplest that is as good as the best, {best.name}, within one standard error."
    )
    return FusionTable(
        rows=tuple(row(other) for other in (pmfs, *candidates)),
        chosen=trial.name,
        reason=reason,
        weights=_mean_weights(trial.fit, readings),
        gains=_gains(trial, readings, normal, parts),
        inputs=len(readings),
        folds=len(parts),
    )


def _mean_weights(fit: Fit, readings: Readings) -> tuple[float, ...]:
    """The mean over the inputs of tr(P Q_c⁻¹)/(M − 1)."""
    if isinstance(fit.variant, Widened):
        return tuple(fit.variant.mean_weights(fit.theta, readings).tolist())
    if isinstance(fit.variant, Pool):
        return tuple(fit.variant.weights(fit.theta).tolist())
    assert isinstance(fit.variant, Alone)
    return tuple(float(c == fit.variant.network) for c in range(readings.networks))


def _gains(
    trial: _Trial, readings: Readings, normal: Float[Tensor, "d K"], parts: Sequence[Int[Tensor, "n"]]
) -> tuple[float, ...]:
    """By how much the NLL out of fold rises without each network."""
    gains = []
    for network in range(readings.networks):
        losses = torch.empty_like(trial.losses)
        for part, fit in zip(parts, trial.fits, strict=True):
            rest = readings.chosen(_complement(part, len(readings)))
            if isinstance(fit.variant, Alone):
                left = fit if fit.variant.network != network else _alone(rest, normal, absent=network)
            else:
                left = without(fit, network, rest, normal)
            losses[part] = left.losses(readings.chosen(part), normal)
        gains.append(float((losses - trial.losses).mean()))
    return tuple(gains)


def _warn_of_pmfs(table: FusionTable) -> None:
    """Say so where the mean of PMFs, which no Gaussian over logits can be, is better."""
    pmfs, chosen = table.row(MEAN_OF_PMFS), table.row(table.chosen)
    if chosen.nll - pmfs.nll > max(_WORTH_A_WARNING, tolerance(table.inputs)):
        warnings.warn(
            f"The mean of the networks' PMFs has an NLL of {pmfs.nll:.4f} out of fold, the fusion {chosen.nll:.4f}: "
            "they contradict each other more than a Gaussian over logits can say. Calibrate each posterior "
            "first, or take the mean of their PMFs.",
            CalibrationWarning,
            stacklevel=3,
        )
