"""Training data with known mistakes, scores that should find them, and how well they do.

A mistake is a label that was replaced, or a picture that was: one of another data set in the place of a training
picture. Scores are higher where they suspect more.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from errbar._deciding.outliers import outlier_scores
from errbar._distributions.sampling import require_seed
from errbar._posterior.posterior import Posterior
from errbar.errors import ArgumentError, DataError
from errbar.experiments.sequences import mean_logits

CLEAN, WRONG_LABEL, FOREIGN = 0, 1, 2
SHARES = (0.01, 0.02, 0.03, 0.05)
_BATCH = 256


def contaminate(
    images: UInt8[Tensor, "N C H W"],
    labels: Int[Tensor, " N"],
    foreign: UInt8[Tensor, "L C H W"],
    *,
    wrong: float = 0.02,
    foreign_share: float = 0.01,
    classes: int = 10,
    seed: int,
) -> tuple[UInt8[Tensor, "N C H W"], Int[Tensor, " N"], Int[Tensor, " N"]]:
    """Copies of pictures and labels with mistakes in them, and the kind of each: 0 clean, 1 wrong label, 2 foreign.

    A wrong label is any of the other classes with equal probability. A foreign picture takes a training picture's
    place and keeps its label; none is used twice. No place has both.
    """
    for name, share in (("wrong", wrong), ("foreign_share", foreign_share)):
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise ArgumentError(f"{name} is {share!r}; expected a share between 0 and 1.")
    n, n_wrong, n_foreign = len(images), round(wrong * len(images)), round(foreign_share * len(images))
    if len(labels) != n or tuple(foreign.shape[1:]) != tuple(images.shape[1:]):
        raise DataError(
            f"{n} pictures of shape {tuple(images.shape[1:])}, {len(labels)} labels and foreign pictures of shape "
            f"{tuple(foreign.shape[1:])}; expected as many labels as pictures, and pictures of one shape."
        )
    if n_wrong + n_foreign > n or n_foreign > len(foreign):
        raise DataError(
            f"{n_wrong} wrong labels and {n_foreign} foreign pictures do not fit: there are {n} places and "
            f"{len(foreign)} foreign pictures. Ask for smaller shares."
        )
    if classes < 2 or (n and not 0 <= int(labels.min()) <= int(labels.max()) < classes):
        raise ArgumentError(f"classes is {classes!r}; expected two or more, and all labels from 0 to classes − 1.")
    generator = torch.Generator().manual_seed(require_seed(seed))
    places = torch.randperm(n, generator=generator)[: n_wrong + n_foreign]
    step = torch.randint(1, classes, (n_wrong,), generator=generator)
    foreign_rows = torch.randperm(len(foreign), generator=generator)[:n_foreign]
    label_places, picture_places = places[:n_wrong].to(labels.device), places[n_wrong:].to(images.device)

    new_images, new_labels, kind = images.clone(), labels.clone(), torch.full_like(labels, CLEAN)
    new_labels[label_places] = (new_labels[label_places] + step.to(new_labels)) % classes
    new_images[picture_places] = foreign[foreign_rows.to(foreign.device)].to(new_images)
    kind[label_places] = WRONG_LABEL
    kind[picture_places.to(kind.device)] = FOREIGN
    return new_images, new_labels, kind


def rank(
    posterior: Posterior,
    x: Float[Tensor, "N ..."],
    y: Int[Tensor, " N"],
    *,
    leave_out: bool = True,
    samples: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Float[Tensor, " N"]]:
    """Score name → score of each input. errbar's:

    - "label suspicion", "mutual information", "contrast variance": of `errbar.outlier_scores`;
    - "suspicion plus entropy": for both kinds of mistake at once, in nats. A wrong label has a high loss and a picture
      that fits no class a high entropy; where one is high, the sum is.

    Those of the plain softmax f, at T = 1:

    - "loss": −ln f_y;  "margin": max_{m≠y} ln f_m − ln f_y;  "entropy" of f;  "least confidence": 1 − max_m f_m;
    - "loss plus entropy".
    """
    batches = [(x[start : start + _BATCH], y[start : start + _BATCH]) for start in range(0, len(x), _BATCH)]
    scores = outlier_scores(posterior, batches, leave_out=leave_out, samples=samples, seed=seed, progress=progress)
    assert scores.label_suspicion is not None
    plain = softmax_scores(mean_logits(posterior, x), y)
    suspicion = scores.label_suspicion.double()
    return {
        "label suspicion": suspicion,
        "mutual information": scores.mutual_information.double(),
        "contrast variance": scores.contrast_variance.double(),
        "suspicion plus entropy": suspicion + plain["entropy"],
        **plain,
        "loss plus entropy": plain["loss"] + plain["entropy"],
    }


def softmax_scores(logits: Float[Tensor, "N M"], y: Int[Tensor, " N"]) -> dict[str, Float[Tensor, " N"]]:
    """Scores from the softmax alone, in float64, where a confident f still differs from 1."""
    log_pmf = logits.double().log_softmax(1)
    label = y.to(log_pmf.device)[:, None]
    loss = -log_pmf.gather(1, label)[:, 0]
    rival = log_pmf.scatter(1, label, -torch.inf).amax(1)
    top = log_pmf.argmax(1, keepdim=True)
    others = log_pmf.scatter(1, top, -torch.inf).logsumexp(1).exp()  # 1 − max f, without the cancellation
    return {
        "loss": loss,
        "margin": rival + loss,
        "entropy": -(log_pmf.exp() * log_pmf).sum(1),
        "least confidence": others,
    }


def precision_recall(scores: Float[Tensor, " N"], positive: Bool[Tensor, " N"]) -> dict[str, Any]:
    """How many positives are among the highest scores.

    Average precision is Σ_i (R_i − R_{i−1}) P_i over the distinct scores. Where scores are equal, the counts are
    those that a random order among them has on average, so that the order of the data does not matter.
    """
    if len(scores) != len(positive) or bool(scores.isnan().any()):
        raise DataError(
            f"{len(scores)} scores for {len(positive)} inputs, or NaN among them; expected one number each."
        )
    total = int(positive.sum())
    if total == 0 or total == len(positive):
        raise DataError(f"{total} of {len(positive)} inputs are positive; expected some of each kind.")
    _, group, size = (-scores.double()).unique(sorted=True, return_inverse=True, return_counts=True)
    hits = torch.zeros(len(size), dtype=torch.float64, device=size.device)
    hits.index_add_(0, group, positive.to(hits))
    counts, hit_counts = size.cumsum(0).double(), hits.cumsum(0)
    average = float((hits / total * (hit_counts / counts)).sum())

    def found_among(k: int) -> float:
        """Positives among the k highest scores, a share of those in the group that k cuts through."""
        before = torch.cat([counts.new_zeros(1), counts])[:-1]
        return float((hits * ((k - before) / size).clamp(0, 1)).sum())

    rows = []
    for share in SHARES:
        k = max(1, round(share * len(scores)))
        rows.append({"share": share, "precision": found_among(k) / k, "recall": found_among(k) / total})
    return {
        "average_precision": average,
        "positives": total,
        "precision_at_positives": found_among(total) / total,
        "flagged": rows,
    }


def report(scores: dict[str, Float[Tensor, " N"]], kind: Int[Tensor, " N"]) -> dict[str, dict[str, dict[str, Any]]]:
    """`precision_recall` of each score for "wrong label", "foreign" and "either", where there are any.

    Mistakes of the other kind count as negative: foreign pictures for "wrong label", and the other way round.
    """
    positives = {"wrong label": kind == WRONG_LABEL, "foreign": kind == FOREIGN, "either": kind != CLEAN}
    return {
        name: {score: precision_recall(values.cpu(), positive.cpu()) for score, values in scores.items()}
        for name, positive in positives.items()
        if bool(positive.any())
    }
