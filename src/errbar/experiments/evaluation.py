"""From PMFs to numbers: scores, intervals, reliability, outliers, shift, paired differences. All JSON-ready."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar._base.progress import track
from errbar._distributions.logits import LogitGaussian
from errbar.experiments.methods import Method
from errbar.experiments.problem import Problem
from errbar.experiments.shifts import Shift

# Two-sided 95 % quantiles of Student's t with 1, 2, … degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def scores(pmf: Float[Tensor, "N M"], labels: Int[Tensor, " N"]) -> dict[str, Any]:
    """The paper's measures and more; ECE in per cent."""
    return {
        "accuracy": metrics.accuracy(pmf, labels),
        "log_likelihood": metrics.log_likelihood(pmf, labels),
        "nll": metrics.nll(pmf, labels),
        "brier": metrics.brier(pmf, labels),
        "ece": 100 * metrics.ece(pmf, labels),
        "ece_interval": [100 * bound for bound in metrics.ece_interval(pmf, labels)],
        "ece_literal": metrics.ece_literal(pmf, labels),
        "aurc": metrics.aurc(pmf, labels),
        "accuracy_at_90": accuracy_at(pmf, labels, 0.9),
    }


def accuracy_at(pmf: Float[Tensor, "N M"], labels: Int[Tensor, " N"], coverage: float) -> float:
    """The accuracy on the most confident share of the inputs."""
    rows = pmf.amax(1).argsort(descending=True, stable=True)[: math.ceil(coverage * len(pmf))]
    return metrics.accuracy(pmf[rows], labels[rows])


def reliability(pmf: Float[Tensor, "N M"], labels: Int[Tensor, " N"]) -> dict[str, list[float | None]]:
    diagram = metrics.reliability(pmf, labels)

    def listed(values: Tensor) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values.tolist()]

    return {name: listed(getattr(diagram, name)) for name in ("count", "accuracy", "confidence")}


def evaluate(
    methods: Mapping[str, Method], problem: Problem, *, title: str = "Evaluating", progress: bool = False
) -> dict[str, Any]:
    """All of one run: each method on the test data, the outliers and the shifted test data."""
    test = problem.test
    result: dict[str, Any] = {"scores": {}, "reliability": {}, "cost": {}, "outliers": {}, "roc": {}, "shift": {}}
    for key, method in track(list(methods.items()), f"{title}: evaluating", enabled=progress):
        outcome = method(test.x)
        result["scores"][key] = {**scores(outcome.pmf, test.y), "fitted": method.fitted}
        result["reliability"][key] = reliability(outcome.pmf, test.y)
        result["cost"][key] = {"prepare_seconds": method.seconds, "predict_seconds": _seconds(method, test.x)}
        inside = outcome.outlier_scores()
        for name, foreign in problem.outliers.items():
            outside = method(foreign).outlier_scores()
            for score, values in inside.items():
                both = torch.cat([values, outside[score]]).cpu()
                positive = torch.arange(len(both)) >= len(values)
                area = metrics.auroc(both, positive)
                result["outliers"].setdefault(name, {}).setdefault(score, {})[key] = area
                result["roc"].setdefault(name, {})[f"{key} · {score}"] = {**roc(both, positive), "auroc": area}
    for shift in problem.shifts:
        result["shift"][shift.kind] = _under_shift(methods, problem, shift, title=title, progress=progress)
    return result


def _under_shift(
    methods: Mapping[str, Method], problem: Problem, shift: Shift, *, title: str, progress: bool
) -> dict[str, Any]:
    """NLL, ECE and accuracy of each method at each severity; the shifted data are made once for all methods."""
    labels = problem.test.y
    rows: dict[str, Any] = {measure: {key: [] for key in methods} for measure in ("nll", "ece", "accuracy")}
    for severity in track(shift.severities, f"{title}: {shift.kind}", enabled=progress):
        shifted = shift.apply(problem.test.x, severity)
        for key, method in methods.items():
            pmf = method(shifted).pmf
            rows["nll"][key].append(metrics.nll(pmf, labels))
            rows["ece"][key].append(100 * metrics.ece(pmf, labels))
            rows["accuracy"][key].append(metrics.accuracy(pmf, labels))
    return {"severity": list(shift.severities), **rows}


def roc(values: Float[Tensor, "N"], positive: Tensor, points: int = 100) -> dict[str, list[float]]:
    """About `points` points of the curve, from (0, 0) to (1, 1), for files."""
    false, true = metrics.roc(values, positive, points)
    return {"fpr": [round(rate, 5) for rate in false], "tpr": [round(rate, 5) for rate in true]}


def _seconds(method: Method, x: Tensor) -> float:
    """The second of two calls on at most 2000 inputs, per input: the first may prepare."""
    part = x[:2000]
    method(part)
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    method(part)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(part)


def paired(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Mean of first − second over the seeds and its 95 % interval by Student's t; none for a single seed."""
    difference = torch.tensor(first, dtype=torch.float64) - torch.tensor(second, dtype=torch.float64)
    mean, count = float(difference.mean()), len(difference)
    if count < 2:
        return {"mean": mean, "interval": None}
    quantile = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96
    half = quantile * float(difference.std()) / math.sqrt(count)
    return {"mean": mean, "interval": [mean - half, mean + half]}


def contrasting(gaussian: LogitGaussian, pmf: Float[Tensor, "N M"]) -> tuple[int, int, int]:
    """A certain input, then two ambiguous ones with similar PMFs, of which the first has the more uncertain logits.

    Ambiguous: confidence below 0.7. Similar: the sorted PMFs differ by at most 0.05 in total variation. Of
    all such pairs the one with the largest ratio of σ of g_i − g_j, i and j the two best classes of each;
    without any such pair, the most similar one.
    """
    confidence = pmf.amax(1)
    i, j = pmf.topk(2).indices.unbind(1)
    rows, P = torch.arange(len(pmf), device=pmf.device), gaussian.covariance
    sigma = (P[rows, i, i] + P[rows, j, j] - 2 * P[rows, i, j]).clamp_min(1e-12).sqrt()
    ambiguous = (confidence < 0.7).nonzero()[:, 0]
    if len(ambiguous) < 2:
        ambiguous = confidence.argsort()[:2]
    profile = pmf[ambiguous].sort(descending=True).values
    distance = (profile[:, None] - profile[None]).abs().sum(-1) / 2 + torch.eye(len(ambiguous), device=pmf.device)
    allowed = distance <= max(0.05, float(distance.min()))
    ratio = sigma[ambiguous][:, None] / sigma[ambiguous][None]
    uncertain, certain = divmod(int(torch.where(allowed, ratio, 0.0).argmax()), len(ambiguous))
    return int(confidence.argmax()), int(ambiguous[uncertain]), int(ambiguous[certain])
