"""Several frames of one object, and several classifiers of one picture: how good each way of fusing them is.

Two things are missing from the paper's P = (HᵀR⁻¹H)⁻¹, ĝ = P HᵀR⁻¹z for frames, R_ij = J_i P J_jᵀ.

A frame's own variation. The model is ĝ_c = g + J_c (θ̂ − θ): every difference ĝ_i − ĝ_j is an error of the parameters.
But frames are different pictures. For near-copies (J_i − J_j) P (J_i − J_j)ᵀ ≈ 0 in some directions, R is almost
singular, and the weights P HᵀR⁻¹, which sum to I, are large with both signs: the estimate extrapolates from
differences that R does not contain. With ĝ_c = g + e_c + J_c (θ̂ − θ), e_c ~ N(0, Σ_e), it is R + I ⊗ Σ_e, with
eigenvalues no smaller than those of Σ_e. `errbar.frame_noise` estimates Σ_e.

Evidence that grows. An average of logits is as certain as one frame, however many there are. Let the logits of an
object of class y be μ_y + b + e_c with covariances ρΣ of b, which the frames share, and (1 − ρ)Σ of e_c. The mean of C
frames has covariance Σ (1 + (C − 1)ρ)/C, so the log-odds are those of one frame with the same logits times
    κ_C = C/(1 + (C − 1)ρ),
from 1 for copies (ρ = 1, the average) to C for frames independent given the class (ρ = 0, the product of PMFs), where
all classes are equally frequent. `frame_correlation` estimates ρ. Both take held-out sequences.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar import metrics
from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._base.progress import track as shown
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._fusion.fuse import fuse, fuse_frames
from errbar._fusion.track import Track, scatter_within
from errbar._model.batch import input_batch
from errbar._posterior.posterior import Posterior
from errbar.errors import ArgumentError, DataError, FusionNotice

Prepare = Callable[[Tensor], Tensor]

# A probability that rounding took to zero is not a certainty: without a floor one such label makes the NLL infinite.
FLOOR = 1e-12
# Sequences whose Gaussians are held together: (frames, M, M) numbers of each, several times.
_GROUP = 64
_BATCH = 256
# Methods whose logits are an average over the frames, so that their evidence does not grow by itself.
AVERAGES = ("independent", "covariance intersection", "joint with frame noise", "mean of PMFs", "mean of logits")


def as_given(x: Tensor) -> Tensor:
    """Pixels that are the network's input already."""
    return x


def study(
    posterior: Posterior,
    frames: Float[Tensor, "N F C H W"],
    labels: Int[Tensor, " N"],
    *,
    noise: Float[Tensor, "M M"] | None = None,
    correlation: float | None = None,
    chosen: Track | None = None,
    samples: int = 1000,
    seed: int = 0,
    thresholds: Sequence[float] = (0.5, 0.9, 0.95, 0.99),
    risk_level: float = 0.95,
    progress: bool = False,
    prepare: Prepare = as_given,
) -> dict[str, Any]:
    """Scores after the first 1 … F frames of each sequence, and what deciding early costs, for each method.

    Methods: those of `gaussians`; "track", `errbar.Track` as it is, and "chosen track", the one that `calibrate_track`
    made, where it is given; of the frames' own PMFs "mean of PMFs" and "product of PMFs" (normalised); "mean of
    logits", the softmax of the mean of ĝ/T; and with a correlation ρ, for those that average, "scaled" ones: f^κ_C,
    normalised. Decisions are taken where max_m f_m exceeds a threshold, and, for methods that have samples, where
    Pr{f_m > ½} of the likeliest class exceeds `risk_level`.
    """
    count, length = frames.shape[:2]
    if correlation is not None and not 0 <= correlation <= 1:
        raise ArgumentError(
            f"correlation is {correlation!r}; expected ρ between 0 and 1, as frame_correlation gives it."
        )
    if count == 0 or length == 0 or len(labels) != count:
        raise DataError(
            f"Frames have shape {tuple(frames.shape)} and there are {len(labels)} labels; expected sequences × frames "
            "× channels × height × width with at least one of each, and a label for each sequence."
        )
    pmfs: dict[str, list[list[Tensor]]] = {}
    risks: dict[str, list[list[Tensor]]] = {}
    means: list[list[Tensor]] = [[] for _ in range(length)]
    groups = range(0, count, _GROUP)
    tracks = {"track": Track(posterior)} | ({} if chosen is None else {"chosen track": chosen})
    for start in shown(groups, "Fusing frames", enabled=progress):
        group = [prepare(sequence) for sequence in frames[start : start + _GROUP]]
        fused = gaussians([joint_logits(posterior, sequence) for sequence in group], noise)
        for number, gaussian in enumerate(fused["latest"]):
            means[number].append(gaussian.mean)
        for method, prefixes in (fused | tracked(tracks, group)).items():
            for number, gaussian in enumerate(prefixes):
                prediction = gaussian.predict(samples, seed)
                certain = prediction.risk(0.5).gather(1, prediction.label[:, None])[:, 0]
                pmfs.setdefault(method, [[] for _ in range(length)])[number].append(prediction.pmf)
                risks.setdefault(method, [[] for _ in range(length)])[number].append(certain)
    by_method = {method: torch.stack([torch.cat(parts) for parts in rows]) for method, rows in pmfs.items()}
    by_method |= _from_pmfs(by_method["latest"])
    each = torch.stack([torch.cat(parts) for parts in means])
    numbers = torch.arange(1, length + 1, dtype=each.dtype, device=each.device)
    by_method["mean of logits"] = (each.cumsum(0) / numbers[:, None, None]).softmax(2).to(by_method["latest"])
    if correlation is not None:
        by_method |= {f"scaled {name}": scaled(by_method[name], correlation) for name in AVERAGES if name in by_method}
    truth = labels.cpu()
    return {
        "sequences": count,
        "frames": length,
        "classes": by_method["latest"].shape[2],
        "samples": samples,
        "methods": {method: _scores_of_prefixes(pmf, truth) for method, pmf in by_method.items()},
        "decisions": {
            method: [
                {"threshold": float(threshold), **decisions(pmf.amax(2), pmf.argmax(2), truth, threshold)}
                for threshold in thresholds
            ]
            for method, pmf in by_method.items()
        },
        "decisions_by_risk": {
            method: {
                "threshold": risk_level,
                **decisions(
                    torch.stack([torch.cat(parts) for parts in rows]), by_method[method].argmax(2), truth, risk_level
                ),
            }
            for method, rows in risks.items()
        },
    }


def joint_logits(posterior: Posterior, x: Float[Tensor, "F ..."]) -> JointLogits:
    """`posterior.joint_logits` on the CPU: what follows are many small eigenvalue problems, one after the other."""
    return posterior.joint_logits(x).to("cpu")


def first_frames(joint: JointLogits, count: int) -> JointLogits:
    """The joint distribution of the first `count` frames: the blocks R_ij with i, j ≤ count."""
    return joint.chosen(range(count))


def gaussians(
    joints: Sequence[JointLogits], noise: Float[Tensor, "M M"] | None = None
) -> dict[str, list[LogitGaussian]]:
    """Method → for C = 1 … F the fused logits of all sequences, one per row.

    - "latest", "first": the C-th and the first frame alone;
    - "independent": P = (Σ P_c⁻¹)⁻¹, ĝ = P Σ P_c⁻¹ ĝ_c, as if each frame had parameters of its own;
    - "covariance intersection": the same ĝ with C·P, which is never too small whatever the frames share;
    - "joint": the paper's P = (HᵀR⁻¹H)⁻¹, ĝ = P HᵀR⁻¹z;
    - "joint with frame noise": the same with R + I ⊗ Σ_e for R, where Σ_e is given.
    """
    length = len(joints[0])
    marginals = [joint.marginals() for joint in joints]
    each = [LogitGaussian.concatenated([one[c : c + 1] for one in marginals]) for c in range(length)]
    independent = [fuse(each[: c + 1]) for c in range(length)]
    result = {
        "latest": each,
        "first": each[:1] * length,
        "independent": independent,
        "covariance intersection": [gaussian.scaled(c + 1) for c, gaussian in enumerate(independent)],
        "joint": _fused_prefixes(joints),
    }
    if noise is not None:
        result["joint with frame noise"] = _fused_prefixes(joints, noise)
    return result


def _fused_prefixes(joints: Sequence[JointLogits], noise: Float[Tensor, "M M"] | None = None) -> list[LogitGaussian]:
    with warnings.catch_warnings():
        # The comparison is what shows it.
        warnings.simplefilter("ignore", FusionNotice)
        return [
            LogitGaussian.concatenated([fuse_frames(first_frames(joint, c), noise=noise) for joint in joints])
            for c in range(1, len(joints[0]) + 1)
        ]


def tracked(tracks: Mapping[str, Track], sequences: Iterable[Tensor]) -> dict[str, list[LogitGaussian]]:
    """Name of an empty track → for C = 1 … F the logits of all sequences after C frames, one per row."""
    rows: dict[str, list[list[LogitGaussian]]] = {name: [] for name in tracks}
    for sequence in sequences:
        each = next(iter(tracks.values())).posterior.unrounded_logits(sequence)
        for name, track in tracks.items():
            so_far, prefixes = track, []
            for frame in range(len(each)):
                so_far = so_far.add(each[frame : frame + 1])
                prefixes.append(so_far.logits)
            rows[name].append(prefixes)
    return {
        name: [LogitGaussian.concatenated(list(column)) for column in zip(*prefixes, strict=True)]
        for name, prefixes in rows.items()
    }


def frame_correlation(
    posterior: Posterior,
    frames: Float[Tensor, "N F C H W"],
    labels: Int[Tensor, " N"],
    *,
    prepare: Prepare = as_given,
) -> float:
    """ρ = tr Σ_b/(tr Σ_b + tr Σ_e): the share of the scatter within a class that the frames of an object share.

    Analysis of variance of the centred logits: Σ_e within objects, and the scatter of the objects' means within their
    classes is Σ_b + Σ_e/F. Held-out sequences; T does not matter.
    """
    logits = _centred_logits(posterior, frames, prepare)
    noise = float(scatter_within(logits).trace())
    means = logits.mean(1)
    classes, group = labels.to(means.device).unique(return_inverse=True)
    freedom = len(means) - len(classes)
    if len(labels) != len(frames) or freedom < 1:
        raise DataError(
            f"{len(frames)} sequences with {len(labels)} labels of {len(classes)} classes; the scatter within classes "
            "needs a label for each sequence, and more sequences than classes."
        )
    total = means.new_zeros(len(classes), means.shape[1]).index_add_(0, group, means)
    centres = total / group.bincount()[:, None]
    between = float((means - centres[group]).square().sum()) / freedom - noise / frames.shape[1]
    both = max(between, 0.0) + noise
    return max(between, 0.0) / both if both > 0 else 1.0


def scaled(pmf: Float[Tensor, "F N M"], correlation: float) -> Float[Tensor, "F N M"]:
    """f^κ_C, normalised, with κ_C = C/(1 + (C − 1)ρ), of PMFs after C = 1 … F frames."""
    numbers = torch.arange(1, len(pmf) + 1, dtype=pmf.dtype, device=pmf.device)
    growth = numbers / (1 + (numbers - 1) * correlation)
    return (pmf.clamp_min(FLOOR).log() * growth[:, None, None]).softmax(2)


def _centred_logits(
    posterior: Posterior, frames: Float[Tensor, "N F C H W"], prepare: Prepare
) -> Float[Tensor, "N F M"]:
    """ĝ/T minus its mean over the classes, in float64."""
    logits = mean_logits(posterior, prepare(frames.flatten(0, 1))).double() / posterior.temperature
    return (logits - logits.mean(1, keepdim=True)).reshape(*frames.shape[:2], -1)


def mean_logits(posterior: Posterior, x: Float[Tensor, "B ..."]) -> Float[Tensor, "B M"]:
    """ĝ of the network as it is, without T and without a covariance."""
    network = posterior.information.network
    checks = Checks(network.device)
    with plain_execution(network.device):
        parts = [
            network.logits(network.prepare(input_batch(x[start : start + _BATCH]), checks))
            for start in range(0, len(x), _BATCH)
        ]
    checks.finish()
    return torch.cat(parts)


def two_classifiers(
    posteriors: Sequence[Posterior], x: Any, labels: Int[Tensor, " N"], *, samples: int = 1000, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Scores of each classifier, of their mean PMF, of softmax of their mean logits ĝ/T, and of `errbar.fuse`."""
    if len(posteriors) < 2:
        raise ArgumentError(f"There are {len(posteriors)} posteriors; expected two classifiers or more.")
    each: list[LogitGaussian] = [
        LogitGaussian.concatenated([one.logits(x[start : start + _BATCH]) for start in range(0, len(x), _BATCH)])
        for one in posteriors
    ]
    pmfs = [gaussian.predict(samples, seed).pmf for gaussian in each]
    rows = {f"classifier {number}": pmf for number, pmf in enumerate(pmfs, 1)}
    rows["mean of PMFs"] = torch.stack(pmfs).mean(0)
    rows["mean of logits"] = torch.stack([gaussian.mean for gaussian in each]).mean(0).softmax(1)
    rows["fused"] = fuse(each).predict(samples, seed).pmf
    return {name: scores(pmf, labels) for name, pmf in rows.items()}


def scores(pmf: Float[Tensor, "N M"], labels: Int[Tensor, " N"]) -> dict[str, float]:
    """Accuracy, NLL, Brier score, ECE, and the mean confidence; probabilities are at least `FLOOR`."""
    floored = pmf.double().cpu().clamp_min(FLOOR)
    floored = floored / floored.sum(1, keepdim=True)
    return {
        "accuracy": metrics.accuracy(floored, labels),
        "nll": metrics.nll(floored, labels),
        "brier": metrics.brier(floored, labels),
        "ece": metrics.ece(floored, labels),
        "confidence": float(floored.amax(1).mean()),
    }


def decisions(
    certainty: Float[Tensor, "F N"], label: Int[Tensor, "F N"], truth: Int[Tensor, " N"], threshold: float
) -> dict[str, float]:
    """Each sequence is decided at the first frame whose certainty exceeds the threshold, for its label there.

    `frames` is the mean number seen, F if it is never decided; `decided` the share that is; `error` the error
    rate of those, left out where there are none; `error_of_all` counts the undecided by their label at frame F.
    """
    length = len(certainty)
    passed: Bool[Tensor, "F N"] = certainty > threshold
    before = (~passed).long().cumprod(0).sum(0)
    decided = before < length
    at = before.clamp_max(length - 1)
    wrong = label.gather(0, at[None])[0] != truth.to(label.device)
    row = {
        "frames": float((at + 1).double().mean()),
        "decided": float(decided.double().mean()),
        "error_of_all": float(wrong.double().mean()),
    }
    if bool(decided.any()):
        row["error"] = float(wrong[decided].double().mean())
    return row


def _from_pmfs(each: Float[Tensor, "F N M"]) -> dict[str, Float[Tensor, "F N M"]]:
    """The mean of the first C PMFs, and their product, normalised: right for frames independent given the class."""
    numbers = torch.arange(1, len(each) + 1, dtype=each.dtype, device=each.device)
    product = each.clamp_min(FLOOR).log().cumsum(0).softmax(2)
    return {"mean of PMFs": each.cumsum(0) / numbers[:, None, None], "product of PMFs": product}


def _scores_of_prefixes(pmf: Float[Tensor, "F N M"], truth: Int[Tensor, " N"]) -> dict[str, list[float]]:
    rows = [scores(one, truth) for one in pmf]
    return {name: [row[name] for row in rows] for name in rows[0]}
