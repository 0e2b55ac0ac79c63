"""Gaussians over logits: of each input (`LogitGaussian`), and of several frames together (`JointLogits`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._distributions.calibration import Calibration, require_covariance_scale, require_temperature
from errbar._distributions.covariance import Covariance, FullCovariance, JointCovariance
from errbar._distributions.prediction import Prediction, prediction_of
from errbar._distributions.sampling import GaussianSampler, SamplingRoot
from errbar._model.outputs import CLASSES, OutputKind, require_outputs
from errbar.errors import ArgumentError, CovarianceError, MismatchError

# What makes `covariance` a field that is taken from `form` when it is read: `repr` and `dataclasses.replace` know it.
_MATRIX_OF_FORM: Any = property(lambda gaussian: gaussian.form.matrix())
_VALUES_OF_FORM: Any = property(lambda joint: joint.form.values)


@dataclass(frozen=True, eq=False, init=False)
class LogitGaussian:
    """N(ĝ, P^g) for each of B inputs (eq:linearize).

    `rank` is set by `fuse_frames`: the rank of the covariance between the frames that it could invert. `classes` are
    set by `logits(x, top=…)`: which of the network's classes the columns are. `form` holds P^g, in full or more
    compactly. `origin` is the fingerprint of the posterior whose logits these are, as they are: what changes them
    (`tempered`, `scaled`, `calibrated`) drops it. `kind` says what the logits mean; of several labels there is no
    common shift, and M is their number L.
    """

    mean: Float[Tensor, "B M"]
    covariance: Float[Tensor, "B M M"] = _MATRIX_OF_FORM
    rank: int | None = None
    classes: Int[Tensor, "B M"] | None = field(default=None, repr=False)
    origin: str | None = field(default=None, repr=False)
    kind: OutputKind = field(default=CLASSES, repr=False)
    form: Covariance = field(init=False, repr=False)

    def __init__(
        self,
        mean: Float[Tensor, "B M"],
        covariance: Float[Tensor, "B M M"] | Covariance,
        rank: int | None = None,
        classes: Int[Tensor, "B M"] | None = None,
        origin: str | None = None,
        kind: OutputKind | str = CLASSES,
    ) -> None:
        """A tensor is checked; a covariance object, which is valid by construction, is not, nor is its mean."""
        kind = require_outputs(kind) if isinstance(kind, str) else kind
        form = covariance if _is_form(covariance) else _checked_covariance(mean, covariance, kind)
        values = {"mean": mean, "form": form, "rank": rank, "classes": classes, "origin": origin, "kind": kind}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def concatenated(parts: Sequence[LogitGaussian]) -> LogitGaussian:
        """The rows of several, one after the other; forms that hold no M × M matrix make none here either."""
        if len(parts) == 1:
            return parts[0]
        form = parts[0].form.joined([part.form for part in parts[1:]])
        classes = [part.classes for part in parts if part.classes is not None]
        origins = {part.origin for part in parts}
        return LogitGaussian(
            torch.cat([part.mean for part in parts]),
            form,
            classes=torch.cat(classes) if classes else None,
            origin=origins.pop() if len(origins) == 1 else None,
            kind=parts[0].kind,
        )

    def of_origin(self, origin: str) -> LogitGaussian:
        """The same Gaussians, known to be those of the posterior with this fingerprint."""
        return LogitGaussian(self.mean, self.form, self.rank, self.classes, origin, self.kind)

    def of_kind(self, kind: OutputKind) -> LogitGaussian:
        """The same Gaussians of logits that mean something else."""
        if kind is self.kind:
            return self
        return LogitGaussian(self.mean, self.form, self.rank, self.classes, self.origin, kind)

    @property
    def variance(self) -> Float[Tensor, "B M"]:
        """The diagonal of P^g."""
        return self.form.variance()

    @property
    def contrast_variance(self) -> Float[Tensor, "B"] | Float[Tensor, "B L"]:
        """The mean variance of the M−1 contrasts: tr(P^g − mean)/(M−1), the part that softmax can see.

        A label is two classes with the logits 0 and g, so of several labels it is half the variance of each.
        """
        return self.form.contrast_variance() if self.kind.has_gauge else self.variance / 2

    def __repr__(self) -> str:
        inputs, classes = self.mean.shape
        kind = "classes" if self.classes is None else "classes chosen for each"
        about = f"{str(self.mean.dtype).removeprefix('torch.')} on {self.mean.device}"
        return f"LogitGaussian: {inputs:,} input{'s' * (inputs != 1)}, {classes:,} {kind}, {about}"

    def __len__(self) -> int:
        return len(self.mean)

    def __getitem__(self, rows: slice) -> LogitGaussian:
        if not isinstance(rows, slice):
            raise ArgumentError(f"A LogitGaussian is indexed by slices, got {rows!r}; use gaussian[i : i + 1].")
        classes = None if self.classes is None else self.classes[rows]
        return LogitGaussian(self.mean[rows], self.form[rows], self.rank, classes, self.origin, self.kind)

    def at(self, rows: Tensor) -> LogitGaussian:
        """Some of the inputs, by a mask or by their numbers."""
        classes = None if self.classes is None else self.classes[rows]
        return LogitGaussian(self.mean[rows], self.form[rows], self.rank, classes, self.origin, self.kind)

    def of_classes(self, classes: Int[Tensor, "B t"]) -> LogitGaussian:
        """The logits of some classes of each input, in this order."""
        return LogitGaussian(
            self.mean.gather(1, classes), self.form.of_classes(classes), self.rank, classes, self.origin, self.kind
        )

    def rounded(self) -> LogitGaussian:
        """The covariance in the dtype of the mean."""
        form = self.form.to(self.mean.dtype)
        return LogitGaussian(self.mean, form, self.rank, self.classes, self.origin, self.kind)

    def tempered(self, temperature: float) -> LogitGaussian:
        """N(ĝ/T, P^g/T²): the distribution of g/T (eq:temp scaling)."""
        T = require_temperature(temperature)
        return LogitGaussian(self.mean / T, self.form / T**2, self.rank, self.classes, kind=self.kind)

    def scaled(self, covariance_scale: float) -> LogitGaussian:
        """N(ĝ, T_c P^g) (sec:high-level)."""
        scale = require_covariance_scale(covariance_scale)
        return LogitGaussian(self.mean, self.form * scale, self.rank, self.classes, kind=self.kind)

    def calibrated(self, calibration: Calibration) -> LogitGaussian:
        """N(ĝ/T(x), T_c P^g/T(x)²), T(x) = T √(1 + c v̄(x)) with v̄ the `contrast_variance` of this Gaussian."""
        if calibration.softening == 0:
            form = self.form / calibration.temperature**2 * calibration.covariance_scale
            return LogitGaussian(self.mean / calibration.temperature, form, self.rank, self.classes, kind=self.kind)
        if self.classes is not None:
            raise ArgumentError(
                "These are the logits of some classes alone, and softening needs the variance of all of them; "
                "expected logits(x) without top. logits(x, top=…) of a calibrated posterior has its softening in it."
            )
        T = calibration.temperatures(self.contrast_variance)
        if not self.kind.has_gauge:
            form = self.form.rescaled(1 / T) * calibration.covariance_scale
            return LogitGaussian(self.mean / T.to(self.mean.dtype), form, self.rank, kind=self.kind)
        form = self.form.divided(T.square()) * calibration.covariance_scale
        return LogitGaussian(self.mean / T.to(self.mean.dtype)[:, None], form, self.rank)

    def with_label_factors(self, factors: Sequence[tuple[float, float]]) -> LogitGaussian:
        """The logit of label l divided by t_l, and its deviations times √s_l, for a pair (t_l, s_l) of each label."""
        T, scale = torch.tensor(factors, dtype=torch.float64, device=self.mean.device).T
        form = self.form.rescaled(scale.sqrt() / T)
        return LogitGaussian(self.mean / T.to(self.mean.dtype), form, self.rank, kind=self.kind)

    def centered(self) -> LogitGaussian:
        """The distribution of g minus its mean over the classes, which has the same softmax."""
        self._require_gauge("centered()")
        mean = self.mean - self.mean.mean(1, keepdim=True)
        return LogitGaussian(mean, self.form.centred(), self.rank, self.classes, self.origin)

    def predict(self, samples: int = 1000, seed: int = 0, *, draws: str = "random") -> Prediction:
        """Monte Carlo in the M−1 contrasts (eq:gmarg); `draws` are "random", "antithetic" or "sobol".

        Of some `classes` alone, the probabilities are conditional on these: they sum to one over them.
        """
        root, jitter = self.form.sampling_root(self.mean.dtype, centred=self.kind.has_gauge)
        return prediction_of(GaussianSampler.of(self.mean, root, samples, seed, draws, self.kind), jitter)

    def sampling_root(self) -> SamplingRoot:
        """The root that turns draws into logits, as in `predict`."""
        return self.form.sampling_root(self.mean.dtype, centred=self.kind.has_gauge)[0]

    def mean_field_pmf(self) -> Float[Tensor, "B M"]:
        """A closed form for the PMF, without samples and so without error bars: an approximation.

        Each pair of classes is compared by itself, with the probit approximation of the logistic integral,
            s_ij = σ(d_ij/√(1 + π/8 · Var d_ij)),   d_ij = g_i − g_j,
        and the comparisons are put together as if they were exact softmax ratios, f_i ∝ 1/(1 + Σ_{j≠i} (1/s_ij − 1)).
        It depends on contrasts only, and for two classes it is the probit approximation itself. Its error is in
        docs/performance.md. Of several labels it is the probit approximation of each.
        """
        if not self.kind.has_gauge:
            return torch.sigmoid(self.mean / (1 + torch.pi / 8 * self.variance.clamp_min(0)).sqrt())
        difference = self.mean[:, :, None] - self.mean[:, None, :]
        scaled = difference / (1 + torch.pi / 8 * self.form.difference_variance().clamp_min(0)).sqrt()
        # 1/s − 1 = e^{−scaled}; the class itself contributes e⁰ = 1.
        return torch.softmax(-torch.logsumexp(-scaled, 2), 1)

    def _require_gauge(self, name: str) -> None:
        if not self.kind.has_gauge:
            raise ArgumentError(
                f"{name} takes a common shift of the logits away, and these are of outputs='{self.kind.name}', where "
                "there is none; expected logits of outputs='classes'. Use the Gaussian as it is."
            )


@dataclass(frozen=True, eq=False, init=False)
class JointLogits:
    """The logits of C frames of one object together: covariance[i, :, j, :] is R_ij = J_i P J_jᵀ.

    Frames are near copies of each other that differ by little. So the covariance is always float64, even if the network
    and the mean are float32; one that is given in float32 is cast. `form` holds it, and what is known of its rounding.
    """

    mean: Float[Tensor, "C M"]
    covariance: Float[Tensor, "C M C M"] = _VALUES_OF_FORM
    form: JointCovariance = field(init=False, repr=False)

    def __init__(self, mean: Float[Tensor, "C M"], covariance: Float[Tensor, "C M C M"] | JointCovariance) -> None:
        """A tensor is checked, and a covariance object is not, as in `LogitGaussian`."""
        form = covariance if isinstance(covariance, JointCovariance) else _checked_joint_covariance(mean, covariance)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "form", form)

    def __repr__(self) -> str:
        frames, classes = self.mean.shape
        return f"JointLogits: {frames:,} frame{'s' * (frames != 1)} of {classes:,} classes, on {self.mean.device}"

    def __len__(self) -> int:
        return len(self.mean)

    def chosen(self, frames: Sequence[int]) -> JointLogits:
        """The joint distribution of some of the frames, in this order."""
        chosen = torch.tensor(list(frames), dtype=torch.long, device=self.mean.device)
        return JointLogits(self.mean[chosen], self.form.chosen(chosen))

    def calibrated(self, calibration: Calibration) -> JointLogits:
        """Means z_i/T(x_i) and covariances T_c R_ij/(T(x_i) T(x_j)), with v̄(x_i) from R_ii; T(x_i) = T where c = 0."""
        T, scale = calibration.temperature, calibration.covariance_scale
        if calibration.softening == 0:
            return JointLogits(self.mean / T, self.form.calibrated(T, scale))
        each = calibration.temperatures(self.form.contrast_variance())
        return JointLogits(
            self.mean / each.to(self.mean.dtype)[:, None], self.form.divided(each).calibrated(1.0, scale)
        )

    def to(self, device: torch.device | str) -> JointLogits:
        return JointLogits(self.mean.to(device), self.form.to(device))

    def marginals(self) -> LogitGaussian:
        """Each frame by itself, as `posterior.logits` gives it: without the covariance between frames."""
        blocks = self.covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        return LogitGaussian(self.mean, FullCovariance(blocks.contiguous())).rounded()


def _is_form(value: Any) -> TypeGuard[Covariance]:
    return _has_form(type(value))  # type: ignore[arg-type]  # a type is hashable


@cache
def _has_form(kind: type) -> bool:
    """Whether objects of a type are covariances, asked once: Python looks up every method of a protocol each time."""
    return issubclass(kind, Covariance)


def _checked_covariance(mean: Tensor, covariance: Any, kind: OutputKind) -> FullCovariance:
    _require_logits(mean, "mean", kind)
    size, classes = mean.shape
    _require_shape(covariance, (size, classes, classes), mean)
    linalg.require_covariance(covariance, name="The covariance of the logits")
    return FullCovariance(covariance)


def _checked_joint_covariance(mean: Tensor, covariance: Tensor) -> JointCovariance:
    _require_logits(mean, "mean", CLASSES)
    frames, classes = mean.shape
    _require_shape(covariance, (frames, classes, frames, classes), mean)
    size = frames * classes
    linalg.require_covariance(covariance.reshape(size, size), name="The joint covariance of the frames")
    return JointCovariance(
        covariance.double(),
        rounding=torch.finfo(covariance.dtype).eps,
        network_rounding=torch.finfo(mean.dtype).eps,
    )


def _require_logits(mean: Tensor, name: str, kind: OutputKind) -> None:
    least = 2 if kind.has_gauge else 1
    if not isinstance(mean, Tensor) or mean.ndim != 2 or mean.shape[1] < least:
        shape = tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
        expected = "(inputs, classes) with two or more classes" if kind.has_gauge else f"(inputs, {kind.noun})"
        raise MismatchError(f"The {name} has shape {shape}; expected {expected}.")
    if mean.dtype not in (torch.float32, torch.float64):
        raise MismatchError(f"The {name} is {mean.dtype}; expected float32 or float64.")
    if not bool(torch.isfinite(mean).all()):
        raise CovarianceError(f"The {name} holds NaN or infinite values; expected finite logits.")


def _require_shape(covariance: Tensor, shape: tuple[int, ...], mean: Tensor) -> None:
    if not isinstance(covariance, Tensor) or tuple(covariance.shape) != shape:
        actual = tuple(covariance.shape) if isinstance(covariance, Tensor) else type(covariance).__name__
        raise MismatchError(
            f"The covariance has shape {actual}; expected {shape} for a mean of shape {tuple(mean.shape)}."
        )
    if covariance.dtype not in (mean.dtype, torch.float64) or covariance.device != mean.device:
        raise MismatchError(
            f"The covariance is {covariance.dtype} on {covariance.device} and the mean {mean.dtype} on {mean.device}; "
            "expected the same for both, or a covariance in float64."
        )
