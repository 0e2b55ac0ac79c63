"""Whether a posterior that was just fitted is far too wide to be used as it is.

A network that knows its training data by heart is certain of all of them. Then Λ = diag f − f fᵀ is next to nothing, so
the data hold hardly any information, and the covariance is nearly that of the prior: the draws of the logits scatter so
far that their mean PMF forgets what the network learned. Two signs are looked for, and there is at most one warning:

- the mean NLL of the training data (without labels: the mean entropy of the network's PMFs for the first of them, which
  is what the NLL would be if labels were drawn from these) is below `BY_HEART` nats;
- the most probable class of the posterior's PMF is another than that of the network for more than `DISAGREEING` of the
  first training inputs.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol

from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._curvature.task import Task
from errbar._distributed.team import Team
from errbar._distributions.prediction import Prediction
from errbar._model.batch import Batch
from errbar._posterior.information import Information
from errbar.errors import PosteriorWarning, SizeError

# A mean NLL of 0.01 is a probability of 99 % for each label: no more than one error in a hundred is left to learn from.
BY_HEART = 0.01
# Averaging over draws may flip an input whose two best classes are nearly equal. On digits, posteriors that kept the
# accuracy flipped up to 2 % of training inputs, and those that lost 18 points or more flipped 14 to 77 %.
DISAGREEING = 0.05
# Inputs compared, and the fewest that say anything about a share of 5 %.
INPUTS, _FEWEST = 128, 20
# Limits on one comparison: numbers of the Jacobian, of P^g, and of the draws of the PMF.
_MOST_DERIVATIVES, _MOST_COVARIANCES, _MOST_DRAWN = 2**32, 2**24, 2**22
_DRAWS = (100, 1000)

# Of a posterior whose T and T_c are 1, as `fit` leaves them.
UNCALIBRATED = (
    "This posterior is not calibrated (T = 1 and T_c = 1): its PMFs may be far too flat, "
    "and its error bars far too wide."
)
ADVICE = (
    "Do not use its PMFs and error bars before errbar.calibrate has fitted T and T_c to held-out data, "
    "or let errbar.autofit choose."
)


class Predictor(Protocol):
    """What is needed of a posterior, whose module imports this one."""

    @property
    def information(self) -> Information: ...

    def predict(self, x: Any, samples: int = ..., /) -> Prediction: ...


def warn_of_width(posterior: Predictor, first: Batch | None, team: Team, *, stacklevel: int = 3) -> None:
    """Warn, once, of a posterior that is not to be used before it is calibrated; `first` is a training batch of this
    rank, if it has any. A collective call."""
    if posterior.information.total.is_zero():
        return  # `collect` has said so
    different, compared, entropy = _sums(team, posterior, first)
    reasons = []
    if (reason := _by_heart(posterior, entropy / compared if compared else None)) is not None:
        reasons.append(reason)
    if different > DISAGREEING * compared:
        what = "most probable class is" if posterior.information.task.kind.has_gauge else "decisions about labels are"
        reasons.append(f"its {what} not the network's for {different} of {compared} training inputs")
    if reasons:
        text = f"The posterior is far too wide as it is: {', and '.join(reasons)}. {ADVICE}"
        warnings.warn(text, PosteriorWarning, stacklevel=stacklevel)


def _by_heart(posterior: Predictor, entropy: float | None) -> str | None:
    information = posterior.information
    if information.log_likelihood is not None and information.task.kind.has_gauge:
        # Of several labels it is not known how many were given.
        nll = -information.log_likelihood / information.n_samples
        measure = f"mean NLL {nll:.2g}"
    elif entropy is not None:
        nll, measure = entropy, f"mean entropy {entropy:.2g}"
    else:
        return None
    if nll >= BY_HEART:
        return None
    return f"the network knows its training data by heart ({measure}), so they hold hardly any information"


def _sums(team: Team, posterior: Predictor, first: Batch | None) -> tuple[int, int, float]:
    """Inputs whose class differs, inputs compared, and the sum of the network's entropies for them, of all ranks."""
    own = (0, 0, 0.0) if first is None else _comparison(posterior, first)
    different, compared, entropy = zip(*team.exchange(own), strict=True)
    return sum(different), sum(compared), sum(entropy)


def _comparison(posterior: Predictor, first: Batch) -> tuple[int, int, float]:
    """The same of the first inputs of a batch; zeros where there are too few, or where it would take long.

    Of several labels each counts by itself.
    """
    task = posterior.information.task
    if task.positions is not None:
        return 0, 0, 0.0
    size = min(len(first), _inputs_within(task))
    if size < _FEWEST:
        return 0, 0, 0.0
    batch = first.rows(0, size)
    least, most = _DRAWS
    draws = max(least, min(most, _MOST_DRAWN // (size * task.n_classes)))
    try:
        pmf = posterior.predict(batch, draws).pmf
    except SizeError:
        return 0, 0, 0.0
    with plain_execution(task.network.device):
        checks = Checks(task.network.device)
        logits = task.network.logits(task.network.prepare(batch, checks)).double()
        checks.finish()
    decisions = task.kind.decision(logits, are_logits=True)
    different = task.kind.decision(pmf, are_logits=False) != decisions
    return int(different.sum()), decisions.numel(), float(task.kind.entropy(logits).sum())


def _inputs_within(task: Task) -> int:
    """So many inputs that comparing them takes moments; a last layer's derivative is the same for all classes."""
    classes = task.n_classes
    rows = 1 if task.route is not None and task.route.identity else classes
    limits = (
        _MOST_DERIVATIVES // (rows * task.selection.n_parameters),
        _MOST_COVARIANCES // classes**2,
        _MOST_DRAWN // (classes * _DRAWS[0]),
    )
    return min(INPUTS, *limits)
