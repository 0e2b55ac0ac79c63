"""Fusion of logits: of several classifiers that saw one object, and of several frames seen by one classifier.

Softmax ignores a common shift of the logits, and with the `ggn` Fisher the data say nothing about it. So both work on
contrasts, coordinates in 1⊥, and return covariances of rank M−1; `raw=True` is the paper's formula to the letter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._distributions.covariance import FullCovariance, JointCovariance
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._distributions.positions import PositionLogits
from errbar.errors import ArgumentError, FusionNotice, MismatchError, SingularCovarianceError

_CERTAIN = (
    "A covariance scale of zero, or fewer selected parameters than classes, makes logits certain: such "
    "estimates cannot be weighed against each other."
)
# Variation of a frame's own that is amplified more than so many times, in variance, is told of.
_EXTRAPOLATING = 4.0


def fuse(gaussians: Iterable[LogitGaussian], *, raw: bool = False) -> LogitGaussian:
    """Independent classifiers of one object, row by row: P = (Σ_c P_c⁻¹)⁻¹, ĝ = P Σ_c P_c⁻¹ ĝ_c (sec. Fusion).

    In contrasts, because softmax ignores a common shift; with `raw`, or for several labels, in the logits themselves.
    """
    if not isinstance(gaussians, Iterable):
        raise ArgumentError(f"Cannot fuse {type(gaussians).__name__}; expected several LogitGaussian objects.")
    sources = list(gaussians)
    _require_fusible(sources)
    dtype = torch.float64 if any(s.mean.dtype == torch.float64 for s in sources) else torch.float32
    rounding = torch.finfo(dtype).eps
    information: Float[Tensor, "B d d"] | None = None
    information_vector: Float[Tensor, "B d"] | None = None
    basis = _basis(sources[0].mean, raw or not sources[0].kind.has_gauge)
    for position, source in enumerate(sources):
        covariance = basis.mT @ source.covariance.double() @ basis
        try:
            precision = linalg.inverse(covariance, name=f"The covariance of classifier {position}", rounding=rounding)
        except SingularCovarianceError as error:
            raise SingularCovarianceError(f"{error} {_CERTAIN}") from None
        vector = (precision @ (source.mean.double() @ basis)[..., None])[..., 0]
        information = precision if information is None else information + precision
        information_vector = vector if information_vector is None else information_vector + vector
    assert information is not None
    assert information_vector is not None
    covariance = linalg.inverse(information, name="The fused information")
    mean = (covariance @ information_vector[..., None])[..., 0]
    fused = _in_logits(mean, covariance, basis, dtype)
    return LogitGaussian(fused.mean, fused.form, classes=sources[0].classes, kind=sources[0].kind)


def fuse_frames(
    joint: JointLogits,
    *,
    raw: bool = False,
    rcond: float | None = None,
    noise: Float[Tensor, "M M"] | None = None,
) -> LogitGaussian:
    """Frames of one object, with the covariance R between them: P = (HᵀR⁻¹H)⁻¹, ĝ = P HᵀR⁻¹z (sec. Fusion).

    R alone assumes that frames differ by the error of the parameters, which they share, and by nothing else. For
    near-copies it then contains next to nothing in some directions, and the weights P HᵀR⁻¹, which sum to I, are large
    with both signs: the estimate extrapolates from differences that are the pictures' own, and is worse than a single
    frame. A `FusionNotice` says so where it happens. For a camera use `errbar.Track`, which has been the better one
    wherever it was measured; or give `noise`, Σ_e of `errbar.frame_noise`, for R + I ⊗ Σ_e.

    All frames share the parameters, so their errors are correlated, as R says. More frames than parameters,
    or a repeated frame, make R singular; it is then inverted on its range, the eigenvalues above rcond · max,
    and `rank` of the result is their number. By default rcond is what rounding makes of zero: 4 · size · eps
    of float64, or (8 eps)² of a network with a larger eps, whose derivatives are no better. Neither repeating frames
    nor reordering them changes anything. A frame whose contrasts vary less than that is certain compared with the
    others, and is refused.
    """
    if not isinstance(joint, JointLogits):
        raise ArgumentError(
            f"Expected JointLogits from posterior.joint_logits(frames), got {type(joint).__name__}. For "
            "different classifiers use errbar.fuse."
        )
    if noise is not None:
        joint = with_frame_noise(joint, noise)
    if raw:
        return _fused_to_the_letter(joint)
    spread = _Spread.of(joint, rcond)
    _require_uncertain(joint, spread)
    distinct = _without_repeats(joint, spread.cut)
    if len(distinct) < len(joint):
        joint = joint.chosen(distinct)
        spread = _Spread.of(joint, rcond)
    basis = _basis(joint.mean, raw=False)
    above = spread.deviations.square() > spread.cut
    deviations, directions = spread.deviations[above], spread.directions[:, above]
    # R⁻¹ = U diag(σ⁻²) Uᵀ on the range: what follows is least squares with the rows of diag(σ⁻¹) Uᵀ H.
    whitening = (directions / deviations).mT
    rows = whitening.unflatten(1, (len(joint), basis.shape[1])).sum(1)
    # The directions of a small σ are off by as many roundings as it is smaller than the largest.
    rounding = 4 * len(directions) * torch.finfo(torch.float64).eps * float(deviations[0] / deviations[-1])
    name = "HᵀR⁻¹H, the fused information"
    left, values, right = linalg.singular_vectors(rows, name=name)
    if len(values) < basis.shape[1] or float(values[-1]) <= rounding * float(values[0]):
        raise SingularCovarianceError(f"{name}, is singular, so it has no inverse. {_CERTAIN}")
    half = right.mT / values
    weights = half @ (left.mT @ whitening)
    mean = weights @ (joint.mean.double() @ basis).reshape(-1)
    if noise is None:
        _tell_of_extrapolation(weights)
    return _in_logits(mean[None], (half @ half.mT)[None], basis, joint.mean.dtype, int(above.sum()))


def with_frame_noise(joint: JointLogits, noise: Float[Tensor, "M M"]) -> JointLogits:
    """R + I ⊗ Σ_e: each frame has a variation of its own beside the error that all share."""
    frames, classes = joint.mean.shape
    own = checked_noise(noise, classes).to(joint.covariance.device)
    each = torch.eye(frames, dtype=torch.float64, device=own.device)
    rounding = torch.finfo(joint.mean.dtype).eps
    total = joint.covariance + each[:, None, :, None] * own[None, :, None, :]
    return JointLogits(joint.mean, JointCovariance(total, network_rounding=rounding))


def checked_noise(noise: object, classes: int) -> Float[Tensor, "M M"]:
    """Σ_e in float64; an error unless it is a covariance of so many classes."""
    if not isinstance(noise, Tensor) or tuple(noise.shape) != (classes, classes):
        actual = tuple(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
        raise MismatchError(
            f"noise has shape {actual}; expected Σ_e of shape ({classes}, {classes}), as errbar.frame_noise(posterior, "
            "sequences) gives it."
        )
    linalg.require_covariance(noise, name="noise, Σ_e,")
    return noise.detach().double()


def _tell_of_extrapolation(weights: Float[Tensor, "d s"]) -> None:
    """A notice where R is so nearly singular that the weights P HᵀR⁻¹ are large, with both signs.

    Variation of the frames' own, of the same size in all directions, comes out multiplied by |weights|²/(M−1): 1/C for
    an average of C frames, 1 for a single one.
    """
    amplified = float(weights.square().sum()) / len(weights)
    if amplified > _EXTRAPOLATING:
        warnings.warn(
            "R, the covariance between the frames, is nearly singular: it attributes every difference between frames "
            "to errors of the parameters, and the estimate extrapolates from them. Expect it to be worse than one "
            "frame where pictures differ by themselves. Use errbar.Track, or give noise=errbar.frame_noise(posterior, "
            "sequences).",
            FusionNotice,
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False)
class _Spread:
    """EᵀR E = U diag(σ²) Uᵀ of the contrasts of all frames, the largest σ first, and the σ² that rounding can make."""

    directions: Float[Tensor, "s r"]
    deviations: Float[Tensor, "r"]
    cut: float

    @staticmethod
    def of(joint: JointLogits, rcond: float | None) -> _Spread:
        """From a root of EᵀR E, whose singular values are far more accurate than eigenvalues of R, or from R."""
        frames, classes = joint.mean.shape
        size = frames * (classes - 1)
        name = "The covariance between the frames"
        if joint.form.contrast_root is not None:
            directions, deviations, _ = linalg.singular_vectors(joint.form.contrast_root.flatten(0, 1), name=name)
            scale = 1.0
        else:
            eigenvalues, vectors = linalg.eigenvectors(_contrasts(joint), name=name)
            directions, deviations = vectors.flip(1), eigenvalues.flip(0).clamp_min(0).sqrt()
            # R was rounded as a whole, with a common shift of the logits that can far exceed its contrasts.
            largest = float(deviations[0].square())
            scale = float(joint.covariance.norm()) / largest if largest > 0 else 1.0
        share = (
            max(4 * size * joint.form.rounding * scale, (8 * joint.form.network_rounding) ** 2)
            if rcond is None
            else rcond
        )
        return _Spread(directions, deviations, share * float(deviations[0].square()))


def _contrasts(joint: JointLogits) -> Float[Tensor, "s s"]:
    basis = _basis(joint.mean, raw=False)
    blocks = torch.einsum("imjn,ma,nb->iajb", joint.covariance, basis, basis)
    return blocks.flatten(2).flatten(0, 1)


def _contrast_variances(joint: JointLogits) -> Float[Tensor, "C"]:
    """The mean variance of the contrasts of each frame."""
    if joint.form.contrast_root is not None:
        return joint.form.contrast_root.square().sum(2).mean(1)
    return _contrasts(joint).diagonal().reshape(len(joint), -1).mean(1)


def _require_uncertain(joint: JointLogits, spread: _Spread) -> None:
    """Refuse frames that are certain up to rounding: they would decide alone, or be dropped silently."""
    variances = _contrast_variances(joint)
    certain = (variances <= spread.cut).nonzero()[:, 0].tolist()
    if certain:
        names = ", ".join(str(frame) for frame in certain[:5]) + (", …" if len(certain) > 5 else "")
        raise SingularCovarianceError(
            f"The contrasts of frame {names} have a variance of {float(variances[certain[0]]):.3g}, where the largest "
            f"is {float(spread.deviations[0].square()):.3g} and rounding explains {spread.cut:.3g}; expected more than "
            f"that of each frame. {_CERTAIN} Leave the frame out, or give a smaller rcond."
        )


def _fused_to_the_letter(joint: JointLogits) -> LogitGaussian:
    """The paper's formula on the logits themselves, for an R that is not singular."""
    frames, classes = joint.mean.shape
    size = frames * classes
    # `inverse` counts the size itself.
    rounding = max(4 * joint.form.rounding, (8 * joint.form.network_rounding) ** 2 / size)
    R = joint.covariance.flatten(2).flatten(0, 1)
    inverse = linalg.inverse(R, name="The covariance R between the frames", rounding=rounding)
    basis = _basis(joint.mean, raw=True)
    H = basis.repeat(frames, 1)
    P = linalg.inverse(H.mT @ inverse @ H, name="HᵀR⁻¹H, the fused information")
    mean = P @ (H.mT @ (inverse @ joint.mean.double().reshape(size)))
    return _in_logits(mean[None], P[None], basis, joint.mean.dtype, size)


def _without_repeats(joint: JointLogits, cut: float) -> list[int]:
    """The frames that differ from all earlier ones: in their logits, or with more variance than rounding explains.

    Otherwise, if R is singular for other reasons too, its pseudo-inverse would give repeated frames more weight.
    """
    mean = joint.mean.double()
    tolerance = mean.numel() * joint.form.network_rounding * mean.abs().max()
    alike = torch.cdist(mean, mean, p=torch.inf) <= tolerance
    distinct: list[int] = []
    for frame in range(len(mean)):
        others = [other for other in distinct if bool(alike[frame, other])]
        if all(_difference(joint, frame, other) > cut for other in others):
            distinct.append(frame)
    return distinct


def _difference(joint: JointLogits, first: int, second: int) -> float:
    """The mean variance of the contrasts of z_i − z_j."""
    if joint.form.contrast_root is not None:
        return float((joint.form.contrast_root[first] - joint.form.contrast_root[second]).square().sum(1).mean())
    blocks = joint.chosen([first, second]).covariance
    between = blocks[0, :, 0] + blocks[1, :, 1] - blocks[0, :, 1] - blocks[1, :, 0]
    return float(linalg.contrast_covariance(between).diagonal().mean())


def _basis(like: Tensor, raw: bool) -> Float[Tensor, "M d"]:
    classes = like.shape[1]
    if raw:
        return torch.eye(classes, dtype=torch.float64, device=like.device)
    return linalg.contrast_basis(classes, like.device)


def _in_logits(
    mean: Float[Tensor, "B d"],
    covariance: Float[Tensor, "B d d"],
    basis: Float[Tensor, "M d"],
    dtype: torch.dtype,
    rank: int | None = None,
) -> LogitGaussian:
    """Contrasts back to logits, with mean zero over the classes."""
    logits = mean @ basis.mT
    spread = linalg.symmetric(basis @ covariance @ basis.mT)
    return LogitGaussian(logits.to(dtype), FullCovariance(spread.to(dtype)), rank)


def _require_fusible(sources: list[LogitGaussian]) -> None:
    if not sources:
        raise ArgumentError("There is nothing to fuse; expected at least one LogitGaussian.")
    for position, source in enumerate(sources):
        if isinstance(source, PositionLogits):
            raise ArgumentError(
                f"Item {position} to fuse has a Gaussian for each position; expected one for each input. Pass its "
                "rows(), which has every position as an input of its own."
            )
        if not isinstance(source, LogitGaussian):
            raise ArgumentError(
                f"Item {position} to fuse is a {type(source).__name__}; expected a LogitGaussian from "
                "posterior.logits(x)."
            )
        kind = sources[0].kind
        if source.kind != kind:
            raise MismatchError(
                f"Cannot fuse logits of outputs='{kind.name}' with logits of outputs='{source.kind.name}'; expected "
                "classifiers of one kind."
            )
        if source.mean.shape[1] != sources[0].mean.shape[1]:
            raise MismatchError(
                f"Cannot fuse classifiers with {sources[0].mean.shape[1]} and {source.mean.shape[1]} {kind.noun}; "
                f"expected the same {kind.noun} in the same order."
            )
        if not _same_classes(source.classes, sources[0].classes):
            raise MismatchError(
                "Cannot fuse logits of different classes; expected logits(x) of all classes, or for each input the "
                "same classes in the same order."
            )
        if len(source) != len(sources[0]):
            raise MismatchError(
                f"Cannot fuse {len(sources[0])} inputs with {len(source)}; expected row i of each to be one object."
            )
        if source.mean.device != sources[0].mean.device:
            raise MismatchError(
                f"Cannot fuse logits on {sources[0].mean.device} with logits on {source.mean.device}; move one first."
            )


def _same_classes(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
