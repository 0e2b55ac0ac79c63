"""The diagonal structure: one variance for each parameter, and no covariances.

`DiagonalSum` is Σ_n diag(J_nᵀ Λ_n J_n). For a linear layer that is used once, with Jacobian V ⊗ hᵀ, that is
S_ii h_a² with S = VᵀΛV: one matrix product over the samples. Where a weight is used several times (tokens, patches),
the terms of a sample are summed before they are squared. Prediction is the mirror image, V diag(Σ_a P_ia h_a²) Vᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.container import Contents
from errbar._base.memory import require_memory
from errbar._base.triangles import read_jitter, read_positive
from errbar._curvature.fisher import Weights
from errbar._curvature.structure import (
    Description,
    Factor,
    IndependentVariances,
    Refactorised,
    Structure,
    Sum,
    Summand,
    Tensors,
)
from errbar._curvature.task import Task
from errbar._curvature.workload import (
    Cost,
    Workload,
    backward_passes,
    by_device,
    by_layer_bytes,
    drawing_bytes,
    drawing_products,
    explicit_products,
    piece_bytes,
    samples_at_a_time,
)
from errbar._derivative import layers, route
from errbar._derivative.layers import LinearLayer, SharedTerm, Spans, gathered, scatter_, shared_terms
from errbar._derivative.layerwise import LayerwiseDerivative
from errbar._derivative.route import Derivative
from errbar._derivative.trace import Seeds
from errbar._distributed.team import Team
from errbar._distributions.covariance import DiagonalCovariance, FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._model.batch import Batch
from errbar.errors import CovarianceError


def diagonal_information(weights: Weights, term: SharedTerm) -> Float[Tensor, "d p"]:
    """Σ_n diag(JᵀΛJ) of one layer."""
    if term.outer is None:
        return weights.diagonal().to(term.inner.dtype).T @ term.inner[:, 0].square()
    if term.is_single:
        return weights.squares(term.outer[..., 0]).T @ term.inner[:, 0].square()
    # V meets the root of Λ before it meets h: it is smaller than J.
    pieces = SharedTerm(term.layer, term.inner, weights.rooted(term.outer)).pieces()
    return torch.stack([piece.square_().sum((0, 1)) for _, piece in pieces]).sum(0)


def safe_precision(precision: Float[Tensor, "..."], *, limit: float) -> tuple[Float[Tensor, "..."], float]:
    """Positive precisions, and the jitter that they needed: `linalg.safe_cholesky` for a diagonal matrix."""
    smallest, mean = float(precision.min()), float(precision.mean())
    if smallest > 0 and math.isfinite(mean):
        return precision, 0.0
    jitter = 1e-14
    while not smallest + jitter * mean > 0:
        jitter *= 100
        if jitter > limit * 1.0001 or not math.isfinite(mean):
            raise CovarianceError(
                f"The posterior precision is not positive: its smallest entry is {smallest:.3g}, and adding "
                f"{limit:.0e} of the mean entry {mean:.3g} still does not make it so. Check that the data are finite "
                "and the prior precision is not many orders of magnitude below the information, or compute with "
                "precision='float64'.",
                arguments={"precision": "float64"},
            )
    return precision + jitter * mean, jitter


@dataclass(frozen=True, eq=False)
class DiagonalSum:
    """Σ_n diag(J_nᵀ Λ_n J_n) in float64; additive."""

    values: Float[Tensor, "n"]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dense(self) -> Float[Tensor, "n n"]:
        return _embedded(self.values)

    def __add__(self, other: DiagonalSum) -> DiagonalSum:
        return DiagonalSum(self.values + other.values)

    def __sub__(self, other: DiagonalSum) -> DiagonalSum:
        return DiagonalSum(self.values - other.values)

    def __mul__(self, factor: float) -> DiagonalSum:
        return DiagonalSum(self.values * factor)

    def to(self, device: torch.device) -> DiagonalSum:
        return DiagonalSum(self.values.to(device))

    def tolerance(self, dtype: torch.dtype) -> float:
        """How far below zero rounding may take an entry of a difference from this sum, computed in `dtype`."""
        # Terms of one sign: the error grows with the square root of their number, a few thousand in one product.
        return 100 * torch.finfo(dtype).eps * float(self.values.abs().max())

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Whether no entry is below −tolerance."""
        return bool((self.values >= -tolerance).all())

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> DiagonalFactor:
        return DiagonalFactor(*safe_precision(self.values + prior_precision, limit=limit))

    def is_zero(self) -> bool:
        return not bool(self.values.any())

    def reduced(self, has_data: Sequence[bool], team: Team) -> DiagonalSum:
        return DiagonalSum(team.summed(self.values))

    def written(self) -> tuple[Description, Tensors]:
        return {"form": "diag"}, {"sum": self.values}


class DiagonalAccumulator:
    """Adds up batches; private to one pass over the data."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.values = torch.zeros(n, dtype=torch.float64, device=device)

    def add(self, weights: Weights, derivative: Derivative | LayerwiseDerivative) -> None:
        parts = _by_layer(derivative)
        for term in parts.terms:
            information = diagonal_information(weights, term.to(self.dtype))
            scatter_(self.values, term.layer, gathered(term.layer, self.values) + information)
        if len(parts.rest):
            squares = weights.squares(parts.explicit.to(self.dtype))
            parts.rest.put_(self.values, parts.rest.take(self.values) + squares.sum(0, dtype=torch.float64))

    def finish(self) -> DiagonalSum:
        return DiagonalSum(self.values)


class DiagonalFactor(Refactorised):
    """P = diag 1/(Σ + λ), by the precisions."""

    def __init__(self, precision: Float[Tensor, "n"], jitter: float) -> None:
        self.precision = precision
        self.jitter = jitter

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        return _embedded(1 / self.precision)

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Derivative | LayerwiseDerivative) -> LogitGaussian:
        """N(ĝ, P^g), P^g = J diag(P) Jᵀ; diagonal if the whole selection is one layer that returns the logits."""
        parts = _by_layer(derivative)
        terms, rest = parts.terms, parts.explicit
        if len(terms) == 1 and terms[0].outer is None and not len(parts.rest):
            variance = terms[0].output_variance(self._variances(terms[0]))
            return LogitGaussian(mean, DiagonalCovariance(variance))
        covariances = [term.covariance(self._variances(term)) for term in terms]
        if len(parts.rest):
            half = rest * parts.rest.take(self.precision).rsqrt().to(rest.dtype)
            covariances.append(half @ half.mT)
        return LogitGaussian(mean, FullCovariance(torch.as_tensor(sum(covariances))))

    def joint_halves(
        self, derivative: Derivative | LayerwiseDerivative, rotation: Float[Tensor, "M M"]
    ) -> Iterator[Float[Tensor, "CM k"]]:
        """W_l = QᵀJ_l diag(P)^½ of each layer and of the rest, with Σ_l W_l W_lᵀ = QᵀR Q."""
        parts = _by_layer(derivative).of_rotated(rotation)
        yield (parts.explicit * parts.rest.take(self.precision).rsqrt()).flatten(0, 1)
        for term in parts.terms:
            yield from term.joint_halves(self._variances(term))

    def joint_covariance(self, derivative: Derivative | LayerwiseDerivative) -> Float[Tensor, "C M C M"]:
        """R_ij = J_i diag(P) J_jᵀ for all pairs of frames, in float64, without W."""
        parts = _by_layer(derivative)
        size, classes = parts.explicit.shape[:2]
        half = (parts.explicit * parts.rest.take(self.precision).rsqrt()).flatten(0, 1)
        covariance = (half @ half.T).reshape(size, classes, size, classes)
        for term in parts.terms:
            covariance += term.joint_covariance(self._variances(term))
        return covariance

    def _variances(self, term: SharedTerm) -> Float[Tensor, "d p"]:
        return gathered(term.layer, self.precision).reciprocal().to(term.inner.dtype)

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P)."""
        return normal * self.precision.rsqrt()

    def log_determinant_of_precision(self) -> float:
        return float(self.precision.log().sum())

    def to(self, device: torch.device) -> DiagonalFactor:
        return DiagonalFactor(self.precision.to(device), self.jitter)

    def written(self) -> tuple[Description, Tensors]:
        return {"jitter": self.jitter}, {"factor.precision": self.precision}

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> IndependentVariances:
        return IndependentVariances([gathered(layer, self.precision).reciprocal().to(dtype) for layer in layers], None)


class DiagonalStructure(Structure):
    """One variance for each parameter; layer by layer, unless there are only linear layers."""

    name = "diag"

    def cost(self, work: Workload) -> Cost:
        return cost(work)

    def sums(self, task: Task) -> Summand:
        return DiagonalAccumulator(task.selection.n_parameters, task.dtype, task.network.device)

    def derivatives(
        self, task: Task, batch: Batch, seeds: Seeds | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], Any]]:
        if task.route is not None and task.route.by_layer is not None:
            return task.route.by_layer.derivatives(task.network, batch, seeds, alone=task.selection)
        return super().derivatives(task, batch, seeds)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        contents.description.part("sum").choice("form", ("diag",))
        return DiagonalSum(contents.tensor("sum", task.selection.n_parameters))

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        precision = read_positive(contents, "factor.precision", len(prior_precision))
        return DiagonalFactor(precision, read_jitter(contents.description.part("factor")))


def _by_layer(derivative: Derivative | LayerwiseDerivative) -> LayerwiseDerivative:
    """The derivative, in either form, as layers and the columns of all other parameters."""
    if isinstance(derivative, LayerwiseDerivative):
        return derivative
    n = derivative.n_parameters
    if derivative.terms is None:
        return LayerwiseDerivative(n, (), Spans(((0, n),)), derivative.jacobian())
    inner = derivative.terms[0].inner
    no_columns = inner.new_zeros(len(inner), derivative.n_classes, 0)
    return LayerwiseDerivative(n, tuple(shared_terms(derivative.terms)), Spans(()), no_columns)


def _embedded(values: Float[Tensor, "n"]) -> Float[Tensor, "n n"]:
    n = len(values)
    require_memory(8 * n * n, values.device, what=f"The full {n:,} × {n:,} matrix", instead="Use logits and predict.")
    return torch.diag(values)


def cost(work: Workload) -> Cost:
    """n numbers of information and n precisions; beside them the derivatives of some samples."""
    n, s, classes = work.n, work.itemsize, work.classes
    posterior = 2 * 8 * n
    if work.is_factored:
        samples = min(work.batch, int(by_device(route.FACTORED_ROWS, work.device)))
        numbers = sum(t.uses * (2 * t.width + (0 if t.returns_logits else 3 * classes * t.outputs)) for t in work.terms)
        is_reused = any(term.uses > 1 for term in work.terms)
        pieces = int(2 * by_device(layers.JACOBIAN_BYTES, work.device)) if is_reused else 0
        transient = samples * numbers * s + pieces + 2 * s * max(term.size for term in work.terms)
        products = float(sum(t.uses * (t.size + classes * t.outputs) for t in work.terms))
        full = not (len(work.terms) == 1 and work.terms[0].returns_logits)
        seeds = float(classes if full else 0)
        input_products = products + (classes**2 * sum(t.outputs for t in work.terms) if full else 0)
    else:
        samples = samples_at_a_time(work, work.inner_size + classes * (work.outer_size + work.rest), classes)
        transient, full, seeds = by_layer_bytes(work, samples) + piece_bytes(work, samples), True, backward_passes(work)
        products = explicit_products(work) + classes * sum(t.uses * t.size for t in work.terms)
        input_products = products + classes**2 * n
    predict_bytes = posterior + transient + drawing_bytes(work, full=full)
    input_products += drawing_products(work, full=full)
    return Cost(
        posterior, posterior + transient, predict_bytes, products, 10.0 * n, input_products, (seeds, seeds), exact=False
    )
