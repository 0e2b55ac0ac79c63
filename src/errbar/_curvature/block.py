"""Exact within each layer, nothing between layers (sec:high-level).

The information matrix of the layers together is cut to its diagonal blocks, one for each module that owns parameters;
each block is the `_curvature.dense` structure of that module alone. P is then block-diagonal too, and
P^g = Σ_l J_l P_l J_lᵀ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._base.memory import require_memory
from errbar._base.triangles import read_symmetric, symmetric_array
from errbar._curvature import dense, packed
from errbar._curvature.dense import DenseAccumulator, DenseFactor, DenseSum
from errbar._curvature.fisher import Fisher, Weights
from errbar._curvature.structure import (
    Description,
    Factor,
    PairCoefficients,
    Refactorised,
    Structure,
    Sum,
    Summand,
    Tensors,
)
from errbar._curvature.task import Task
from errbar._curvature.workload import (
    ADDED_PRODUCTS,
    Cost,
    Workload,
    drawing_bytes,
    drawing_products,
    explicit_bytes,
    explicit_products,
    jacobian_samples,
)
from errbar._derivative.layers import LinearLayer, Spans
from errbar._derivative.route import Derivative
from errbar._distributed.team import Team
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._model.selection import Selection, owner
from errbar.errors import DamagedFileError


@dataclass(frozen=True)
class Block:
    """The selected parameters of one module."""

    name: str
    part: Spans

    def rebased(self, layer: LinearLayer) -> LinearLayer:
        """The layer with its positions counted from the start of the block."""
        weight, bias = layer.weight_start, layer.bias_start
        return replace(
            layer,
            weight_start=None if weight is None else self.part.index(weight),
            bias_start=None if bias is None else self.part.index(bias),
        )

    def restricted(self, derivative: Derivative) -> Derivative:
        """The derivative by the parameters of this block alone."""
        n, classes = len(self.part), derivative.n_classes
        if derivative.terms is None:
            return Derivative(n, classes, None, self.part.take(derivative.jacobian()))
        own_terms = [term for term in derivative.terms if term.layer.name == self.name]
        terms = tuple(replace(term, layer=self.rebased(term.layer)) for term in own_terms)
        return Derivative(n, classes, terms, None)


def blocks(selection: Selection) -> tuple[Block, ...]:
    """One block for each module; a parametrisation (weight norm) belongs to the module that it parametrises."""
    owners: dict[str, list[str]] = {}
    for name in selection.names:
        owners.setdefault(owner(name), []).append(name)
    return tuple(Block(module, Spans.of(selection, names)) for module, names in owners.items())


def _assembled(parts: Iterator[tuple[Block, Float[Tensor, "k k"]]], n: int, device: torch.device) -> Tensor:
    """The blocks as one matrix; refused where that cannot be held."""
    require_memory(8 * n * n, device, what=f"The full {n:,} × {n:,} matrix", instead="Use logits and predict.")
    whole = torch.zeros(n, n, dtype=torch.float64, device=device)
    for block, matrix in parts:
        positions = block.part.positions(device)
        whole[positions[:, None], positions[None, :]] = matrix
    return whole


@dataclass(frozen=True, eq=False)
class BlockSum:
    """Σ_n J_lᵀ Λ J_l for each block l, in float64; additive."""

    blocks: tuple[Block, ...]
    totals: tuple[DenseSum, ...]

    @property
    def n_parameters(self) -> int:
        return sum(len(block.part) for block in self.blocks)

    @property
    def device(self) -> torch.device:
        return self.totals[0].device

    def dense(self) -> Float[Tensor, "n n"]:
        matrices = (total.matrix for total in self.totals)
        return _assembled(zip(self.blocks, matrices, strict=True), self.n_parameters, self.device)

    def __add__(self, other: BlockSum) -> BlockSum:
        return BlockSum(self.blocks, tuple(a + b for a, b in zip(self.totals, other.totals, strict=True)))

    def __sub__(self, other: BlockSum) -> BlockSum:
        return BlockSum(self.blocks, tuple(a - b for a, b in zip(self.totals, other.totals, strict=True)))

    def __mul__(self, factor: float) -> BlockSum:
        return BlockSum(self.blocks, tuple(total * factor for total in self.totals))

    def to(self, device: torch.device) -> BlockSum:
        return BlockSum(self.blocks, tuple(total.to(device) for total in self.totals))

    def tolerance(self, dtype: torch.dtype) -> float:
        """How far below zero rounding may take an eigenvalue of a difference from this sum, computed in `dtype`."""
        return max(total.tolerance(dtype) for total in self.totals)

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Whether no eigenvalue is below −tolerance."""
        return all(total.is_positive_semidefinite(tolerance) for total in self.totals)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> BlockFactor:
        factors = [
            total.condition(block.part.take(prior_precision), limit)
            for block, total in zip(self.blocks, self.totals, strict=True)
        ]
        return BlockFactor(self.blocks, tuple(factors))

    def is_zero(self) -> bool:
        return all(total.is_zero() for total in self.totals)

    def reduced(self, has_data: Sequence[bool], team: Team) -> BlockSum:
        return BlockSum(self.blocks, tuple(total.reduced(has_data, team) for total in self.totals))

    def written(self) -> tuple[Description, Tensors]:
        arrays = {f"sum.{index}": symmetric_array(total.matrix) for index, total in enumerate(self.totals)}
        return {"form": "block"}, arrays


class BlockAccumulator:
    """Adds up batches; private to one pass over the data."""

    def __init__(self, selection: Selection, fisher: Fisher, dtype: torch.dtype, device: torch.device) -> None:
        self.blocks = blocks(selection)
        self.parts = [DenseAccumulator(len(block.part), fisher, dtype, device) for block in self.blocks]

    def add(self, weights: Weights, derivative: Derivative) -> None:
        for block, part in zip(self.blocks, self.parts, strict=True):
            part.add(weights, block.restricted(derivative))

    def finish(self) -> BlockSum:
        return BlockSum(self.blocks, tuple(part.finish() for part in self.parts))


class BlockFactor(Refactorised):
    """P_l = (Σ_l + diag λ_l)⁻¹ for each block."""

    def __init__(self, blocks: tuple[Block, ...], factors: tuple[DenseFactor, ...]) -> None:
        self.blocks = blocks
        self.factors = factors

    @property
    def jitter(self) -> float:
        """The largest jitter that any block needed."""
        return max(factor.jitter for factor in self.factors)

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        matrices = (factor.covariance for factor in self.factors)
        n = sum(len(block.part) for block in self.blocks)
        return _assembled(zip(self.blocks, matrices, strict=True), n, self.factors[0].prior_precision.device)

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Derivative) -> LogitGaussian:
        """N(ĝ, P^g), P^g = Σ_l J_l P_l J_lᵀ."""
        parts = zip(self.blocks, self.factors, strict=True)
        covariance = sum(factor.gaussian(mean, block.restricted(derivative)).covariance for block, factor in parts)
        return LogitGaussian(mean, FullCovariance(linalg.symmetric(torch.as_tensor(covariance))))

    def joint_halves(self, derivative: Derivative, rotation: Float[Tensor, "M M"]) -> Iterator[Float[Tensor, "CM k"]]:
        """W_l of each block, with Σ_l W_l W_lᵀ = QᵀR Q."""
        for block, factor in zip(self.blocks, self.factors, strict=True):
            yield from factor.joint_halves(block.restricted(derivative), rotation)

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P), in the order of the flat vector."""
        draws = torch.empty_like(normal)
        for block, factor in zip(self.blocks, self.factors, strict=True):
            draws[:, block.part.positions(normal.device)] = factor.sample(block.part.take(normal)).to(draws.dtype)
        return draws

    def log_determinant_of_precision(self) -> float:
        return sum(factor.log_determinant_of_precision() for factor in self.factors)

    def to(self, device: torch.device) -> BlockFactor:
        return BlockFactor(self.blocks, tuple(factor.to(device) for factor in self.factors))

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        parts = zip(self.blocks, self.factors, strict=True)
        return max(factor.rounding_share(block.part.take(prior_precision)) for block, factor in parts)

    def written(self) -> tuple[Description, Tensors]:
        pairs = [factor.written_as(f"factor.{index}") for index, factor in enumerate(self.factors)]
        return {"blocks": [small for small, _ in pairs]}, {k: v for _, arrays in pairs for k, v in arrays.items()}

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> PairCoefficients:
        by_name = {block.name: (block, factor) for block, factor in zip(self.blocks, self.factors, strict=True)}
        pairs = {}
        for index, layer in enumerate(layers):
            block, factor = by_name[layer.name]
            pairs[index, index] = packed.coefficients(factor.covariance, block.rebased(layer).positions(), None, dtype)
        return PairCoefficients(pairs)


class BlockStructure(Structure):
    """Exact within each layer."""

    name = "block"

    def cost(self, work: Workload) -> Cost:
        return cost(work)

    def sums(self, task: Task) -> Summand:
        return BlockAccumulator(task.selection, task.fisher_form, task.dtype, task.network.device)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        contents.description.part("sum").choice("form", ("block",))
        parts = blocks(task.selection)
        totals = [read_symmetric(contents, f"sum.{index}", len(block.part)) for index, block in enumerate(parts)]
        return BlockSum(parts, tuple(DenseSum(matrix) for matrix in totals))

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        parts = contents.description.part("factor").parts("blocks")
        if len(parts) != len(total.blocks):
            raise DamagedFileError(f"{contents.path} has {len(parts)} factors for {len(total.blocks)} blocks.")
        factors = [
            DenseFactor.read(contents, part, f"factor.{index}", own, block.part.take(prior_precision), limit)
            for index, (part, block, own) in enumerate(zip(parts, total.blocks, total.totals, strict=True))
        ]
        return BlockFactor(total.blocks, tuple(factors))


def cost(work: Workload) -> Cost:
    """The costs of `dense` for each module alone; derivatives are computed for all of them together."""
    if work.is_factored:
        parts = [dense.cost(work.of_module(module, size)) for module, size in work.modules]
        posterior = sum(part.posterior_bytes for part in parts)
        transient = max(part.fit_bytes - part.posterior_bytes // 2 for part in parts)
        draw_bytes = (len(parts) - 1) * drawing_bytes(work, full=True)
        draw_products = (len(parts) - 1) * drawing_products(work, full=True)
        return Cost(
            posterior,
            max(posterior // 2 + transient, posterior),
            sum(part.predict_bytes for part in parts) - draw_bytes,
            sum(part.sample_products for part in parts),
            sum(part.once_products for part in parts),
            sum(part.input_products for part in parts) - draw_products,
            _most(part.seeds for part in parts),
            exact=len(parts) == 1,
            first_products=sum(part.first_products for part in parts),
            draw_products=sum(part.draw_products for part in parts),
        )
    s, sizes = work.itemsize, [size for _, size in work.modules]
    squares = sum(size**2 for size in sizes)
    jacobian = jacobian_samples(work) * work.classes * work.n * s
    fit_bytes = max(16 * squares, 8 * squares + max(s * max(sizes) ** 2 + 2 * jacobian, explicit_bytes(work)))
    predict_bytes = 16 * squares + (s * squares if s < 8 else 0) + max(explicit_bytes(work), 3 * jacobian)
    products = work.classes * squares + ADDED_PRODUCTS * squares / jacobian_samples(work) + explicit_products(work)
    return Cost(
        16 * squares,
        fit_bytes,
        predict_bytes + drawing_bytes(work, full=True),
        products,
        sum(size**3 / 3 for size in sizes) + 10.0 * squares,
        work.classes * squares / 2 + explicit_products(work) + drawing_products(work, full=True),
        (float(work.classes), float(work.classes)),
        exact=len(sizes) == 1,
        draw_products=squares / 2,
    )


def _most(seeds: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first, second = (max(values) for values in zip(*seeds, strict=True))
    return first, second
