"""Inputs about which the training data say little, and labels that the model finds implausible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._base.execution import plain_execution
from errbar._base.progress import track
from errbar._curvature.fisher import Fisher, fisher_product, fisher_root
from errbar._distributions.covariance import DrawnCovariance, FullCovariance, drawn
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import BLOCK_BYTES, require_samples
from errbar._model.batch import Unpack, batches, checked_labels, count_batches
from errbar._posterior.posterior import Posterior, require_posterior
from errbar._posterior.pushing import FEW_CLASSES, affordable_draws
from errbar.errors import ArgumentError, CovarianceError, DataError, LabelError

_NOT_IN_THE_FIT = (
    "An input holds more information than the whole fit, so it was not part of the fit and cannot be left out of it. "
    "Pass leave_out=False for data that the network was not trained on."
)
# Bytes of the matrices of draws that are made at a time.
_DRAWN_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class OutlierScores:
    """Scores of N inputs, in the order of the data; higher is more suspicious.

    - `mutual_information`: how much the class depends on which parameters are right, in nats;
    - `contrast_variance`: the mean variance of the logits' contrasts, the part of P^g that softmax can see;
    - `label_suspicion`: −ln of the probability of the label had this input not been in the fit, in nats, finite even
      where that probability would underflow; None if the data have no labels.
    """

    mutual_information: Float[Tensor, "N"]
    contrast_variance: Float[Tensor, "N"]
    label_suspicion: Float[Tensor, "N"] | None

    def ranking(self, by: str) -> Int[Tensor, "N"]:
        """Indices into the data, the most suspicious first."""
        if by not in ("mutual_information", "contrast_variance", "label_suspicion"):
            raise ArgumentError(
                f"by is {by!r}; expected 'mutual_information', 'contrast_variance' or 'label_suspicion'."
            )
        scores: Tensor | None = getattr(self, by)
        if scores is None:
            raise LabelError("Ranking by label suspicion needs labels; expected batches (x, labels).")
        return scores.argsort(descending=True, stable=True)


def outlier_scores(
    posterior: Posterior,
    data: Any,
    *,
    leave_out: bool = True,
    samples: int = 1000,
    seed: int = 0,
    unpack: Unpack | None = None,
    progress: bool = False,
) -> OutlierScores:
    """Scores of each input of `data`, in order.

    `leave_out` says that the data were part of the fit: the label's own influence on the network is then removed
    before its suspicion is computed, so that a memorised wrong label does not support itself. Set it to False for
    data that the network was not trained on. With M > 100 classes there are at most 100,000/M `samples`, or 100
    where that is more, and nothing of size M × M is made for an input.
    """
    require_posterior(posterior, "outlier_scores")
    plain, calibration = posterior.uncalibrated(), posterior.calibration
    samples = affordable_draws(posterior.information.n_classes, require_samples(samples))
    information, variance, suspicion = [], [], []
    for batch in track(
        batches(data, unpack or posterior.unpack), "Scoring", total=count_batches(data), enabled=progress
    ):
        gaussian = plain.sampling_logits(batch, samples, seed)
        calibrated = gaussian.calibrated(calibration)
        prediction = calibrated.predict(samples, seed)
        information.append(prediction.mutual_information)
        variance.append(calibrated.contrast_variance)
        if batch.labels is not None:
            size, classes = gaussian.mean.shape
            labels = checked_labels(batch.labels, size=size, classes=classes, device=gaussian.mean.device)
            if leave_out:
                if classes > FEW_CLASSES and not isinstance(gaussian.form, FullCovariance):
                    gaussian = LogitGaussian(gaussian.mean, drawn(gaussian.form, samples, seed))
                calibrated = without_own_label(gaussian, labels, posterior.information.fisher).calibrated(calibration)
            suspicion.append(_label_suspicion(calibrated, labels, samples, seed))
    if not information:
        raise DataError("The data are empty: expected at least one batch.")
    has_labels = len(suspicion) == len(information)
    return OutlierScores(torch.cat(information), torch.cat(variance), torch.cat(suspicion) if has_labels else None)


def _label_suspicion(gaussian: LogitGaussian, labels: Int[Tensor, "B"], samples: int, seed: int) -> Float[Tensor, "B"]:
    """−ln f̂_y = ln K − ln Σ_k exp(ln softmax(g⁽ᵏ⁾)_y), with the draws of `predict`.

    The probability of a label that the model considers impossible underflows to zero, whose logarithm would not say
    which of such labels is more suspicious; computed directly, the logarithm is finite.
    """
    root = gaussian.sampling_root()
    normal = root.draws(require_samples(samples), seed, gaussian.mean)
    suspicion = torch.empty(len(gaussian), dtype=torch.float64, device=gaussian.mean.device)
    # As many inputs at a time as for a prediction.
    row_bytes = 8 * gaussian.mean.shape[1] * normal.shape[1]
    size = max(1, BLOCK_BYTES.get(suspicion.device.type, 2**21) // row_bytes)
    with plain_execution(suspicion.device):
        for start in range(0, len(gaussian), size):
            rows = slice(start, start + size)
            logits = gaussian.mean[rows].double()[:, :, None] + root.spread(rows, normal)
            label = labels[rows, None, None].expand(-1, 1, normal.shape[1])
            of_label = torch.log_softmax(logits, 1).gather(1, label)[:, 0]
            suspicion[rows] = math.log(normal.shape[1]) - torch.logsumexp(of_label, 1)
    # Rounding may take the suspicion of a certain label below zero.
    return suspicion.clamp_min(0).to(gaussian.mean.dtype)


def rank_outliers(
    posterior: Posterior, data: Any, *, by: str = "mutual_information", **options: Any
) -> Int[Tensor, "N"]:
    """Indices into `data`, the most suspicious first; `options` are those of `outlier_scores`."""
    return outlier_scores(posterior, data, **options).ranking(by)


def without_own_label(gaussian: LogitGaussian, labels: Int[Tensor, "B"], fisher: Fisher = "ggn") -> LogitGaussian:
    """The logits of each training input as they would be, to first order, had it not been in the fit.

    Taking out its information JᵀΛJ is the recursion of eq:recUpdate_all backwards, seen from the logits,
        P₋ = P^g + P^g R (I − RᵀP^gR)⁻¹ RᵀP^g,   Λ = R Rᵀ,
    and one Newton step from θ̂ without its likelihood moves them to ĝ₋ = ĝ + P₋ (f − e_y).
    """
    if isinstance(gaussian.form, DrawnCovariance):
        return _without_own_label_by_draws(gaussian.mean, gaussian.form, labels, fisher)
    covariance = gaussian.covariance.double()
    mean = gaussian.mean.double()
    # What was drawn for the input is known only on average, and that is Λ itself.
    root = fisher_root(mean, "ggn" if fisher == "sampled" else fisher)
    half = root.mT @ covariance
    remainder = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device) - linalg.symmetric(half @ root)
    try:
        lower, _ = linalg.safe_cholesky(remainder, name="I − RᵀP^gR", limit=1e-4)
    except CovarianceError as cause:
        raise DataError(_NOT_IN_THE_FIT) from cause
    half = linalg.solve_lower(lower, half)
    wider = linalg.symmetric(covariance + half.mT @ half)
    target = torch.nn.functional.one_hot(labels, mean.shape[1]).to(mean)
    error = torch.softmax(mean, 1) - target
    shifted_mean = mean + (wider @ error[..., None])[..., 0]
    return LogitGaussian(shifted_mean.to(gaussian.mean), FullCovariance(wider))


def _without_own_label_by_draws(
    mean: Float[Tensor, "B M"], form: DrawnCovariance, labels: Int[Tensor, "B"], fisher: Fisher
) -> LogitGaussian:
    """The same by draws, P^g = A Aᵀ with A = D/√K, and matrices of K × K alone:

        P₋ = A (I − AᵀΛA)⁻¹ Aᵀ,   D₋ = D (I − AᵀΛA)^−½.

    The eigenvalues h of AᵀΛA, how much an input says about itself, are below one; K draws know them to about √(2/K)
    of themselves. So they are limited to 1 − √(2/K), and an h that is more than six times that above one is refused.
    """
    error = math.sqrt(2 / form.draws)
    size = max(1, _DRAWN_BYTES // (8 * form.draws * (form.draws + mean.shape[1])))
    means, deviations = [], []
    for start in range(0, len(mean), size):
        rows = slice(start, start + size)
        logits, own = mean[rows].double(), form.deviations[rows].double()
        probability = torch.softmax(logits, 1)
        weighted = fisher_product(logits, own, "ggn" if fisher == "sampled" else fisher)
        values, vectors = linalg.eigenvectors(own.mT @ weighted / form.draws, name="The draws of the logits")
        if bool((values > 1 + 6 * error).any()):
            raise DataError(_NOT_IN_THE_FIT)
        stretch = (1 - values.clamp(0, max(1 - error, 0.5))).rsqrt()
        wider = own @ (vectors * stretch[:, None, :]) @ vectors.mT
        residual = probability - torch.nn.functional.one_hot(labels[rows], mean.shape[1])
        means.append(logits + (wider @ (wider.mT @ residual[..., None]))[..., 0] / form.draws)
        deviations.append(wider.to(form.deviations.dtype))
    return LogitGaussian(torch.cat(means).to(mean), DrawnCovariance(torch.cat(deviations)))
