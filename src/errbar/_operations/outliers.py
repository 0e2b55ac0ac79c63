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
from errbar._curvature.fisher import Fisher, fisher_root
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import BLOCK_BYTES, require_samples, standard_normal
from errbar._model.batch import Unpack, batches, checked_labels, count_batches
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import ArgumentError, CovarianceError, DataError, LabelError


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
    data that the network was not trained on.
    """
    require_posterior(posterior)
    plain, calibration = posterior.uncalibrated(), posterior.calibration
    information, variance, suspicion = [], [], []
    for batch in track(
        batches(data, unpack or posterior.unpack), "Scoring", total=count_batches(data), enabled=progress
    ):
        gaussian = plain.unrounded_logits(batch)
        calibrated = gaussian.calibrated(calibration)
        prediction = calibrated.predict(samples, seed)
        information.append(prediction.mutual_information)
        variance.append(calibrated.contrast_variance)
        if batch.labels is not None:
            size, classes = gaussian.mean.shape
            labels = checked_labels(batch.labels, size=size, classes=classes, device=gaussian.mean.device)
            if leave_out:
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
    root = gaussian.sampling_root().whole()
    normal = standard_normal(require_samples(samples), root.shape[-1], seed, gaussian.mean).T.double()
    suspicion = torch.empty(len(gaussian), dtype=torch.float64, device=gaussian.mean.device)
    # As many inputs at a time as for a prediction.
    row_bytes = 8 * gaussian.mean.shape[1] * normal.shape[1]
    size = max(1, BLOCK_BYTES.get(suspicion.device.type, 2**21) // row_bytes)
    with plain_execution(suspicion.device):
        for start in range(0, len(gaussian), size):
            rows = slice(start, start + size)
            mean, spread = gaussian.mean[rows].double(), root[rows].double()
            deviations = spread[:, :, None] * normal if spread.ndim == 2 else spread @ normal
            logits = mean[:, :, None] + deviations
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
    covariance = gaussian.covariance.double()
    mean = gaussian.mean.double()
    # What was drawn for the input is known only on average, and that is Λ itself.
    root = fisher_root(mean, "ggn" if fisher == "sampled" else fisher)
    half = root.mT @ covariance
    remainder = torch.eye(mean.shape[1], dtype=torch.float64, device=mean.device) - linalg.symmetric(half @ root)
    try:
        lower, _ = linalg.safe_cholesky(remainder, name="I − RᵀP^gR", limit=1e-4)
    except CovarianceError as cause:
        raise DataError(
            "An input holds more information than the whole fit, so it was not part of the fit and cannot be left out "
            "of it. Pass leave_out=False for data that the network was not trained on."
        ) from cause
    half = linalg.solve_lower(lower, half)
    wider = linalg.symmetric(covariance + half.mT @ half)
    target = torch.nn.functional.one_hot(labels, mean.shape[1]).to(mean)
    error = torch.softmax(mean, 1) - target
    shifted_mean = mean + (wider @ error[..., None])[..., 0]
    return LogitGaussian(shifted_mean.to(gaussian.mean), FullCovariance(wider))
