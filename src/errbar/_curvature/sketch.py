"""The leading directions of a sum Σ u uᵀ of streamed rows u, in bounded memory and with a guaranteed error.

Frequent Directions (Liberty 2013; Ghashami, Liberty, Phillips and Woodruff 2016) in the form of Desai, Ghashami and
Phillips (2016). Notation of this file:

- F = Σ u uᵀ, (n, n), is never formed; S, (k, n), are the rows kept of it;
- a *compression* takes more than k rows B to k. With the eigenvalues σ₁² ≥ σ₂² ≥ … of B Bᵀ and δ = σ²_{k+1}, the
  last a of the k directions keep σ² − δ, those before keep σ², those after are discarded;
- E = F − SᵀS is what was discarded.

One compression takes away something between 0 and δ I, so that 0 ⪯ E ⪯ Δ I with Δ = Σ δ over all compressions,
whatever a is, and this is what `bound` counts. Each takes away (a + 1) δ of the trace or more, and therefore
    Δ ≤ (λ_{j+1} + λ_{j+2} + …)/(a + 1 − j)   for all j ≤ a,
with λ the eigenvalues of F: nothing known of the data is needed to trust that Δ stays small. a = k is Frequent
Directions, which takes Δ from every direction; a = 0 is the truncated, incremental SVD, which has no such limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar.errors import CovarianceError

# a/k, measured on small networks: the smaller it is, the nearer is what is discarded to the least that k rows can
# discard (0.2: 1.2 to 1.7 times as much, 1: 2.4 to 5.3 times); the larger it is, the smaller is Δ (0.2: 1.3 to 1.8
# times as large as with 1, 0: 4 to 7 times).
_SHRUNK_SHARE = 0.2
_PRODUCTS = "Products of the derivatives of the logits"
# Light rows are left out up to this share of the bound.
_LIGHT_SHARE = 0.05
# Columns are taken so many entries at a time: they stay in the cache, and products are summed in float64 in between.
_BLOCK_ENTRIES = {"cpu": 2**20, "cuda": 2**24}


def eigen(matrix: Float[Tensor, "m m"]) -> tuple[Float[Tensor, "m"], Float[Tensor, "m m"]]:
    """Eigenvalues, the largest first, and eigenvectors (columns) of a symmetric matrix, in float64."""
    values, vectors = linalg.eigenvectors(matrix, name=_PRODUCTS)
    return values.flip(0), vectors.flip(1)


def column_blocks(n: int, rows: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover n columns of a matrix of so many rows, some columns at a time."""
    size = max(2048, _BLOCK_ENTRIES.get(device.type, _BLOCK_ENTRIES["cpu"]) // max(1, rows))
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def squared_sums(rows: Float[Tensor, "m n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "m"]]:
    """The squared length of each column, which is the diagonal of rowsᵀ rows, and of each row; in float64."""
    by_column = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    by_row = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows.shape[1], len(rows), rows.device):
        squares = rows[:, block].double().square()
        by_column[block] = squares.sum(0)
        by_row += squares.sum(1)
    return by_column, by_row


def gram(first: Float[Tensor, "p n"], second: Float[Tensor, "q n"]) -> Float[Tensor, "p q"]:
    """first secondᵀ: products in the dtype of the rows, summed in float64."""
    total = torch.zeros(len(first), len(second), dtype=torch.float64, device=first.device)
    for block in column_blocks(first.shape[1], len(first) + len(second), first.device):
        total += first[:, block] @ second[:, block].T
    return total


def shrunk_directions(rank: int) -> int:
    """a, how many of `rank` directions are shrunk."""
    return math.ceil(_SHRUNK_SHARE * rank)


def compress(
    first: Float[Tensor, "p n"], second: Float[Tensor, "q n"], rank: int, out: Float[Tensor, "k n"]
) -> tuple[int, float]:
    """At most `rank` rows S for the stacked rows B of `first` and `second`, and δ with 0 ⪯ BᵀB − SᵀS ⪯ δ I.

    The rows are written to `out`, which may share its memory with `first`; how many they are is returned. They are
    w_i v_iᵀ B with the eigenvectors v_i of B Bᵀ, which is small: the wide matrix is never decomposed. As long as the
    v_i are orthonormal and w_i ≤ 1, S cannot overestimate B, whatever the rounding of B Bᵀ was.
    """
    cross = gram(first, second)
    small = torch.cat([torch.cat([gram(first, first), cross], 1), torch.cat([cross.T, gram(second, second)], 1)])
    squares, vectors = eigen(small)
    squares = squares.clamp_min(0)
    delta = float(squares[rank]) if len(squares) > rank else 0.0
    strengths = squares[:rank].clone()
    strengths[max(0, rank - shrunk_directions(rank)) :] -= delta
    count = int((strengths > 0).sum())
    weights = (strengths[:count] / squares[:count]).sqrt()
    mixing = (vectors[:, :count] * weights).T.to(first.dtype)
    left, right = mixing[:, : len(first)], mixing[:, len(first) :]
    for block in column_blocks(first.shape[1], len(first) + len(second), first.device):
        out[:count, block] = torch.addmm(left @ first[:, block], right, second[:, block])
    return count, delta


def orthogonalised(
    rows: Float[Tensor, "k n"], scale: Float[Tensor, "n"]
) -> tuple[Float[Tensor, "r n"], Float[Tensor, "r"]]:
    """Orthonormal rows Q, in the dtype of `rows`, and s with AᵀA = Qᵀ diag(s) Q for A = rows · diag(scale).

    The eigenvectors of A Aᵀ itself have no accuracy in directions that are many orders of magnitude weaker than the
    strongest. So the rows are first scaled to length one, A = diag |a| Â; these are orthonormalised by the
    eigenvectors of Â Âᵀ = V Γ Vᵀ; what remains is the SVD of a k × k matrix, diag |a| V Γ^½ = X diag √s Y, and
    Q = Y Γ^{−½} Vᵀ Â.
    """
    blocks = list(column_blocks(rows.shape[1], len(rows), rows.device))
    small = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in blocks:
        part = rows[:, block].double() * scale[block]
        small += part @ part.T
    length = small.diagonal().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
    gamma, vectors = eigen(small / length[:, None] / length)
    independent = gamma > 10 * len(rows) * torch.finfo(torch.float64).eps
    gamma, vectors = gamma[independent].sqrt(), vectors[:, independent]
    root, right = linalg.right_singular(length[:, None] * vectors * gamma, name=_PRODUCTS)
    mixing = (right / gamma) @ (vectors / length[:, None]).T
    directions = torch.empty(len(mixing), rows.shape[1], dtype=rows.dtype, device=rows.device)
    for block in blocks:
        directions[:, block] = (mixing @ (rows[:, block].double() * scale[block])).to(rows.dtype)
    return directions, root.square()


def without_rounding(covariance: Float[Tensor, "M M"], tolerance: float) -> Float[Tensor, "M M"]:
    """Eigenvalues between −tolerance and zero are rounding, and become zero; below that is an error."""
    values, vectors = eigen(covariance)
    if not float(values[-1]) >= -tolerance:
        raise CovarianceError(
            f"The covariance of the logits has the eigenvalue {float(values[-1]):.3g}, where rounding explains "
            f"−{tolerance:.3g}. Expected eigenvalues of zero or more; use precision='float64'.",
            arguments={"precision": "float64"},
        )
    return covariance if float(values[-1]) >= 0 else linalg.symmetric((vectors * values.clamp_min(0)) @ vectors.T)


class FrequentDirections:
    """S, diag F and Δ of a stream of rows: 2k rows of memory, 5 k n multiplications per row.

    A well-trained network is certain about most samples, whose rows are almost zero. A row u that is not sketched adds
    u uᵀ ⪯ |u|² I to what is discarded, so the lightest are left out as long as all of them together weigh no more than
    5 % of Σ δ; the bound includes them. Nothing is left out before the first compression discards something.
    """

    def __init__(self, n: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rank = rank
        self.diagonal: Float[Tensor, "n"] = torch.zeros(n, dtype=torch.float64, device=device)
        self._shrunk = 0.0
        self._left_out = 0.0
        # Not touched before it is used: a short stream takes k rows of memory only.
        self._kept: Float[Tensor, "k n"] = torch.empty(rank, n, dtype=dtype, device=device)
        self._fresh: Float[Tensor, "k n"] | None = None
        self._kept_count = 0
        self._fresh_count = 0

    @property
    def bound(self) -> float:
        """Δ."""
        return self._shrunk + self._left_out

    def add(self, rows: Float[Tensor, "m n"]) -> None:
        """Put more rows in, compressing whenever the memory is full."""
        by_column, by_row = squared_sums(rows)
        self.diagonal += by_column
        rows = self._heavy(rows, by_row).to(self._kept.dtype)
        if self._fresh is None:
            first_rows = rows[: self.rank - self._kept_count]
            self._kept[self._kept_count : self._kept_count + len(first_rows)] = first_rows
            self._kept_count += len(first_rows)
            rows = rows[len(first_rows) :]
            if len(rows):
                self._fresh = torch.empty_like(self._kept)
        while len(rows):
            assert self._fresh is not None
            part = rows[: self.rank - self._fresh_count]
            self._fresh[self._fresh_count : self._fresh_count + len(part)] = part
            self._fresh_count += len(part)
            rows = rows[len(part) :]
            if self._fresh_count == self.rank:
                self._compress()

    def finish(self) -> Float[Tensor, "k n"]:
        """The rows S; the object must not be used afterwards."""
        if self._fresh_count:
            self._compress()
        self._fresh = None
        return self._kept if self._kept_count == self.rank else self._kept[: self._kept_count].clone()

    def _heavy(self, rows: Float[Tensor, "m n"], squares: Float[Tensor, "m"]) -> Float[Tensor, "k n"]:
        """All rows but the lightest, as far as the bound has room for these."""
        order = squares.argsort()
        weight = squares[order].cumsum(0)
        count = int((weight <= _LIGHT_SHARE * self._shrunk - self._left_out).sum())
        if count == 0:
            return rows
        self._left_out += float(weight[count - 1])
        return rows[order[count:].sort().values]

    def _compress(self) -> None:
        assert self._fresh is not None
        rows, fresh = self._kept[: self._kept_count], self._fresh[: self._fresh_count]
        self._kept_count, delta = compress(rows, fresh, self.rank, self._kept)
        self._fresh_count = 0
        self._shrunk += delta
