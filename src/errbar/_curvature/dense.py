"""The exact structure: all of the information matrix, all of the covariance.

`DenseSum` is the information of the data, Σ_n J_nᵀ Λ_n J_n; `DenseFactor` is the posterior with a prior,
P = (Σ + diag λ)⁻¹, kept as the Cholesky factor of the precision or, after small updates, as P itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._base.triangles import (
    by_columns,
    from_triangle,
    positive_diagonal,
    read_jitter,
    read_symmetric,
    symmetric_array,
    triangle_array,
)
from errbar._curvature import banded, packed, per_class
from errbar._curvature.fisher import Fisher, Weights, comes_apart_by_class
from errbar._curvature.structure import Description, Factor, PairCoefficients, Structure, Sum, Summand, Tensors
from errbar._curvature.task import Task
from errbar._curvature.workload import (
    ADDED_PRODUCTS,
    MOVED_PRODUCTS,
    Cost,
    Workload,
    by_device,
    drawing_bytes,
    drawing_products,
    explicit_bytes,
    explicit_products,
    jacobian_samples,
)
from errbar._derivative.layers import LinearLayer, LinearTerm
from errbar._derivative.route import Derivative
from errbar._derivative.trace import TopClasses
from errbar._distributed.reduce import triangle_summed
from errbar._distributed.team import Team
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._model.batch import Batch
from errbar.errors import DamagedFileError

# Two layers, and whether the block is of one term with itself, and so symmetric.
BlockKey = tuple[LinearLayer, LinearLayer, bool]

# Samples are staged until their products are worth a pass over the sums, or take so many bytes.
STAGED_SAMPLES = {"cpu": 1024, "cuda": 16384}
# One wide layer alone has large sums and narrow products, so a pass should take more samples.
STAGED_SAMPLES_OF_BANDS = {"cpu": 4096, "cuda": 16384}
STAGED_BYTES = 2**28
# Rows that are cast to float64 at a time, to check the sums of float32 products.
_CHECKED_ROWS = 64


@dataclass(frozen=True, eq=False)
class DenseSum:
    """Σ_n J_nᵀ Λ_n J_n in float64; additive.

    `error` is the rounding error of float32 products in (Σ_n J_nᵀ Λ_n J_n) s, s the `linalg.signs`; None where it is
    unknown, as for sums from a file.
    """

    matrix: Float[Tensor, "n n"]
    error: Float[Tensor, "n"] | None = None

    def dense(self) -> Float[Tensor, "n n"]:
        return self.matrix.clone()

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def __add__(self, other: DenseSum) -> DenseSum:
        return DenseSum(self.matrix + other.matrix, _combined(self.error, other.error, 1))

    def __sub__(self, other: DenseSum) -> DenseSum:
        return DenseSum(self.matrix - other.matrix, _combined(self.error, other.error, -1))

    def __mul__(self, factor: float) -> DenseSum:
        return DenseSum(self.matrix * factor, None if self.error is None else self.error * factor)

    def to(self, device: torch.device) -> DenseSum:
        return DenseSum(self.matrix.to(device), None if self.error is None else self.error.to(device))

    def tolerance(self, dtype: torch.dtype) -> float:
        """How far below zero rounding may take an eigenvalue of a difference from this sum, computed in `dtype`."""
        return len(self.matrix) * linalg.rounding(dtype) * float(self.matrix.diagonal().abs().max())

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Whether no eigenvalue is below −tolerance."""
        return linalg.is_positive_semidefinite(self.matrix, tolerance=tolerance)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> DenseFactor:
        """Factorise the precision now, so that a bad one is refused here and not at the first prediction."""
        factor = DenseFactor(self, prior_precision, limit)
        factor.factorisation  # noqa: B018  (computed and cached)
        return factor

    def is_zero(self) -> bool:
        return not bool(self.matrix.diagonal().any())

    def reduced(self, has_data: Sequence[bool], team: Team) -> DenseSum:
        error = None if self.error is None else team.summed(self.error)
        return DenseSum(triangle_summed(self.matrix, team), error)

    def written(self) -> tuple[Description, Tensors]:
        return {"form": "dense"}, {"sum": symmetric_array(self.matrix)}


def _combined(
    first: Float[Tensor, "n"] | None, second: Float[Tensor, "n"] | None, sign: int
) -> Float[Tensor, "n"] | None:
    return None if first is None or second is None else first + sign * second


class DenseAccumulator:
    """Adds up batches; private to one pass over the data, and the only thing here that changes."""

    def __init__(self, n: int, fisher: Fisher, dtype: torch.dtype, device: torch.device) -> None:
        self.n = n
        self.fisher = fisher
        self.dtype = dtype
        self.device = device
        self.matrix: Float[Tensor, "n n"] | None = None
        self.blocks: dict[BlockKey, Float[Tensor, "rows k"]] = {}
        self.bands: dict[BlockKey, banded.Bands] = {}
        self.contrast_layers: set[LinearLayer] = set()
        self.staged: list[tuple[Float[Tensor, "B M M"], tuple[LinearTerm, ...]]] = []
        self.staged_samples = 0
        # Σ_n J_nᵀ Λ_n J_n s in float64, to compare the sums with; not needed if those are float64 themselves.
        self.reference = None if dtype == torch.float64 else torch.zeros(n, dtype=torch.float64, device=device)

    def add(self, weights: Weights, derivative: Derivative) -> None:
        if derivative.terms is None:
            rows = weights.rooted(derivative.jacobian().to(self.dtype)).flatten(0, 1)
            self._add_rows(rows)
            if self.reference is not None:
                for some_rows in rows.split(_CHECKED_ROWS):
                    part = some_rows.double()
                    self.reference += (part @ linalg.signs(self.n, self.device)) @ part
            return
        if self.staged and not _same_layers(self.staged[-1][1], derivative.terms):
            self._flush()
        matrix = weights.matrix()
        if self.reference is not None:
            _add_applied(self.reference, matrix, derivative.terms)
        terms = tuple(term.to(self.dtype) for term in derivative.terms)
        self.staged.append((matrix.to(self.dtype), terms))
        self.staged_samples += len(matrix)
        if self.staged_samples >= self._capacity():
            self._flush()

    def finish(self) -> DenseSum:
        if self.staged:
            self._flush()
        total = self._zeros() if self.matrix is None else linalg.mirror_(self.matrix)
        # One after the other, each freed at once: together they can be as large as the matrix.
        for key in list(self.blocks):
            _add_block(total, key, self._in_logits(key, self.blocks.pop(key)))
        for key in list(self.bands):
            _add_block(total, key, self._in_logits(key, banded.to_packed(self.bands.pop(key))))
        if self.reference is None:
            return DenseSum(total)
        return DenseSum(total, total @ linalg.signs(self.n, self.device) - self.reference)

    def _zeros(self) -> Float[Tensor, "n n"]:
        return torch.zeros(self.n, self.n, dtype=torch.float64, device=self.device)

    def _add_rows(self, rows: Float[Tensor, "k n"]) -> None:
        """Add UᵀU, U = Rᵀ J: the product in the dtype of `rows`, the sum in float64."""
        if self.matrix is None:
            self.matrix = self._zeros()
        if rows.dtype == torch.float64:
            self.matrix.addmm_(rows.T, rows)
        else:
            linalg.add_in_place(self.matrix, rows.T @ rows)

    def _capacity(self) -> int:
        weights, terms = self.staged[0]
        classes = weights.shape[1]
        floats = classes**2 + sum(f.layer.width + f.layer.outputs * (classes + f.layer.outputs) for f in terms)
        layer = terms[0].layer if len(terms) == 1 else None
        outputs = classes - 1 if self.fisher == "ggn" else classes
        in_bands = layer is not None and terms[0].outer is None and banded.suits_outputs(layer.width, outputs)
        limit = (STAGED_SAMPLES_OF_BANDS if in_bands else STAGED_SAMPLES).get(self.device.type, 4096)
        return max(1, min(limit, STAGED_BYTES // (floats * weights.element_size())))

    def _contrasts(self, classes: int) -> Float[Tensor, "M M-1"] | None:
        """E with Λ = E (EᵀΛE) Eᵀ, as Λ1 = 0: a layer that returns the logits needs M−1 of M rows. Not for `eta`."""
        return linalg.contrast_basis(classes, self.device).to(self.dtype) if self.fisher == "ggn" else None

    def _in_logits(self, key: BlockKey, block: Float[Tensor, "rows m"]) -> Float[Tensor, "rows k"]:
        """A block without its padding, and in logits where it was summed in contrasts."""
        first, second, symmetric = key
        basis = {
            layer: linalg.contrast_basis(layer.outputs, self.device) if layer in self.contrast_layers else None
            for layer in (first, second)
        }
        return packed.expanded(block, basis[first], basis[second], first.outputs, second.outputs, symmetric=symmetric)

    def _flush(self) -> None:
        """Block (l, l') += Σ_n (V_lᵀ Λ V_l') ⊗ h_l h_l'ᵀ for all pairs of terms."""
        weights = torch.cat([part for part, _ in self.staged])
        terms = _concatenated([part for _, part in self.staged])
        self.staged, self.staged_samples = [], 0
        inner = [term.inner.T.contiguous() for term in terms]
        contrasts = self._contrasts(weights.shape[1])
        outer = [contrasts if term.outer is None else term.outer for term in terms]
        if contrasts is not None:
            self.contrast_layers.update(term.layer for term in terms if term.outer is None)
        for y, second in enumerate(terms):
            right_outer = outer[y]
            right = weights if right_outer is None else weights @ right_outer
            for x, first in enumerate(terms[: y + 1]):
                left_outer = outer[x]
                product = right if left_outer is None else left_outer.mT @ right
                self._add_block(first, second, packed.packed_weights(product, symmetric=x == y), inner[x], inner[y])

    def _add_block(
        self,
        first: LinearTerm,
        second: LinearTerm,
        weights: Float[Tensor, "k B"],
        left: Float[Tensor, "p B"],
        right: Float[Tensor, "q B"],
    ) -> None:
        symmetric = first is second
        p, q = len(left), len(right)
        key = (first.layer, second.layer, symmetric)
        if symmetric and banded.suits(p, len(weights)):
            if key not in self.bands:
                self.bands[key] = banded.zeros(p, len(weights), self.device)
            banded.add_products(self.bands[key], weights, left)
            return
        weights = packed.padded(weights)
        if key not in self.blocks:
            rows = p * (p + 1) // 2 if symmetric else p * q
            self.blocks[key] = torch.zeros(rows, len(weights), dtype=torch.float64, device=self.device)
        packed.add_products(self.blocks[key], weights, left, None if symmetric else right)


def _add_applied(total: Float[Tensor, "n"], weights: Float[Tensor, "B M M"], terms: tuple[LinearTerm, ...]) -> None:
    """total += Σ_n J_nᵀ Λ_n J_n s in float64, by products with vectors alone."""
    direction = linalg.signs(len(total), total.device)
    wide = [term.to(torch.float64) for term in terms]
    positions = [term.layer.positions().to(total.device) for term in terms]
    product: Tensor | None = None
    for term, where in zip(wide, positions, strict=True):
        outputs = term.inner @ direction[where].mT
        part = outputs if term.outer is None else (term.outer @ outputs[:, :, None])[..., 0]
        product = part if product is None else product + part
    assert product is not None
    cotangents = (weights @ product[:, :, None])[..., 0]
    for term, where in zip(wide, positions, strict=True):
        total[where] += term.pulled_back(cotangents)


def _same_layers(first: tuple[LinearTerm, ...], second: tuple[LinearTerm, ...]) -> bool:
    return [term.layer for term in first] == [term.layer for term in second]


def _concatenated(parts: list[tuple[LinearTerm, ...]]) -> list[LinearTerm]:
    terms = []
    for group in zip(*parts, strict=True):
        outer = [term.outer for term in group if term.outer is not None]
        inner = torch.cat([term.inner for term in group])
        terms.append(LinearTerm(group[0].layer, inner, torch.cat(outer) if outer else None))
    return terms


def _add_block(whole: Float[Tensor, "n n"], key: BlockKey, total: Float[Tensor, "rows k"]) -> None:
    """Add a packed block, and its mirror image, to a matrix in the order of the flat parameter vector."""
    first, second, symmetric = key
    d, p, e, q = first.outputs, first.width, second.outputs, second.width
    for i, j, entries in packed.block_from_products(total, d, p, e, q, symmetric=symmetric):
        # A diagonal sub-block is its own mirror image.
        mirror_start = j + 1 if symmetric else j
        for _, entry_rows, rows in first.spans(i, i + 1):
            for outputs, entry_columns, columns in second.spans(j, e):
                whole[rows, columns] += entries[entry_rows, outputs, entry_columns].flatten(1)
            for outputs, entry_columns, columns in second.spans(mirror_start, e):
                part = entries[entry_rows, mirror_start - j :][:, outputs, entry_columns]
                whole[columns, rows] += part.flatten(1).T


class DenseFactor:
    """P = (Σ + diag λ)⁻¹, whose factors are computed once, when first needed."""

    def __init__(
        self,
        total: DenseSum,
        prior_precision: Float[Tensor, "n"],
        limit: float,
        *,
        covariance: Float[Tensor, "n n"] | None = None,
        factorisation: tuple[Float[Tensor, "n n"], float] | None = None,
        recursion_rows: int = 0,
    ) -> None:
        self.total = total
        self.prior_precision = prior_precision
        self.limit = limit
        self.recursion_rows = recursion_rows
        self._lock = threading.RLock()
        self._cache: dict[tuple[str, torch.dtype], Tensor] = {}
        self._coefficients: dict[tuple[LinearLayer, LinearLayer, bool, torch.dtype], Tensor | banded.Bands] = {}
        # The cached properties look here first.
        if covariance is not None:
            self.__dict__["covariance"] = covariance
        if factorisation is not None:
            self.__dict__["factorisation"] = factorisation

    @cached_property
    def factorisation(self) -> tuple[Float[Tensor, "n n"], float]:
        """The lower Cholesky factor of the precision, and the jitter it needed."""
        with self._lock:
            if "factorisation" in self.__dict__:
                return self.__dict__["factorisation"]  # type: ignore[no-any-return]
            # In place, because each copy of an n × n matrix counts; what fails is made again, and looked at closely.
            lower = linalg.cholesky_in_place(self._precision())
            if lower is not None:
                return lower, 0.0
            return linalg.safe_cholesky(self._precision(), name="The posterior precision", limit=self.limit)

    def _precision(self) -> Float[Tensor, "n n"]:
        """Σ + diag λ, column by column: the mirror image of a copy, since to turn one round takes long."""
        precision = self.total.matrix.clone(memory_format=torch.contiguous_format).mT
        precision.diagonal().add_(self.prior_precision)
        return precision

    @property
    def lower(self) -> Float[Tensor, "n n"]:
        return self.factorisation[0]

    @property
    def jitter(self) -> float:
        return self.factorisation[1]

    @cached_property
    def covariance(self) -> Float[Tensor, "n n"]:
        with self._lock:
            if "covariance" in self.__dict__:
                return self.__dict__["covariance"]  # type: ignore[no-any-return]
            return linalg.inverse_from_cholesky(self.lower)

    def can_recurse(self, rows: int) -> bool:
        """Whether `rows` rows by the recursion are cheaper than a factorisation.

        A factorisation takes n³/3 multiplications, the recursion 2 n² per row; and after n rows in all a factorisation
        is due anyway, to remove accumulated rounding from the covariance.
        """
        n = len(self.prior_precision)
        return "covariance" in self.__dict__ and rows <= n // 8 and self.recursion_rows + rows <= n

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Derivative) -> LogitGaussian:
        """N(ĝ, P^g), P^g = J P Jᵀ (eq:linearize)."""
        if derivative.terms is None:
            covariance = self._from_jacobian(derivative.jacobian())
        else:
            covariance = self._from_terms(derivative.terms)
        return LogitGaussian(mean, FullCovariance(covariance))

    def joint_halves(self, derivative: Derivative, rotation: Float[Tensor, "M M"]) -> Iterator[Float[Tensor, "CM k"]]:
        """W = QᵀJ lower⁻ᵀ of all frames, with W Wᵀ = QᵀR Q; where there is P alone, the precision is factorised."""
        jacobian = derivative.of_rotated(rotation).jacobian()
        yield linalg.solve_lower(self.lower, jacobian.flatten(0, 1).mT).mT

    def _from_jacobian(self, jacobian: Float[Tensor, "B M n"]) -> Float[Tensor, "B M M"]:
        """ZᵀZ with Z = lower⁻¹ Jᵀ: positive semi-definite whatever the rounding."""
        size, classes, n = jacobian.shape
        columns = jacobian.reshape(-1, n).T
        if "factorisation" in self.__dict__ or "covariance" not in self.__dict__:
            half = linalg.solve_lower(self._cached("lower", jacobian.dtype), columns)
            half = half.T.reshape(size, classes, n)
            return half @ half.mT
        product = (self.covariance @ columns.double()).T.reshape(size, classes, n)
        return linalg.symmetric(jacobian.double() @ product.mT)

    def _from_terms(self, terms: tuple[LinearTerm, ...]) -> Float[Tensor, "B M M"]:
        """Σ over pairs of terms of V Q Vᵀ, Q_ij = Σ_ab P[ia, jb] h_a h'_b, by matrix products with P repacked."""
        inner = [term.inner.T.contiguous() for term in terms]
        total: Tensor | None = None
        for y, second in enumerate(terms):
            for x, first in enumerate(terms[: y + 1]):
                is_same = x == y
                contraction = self._contracted(first.layer, second.layer, is_same, inner[x], inner[y])
                part = packed.unpacked_weights(
                    contraction, first.layer.outputs, second.layer.outputs, symmetric=is_same
                )
                part = part if first.outer is None else first.outer @ part
                part = part if second.outer is None else part @ second.outer.mT
                part = part if is_same else part + part.mT
                total = part if total is None else total + part
        assert total is not None
        return linalg.symmetric(total)

    def _contracted(
        self,
        first: LinearLayer,
        second: LinearLayer,
        is_same: bool,
        left: Float[Tensor, "p B"],
        right: Float[Tensor, "q B"],
    ) -> Float[Tensor, "k B"]:
        """Q_ij of two layers, packed; P is repacked for it once, in bands where these are cheaper."""
        key = (first, second, is_same, left.dtype)
        with self._lock:
            coefficients = self._coefficients.get(key)
            if coefficients is None:
                device = self.prior_precision.device
                positions = None if is_same else second.positions().to(device)
                rows = packed.coefficients(self.covariance, first.positions().to(device), positions, left.dtype)
                in_bands = is_same and banded.suits_outputs(len(left), first.outputs)
                coefficients = banded.from_packed(rows, len(left)) if in_bands else rows
                self._coefficients[key] = coefficients
        if isinstance(coefficients, list):
            return banded.contract(coefficients, left)
        return packed.contract(coefficients, left, None if is_same else right)

    def _cached(self, name: str, dtype: torch.dtype) -> Tensor:
        """A float64 factor in the dtype of products, cast once."""
        value: Tensor = getattr(self, name)
        if dtype == torch.float64:
            return value
        with self._lock:
            if (name, dtype) not in self._cache:
                self._cache[name, dtype] = value.to(dtype)
            return self._cache[name, dtype]

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P): lower⁻ᵀ z has covariance (lower lowerᵀ)⁻¹ = P."""
        return linalg.solve_lower_transposed(self.lower, normal.T.to(self.lower.dtype)).T

    def log_determinant_of_precision(self) -> float:
        return linalg.log_determinant_from_cholesky(self.lower)

    def recursion(self, rows: Float[Tensor, "k n"], total: DenseSum) -> DenseFactor:
        """eq:recUpdate_all for a stack of U_nᵀ: P − K UᵀP with K = P U (I + UᵀPU)⁻¹.

        Written as P − WᵀW with W = lower⁻¹ UᵀP and lower lowerᵀ = I + UᵀPU, which keeps P symmetric up to the rounding
        of one product; the small matrix is well conditioned because its eigenvalues are at least one.
        """
        rows = rows.double()
        gain = rows @ self.covariance
        small = gain @ rows.T
        small.diagonal().add_(1.0)
        lower, _ = linalg.safe_cholesky(linalg.symmetric(small), name="I + UᵀPU", limit=0.0)
        half = linalg.solve_lower(lower, gain)
        covariance = linalg.mirror_(self.covariance - half.T @ half)
        recursion_rows = self.recursion_rows + len(rows)
        return DenseFactor(
            total, self.prior_precision, self.limit, covariance=covariance, recursion_rows=recursion_rows
        )

    def to(self, device: torch.device) -> DenseFactor:
        cache = self.__dict__
        return DenseFactor(
            self.total.to(device),
            self.prior_precision.to(device),
            self.limit,
            covariance=self.covariance.to(device) if "covariance" in cache else None,
            factorisation=(self.lower.to(device), self.jitter) if "factorisation" in cache else None,
            recursion_rows=self.recursion_rows,
        )

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        """From the error of the sums where it is known, otherwise from eigenvalues below zero."""
        if self.total.error is None:
            return linalg.negative_share(self.lower, prior_precision)
        return linalg.error_share(self.lower, prior_precision, self.total.error)

    def written(self) -> tuple[Description, Tensors]:
        return self.written_as("factor")

    def written_as(self, name: str) -> tuple[Description, Tensors]:
        """P, computed if necessary, as predictions need it; and the Cholesky factor if it was computed."""
        small: Description = {"recursed": self.recursion_rows, "covariance_columns": by_columns(self.covariance)}
        arrays = {f"{name}.covariance": symmetric_array(self.covariance)}
        if "factorisation" in self.__dict__:
            arrays[f"{name}.lower"] = triangle_array(self.lower, by_columns=by_columns(self.lower))
            small |= {"jitter": self.jitter, "lower_columns": by_columns(self.lower)}
        return small, arrays

    @staticmethod
    def read(
        contents: Contents,
        fields: Fields,
        name: str,
        total: DenseSum,
        prior_precision: Float[Tensor, "n"],
        limit: float,
    ) -> DenseFactor:
        n = len(prior_precision)
        covariance = read_symmetric(contents, f"{name}.covariance", n, by_columns=fields.flag("covariance_columns"))
        if not bool((covariance.diagonal() > 0).all()):
            raise DamagedFileError(f"{contents.path} has a covariance with variances that are not positive.")
        factorisation = None
        if "jitter" in fields:
            flat = contents.tensor(f"{name}.lower", n * (n + 1) // 2)
            lower = from_triangle(flat, n, by_columns=fields.flag("lower_columns"))
            factorisation = (positive_diagonal(lower, contents), read_jitter(fields))
        recursion_rows = fields.whole("recursed")
        return DenseFactor(
            total,
            prior_precision,
            limit,
            covariance=covariance,
            factorisation=factorisation,
            recursion_rows=recursion_rows,
        )

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> PairCoefficients:
        where = [layer.positions() for layer in layers]
        return PairCoefficients(
            {
                (x, y): packed.coefficients(self.covariance, where[x], None if x == y else where[y], dtype)
                for y in range(len(layers))
                for x in range(y + 1)
            }
        )


class DenseStructure(Structure):
    """The exact structure; a last layer alone with the `eta` Fisher separates by class (`_curvature.per_class`)."""

    name = "dense"

    def _form(self, task: Task) -> str:
        assert task.route is not None
        return "per_class" if comes_apart_by_class(task.fisher_form, returns_logits=task.route.identity) else "dense"

    def cost(self, work: Workload) -> Cost:
        return per_class.cost(work) if work.is_per_class else cost(work)

    def sums(self, task: Task) -> Summand:
        if self._form(task) == "per_class":
            assert task.route is not None
            return per_class.PerClassAccumulator(task.route.layers[0], task.dtype, task.network.device)
        return DenseAccumulator(task.selection.n_parameters, task.fisher_form, task.dtype, task.network.device)

    def top_gaussians(self, task: Task, factor: Any, batch: Batch, top: int) -> Iterator[LogitGaussian]:
        if self._form(task) == "per_class":
            # All variances cost no more than some.
            for gaussian in self.gaussians(task, factor, batch):
                yield gaussian.of_classes(TopClasses(top).classes(gaussian.mean))
            return
        yield from super().top_gaussians(task, factor, batch, top)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        form = self._form(task)
        contents.description.part("sum").choice("form", (form,))
        if form == "per_class":
            return per_class.PerClassSum.read(contents, task)
        return DenseSum(read_symmetric(contents, "sum", task.selection.n_parameters))

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        fields = contents.description.part("factor")
        if isinstance(total, per_class.PerClassSum):
            return per_class.PerClassFactor.read(contents, fields, total)
        return DenseFactor.read(contents, fields, "factor", total, prior_precision, limit)


def _pairs(work: Workload, *, contrasts: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns, p and multiplications per sample of each packed block, for all pairs of layers."""
    for y, second in enumerate(work.terms):
        for x, first in enumerate(work.terms[: y + 1]):
            d, e = (
                t.outputs - 1 if contrasts and t.returns_logits and work.fisher == "ggn" else t.outputs
                for t in (first, second)
            )
            p, q = first.width, second.width
            if x != y:
                yield p * q, d * e, p, first.uses * second.uses * p * q * d * e
                continue
            k = d * (d + 1) // 2
            rows = p * (p + 1) // 2
            if banded.suits(p, k):
                # Bands hold a little more than the triangle.
                rows = rows + banded.ROWS * p // 2
            yield rows, k, p, first.uses * rows * k
            if first.uses > 1:
                yield p * p, d * d, p, first.uses * (first.uses - 1) // 2 * (p * d) ** 2


def _staged(work: Workload) -> tuple[int, int]:
    """How many samples are staged before they are multiplied, and their bytes with those of their products."""
    terms = [term for term in work.terms for _ in range(term.uses)]
    numbers = work.classes**2 + sum(t.width + (0 if t.returns_logits else work.classes * t.outputs) for t in terms)
    outputs = work.classes - 1 if work.fisher == "ggn" else work.classes
    in_bands = len(terms) == 1 and terms[0].returns_logits and banded.suits_outputs(terms[0].width, outputs)
    limit = int(by_device(STAGED_SAMPLES_OF_BANDS if in_bands else STAGED_SAMPLES, work.device))
    samples = max(1, min(limit, STAGED_BYTES // (numbers * work.itemsize)))
    d = max(term.outputs for term in work.terms)
    tile = by_device(packed.TILE_BYTES, work.device)
    return samples, int(samples * (2 * numbers + work.classes * d + 2 * d * d) * work.itemsize + 2 * tile)


def _between(work: Workload) -> float:
    """Multiplications for one sample of V_lᵀ Λ V_l' for all pairs of terms, or of V_l Q V_l'ᵀ.

    Each is made, turned so that the samples come last, or first, and packed, or unpacked.
    """
    products = numbers = 0.0
    for place, second in enumerate(work.terms):
        for first in work.terms[: place + 1]:
            count, d, e = first.uses * second.uses, first.outputs, second.outputs
            # Of a layer that returns the logits V is the identity: no product.
            products += 0 if first.returns_logits else count * d * work.classes * (work.classes + e)
            numbers += count * d * e
    return products + MOVED_PRODUCTS * 6 * work.itemsize * numbers


def cost(work: Workload) -> Cost:
    """n × n matrices of float64: the information and the Cholesky factor after the fit, the covariance to predict."""
    n, s = work.n, work.itemsize
    square = 8 * n * n
    if work.is_factored:
        sum_pairs = list(_pairs(work, contrasts=True))
        numbers = sum(rows * k for rows, k, _, _ in sum_pairs)
        widest = max(p * n for _, _, p, _ in sum_pairs)
        samples, staged_bytes = _staged(work)
        unpack_bytes = 8 * max(rows * k for rows, k, _, _ in sum_pairs) + 2 * 8 * widest
        collect_bytes = square + 8 * numbers + staged_bytes + unpack_bytes
        packed_pairs = list(_pairs(work, contrasts=False))
        coefficients = s * sum(rows * k for rows, k, _, _ in packed_pairs)
        repack_bytes = 4 * 8 * widest + s * max(rows * k for rows, k, _, _ in packed_pairs)
        d = max(term.outputs for term in work.terms)
        contraction = min(work.batch, 1024) * (work.classes * d + 2 * d * d + 2 * work.classes**2) * s
        predict_bytes = 3 * square + coefficients + max(repack_bytes, contraction + drawing_bytes(work, full=True))
        additions = ADDED_PRODUCTS * numbers / samples
        between = _between(work)
        own = sum(c for *_, c in sum_pairs), sum(c for *_, c in packed_pairs)
        products: tuple[float, float] = (own[0] + additions + between, own[1] + between)
        first: float = 2 * n**3 / 3 + 10.0 * n * n
        once: float = n**3 / 3 + 10.0 * n * n + first
        passes = float(work.classes if any(not term.returns_logits for term in work.terms) else 0)
    else:
        jacobian = jacobian_samples(work) * work.classes * n * s
        collect_bytes = square + max(s * n * n + 2 * jacobian, explicit_bytes(work))
        predict_bytes = 2 * square + (s * n * n if s < 8 else 0) + max(explicit_bytes(work), 3 * jacobian)
        predict_bytes += drawing_bytes(work, full=True)
        additions = ADDED_PRODUCTS * n * n / jacobian_samples(work)
        products = (work.classes * n * n + additions, work.classes * n * n / 2)
        products = (products[0] + explicit_products(work), products[1] + explicit_products(work))
        first, once = 0.0, n**3 / 3 + 10.0 * n * n
        passes = float(work.classes)
    fit = max(collect_bytes, 2 * square)
    inputs = products[1] + drawing_products(work, full=True)
    costs = (2 * square, fit, predict_bytes, products[0], once, inputs, (passes, passes))
    return Cost(*costs, exact=True, first_products=first, draw_products=n * n / 2)
