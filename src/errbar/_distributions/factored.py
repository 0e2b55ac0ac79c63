"""Logits whose covariances have one basis for all inputs: P^g = Q diag(w) Qᵀ, with Q (M × r) shared and w by input.

A Kronecker-factored last layer has this form, and with many classes it matters: nothing of size M × M is made for an
input unless `covariance` is read. Samples are ĝ + Q (√w ∘ z), one product with Q.

Eigenvectors are unique only up to sign, and up to a rotation where eigenvalues are equal. So that equal posteriors have
equal samples, wherever they were computed, the draws are rotated along: with z = Qᵀ z₀ and an orthonormal Q the samples
are ĝ + √P^g z₀, with the symmetric root, which is unique.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._distributions.logits import LogitGaussian, require_covariance_scale, require_slice, require_temperature
from errbar._distributions.prediction import GaussianSampler, Prediction, require_samples, require_seed, standard_normal


@dataclass(frozen=True, eq=False)
class FactoredSampler(GaussianSampler):
    """f⁽ᵏ⁾ = softmax(ĝ + Q (√w ∘ z⁽ᵏ⁾)), with the same Q and the same draws z for every input; `root` holds √w.

    `normal` is rotated already.
    """

    basis: Float[Tensor, "M r"]
    rotation: Float[Tensor, "r r"] | None

    def _logits(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        logits = self.basis @ (self.root[start:stop, :, None] * self.normal)
        logits += self.mean[start:stop, :, None]
        return logits

    def _redrawn(self, seed: int) -> Float[Tensor, "r K"]:
        return _rotated(super()._redrawn(seed), self.rotation)


class FactoredLogitGaussian(LogitGaussian):
    """N(ĝ, Q diag(w) Qᵀ) with an orthonormal `rotation` of the draws, Qᵀ or the identity."""

    @staticmethod
    def of(
        mean: Float[Tensor, "B M"],
        basis: Float[Tensor, "M r"],
        weights: Float[Tensor, "B r"],
        rotation: Float[Tensor, "r r"] | None = None,
    ) -> FactoredLogitGaussian:
        made = object.__new__(FactoredLogitGaussian)
        parts = {"mean": mean, "_basis": basis, "_weights": weights, "_rotation": rotation, "rank": None}
        for name, value in parts.items():
            object.__setattr__(made, name, value)
        return made

    @staticmethod
    def joined(parts: Sequence[Any]) -> LogitGaussian:
        """The rows of several, one after the other; of parts with different bases by their covariances."""
        first = parts[0]
        if any(part.basis is not first.basis for part in parts):
            return LogitGaussian.joined(parts)
        mean, weights = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "weights"))
        return FactoredLogitGaussian.of(mean, first.basis, weights, first.rotation)

    def _like(self, mean: Float[Tensor, "B M"], weights: Float[Tensor, "B r"]) -> FactoredLogitGaussian:
        return FactoredLogitGaussian.of(mean, self.basis, weights, self.rotation)

    @property
    def basis(self) -> Float[Tensor, "M r"]:
        basis: Tensor = self.__dict__["_basis"]
        return basis

    @property
    def weights(self) -> Float[Tensor, "B r"]:
        weights: Tensor = self.__dict__["_weights"]
        return weights

    @property
    def rotation(self) -> Float[Tensor, "r r"] | None:
        rotation: Tensor | None = self.__dict__["_rotation"]
        return rotation

    @property
    def centred_basis(self) -> Float[Tensor, "M r"]:
        """Q without the common shift of the logits, which softmax ignores and whose variance can be huge."""
        return self.basis - self.basis.mean(0)

    @property
    def covariance(self) -> Float[Tensor, "B M M"]:
        half = self.basis.to(self.weights.dtype) * self.weights.clamp_min(0).sqrt()[:, None, :]
        return half @ half.mT

    @property
    def variance(self) -> Float[Tensor, "B M"]:
        return self.weights @ self.basis.to(self.weights.dtype).square().T

    @property
    def contrast_variance(self) -> Float[Tensor, "B"]:
        squares = self.centred_basis.square().sum(0).to(self.weights.dtype)
        return (self.weights @ squares).clamp_min(0) / (self.mean.shape[1] - 1)

    def __getitem__(self, rows: slice) -> LogitGaussian:
        require_slice(rows)
        return self._like(self.mean[rows], self.weights[rows])

    def rounded(self) -> LogitGaussian:
        return self._like(self.mean, self.weights.to(self.mean.dtype))

    def tempered(self, temperature: float) -> LogitGaussian:
        T = require_temperature(temperature)
        return self._like(self.mean / T, self.weights / T**2)

    def scaled(self, covariance_scale: float) -> LogitGaussian:
        return self._like(self.mean, self.weights * require_covariance_scale(covariance_scale))

    def centered(self) -> LogitGaussian:
        mean = self.mean - self.mean.mean(1, keepdim=True)
        return FactoredLogitGaussian.of(mean, self.centred_basis, self.weights, self.rotation)

    def predict(self, samples: int = 1000, seed: int = 0, *, draws: str = "random") -> Prediction:
        """Monte Carlo along the columns of Q (eq:gmarg); `draws` are "random", "antithetic" or "sobol"."""
        normal = standard_normal(require_samples(samples), self.weights.shape[1], seed, self.mean, draws).T
        sampler = FactoredSampler(
            mean=self.mean - self.mean.amax(1, keepdim=True),
            root=self.deviations(),
            normal=_rotated(normal, self.rotation).contiguous(),
            draws=draws,
            seed=require_seed(seed),
            basis=self.centred_basis.to(self.mean.dtype),
            rotation=self.rotation,
        )
        return Prediction.from_sampler(sampler)

    def deviations(self) -> Float[Tensor, "B r"]:
        """√w."""
        return self.weights.clamp_min(0).sqrt().to(self.mean.dtype)

    def sampling_root(self) -> tuple[Float[Tensor, "B M r"], float]:
        """Q diag √w, rotated and without the common shift: M × r numbers an input, which `predict` does not need."""
        root = self.centred_basis.to(self.mean.dtype) * self.deviations()[:, None, :]
        return (root if self.rotation is None else root @ self.rotation.to(root.dtype)), 0.0


def _rotated(normal: Float[Tensor, "r K"], rotation: Float[Tensor, "r r"] | None) -> Float[Tensor, "r K"]:
    return normal if rotation is None else rotation.to(normal.dtype) @ normal
