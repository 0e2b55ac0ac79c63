"""The posterior of the Kronecker-factored structure: a diagonal one in the eigenbasis of each layer.

With W = Q_G W̃ Q_Aᵀ the entries of W̃ are independent, with variances v_ia = 1/(λ_i μ_a/count + δ). So for a layer that
is used once, P^g = Ṽ diag(Σ_a v_ia h̃_a²) Ṽᵀ with h̃ = Q_Aᵀ h and Ṽ = V Q_G; where it returns the logits themselves, Ṽ is
Q_G for every input, and P^g stays in that form.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._base.memory import require_memory
from errbar._base.triangles import by_columns, laid_out, read_jitter, read_positive
from errbar._curvature.structure import Description, IndependentVariances, Refactorised, Tensors
from errbar._derivative.layers import LinearLayer, SharedTerm, Spans, gathered, scatter_
from errbar._derivative.layerwise import LayerwiseDerivative
from errbar._distributions.covariance import FactoredCovariance, FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar.errors import DamagedFileError

# Draws of the parameters of one layer that are turned at a time: each product on the way is as large again.
_DRAWN_BYTES = {"cpu": 2**23, "cuda": 2**28}


def empty_matrix(n: int, device: torch.device) -> Float[Tensor, "n n"]:
    """Zeros in float64; refused where they cannot be held."""
    require_memory(8 * n * n, device, what=f"The full {n:,} × {n:,} matrix", instead="Use logits and predict.")
    return torch.zeros(n, n, dtype=torch.float64, device=device)


def set_block_(whole: Float[Tensor, "n n"], layer: LinearLayer, block: Float[Tensor, "k k"]) -> None:
    """Put the block of one layer, in the order (output i, entry a of h), where its parameters lie."""
    positions = layer.positions().reshape(-1).to(whole.device)
    whole[positions[:, None], positions[None, :]] = block


@dataclass(frozen=True, eq=False)
class KroneckerBasis:
    """Q_G, Q_A and the precisions λ_i μ_a/count + δ of one layer."""

    layer: LinearLayer
    outer: Float[Tensor, "d d"]
    inner: Float[Tensor, "p p"]
    precision: Float[Tensor, "d p"]

    @cached_property
    def variances(self) -> Float[Tensor, "d p"]:
        return self.precision.reciprocal()

    def to(self, target: torch.device | torch.dtype) -> KroneckerBasis:
        return KroneckerBasis(self.layer, self.outer.to(target), self.inner.to(target), self.precision.to(target))

    def covariance(self) -> Float[Tensor, "k k"]:
        """P[ia, jb] = Σ_k Q_ik Q_jk Σ_c v_kc Q_ac Q_bc."""
        inside = (self.inner * self.variances[:, None, :]) @ self.inner.T
        k = self.precision.numel()
        return torch.einsum("ik,jk,kab->iajb", self.outer, self.outer, inside).reshape(k, k)

    def rotated(self, term: SharedTerm) -> SharedTerm:
        return term.rotated(self.outer, self.inner)


class KroneckerFactor(Refactorised):
    """P by the eigenbases of the layers, and by the precisions of all other parameters."""

    def __init__(
        self,
        n: int,
        bases: tuple[KroneckerBasis, ...],
        rest_spans: Spans,
        rest: Float[Tensor, "k"],
        jitter: float,
        negative_share: float = 0.0,
    ) -> None:
        self.n_parameters = n
        self.bases = bases
        self.rest_spans = rest_spans
        self.rest = rest
        self.jitter = jitter
        # How far rounding took the information below zero, as a share of the prior, before it was set to zero there.
        self.negative_share = negative_share
        self._lock = threading.Lock()
        self._cache: dict[torch.dtype, tuple[KroneckerBasis, ...]] = {torch.float64: bases}

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        whole = empty_matrix(self.n_parameters, self.rest.device)
        for basis in self.bases:
            set_block_(whole, basis.layer, basis.covariance())
        if len(self.rest_spans):
            positions = self.rest_spans.positions(whole.device)
            whole[positions, positions] = 1 / self.rest
        return whole

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: LayerwiseDerivative) -> LogitGaussian:
        """N(ĝ, P^g); in factored form if the whole selection is one layer that returns the logits."""
        bases = self._bases(derivative.explicit.dtype)
        if len(bases) == 1 and not len(self.rest_spans) and derivative.terms[0].outer is None:
            h = derivative.terms[0].inner[:, 0] @ bases[0].inner
            outer = self.bases[0].outer
            return LogitGaussian(mean, FactoredCovariance(outer, h.square() @ bases[0].variances.T, rotation=outer.T))
        half = derivative.explicit * self.rest.rsqrt().to(derivative.explicit.dtype)
        covariance = half @ half.mT
        for basis, term in zip(bases, derivative.terms, strict=True):
            covariance += basis.rotated(term).covariance(basis.variances)
        return LogitGaussian(mean, FullCovariance(covariance))

    def joint_halves(
        self, derivative: LayerwiseDerivative, rotation: Float[Tensor, "M M"]
    ) -> Iterator[Float[Tensor, "CM k"]]:
        """W_l = QᵀJ_l P_l^½ of each layer in its eigenbasis and of the rest, with Σ_l W_l W_lᵀ = QᵀR Q."""
        derivative = derivative.of_rotated(rotation)
        yield (derivative.explicit * self.rest.rsqrt()).flatten(0, 1)
        for basis, term in zip(self.bases, derivative.terms, strict=True):
            yield from basis.rotated(term).joint_halves(basis.variances)

    def joint_covariance(self, derivative: LayerwiseDerivative) -> Float[Tensor, "C M C M"]:
        """R_ij = J_i P J_jᵀ for all pairs of frames, in float64, without W."""
        half = (derivative.explicit * self.rest.rsqrt()).flatten(0, 1)
        size, classes = derivative.explicit.shape[:2]
        covariance = (half @ half.T).reshape(size, classes, size, classes)
        for basis, term in zip(self.bases, derivative.terms, strict=True):
            covariance += basis.rotated(term).joint_covariance(basis.variances)
        return covariance

    def _bases(self, dtype: torch.dtype) -> tuple[KroneckerBasis, ...]:
        """The float64 bases in the dtype of products, cast once."""
        with self._lock:
            if dtype not in self._cache:
                self._cache[dtype] = tuple(basis.to(dtype) for basis in self.bases)
            return self._cache[dtype]

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P): Q_G (z ∘ √v) Q_Aᵀ for each layer."""
        draws = torch.empty_like(normal)
        for basis in self._bases(normal.dtype):
            deviations = basis.precision.rsqrt()
            limit = _DRAWN_BYTES.get(normal.device.type, _DRAWN_BYTES["cpu"])
            together = max(1, limit // (deviations.numel() * normal.element_size()))
            for first in range(0, len(normal), together):
                some = slice(first, first + together)
                independent = gathered(basis.layer, normal[some]) * deviations
                scatter_(draws[some], basis.layer, basis.outer @ independent @ basis.inner.T)
        if len(self.rest_spans):
            scale = self.rest.rsqrt().to(normal.dtype)
            draws[:, self.rest_spans.positions(normal.device)] = self.rest_spans.take(normal) * scale
        return draws

    def log_determinant_of_precision(self) -> float:
        return float(sum(basis.precision.log().sum() for basis in self.bases) + self.rest.log().sum())

    def to(self, device: torch.device) -> KroneckerFactor:
        bases = tuple(basis.to(device) for basis in self.bases)
        return KroneckerFactor(self.n_parameters, bases, self.rest_spans, self.rest.to(device), self.jitter)

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        return self.negative_share

    def written(self) -> tuple[Description, Tensors]:
        arrays: Tensors = {"factor.rest": self.rest}
        columns = []
        for index, basis in enumerate(self.bases):
            parts = {"outer": basis.outer, "inner": basis.inner, "precision": basis.precision}
            arrays |= {f"factor.{index}.{name}": part for name, part in parts.items()}
            columns.append({f"{name}_columns": by_columns(part) for name, part in parts.items()})
        return {"jitter": self.jitter, "bases": columns}, arrays

    @staticmethod
    def read(
        contents: Contents, fields: Fields, n: int, layers: Sequence[LinearLayer], rest_spans: Spans
    ) -> KroneckerFactor:
        parts = fields.parts("bases")
        if len(parts) != len(layers):
            raise DamagedFileError(f"{contents.path} has {len(parts)} bases for {len(layers)} layers.")
        bases = []
        for index, (part, layer) in enumerate(zip(parts, layers, strict=True)):
            d, p = layer.outputs, layer.width
            outer = laid_out(contents.tensor(f"factor.{index}.outer", d, d), part.flag("outer_columns"))
            inner = laid_out(contents.tensor(f"factor.{index}.inner", p, p), part.flag("inner_columns"))
            precision = read_positive(contents, f"factor.{index}.precision", d, p)
            bases.append(KroneckerBasis(layer, outer, inner, laid_out(precision, part.flag("precision_columns"))))
        rest = read_positive(contents, "factor.rest", len(rest_spans))
        return KroneckerFactor(n, tuple(bases), rest_spans, rest, read_jitter(fields))

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> IndependentVariances:
        by_name = {basis.layer.name: basis for basis in self.bases}
        bases = [by_name[layer.name] for layer in layers]
        rotations = [(basis.outer, basis.inner) for basis in bases]
        return IndependentVariances([basis.variances.to(dtype) for basis in bases], rotations)
