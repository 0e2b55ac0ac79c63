"""Scores of each variant with intervals, class by class, and the effect of T and T_c."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar.report.observing import AFTER, BEFORE, NETWORK, Observation
from errbar.report.resampling import means, share, shares
from errbar.report.values import Bin, ClassRow, Curve, Estimate, Histogram, ScaleCurves, ScaleEffect, Variant

NAMES = {
    NETWORK: "network alone",
    BEFORE: "with error bars, uncalibrated",
    AFTER: "with error bars, calibrated",
}
_HISTOGRAM_BINS = 20
_CURVE_POINTS = 120
# The curves over T and T_c: draws, values on each side of the one in use, and the factors at the ends.
_CURVE_SAMPLES = 200
_STEPS = 7
_TEMPERATURES, _SCALES = 3.0, 100.0
# The ridge takes the square of the evaluations: with more classes than this it would take minutes.
_RIDGE_CLASSES = 100


def variants(observation: Observation, bins: int, seed: int, *, are_labels: bool = False) -> tuple[Variant, ...]:
    """The network alone, with error bars and, where it has a calibration, calibrated.

    Where decisions `are_labels`, the Brier score is (y − f)² as in `metrics.label_brier`, half of the sum over false
    and true.
    """
    names = dict(NAMES)
    if AFTER not in observation.pmfs:
        names[BEFORE] = "with error bars"
    share_of_brier = 0.5 if are_labels else 1.0
    return tuple(
        _variant(key, names[key], pmf, observation, bins, seed, share_of_brier) for key, pmf in observation.pmfs.items()
    )


def _variant(
    key: str,
    name: str,
    pmf: Float[Tensor, "N M"],
    observation: Observation,
    bins: int,
    seed: int,
    share_of_brier: float = 1.0,
) -> Variant:
    labels, inputs = observation.labels, observation.inputs
    confidence, label = pmf.double().max(1)
    right = (label == labels).double()
    columns = [confidence - right, -of_label(pmf, labels).log(), share_of_brier * squared_error(pmf, labels)]
    gap, *scores = means(torch.stack(columns, 1), seed, inputs)
    # Neither score can be negative, though with few inputs the interval of a mean can.
    nll, brier = (replace(one, low=max(one.low, 0.0)) for one in scores)
    # The interval of the ECE is that of bins of independent inputs.
    low, high = (math.nan, math.nan) if inputs is not None else metrics.ece_interval(pmf, labels, bins, seed=seed)
    reliability = metrics.reliability(pmf, labels, bins)
    return Variant(
        key=key,
        name=name,
        confidence=float(confidence.mean()),
        accuracy=share(float(right.sum()), len(right)) if inputs is None else means(right[:, None], seed, inputs)[0],
        gap=gap,
        nll=nll,
        brier=brier,
        ece=Estimate(metrics.ece(pmf, labels, bins), low, high),
        aurc=metrics.aurc(pmf, labels),
        diagram=_diagram(reliability, _of_bins(reliability, confidence, right, inputs, seed)),
        histogram=_histogram(confidence, right),
        risk_coverage=_curve(metrics.risk_coverage(pmf, labels, _CURVE_POINTS)),
    )


def of_label(pmf: Float[Tensor, "N M"], labels: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """The predicted probability of each label."""
    return pmf.double().gather(1, labels[:, None])[:, 0]


def squared_error(pmf: Float[Tensor, "N M"], labels: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Σ_m (δ_{m,y_n} − f_m(x_n))² of each input, without a one-hot matrix."""
    probability = pmf.double()
    return probability.square().sum(1) - 2 * of_label(pmf, labels) + 1


def _of_bins(
    values: metrics.Reliability,
    confidence: Float[Tensor, "N"],
    right: Float[Tensor, "N"],
    inputs: Int[Tensor, "N"] | None,
    seed: int,
) -> list[Estimate]:
    """The accuracy of each bin with its interval."""
    counts, accuracies = [int(count) for count in values.count], values.accuracy.tolist()
    if inputs is None:
        pairs = zip(counts, accuracies, strict=True)
        return [share(accuracy * count if count else 0, count) for count, accuracy in pairs]
    index = (torch.bucketize(confidence, values.edges, right=True) - 1).clamp(0, len(counts) - 1)
    inside = torch.nn.functional.one_hot(index, len(counts)).double()
    found = shares(inside * right[:, None], inside, inputs, seed)
    return [Estimate(one.value, max(0.0, one.low), min(1.0, one.high)) for one in found]


def _diagram(values: metrics.Reliability, accuracies: Sequence[Estimate]) -> tuple[Bin, ...]:
    edges, counts = values.edges.tolist(), [int(count) for count in values.count]
    confidences = values.confidence.tolist()
    return tuple(
        Bin(low, high, count, accuracy, confidence)
        for low, high, count, accuracy, confidence in zip(
            edges[:-1], edges[1:], counts, accuracies, confidences, strict=True
        )
    )


def _histogram(confidence: Float[Tensor, "N"], right: Float[Tensor, "N"]) -> Histogram:
    index = (confidence * _HISTOGRAM_BINS).long().clamp(0, _HISTOGRAM_BINS - 1)
    count = torch.bincount(index, minlength=_HISTOGRAM_BINS)
    wrong = torch.bincount(index, 1 - right, _HISTOGRAM_BINS)
    return Histogram(tuple(count.tolist()), tuple(int(number) for number in wrong.tolist()))


def _curve(points: tuple[list[float], list[float]]) -> Curve:
    return Curve(tuple(points[0]), tuple(points[1]))


def class_rows(
    pmf: Float[Tensor, "N M"], labels: Int[Tensor, "N"], std: Float[Tensor, "N"], names: Sequence[str]
) -> tuple[ClassRow, ...]:
    """One row for each class that occurs, as a label or as a prediction."""
    confidence, prediction = pmf.double().max(1)
    rows = []
    for number in range(pmf.shape[1]):
        is_label, is_prediction = labels == number, prediction == number
        if not (is_label.any() or is_prediction.any()):
            continue
        hits = int((is_label & is_prediction).sum())
        others = torch.bincount(prediction[is_label & ~is_prediction], minlength=pmf.shape[1])
        worst = int(others.argmax())
        inputs, predictions = int(is_label.sum()), int(is_prediction.sum())
        rows.append(
            ClassRow(
                number=number,
                name=names[number],
                inputs=inputs,
                predicted=predictions,
                recall=hits / inputs if inputs else math.nan,
                precision=hits / predictions if predictions else math.nan,
                confidence=float(confidence[is_prediction].mean()) if predictions else math.nan,
                std=float(std[is_prediction].mean()) if predictions else math.nan,
                confused_with=f"{names[worst]} ({int(others[worst])})" if int(others[worst]) else None,
            )
        )
    return tuple(rows)


# ------------------------------------------------------------------------------------------------------ T and T_c


def scale_effect(
    observation: Observation, logits: Float[Tensor, "N M"], std: Float[Tensor, "N"], seed: int
) -> ScaleEffect:
    """The posterior against plain temperature scaling with the best T for these data; see `ScaleEffect`."""
    labels = observation.labels
    T = best_temperature(logits, labels)
    plain = torch.log_softmax(logits.double() / T, 1).gather(1, labels[:, None])[:, 0]
    gain = of_label(observation.final, labels).log() - plain
    return ScaleEffect(T, means(gain[:, None], seed, observation.inputs)[0], float(std.mean()))


def best_temperature(logits: Float[Tensor, "N M"], labels: Int[Tensor, "N"]) -> float:
    """argmin_T −Σ ln softmax(ĝ/T)_y, by golden section in ln T between 0.01 and 100: in 1/T it is convex."""
    precise_logits = logits.double()

    def loss(logarithm: float) -> float:
        return float(torch.nn.functional.cross_entropy(precise_logits / math.exp(logarithm), labels))

    low, high = math.log(1e-2), math.log(1e2)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if loss(left) <= loss(right) else (left, high)
    return math.exp((low + high) / 2)


def scale_curves(pairs: Sequence[tuple[LogitGaussian, int]], calibration: Calibration, seed: int) -> ScaleCurves:
    """NLL of these inputs as T and T_c vary around the values in use, all with the same draws and softening."""
    temperature, covariance_scale, softening = vars(calibration).values()
    gaussian = LogitGaussian.concatenated([one for one, _ in pairs])
    labels = torch.tensor([label for _, label in pairs], device=gaussian.mean.device)

    def nll(T: float, scale: float) -> float:
        pmf = gaussian.calibrated(Calibration(T, scale, softening)).predict(_CURVE_SAMPLES, seed).pmf
        return -float(of_label(pmf, labels).log().mean())

    temperatures = _around(temperature, _TEMPERATURES)
    # T_c = 0 cannot be shown on a logarithmic axis: then the curve is around T_c = 1.
    scales = _around(covariance_scale or 1.0, _SCALES)
    ridge = None
    if gaussian.mean.shape[1] <= _RIDGE_CLASSES:
        ridge = Curve(scales, tuple(min(nll(T, scale) for T in temperatures) for scale in scales))
    return ScaleCurves(
        inputs=len(pairs),
        temperature=temperature,
        covariance_scale=covariance_scale,
        softening=softening,
        by_temperature=Curve(temperatures, tuple(nll(T, covariance_scale) for T in temperatures)),
        without_covariance=Curve(temperatures, tuple(nll(T, 0.0) for T in temperatures)),
        by_scale=Curve(scales, tuple(nll(temperature, scale) for scale in scales)),
        ridge=ridge,
    )


def _around(middle: float, factor: float) -> tuple[float, ...]:
    """Values from middle/factor to middle·factor, evenly in the logarithm, with the middle among them."""
    return tuple(middle * factor ** (step / _STEPS) for step in range(-_STEPS, _STEPS + 1))
