"""How good predicted PMFs are, given the labels: pure functions of (pmf, labels).

A PMF is a `Prediction`, a tensor, or anything else that `torch.as_tensor` takes, lists read in float64; all is computed
in float64, and plain numbers come back. PMFs of tokens (B, T, M) and of pixels (B, H, W, M) count position by position,
without those whose label is −100.

Functions whose names begin with `label_` are for several labels: the probabilities (N, L) that each is true, and labels
(N, L) of 0, 1 and −1 for a missing one, which does not count. Those of each label have NaN where it cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar._base.checks import whole_number
from errbar._base.ece_limits import ece_limits
from errbar._model.batch import checked_labels
from errbar._model.outputs import CLASSES, LABELS, OutputKind
from errbar._model.positions import IGNORE_INDEX
from errbar.errors import ArgumentError, DataError, LabelError


def accuracy(pmf: Any, labels: Any) -> float:
    """The share of inputs whose most likely class is the label."""
    probability, truth = _checked(pmf, labels)
    return float((probability.argmax(1) == truth).double().mean())


def log_likelihood(pmf: Any, labels: Any) -> float:
    """Σ_n ln f_{y_n}(x_n); minus infinity if the probability of a label is zero."""
    probability, truth = _checked(pmf, labels)
    return float(_of_label(probability, truth).log().sum())


def nll(pmf: Any, labels: Any) -> float:
    """−(1/N) Σ_n ln f_{y_n}(x_n)."""
    probability, truth = _checked(pmf, labels)
    return -float(_of_label(probability, truth).log().mean())


def brier(pmf: Any, labels: Any) -> float:
    """(1/N) Σ_n Σ_m (δ_{m,y_n} − f_m(x_n))²."""
    probability, truth = _checked(pmf, labels)
    target = torch.nn.functional.one_hot(truth, probability.shape[1])
    return float((target - probability).square().sum(1).mean())


@dataclass(frozen=True, eq=False)
class Reliability:
    """A reliability diagram: for each bin of confidence, how many inputs, their accuracy and mean confidence.

    Empty bins have accuracy and confidence NaN.
    """

    edges: Float[Tensor, "J+1"]
    count: Int[Tensor, "J"]
    accuracy: Float[Tensor, "J"]
    confidence: Float[Tensor, "J"]

    @property
    def gap(self) -> Float[Tensor, "J"]:
        """|acc(B_j) − conf(B_j)|, zero for empty bins."""
        return torch.where(self.count > 0, (self.accuracy - self.confidence).abs(), 0.0)


def reliability(pmf: Any, labels: Any, bins: int = 10) -> Reliability:
    """B_j = {n : (j−1)/J ≤ max_m f_m(x_n) < j/J}, the last bin closed at one."""
    probability, truth = _checked(pmf, labels)
    confidence, label = probability.max(1)
    bins = _whole(bins, "bins")
    edges, index = _binned(confidence, bins)
    count = torch.bincount(index, minlength=bins)
    correct = torch.bincount(index, weights=(label == truth).double(), minlength=bins)
    total = torch.bincount(index, weights=confidence, minlength=bins)
    return Reliability(edges, count, correct / count, total / count)


def ece(pmf: Any, labels: Any, bins: int = 10) -> float:
    """Σ_j (|B_j|/N) |acc(B_j) − conf(B_j)|: the expected calibration error as a fraction."""
    diagram = reliability(pmf, labels, bins)
    return float((diagram.count * diagram.gap).sum() / diagram.count.sum())


def ece_interval(
    pmf: Any, labels: Any, bins: int = 10, *, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """An interval for the ECE of the whole population of inputs, Σ_j w_j |acc_j − conf_j| in the same bins.

    By test inversion with binomial bins (`_base.ece_limits` has the rules): a value is inside if an ECE like that of
    these data is not a surprise where it is true, by `resamples` sets of labels drawn under it. The ECE itself is above
    what it estimates, by about the noise of its bins; so the interval reaches further down than up, and begins at 0
    where the labels could come from the PMF. Its coverage by simulation is in `docs/results/coverage.md`.
    """
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level < 1:
        raise ArgumentError(f"level is {level!r}; expected a number between 0 and 1, such as 0.95.")
    draws = _whole(resamples, "resamples")
    source = whole_number(seed)
    if source is None or not 0 <= source < 2**63:
        raise ArgumentError(f"seed is {seed!r}; expected a whole number of zero or more.")
    diagram = reliability(pmf, labels, bins)
    right = (diagram.accuracy * diagram.count).round()
    return ece_limits(diagram.count.double(), right, diagram.confidence, level=level, resamples=draws, seed=source)


def ece_literal(pmf: Any, labels: Any, bins: int = 10) -> float:
    """Σ_j (1/|B_j|) |acc(B_j) − conf(B_j)| over bins that are not empty: the formula as the paper prints it."""
    diagram = reliability(pmf, labels, bins)
    full = diagram.count > 0
    return float((diagram.gap[full] / diagram.count[full]).sum())


def aurc(pmf: Any, labels: Any) -> float:
    """The area under the risk–coverage curve: the mean error rate of the n most confident inputs, n = 1 … N.

    Inputs of equal confidence are taken in the order in which they come.
    """
    probability, truth = _checked(pmf, labels)
    confidence, label = probability.max(1)
    order = confidence.argsort(descending=True, stable=True)
    wrong = (label != truth)[order].double()
    return float((wrong.cumsum(0) / torch.arange(1, len(wrong) + 1, dtype=torch.float64)).mean())


def risk_coverage(pmf: Any, labels: Any, points: int | None = None) -> tuple[list[float], list[float]]:
    """The risk–coverage curve as (coverage, risk): the error rate of the n most confident inputs, against n/N.

    All N points of it, or so many, evenly spread; `aurc` is the mean of all. `errbar.plots.risk_coverage` draws it.
    """
    probability, truth = _checked(pmf, labels)
    confidence, label = probability.max(1)
    wrong = (label != truth)[confidence.argsort(descending=True, stable=True)].double()
    number = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    at = _spread(len(wrong), points)
    return (number / len(wrong))[at].tolist(), (wrong.cumsum(0) / number)[at].tolist()


def roc(scores: Any, positive: Any, points: int | None = None) -> tuple[list[float], list[float]]:
    """The ROC curve as (false-positive rates, true-positive rates), from (0, 0) to (1, 1); ties are one step.

    A point for each score that occurs, or so many, evenly spread along the curve; `auroc` is the area below all of
    them. `errbar.plots.roc` draws it.
    """
    values, flags = _checked_scores(scores, positive)
    order = values.argsort(descending=True)
    hits = flags[order].double()
    true, false = hits.cumsum(0) / hits.sum(), (1 - hits).cumsum(0) / (1 - hits).sum()
    # Compared, not subtracted: ∞ − ∞ is not zero.
    ordered = values[order]
    ends = torch.cat([ordered[1:] != ordered[:-1], torch.tensor([True])]).nonzero()[:, 0]
    at = ends[_spread(len(ends), points)]
    return [0.0, *false[at].tolist()], [0.0, *true[at].tolist()]


def auroc(scores: Any, positive: Any) -> float:
    """Pr{score of a positive > score of a negative} + ½ Pr{equal}: the area under the ROC curve."""
    values, flags = _checked_scores(scores, positive)
    positives, negatives = int(flags.sum()), int((~flags).sum())
    return float((_mean_rank(values)[flags].sum() - positives * (positives + 1) / 2) / (positives * negatives))


# --------------------------------------------------------------------------------------------------- several labels


def label_accuracy(probability: Any, labels: Any) -> float:
    """The share of given labels for which what is more probable, f > ½ or not, is true."""
    f, truth = _checked_of_labels(probability, labels)
    given = truth >= 0
    return float(((f > 0.5) == (truth == 1))[given].double().mean())


def label_nll(probability: Any, labels: Any, *, complement: Any = None) -> float:
    """−(1/G) Σ ln Pr{y_nl}, the mean over the G labels that are given, f_nl of true ones and 1 − f_nl of others.

    `complement` is 1 − f_nl with digits of its own, which is not rounded to zero where f_nl is rounded to one; that of
    a prediction is its own.
    """
    f, truth = _checked_of_labels(probability, labels)
    if complement is None:
        complement = getattr(probability, "complement", None)
    others = 1 - f if complement is None else _numbers(complement)
    if others.shape != f.shape or not bool(((others >= 0) & (others <= 1)).all()):
        raise DataError(
            f"complement has shape {tuple(others.shape)}, or is not all from 0 to 1; expected {tuple(f.shape)}, the "
            "probability that each label is false."
        )
    return -float(torch.where(truth == 1, f, others)[truth >= 0].log().mean())


def label_brier(probability: Any, labels: Any) -> float:
    """(1/G) Σ (y_nl − f_nl)², the mean over the labels that are given."""
    f, truth = _checked_of_labels(probability, labels)
    return float((truth - f)[truth >= 0].square().mean())


def label_ece(probability: Any, labels: Any, bins: int = 10) -> list[float]:
    """Of each label Σ_j (|B_j|/G) |mean of y − mean of f| over bins of f, the probability that the label is true.

    Unlike `ece`, which looks at the probability of what is more probable: here a label that is hardly ever true has
    most inputs in the first bin. NaN for a label that is never given.
    """
    f, truth = _checked_of_labels(probability, labels)
    count = _whole(bins, "bins")
    return [_ece_of_label(*pair, count) for pair in _given(f, truth)]


def label_auroc(probability: Any, labels: Any) -> list[float]:
    """Of each label the area under the ROC curve of f; NaN for one that is never true, or never false."""
    f, truth = _checked_of_labels(probability, labels)
    return [auroc(values, flags) if _has_both(flags) else math.nan for values, flags in _given(f, truth)]


def label_average_precision(probability: Any, labels: Any) -> list[float]:
    """Of each label Σ_k (R_k − R_{k−1}) P_k over falling thresholds, P_k the precision and R_k the recall at each.

    Equal probabilities are one threshold. NaN for a label that is never true.
    """
    f, truth = _checked_of_labels(probability, labels)
    return [_average_precision(values, flags) if bool(flags.any()) else math.nan for values, flags in _given(f, truth)]


def label_map(probability: Any, labels: Any) -> float:
    """The mean average precision: the mean of `label_average_precision` over the labels that are true somewhere."""
    each = [value for value in label_average_precision(probability, labels) if not math.isnan(value)]
    if not each:
        raise LabelError("No label is ever true; expected some that are 1.")
    return sum(each) / len(each)


def _given(
    f: Float[Tensor, "N L"], truth: Int[Tensor, "N L"]
) -> Iterator[tuple[Float[Tensor, "n"], Bool[Tensor, "n"]]]:
    """Of each label the probabilities of the inputs for which it is given, and whether it is true there."""
    for column in range(f.shape[1]):
        given = truth[:, column] >= 0
        yield f[given, column], truth[given, column] == 1


def _has_both(flags: Bool[Tensor, "n"]) -> bool:
    return bool(flags.any()) and not bool(flags.all())


def _ece_of_label(f: Float[Tensor, "n"], flags: Bool[Tensor, "n"], bins: int) -> float:
    if not len(f):
        return math.nan
    _, index = _binned(f, bins)
    gap = torch.bincount(index, weights=flags.double() - f, minlength=bins)
    return float(gap.abs().sum() / len(f))


def _average_precision(f: Float[Tensor, "n"], flags: Bool[Tensor, "n"]) -> float:
    order = f.argsort(descending=True)
    values, hits = f[order], flags[order].double().cumsum(0)
    ends = torch.cat([values[1:] != values[:-1], torch.tensor([True])]).nonzero()[:, 0]
    hits_there = hits[ends]
    precision = hits_there / (ends + 1)
    return float((hits_there.diff(prepend=torch.zeros(1, dtype=torch.float64)) * precision).sum() / hits[-1])


def _checked_of_labels(probability: Any, labels: Any) -> tuple[Float[Tensor, "N L"], Int[Tensor, "N L"]]:
    inner = getattr(probability, "pmf", None)
    if _kind_of(probability).has_gauge and isinstance(inner, Tensor):
        raise DataError(
            "This prediction is of one of several classes; expected probabilities of several labels, as predict gives "
            "them after outputs='labels'. Use metrics without label_ in their names."
        )
    try:
        f = _numbers(inner if isinstance(inner, Tensor) else probability)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Probabilities are a {type(probability).__name__} that is not a matrix of numbers; expected a prediction "
            "of several labels, or probabilities (inputs, labels)."
        ) from error
    if f.ndim != 2 or 0 in f.shape or not bool(((f >= 0) & (f <= 1)).all()):
        raise DataError(
            f"Probabilities have shape {tuple(f.shape)}, or are not all from 0 to 1; expected (inputs, labels), the "
            "probability that each label is true."
        )
    truth = LABELS.labels_of(labels, size=len(f), columns=f.shape[1], device=f.device)
    if not bool((truth >= 0).any()):
        raise LabelError("All labels are missing (−1); expected some that are 0 or 1.")
    return f, truth


def _kind_of(prediction: Any) -> OutputKind:
    kind = getattr(getattr(prediction, "sampler", None), "kind", CLASSES)
    return kind if isinstance(kind, OutputKind) else CLASSES


def _spread(count: int, points: int | None) -> Int[Tensor, "K"]:
    """Indices of all `count` points, or of `points` of them, evenly spread and including the last one."""
    target = count if points is None else whole_number(points)
    if target is None or (points is not None and target < 2):
        raise ArgumentError(f"points is {points!r}; expected a whole number of two or more, or None for all.")
    target = min(target, count)
    return torch.linspace(0, count - 1, target, dtype=torch.float64).round().long()


def _checked_scores(scores: Any, positive: Any) -> tuple[Float[Tensor, "N"], Bool[Tensor, "N"]]:
    try:
        values, flags = _numbers(scores), torch.as_tensor(positive).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"Scores are a {type(scores).__name__} and flags a {type(positive).__name__}, one of them no vector of "
            "numbers; expected a score and True or False for each input."
        ) from error
    if values.ndim != 1 or flags.shape != values.shape:
        raise DataError(
            f"Scores of shape {tuple(values.shape)} and flags of shape {tuple(flags.shape)}; expected two vectors of "
            "equal length."
        )
    if bool(values.isnan().any()):
        raise DataError("Scores hold NaN; expected numbers.")
    flags = flags.bool()
    positives, negatives = int(flags.sum()), int((~flags).sum())
    if positives == 0 or negatives == 0:
        raise LabelError(f"There are {positives} positives and {negatives} negatives; expected some of each.")
    return values, flags


def _binned(confidence: Float[Tensor, "N"], bins: int) -> tuple[Float[Tensor, "edges"], Int[Tensor, "N"]]:
    """The edges of the bins, and the bin of each input."""
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    return edges, (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)


def _whole(value: object, name: str) -> int:
    """A count of one or more, also NumPy's."""
    number = whole_number(value)
    if number is None or number < 1:
        raise ArgumentError(f"{name} is {value!r}; expected a whole number of one or more.")
    return number


def _mean_rank(values: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Ranks 1 … N, ties sharing the mean of theirs."""
    _, group, count = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    ranks: Tensor = (last - (count - 1) / 2)[group]
    return ranks


def _of_label(probability: Float[Tensor, "N M"], truth: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    return probability.gather(1, truth[:, None])[:, 0]


def _numbers(values: Any) -> Float[Tensor, "*shape"]:
    """Numbers of any kind in float64 on the CPU: `torch.as_tensor` alone rounds those of lists to float32."""
    if isinstance(values, (list, tuple)) and any(isinstance(row, (Tensor, np.ndarray)) for row in values):
        return torch.stack([_numbers(row) for row in values])
    if not isinstance(values, Tensor) and hasattr(values, "__array__"):
        values = np.asarray(values)
    is_complex = values.is_complex() if isinstance(values, Tensor) else np.iscomplexobj(values)
    if is_complex:
        raise TypeError("complex numbers")
    if isinstance(values, Tensor):
        return values.detach().cpu().double()
    return torch.tensor(values, dtype=torch.float64)


def checked_pmf(pmf: Any) -> Float[Tensor, "N M"]:
    """PMFs in float64 on the CPU, also from a prediction; raises `DataError` for anything else."""
    # A Prediction imports this module, so it is recognised by its attribute.
    inner = getattr(pmf, "pmf", None)
    if not _kind_of(pmf).has_gauge:
        raise DataError(
            f"This prediction is of outputs='{_kind_of(pmf).name}', whose probabilities are no PMF; expected one of "
            "outputs='classes'. The metrics of labels have label_ in their names."
        )
    try:
        probability = _numbers(inner if isinstance(inner, Tensor) else pmf)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"PMFs are a {type(pmf).__name__} that is not a matrix of numbers; expected a Prediction, or probabilities "
            "(inputs, classes)."
        ) from error
    if probability.ndim != 2 or probability.shape[0] == 0 or probability.shape[1] < 2:
        raise DataError(
            f"PMFs have shape {tuple(probability.shape)}; expected (inputs, classes): one input or more, two "
            "classes or more."
        )
    if not _is_pmf(probability):
        raise DataError("PMFs must be zero or more and sum to one in each row; pass probabilities, not logits.")
    return probability


def _checked(pmf: Any, labels: Any) -> tuple[Float[Tensor, "N M"], Int[Tensor, "N"]]:
    pmf, labels = _by_position(pmf, labels)
    probability = checked_pmf(pmf)
    return probability, checked_labels(
        labels, size=len(probability), classes=probability.shape[1], device=probability.device
    )


def _by_position(pmf: Any, labels: Any) -> tuple[Any, Any]:
    """PMFs of tokens (B, T, M) or pixels (B, H, W, M) as rows, with their labels, of those that have a label."""
    inner = getattr(pmf, "pmf", pmf)
    if getattr(inner, "ndim", 2) not in (3, 4) or getattr(labels, "ndim", 1) < 2:
        return pmf, labels
    rows = _numbers(inner).flatten(0, -2)
    truth = torch.as_tensor(labels).detach().cpu()
    if tuple(truth.shape) != tuple(inner.shape[:-1]):
        raise LabelError(
            f"Labels have shape {tuple(truth.shape)}; expected {tuple(inner.shape[:-1])}, one class number for each "
            f"position, or {IGNORE_INDEX} where there is none."
        )
    # A prediction knows what its posterior ignores; where there are PMFs alone, it is what torch ignores.
    ignored = getattr(pmf, "ignore_index", IGNORE_INDEX)
    named = ((truth != ignored) & (truth != IGNORE_INDEX)).flatten()
    if not bool(named.any()):
        raise LabelError(f"No position has a label; expected some other than {ignored}.")
    return rows[named], truth.flatten()[named]


def _is_pmf(probability: Float[Tensor, "N M"]) -> bool:
    valid: Bool[Tensor, ""] = (probability >= 0).all() & ((probability.sum(1) - 1).abs() < 1e-3).all()
    return bool(valid)
