"""The exact structure: all of the information matrix, all of the covariance.

`DenseSum` is what the data said, Σ_n J_nᵀ Λ_n J_n; `DenseFactor` is the posterior that it makes with a prior,
P = (Σ + diag λ)⁻¹, kept as the Cholesky factor of the precision or, after small updates, as P itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from errbar import _linalg
from errbar.memory import require_memory


def require_dense_memory(n: int, device: torch.device) -> None:
    """Refuse an n × n posterior that cannot be held: information, factor, covariance and one product."""
    require_memory(
        4 * 8 * n * n,
        device,
        what=f"An exact covariance of {n:,} parameters",
        instead="Select fewer parameters, for example last_layers=1.",
    )


@dataclass(frozen=True, eq=False)
class DenseSum:
    """Σ_n J_nᵀ Λ_n J_n in float64; additive."""

    matrix: Float[Tensor, "n n"]

    @staticmethod
    def zero(n: int, device: torch.device) -> DenseSum:
        return DenseSum(torch.zeros(n, n, dtype=torch.float64, device=device))

    def accumulate(self, rows: Float[Tensor, "k n"]) -> None:
        """Add UᵀU in place, U = Rᵀ J: the product in the dtype of `rows`, the sum in float64.

        Only `collect` calls this, on a sum that nobody else has seen yet.
        """
        if rows.dtype == torch.float64:
            self.matrix.addmm_(rows.T, rows)
        else:
            self.matrix.add_(rows.T @ rows)

    def __add__(self, other: DenseSum) -> DenseSum:
        return DenseSum(self.matrix + other.matrix)

    def __sub__(self, other: DenseSum) -> DenseSum:
        return DenseSum(self.matrix - other.matrix)

    def __mul__(self, factor: float) -> DenseSum:
        return DenseSum(self.matrix * factor)

    def to(self, device: torch.device) -> DenseSum:
        return DenseSum(self.matrix.to(device))

    def is_possible(self, dtype: torch.dtype) -> bool:
        """Whether no eigenvalue is below the rounding of sums that were computed in `dtype`."""
        scale = float(self.matrix.diagonal().abs().max())
        rounding = torch.finfo(dtype).eps * (1 if dtype == torch.float32 else 10)
        tolerance = max(len(self.matrix) * rounding * scale, torch.finfo(torch.float64).tiny)
        return _linalg.is_positive_semidefinite(self.matrix, tolerance=tolerance)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> DenseFactor:
        """Factorise the precision now, so that a bad one is noticed here and not at the first prediction."""
        factor = DenseFactor(self, prior_precision, limit)
        factor.factorisation  # noqa: B018  (computed and cached)
        return factor


class DenseFactor:
    """P = (Σ + diag λ)⁻¹, whose factors are computed once, when first needed."""

    def __init__(
        self,
        total: DenseSum,
        prior_precision: Float[Tensor, "n"],
        limit: float,
        *,
        covariance: Float[Tensor, "n n"] | None = None,
        recursed: int = 0,
    ) -> None:
        self.total = total
        self.prior_precision = prior_precision
        self.limit = limit
        self.recursed = recursed
        self._lock = threading.RLock()
        if covariance is not None:
            self.__dict__["covariance"] = covariance

    @cached_property
    def factorisation(self) -> tuple[Float[Tensor, "n n"], float]:
        """The lower Cholesky factor of the precision, and the jitter it needed."""
        with self._lock:
            if "factorisation" in self.__dict__:
                return self.__dict__["factorisation"]  # type: ignore[no-any-return]
            precision = self.total.matrix.clone()
            precision.diagonal().add_(self.prior_precision)
            return _linalg.safe_cholesky(precision, name="The posterior precision", limit=self.limit)

    @property
    def lower(self) -> Float[Tensor, "n n"]:
        return self.factorisation[0]

    @cached_property
    def covariance(self) -> Float[Tensor, "n n"]:
        with self._lock:
            if "covariance" in self.__dict__:
                return self.__dict__["covariance"]  # type: ignore[no-any-return]
            return _linalg.inverse_from_cholesky(self.lower)

    @property
    def has_covariance(self) -> bool:
        return "covariance" in self.__dict__

    def logit_covariance(self, jacobian: Float[Tensor, "B M n"]) -> Float[Tensor, "B M M"]:
        """P^g = J P Jᵀ = ZᵀZ with Z = lower⁻¹ Jᵀ (eq:linearize): positive semi-definite whatever the rounding."""
        size, classes, n = jacobian.shape
        columns = jacobian.reshape(-1, n).T
        if "factorisation" in self.__dict__ or not self.has_covariance:
            half = _linalg.solve_lower(self._lower_as(jacobian.dtype), columns)
            half = half.T.reshape(size, classes, n)
            return half @ half.mT
        product = (self.covariance @ columns.double()).T.reshape(size, classes, n)
        return _linalg.symmetric(jacobian.double() @ product.mT).to(jacobian.dtype)

    def joint_covariance(self, jacobian: Float[Tensor, "C M n"]) -> Float[Tensor, "C M C M"]:
        """R_ij = J_i P J_jᵀ for all pairs of frames."""
        count, classes, _ = jacobian.shape
        stacked = self.logit_covariance(jacobian.reshape(1, count * classes, -1))
        return stacked.reshape(count, classes, count, classes)

    def _lower_as(self, dtype: torch.dtype) -> Float[Tensor, "n n"]:
        if dtype == torch.float64:
            return self.lower
        with self._lock:
            if "_lower_float32" not in self.__dict__:
                self.__dict__["_lower_float32"] = self.lower.float()
            return self.__dict__["_lower_float32"]  # type: ignore[no-any-return]

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P): lower⁻ᵀ z has covariance (lower lowerᵀ)⁻¹ = P."""
        return _linalg.solve_lower_transposed(self.lower, normal.T).T

    def log_determinant_of_precision(self) -> float:
        return _linalg.log_determinant_from_cholesky(self.lower)

    def recursion(self, rows: Float[Tensor, "k n"], total: DenseSum) -> DenseFactor:
        """eq:recUpdate_all for a stack of U_nᵀ: P − K UᵀP with K = P U (I + UᵀPU)⁻¹.

        Written as P − WᵀW with W = lower⁻¹ UᵀP and lower lowerᵀ = I + UᵀPU, which keeps P exactly symmetric; the
        small matrix is well conditioned because its eigenvalues are at least one.
        """
        rows = rows.double()
        gain = rows @ self.covariance
        small = gain @ rows.T
        small.diagonal().add_(1.0)
        lower, _ = _linalg.safe_cholesky(_linalg.symmetric(small), name="I + UᵀPU", limit=0.0)
        half = _linalg.solve_lower(lower, gain)
        covariance = self.covariance - half.T @ half
        recursed = self.recursed + len(rows)
        return DenseFactor(total, self.prior_precision, self.limit, covariance=covariance, recursed=recursed)

    def to(self, device: torch.device) -> DenseFactor:
        moved = DenseFactor(self.total.to(device), self.prior_precision.to(device), self.limit)
        for name in ("factorisation", "covariance"):
            if name in self.__dict__:
                value = self.__dict__[name]
                moved.__dict__[name] = (value[0].to(device), value[1]) if name == "factorisation" else value.to(device)
        return moved
