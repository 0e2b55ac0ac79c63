"""Linear algebra with typed failures: the only caller of `torch.linalg` in the package.

Convention: covariances are symmetric positive semi-definite, `lower` is a lower Cholesky factor (A = lower lowerᵀ),
*contrasts* are coordinates in a fixed orthonormal basis of 1⊥, the vectors whose entries sum to zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from errbar.errors import CovarianceError, SingularCovarianceError

# Jitter is tried in steps of a hundred, as a share of the mean diagonal, from the rounding of float64 upwards.
_FIRST_JITTER = 1e-14
_MIRRORED_ROWS = 512
# Rows of a square that are multiplied at a time, up to the diagonal: fewer save more, and are slower products.
_SQUARED_ROWS = 128
# Numbers cast at a time when a float32 product is added to a float64 sum.
_ADDED_NUMBERS = 2**20
# Vectors and steps of a subspace iteration: enough to tell an eigenvalue that is 5 % above all others.
_SUBSPACE, _SUBSPACE_STEPS = 8, 8
# A condition number at which an inverse by Cholesky factors is as good as one by eigenvalues to 1e-11.
_WELL_CONDITIONED = 1e5
# Matrices of a batch that are processed together.
_SHARED_MATRICES = 64
# Columns of a root, as a multiple of its rows, that are collected before they are reduced.
_GATHERED_WIDTHS = 4


def largest_jitter(dtype: torch.dtype) -> float:
    """The most jitter that rounding can explain in matrices computed in `dtype`."""
    return 1e-9 if dtype == torch.float64 else 1e-4


def jitters(limit: float) -> list[float]:
    """The shares of the mean diagonal to try, the smallest first."""
    shares, jitter = [], _FIRST_JITTER
    while jitter <= limit * 1.0001:
        shares.append(jitter)
        jitter *= 100
    return shares


def rounding(dtype: torch.dtype) -> float:
    """Relative error of an entry of a sum of many products in `dtype`."""
    return torch.finfo(dtype).eps * (10 if dtype == torch.float64 else 1)


def symmetric(matrix: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B n n"]:
    """The symmetric part of a matrix that is symmetric up to rounding."""
    return (matrix + matrix.mT) / 2


def mirror_(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The lower triangle and its mirror image, in place.

    A product XᵀX is symmetric, but library kernels may round an entry and its mirror image differently. Some rows at a
    time: a copy of the matrix would be the largest thing in memory.
    """
    n = len(matrix)
    for start in range(0, n, _MIRRORED_ROWS):
        stop = min(start + _MIRRORED_ROWS, n)
        corner = matrix[start:stop, start:stop]
        corner.copy_(corner.tril() + corner.tril(-1).mT)
        matrix[start:stop, stop:] = matrix[stop:, start:stop].mT
    return matrix


def safe_cholesky(matrix: Float[Tensor, "*B n n"], *, name: str, limit: float) -> tuple[Float[Tensor, "*B n n"], float]:
    """The lower Cholesky factors of a batch in float64, and the largest jitter that one of them needed.

    Jitter is a share of the mean diagonal of the matrix it is added to. Matrices that factorise as they are get
    none; an all-zero matrix (a certain quantity) has the factor zero. Beyond `limit` the matrix is not positive
    semi-definite up to rounding, which is an error and never patched.
    """
    matrix = matrix.double()
    lower, failures = torch.linalg.cholesky_ex(matrix)
    if not bool(failures.any()):
        return lower, 0.0
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.mean(-1)
    # Entries that are exactly zero everywhere stay exactly zero.
    zero = (matrix == 0).flatten(-2).all(-1)
    lower = torch.where(zero[..., None, None], torch.zeros_like(lower), lower)
    failures = failures.bool() & ~zero
    largest = 0.0
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for jitter in jitters(limit):
        if not bool(failures.any()):
            break
        trial = matrix + (jitter * scale)[..., None, None] * identity
        attempt, still = torch.linalg.cholesky_ex(trial)
        successes = failures & ~still.bool()
        lower = torch.where(successes[..., None, None], attempt, lower)
        if bool(successes.any()):
            largest = jitter
        failures = failures & still.bool()
    if bool(failures.any()):
        raise CovarianceError(
            f"{name} is not positive semi-definite: adding {limit:.0e} of its mean diagonal still does not "
            "make it so. Expected a covariance or precision matrix with eigenvalues of zero or more; check "
            "that the data are finite and the prior precision is not many orders of magnitude below the "
            "information, or compute with precision='float64'.",
            arguments={"precision": "float64"},
        )
    return lower, largest


def add_in_place(total: Float[Tensor, "m k"], product: Float[Tensor, "m k"]) -> None:
    """total += product, some rows at a time: torch would make a float64 copy of all of a float32 product first."""
    step = max(1, _ADDED_NUMBERS // max(1, total.shape[1]))
    for start in range(0, len(total), step):
        total[start : start + step] += product[start : start + step]


def add_lower_square_(total: Float[Tensor, "m m"], columns: Float[Tensor, "m k"]) -> None:
    """total += columns columnsᵀ in the lower triangle: the product in the dtype of `columns`, the sum in float64.

    What is above the diagonal is undefined until `mirror_`. On a CPU some rows at a time, up to the diagonal, which
    saves nearly half of the multiplications; a GPU is quicker with one large product.
    """
    step = _SQUARED_ROWS if total.device.type == "cpu" else max(1, len(total))
    for start in range(0, len(total), step):
        stop = min(start + step, len(total))
        if columns.dtype == torch.float64:
            total[start:stop, :stop].addmm_(columns[start:stop], columns[:stop].mT)
        else:
            add_in_place(total[start:stop, :stop], columns[start:stop] @ columns[:stop].mT)


def cholesky_in_place(matrix: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B n n"] | None:
    """The lower Cholesky factors in the memory of symmetric float64 matrices; None where one is not positive definite.

    The matrices are overwritten either way. They must be stored by columns, as in LAPACK: `matrix.mT` is contiguous.
    """
    failures = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(matrix, out=(matrix, failures))
    return None if bool(failures.any()) else matrix


def is_positive_semidefinite(matrix: Float[Tensor, "*B n n"], *, tolerance: float) -> bool:
    """Whether all eigenvalues are above −tolerance, by one factorisation of matrix + tolerance · identity."""
    shift_sum = matrix.double().clone()
    shift_sum.diagonal(dim1=-2, dim2=-1).add_(max(tolerance, torch.finfo(torch.float64).tiny))
    return not bool(torch.linalg.cholesky_ex(shift_sum)[1].any())


def require_covariance(matrix: Float[Tensor, "*B n n"], *, name: str) -> None:
    """Raise `CovarianceError` unless every matrix is finite, symmetric and positive semi-definite up to rounding."""
    if not bool(torch.isfinite(matrix).all()):
        raise CovarianceError(f"{name} holds NaN or infinite values; expected finite numbers.")
    if matrix.numel() == 0:
        return
    # A float32 covariance that was rounded entry by entry is symmetric and semi-definite only to that rounding.
    tolerance = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().amax(-1).double()
    asymmetry = (matrix - matrix.mT).abs().amax((-2, -1)).double()
    if bool((asymmetry > tolerance * scale).any()):
        raise CovarianceError(
            f"{name} is not symmetric: entries differ from their mirror image by up to {float(asymmetry.max()):.3g}. "
            "Expected a symmetric matrix; (A + A.mT) / 2 makes one if the difference is rounding."
        )
    smallest = torch.linalg.eigvalsh(symmetric(matrix.double()))[..., 0]
    if bool((smallest < -tolerance * scale).any()):
        raise CovarianceError(
            f"{name} is not positive semi-definite: its smallest eigenvalue is {float(smallest.min()):.3g}. "
            "Expected eigenvalues of zero or more."
        )


@lru_cache(maxsize=64)
def _helmert(classes: int) -> Tensor:
    """Row j of the Helmert matrix: (1, …, 1, −j, 0, …, 0)/√(j(j+1)); as columns, an orthonormal basis of 1⊥."""
    basis = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for j in range(1, classes):
        basis[:j, j - 1] = 1.0
        basis[j, j - 1] = -float(j)
        basis[:, j - 1] /= (j * (j + 1)) ** 0.5
    return basis


def contrast_basis(classes: int, device: torch.device) -> Float[Tensor, "M M-1"]:
    """E with EᵀE = I and E Eᵀ = I − 11ᵀ/M, in float64.

    Softmax ignores a common shift of the logits, so only Eᵀg matters.
    """
    return _helmert(classes).to(device)


def class_rotation(classes: int, device: torch.device) -> Float[Tensor, "M M"]:
    """[E, 1/√M], orthogonal, in float64: coordinates that keep the contrasts and the common shift apart."""
    shift = torch.full((classes, 1), classes**-0.5, dtype=torch.float64, device=device)
    return torch.cat([contrast_basis(classes, device), shift], 1)


def contrast_covariance(covariance: Float[Tensor, "*B M M"]) -> Float[Tensor, "*B M-1 M-1"]:
    """EᵀPE in float64: the covariance of the contrasts of logits whose covariance is P."""
    basis = contrast_basis(covariance.shape[-1], covariance.device)
    return symmetric(basis.mT @ covariance.double() @ basis)


def inverse(
    covariance: Float[Tensor, "*B n n"], *, name: str, rounding: float | None = None
) -> Float[Tensor, "*B n n"]:
    """The inverse of positive definite matrices, in float64; `SingularCovarianceError` when one is singular.

    Singular means an eigenvalue at or below n · eps of the largest, which is mere rounding.
    """
    covariance = covariance.double()
    eigenvalues, vectors = torch.linalg.eigh(symmetric(covariance))
    eps = torch.finfo(torch.float64).eps if rounding is None else rounding
    threshold = covariance.shape[-1] * eps * eigenvalues[..., -1:].clamp_min(0)
    if bool((eigenvalues <= threshold).any()):
        raise SingularCovarianceError(
            f"{name} is singular (smallest eigenvalue {float(eigenvalues.min()):.3g}, largest "
            f"{float(eigenvalues.max()):.3g}), so it has no inverse. Expected a positive definite covariance."
        )
    return symmetric((vectors / eigenvalues[..., None, :]) @ vectors.mT)


def quick_inverse(
    covariance: Float[Tensor, "*B n n"], *, name: str, rounding: float | None = None
) -> Float[Tensor, "*B n n"]:
    """`inverse` by Cholesky factors, several times quicker, where these show that no matrix is near to singular.

    tr A · tr A⁻¹ is at least the condition number. Where that could exceed `_WELL_CONDITIONED`, or what the rounding of
    the entries allows, eigenvalues decide, as in `inverse`. The matrices are symmetric, and not made so again: for one
    frame of a `Track` each operation counts.
    """
    covariance = covariance.double()
    lower, failures = torch.linalg.cholesky_ex(covariance)
    if not bool(failures.any()):
        result = torch.cholesky_inverse(lower)
        first, second = (matrix.diagonal(dim1=-2, dim2=-1).sum(-1) for matrix in (covariance, result))
        eps = torch.finfo(torch.float64).eps if rounding is None else rounding
        # Without rounding of the entries, only that of float64 counts.
        limit = min(_WELL_CONDITIONED, 1 / (covariance.shape[-1] * eps)) if eps > 0 else _WELL_CONDITIONED
        if bool((first * second < limit).all()):
            return symmetric(result)
    return inverse(covariance, name=name, rounding=rounding)


def eigenvectors(
    matrix: Float[Tensor, "*B n n"], *, name: str
) -> tuple[Float[Tensor, "*B n"], Float[Tensor, "*B n n"]]:
    """Eigenvalues, the smallest first, and in columns the eigenvectors of a symmetric matrix, in float64."""
    _require_finite(matrix, name)
    values, vectors = torch.linalg.eigh(symmetric(matrix.double()))
    return values, vectors


def right_singular(matrix: Float[Tensor, "p q"], *, name: str) -> tuple[Float[Tensor, "r"], Float[Tensor, "r q"]]:
    """Singular values, the largest first, and right singular vectors (rows), in float64."""
    _require_finite(matrix, name)
    _, values, rows = torch.linalg.svd(matrix.double(), full_matrices=False)
    return values, rows


def _require_finite(matrix: Float[Tensor, "*B p q"], name: str) -> None:
    if not bool(torch.isfinite(matrix).all()):
        raise CovarianceError(
            f"{name} hold NaN or infinite values; expected finite inputs and derivatives. Check the weights of the "
            "model for values that its derivative cannot take, or use a wider dtype."
        )


def singular_vectors(
    matrix: Float[Tensor, "p q"], *, name: str
) -> tuple[Float[Tensor, "p r"], Float[Tensor, "r"], Float[Tensor, "r q"]]:
    """U, the singular values, the largest first, and Vᵀ of a matrix U diag(σ) Vᵀ, in float64."""
    _require_finite(matrix, name)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left, values, right


def root_of_sum(halves: Iterable[Float[Tensor, "s _"]]) -> Float[Tensor, "s k"]:
    """A with A Aᵀ = Σ_l W_l W_lᵀ and k ≤ s, in float64.

    By orthogonal transformations, which never square a number: rows of A are good to the rounding of their own length,
    and differences of rows that are nearly the same are kept where A Aᵀ has lost them. Narrow parts are gathered, since
    each transformation costs as much as a part of s columns.
    """
    root: Tensor | None = None
    parts: list[Tensor] = []
    for half in halves:
        parts.append(half)
        if sum(part.shape[1] for part in parts) >= _GATHERED_WIDTHS * len(half):
            root = _narrowed(root, parts)
            parts = []
    return _narrowed(root, parts)


def _narrowed(root: Float[Tensor, "s k"] | None, more: list[Float[Tensor, "s _"]]) -> Float[Tensor, "s k"]:
    wide = torch.cat([*([] if root is None else [root]), *more], 1)
    if wide.shape[1] <= len(wide):
        return wide
    triangle: Tensor = torch.linalg.qr(wide.mT, mode="r")[1]
    return triangle.mT


def solve_lower(lower: Float[Tensor, "*B n n"], right: Float[Tensor, "*B n k"]) -> Float[Tensor, "*B n k"]:
    """lower⁻¹ right."""
    solution: Tensor = torch.linalg.solve_triangular(lower, right, upper=False)
    return solution


def solve_lower_transposed(lower: Float[Tensor, "*B n n"], right: Float[Tensor, "*B n k"]) -> Float[Tensor, "*B n k"]:
    """lower⁻ᵀ right."""
    solution: Tensor = torch.linalg.solve_triangular(lower.mT, right, upper=True)
    return solution


def inverse_from_cholesky(lower: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B n n"]:
    """(lower lowerᵀ)⁻¹."""
    return torch.cholesky_inverse(lower)


@lru_cache(maxsize=8)
def _signs(n: int) -> Float[Tensor, "n"]:
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).double() * 2 - 1


def signs(n: int, device: torch.device) -> Float[Tensor, "n"]:
    """A fixed vector s of ±1: for an error E of a sum, |E s|² is |E|² (Frobenius) on average."""
    return _signs(n).to(device)


def error_share(lower: Float[Tensor, "n n"], prior: Float[Tensor, "n"], error: Float[Tensor, "n"]) -> float:
    """The size of P^½ E P_0^½ for an error E of the information of which E s is known, s the `signs`.

    That is by how much E changes variances, relatively, where the prior decides: what is left of an error in directions
    that the data decide is small. Twice the root mean square of a row, the norm of a symmetric matrix of independent
    entries.
    """
    half = solve_lower(lower, error[:, None])
    return 2 * float(half.norm() * prior.reciprocal().mean().sqrt()) / math.sqrt(len(error))


def negative_share(lower: Float[Tensor, "*B n n"], prior: Float[Tensor, "*B n"]) -> float:
    """How far the least eigenvalue of I is below zero, as a share of the prior, where lower lowerᵀ = I + diag λ.

    That is 1 − 1/r, r the largest eigenvalue of diag √λ (I + diag λ)⁻¹ diag √λ: a variance over that of the prior,
    which data can never raise above one. By subspace iteration, which costs little compared with the factorisation and
    never overestimates; 0 if no eigenvalue is below zero.
    """
    if lower.ndim == 3 and len(lower) > _SHARED_MATRICES:
        # Solving copies its matrices: a few at a time.
        parts = zip(lower.split(_SHARED_MATRICES), prior.split(_SHARED_MATRICES), strict=True)
        return max(negative_share(part, own) for part, own in parts)
    n = lower.shape[-1]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(n, min(n, _SUBSPACE), generator=generator, dtype=torch.float64).to(lower.device)
    scale = prior.sqrt()[..., None]
    basis = torch.linalg.qr(start.expand(*lower.shape[:-1], start.shape[1]))[0]
    half = solve_lower(lower, scale * basis)
    for _ in range(_SUBSPACE_STEPS):
        basis = torch.linalg.qr(scale * solve_lower_transposed(lower, half))[0]
        half = solve_lower(lower, scale * basis)
    largest = float(torch.linalg.eigvalsh(half.mT @ half)[..., -1].max())
    return max(0.0, 1 - 1 / largest)


def log_determinant_from_cholesky(lower: Float[Tensor, "*B n n"]) -> float:
    """ln det(lower lowerᵀ), summed over a batch."""
    return 2 * float(lower.diagonal(dim1=-2, dim2=-1).log().sum())


def exp_without_subnormals_(exponents: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """exp in place, with 0 for results below the smallest normal number: CPUs calculate up to ten times slower with
    subnormal ones, and logits that are far apart are full of them.

    exp(−∞) is slow too, and so is exp of what is within rounding of the limit: hence the limit is 1 % higher, and what
    is below becomes 0 afterwards.
    """
    least = _least_exponent(exponents.dtype)
    return torch.threshold_(exponents.clamp_min_(least).exp_(), 1.001 * math.exp(least), 0.0)


def softmax_without_subnormals_(logits: Float[Tensor, "b M *K"]) -> Float[Tensor, "b M *K"]:
    """Softmax over dimension 1, which changes `logits`, without the exponentials of `exp_without_subnormals_`."""
    logits -= logits.amax(1, keepdim=True)
    return torch.softmax(torch.threshold_(logits, _least_exponent(logits.dtype), -math.inf), 1)


def _least_exponent(dtype: torch.dtype) -> float:
    return math.log(torch.finfo(dtype).tiny) + 0.01
