"""Decisions from a PMF: the action of least expected loss, when to abstain, and sets that contain the class.

`decide` needs only a prediction and the costs of mistakes, and is as good as the PMF. The other two are chosen on
held-out data, and give a guarantee however bad the PMF is, as long as the held-out and the future inputs are
independent draws from one distribution:
- `abstention`: among the inputs that it accepts, at most a share `risk` is wrong; with probability 1 − `delta` over the
  held-out data. Fixed-sequence testing with exact binomial p-values (Angelopoulos, Bates, Candès, Jordan and Lei,
  *Learn then Test*, arXiv 2110.01052).
- `conformal`: the set contains the class of an input with probability at least `level`, over the held-out data and the
  input (split conformal prediction; Romano, Sesia and Candès, arXiv 2006.02544; Sadinle, Lei and Wasserman, arXiv
  1609.00451).
Both guarantees are void if the held-out data were used before, for training or by `calibrate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar._distributions.prediction import Prediction
from errbar._model.batch import checked_labels
from errbar.errors import ArgumentError, DataError, MismatchError
from errbar.metrics import checked_pmf

SCORES = ("aps", "lac")


# ------------------------------------------------------------------------------------------------------- least loss


@dataclass(frozen=True, eq=False)
class Decision:
    """The expected loss of A actions for B inputs, its uncertainty, and the action with the least.

    `expected_loss` is ℓ_a = c_aᵀ f̂, `std` is √(c_aᵀ P^f c_a): the uncertainty of ℓ_a due to the parameters. Of several
    labels there is a decision for each, and all of these have a dimension for the L labels after that of the inputs; of
    tokens and pixels, the dimensions of the positions.
    """

    expected_loss: Float[Tensor, "B *L A"]
    std: Float[Tensor, "B *L A"]

    def __len__(self) -> int:
        return self.expected_loss.shape[0]

    @property
    def action(self) -> Int[Tensor, "B *L"]:
        """The action of least expected loss; the first of several."""
        return self.expected_loss.argmin(-1)

    @property
    def least_loss(self) -> Float[Tensor, "B *L"]:
        """The expected loss of that action."""
        return self.expected_loss.amin(-1)

    @property
    def least_loss_std(self) -> Float[Tensor, "B *L"]:
        """The standard deviation of that expected loss."""
        return self.std.gather(-1, self.action[..., None])[..., 0]


def decide(prediction: Prediction, cost: Any) -> Decision:
    """For each input the expected loss of each action, ℓ_a = c_aᵀ f̂, and its standard deviation √(c_aᵀ P^f c_a).

    Of tokens and pixels, for each position.

    Args:
        prediction: the result of `Posterior.predict`.
        cost: (A, M): `cost[a][m]` is what action a costs when the class is m. Gains are negative costs. Of several
            labels (A, 2), what action a costs when a label is false and when it is true; or (L, A, 2), by label.
    """
    if not isinstance(prediction, Prediction):
        raise ArgumentError(
            f"prediction is a {type(prediction).__name__}; expected a Prediction from posterior.predict(x)."
        )
    if not prediction.sampler.kind.has_gauge:
        return _decisions_of_labels(prediction, cost)
    costs = _checked_cost(cost, prediction.pmf)
    return Decision(prediction.pmf @ costs.T, prediction.std_of(costs))


def _decisions_of_labels(prediction: Prediction, cost: Any) -> Decision:
    """ℓ_la = c_la0 (1 − f̂_l) + c_la1 f̂_l, and its standard deviation |c_la1 − c_la0| √P^f_ll."""
    f = prediction.pmf
    labels = f.shape[1]
    costs = _real_numbers(cost, f, f"(actions, 2) or ({labels}, actions, 2)")
    is_one = costs.ndim == 2
    if costs.ndim not in (2, 3) or 0 in costs.shape or costs.shape[-1] != 2 or not (is_one or len(costs) == labels):
        raise ArgumentError(
            f"cost has shape {tuple(costs.shape)}; expected (actions, 2) for outputs='labels': what each action costs "
            f"when a label is false and when it is true; or ({labels}, actions, 2), by label."
        )
    if not bool(torch.isfinite(costs).all()):
        raise ArgumentError("cost holds NaN or infinity; expected finite numbers. For 'never', use a large one.")
    false, true = costs[..., 0], costs[..., 1]
    expected = false * (1 - f)[..., None] + true * f[..., None]
    return Decision(expected, (true - false).abs() * prediction.std[..., None])


def _real_numbers(cost: Any, like: Tensor, shape: str) -> Float[Tensor, "..."]:
    try:
        if isinstance(cost, Tensor) and cost.is_complex():
            raise TypeError("complex numbers")
        return torch.as_tensor(cost, dtype=like.dtype, device=like.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"cost is a {type(cost).__name__} that is not an array of real numbers; expected {shape}."
        ) from error


def _checked_cost(cost: Any, pmf: Float[Tensor, "B *S M"]) -> Float[Tensor, "A M"]:
    classes = pmf.shape[-1]
    costs = _real_numbers(cost, pmf, f"(actions, {classes})")
    if costs.ndim != 2 or costs.shape[0] == 0 or costs.shape[1] != classes:
        raise ArgumentError(
            f"cost has shape {tuple(costs.shape)}; expected (actions, {classes}): a row per action, with its cost for "
            "each class."
        )
    if not bool(torch.isfinite(costs).all()):
        raise ArgumentError("cost holds NaN or infinity; expected finite numbers. For 'never', use a large one.")
    return costs


# ------------------------------------------------------------------------------------------------------- abstention


@dataclass(frozen=True)
class AbstentionRule:
    """Accept an input while the doubt about its most likely class, 1 − max_m f̂_m, is below `threshold`; else abstain.

    Of `held_out` inputs, `accepted` were accepted, and `wrong` of these were wrong. A rule that accepts nothing
    (threshold 0) says that no share of the held-out inputs could be shown to be right often enough.
    """

    threshold: float
    risk: float
    delta: float
    held_out: int
    accepted: int
    wrong: int
    classes: int

    @property
    def coverage(self) -> float:
        """The share of the held-out inputs that was accepted."""
        return self.accepted / self.held_out

    @property
    def bound(self) -> float:
        """The Clopper–Pearson upper limit of the error rate at confidence 1 − delta, for the accepted inputs.

        At most `risk` unless nothing is accepted. It would be the guarantee for this threshold had it been the only
        candidate; the guarantee that takes the choice into account is `risk` itself.
        """
        return error_bound(self.accepted, self.wrong, self.delta)

    def accepts(self, prediction: Any) -> Bool[Tensor, "B"]:
        """Which inputs of a Prediction, or of PMFs (B, M), to accept."""
        pmf = _pmf(prediction)
        _require_classes(pmf, self.classes)
        return _doubt(pmf) < self.threshold


def abstention(prediction: Any, labels: Any, *, risk: float = 0.05, delta: float = 0.05) -> AbstentionRule:
    """The rule that accepts most inputs such that, with probability 1 − delta, at most a share `risk` of them is wrong.

    P{ Pr(y ≠ ŷ | accepted) ≤ risk } ≥ 1 − delta, the outer probability over the held-out data. The held-out inputs are
    sorted by their doubt. For j = j₀, j₀ + 1, … consider the j least doubtful, of which W_j are wrong:
    the hypothesis that the rule "doubt below that of number j + 1" errs more often than `risk` is rejected if
    Pr{Bin(j, risk) ≤ W_j} ≤ delta. The search ends at the first that is not rejected; the last rejected is the rule.
    j₀ = ⌈ln delta / ln(1 − risk)⌉ is the least number for which it is enough that none is wrong.

    *Why testing many costs nothing.* Let A be the doubts d with error rate ρ(d) = Pr(wrong | doubt < d) > risk.
    A mistake needs the first j whose threshold is in A to be rejected. If that is j₀, given its threshold the j₀ below
    are independent draws with error rate ρ > risk. If it is later: ρ = risk where a piece of A begins and ends, so the
    error rate within each piece, and between two of them, is `risk` on average; that j is the first is an event about
    how many inputs lie in each; given these numbers W_j ~ Bin(j, risk). In both cases it is rejected with probability
    delta at most. ρ need not be monotone, but doubts must have a density. Equal doubts are accepted together.

    Args:
        prediction: a Prediction of held-out inputs, or their PMFs (N, M).
        labels: their labels.
        risk: the tolerated share of wrong ones among the accepted.
        delta: the probability with which the guarantee may fail.
    """
    pmf = _pmf(prediction)
    truth = checked_labels(labels, size=len(pmf), classes=pmf.shape[1], device=pmf.device)
    risk, delta = _share(risk, "risk"), _share(delta, "delta")
    least = math.ceil(math.log(delta) / math.log1p(-risk))
    if len(pmf) < least:
        raise DataError(
            f"There are {len(pmf)} held-out inputs; expected {least} or more: with fewer, an error rate of {risk:g} "
            f"could not be excluded at delta {delta:g} even if all were right. Take more, or a larger risk or delta."
        )
    doubt, order = _doubt(pmf).sort(stable=True)
    is_wrong = (pmf.argmax(1) != truth)[order]
    p_values = _running_p_values(is_wrong, risk)
    # Thresholds lie between different doubts; the last one accepts everything.
    is_step = torch.cat([doubt[1:] > doubt[:-1], doubt.new_ones(1, dtype=torch.bool)])
    accepted, threshold = 0, 0.0
    for j in range(least, len(doubt) + 1):
        if is_step[j - 1]:
            if p_values[j - 1] > delta:
                break
            accepted, threshold = j, float(doubt[j]) if j < len(doubt) else math.inf
    wrong = int(is_wrong[:accepted].sum())
    return AbstentionRule(threshold, risk, delta, len(doubt), accepted, wrong, pmf.shape[1])


def _doubt(pmf: Float[Tensor, "B M"]) -> Float[Tensor, "B"]:
    """1 − max_m f̂_m as the sum of the others: the difference would be 0, hence equal, for all confident inputs."""
    others = pmf.clone()
    others.scatter_(1, pmf.argmax(1, keepdim=True), 0.0)
    return others.sum(1)


def _running_p_values(wrong: Bool[Tensor, "N"], rate: float) -> Float[Tensor, "N"]:
    """Pr{Bin(j, rate) ≤ W_j} for j = 1 … N, W_j the number of wrong ones among the first j.

    With b(j, w) = Pr{Bin(j, rate) = w}: one more right input subtracts rate·b(j, W), one more wrong input
    adds (1 − rate)·b(j, W + 1). So all N come from one cumulative sum.
    """
    wrong = wrong.cpu()
    before = torch.arange(len(wrong), dtype=torch.float64)
    count = wrong.double().cumsum(0)  # W_{j+1}: W + 1 after a wrong one, W after a right one
    # After wrong ones only, W + 1 > j and b = 0: the clamp keeps lgamma off its pole, the mask sets the zero.
    log_b = (
        torch.lgamma(before + 1)
        - torch.lgamma(count + 1)
        - torch.lgamma((before - count).clamp_min(0) + 1)
        + count * math.log(rate)
        + (before - count) * math.log1p(-rate)
    )
    b = torch.where(count <= before, log_b.exp(), 0.0)
    return 1 + torch.where(wrong, (1 - rate) * b, -rate * b).cumsum(0)


def error_bound(count: int, wrong: int, delta: float) -> float:
    """The p for which Pr{Bin(count, p) ≤ wrong} = delta: above it, so few wrong inputs would be surprising.

    The one-sided limit of Clopper and Pearson (1934), by bisection; 1 if all are wrong or there are none.
    """
    if wrong >= count:
        return 1.0
    w = torch.arange(wrong + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    log_choose = torch.lgamma(total + 1) - torch.lgamma(w + 1) - torch.lgamma(total - w + 1)
    low, high = wrong / count, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        log_terms = log_choose + w * math.log(middle) + (count - w) * math.log1p(-middle)
        if float(torch.logsumexp(log_terms, 0)) > math.log(delta):
            low = middle
        else:
            high = middle
    return high


# ---------------------------------------------------------------------------------------------------- conformal sets


@dataclass(frozen=True)
class ConformalRule:
    """Sets {m : E(x, m) ≤ threshold}, and the most likely class always; E is the score named by `score`."""

    threshold: float
    level: float
    score: str
    classes: int

    def sets(self, prediction: Any) -> Bool[Tensor, "B M"]:
        """Which classes are in the set of each input of a Prediction, or of PMFs (B, M). No set is empty."""
        pmf = _pmf(prediction)
        _require_classes(pmf, self.classes)
        inside = _scores(pmf, self.score) <= self.threshold
        return inside.scatter(1, pmf.argmax(1, keepdim=True), True)


def conformal(prediction: Any, labels: Any, *, level: float = 0.9, score: str = "aps") -> ConformalRule:
    """Sets of classes that contain the class with probability at least `level`, over the held-out data and the input.

    The threshold is the ⌈(N + 1) level⌉-th smallest score E(x_n, y_n) of N held-out inputs; if that rank is above N,
    every set contains all classes. The scores:
    - "aps": E(x, m) = Σ f̂ over the classes more likely than m: the smallest sets of most likely classes whose
      probability exceeds a common threshold. Larger where inputs are harder.
    - "lac": E(x, m) = 1 − f̂_m: the sets of the least average size, if the PMF is right.

    Neither is randomised, so the set of an input does not depend on other inputs. No set is empty, so where more than
    `level` of the inputs are classified correctly, more than `level` of the sets contain their class.

    Args:
        prediction: a Prediction of held-out inputs, or their PMFs (N, M).
        labels: their labels.
        level: the least probability that a set contains the class.
        score: "aps" or "lac".
    """
    pmf = _pmf(prediction)
    truth = checked_labels(labels, size=len(pmf), classes=pmf.shape[1], device=pmf.device)
    level = _share(level, "level")
    if score not in SCORES:
        raise ArgumentError(f"score is {score!r}; expected 'aps' or 'lac'.")
    # With the level as a decimal fraction: 100 · 0.55 in floating point is above 55, so its ceiling would be 56.
    rank = math.ceil((len(pmf) + 1) * Fraction(repr(level)))
    ascending = _scores(pmf, score).gather(1, truth[:, None])[:, 0].sort().values
    threshold = float(ascending[rank - 1]) if rank <= len(ascending) else math.inf
    return ConformalRule(threshold, level, score, pmf.shape[1])


def _scores(pmf: Float[Tensor, "B M"], score: str) -> Float[Tensor, "B M"]:
    if score == "lac":
        return 1 - pmf
    values, order = pmf.sort(dim=1, descending=True, stable=True)
    before = values.cumsum(1) - values
    before[:, 0] = 0
    return torch.empty_like(pmf).scatter_(1, order, before)


# ------------------------------------------------------------------------------------------------------------ checks


def _pmf(prediction: Any) -> Float[Tensor, "B M"]:
    """PMFs in float64 on the CPU, also from a Prediction."""
    return checked_pmf(prediction)


def _require_classes(pmf: Float[Tensor, "B M"], classes: int) -> None:
    if pmf.shape[1] != classes:
        raise MismatchError(
            f"The prediction has {pmf.shape[1]} classes; expected {classes}, as in the held-out data on which the rule "
            "was chosen."
        )


def _share(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ArgumentError(f"{name} is {value!r}; expected a number between 0 and 1.")
    return float(value)
