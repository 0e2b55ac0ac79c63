"""`calibrate`: temperature T, covariance scale T_c and softening c from held-out data.

The calibrated logits are N(ĝ/T(x), T_c P^g/T(x)²) with T(x) = T √(1 + c v̄(x)). `search` says how they are found.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from errbar._base.execution import plain_execution
from errbar._distributed.team import team_of
from errbar._distributions.calibration import Calibration
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Unpack
from errbar._operations.held_out import read_held_out
from errbar._operations.question import NAMES, OBJECTIVES, TWO
from errbar._operations.search import best_calibration
from errbar._posterior.posterior import Posterior, require_posterior
from errbar._posterior.pushing import held_draws
from errbar.errors import ArgumentError, CalibrationWarning


def calibrate(
    posterior: Posterior,
    data: Any,
    *,
    objective: str = "nll",
    fit: Sequence[str] = TWO,
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

    With a softening, "no worse" and "nearest to 1" hold as above, with T and c refitted for each T_c, but only 1e-4 is
    given away; c = 0 is returned where no other c is better.

    Args:
        posterior: the posterior to calibrate.
        data: held-out batches with labels, not used for training.
        objective: "nll", "brier" or "ece".
        fit: which of "temperature", "covariance_scale" and "softening" to fit.
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
    samples = held_draws(posterior.information.task, team.together(lambda: require_samples(samples)))
    start = posterior.calibration
    team.require_same(start.described() | {"objective": objective, "fit": names, "samples": samples, "seed": seed})
    held_out = read_held_out(posterior, data, unpack or posterior.unpack, progress, team, samples, seed)

    def search() -> tuple[Calibration, list[str]] | None:
        if not team.leads:
            return None
        with plain_execution(held_out.mean.device):
            return best_calibration(held_out, OBJECTIVES[objective], names, start, samples, seed)

    best, messages = team.broadcast(team.together(search))
    for text in messages:
        warnings.warn(text, CalibrationWarning, stacklevel=2)
    return posterior.with_calibration(
        temperature=best.temperature, covariance_scale=best.covariance_scale, softening=best.softening
    )


def _require_question(posterior: object, objective: object, fit: object) -> tuple[str, ...]:
    """What to fit, in the order of `NAMES`."""
    require_posterior(posterior)
    names = (fit,) if isinstance(fit, str) else tuple(fit) if isinstance(fit, Sequence) else ()
    if not names or any(name not in NAMES for name in names):
        raise ArgumentError(f"fit is {fit!r}; expected one or more of {', '.join(map(repr, NAMES))}.")
    if not isinstance(objective, str) or objective not in OBJECTIVES:
        raise ArgumentError(f"objective is {objective!r}; expected {', '.join(map(repr, OBJECTIVES))}.")
    return tuple(name for name in NAMES if name in names)
