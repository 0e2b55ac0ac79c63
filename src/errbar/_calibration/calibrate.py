"""`calibrate`: temperature T, covariance scale T_c and softening c from held-out data.

The calibrated logits are N(ĝ/T(x), T_c P^g/T(x)²) with T(x) = T √(1 + c v̄(x)). `search` says how they are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from errbar._base.checks import require_option
from errbar._base.execution import plain_execution
from errbar._calibration.held_out import HeldOut, read_held_out
from errbar._calibration.question import NAMES, OBJECTIVES, TWO
from errbar._calibration.search import best_calibration
from errbar._distributed.team import team_of
from errbar._distributions.calibration import Calibration, LabelFactors
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Unpack
from errbar._posterior.posterior import Posterior, require_posterior
from errbar._posterior.pushing import held_draws
from errbar.errors import ArgumentError, CalibrationWarning

# Held-out inputs of a label with either value that its own T and T_c need.
_FEWEST = 10
Fit = Callable[[HeldOut, Calibration], tuple[Calibration, list[str]]]


def calibrate(
    posterior: Posterior,
    data: Any,
    *,
    objective: str = "nll",
    fit: Sequence[str] = TWO,
    per_label: bool = False,
    samples: int = 1000,
    seed: int = 0,
    unpack: Unpack | None = None,
    group: Any = None,
    progress: bool = False,
) -> Posterior:
    """A posterior with the T and T_c, or what else is named in `fit`, that are best on held-out data.

    What is not fitted keeps its value. `fit=("temperature",)` with `covariance_scale=0` is the usual
    temperature scaling, `fit=("covariance_scale",)` with `temperature=1` the paper's method. With "softening" named
    as well, the temperature depends on the input, T(x) = T √(1 + c v̄(x)), where v̄ is the mean variance of the
    contrasts of P^g: inputs whose logits are less certain get a flatter PMF.

    T and T_c can stand in for each other: both flatten the PMF, but only T_c gives error bars. So fitting both by "nll"
    does not return the minimum. Consider all T_c whose NLL, with the best T for each, exceeds the least by at most
    min(2/N, 8e-4), where N is the number of held-out samples, and that of temperature scaling (T alone, T_c = 0) by at
    most 3e-4: the one nearest to 1 (in |ln T_c|) is chosen, so the covariance of theory changes only as far as the data
    require. "brier" and "ece" take their minimum; of similar minima of the ECE, the one with the best NLL, because a
    flat PMF is calibrated too. T and T_c together by "ece" are not looked for among PMFs that are nearly flat, where
    the ECE may be smaller still. By its objective no result is worse than before (if T_c was 0: by no more than
    min(2/N, 8e-4)).

    If T is small for the logits, PMFs merely count which class wins. So, when fitting both by "nll", T stays above 0.3
    of the T of temperature scaling, unless the log-likelihood of the held-out data rises by more than 2 below that.

    Of several labels (`outputs="labels"`) every one that is given counts as an input with two classes: the NLL is the
    mean over these, and the ECE that of the probabilities max(f, 1 − f) of all of them.

    With a softening, "no worse" and "nearest to 1" hold as above, with T and c refitted for each T_c, but only 1e-4 is
    given away; c = 0 is returned where no other c is better.

    Args:
        posterior: the posterior to calibrate.
        data: held-out batches with labels, not used for training.
        objective: "nll", "brier" or "ece".
        fit: which of "temperature", "covariance_scale" and "softening" to fit.
        per_label: T and T_c of each of several labels (`outputs="labels"`), in place of those of all together. A label
            of which fewer than 10 held-out inputs are true, or fewer than 10 false, keeps its own, or takes those of
            all. Without `per_label`, those of all take the place of those of each label.
        samples: Monte Carlo draws for the PMF; with M > 100 classes at most 100,000/M, or 100 where that is more. They
            are held in memory where that is quicker: up to 100,000 numbers for each input, or 100 M.
        seed: for these draws.
        unpack: as in `collect`; by default that of the fit.
        group: as in `collect`. The held-out logits of all ranks are gathered, and the first rank searches for all.
        progress: show progress with the time left.
    """
    team = team_of(group)
    names = team.together(lambda: _require_question(posterior, objective, fit, per_label))
    posterior.require_ready(team)
    samples = team.together(lambda: require_samples(samples))
    if posterior.information.task.kind.has_gauge:
        samples = held_draws(posterior.information.task, samples)
    start = posterior.calibration
    question = {"objective": objective, "fit": names, "per_label": per_label, "samples": samples, "seed": seed}
    team.require_same(start.described() | question)
    held_out = read_held_out(posterior, data, unpack or posterior.unpack, progress, team, samples, seed)

    def fitted(part: HeldOut, near: Calibration) -> tuple[Calibration, list[str]]:
        return best_calibration(part, OBJECTIVES[objective], names, near, samples, seed)

    def search() -> tuple[Calibration, LabelFactors | None, list[str]] | None:
        if not team.leads:
            return None
        with plain_execution(held_out.mean.device):
            common, messages = fitted(held_out, start)
            if not per_label:
                return common, None, messages
            starts = _starts_of_labels(posterior, common)
            return common, *_of_each_label(held_out, common, starts, fitted, messages)

    best, factors, messages = team.broadcast(team.together(search))
    for text in messages:
        warnings.warn(text, CalibrationWarning, stacklevel=2)
    calibrated = posterior.with_calibration(
        temperature=best.temperature, covariance_scale=best.covariance_scale, softening=best.softening
    )
    return calibrated.with_label_factors(factors)


def _starts_of_labels(posterior: Posterior, common: Calibration) -> list[Calibration]:
    """Where the search of each label begins: its own T and T_c where it has some, else those of all.

    What is not fitted stays what it was, and no label ends worse than it was.
    """
    if posterior.label_factors is None:
        return [common] * posterior.information.n_classes
    pairs = zip(posterior.label_temperatures, posterior.label_covariance_scales, strict=True)
    return [replace(common, temperature=T, covariance_scale=scale) for T, scale in pairs]


def _of_each_label(
    held_out: HeldOut, common: Calibration, starts: Sequence[Calibration], fitted: Fit, messages: list[str]
) -> tuple[LabelFactors, list[str]]:
    """What T and T_c of each label are times those of all, and what there is to tell."""
    factors, few = [], []
    told: list[str]
    for label, start in enumerate(starts):
        part = held_out.of_label(label)
        if min(int((part.labels == truth).sum()) for truth in (0, 1)) < _FEWEST:
            few.append(label)
            own, told = start, []
        else:
            own, told = fitted(part, start)
        messages += [f"Label {label}: {text}" for text in told]
        scale = own.covariance_scale / common.covariance_scale if common.covariance_scale > 0 else 1.0
        factors.append((own.temperature / common.temperature, scale))
    if few:
        messages.append(
            f"Labels {', '.join(map(str, few[:10]))}{' and others' if len(few) > 10 else ''} have fewer than {_FEWEST} "
            "held-out inputs that are true or that are false; they keep their T and T_c, or take those of all labels. "
            "Give more of them."
        )
    return tuple(factors), messages


def _require_question(posterior: object, objective: object, fit: object, per_label: object) -> tuple[str, ...]:
    """What to fit, in the order of `NAMES`."""
    require_posterior(posterior)
    assert isinstance(posterior, Posterior)
    names = (fit,) if isinstance(fit, str) else tuple(fit) if isinstance(fit, Sequence) else ()
    if not names or any(name not in NAMES for name in names):
        raise ArgumentError(f"fit is {fit!r}; expected one or more of {', '.join(map(repr, NAMES))}.")
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise ArgumentError(f"objective is {objective!r}; expected {', '.join(map(repr, OBJECTIVES))}.")
    require_option("per_label", per_label, (False, True))
    if per_label and posterior.information.task.kind.has_gauge:
        raise ArgumentError(
            f"per_label is for several labels, and this posterior was fitted with outputs="
            f"'{posterior.information.outputs}'; expected one of outputs='labels', or leave per_label out."
        )
    if posterior.label_factors is not None and not per_label and not set(TWO) <= set(names):
        raise ArgumentError(
            f"fit names {', '.join(names)} alone, and this posterior has a T and T_c for each label; expected "
            "per_label=True, which keeps what is not fitted, or 'temperature' and 'covariance_scale', to replace both."
        )
    if per_label and "softening" in names:
        raise ArgumentError(
            "per_label fits T and T_c of each label, and fit names the softening; expected 'temperature' or "
            "'covariance_scale' or both."
        )
    return tuple(name for name in NAMES if name in names)
