"""`Track`: frames of one object, one at a time, and `frame_noise`: how the frames of one object scatter.

Contrasts of the logits, in float64, in information form:

    Λ ← λ Λ + P_c⁻¹,   ξ ← λ ξ + P_c⁻¹ ĝ_c,   W ← λ W + 1,   and then P = Λ⁻¹, ĝ = Λ⁻¹ ξ,

with P_c = P^g(x_c), or P^g(x_c) + Σ_e with `noise`. So a track takes the same memory and time per frame however long
it is. With λ = 1 and without noise this is `errbar.fuse` of the frames: precision weighting as if each frame had
parameters of its own. Frames share them, and `fuse_frames` takes that into account; but it attributes every difference
between frames to the parameters too, and loses to this wherever pictures differ by themselves (docs/results/mnist.md).
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import read, write
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import Prediction
from errbar._fusion.fuse import checked_noise
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import (
    ArgumentError,
    DamagedFileError,
    DataError,
    ErrbarError,
    FileError,
    MismatchError,
    SingularCovarianceError,
)

Contrasts = tuple[Float[Tensor, "C d"], Float[Tensor, "C d d"]]

_CERTAIN = (
    "A covariance scale of zero, or fewer selected parameters than classes, makes logits certain: such a frame cannot "
    "be weighed against others. Calibrate the posterior, select more layers, or give noise=errbar.frame_noise(…)."
)


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Track:
    """Frames of one object as one classifier saw them, fused as they come: a new track for each frame.

    By default frames are weighted by their precisions P^g(x_c)⁻¹, as `errbar.fuse` does; calibrate the posterior
    first. Each option must beat that on held-out sequences, and `errbar.calibrate_track` finds out:

    - `noise`, Σ_e of `errbar.frame_noise`, is added to each P^g. It wins where a frame's own variation (motion blur, a
      reflection) is larger than what the parameters explain, so that a single sharp P^g must not decide alone.
    - `memory` λ below 1 fades older frames by λ each. It wins where the object changes, or later frames are better.
    - `evidence` ρ, from 0 to 1, multiplies the fused logits by κ_C = C/(1 + (C − 1)ρ), with W for C where frames fade.
      It wins where frames agree and the average stays less certain than C frames should be; 1 is none.

    `frames` says how many there are. `comparison` has the held-out NLL of each option if `calibrate_track` made it.
    """

    posterior: Posterior
    noise: Float[Tensor, "M M"] | None = None
    memory: float = 1.0
    evidence: float | None = None
    frames: int = 0
    surprise_scale: float = 1.0
    comparison: Mapping[str, float] | None = None
    _information: Float[Tensor, "d d"] = field(init=False)
    _vector: Float[Tensor, "d"] = field(init=False)
    _weight: float = field(init=False)
    _reference: Float[Tensor, "R"] | None = field(init=False)
    _single: LogitGaussian | None = field(init=False)

    def __init__(
        self,
        posterior: Posterior,
        noise: Float[Tensor, "M M"] | None = None,
        memory: float = 1.0,
        evidence: float | None = None,
    ) -> None:
        require_posterior(posterior, "Track")
        classes = posterior.information.n_classes
        self._set(
            posterior=posterior,
            noise=None if noise is None else checked_noise(noise, classes).cpu(),
            memory=_share("memory", memory, "how much of the older frames stays with each new one", zero=False),
            evidence=None
            if evidence is None
            else _share("evidence", evidence, "the correlation ρ of the frames", zero=True),
            frames=0,
            surprise_scale=1.0,
            comparison=None,
            _information=torch.zeros(classes - 1, classes - 1, dtype=torch.float64),
            _vector=torch.zeros(classes - 1, dtype=torch.float64),
            _weight=0.0,
            _reference=None,
            _single=None,
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _with(self, **values: Any) -> Track:
        other = copy.copy(self)
        other._set(**values)
        return other

    # ------------------------------------------------------------------------------------------------------ frames

    def add(self, frame: Any) -> Track:
        """The track with one more frame: an input as for `posterior.predict`, or a `LogitGaussian` of this posterior.

        Several rows are several frames, in their order. The posterior's own logits are taken before they are rounded.
        """
        gaussian = self._checked(frame)
        means, covariances = contrasts_of(gaussian)
        name = f"The covariance of frame {self.frames}" if len(means) == 1 else "The covariance of a frame"
        precisions = precisions_of(self._widened(covariances), name, rounding_of(self.posterior))
        information, vector, weight = self._information, self._vector, self._weight
        for mean, precision in zip(means, precisions, strict=True):
            if self.memory < 1:
                information, vector, weight = self.memory * information, self.memory * vector, self.memory * weight
            information, vector, weight = information + precision, vector + precision @ mean, weight + 1.0
        frames = self.frames + len(means)
        return self._with(
            _information=information,
            _vector=vector,
            _weight=weight,
            frames=frames,
            _single=gaussian if frames == 1 and self.noise is None else None,
        )

    @property
    def logits(self) -> LogitGaussian:
        """N(κ ĝ, κ² P) of the object, (1, M), with mean zero over the classes; κ = 1 unless there is `evidence`."""
        mean, covariance = self._estimate()
        growth = growth_of_evidence(self._weight, self.evidence)
        return in_logits(growth * mean[None], growth**2 * covariance[None], self.posterior)

    def predict(self, samples: int = 1000, seed: int = 0) -> Prediction:
        """The PMF of the object, with its error bars; of one frame what the posterior predicts, with the same draws."""
        # Where P^g is diagonal or factored its draws are others than those of a matrix.
        gaussian = self.logits if self._single is None else self._single
        return gaussian.predict(samples, seed)

    def _estimate(self) -> tuple[Float[Tensor, "d"], Float[Tensor, "d d"]]:
        """Λ⁻¹ ξ and Λ⁻¹."""
        if self.frames == 0:
            raise DataError("The track has no frames yet; expected at least one. Add one with track.add(x).")
        covariance = linalg.quick_inverse(self._information, name="The information of the track")
        return covariance @ self._vector, covariance

    def _widened(self, covariances: Float[Tensor, "C d d"]) -> Float[Tensor, "C d d"]:
        return covariances if self.noise is None else covariances + linalg.contrast_covariance(self.noise)

    def _checked(self, frame: Any) -> LogitGaussian:
        """The logits of a frame, once it is certain that they belong here."""
        gaussian = frame if isinstance(frame, LogitGaussian) else self.posterior.unrounded_logits(frame)
        classes = self.posterior.information.n_classes
        if gaussian.classes is not None:
            raise MismatchError(
                "These are logits of some classes alone; expected logits(x) of all classes, without top, for a track."
            )
        if gaussian.mean.shape[1] != classes:
            raise MismatchError(
                f"The frame has {gaussian.mean.shape[1]} classes, and the track {classes}; expected logits of the "
                "track's posterior."
            )
        if gaussian.origin is not None and gaussian.origin != self.posterior.fingerprint:
            raise MismatchError(
                "The frame carries the fingerprint of another posterior (other weights, prior, calibration or data) "
                f"than the track: {gaussian.origin[:12]}… and {self.posterior.fingerprint[:12]}…. Expected logits of "
                "the track's posterior; different classifiers are fused by errbar.fuse."
            )
        return gaussian

    # ---------------------------------------------------------------------------------------------------- surprise

    def surprise(self, frame: Any) -> float:
        """How little a frame belongs to the track: dᵀS⁻¹d/κ on contrasts, larger for stranger.

        d = ĝ_x − ĝ_track and S = P_x + P_track, + Σ_e with `noise`, all before any growth of evidence. κ = 1 until
        `calibrate_track` fits it: the mean over held-out frames is then M − 1, as it would be if S were right.
        """
        mean, covariance = self._estimate()
        means, covariances = contrasts_of(self._checked(frame))
        if len(means) != 1:
            raise DataError(f"There are {len(means)} frames; expected one, whose surprise is one number.")
        spread = self._widened(covariances) + covariance
        return float(squared_distance(means - mean, spread)[0]) / self.surprise_scale

    def p_value(self, frame: Any) -> float:
        """The share of held-out frames at least as strange: small for a frame that does not belong to the track."""
        if self._reference is None:
            raise ArgumentError(
                "The track has no held-out frames to compare with; expected one made by errbar.calibrate_track("
                "posterior, sequences, labels)."
            )
        found = torch.tensor(self.surprise(frame), dtype=torch.float64)
        stranger = len(self._reference) - int(torch.searchsorted(self._reference, found))
        return stranger / len(self._reference)

    def compared_with(
        self, surprises: Float[Tensor, "R"], comparison: Mapping[str, float], scale: float = 1.0
    ) -> Track:
        """The same track with held-out surprises for `p_value`, κ, and the NLL of each option."""
        return self._with(
            surprise_scale=scale, comparison=dict(comparison), _reference=surprises.double().cpu().sort().values
        )

    # ------------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a small safetensors file for `Track.load`: as large after 10,000 frames as after one; no data."""
        comparison = self.comparison or {}
        description = {
            "posterior": self.posterior.fingerprint,
            "classes": self.posterior.information.n_classes,
            "memory": self.memory,
            "evidence": self.evidence,
            "surprise_scale": self.surprise_scale,
            "comparison": [{"option": name, "nll": nll} for name, nll in comparison.items()],
            "noise": self.noise is not None,
            "reference": None if self._reference is None else len(self._reference),
        }
        # Numbers that change with each frame are in arrays: as text they would make the file grow.
        tensors = {
            "information": self._information,
            "vector": self._vector,
            "counts": torch.tensor([float(self.frames), self._weight], dtype=torch.float64),
        }
        if self.noise is not None:
            tensors["noise"] = self.noise
        if self._reference is not None:
            tensors["reference"] = self._reference
        write(path, "track", description, tensors)

    @staticmethod
    def load(path: str | os.PathLike[str], posterior: Posterior) -> Track:
        """The track that `save` wrote; `posterior` must be the one it was made with."""
        require_posterior(posterior, "Track")
        contents = read(path)
        if contents.kind != "track":
            raise FileError(
                f"{contents.path} holds {contents.kind[:60]!a}, not a track; expected a file that Track.save wrote."
            )
        fields = contents.description
        fingerprint = fields.digest("posterior")
        if fingerprint != posterior.fingerprint:
            raise MismatchError(
                f"{contents.path} is a track of another posterior (other weights, prior, calibration or data): "
                f"fingerprints {fingerprint[:12]}… and {posterior.fingerprint[:12]}…. Give the posterior of the track."
            )
        classes = fields.whole("classes", 2)
        try:
            track = Track(
                posterior,
                contents.tensor("noise", classes, classes) if fields.flag("noise") else None,
                fields.number("memory"),
                fields.number("evidence") if "evidence" in fields else None,
            )
        except ErrbarError as error:
            raise DamagedFileError(f"{contents.path} holds options that no track has: {error}") from error
        information = contents.tensor("information", classes - 1, classes - 1)
        frames, weight = contents.tensor("counts", 2).tolist()
        is_possible = frames >= 0 and frames == int(frames) and 0 <= weight <= frames * (1 + 1e-9)
        if not is_possible or not _is_information(information):
            raise DamagedFileError(f"{contents.path} holds a state that no track has; expected what Track.save wrote.")
        if "reference" in fields:
            track = track.compared_with(
                contents.tensor("reference", fields.whole("reference", 1)),
                {part.text("option"): part.number("nll") for part in fields.parts("comparison")},
                fields.number("surprise_scale", above=0),
            )
        return track._with(
            _information=information,
            _vector=contents.tensor("vector", classes - 1),
            _weight=weight,
            frames=int(frames),
        )

    def __repr__(self) -> str:
        count = {0: "no frames", 1: "1 frame"}.get(self.frames, f"{self.frames} frames")
        parts = [count, f"{self.posterior.information.n_classes} classes", option_name(self)]
        if self.comparison is not None:
            scores = ", ".join(f"{name} {nll:.4f}" for name, nll in self.comparison.items())
            parts.append(f"chosen by held-out NLL: {scores}")
        return f"Track({'; '.join(parts)})"


def option_name(track: Track) -> str:
    """The options in words: "precision-weighted", or what differs from it."""
    words = []
    if track.noise is not None:
        words.append("noise")
    if track.memory < 1:
        words.append(f"memory {track.memory:g}")
    if track.evidence is not None:
        words.append(f"evidence {track.evidence:g}")
    return " and ".join(words) or "precision-weighted"


def frame_noise(posterior: Posterior, sequences: Iterable[Any]) -> Float[Tensor, "M M"]:
    """Σ_e = Σ_n Σ_c (ĝ_nc − ḡ_n)(·)ᵀ/Σ_n (C_n − 1) of centred logits: how the frames of one object differ.

    From held-out sequences, each a batch of the C_n frames of one object; they need no labels. In the units of
    `posterior.logits`, so it belongs to the posterior's calibration. Only contrasts enter: a common shift of the logits
    changes nothing. float64, on the CPU.
    """
    require_posterior(posterior, "frame_noise")
    means = [posterior.unrounded_logits(frames).mean.double().cpu() for frames in each_sequence(sequences)]
    return scatter_within([mean - mean.mean(1, keepdim=True) for mean in means])


def scatter_within(means: Iterable[Float[Tensor, "C d"]]) -> Float[Tensor, "d d"]:
    """Σ_n Σ_c (m_nc − m̄_n)(·)ᵀ/Σ_n (C_n − 1); `DataError` where no sequence has two frames."""
    total: Tensor | None = None
    freedom = 0
    for mean in means:
        deviations = mean - mean.mean(0, keepdim=True)
        product = deviations.mT @ deviations
        total = product if total is None else total + product
        freedom += len(mean) - 1
    if total is None or freedom == 0:
        raise DataError(
            "There is no sequence of several frames; the scatter within sequences needs one or more of two or more "
            "frames each."
        )
    return linalg.symmetric(total / freedom)


def each_sequence(sequences: Iterable[Any]) -> Iterator[Any]:
    """The items of an iterable of batches, each the frames of one object."""
    if isinstance(sequences, (str, bytes, Mapping)) or not isinstance(sequences, Iterable):
        raise ArgumentError(
            f"sequences is a {type(sequences).__name__}; expected an iterable of sequences, each a batch with the "
            "frames of one object."
        )
    if isinstance(sequences, Tensor) and sequences.ndim < 3:
        raise ArgumentError(
            f"sequences has shape {tuple(sequences.shape)}; expected (objects, frames, …), or a list of (frames, …)."
        )
    return iter(sequences)


def contrasts_of(gaussian: LogitGaussian) -> Contrasts:
    """Means and covariances in 1⊥, in float64 on the CPU, where small matrices are quickest."""
    mean, matrix = gaussian.mean.detach().double().cpu(), gaussian.form.matrix().detach().double().cpu()
    return mean @ linalg.contrast_basis(mean.shape[1], mean.device), linalg.contrast_covariance(matrix)


def rounding_of(posterior: Posterior) -> float:
    """What the entries of a covariance are off by, relatively."""
    return torch.finfo(posterior.information.network.dtype).eps


def in_logits(mean: Float[Tensor, "B d"], covariance: Float[Tensor, "B d d"], posterior: Posterior) -> LogitGaussian:
    """Contrasts back to logits, with mean zero over the classes, in the dtype and on the device of the posterior's."""
    network = posterior.information.network
    basis = linalg.contrast_basis(mean.shape[1] + 1, mean.device)
    spread = linalg.symmetric(basis @ covariance @ basis.mT)
    form = FullCovariance(spread.to(network.device, network.dtype))
    return LogitGaussian((mean @ basis.mT).to(network.device, network.dtype), form)


def growth_of_evidence(count: Any, correlation: float | None) -> Any:
    """κ_C = C/(1 + (C − 1)ρ), from 1 for copies (ρ = 1) to C for frames that are independent given the class (ρ = 0).

    With frames that fade, C is what is left of them, W = Σ_c λ^(C−c).
    """
    return 1.0 if correlation is None else count / (1 + (count - 1) * correlation)


def squared_distance(difference: Float[Tensor, "C d"], covariance: Float[Tensor, "C d d"]) -> Float[Tensor, "C"]:
    """dᵀS⁻¹d."""
    precision = precisions_of(covariance, "The covariance of the difference of frame and track")
    return torch.einsum("ci,cij,cj->c", difference, precision, difference)


def _share(name: str, value: object, what: str, *, zero: bool) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not 0 <= value <= 1 or (value == 0 and not zero):  # type: ignore[operator]
        least = "from 0" if zero else "above 0 and up"
        raise ArgumentError(f"{name} is {value!r}; expected {what}, {least} to 1.")
    return float(value)  # type: ignore[arg-type]


def precisions_of(
    covariances: Float[Tensor, "C d d"], name: str, rounding: float | None = None
) -> Float[Tensor, "C d d"]:
    """P_c⁻¹; `SingularCovarianceError` with what to do about it where a frame is certain."""
    try:
        return linalg.quick_inverse(covariances, name=name, rounding=rounding)
    except SingularCovarianceError as error:
        raise SingularCovarianceError(f"{error} {_CERTAIN}") from None


def _is_information(matrix: Float[Tensor, "d d"]) -> bool:
    largest = float(matrix.abs().max())
    tolerance = 1e-9 * largest
    is_symmetric = float((matrix - matrix.mT).abs().max()) <= tolerance
    return is_symmetric and linalg.is_positive_semidefinite(matrix, tolerance=tolerance)
