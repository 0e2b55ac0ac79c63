"""Fusion of logits: of several classifiers that saw one object, and of several frames seen by one classifier.

Softmax ignores a common shift of the logits, and with the `ggn` Fisher the data say nothing about it. So both work on
contrasts, coordinates in 1⊥, and return covariances of rank M−1; `raw=True` is the paper's formula to the letter.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from errbar import _linalg
from errbar.errors import ArgumentError, MismatchError, SingularCovarianceError
from errbar.logits import JointLogits, LogitGaussian

_CERTAIN = (
    "A covariance scale of zero, or fewer selected parameters than classes, leaves logits that are certain: such "
    "estimates cannot be weighed against each other."
)


def fuse(gaussians: Iterable[LogitGaussian], *, raw: bool = False) -> LogitGaussian:
    """Independent classifiers of one object, row by row: P = (Σ_c P_c⁻¹)⁻¹, ĝ = P Σ_c P_c⁻¹ ĝ_c (sec. Fusion)."""
    if not isinstance(gaussians, Iterable):
        raise ArgumentError(f"Cannot fuse {type(gaussians).__name__}; expected several LogitGaussian.")
    sources = list(gaussians)
    _require_fusible(sources)
    dtype = torch.float64 if any(s.mean.dtype == torch.float64 for s in sources) else torch.float32
    rounding = torch.finfo(dtype).eps
    information: Float[Tensor, "B d d"] | None = None
    weighted: Float[Tensor, "B d"] | None = None
    basis = _basis(sources[0].mean, raw)
    for position, source in enumerate(sources):
        covariance = basis.mT @ source.covariance.double() @ basis
        try:
            precision = _linalg.inverse(covariance, name=f"The covariance of classifier {position}", rounding=rounding)
        except SingularCovarianceError as error:
            raise SingularCovarianceError(f"{error} {_CERTAIN}") from None
        vector = (precision @ (source.mean.double() @ basis)[..., None])[..., 0]
        information = precision if information is None else information + precision
        weighted = vector if weighted is None else weighted + vector
    assert information is not None
    assert weighted is not None
    covariance = _linalg.inverse(information, name="The fused information")
    mean = (covariance @ weighted[..., None])[..., 0]
    return _in_logits(mean, covariance, basis, dtype)


def fuse_frames(joint: JointLogits, *, raw: bool = False, rcond: float | None = None) -> LogitGaussian:
    """Frames of one object, with the covariance R between them: P = (HᵀR⁻¹H)⁻¹, ĝ = P HᵀR⁻¹z (sec. Fusion).

    All frames share the parameters, so their errors are correlated, and R tells how much. More frames than parameters,
    or a frame that comes twice, make R singular; it is then inverted on its range, the eigenvalues above rcond · max
    (by default size · eps), and `rank` of the result says how many those are. Repeating a frame changes nothing.
    """
    if not isinstance(joint, JointLogits):
        raise ArgumentError(
            f"Expected JointLogits, as posterior.joint_logits(frames) returns them, got {type(joint).__name__}. For "
            "different classifiers use errbar.fuse."
        )
    joint = joint if raw else _without_repeats(joint)
    frames, classes = joint.mean.shape
    dtype = joint.mean.dtype
    basis = _basis(joint.mean, raw)
    width = basis.shape[1]
    size = frames * width
    covariance = joint.covariance.double().reshape(frames * classes, frames * classes)
    stacked = torch.block_diag(*[basis] * frames)
    R = _linalg.symmetric(stacked.mT @ covariance @ stacked)
    z = (joint.mean.double() @ basis).reshape(size)
    H = torch.eye(width, dtype=torch.float64, device=z.device).repeat(frames, 1)
    eps = torch.finfo(dtype).eps
    if raw:
        inverse = _linalg.inverse(R, name="The covariance R between the frames", rounding=eps)
        rank = size
    else:
        inverse, rank = _linalg.inverse_on_range(R, rcond=size * eps if rcond is None else rcond)
    information = H.mT @ inverse @ H
    try:
        P = _linalg.inverse(information, name="HᵀR⁻¹H, the fused information", rounding=eps)
    except SingularCovarianceError as error:
        raise SingularCovarianceError(f"{error} {_CERTAIN}") from None
    mean = P @ (H.mT @ (inverse @ z))
    return _in_logits(mean[None], P[None], basis, dtype, rank)


def _without_repeats(joint: JointLogits) -> JointLogits:
    """Without frames that equal an earlier one: same logits, and a difference whose variance is rounding.

    Where R is singular for other reasons as well, its pseudo-inverse would otherwise weigh what comes twice.
    """
    tolerance = joint.mean.numel() * torch.finfo(joint.mean.dtype).eps
    mean = joint.mean.double()
    trace = torch.einsum("imjm->ij", joint.covariance.double())
    variance = trace.diagonal()[:, None] + trace.diagonal()[None] - 2 * trace
    same = variance <= tolerance * torch.maximum(trace.diagonal()[:, None], trace.diagonal()[None])
    same &= (mean[:, None] - mean[None]).abs().amax(2) <= tolerance * mean.abs().max()
    kept = [i for i in range(len(mean)) if not bool(same[i, :i].any())]
    if len(kept) == len(mean):
        return joint
    return JointLogits.trusted(joint.mean[kept], joint.covariance[kept][:, :, kept])


def _basis(like: Tensor, raw: bool) -> Float[Tensor, "M d"]:
    classes = like.shape[1]
    if raw:
        return torch.eye(classes, dtype=torch.float64, device=like.device)
    return _linalg.contrast_basis(classes, like.device)


def _in_logits(
    mean: Float[Tensor, "B d"],
    covariance: Float[Tensor, "B d d"],
    basis: Float[Tensor, "M d"],
    dtype: torch.dtype,
    rank: int | None = None,
) -> LogitGaussian:
    """Contrasts as logits again, with mean zero over the classes."""
    logits = mean @ basis.mT
    spread = _linalg.symmetric(basis @ covariance @ basis.mT)
    return LogitGaussian.trusted(logits.to(dtype), spread.to(dtype), rank)


def _require_fusible(sources: list[LogitGaussian]) -> None:
    if not sources:
        raise ArgumentError("There is nothing to fuse; expected one or more LogitGaussian.")
    for position, source in enumerate(sources):
        if not isinstance(source, LogitGaussian):
            raise ArgumentError(
                f"Item {position} to fuse is a {type(source).__name__}; expected a LogitGaussian, as "
                "posterior.logits(x) returns it."
            )
        if source.mean.shape[1] != sources[0].mean.shape[1]:
            raise MismatchError(
                f"Cannot fuse classifiers with {sources[0].mean.shape[1]} and {source.mean.shape[1]} classes; expected "
                "the same classes in the same order."
            )
        if len(source) != len(sources[0]):
            raise MismatchError(
                f"Cannot fuse {len(sources[0])} inputs with {len(source)}; expected row i of each to be one object."
            )
        if source.mean.device != sources[0].mean.device:
            raise MismatchError(
                f"Cannot fuse logits on {sources[0].mean.device} with logits on {source.mean.device}; move one first."
            )
