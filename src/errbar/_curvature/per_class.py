"""The exact structure of a last layer alone with the `eta` Fisher: one matrix for each class.

With V = I and Λ = diag η, no information connects the parameters of different classes, Σ_n diag η_n ⊗ h_n h_nᵀ, and a
diagonal prior adds none. So P is block-diagonal by class and P^g diagonal, v_m = hᵀ P_m h. Nothing of size φ(x) ⊗ I,
(M p)² or M² is ever made. Sums are kept packed, [a ≤ b, m], as in `_curvature.packed`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._base.memory import require_memory
from errbar._base.triangles import by_columns, from_triangle, positive_diagonal, read_jitter, triangle_array
from errbar._curvature import packed
from errbar._curvature.fisher import Weights
from errbar._curvature.structure import ClassCoefficients, Description, Refactorised, Tensors
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload, by_device, drawing_bytes, drawing_products
from errbar._derivative.layers import LinearLayer
from errbar._derivative.route import Derivative
from errbar._distributed.team import Team
from errbar._distributions.covariance import DiagonalCovariance
from errbar._distributions.logits import LogitGaussian
from errbar.errors import ModelError

STAGED_SAMPLES = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True, eq=False)
class PerClassSum:
    """Σ_n η_mn h_a h_b for each class m, packed over a ≤ b, in float64; additive."""

    layer: LinearLayer
    totals: Float[Tensor, "rows M"]

    @property
    def device(self) -> torch.device:
        return self.totals.device

    def blocks(self) -> Float[Tensor, "M p p"]:
        index = packed.unpack_index(self.layer.width, self.device).reshape(-1)
        p = self.layer.width
        return self.totals.T[:, index].reshape(-1, p, p)

    def dense(self) -> Float[Tensor, "n n"]:
        return _scattered(self.blocks(), self.layer)

    def __add__(self, other: PerClassSum) -> PerClassSum:
        return PerClassSum(self.layer, self.totals + other.totals)

    def __sub__(self, other: PerClassSum) -> PerClassSum:
        return PerClassSum(self.layer, self.totals - other.totals)

    def __mul__(self, factor: float) -> PerClassSum:
        return PerClassSum(self.layer, self.totals * factor)

    def to(self, device: torch.device) -> PerClassSum:
        return PerClassSum(self.layer, self.totals.to(device))

    def tolerance(self, dtype: torch.dtype) -> float:
        """How far below zero rounding may take an eigenvalue of a difference from this sum, computed in `dtype`."""
        return self.layer.width * linalg.rounding(dtype) * float(self.totals.abs().max())

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Whether no eigenvalue is below −tolerance."""
        return linalg.is_positive_semidefinite(self.blocks(), tolerance=tolerance)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> PerClassFactor:
        lower = linalg.cholesky_in_place(self._precisions(prior_precision).mT)
        if lower is not None:
            return PerClassFactor(self.layer, lower, 0.0)
        precision = self._precisions(prior_precision)
        return PerClassFactor(self.layer, *linalg.safe_cholesky(precision, name="The posterior precision", limit=limit))

    def is_zero(self) -> bool:
        return not bool(self.totals.any())

    def reduced(self, has_data: Sequence[bool], team: Team) -> PerClassSum:
        return PerClassSum(self.layer, team.summed(self.totals))

    def written(self) -> tuple[Description, Tensors]:
        return {"form": "per_class"}, {"sum": self.totals}

    @staticmethod
    def read(contents: Contents, task: Task) -> PerClassSum:
        assert task.route is not None
        (layer,) = task.route.layers
        return PerClassSum(layer, contents.tensor("sum", layer.width * (layer.width + 1) // 2, task.n_classes))

    def _precisions(self, prior_precision: Float[Tensor, "n"]) -> Float[Tensor, "M p p"]:
        precision = self.blocks()
        precision.diagonal(dim1=1, dim2=2).add_(prior_precision[self.layer.positions().to(self.device)])
        return precision


class PerClassAccumulator:
    """Adds up batches; private to one pass over the data."""

    def __init__(self, layer: LinearLayer, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.dtype = dtype
        rows = layer.width * (layer.width + 1) // 2
        self.totals = torch.zeros(rows, layer.outputs, dtype=torch.float64, device=device)
        self.staged: list[tuple[Float[Tensor, "B M"], Float[Tensor, "B p"]]] = []
        self.staged_samples = 0

    def add(self, weights: Weights, derivative: Derivative) -> None:
        inner = inner_of(derivative)
        self.staged.append((weights.diagonal().to(self.dtype), inner.to(self.dtype)))
        self.staged_samples += len(inner)
        if self.staged_samples >= STAGED_SAMPLES.get(self.totals.device.type, 4096):
            self._flush()

    def finish(self) -> PerClassSum:
        if self.staged:
            self._flush()
        return PerClassSum(self.layer, self.totals)

    def _flush(self) -> None:
        weights = torch.cat([eta for eta, _ in self.staged]).T.contiguous()
        inner = torch.cat([h for _, h in self.staged]).T.contiguous()
        self.staged, self.staged_samples = [], 0
        packed.add_products(self.totals, weights, inner, None)


def inner_of(derivative: Derivative) -> Float[Tensor, "B p"]:
    """h of the one layer that returns the logits themselves."""
    terms = derivative.terms
    if terms is None or len(terms) != 1 or terms[0].outer is not None:
        raise ModelError(
            "The last layer returned the logits in the first batch and does something else now; expected a model that "
            "computes the same function for every batch."
        )
    return terms[0].inner


class PerClassFactor(Refactorised):
    """P_m = (Σ_m + diag λ_m)⁻¹ by the Cholesky factors of the precisions."""

    def __init__(self, layer: LinearLayer, lower: Float[Tensor, "M p p"], jitter: float) -> None:
        self.layer = layer
        self.factorisation = (lower, jitter)
        self._lock = threading.Lock()
        self._cache: dict[torch.dtype, Float[Tensor, "rows M"]] = {}

    @property
    def lower(self) -> Float[Tensor, "M p p"]:
        return self.factorisation[0]

    @property
    def jitter(self) -> float:
        return self.factorisation[1]

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        return _scattered(linalg.inverse_from_cholesky(self.lower), self.layer)

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Derivative) -> LogitGaussian:
        """N(ĝ, diag v), v_m = hᵀ P_m h: M p²/2 multiplications per input."""
        inner = inner_of(derivative)
        variance = packed.contract(self.coefficients(inner.dtype), inner.T.contiguous(), None).T
        return LogitGaussian(mean, DiagonalCovariance(variance.clamp_min(0)))

    def joint_halves(self, derivative: Derivative, rotation: Float[Tensor, "M M"]) -> Iterator[Float[Tensor, "CM p"]]:
        """W_m = Qᵀe_m ⊗ (hᵀ lower_m⁻ᵀ) of each class, with Σ_m W_m W_mᵀ = QᵀR Q."""
        inner = inner_of(derivative)
        for row, lower in zip(rotation, self.lower, strict=True):
            half = linalg.solve_lower(lower, inner.mT).mT
            yield (row[None, :, None] * half[:, None, :]).flatten(0, 1)

    def joint_covariance(self, derivative: Derivative) -> Float[Tensor, "C M C M"]:
        """R_ij = diag_m(h_iᵀ P_m h_j), in float64, without W."""
        inner = inner_of(derivative)
        half = linalg.solve_lower(self.lower, inner.T.expand(len(self.lower), *inner.T.shape))
        return torch.diag_embed((half.mT @ half).permute(1, 2, 0)).permute(0, 2, 1, 3)

    def coefficients(self, dtype: torch.dtype) -> Float[Tensor, "rows M"]:
        """The packed coefficients of v_m = Σ_{a≤b} c_abm h_a h_b; computed once."""
        with self._lock:
            if dtype not in self._cache:
                a, b = packed.triangle(self.layer.width, self.lower.device)
                values = torch.empty(len(a), len(self.lower), dtype=dtype, device=self.lower.device)
                double = (1 + (a != b).double())[:, None]
                for start in range(0, len(self.lower), 64):
                    covariance = linalg.inverse_from_cholesky(self.lower[start : start + 64])
                    values[:, start : start + 64] = covariance[:, a, b].T * double
                self._cache[dtype] = values
            return self._cache[dtype]

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P) in the order of the flat vector."""
        count, (classes, p) = len(normal), self.lower.shape[:2]
        own = normal.reshape(count, classes, p).permute(1, 2, 0).to(self.lower.dtype)
        draws = linalg.solve_lower_transposed(self.lower, own)
        flat = torch.empty_like(normal)
        rows = draws.permute(2, 0, 1).reshape(count, -1).to(flat.dtype)
        flat[:, self.layer.positions().reshape(-1).to(normal.device)] = rows
        return flat

    def log_determinant_of_precision(self) -> float:
        return linalg.log_determinant_from_cholesky(self.lower)

    def to(self, device: torch.device) -> PerClassFactor:
        return PerClassFactor(self.layer, self.lower.to(device), self.jitter)

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        return linalg.negative_share(self.lower, prior_precision[self.layer.positions().to(self.lower.device)])

    def written(self) -> tuple[Description, Tensors]:
        small = {"jitter": self.jitter, "lower_columns": by_columns(self.lower)}
        return small, {"factor.lower": triangle_array(self.lower, by_columns=by_columns(self.lower))}

    @staticmethod
    def read(contents: Contents, fields: Fields, total: PerClassSum) -> PerClassFactor:
        width, classes = total.layer.width, total.totals.shape[1]
        flat = contents.tensor("factor.lower", classes, width * (width + 1) // 2)
        lower = from_triangle(flat, width, by_columns=fields.flag("lower_columns"))
        return PerClassFactor(total.layer, positive_diagonal(lower, contents), read_jitter(fields))

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> ClassCoefficients:
        return ClassCoefficients(self.coefficients(dtype))


def _scattered(blocks: Float[Tensor, "M p p"], layer: LinearLayer) -> Float[Tensor, "n n"]:
    """The blocks as one matrix in the order of the flat parameter vector; refused where that cannot be held."""
    positions = layer.positions().to(blocks.device)
    n = positions.numel()
    require_memory(8 * n * n, blocks.device, what=f"The full {n:,} × {n:,} matrix", instead="Use logits and predict.")
    whole = blocks.new_zeros(n, n)
    whole[positions[:, :, None], positions[:, None, :]] = blocks
    return whole


def cost(work: Workload) -> Cost:
    """A p × p matrix for each class: packed sums and Cholesky factors after the fit, packed coefficients to predict."""
    (term,), classes, s = work.terms, work.classes, work.itemsize
    p = term.width
    rows = p * (p + 1) // 2
    sums, factors = 8 * rows * classes, 8 * classes * p * p
    staged_bytes = int(by_device(STAGED_SAMPLES, work.device)) * (classes + p) * s
    collect_bytes = sums + 2 * staged_bytes + 3 * 8 * work.batch * classes
    inverse_bytes = 64 * 8 * (2 * p * p + 2 * rows)
    predict_bytes = sums + factors + s * rows * classes + max(inverse_bytes, drawing_bytes(work, full=False))
    product = float(rows * classes)
    once = classes * p**3 + 20.0 * rows * classes
    fit_bytes, inputs = max(collect_bytes, sums + factors), product + drawing_products(work, full=False)
    return Cost(sums + factors, fit_bytes, predict_bytes, product, once, inputs, (0, 0), exact=True)
