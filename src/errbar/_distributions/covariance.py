"""Covariances of logits: P^g of each input, full, diagonal, factored or drawn, and R of several frames together.

A covariance object is valid by construction. With many classes the form matters: a diagonal, a factored or a drawn one
makes nothing of size M × M for an input unless `matrix` is called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._distributions.sampling import SamplingRoot


@runtime_checkable
class Covariance(Protocol):
    """What a `LogitGaussian` asks of its covariance."""

    def matrix(self) -> Float[Tensor, "B M M"]: ...

    def variance(self) -> Float[Tensor, "B M"]: ...

    def contrast_variance(self) -> Float[Tensor, "B"]:
        """The mean variance of the M−1 contrasts."""

    def difference_variance(self) -> Float[Tensor, "B M M"]:
        """Var(g_i − g_j) for i ≠ j; the diagonal has no meaning."""

    def __getitem__(self, rows: slice | Tensor) -> Covariance: ...

    def __mul__(self, number: float) -> Covariance: ...

    def __truediv__(self, number: float) -> Covariance: ...

    def divided(self, by: Float[Tensor, "B"]) -> Covariance:
        """P^g of each input by a number of its own."""

    def rescaled(self, by: Float[Tensor, "M"] | Float[Tensor, "B M"]) -> Covariance:
        """diag a P^g diag a: the covariance of each logit times a number of its own."""

    def to(self, dtype: torch.dtype) -> Covariance: ...

    def of_classes(self, classes: Int[Tensor, "B t"]) -> FullCovariance:
        """The rows and columns of some classes of each input."""

    def centred(self) -> Covariance:
        """The covariance of g minus its mean over the classes."""

    def joined(self, others: Sequence[Covariance]) -> Covariance:
        """The rows of this one and of others, one after the other; in full where their forms differ."""

    def sampling_root(self, dtype: torch.dtype, *, centred: bool = True) -> tuple[SamplingRoot, float]:
        """A with A Aᵀ = P^g in `dtype`, on contrasts alone where it is `centred`; and the jitter that it needed."""


@dataclass(frozen=True, eq=False)
class FullCovariance:
    """P^g as it is."""

    values: Float[Tensor, "B M M"]

    def matrix(self) -> Float[Tensor, "B M M"]:
        return self.values

    def variance(self) -> Float[Tensor, "B M"]:
        return self.values.diagonal(dim1=1, dim2=2)

    def contrast_variance(self) -> Float[Tensor, "B"]:
        """tr(P^g − mean)/(M−1)."""
        classes = self.values.shape[1]
        total = self.variance().sum(1) - self.values.sum((1, 2)) / classes
        return total.clamp_min(0) / (classes - 1)

    def difference_variance(self) -> Float[Tensor, "B M M"]:
        return _pair_sums(self.variance()) - 2 * self.values

    def __getitem__(self, rows: slice | Tensor) -> FullCovariance:
        return FullCovariance(self.values[rows])

    def __mul__(self, number: float) -> FullCovariance:
        return FullCovariance(self.values * number)

    def __truediv__(self, number: float) -> FullCovariance:
        return FullCovariance(self.values / number)

    def divided(self, by: Float[Tensor, "B"]) -> FullCovariance:
        return FullCovariance(self.values / by.to(self.values.dtype)[:, None, None])

    def rescaled(self, by: Float[Tensor, "M"] | Float[Tensor, "B M"]) -> FullCovariance:
        scale = by.to(self.values.dtype)
        return FullCovariance(self.values * scale[..., :, None] * scale[..., None, :])

    def to(self, dtype: torch.dtype) -> FullCovariance:
        return FullCovariance(self.values.to(dtype))

    def of_classes(self, classes: Int[Tensor, "B t"]) -> FullCovariance:
        rows = self.values.gather(1, classes[:, :, None].expand(-1, -1, self.values.shape[2]))
        return FullCovariance(rows.gather(2, classes[:, None, :].expand(-1, classes.shape[1], -1)))

    def centred(self) -> FullCovariance:
        columns = self.values - self.values.mean(1, keepdim=True)
        return FullCovariance(linalg.symmetric(columns - columns.mean(2, keepdim=True)))

    def joined(self, others: Sequence[Covariance]) -> FullCovariance:
        return FullCovariance(torch.cat([self.values, *(other.matrix() for other in others)]))

    def sampling_root(self, dtype: torch.dtype, *, centred: bool = True) -> tuple[SamplingRoot, float]:
        """A = E L with L the lower Cholesky factor of EᵀP^gE, so that A Aᵀ is the centred P^g; or that of P^g."""
        if not centred:
            lower, jitter = linalg.safe_cholesky(
                self.values, name="The covariance of the logits", limit=linalg.largest_jitter(self.values.dtype)
            )
            return SamplingRoot(lower.to(dtype)), jitter
        lower, jitter = linalg.safe_cholesky(
            linalg.contrast_covariance(self.values),
            name="The covariance of the logits",
            limit=linalg.largest_jitter(self.values.dtype),
        )
        basis = linalg.contrast_basis(self.values.shape[1], self.values.device)
        return SamplingRoot((basis @ lower).to(dtype)), jitter


@dataclass(frozen=True, eq=False)
class DiagonalCovariance:
    """P^g = diag v: independent logits, drawn one by one."""

    values: Float[Tensor, "B M"]

    def matrix(self) -> Float[Tensor, "B M M"]:
        return torch.diag_embed(self.values)

    def variance(self) -> Float[Tensor, "B M"]:
        return self.values

    def contrast_variance(self) -> Float[Tensor, "B"]:
        return self.values.mean(1)

    def difference_variance(self) -> Float[Tensor, "B M M"]:
        return _pair_sums(self.values)

    def __getitem__(self, rows: slice | Tensor) -> DiagonalCovariance:
        return DiagonalCovariance(self.values[rows])

    def __mul__(self, number: float) -> DiagonalCovariance:
        return DiagonalCovariance(self.values * number)

    def __truediv__(self, number: float) -> DiagonalCovariance:
        return DiagonalCovariance(self.values / number)

    def divided(self, by: Float[Tensor, "B"]) -> DiagonalCovariance:
        return DiagonalCovariance(self.values / by.to(self.values.dtype)[:, None])

    def rescaled(self, by: Float[Tensor, "M"] | Float[Tensor, "B M"]) -> DiagonalCovariance:
        return DiagonalCovariance(self.values * by.to(self.values.dtype).square())

    def to(self, dtype: torch.dtype) -> DiagonalCovariance:
        return DiagonalCovariance(self.values.to(dtype))

    def of_classes(self, classes: Int[Tensor, "B t"]) -> FullCovariance:
        return FullCovariance(torch.diag_embed(self.values.gather(1, classes)))

    def centred(self) -> FullCovariance:
        return FullCovariance(self.matrix()).centred()

    def joined(self, others: Sequence[Covariance]) -> Covariance:
        parts = [other.values for other in others if isinstance(other, DiagonalCovariance)]
        if len(parts) < len(others):
            return FullCovariance(self.matrix()).joined(others)
        return DiagonalCovariance(torch.cat([self.values, *parts]))

    def sampling_root(self, dtype: torch.dtype, *, centred: bool = True) -> tuple[SamplingRoot, float]:
        """√v; a common shift of such draws does no harm."""
        return SamplingRoot(self.values.clamp_min(0).sqrt().to(dtype)), 0.0


@dataclass(frozen=True, eq=False)
class FactoredCovariance:
    """P^g = Q diag(w) Qᵀ with one `basis` Q for all inputs, as a Kronecker-factored last layer has it; `weights` are w.

    Samples are ĝ + Q (√w ∘ z), one product with Q. Eigenvectors are unique only up to sign, and up to a rotation where
    eigenvalues are equal. So that equal posteriors have equal samples, wherever they were computed, the draws are
    rotated along: with z = Qᵀ z₀ and an orthonormal Q the samples are ĝ + √P^g z₀, with the symmetric root, which is
    unique. `rotation` is that Qᵀ, or the identity where it is None.
    """

    basis: Float[Tensor, "M r"]
    weights: Float[Tensor, "B r"]
    rotation: Float[Tensor, "r r"] | None = None

    def matrix(self) -> Float[Tensor, "B M M"]:
        half = self.basis.to(self.weights.dtype) * self.weights.clamp_min(0).sqrt()[:, None, :]
        return half @ half.mT

    def variance(self) -> Float[Tensor, "B M"]:
        return self.weights @ self.basis.to(self.weights.dtype).square().T

    def contrast_variance(self) -> Float[Tensor, "B"]:
        squares = self._centred_basis().square().sum(0).to(self.weights.dtype)
        return (self.weights @ squares).clamp_min(0) / (self.basis.shape[0] - 1)

    def difference_variance(self) -> Float[Tensor, "B M M"]:
        return _pair_sums(self.variance()) - 2 * self.matrix()

    def __getitem__(self, rows: slice | Tensor) -> FactoredCovariance:
        return replace(self, weights=self.weights[rows])

    def __mul__(self, number: float) -> FactoredCovariance:
        return replace(self, weights=self.weights * number)

    def __truediv__(self, number: float) -> FactoredCovariance:
        return replace(self, weights=self.weights / number)

    def divided(self, by: Float[Tensor, "B"]) -> FactoredCovariance:
        return replace(self, weights=self.weights / by.to(self.weights.dtype)[:, None])

    def rescaled(self, by: Float[Tensor, "M"] | Float[Tensor, "B M"]) -> Covariance:
        """With one number for each logit the basis changes; with one for each input besides, it is in full."""
        if by.ndim == 1:
            return replace(self, basis=self.basis * by.to(self.basis.dtype)[:, None])
        return FullCovariance(self.matrix()).rescaled(by)

    def to(self, dtype: torch.dtype) -> FactoredCovariance:
        return replace(self, weights=self.weights.to(dtype))

    def of_classes(self, classes: Int[Tensor, "B t"]) -> FullCovariance:
        half = self.basis.to(self.weights.dtype)[classes] * self.weights.clamp_min(0).sqrt()[:, None, :]
        return FullCovariance(half @ half.mT)

    def centred(self) -> FactoredCovariance:
        return replace(self, basis=self._centred_basis())

    def joined(self, others: Sequence[Covariance]) -> Covariance:
        parts = [
            other.weights for other in others if isinstance(other, FactoredCovariance) and other.basis is self.basis
        ]
        if len(parts) < len(others):
            return FullCovariance(self.matrix()).joined(others)
        return replace(self, weights=torch.cat([self.weights, *parts]))

    def sampling_root(self, dtype: torch.dtype, *, centred: bool = True) -> tuple[SamplingRoot, float]:
        """√w along Q, without the common shift where it is `centred`."""
        deviations = self.weights.clamp_min(0).sqrt().to(dtype)
        basis = self._centred_basis() if centred else self.basis
        return SamplingRoot(deviations, basis.to(dtype), self.rotation), 0.0

    def _centred_basis(self) -> Float[Tensor, "M r"]:
        """Q without the common shift of the logits, which softmax ignores and whose variance can be huge."""
        return self.basis - self.basis.mean(0)


@dataclass(frozen=True, eq=False)
class DrawnCovariance:
    """P^g ≈ (1/K) Σ_k d_k d_kᵀ by K draws d_k of the logits' deviations from ĝ, the same number for each input.

    The draws are what is known. Predictions use them as they are, so that these have the distribution of the draws
    themselves; A = D/√K has A Aᵀ = P^g for whatever needs more samples than there are.
    """

    deviations: Float[Tensor, "B M K"]

    @property
    def draws(self) -> int:
        return self.deviations.shape[2]

    def matrix(self) -> Float[Tensor, "B M M"]:
        return self.deviations @ self.deviations.mT / self.draws

    def variance(self) -> Float[Tensor, "B M"]:
        return self.deviations.square().mean(2)

    def contrast_variance(self) -> Float[Tensor, "B"]:
        """Σ_m of the variances less that of the mean over the classes, M times: tr(P^g − mean)/(M−1)."""
        classes = self.deviations.shape[1]
        # The variance over the classes of each draw, so that a large common shift does not cancel.
        return self.deviations.var(1, correction=0).mean(1) * classes / (classes - 1)

    def difference_variance(self) -> Float[Tensor, "B M M"]:
        return _pair_sums(self.variance()) - 2 * self.matrix()

    def __getitem__(self, rows: slice | Tensor) -> DrawnCovariance:
        return DrawnCovariance(self.deviations[rows])

    def __mul__(self, number: float) -> DrawnCovariance:
        return DrawnCovariance(self.deviations * math.sqrt(number))

    def __truediv__(self, number: float) -> DrawnCovariance:
        return DrawnCovariance(self.deviations / math.sqrt(number))

    def divided(self, by: Float[Tensor, "B"]) -> DrawnCovariance:
        return DrawnCovariance(self.deviations / by.sqrt().to(self.deviations.dtype)[:, None, None])

    def rescaled(self, by: Float[Tensor, "M"] | Float[Tensor, "B M"]) -> DrawnCovariance:
        return DrawnCovariance(self.deviations * by.to(self.deviations.dtype)[..., None])

    def to(self, dtype: torch.dtype) -> DrawnCovariance:
        return DrawnCovariance(self.deviations.to(dtype))

    def of_classes(self, classes: Int[Tensor, "B t"]) -> FullCovariance:
        own = self.deviations.gather(1, classes[:, :, None].expand(-1, -1, self.draws))
        return FullCovariance(own @ own.mT / self.draws)

    def centred(self) -> DrawnCovariance:
        return DrawnCovariance(self.deviations - self.deviations.mean(1, keepdim=True))

    def joined(self, others: Sequence[Covariance]) -> Covariance:
        parts = [
            other.deviations for other in others if isinstance(other, DrawnCovariance) and other.draws == self.draws
        ]
        if len(parts) < len(others):
            return FullCovariance(self.matrix()).joined(others)
        return DrawnCovariance(torch.cat([self.deviations, *parts]))

    def sampling_root(self, dtype: torch.dtype, *, centred: bool = True) -> tuple[SamplingRoot, float]:
        """The draws themselves, without the common shift where it is `centred`."""
        draws = self.centred() if centred else self
        return SamplingRoot(draws.deviations.to(dtype), kept=True), 0.0


@dataclass(frozen=True, eq=False)
class JointCovariance:
    """R of the logits of C frames, values[i, :, j, :] = R_ij = J_i P J_jᵀ, in float64.

    `contrast_root` A, where there is one, has A Aᵀ = EᵀR E for the contrasts of all frames, which R itself holds less
    accurately: beside a common shift of the logits whose variance is v, its contrasts are rounded to v · eps.
    `rounding` is that of the numbers in R, `network_rounding` that of the network's outputs and derivatives.
    """

    values: Float[Tensor, "C M C M"]
    contrast_root: Float[Tensor, "C M-1 k"] | None = None
    rounding: float = torch.finfo(torch.float64).eps
    network_rounding: float = torch.finfo(torch.float64).eps

    @staticmethod
    def from_root(root: Float[Tensor, "C M k"], network_rounding: float) -> JointCovariance:
        """From A with A Aᵀ = QᵀR Q, Q = [E, 1/√M] for every frame: contrasts and shift apart."""
        frames, classes, _ = root.shape
        whole = (linalg.class_rotation(classes, root.device) @ root).flatten(0, 1)
        values = linalg.symmetric(whole @ whole.mT).reshape(frames, classes, frames, classes)
        return JointCovariance(values, root[:, :-1], network_rounding=network_rounding)

    def chosen(self, frames: Int[Tensor, "c"]) -> JointCovariance:
        """The covariance of some of the frames, in this order."""
        root = None if self.contrast_root is None else self.contrast_root[frames]
        return replace(self, values=self.values[frames][:, :, frames], contrast_root=root)

    def contrast_variance(self) -> Float[Tensor, "C"]:
        """The mean variance of the M−1 contrasts of each frame."""
        if self.contrast_root is not None:
            return self.contrast_root.square().sum(2).mean(1)
        return FullCovariance(self.values.diagonal(dim1=0, dim2=2).permute(2, 0, 1)).contrast_variance()

    def divided(self, by: Float[Tensor, "C"]) -> JointCovariance:
        """R_ij/(b_i b_j): the covariance of each frame's logits by a number of its own."""
        root = None if self.contrast_root is None else self.contrast_root / by[:, None, None]
        products = by[:, None] * by
        return replace(self, values=self.values / products[:, None, :, None], contrast_root=root)

    def calibrated(self, temperature: float, covariance_scale: float) -> JointCovariance:
        """T_c R/T²."""
        root = None if self.contrast_root is None else self.contrast_root * (math.sqrt(covariance_scale) / temperature)
        return replace(self, values=self.values * (covariance_scale / temperature**2), contrast_root=root)

    def to(self, device: torch.device | str) -> JointCovariance:
        root = None if self.contrast_root is None else self.contrast_root.to(device)
        return replace(self, values=self.values.to(device), contrast_root=root)


def drawn(form: Covariance, samples: int, seed: int) -> DrawnCovariance:
    """The same covariance by K draws, where it is not drawn already; `samples` and `seed` are those of the draws.

    Of a factored one with the common shift of the logits, which some weights of the Fisher information depend on; of a
    full one, whose draws are of its contrasts, without.
    """
    if isinstance(form, DrawnCovariance):
        return form
    if isinstance(form, FactoredCovariance):
        deviations = form.weights.clamp_min(0).sqrt()
        root = SamplingRoot(deviations, form.basis.to(deviations.dtype), form.rotation)
    else:
        root = form.sampling_root(form.variance().dtype)[0]
    return DrawnCovariance(root.spread(slice(None), root.draws(samples, seed, root.values)))


def _pair_sums(variance: Float[Tensor, "B M"]) -> Float[Tensor, "B M M"]:
    return variance[:, :, None] + variance[:, None, :]
